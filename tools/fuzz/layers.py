"""Programs that do the same again and again, each time with other weights: what differs must not be shared."""

from __future__ import annotations

from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.programs import Statement

_ARGUMENTS = ("hidden", "other", "weight", "scale", "table", "state", "eps")


def draw_layers(draw: Draw) -> Drawn:
    """Four to eight calls of one or two layers, inline or checkpointed, that update ``state`` or draw numbers."""
    return _layers(draw, are_modules=False)


def draw_regions(draw: Draw) -> Drawn:
    """The same, as modules that a loop calls, with something behind it that computes."""
    return _layers(draw, are_modules=True)


def _layers(draw: Draw, *, are_modules: bool) -> Drawn:
    count = 4 if draw.small else draw.integer(4, 8)
    draw.need("sizes", f"COUNT, TOKENS, WIDTH = {count}, {draw.mostly(4, 0, 1, 3)}, 2")
    updates = draw.chance(0.3)  # not in a checkpoint, which saves what it takes
    names = [_layer(draw, updates=updates) for _ in range(draw.mostly(1, 2))]
    draw.emit("hidden = (table.detach() * 1.5).requires_grad_()" if are_modules and draw.chance(0.2) else "hidden = x")
    draw.emit("other = x * 0.5")
    options: tuple[tuple[str, object], ...] = ()
    draw.values += [Value("hidden", "float", 2), Value("other", "float", 2), Value("table", "float", 2, is_leaf=True)]
    draw.emit("kept = []")
    weights = draw.mostly(
        "[stacked[i] for i in range(COUNT)]",
        "list(stacked.unbind(0))",
        "[stacked[i].t() for i in range(COUNT)]",
        "[stacked[0]] * COUNT",
        "[stacked[i] if i != 1 else stacked[i].t() for i in range(COUNT)]",
        "[stacked.view(-1, WIDTH)[WIDTH * i : WIDTH * (i + 1)] for i in range(COUNT)]",
        "[stacked[i].detach() if i < 2 else stacked[i] for i in range(COUNT)]",
        "[w * 2 for w in stacked]",
        share=0.4,
    )
    draw.emit(f"weights = {weights}")
    draw.maybe_twist()
    eps = draw.mostly("0.1", "0.1 * (1 + i % 2)", "0.1 if i != 2 else 0.2", "0.1 + 0.05 * i", share=0.6)
    state = draw.mostly("state[i]", "state[0]", "state[i // 2]", share=0.6)
    if are_modules:
        draw.need("modules", MODULES)
        region = "Region" if updates else draw.pick("Region", "Again", "Hooked", "Planned")
        modules = f"[{region}({names[0]}) if i % 3 else {region}({names[-1]}) for i in range(COUNT)]"
        # With a budget, each call of a layer has another role (small_steps.py).
        options = (("memory_budget", "1GiB") if region == "Planned" else ("regions", "auto"),)
        if region == "Hooked" and draw.chance(0.5):  # graphs end there anyway, so that layers are regions by default
            options = ()
        draw.prelude["MODEL"] = Statement(f"MODEL = torch.nn.ModuleList({modules})")
        draw.emit("model = MODEL")
    loop = "for i, layer in enumerate(model):" if are_modules else "for i in range(COUNT):"
    with draw.block(loop):
        name = (
            names[0]
            if len(names) == 1
            else draw.pick(f"({names[0]}, {names[1]})[i % 2]", f"({names[0]} if i < 3 else {names[1]})")
        )
        name = "layer" if are_modules else name
        given = f"hidden, other, weights[i], scale[i], table, {state}, {eps}"
        if not updates and not are_modules and draw.chance(0.4):
            draw.emit(f"hidden, other = checkpoint({name}, {given}, use_reentrant=False)")
        else:
            draw.emit(f"hidden, other = {name}({given})")
        if draw.chance(0.2):
            draw.emit(
                f"kept.append({draw.pick('hidden', 'hidden[:1]', 'hidden.t()', 'hidden.detach()', 'other.view(-1)')})"
            )
        if are_modules and draw.chance(0.1):
            draw.emit(draw.pick("if i == 5: break", "if i == 0: continue", "last = hidden"))
        draw.maybe_twist()
    for _ in range(draw.integer(0, 2) if are_modules else 0):
        draw.emit(draw.pick("hidden = torch.tanh(hidden) * other", "hidden = hidden.softmax(-1) + scale[0]"))
        draw.maybe_twist()
    draw.outputs += ["hidden", "other", "*kept"]
    draw.spoil("x.data[:1] = float('nan')")
    draw.spoil("stacked.data[1, 0] = float('inf')")
    draw.spoil("scale.data[-1] = float('nan')")
    made = (
        draw.generator,
        Statement("torch.manual_seed(seed)"),
        draw.size("LENGTH", "TOKENS"),
        Statement(f"x = torch.randn(LENGTH, WIDTH, dtype=FLOAT, generator=g{draw.at}).requires_grad_()"),
        Statement(
            f"stacked = (torch.randn(COUNT, WIDTH, WIDTH, dtype=FLOAT, generator=g{draw.at}) * 0.5).requires_grad_()"
        ),
        Statement(f"scale = torch.randn(COUNT, WIDTH, dtype=FLOAT, generator=g{draw.at}).requires_grad_()"),
        Statement(
            draw.mostly(
                f"table = torch.randn(LENGTH, WIDTH, dtype=FLOAT, generator=g{draw.at})",
                f"table = torch.randn(LENGTH, WIDTH, dtype=FLOAT, generator=g{draw.at}).requires_grad_()",
                f"table = torch.randn(WIDTH, LENGTH, dtype=FLOAT, generator=g{draw.at}).t()",
                "table = x.detach()",
            )
        ),
        Statement(f"state = torch.zeros(COUNT, WIDTH, dtype=FLOAT{draw.at})"),
    )
    # Of what one of several graphs returns, torch gives zeros to all that was not used.
    return Drawn(made, ("x", "stacked", "scale", "table", "state"), zero_for_none=are_modules, options=options)


