"""Programs that compute a packed batch's metadata several times: in one graph, in checkpoints, in single layers."""

from __future__ import annotations

from tools.fuzz import spellings
from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.programs import Statement


def draw_metadata(draw: Draw) -> Drawn:
    """Layers that each compute it from ``pos`` and ``flags``: inline, checkpointed, or compiled one by one."""
    tokens = draw.mostly(6, 1, 3, 9)
    draw.need("sizes", f"TOKENS, WIDTH = {tokens}, 2")
    draw.emit("LENGTH = x.shape[0]")
    draw.need("restarting", RESTARTING)
    draw.values += [
        Value("x", "float", 2, is_leaf=True),
        Value("weight", "float", 2, is_leaf=True),
        Value("pos", "int", 1),
        Value("flags", "bool", 1),
    ]
    how = draw.pick("inline", "inline", "inline", "checkpoint", "checkpoint", "layers", "layers", "break")
    compiled: tuple[str, ...] = ("f",)
    # Inductor is where sizes that only the data says have to be lowered.
    kinds = [METADATA.index(_cut) if draw.small and draw.chance(0.4) else draw.integer(0, len(METADATA) - 1)]
    if draw.chance(0.3):
        kinds.append(draw.integer(0, len(METADATA) - 1))
    draw.emit("hidden = x")
    draw.values.append(Value("hidden", "float", 2))
    if how in ("inline", "break"):
        for number in range(draw.mostly(2, 3)):
            if number and how == "break":
                draw.emit("torch._dynamo.graph_break()")
            layer(draw, draw.pick(*kinds))
    else:
        names = _layer_functions(draw, kinds)
        if how == "layers":
            compiled = tuple(names)
        options = draw.mostly(
            "use_reentrant=False",
            "use_reentrant=False, preserve_rng_state=False",
            "use_reentrant=False, determinism_check='none'",
        )
        for _ in range(draw.mostly(2, 3)):
            name = draw.pick(*names)
            inner = how == "checkpoint" and draw.chance(0.85)
            draw.emit(
                f"hidden = checkpoint({name}, hidden, weight, pos, flags, {options})"
                if inner
                else f"hidden = {name}(hidden, weight, pos, flags)"
            )
            draw.maybe_twist()
    draw.outputs.append("hidden")
    draw.spoil("x.data[:1] = float('nan')")
    draw.spoil("x.data[-1:, 0] = float('-inf')")
    made = (
        draw.generator,
        draw.size("LENGTH", "TOKENS"),
        Statement(f"x = torch.randn(LENGTH, WIDTH, dtype=FLOAT, generator=g{draw.at}).requires_grad_()"),
        Statement(f"weight = torch.randn(WIDTH, WIDTH, dtype=FLOAT, generator=g{draw.at}).requires_grad_()"),
        Statement(
            draw.mostly(
                "pos = restarting(LENGTH, g)",
                "pos = restarting(2 * LENGTH, g)[LENGTH:]",
                "pos = restarting(2 * LENGTH, g)[::2]",
                "pos = restarting(LENGTH, g).int()",
            )
        ),
        Statement(f"flags = {draw.mostly(f'torch.rand(LENGTH, generator=g{draw.at}) < 0.5', 'pos[:] == 0')}"),
    )
    return Drawn(made, ("x", "weight", "pos", "flags"), compiled)


def _layer_functions(draw: Draw, kinds: list[int]) -> list[str]:
    """The names of functions ``(hidden, weight, pos, flags) -> hidden`` in front of the program."""
    names = []
    for kind in kinds:
        inner = draw.inner()
        inner.values += [
            Value("hidden", "float", 2),
            Value("weight", "float", 2, is_leaf=True),
            Value("pos", "int", 1),
            Value("flags", "bool", 1),
        ]
        inner.emit("LENGTH = hidden.shape[0]")
        layer(inner, kind)
        name = draw.name("layer_")
        names.append(name)
        statements = (*inner.statements(), Statement("return hidden"))
        draw.prelude[name] = Statement(f"def {name}(hidden, weight, pos, flags):", statements)
    return names


def layer(draw: Draw, kind: int) -> None:
    """``hidden`` becomes another ``hidden``, by metadata of one kind."""
    METADATA[kind](draw)
    draw.maybe_twist()


def _mix(draw: Draw, factor: str) -> None:
    draw.emit(
        draw.mostly(
            f"hidden = torch.tanh(hidden @ weight) * {factor}",
            f"hidden = torch.tanh(F.linear(hidden, weight)) * {factor} + hidden",
            f"hidden = hidden * {factor}",
        )
    )


