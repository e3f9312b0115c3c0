"""Loops over chunks that carry a state: most use their turn as an index alone, some do what only looks like that."""

from __future__ import annotations

from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.programs import Statement

INPUTS = ("x", "a", "state", "weight")


def draw_loops(draw: Draw) -> Drawn:
    """One or two loops over the chunks of ``x`` and ``a``, in a checkpoint, a function, or the program itself."""
    draw.grows = draw.grows or (draw.chance(0.4) and not draw.small and not draw.one_graph)
    chunks = 8 if draw.small else draw.mostly(9, 8, 12, 3, share=0.8)
    draw.need("sizes", f"ROWS, CHUNKS, WIDTH = {draw.mostly(2, 1)}, {chunks}, {draw.mostly(4, 1, 3)}")
    at = draw.mostly("[:, i]", "[:, i, :]", "[:, :, i]", "[..., i]", "[i, :]")
    inner = draw.inner(draw.twists / 3)
    inner.small = draw.small
    results = _loop(inner, at)
    how = draw.pick("inline", "inline", "inline", "function", "checkpoint")
    if how == "inline":
        for statement in inner.statements():
            draw.add(statement)
        draw.values += inner.values
    else:
        end = Statement(f"return ({''.join(f'{each}, ' for each in results)})")
        draw.prelude["looped"] = Statement(f"def looped({', '.join(INPUTS)}):", (*inner.statements(), end))
        call = f"looped({', '.join(INPUTS)})"
        if how == "checkpoint":
            call = f"checkpoint(looped, {', '.join(INPUTS)}, use_reentrant=False)"
        with draw.maybe_inside(0.1, "with torch.no_grad():", *_autocasts(draw)):
            draw.emit(f"{''.join(f'{each}, ' for each in results)} = {call}")
        draw.values += [Value(each, "float", 2) for each in results]
    if draw.chance(0.4):
        draw.emit(draw.pick(*BEHIND).format(results[0], last=results[-1]))
        draw.maybe_twist()
    draw.outputs += [each for each in results if each == results[0] or draw.chance(0.8)]
    draw.spoil("x.data[:1] = float('nan')")
    draw.spoil("a.data[..., -1] = float('inf')")
    draw.spoil("state.data[0] = float('nan')")
    return Drawn(_made(draw, at), INPUTS)


def _made(draw: Draw, at: str) -> tuple[Statement, ...]:
    sizes = {"[:, i]": "ROWS, chunks, WIDTH", "[i, :]": "chunks, ROWS, WIDTH"}
    shape = sizes.get(at, "ROWS, WIDTH, chunks" if at in ("[:, :, i]", "[..., i]") else "ROWS, chunks, WIDTH")

    def drawn(name: str, sizes: str, grad: str) -> Statement:
        text = f"torch.randn({sizes}, dtype=FLOAT, generator=g{draw.at})"
        return Statement(f"{name} = ({text} * 0.5){grad}")

    return (
        draw.generator,
        draw.size("chunks", "CHUNKS"),
        drawn("x", shape, draw.mostly(".requires_grad_()", "", share=0.9)),
        drawn("a", shape, draw.mostly(".requires_grad_()", "", share=0.8)),
        drawn("state", "ROWS, WIDTH", draw.mostly(".requires_grad_()", "", share=0.8)),
        drawn("weight", "WIDTH, WIDTH", ".requires_grad_()"),
    )


def _autocasts(draw: Draw) -> tuple[str, ...]:
    return (f"with torch.autocast({draw.device!r}, enabled=False):",)


class _Loop:
    """What is drawn of one loop: how a turn is read, ``count`` of them, and what is made in front of it."""

    def __init__(self, draw: Draw, at: str) -> None:
        self.draw, self.at = draw, at
        dim = {"[:, i]": "1", "[:, i, :]": "1", "[i, :]": "0"}.get(at, "-1")
        self.count = draw.mostly(f"x.shape[{dim}]", f"x.size({dim})", f"a.shape[{dim}]", "CHUNKS", share=0.75)
        self.states = ["state"]
        self.has_memory = draw.chance(0.3)
        self.written: list[str] = []
        self.appended: list[str] = []
        self.is_missed = draw.chance(0.15)

    def item(self, name: str) -> str:
        return f"{name}{self.at}"


