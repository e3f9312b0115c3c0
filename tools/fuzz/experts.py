"""Programs with a loop over experts, in all spellings that models have: see docs/group_experts.md."""

from __future__ import annotations

from tools.fuzz import spellings
from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.expert_parts import (
    Loop,
    add_rows,
    counter,
    expert_body,
    finish,
    one_expert,
    rows_of,
    zeros,
)
from tools.fuzz.expert_pieces import over_pieces, over_slices, over_sorted_rows, over_split
from tools.fuzz.programs import Statement


def draw_experts(draw: Draw) -> Drawn:
    loop = Loop(
        draw,
        experts=draw.mostly(2, 1, 3) if draw.one_graph else draw.mostly(3, 1, 2, 4),  # each is looked at again
        top_k=draw.pick(1, 2, 2),
        width=draw.pick(2, 4),
        inner=draw.pick(1, 3),
        stacked=draw.chance(0.75),
        sentinel=draw.chance(0.15),
    )
    loop.top_k = min(loop.top_k, loop.experts)
    tokens = draw.mostly(7, 1, 0, 5, 12)
    sizes = (tokens, loop.experts, loop.top_k, loop.width, loop.inner)
    draw.need("sizes", f"TOKENS, E, K, WIDTH, INNER = {sizes}")
    draw.emit("N = x.shape[0]")
    inputs, made = _inputs(loop)
    selected, weights = _routing(loop, inputs)
    spellings_of_loops = [*[_over_masks] * 4, over_pieces, over_split, over_slices, over_sorted_rows, _bool]
    if not draw.one_graph:
        spellings_of_loops += [_over_hits] * 2
    spelled = draw.pick(*spellings_of_loops)
    spelled(loop, selected, weights)
    draw.spoil("x.data[:1] = float('nan')")
    draw.spoil("x.data[-1:, 0] = float('inf')")
    draw.spoil(f"{inputs[-1]}.data.view(-1)[:1] = float('nan')")
    return Drawn(made, inputs, zero_for_none=True)


def _inputs(loop: Loop) -> tuple[tuple[str, ...], tuple[Statement, ...]]:
    draw = loop.draw
    made = [
        draw.generator,
        draw.size("N", "TOKENS"),
        Statement(f"x = torch.randn(N, WIDTH, dtype=FLOAT, generator=g{draw.at}).requires_grad_()"),
    ]
    names = ["x"]
    draw.values.append(Value("x", "float", 2, is_leaf=True))
    if draw.chance(0.5):
        names.append("logits")
        grad = draw.mostly(".requires_grad_()", "")
        made.append(Statement(f"logits = torch.randn(N, E, dtype=FLOAT, generator=g{draw.at}){grad}"))
        draw.values.append(Value("logits", "float", 2, is_leaf=True))
    else:
        names += ["selected", "weights"]
        most = "E + 1" if loop.sentinel or draw.chance(0.03) else draw.mostly("E", "max(1, E - 1)")
        one_for_all = draw.chance(0.1)
        drawn = f"torch.randint(0, {most}, (N, K), generator=g{draw.at})"
        made.append(
            Statement(f"selected = torch.full((N, K), seed % E{draw.at})" if one_for_all else f"selected = {drawn}")
        )
        made.append(Statement(f"weights = torch.rand(N, K, dtype=FLOAT, generator=g{draw.at}).requires_grad_()"))
        draw.values += [Value("selected", "int", 2), Value("weights", "float", 2, is_leaf=True)]
    if loop.stacked:
        for name, shape in (("up", "E, 2 * INNER, WIDTH"), ("down", "E, WIDTH, INNER"), ("bias", "E, WIDTH")):
            made.append(Statement(f"{name} = torch.randn({shape}, dtype=FLOAT, generator=g{draw.at}).requires_grad_()"))
            names.append(name)
        draw.values.append(Value("down", "float", 3, is_leaf=True))
    else:
        for name, shape in (("up", "2 * INNER, WIDTH"), ("down", "WIDTH, INNER"), ("bias", "WIDTH")):
            each = [f"{name}_{e}" for e in range(loop.experts)]
            made += [
                Statement(f"{n} = torch.randn({shape}, dtype=FLOAT, generator=g{draw.at}).requires_grad_()")
                for n in each
            ]
            names += each
            draw.emit(f"{name} = [{', '.join(each)}]")
    return tuple(names), tuple(made)


