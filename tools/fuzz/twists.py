"""Statements that may stand anywhere and break a proof that does not look: writes, aliases, casts, modes, state."""

from __future__ import annotations

from tools.fuzz.draw import Draw, Value


def twist(draw: Draw) -> None:
    """Emit one."""
    value = _value(draw)
    if value is None:
        return
    chosen = draw.random.choices(TWISTS, [weight for _, weight in WEIGHTED])[0]
    chosen(draw, value)


def _value(draw: Draw) -> Value | None:
    """A value of now, mostly a young one and rather one of a mask or of ids than a float."""
    if not draw.values:
        return None
    young = draw.values[-4:] if draw.chance(0.6) else draw.values
    found = draw.pick(*young)
    return found if found.dtype != "float" or draw.chance(0.5) else draw.pick(*young)


def write(draw: Draw, value: Value) -> None:
    if value.is_leaf:
        if draw.chance(0.5):  # as an optimiser or an average of weights does
            draw.emit(f"{value.name}.{draw.pick('data', 'detach()')}.{draw.pick('mul_(0.5)', 'clamp_(max=0.5)')}")
        return
    text = _write_of(draw, value.name, value.dtype, value.dims)
    with draw.maybe_inside(0.2 if value.dtype == "float" else 0.05, "with torch.no_grad():"):
        draw.emit(text)


def _write_of(draw: Draw, name: str, dtype: str, dims: int) -> str:
    any_dtype = [f"{name}.copy_({name}.clone())"]
    if dims:
        number = {"bool": draw.pick("False", "True"), "int": draw.pick("0", "1", "2"), "float": "0.5"}[dtype]
        any_dtype += [
            f"{name}[0] = {number}",
            f"{name}[..., 0] = {number}",
            f"{name}[..., -1:] = {number}",
            f"{name}[1:] = {number}",
            f"{name}.copy_({name}.flip(-1))",
            f"{name}.index_fill_(0, torch.tensor([0]{draw.at}), {number})",
            f"{name}.index_put_((torch.tensor([0]{draw.at}),), torch.tensor({number}, dtype={name}.dtype{draw.at}))",
            f"{name}.select(0, 0).fill_({number})",
            f"{name}.view(-1)[:2] = {number}",
            f"{name}.data[0] = {number}",
            f"{name}[{name} > 0] = {number}",
            f"operator.setitem({name}, 0, {number})",
        ]
    by_dtype = {
        "bool": [
            f"{name}.logical_not_()",
            f"{name}.fill_(True)",
            f"{name}.zero_()",
            f"{name}.bitwise_xor_(torch.tensor(True{draw.at}))",
            f"torch.logical_not({name}, out={name})",
        ],
        "int": [
            f"{name}.add_(1)",
            f"{name}.add_(1, alpha=2)",
            f"{name}.mul_(2)",
            f"{name}.clamp_(max=1)",
            f"{name}.zero_()",
            f"{name}.data.add_(1)",
            f"{name}.detach().add_(1)",
            f"{name} += 1",
            f"torch.add({name}, 1, out={name})",
            f"{name}.sub_(1)",
            f"{name}.bitwise_or_(1)",
        ],
        "float": [
            f"{name}.mul_(0.5)",
            f"{name}.add_(0.25)",
            f"{name}.clamp_(max=0.5)",
            f"{name}.data.mul_(0.5)",
            f"{name}.detach().zero_()",
            f"{name} *= 0.5",
            f"{name}.masked_fill_({name} > 1, 0.5)",
            f"F.relu({name}, inplace=True)",
        ],
    }[dtype]
    return draw.pick(draw.pick(*any_dtype), draw.pick(*by_dtype), draw.pick(*by_dtype))