def _loop(draw: Draw, at: str) -> list[str]:
    """The statements of a loop; gives the names of its results."""
    loop = _Loop(draw, at)
    draw.emit(draw.mostly("state = state.clone()", "state = state * 1", "state = state.tanh()", share=0.4))
    draw.values.append(Value("state", "float", 2))
    if draw.chance(0.4):
        draw.emit(f"other = {draw.pick('state.cos()', 'state * 0.5', 'torch.zeros_like(state)', 'state.detach() + 1')}")
        loop.states.append("other")
    if loop.has_memory:
        draw.emit(
            "memory = "
            + draw.pick("torch.zeros_like(state[..., None] * state[:, None])", "state[:, :, None] * state[:, None]")
        )
        loop.states.append("memory")
    if draw.chance(0.6):
        made = draw.pick(
            "torch.zeros_like(x)", "torch.empty_like(x)", "x.new_zeros(x.shape)", "torch.zeros_like(x * a)"
        )
        draw.emit(f"out = {made}")
        loop.written.append("out")
    if loop.is_missed and draw.chance(0.25):
        draw.emit("kept = []")
        loop.appended.append("kept")
    if draw.chance(0.3):
        draw.emit("gates = torch.sigmoid(a)")
        draw.values.append(Value("gates", "float", 3))
    draw.maybe_twist()
    miss = draw.pick(*MISSES) if loop.is_missed and not loop.appended else None
    draw.emit("count = 0") if miss and "count" in "".join(miss) else None
    gates = "gates" if any(value.name == "gates" for value in draw.values) else "a"
    with draw.block(f"for i in range({loop.count}):"):
        _body(draw, loop, gates, miss)
    if miss and miss[2]:
        draw.emit(miss[2])
    if loop.appended:
        draw.emit(f"kept = torch.stack(kept, {draw.pick('0', '1')})")
    results = [*loop.written, *loop.appended, *loop.states]
    if draw.chance(0.2):
        results.append("seen")
    return results


def _body(draw: Draw, loop: _Loop, gates: str, miss: tuple[str, str, str] | None) -> None:
    here = len(draw.values)
    x, a = loop.item("x"), loop.item(gates)
    if miss and miss[0]:
        draw.emit(miss[0].format(x=x, at=loop.at))
    draw.emit(f"seen = {draw.pick(*SEEN).format(x=x, a=a)}")
    draw.values.append(Value("seen", "float", 2))
    for _ in range(1 if draw.small else draw.integer(0, 2)):
        draw.emit(draw.pick(*STEPS).format(x=x, a=a))
    with draw.maybe_inside(0.04, f"with torch.autocast({draw.device!r}, enabled=False):", "with torch.no_grad():"):
        draw.emit("seen = seen.sin() + state * 0.3")
    if loop.has_memory:
        draw.emit(draw.pick(*MEMORY).format(x=x, a=a))
    draw.maybe_twist()
    _hand_on(draw, loop, x, a)
    for name in loop.written:
        value = draw.pick("seen", "seen + state", "state", "state.cos() * seen", "seen.detach() + state")
        draw.emit(f"{loop.item(name)} = {value}")
    for name in loop.appended:
        draw.emit(f"{name}.append({draw.pick('seen', 'state', 'state * 2')})")
    if miss and miss[1]:
        draw.emit(miss[1].format(x=x, at=loop.at))
    del draw.values[here:]


def _hand_on(draw: Draw, loop: _Loop, x: str, a: str) -> None:
    if "other" in loop.states and draw.chance(0.5):
        draw.emit(draw.pick(*PAIRS).format(x=x, a=a))
        return
    draw.emit(f"state = {draw.pick(*STATES).format(x=x, a=a)}")
    if "other" in loop.states:
        draw.emit(draw.pick("other = other * 0.5 + seen", "other = other.cos() + state", "other = seen * 1"))


