"""Programs with a projection to classes and losses of its rows; the logits may be returned, and read by the caller."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.loss_numbers import draw_number
from tools.fuzz.loss_reads import draw_reads
from tools.fuzz.programs import Statement

INPUTS = ("hidden", "weight", "bias", "down", "up", "gain", "target", "class_weight", "mask")


@dataclass(frozen=True)
class Rows:
    """Logits ``[*rows, V]``, and the classes wanted of them, ``[*rows]``."""

    logits: str
    target: str
    dims: int


def draw_losses(draw: Draw) -> Drawn:
    """One or two heads with losses, compiled together with what reads them, or alone."""
    draw.need("chunks", CHUNKS)
    sizes = (draw.mostly(2, 1, 3), draw.mostly(5, 1, 2, 8), 3, draw.mostly(7, 1, 2, 11))
    if draw.chance(0.03):
        sizes = (0, *sizes[1:]) if draw.chance(0.5) else (sizes[0], 0, *sizes[2:])
    draw.need("sizes", "BATCH, LENGTH, SIZE, CLASSES = " + ", ".join(map(str, sizes)))
    draw.late = 0.8  # logits that are returned may wait for who reads them
    draw.set("mock.patch.dict(LIMITS, cpu=ChunkLimits(target_bytes=1, least_rows=4, multiple=4))")
    if draw.one_graph or draw.chance(0.4):
        _offer_inputs(draw)
        losses, logits = _model(draw)
        draw.outputs += [*losses, *logits]
        _offer_spoils(draw, draw.statements())
        return Drawn(_made(draw), INPUTS)
    inner = draw.inner()
    _offer_inputs(inner)
    losses, logits = _model(inner)
    # Mostly they are: what is returned is what this form of a program is about.
    if not logits and draw.chance(0.8):
        logits = [next(value.name for value in inner.values if value.name.startswith("logits"))]
    _offer_spoils(draw, inner.statements())
    returned = list(dict.fromkeys([*losses, *logits, *inner.outputs]))
    end = Statement(f"return ({''.join(name + ', ' for name in returned)})")
    draw.prelude["model"] = Statement(f"def model({', '.join(INPUTS)}):", (*inner.statements(), end))
    draw.precision = inner.precision
    with draw.maybe_inside(0.05, "with torch.no_grad():"):
        draw.emit(f"{', '.join(returned)}, = model({', '.join(INPUTS)})")
    dims = {value.name: value.dims for value in inner.values}
    readers = draw_reads(draw, losses, [(name, dims.get(name, 3)) for name in logits])
    draw.outputs += losses
    draw.outputs += [name for name in logits if draw.chance(0.6)]
    return Drawn(_made(draw), INPUTS, ("model", *readers))


def _offer_inputs(draw: Draw) -> None:
    draw.values += [Value(name, "float", dims, is_leaf=True) for name, dims in (("hidden", 3), ("weight", 2))]
    draw.values += [Value("bias", "float", 1, is_leaf=True), Value("target", "int", 2), Value("mask", "bool", 2)]


def _offer_spoils(draw: Draw, body: tuple[Statement, ...]) -> None:
    """Numbers that are not finite; docs/chunk_loss.md, "What differs", has what they may do."""
    text = "\n".join(line for statement in body for line in statement.lines())
    # Rows that nothing picks have gradients of zero, in eager times NaN: for weights, and for all under a soft cap.
    of_weights, of_gain, everywhere = [], [], ("gradient",)
    if re.search(r"target\d+ = .*(\[|narrow|select|split|chunk|unbind)", text):
        of_weights = [_gradient_of(name) for name in ("weight", "down", "up", "gain")]
        of_gain = [_gradient_of("gain")]
    unread = draw.device != "cpu" or bool(of_gain and "tanh" in text)  # a GPU does not read ignored rows either
    draw.spoil("hidden.data[:, 1:2] = float('nan')", *(everywhere if unread else of_weights), is_unread=True)
    draw.spoil("bias.data[:1] = float('nan')", *(everywhere if unread else of_gain), is_unread=True)
    draw.spoil("target.fill_(-100)")
    draw.spoil("class_weight[-1] = float('inf')")
    draw.spoil("bias.data[-1:] = float('-inf')", *(everywhere if "entr(" in text else ()))


def _gradient_of(name: str) -> str:
    return f"gradient of input {INPUTS.index(name)}"


def _made(draw: Draw) -> tuple[Statement, ...]:
    def parameter(name: str, *sizes: str) -> Statement:
        drawn = f"torch.randn({', '.join(sizes) or '()'}, dtype=FLOAT, generator=g{draw.at})"
        frozen = ", requires_grad=False" if draw.chance(0.15) else ""
        return Statement(f"{name} = torch.nn.Parameter({drawn}{frozen})")

    needs = ".requires_grad_()" if draw.chance(0.85) else ""
    ignored = draw.mostly(
        "target.view(-1)[::4] = -100", "pass", "target.fill_(-100)", "target[:, 1:] = -100", share=0.8
    )
    return (
        draw.generator,
        draw.size("T", "LENGTH"),
        Statement(f"hidden = torch.randn(BATCH, T, SIZE, dtype=FLOAT, generator=g{draw.at}){needs}"),
        parameter("weight", "CLASSES", "SIZE"),
        parameter("bias", "CLASSES"),
        parameter("down", "2", "SIZE"),
        parameter("up", "CLASSES", "2"),
        parameter("gain"),
        Statement(f"target = torch.randint(0, CLASSES, (BATCH, T), generator=g{draw.at})"),
        Statement(f"class_weight = torch.rand(CLASSES, dtype=FLOAT, generator=g{draw.at}) + 0.5"),
        Statement(
            draw.mostly("pass", "class_weight[::2] = 0", "class_weight[0] = 0", "class_weight.zero_()", share=0.5)
        ),
        Statement(f"mask = torch.rand(BATCH, T, generator=g{draw.at}) < 0.6"),
        Statement(ignored),
    )


def _model(draw: Draw) -> tuple[list[str], list[str]]:
    """The names of losses and of logits that are returned."""
    losses: list[str] = []
    returned: list[str] = []
    for _ in range(draw.mostly(1, 2, share=0.9)):
        rows = _head(draw)
        if draw.chance(0.25):
            returned.append(rows.logits)
        for _ in range(draw.mostly(0, 1, 1, 2)):
            rows = _step(draw, rows)
        if draw.chance(0.4):
            returned.append(rows.logits)
        shared = _picked(draw, rows) if draw.chance(0.4) else rows
        if shared is not rows and draw.chance(0.15):
            returned.append(shared.logits)
        losses += [_loss(draw, shared) for _ in range(draw.pick(1, 1, 1, 2, 3))]
    if len(losses) > 1 and draw.chance(0.5):
        factors = [draw.mostly("1", "0.1", "gain", "gain.detach()") for _ in losses]
        text = " + ".join(f"{loss}.double().sum() * {factor}" for loss, factor in zip(losses, factors, strict=True))
        losses = [draw.let("loss", text, "float", 0)]
    return losses, list(dict.fromkeys(returned))


def _loss(draw: Draw, rows: Rows) -> str:
    own = rows
    for _ in range(draw.pick(0, 0, 1, 1, 2)):
        own = _picked(draw, own)
    header = ("with torch.no_grad():", "with torch.set_grad_enabled(False):", "with torch.enable_grad():")
    with draw.maybe_inside(0.15, *header):
        text, dims = draw_number(draw, own.logits, own.target, own.dims)
        loss = draw.let("loss", text, "float", dims)
        if dims and draw.chance(0.5):
            kept = f"({own.target} != -100)"
            further = [f"{loss}.mean()", f"{loss}.sum() / 7", f"({loss} * gain).sum()", f"{loss}.pow(2).mean()"]
            if dims == own.dims - 1:
                further += [f"({loss} * {kept}).sum() / {kept}.sum().clamp(min=1)", f"{loss}[{kept}].sum()"]
            loss = draw.let("loss", draw.pick(*further), "float", 0)
    return loss


EMBEDDINGS = (
    "F.embedding(target.clamp(min=0), weight)",
    "F.embedding(target.clamp(min=0), weight, padding_idx=-1)",
    "F.embedding(target.clamp(min=0).int(), weight * gain, padding_idx=2)",
    "F.embedding(target.clamp(min=0), weight, scale_grad_by_freq=True)",
    "torch.ops.aten.embedding(weight.detach(), target.clamp(min=0)) + F.embedding(target.clamp(min=0), weight)",
    "F.embedding(target.clamp(min=0), weight).mul_(0.5)",
    "F.embedding(target.clamp(min=0), F.embedding(torch.arange(CLASSES, device=weight.device), weight))",
    "F.embedding(target.clamp(min=0), weight * gain, sparse=True)",
    "F.embedding(torch.nested.nested_tensor_from_jagged(target.clamp(min=0).flatten(), torch.tensor([0, 2, "
    "target.numel()], device=target.device)), weight).values().view(*target.shape, SIZE)",
)


def _head(draw: Draw) -> Rows:
    rows = draw.mostly(
        "hidden",
        "hidden.tanh()",
        "F.layer_norm(hidden, (SIZE,))",
        draw.pick(*EMBEDDINGS),
        "hidden * 2",
    )
    rows = draw.let("rows", rows, "float", 3)
    target, dims = "target", 3
    if draw.chance(0.2):
        flat = draw.pick("{0}.reshape(-1, {0}.shape[-1])", "{0}.flatten(0, 1)", "{0}.view(-1, SIZE)").format(rows)
        rows, target, dims = draw.let("rows", flat, "float", 2), draw.let("target", "target.reshape(-1)", "int", 1), 2
    if draw.chance(0.1):
        rows = draw.let("rows", f"{rows}{draw.pick('.detach()', '.clone()', '[:1]', '[1:]')}", "float", dims)
        if draw.chance(0.5):
            return _projected(draw, rows, target, dims)
        target = draw.let("target", f"{target}.expand(*{rows}.shape[:-1])", "int", dims - 1)
    return _projected(draw, rows, target, dims)


def _projected(draw: Draw, rows: str, target: str, dims: int) -> Rows:
    names = "btk"[3 - dims :]
    weight = draw.mostly(
        "weight",
        "weight.detach()",
        "weight.clone()",
        "(weight * gain)",
        "weight.data",
        "weight[:CLASSES]",
        "(weight * 1)",
        share=0.85,
    )
    linear = f"F.linear({rows}, {weight})"
    adapted = f"F.linear(F.linear({rows}, down), up)"
    text = draw.mostly(
        linear,
        f"F.linear({rows}, {weight}, bias)",
        f"F.linear({rows}, {weight}, bias)",
        f"F.linear(bias=bias, weight={weight}, input={rows})",
        f"{rows} @ {weight}.t()",
        f"{rows} @ {weight}.T + bias",
        f"bias + {linear}",
        f"{linear} + bias.view(*(1,) * {dims - 1}, -1)",
        f"torch.matmul({rows}, {weight}.transpose(0, 1))",
        f"torch.matmul(other={weight}.mT, input={rows})",
        f"torch.einsum('{names},vk->{names[:-1]}v', {rows}, {weight})",
        f"torch.einsum('vk,{names}->{names[:-1]}v', {weight}, {rows})",
        f"torch.addmm(bias, {rows}, {weight}.t())" if dims == 2 else f"F.linear({rows}, {weight}, bias)",
        f"{linear} + {adapted}",
        f"{linear} + {adapted} * 0.5",
        f"F.linear({rows}, {weight}, bias) + {adapted} * 0.5",
        f"{adapted} * 0.5 + {linear}",
        f"{linear} + {linear}",
        f"{linear} * 0.5 + F.linear({rows}, weight) * 2",
        f"F.linear({rows}, {weight} + up @ down)",
        share=0.3,
    )
    return Rows(draw.let("logits", text, "float", dims, plain=linear), target, dims)


def _step(draw: Draw, rows: Rows) -> Rows:
    z = rows.logits
    text = draw.pick(
        f"{z} * 1.5",
        f"0.5 * {z}",
        f"{z} / 0.7",
        f"-{z}",
        f"{z} * 2",
        f"torch.div({z}, 2)",
        f"torch.tanh({z} / 3) * 3",
        f"3 * ({z} / 3).tanh()",
        f"{z}.tanh()",
        f"{z}.float()",
        f"{z}.to(FLOAT)",
        f"{z}.clone()",
        f"{z}.contiguous()",
        f"{z} * gain",
        f"{z} * 0.0",
        f"{z} + 0",
        f"{z}.mul_(0.5)",
        f"{z}.div_(2)",
        f"{z} + bias",
    )
    if ".float()" in text:
        draw.precision = "float32"
    return Rows(draw.let("logits", text, "float", rows.dims), rows.target, rows.dims)


def _picked(draw: Draw, rows: Rows) -> Rows:
    """Some of the rows, or all in another layout."""
    y, target, dims = rows.logits, rows.target, rows.dims
    both: list[str] = [
        "{}[1:]",
        "{}[:-1]",
        "{}[::2]",
        "{}[{index}]",
        "{}.index_select(0, {index})",
        "{}.narrow(0, 0, 1)",
    ]
    same: list[str] = [f"{y}.detach()", f"{y}.clone()", f"{y}.contiguous()", f"{y}.unsqueeze(0).squeeze(0)"]
    same += [f"{y}.view({y}.shape)", f"{y}[...]", f"{y}.reshape({y}.shape)", f"{y}.data"]
    lower: list[str] = []
    if dims == 3:
        both += ["{}[:, : int(mask.sum(1).max())]", "{}[: int(mask[:, 0].sum())]"]
        both += ["{}.transpose(0, 1)", "{}.chunk(2, 0)[0]", "{}.split(1, 1)[-1]", "{}[:, -1:]", "{}[:, 1:]"]
        both += ["{}[:, {index}]", "{}[:, ::2]", "{}.swapaxes(0, 1)", "{}[:1, 1:]", "torch.narrow({}, 1, 0, 1)"]
        shifted = [(f"{y}[:, :-1]", f"{target}[:, 1:]"), (f"{y}[..., :-1, :]", f"{target}[..., 1:]")]
        shifted += [(f"{y}[:, :-1, :].contiguous()", f"{target}[:, 1:].contiguous()")]
        shifted += [(y, f"F.pad({target}, (0, 1), value=-100)[..., 1:]")]
        lower += ["{}.flatten(0, 1)", "{}[:, -1]", "{}[0]", "{}.select(1, 0)", "{}.unbind(0)[-1]"]
        flat = (f"{y}.reshape(-1, {y}.shape[-1])", f"{target}.reshape(-1)")
        kept = (f"{y}[{target} != -100]", f"{target}[{target} != -100]")
        how = draw.integer(0, 9)
        if how < 4:
            text, wanted = draw.pick(*shifted)
            return _rows(draw, text, wanted, 3)
        if how < 6:
            return _rows(draw, *(flat if how == 4 or draw.chance(0.8) else kept), 2)
    how = draw.integer(0, 5)
    if how < 2:
        return Rows(draw.let("logits", draw.pick(*same), "float", dims), target, dims)
    if how == 2 and lower:
        text = draw.pick(*lower)
        of_target = text if "flatten" not in text else "{}.reshape(-1)"
        return _rows(draw, text.format(y), of_target.format(target), 2)
    if dims < 2:
        return rows
    index = draw.pick(f"torch.tensor([0, 0]{draw.at})", f"torch.tensor([0]{draw.at})")
    text = draw.pick(*both)
    return _rows(draw, text.format(y, index=index), text.format(target, index=index), dims)


def _rows(draw: Draw, logits: str, target: str, dims: int) -> Rows:
    wanted = draw.let("target", target, "int", dims - 1)
    return Rows(draw.let("logits", logits, "float", dims), wanted, dims)


CHUNKS = """
from glue_compiler.ops.loss_chunks import LIMITS, ChunkLimits
"""