def alias(draw: Draw, value: Value) -> None:
    """Another look at the same memory, which a later twist may write through."""
    name, dims = value.name, value.dims
    if value.is_leaf:
        return
    options = [
        (f"{name}.detach()", dims),
        (f"{name}.view_as({name})", dims),
        (f"{name}[...]", dims),
        (f"{name}.data", dims),
        (f"{name}.unsqueeze(0)", dims + 1),
        (f"{name}.expand(2, *{name}.shape)[0]", dims),
    ]
    if dims:
        options += [
            (f"{name}[:2]", dims),
            (f"{name}.reshape(-1)", 1),
            (f"{name}[..., 1:]", dims),
            (f"{name}.as_strided((1,), (1,))", 1),
            (f"{name}.narrow(0, 0, 1)", dims),
            (f"{name}.unbind(0)[0]", dims - 1),
        ]
    if dims > 1:
        options += [(f"{name}.transpose(0, 1)", dims), (f"{name}.mT", dims)]
    text, dims = draw.pick(*options)
    new = draw.name("alias")
    draw.emit(f"{new} = {text}")
    draw.values.append(Value(new, value.dtype, dims))
    if draw.chance(0.5):
        write(draw, draw.values[-1])


def cast(draw: Draw, value: Value) -> None:
    """The same name, through another dtype or layout."""
    name = value.name
    by_dtype = {
        "bool": [
            f"{name}.int().bool()",
            f"{name}.to(torch.int8) != 0",
            f"{name}.view(torch.uint8).bool()",
            f"{name}.view(torch.int8).view(torch.bool)",
            f"{name} & True",
            f"{name}.float().bool()",
        ],
        "int": [
            f"{name}.int()",
            f"{name}.to(torch.int8).to({name}.dtype)",
            f"{name}.half().to({name}.dtype)",
            f"{name}.bool().to({name}.dtype)",
            f"{name}.to(torch.bfloat16).to({name}.dtype)",
            f"{name} % 3",
            f"{name}.clamp(0, 2)",
            f"{name}.to(torch.int16)",
            f"{name}.float().to({name}.dtype)",
            f"{name}.abs()",
            f"-{name}",
        ],
        "float": [
            f"{name}.half().to({name}.dtype)",
            f"{name}.float().to({name}.dtype)",
            f"{name}.to(torch.bfloat16).to({name}.dtype)",
            f"{name} * 1",
            f"{name} + 0",
            f"{name}.type_as({name})",
            f"{name}.to({name})",
            f"{name}.detach()",
            f"{name}.round(decimals=1)",
            f"{name}.clone()",
        ],
    }[value.dtype]
    any_dtype = [
        f"{name}.clone()",
        f"{name}.contiguous()",
        f"{name}.view({name}.dtype)",
        f"{name}.to({name}.device)",
        f"torch.clone(input={name})",
        f"{name}.roll(0)",
    ]
    if value.dims > 1:
        any_dtype += [
            f"{name}.transpose(0, 1).contiguous().transpose(0, 1)",
            f"{name}.flip(-1).flip(-1)",
            f"{name}.flip(-1)",
            f"{name}.roll(1, -1)",
        ]
    draw.emit(f"{name} = {draw.pick(draw.pick(*any_dtype), draw.pick(*by_dtype), draw.pick(*by_dtype))}")
    if value.is_leaf:  # the name is another tensor from here on
        draw.values = [Value(v.name, v.dtype, v.dims) if v is value else v for v in draw.values]


def opaque(draw: Draw, value: Value) -> None:
    """Code that a compiler cannot look into, which may write."""
    name = value.name
    if value.dtype == "float" and draw.chance(0.4):
        function, text = draw.pick(*FUNCTIONS.items())
        draw.need(function, text)
        draw.emit(f"{name} = {function}.apply({name})")
        return
    helper, text = draw.pick(*OPAQUE.items())
    if value.is_leaf and helper != "looked_at":
        return
    draw.need("operators", OPERATORS)
    draw.need(helper, text)
    with draw.maybe_inside(1.0 if value.dtype == "float" and helper != "looked_at" else 0.0, "with torch.no_grad():"):
        draw.emit(f"{name} = {helper}({name})" if helper == "looked_at" else f"{helper}({name})")


