"""What a caller does with a loss and logits that a compiled function returned."""

from __future__ import annotations

from collections.abc import Sequence

from tools.fuzz.draw import Draw, Value
from tools.fuzz.programs import Statement


def draw_reads(draw: Draw, losses: Sequence[str], logits: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Statements behind the call; ``logits``: names and dimensions. Returns functions to compile, too."""
    if logits and draw.chance(0.2):
        return _compiled_reads(draw, logits)
    draw.values += [Value(name, "float", dims) for name, dims in logits]
    for _ in range(draw.pick(0, 1, 1, 2, 3)):
        if draw.chance(0.25):
            _differentiate(draw, losses)
        _use(draw)
    return ()


def _compiled_reads(draw: Draw, logits: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The same in a function that is compiled on its own."""
    inner = draw.inner()
    inner.one_graph = True
    inner.values += [Value(name, "float", dims) for name, dims in logits]
    for _ in range(draw.pick(1, 1, 2, 3)):
        _use(inner)
    names = ", ".join(name for name, _ in logits)
    found = "".join(f"{name}, " for name in inner.outputs)
    end = Statement(f"return ({found})")
    inputs = f"{names}, target, mask, weight"
    draw.prelude["reader"] = Statement(f"def reader({inputs}):", (*inner.statements(), end))
    draw.emit(f"{found}= reader({inputs})" if found else f"reader({inputs})")
    draw.outputs += inner.outputs
    return ("reader",)


def _use(draw: Draw) -> None:
    if not draw.values:
        return
    name, dims = draw.pick(*((value.name, value.dims) for value in draw.values[-4:]))
    how = draw.integer(0, 9)
    if how < 6:
        _read(draw, name, dims)
    elif how < 8:
        _alias(draw, name, dims)
    else:
        _write(draw, name, dims)


def _differentiate(draw: Draw, losses: Sequence[str]) -> None:
    loss = draw.pick(*losses)
    wanted = "[value for value in (hidden, weight, bias) if value.requires_grad]"
    draw.set("torch._functorch.config.patch(donated_buffer=False)")  # else no graph may be kept
    gradient = draw.name("gradient")
    draw.emit(f"{gradient} = None")
    with draw.block(f"if {loss}.requires_grad:"):
        found = f"torch.autograd.grad({loss}.sum(), {wanted}, retain_graph=True, allow_unused=True)"
        draw.emit(f"{gradient} = ({found} or (None,))[0]")
    draw.outputs.append(gradient)


def _read(draw: Draw, name: str, dims: int) -> None:
    options = [
        f"{name} * 2",
        f"{name}.sum()",
        f"{name}.sum(-1)",
        f"{name}.clone()",
        f"{name}.double()",
        f"{name}.argmax(-1)",
        f"{name}.softmax(-1)",
        f"{name}.log_softmax(-1)",
        f"{name}.logsumexp(-1)",
        f"{name}.max(-1).values",
        f"{name}.topk(1, -1).values",
        f"{name}.detach() + 1",
        f"{name}.cpu()",
        f"{name}.to(torch.float64)",
        f"{name}.flatten()",
        f"{name}.exp().mean()",
        f"{name}.contiguous()",
        f"torch.cat([{name}, {name}])",
        f"torch.stack([{name}, {name}.detach()])",
        f"torch.from_numpy({name}.detach().double().cpu().numpy())",
        f"torch.tensor({name}.tolist(), dtype=torch.float64)",
        f"copy.deepcopy({name}.detach())",
        f"{name}.where({name} > 0, 0.0)",
        f"{name}.masked_fill({name} < 0, 0.0)",
        f"{name}.new_zeros(2)",
        f"torch.zeros_like({name})",
        f"{name}.requires_grad",
        f"{name}.is_leaf",
        f"tuple({name}.shape)",
        f"{name}.stride()",
        f"{name}.is_contiguous()",
        f"{name}.std()",
        f"{name}.unique().numel() > 1",
        f"F.kl_div({name}.log_softmax(-1), {name}.detach().softmax(-1), reduction='sum')",
        f"({name} == {name}.max()).sum()",
        f"{name}.abs().max().item()",
        f"{name}[..., 0]",
        f"{name}[..., :1]",
    ]
    if dims > 1:
        options += [f"{name}[0]", f"{name}[-1:]", f"{name}.mT", f"{name}.transpose(0, 1)", f"{name}.unbind(0)[0]"]
        options += [f"{name}.index_select(0, torch.tensor([0]{draw.at}))", f"{name}[torch.tensor([0, 0]{draw.at})]"]
        options += [f"{name} @ weight", f"{name}.expand(2, *{name}.shape)", f"{name}.repeat(2, *(1,) * {dims - 1})"]
    if dims == 3:
        loss = f"F.cross_entropy({name}.flatten(0, 1), target.flatten())"
        options += [loss, loss, f"F.cross_entropy({name}.transpose(1, 2), target, reduction='sum')"]
        options += [f"{name}[:, -1]", f"{name}[:, :-1]", f"{name}[mask]", f"{name}[:, 1:].argmax(-1)"]
    if draw.one_graph:
        options = [each for each in options if not any(part in each for part in ("numpy", "tolist", "item()", "copy"))]
    new = draw.name("read")
    # In a graph, views made in inference mode leave torch's dispatcher broken, with aot_eager too.
    headers = ["with torch.no_grad():"] + ["with torch.inference_mode():"] * (not draw.one_graph)
    with draw.maybe_inside(0.15, *headers):
        draw.emit(f"{new} = {draw.pick(*options)}")
    draw.outputs.append(new)


def _alias(draw: Draw, name: str, dims: int) -> None:
    """A view or a copy, which a later statement reads or writes."""
    options = [
        (f"{name}.detach()", dims),
        (f"{name}.clone()", dims),
        (f"{name}.float().to({name}.dtype)" if draw.precision != "float64" else f"{name}.to(torch.float64)", dims),
        (f"{name}.view_as({name})", dims),
        (f"{name}.unsqueeze(0)", dims + 1),
        (f"{name}[...]", dims),
        (f"{name}.data", dims),
        (f"{name}.contiguous()", dims),
        (f"{name}[..., 1:]", dims),
        (f"{name}.reshape(-1)", 1),
    ]
    if dims > 1:
        options += [(f"{name}[:1]", dims), (f"{name}[-1]", dims - 1), (f"{name}.narrow(0, 0, 1)", dims)]
        options += [(f"{name}.transpose(0, -1)", dims), (f"{name}.split(1)[0]", dims), (f"{name}.mT", dims)]
    if dims == 3:
        options += [(f"{name}[:, -1]", 2), (f"{name}.flatten(0, 1)", 2), (f"{name}[:, ::2]", 3)]
        options += [(f"{name}.view(-1, {name}.shape[-1])", 2), (f"{name}.permute(1, 0, 2)", 3)]
    text, found = draw.pick(*options)
    new = draw.name("alias")
    with draw.maybe_inside(0.1, "with torch.no_grad():"):
        draw.emit(f"{new} = {text}")
    draw.values.append(Value(new, "float", found))
    if draw.chance(0.6):
        draw.outputs.append(new)


def _write(draw: Draw, name: str, dims: int) -> None:
    options = [
        f"{name}.mul_(2)",
        f"{name}.add_(1)",
        f"{name}.div_(2)",
        f"{name}[..., 0] = 0.5",
        f"{name}.clamp_(max=0.5)",
        f"{name}.detach().zero_()",
        f"{name}.masked_fill_({name} > 0, 0.5)",
        f"{name}.copy_({name}.flip(-1))",
        f"{name} -= 1",
        f"{name}.exp_()",
        f"{name}.zero_()",
        f"{name}.register_hook(lambda gradient: gradient * 3) if {name}.requires_grad else None",
        f"{name}.requires_grad_({name}.requires_grad)",
    ]
    if dims > 1:
        options += [f"{name}[0] = 0.25", f"{name}[:1].mul_(3)", f"{name}[-1].add_(1)"]
    with draw.maybe_inside(0.2, "with torch.no_grad():"):
        draw.emit(draw.pick(*options))