def _layer(draw: Draw, *, updates: bool) -> str:
    """The name of a function of ``_ARGUMENTS`` in front of the program that returns ``hidden, other``."""
    inner = draw.inner(draw.twists / 4)
    inner.values += [
        Value("hidden", "float", 2),
        Value("other", "float", 2),
        Value("weight", "float", 2, is_leaf=True),
        Value("scale", "float", 1, is_leaf=True),
        Value("table", "float", 2, is_leaf=True),
        Value("state", "float", 1, is_leaf=True),
    ]
    for _ in range(3 if draw.small else inner.integer(4, 9)):
        inner.emit(inner.pick(*STEPS))
        inner.maybe_twist()
    if updates:
        inner.emit(inner.pick(*UPDATES))
    if inner.chance(0.25):
        inner.emit(inner.pick(*RANDOM))
    name = draw.name("layer_")
    draw.prelude[name] = Statement(
        f"def {name}({', '.join(_ARGUMENTS)}):", (*inner.statements(), Statement("return hidden, other"))
    )
    return name


MODULES = """
class Region(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner, self.layer = torch.nn.Identity(), layer

    def forward(self, hidden, other, weight, scale, table, state, eps):
        return self.layer(self.inner(hidden), other, weight, scale, table, state, eps)


class Again(Region):
    def forward(self, *given):
        return checkpoint(super().forward, *given, use_reentrant=False)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones((), dtype=FLOAT), requires_grad=False)

    def forward(self, x):
        return x * self.one


class Planned(Again):
    def __init__(self, layer):
        super().__init__(layer)
        self.inner = Scaled()


class Hooked(Region):
    def __init__(self, layer):
        super().__init__(layer)
        self.register_forward_pre_hook(torch._dynamo.disable(lambda module, given: None))

    def __call__(self, *given):
        return checkpoint(super().__call__, *given, use_reentrant=False)
"""
STEPS = (
    "hidden = torch.tanh(hidden @ weight) * scale",
    "hidden = hidden + F.silu(F.linear(hidden, weight, scale)) * table",
    "hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)",
    "hidden, other = other, hidden + other * eps",
    "other = torch.sigmoid(other) * table.cos() + hidden.detach()",
    "hidden = F.layer_norm(hidden, (hidden.shape[-1],), scale, None, eps)",
    "hidden = torch.cat([hidden, other], -1).view(hidden.shape[0], 2, hidden.shape[1]).sum(1)",
    "first, second = (hidden @ weight).chunk(2, -1); other = other + torch.cat([second.sin(), first.cos()], -1)",
    "hidden = hidden.t().contiguous().t() + scale.expand_as(hidden)",
    "hidden = F.scaled_dot_product_attention(hidden[None, None], other[None, None], table[None, None])[0, 0] + other",
    "hidden = hidden.softmax(-1) + hidden.cumsum(0) * eps",
    "other = hidden.select(1, 0)[:, None] * other.flip(-1)",
    "hidden = torch.where(hidden > eps, hidden, other * eps)",
    "other = other.clone(); other.mul_(eps).add_(hidden)",
    "hidden = hidden.clone(); hidden[..., :1] = table[..., :1] * scale[0]",
    "hidden = hidden.as_strided(hidden.shape, (1, hidden.shape[0])) * 1.0 if hidden.is_contiguous() else hidden",
    "hidden = hidden * hidden.shape[0] / (1 + hidden.shape[0])",
    "hidden = torch.exp(-hidden.square()) + torch.arange(hidden.shape[0], device=hidden.device)[:, None] * eps",
    "hidden = torch.index_select(hidden, 0, hidden[:, 0].argsort()) + other",
)
UPDATES = (
    "state.mul_(0.9).add_(hidden.detach().sum(0))",
    "state.add_(1); hidden = hidden + state",
    "state.copy_(scale.detach() * eps); hidden = hidden * (1 + state)",
    "hidden = hidden + state; state += eps",
)
RANDOM = (
    "hidden = F.dropout(hidden, 0.5)",
    "hidden = hidden + torch.rand_like(hidden) * other",
    "other = torch.bernoulli(torch.sigmoid(other.detach())) * hidden",
    "one = hidden[None, None]; hidden = F.scaled_dot_product_attention(one, one, one, dropout_p=0.3)[0, 0] + other",
)