def state(draw: Draw, value: Value) -> None:
    """Python state that a call changes."""
    draw.need("STATE", STATE)
    draw.uses_state = True
    draw.emit(
        draw.pick(
            "STATE.calls += 1",
            "STATE.seen.append(len(STATE.seen))",
            "STATE.named['n'] = STATE.named.get('n', 0) + 1",
            "next(STATE.numbers)",
            "STATE.last = next(STATE.numbers)",
            "counted()",
            "STATE.names.add(STATE.calls)",
            "STATE.named.setdefault('k', []).append(1)",
            "setattr(STATE, 'calls', STATE.calls + 1)",
            f"STATE.shape = tuple({value.name}.shape)",
        )
    )


def read(draw: Draw, value: Value) -> None:
    """A further output."""
    if value.dtype == "float" and draw.chance(0.5):
        new = draw.name("extra")
        draw.emit(f"{new} = {value.name}" + draw.pick(".sum()", " * 2", ".detach().clone()", ".clone()", ".mean()"))
        draw.outputs.append(new)
    else:
        draw.outputs.append(value.name)


def mode(draw: Draw, value: Value) -> None:
    """The next statement under another grad mode or autocast."""
    name = value.name
    header = draw.pick(
        "with torch.no_grad():",
        "with torch.no_grad():",
        "with torch.enable_grad():",
        "with torch.set_grad_enabled(False):",
        f"with torch.autocast({draw.device!r}, dtype=torch.bfloat16):",
        f"with torch.autocast({draw.device!r}, enabled=False):",
        "with torch.inference_mode():",
    )
    with draw.block(header):
        draw.emit(f"{name} = {draw.pick(f'{name}.clone()', f'{name} * 1', f'{name}.view_as({name})')}")


def shadow(draw: Draw, value: Value) -> None:
    """An equal value made once more, maybe written."""
    if value.is_leaf:
        return
    new = draw.name("copy")
    draw.emit(f"{new} = {value.name}.clone()")
    write(draw, Value(new, value.dtype, value.dims))
    draw.emit(f"{value.name} = {new}")


WEIGHTED = ((write, 8), (alias, 4), (cast, 5), (opaque, 2), (state, 1), (read, 2), (mode, 2), (shadow, 1))
TWISTS = [each for each, _ in WEIGHTED]

OPERATORS = """
if not hasattr(torch.ops.fuzzed, "write"):

    @torch.library.custom_op("fuzzed::write", mutates_args={"x"})
    def _write(x: torch.Tensor) -> None:
        x.copy_(x.flip(-1)) if x.dim() else x.zero_()

    @torch.library.custom_op("fuzzed::look", mutates_args=())
    def _look(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    torch.ops.fuzzed.look.default
    _look.register_fake(lambda x: x.clone())
    _look.register_autograd(lambda ctx, gradient: gradient)
"""
OPAQUE = {
    "written_by_an_operator": "def written_by_an_operator(x):\n    torch.ops.fuzzed.write(x)",
    "written_out_of_sight": (
        "@torch.compiler.allow_in_graph\ndef written_out_of_sight(x):\n    with torch.no_grad():\n"
        "        x.copy_(x.flip(-1)) if x.dim() else x.zero_()\n    return x"
    ),
    "looked_at": "def looked_at(x):\n    return torch.ops.fuzzed.look(x)",
    "broken_off": (
        "@torch.compiler.disable\ndef broken_off(x):\n    with torch.no_grad():\n"
        "        x.copy_(x.flip(-1)) if x.dim() else x.zero_()"
    ),
}
FUNCTIONS = {
    "Doubled": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3
""",
    # Runs only for gradients whose strides are those of eager.
    "Flattened": """
class Flattened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.view(-1) * 3).view(gradient.shape)
""",
}
STATE = """
class State:
    def __init__(self):
        self.calls, self.last, self.shape = 0, None, None
        self.seen, self.named, self.names, self.numbers = [], {}, set(), iter(range(100))

    def __repr__(self):
        number = next(copy.copy(self.numbers))
        return f"{self.calls} {self.last} {self.shape} {self.seen} {self.named} {self.names} {number} {COUNT}"


STATE, COUNT = State(), 0


def counted():
    global COUNT
    COUNT += 1
"""