SEEN = (
    "{x} - {a} * state",
    "{x} * {a}",
    "({x} + state) @ weight",
    "F.linear({x}, weight) + state",
    "torch.sigmoid({a}) * {x}",
    "torch.cat([{x}, {a}], -1).view(state.shape[0], 2, -1).sum(1)",
    "({x}).softmax(-1) + state",
)
STEPS = (
    "seen = torch.tanh(seen @ weight)",
    "seen = seen + F.silu(seen) * {a}",
    "seen = seen * torch.rsqrt(seen.square().mean(-1, keepdim=True) + 0.1)",
    "seen = F.layer_norm(seen, (seen.shape[-1],))",
    "seen = torch.where(seen > 0, seen, {x} * 0.1)",
    "seen = seen.cumsum(-1) * 0.3",
    "seen = seen.masked_fill(seen > 1, 0.5)",
    "seen = seen.t().contiguous().t()",
    "seen = seen.transpose(0, 1).reshape(seen.shape[0], -1)",
    "seen = torch.einsum('bk,kl->bl', seen, weight)",
    "seen = seen / x.shape[0] + state.detach()",
)
STATES = (
    "state * 0.9 + seen",
    "state * {a}.cos() + seen",
    "state + seen.sin() * 0.2",
    "torch.lerp(state, seen, 0.3)",
    "seen + 0",
    "(state + seen).tanh()",
    "torch.addcmul(state, seen, {x}, value=0.1)",
)
PAIRS = (
    "state, other = state * {a}.sin() + other, other * 0.5 + seen",
    "state, other = (state + other).cos(), torch.tanh(seen + other)",
    "other = other * 0.7 + state; state = (seen + other).tanh()",
)
MEMORY = (
    "memory = memory * 0.5 + seen[..., None] * {a}[:, None]; seen = seen + (memory @ {x}[..., None])[..., 0]",
    "memory = memory * torch.sigmoid({a}).unsqueeze(-1) + torch.einsum('bk,bv->bkv', seen, {x})",
    "seen = seen + (memory.mT @ seen.unsqueeze(-1)).squeeze(-1); memory = memory - seen[..., None] * seen[:, None] / 9",
)
MISSES = (
    # In front of what a step does, behind it, and behind the loop; most are no loops of equal steps.
    ("", "if i == 5: break", ""),
    ("if i == 0: continue", "", "seen = state"),
    ("", "state = state * 2 if i == 7 else state", ""),
    ("", "state = state * 2 if i == x.shape[1] - 1 else state", ""),
    ("", "count += 1", "state = state * count"),
    ("", "count = count + 1 if i < 1 else count", "state = state / (1 + count)"),
    ("", "state = state + i * 0.1", ""),
    ("", "state = state * (1 + 0.1 * (i % 2))", ""),
    ("", "state = state + torch.rand_like(state) * 0", ""),
    ("", "state = F.dropout(state, 0.3)", ""),
    ("", "state = state + weight[i % 1, :1]", ""),
    ("", "state = state + x{at} if i else state", ""),
    ("", "before = seen if i == 0 else before; state = state + before.sin()", ""),
    ("earlier = state if i < 1 else before", "before = earlier; state = state * 0.5 + earlier", ""),
    ("", "state = state + x[:, -i].sum() * 0.1", ""),
    ("", "state = state + x[:1, i : i + 1].sum()", ""),
    ("", "x = x * 1.1", ""),
    ("", "state.mul_(0.5)", ""),
    ("", "seen = seen.clone(); seen.mul_(0.5)", ""),
    ("", "a.detach()[:, 0] = 0.5", ""),
    ("", "last = i", "state = state * (1 + last)"),
    ("", "state = state + [0.1, 0.2, 0.1][i % 3]", ""),
    ("", "state = state.sum(-1, keepdim=True).expand_as(state)", ""),
    ("", "weight = weight.t()", ""),
    ("", "state = seen if state.shape[0] == i else state", ""),
    ("for j in range(2): state = state * 0.9", "", ""),
    ("", "memo = {{(0, 0): state}}; state = memo[0, 0] * 0.9", ""),
    ("", "state = state + (x * a).sum() * 0.01", ""),
)
BEHIND = (
    "{0} = {0} * 0.5 + {last}.mean()",
    "{0} = torch.tanh({0})",
    "{last} = {last} + {0}.sum()",
    "state = state @ weight",
)