def _starts(draw: Draw) -> str:
    zero = spellings.binary(draw, "eq", "pos", "0")
    starts = draw.let(
        "starts",
        draw.mostly(
            f"torch.nonzero({zero}).flatten()",
            f"{zero}.nonzero().view(-1)",
            f"torch.where({zero})[0]",
            f"torch.nonzero({zero}, as_tuple=True)[0]",
            f"{zero}.nonzero()[:, 0]",
        ),
        "int",
        1,
    )
    if draw.chance(0.1):
        draw.outputs.append(starts)
    return starts


def _lengths(draw: Draw) -> None:
    starts = _starts(draw)
    lengths = draw.let(
        "lengths",
        draw.mostly(
            f"torch.diff(torch.cat([{starts}, {starts}.new_full((1,), pos.shape[0])]))",
            f"torch.cat([{starts}[1:], {starts}.new_full((1,), LENGTH)]) - {starts}",
        ),
        "int",
        1,
    )
    longest = draw.name("longest")
    draw.emit(f"{longest} = int({lengths}.sum())" if draw.chance(0.2) else f"{longest} = {lengths}.sum().item()")
    _mix(draw, draw.mostly(f"(pos[:, None] < {longest})", f"({longest} + 1)"))


def _longest(draw: Draw) -> None:
    text = draw.mostly(
        "pos.max().item()",
        "torch.max(pos).item()",
        "int(pos.max())",
        "pos.amax(dim=0).item()",
        "pos.max(dim=0).values.item()",
        "pos.sort().values[-1].item()",
    )
    longest = draw.name("longest")
    draw.emit(f"{longest} = {text}")
    _mix(
        draw,
        draw.mostly(
            f"(pos[:, None] <= {longest} // 2)",
            f"({longest} + 1)",
            f"(torch.zeros({longest} + 1, dtype=FLOAT{draw.at}).sum() + 2)",
        ),
    )


def _listed(draw: Draw) -> None:
    listed = draw.name("listed")
    draw.emit(
        f"{listed} = {draw.mostly('pos[:2].tolist()', 'flags[:3].sum().tolist()', 'pos.cumsum(0)[-1:].tolist()')}"
    )
    _mix(
        draw,
        draw.mostly(
            f"(torch.tensor({listed}{draw.at}).sum() + 1)",
            f"(torch.tensor({listed}, dtype=FLOAT{draw.at}).sum() * 0.5)",
        ),
    )


def _unique(draw: Draw) -> None:
    counts = draw.name("counts")
    draw.emit(
        draw.mostly(
            f"_, {counts} = torch.unique(pos, return_counts=True)",
            f"_, {counts} = pos.unique(return_counts=True)",
            f"_, {counts} = torch.unique_consecutive(flags, return_counts=True)",
        )
    )
    draw.values.append(Value(counts, "int", 1))
    draw.maybe_twist()
    _mix(draw, draw.mostly(f"({counts}.max() + 1)", f"{counts}.sum()", f"{counts}.to(FLOAT).mean()"))


def _documents(draw: Draw) -> None:
    ids = draw.let("ids", spellings.along(draw, "cumsum", spellings.binary(draw, "eq", "pos", "0"), 0), "int", 1)
    same = draw.let(
        "same", draw.mostly(f"({ids}[:, None] == {ids}[None, :])", f"torch.eq({ids}.unsqueeze(1), {ids})"), "bool", 2
    )
    factor = draw.mostly(
        f"({same}.to(FLOAT) @ hidden.detach()).sum(-1, keepdim=True)",
        f"{same}.sum(-1, keepdim=True)",
        f"F.one_hot({ids}, LENGTH + 3).sum(-1, keepdim=True)",
    )
    _mix(draw, f"{factor} * 0.1")


def _selected(draw: Draw) -> None:
    if draw.chance(0.25) and not draw.one_graph:
        _one_row(draw)
        return
    chosen = draw.let(
        "chosen",
        draw.mostly(
            "torch.nonzero(flags).flatten()",
            "flags.nonzero().squeeze(-1)",
            "torch.where(flags)[0]",
            "torch.masked_select(pos, flags)",
        ),
        "int",
        1,
    )
    some = draw.let(
        "some", draw.mostly(f"hidden[{chosen} % LENGTH]", f"hidden[{chosen}.clamp(max=LENGTH - 1)]"), "float", 2
    )
    _mix(
        draw,
        draw.mostly(
            f"({chosen}.shape[0] + 1)",
            f"({some}.sum() * 0.1 + 1)",
            f"({chosen}.numel() * 0.5 + {some}.detach().mean().nan_to_num())",
        ),
    )