def _routing(loop: Loop, inputs: tuple[str, ...]) -> tuple[str, str]:
    """The names of ``[N, K]`` selected experts and their weights."""
    draw = loop.draw
    if "logits" not in inputs:
        return "selected", "weights"
    scores = draw.let(
        "scores",
        draw.mostly("F.softmax(logits, dim=-1)", "logits.sigmoid()", "logits.softmax(-1)", "logits"),
        "float",
        2,
    )
    if draw.chance(0.1) and loop.experts == 1:
        draw.emit(f"weights, selected = {scores}.max(dim=-1, keepdim=True)")
    else:
        draw.emit(
            f"weights, selected = {spellings.along(draw, 'topk', scores, -1, plain='K')}",
            f"weights, selected = {scores}.topk(K, dim=-1)",
        )
    draw.values += [Value("weights", "float", 2), Value("selected", "int", 2)]
    draw.maybe_twist()
    if draw.chance(0.2):
        draw.emit(
            draw.pick(
                "weights = weights / weights.sum(-1, keepdim=True)",
                "weights = weights / weights.sum(axis=-1, keepdims=True)",
                "weights = weights * 2",
                "weights = weights.detach()",
                "weights = weights.to(x.dtype)",
            )
        )
    return "selected", "weights"


def _mask(loop: Loop, selected: str) -> str:
    """The name of a mask ``[E, K, N]``."""
    draw = loop.draw
    with draw.maybe_inside(0.25, "with torch.no_grad():"):
        return draw.let(
            "mask",
            draw.mostly(
                f"F.one_hot({selected}, num_classes={loop.classes}).permute(2, 1, 0)",
                f"F.one_hot({selected}, {loop.classes}).permute(dims=(2, 1, 0))",
                f"F.one_hot({selected}, num_classes={loop.classes}).transpose(0, 2)",
                f"F.one_hot({selected}, {loop.classes}).bool().permute(2, 1, 0)",
                f"({selected}.t()[None] == torch.arange({loop.classes}{draw.at})[:, None, None])",
                f"torch.eq({selected}.T, torch.arange({loop.classes}{draw.at}).view(-1, 1, 1))",
            ),
            "int",
            3,
        )


def _over_masks(loop: Loop, selected: str, weights: str) -> None:
    """R and RG."""
    draw = loop.draw
    mask = _mask(loop, selected) if draw.chance(0.6) else None
    out = zeros(draw)
    inside, behind = counter(loop, out)
    header = draw.mostly(
        "for e in range(E):",
        "for e in reversed(range(E)):",
        "for e in list(range(E)):",
        "for e in range(E - 1, -1, -1):",
        "for e in range(-E, 0):",
        "for e, _ in enumerate(up):",
        "for e in range(0, E, 2):",
        "for e in range(1, E):",
        "for _, e in zip(up, range(E)):",
        share=0.7,
    )
    with draw.block(header):
        token, slot = rows_of(loop, selected, mask, "e")
        how = 9 if draw.one_graph else draw.integer(0, 9)
        if how < 3:
            with draw.block(
                draw.pick(
                    f"if {token}.numel() == 0:",
                    f"if {token}.shape[0] == 0:",
                    f"if not {token}.numel():",
                    f"if len({token}) == 0:",
                    f"if {token}.size(0) < 1:",
                )
            ):
                if draw.chance(0.1):
                    draw.emit(f"{out} = {out} + 1", twist=True)
                draw.emit("continue")
        if 3 <= how < 5:
            with draw.block(
                draw.pick(
                    f"if {token}.numel() > 0:",
                    f"if {token}.shape[0] != 0:",
                    f"if {token}.numel():",
                    f"if {token}.shape[0] >= 1:",
                    f"if {token}.shape[0] > 1:",
                )
            ):
                one_expert(loop, weights, out, token, slot, "e", inside)
        else:
            one_expert(loop, weights, out, token, slot, "e", inside)
    if behind:
        draw.emit(behind, twist=True)
    finish(loop, out)


