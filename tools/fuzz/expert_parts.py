"""What loops over experts are made of: rows, bodies, sums, and what Python counts meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from tools.fuzz import spellings
from tools.fuzz.draw import Draw, Value
from tools.fuzz.equivalents import INDICES, MASKS, SUMS
from tools.fuzz.twists import state


@dataclass
class Loop:
    """What the parts of one program agree on.

    Attributes:
        stacked: the weights of all experts are one tensor; else a list of tensors.
        sentinel: the mask has a class more, for "no expert".
    """

    draw: Draw
    experts: int
    top_k: int
    width: int
    inner: int
    stacked: bool
    sentinel: bool

    @property
    def classes(self) -> str:
        return "E + 1" if self.sentinel else "E"


def rows_of(loop: Loop, selected: str, mask: str | None, e: str) -> tuple[str, str]:
    """(token, slot) names of the rows of expert ``e``; emitted into the loop."""
    draw = loop.draw
    token, slot = draw.name("token"), draw.name("slot")
    if mask is not None:
        of = f"{mask}[{e}]"
        draw.emit(
            f"{slot}, {token} = {found(draw, of)}",
            f"{slot}, {token} = torch.where({of})",
        )
    else:
        masks = [mask.format(selected=selected, e=e) for mask in MASKS if loop.classes == "E" or "one_hot" not in mask]
        of = draw.mostly(spellings.binary(draw, "eq", selected, e), *masks)
        indices = draw.mostly(*INDICES).format(mask=of, token=token, slot=slot)
        draw.emit(indices, f"{token}, {slot} = torch.where({selected} == {e})")
    draw.values += [Value(token, "int", 1), Value(slot, "int", 1)]
    draw.maybe_twist()
    return token, slot


def found(draw: Draw, condition: str) -> str:
    """The indices of what is true."""
    return draw.mostly(
        f"torch.where({condition})",
        f"{condition}.nonzero(as_tuple=True)",
        f"torch.nonzero({condition}, as_tuple=True)",
        f"{condition}.nonzero().t()",
        f"torch.nonzero({condition}).unbind(-1)",
        f"torch.where(condition={condition})",
    )


def expert_body(loop: Loop, rows: str, e: str) -> str:
    """An expert: the name of its results for the rows ``rows``."""
    draw = loop.draw
    up, down, bias = f"up[{e}]", f"down[{e}]", f"bias[{e}]"
    act = draw.mostly(
        "F.silu({})",
        "F.gelu({})",
        "{}.relu()",
        "torch.tanh({})",
        "{}.clamp(min=-1.0, max=1.0)",
        "torch.sigmoid({}) * 0.5",
        "F.softmax({}, dim=-1)",
        "{}.square()",
    )
    how = draw.integer(0, 8)
    if how < 4:
        gates = draw.name("gate")
        draw.emit(f"{gates}, up_of_it = {_linear(draw, rows, up)}.chunk(2, dim=-1)")
        inner = draw.let("inner", f"{act.format(gates)} * up_of_it", "float", 2)
        done = _linear(draw, inner, down)
    elif how < 6:
        inner = draw.let("inner", act.format(_linear(draw, rows, f"{up}[:INNER]")), "float", 2)
        done = _linear(draw, inner, down)
    elif how < 7:
        done = f"{rows} * {bias}"
    elif how < 8:
        done = draw.pick(
            f"F.layer_norm({rows}, (WIDTH,))",
            f"F.layer_norm({rows}, (WIDTH,), {bias})",
            f"torch.einsum('nw,w->nw', {rows}, {bias})",
            f"{rows} - {rows}.mean(-1, keepdim=True)",
            f"{rows} - {rows}.mean(dim=0)",
            f"F.dropout({rows}, p=0.0)",
            f"{rows}.cumsum(-1)",
            f"{rows}.cumsum(0)",
            f"{rows}.flip(0)",
            f"{rows} / ({rows}.shape[0] + 1)",
        )
    else:
        done = act.format(rows)
    if draw.chance(0.2):
        done = draw.pick(
            f"{done} + {bias}",
            f"torch.add({done}, {bias}, alpha=2)",
            f"({done}).add({bias})",
            f"{done} * 1.5",
            f"({done}).half().to(FLOAT)",
            f"{done} + x[0]",
            f"{done} * ({e} + 1)",
        )
    return draw.let("done", done, "float", 2)


def _linear(draw: Draw, rows: str, weight: str) -> str:
    return draw.mostly(
        f"F.linear({rows}, {weight})",
        f"F.linear(input={rows}, weight={weight})",
        f"({rows} @ {weight}.T)",
        f"torch.matmul({rows}, {weight}.mT)",
        f"{rows}.mm({weight}.t())",
        f"torch.mm(input={rows}, mat2={weight}.t())",
    )


def weighted(loop: Loop, rows: str, weights: str, token: str, slot: str) -> str:
    draw = loop.draw
    factor = draw.mostly(
        f"{weights}[{token}, {slot}, None]",
        f"{weights}[{token}, {slot}].unsqueeze(-1)",
        f"{weights}[{token}, {slot}][:, None]",
        f"{weights}[({token}, {slot})].view(-1, 1)",
    )
    return draw.mostly(f"{rows} * {factor}", f"{factor} * {rows}", f"torch.mul({rows}, {factor})", rows)


def add_rows(loop: Loop, out: str, token: str, rows: str) -> None:
    draw = loop.draw
    sums = [*SUMS, "{out}[{token}] = {rows}"]
    draw.emit(draw.mostly(*sums, share=0.6).format(out=out, token=token, rows=rows))


def zeros(draw: Draw) -> str:
    return draw.let(
        "out",
        draw.mostly(
            "torch.zeros_like(x)",
            f"torch.zeros(x.shape, dtype=x.dtype{draw.at})",
            "x.new_zeros(x.shape)",
            f"torch.zeros((N, WIDTH), dtype=FLOAT{draw.at})",
            "x * 0.0",
            "x.clone()",
        ),
        "float",
        2,
    )


def finish(loop: Loop, out: str) -> None:
    loop.draw.outputs.append(out)


def counter(loop: Loop, out: str) -> tuple[str, str]:
    """What a loop keeps in Python: a statement in it, and one behind it; often none."""
    draw = loop.draw
    if not draw.chance(0.12):
        return "", ""
    first, inside, behind = draw.pick(
        ("count = 0", "count += 1", f"{out} = {out} * count"),
        ("seen = []", "seen.append(1)", f"{out} = {out} * len(seen)"),
        ("seen = [0]", "seen[0] += 1", f"{out} = {out} * seen[0]"),
        ("seen = {}", "seen['n'] = seen.get('n', 0) + 1", f"{out} = {out} * seen.get('n', 0)"),
        ("numbers = iter(range(9))", "number = next(numbers)", f"{out} = {out} + next(numbers)"),
        ("numbers = (n for n in range(9))", "number = next(numbers)", f"{out} = {out} + next(numbers)"),
        ("pairs = zip(range(9), range(9))", "number, _ = next(pairs)", f"{out} = {out} + next(pairs)[0]"),
        ("number = 0", "number = number + 2", f"{out} = {out} + number"),
        ("done_rows = []", f"done_rows.append({out}.sum())", f"{out} = {out} + len(done_rows)"),
        ("last = None", "last = e", f"{out} = {out} + (0 if last is None else 1)"),
        ("flag = False", "flag = not flag", f"{out} = {out} * (2 if flag else 1)"),
        ("total = torch.zeros(())", "total.add_(1)", f"{out} = {out} * total"),
        ("total = 0", "total = total + torch.ones(())", f"{out} = {out} * total"),
    )
    draw.emit(first, twist=True)
    return inside, behind


def state_inside(loop: Loop) -> None:
    if loop.draw.chance(0.08):
        state(loop.draw, Value("x", "float", 2))


def one_expert(loop: Loop, weights: str, out: str, token: str, slot: str, e: str, inside: str) -> None:
    draw = loop.draw
    rows = draw.let(
        "rows",
        draw.mostly(
            f"x[{token}]",
            f"x[None, {token}].reshape(-1, WIDTH)",
            f"x.index_select(0, {token})",
            f"x[{token}, :]",
            f"torch.index_select(input=x, dim=0, index={token})",
            f"x.gather(0, {token}[:, None].expand(-1, WIDTH))",
            f"x.detach()[{token}]",
        ),
        "float",
        2,
    )
    done = expert_body(loop, rows, e)
    if inside:
        draw.emit(inside, twist=True)
    state_inside(loop)
    rows = draw.let("rows", weighted(loop, done, weights, token, slot), "float", 2)
    add_rows(loop, out, token, rows)