def _one_row(draw: Draw) -> None:
    """One row, which only the data says, beside or written to a number of rows that only the data says."""
    row, rows = draw.name("row"), draw.name("rows")
    draw.emit(f"{row} = hidden[torch.arange(LENGTH{draw.at}) == pos.sum() % LENGTH]")
    draw.emit(f"{rows} = torch.zeros_like(hidden)")
    draw.emit(
        draw.pick(
            f"{rows}[flags] = {row}",
            f"{rows}[flags] += {row}",
            f"{rows}[flags] = hidden[flags] * {row}",
            f"{rows} = {rows}.index_put((flags.nonzero()[:, 0],), {row}, accumulate=True)",
        )
    )
    draw.emit(f"hidden = torch.tanh(hidden @ weight) + {rows}")


def _branch(draw: Draw) -> None:
    """Python asks what an input holds, perhaps after a write that no version counter shows."""
    if draw.chance(0.4):
        draw.emit(draw.pick("pos.data.add_(1)", "torch._foreach_add_([pos], 1)", "pos.add_(1)", "pos.data[0] = 4"))
    if draw.chance(0.2):  # two conditions that differ in a size alone
        for size in (0, 1):
            draw.emit(f"hidden = hidden.sin() if pos.sum() > hidden.shape[{size}] else hidden * 2")
        return
    if draw.chance(0.2):  # in bf16 the sums of two batches are equal more often
        asked = draw.name("asked")
        with draw.block(f"with torch.autocast({draw.device!r}, dtype=torch.bfloat16):"):
            draw.emit(f"{asked} = (pos.float() + 256) @ torch.ones(LENGTH{draw.at}) > 256 * LENGTH + 2")
        draw.emit(f"hidden = torch.tanh(hidden @ weight) if {asked} else hidden * 2")
        return
    condition = draw.pick("(pos == 0).any()", "pos.max() > 3", "(pos[1:] - pos[:-1] != 1).any()", "flags.any()")
    draw.emit(f"hidden = torch.tanh(hidden @ weight) if {condition} else hidden * 2")


def _cut(draw: Draw) -> None:
    """A slice that ends, or begins, at a number read from data."""
    end = draw.pick(
        "int(pos.max())", "pos[-1].item()", "int(flags.sum())", "int((pos == 0).sum())", "flags.sum().item()"
    )
    how = draw.integer(0, 4)
    if how < 2:  # documents of their own lengths
        cut = draw.name("cut")
        draw.emit(f"{cut} = torch.stack([hidden, hidden * 2]) @ weight")
        lengths = draw.let("lens", "torch.stack([flags.sum(), pos.max()])", "int", 1)
        rows = ", ".join(f"{cut}[{i}, : int({lengths}[{i}])].{draw.pick('mean', 'sum')}(0)" for i in range(2))
        draw.emit(f"hidden = hidden + torch.stack([{rows}]).nan_to_num().sum(0)")
    elif how == 2:
        draw.emit(f"hidden = hidden + F.pad(hidden[:, : {end}].tanh(), (0, max(0, WIDTH - {end})))[:, :WIDTH]")
    elif how == 3:
        draw.emit(f"hidden = torch.tanh(hidden @ weight) + hidden[{end} :].sum(0)")
    else:
        draw.emit(f"hidden = hidden * 0.5 + (hidden[: {end}] @ weight).sum(0, keepdim=True)")


def _python(draw: Draw) -> None:
    """Python takes a number read from data: containers, a handler of exceptions, an index."""
    number = draw.pick("int(pos.max())", "int(flags.sum())", "pos[-1].item()")
    how = draw.integer(0, 4)
    if how == 0:
        row = draw.name("row")
        with draw.block("try:"):
            draw.emit(f"{row} = hidden[{number} * 2]")
        with draw.block(draw.pick("except IndexError:", "except (IndexError, RuntimeError):")):
            draw.emit(f"{row} = hidden[0] * 3")
        draw.emit(f"hidden = torch.tanh(hidden @ weight) + {row}")
    elif how == 1:
        draw.emit(f"hidden = torch.tanh(hidden @ weight) + hidden[{number} - 1] * 0.5")
    elif how == 2:
        _mix(draw, draw.pick(f"len(list(range({number} + 1)))", f"(1 + range({number} + 1)[-1])"))
    elif how == 3:
        _mix(draw, draw.pick("(1 + sum(dict.fromkeys(pos[:3].tolist())))", "(1 + len(set(pos[:3].tolist())))"))
    else:
        _mix(draw, f"({draw.pick('2 if', '3 if not')} {number} in (1, 2, 5) else 1)")


METADATA = (_cut, _python, _lengths, _lengths, _longest, _listed, _unique, _documents, _selected, _branch)

RESTARTING = """
def restarting(length, generator):
    where = torch.arange(length, device=generator.device)
    starts = torch.rand(length, generator=generator, device=generator.device) < 0.3
    return where - torch.where(starts, where, 0).cummax(0).values
"""