def _over_hits(loop: Loop, selected: str, weights: str) -> None:
    """H4, H5 and G."""
    draw = loop.draw
    mask = _mask(loop, selected)
    summed = draw.mostly(
        f"{mask}.sum(dim=(-1, -2))",
        f"{mask}.sum((-1, -2))",
        f"{mask}.sum(axis=(1, 2))",
        f"{mask}.sum(-1).sum(dim=-1)",
        f"{mask}.flatten(1).any(-1)",
    )
    hits = draw.let(
        "hits",
        draw.mostly(
            f"torch.greater({summed}, 0).nonzero()",
            f"({summed} > 0).nonzero()",
            f"torch.nonzero({summed})",
            f"torch.nonzero({summed} > 0, as_tuple=False)",
            f"({summed} > 1).nonzero()",
        ),
        "int",
        2,
    )
    out = zeros(draw)
    inside, behind = counter(loop, out)
    header = draw.mostly(
        f"for e in {hits}:",
        f"for e in {hits}[:]:",
        f"for number, e in enumerate({hits}):",
        f"for e, number in zip({hits}, range(9)):",
        f"for e in {hits}.unbind(0):",
        f"for e in {hits}.tolist():",
        f"for e in list({hits}):",
    )
    dense = ""
    if draw.chance(0.25):
        dense = draw.let(
            "dense",
            f"torch.zeros(N, {loop.classes}, dtype=FLOAT{draw.at}).scatter(1, {selected}, {weights})",
            "float",
            2,
        )
    with draw.block(header):
        how = draw.mostly("e = e[0]", "e = e.item()", "e = e.squeeze(0)", "e = int(e)", "")
        if ".tolist()" in header:
            how = "e = e[0]"
        if how:
            draw.emit(how)
        if loop.sentinel or draw.chance(0.2):
            with draw.block(draw.pick("if e == E:", "if e >= E:")):
                draw.emit("continue")
        if draw.chance(0.05):
            with draw.block(draw.pick("if isinstance(e, torch.Tensor):", "if e == 1:", "if e < 2:")):
                draw.emit(draw.pick("continue", f"{out} = {out} + 1", "pass"), twist=True)
        of = f"{mask}[e]" if how else f"{mask}[e].squeeze(0)"
        token, slot = draw.name("token"), draw.name("slot")
        draw.emit(f"{slot}, {token} = {draw.mostly(f'torch.where({of})', f'{of}.nonzero(as_tuple=True)')}")
        draw.values += [Value(token, "int", 1), Value(slot, "int", 1)]
        draw.maybe_twist()
        if not how:
            draw.emit("e = e[0]")
        if draw.chance(0.2):
            with draw.block(f"if {token}.numel() == 0:"):
                draw.emit("continue")
        if dense:
            done = expert_body(loop, f"x[{token}]", "e")
            if inside:
                draw.emit(inside, twist=True)
            add_rows(loop, out, token, f"{done} * {dense}[{token}, e, None]")
        else:
            one_expert(loop, weights, out, token, slot, "e", inside)
    if behind:
        draw.emit(behind, twist=True)
    finish(loop, out)


def _bool(loop: Loop, selected: str, weights: str) -> None:
    """BOOL: research code."""
    draw = loop.draw
    out = zeros(draw)
    inside, behind = counter(loop, out)
    with draw.block("for e in range(E):"):
        hit = spellings.binary(draw, "eq", selected, "e")
        chosen = draw.let("chosen", spellings.along(draw, "any", hit, -1), "bool", 1)
        factor = draw.let(
            "factor",
            draw.mostly(
                f"({weights} * ({selected} == e)).sum(-1)", f"torch.where({selected} == e, {weights}, 0.0).sum(dim=-1)"
            ),
            "float",
            1,
        )
        if draw.chance(0.3) and not draw.one_graph:
            with draw.block(draw.pick(f"if not {chosen}.any():", f"if {chosen}.sum() == 0:")):
                draw.emit("continue")
        done = expert_body(loop, f"x[{chosen}]", "e")
        if inside:
            draw.emit(inside, twist=True)
        rows = draw.mostly(f"{factor}[{chosen}][:, None] * {done}", f"{done} * {factor}[{chosen}].unsqueeze(1)", done)
        draw.emit(
            draw.mostly(
                f"{out}[{chosen}] += {rows}",
                f"{out}[{chosen}] = {out}[{chosen}] + {rows}",
                f"{out}.index_put_(({chosen},), {rows}, accumulate=True)",
                f"{out}[{chosen}] = {rows}",
            )
        )
    if behind:
        draw.emit(behind, twist=True)
    finish(loop, out)
