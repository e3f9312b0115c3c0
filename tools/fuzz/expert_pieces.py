"""Loops over rows that are sorted by expert: pieces, splits and slices."""

from __future__ import annotations

from tools.fuzz import spellings
from tools.fuzz.expert_parts import Loop, expert_body, finish, state_inside


def _sorted(loop: Loop, selected: str) -> tuple[str, str, str]:
    """Names of the slots in the order of their experts, of counts as a tensor, and of the sorted rows."""
    draw = loop.draw
    flat = draw.mostly(
        f"{selected}.flatten()", f"{selected}.view(-1)", f"{selected}.reshape(-1)", f"torch.flatten({selected})"
    )
    order = draw.let(
        "order",
        draw.mostly(
            f"{flat}.argsort(stable=True)",
            f"torch.argsort({flat}, stable=True)",
            f"torch.sort({flat}, stable=True).indices",
            f"{flat}.argsort(dim=0, stable=True)",
            f"torch.sort({flat}, stable=True)[1]",
            f"{flat}.argsort(stable=True, descending=True)",
            share=0.7,
        ),
        "int",
        1,
    )
    counts = draw.let(
        "counts",
        draw.mostly(
            f"F.one_hot({selected}, num_classes=E).sum((0, 1))",
            f"{selected}.new_zeros((N, E)).scatter_(1, {selected}, 1).sum(dim=0)",
            f"torch.zeros(N, E, dtype=torch.long{draw.at}).scatter(1, {selected}, 1).sum(0)",
            f"torch.bincount({flat}, minlength=E)",
            f"torch.histc({flat}.to(torch.float32), bins=E, min=0, max=E - 1).long()",
            f"torch.zeros(E, dtype=torch.long{draw.at}).scatter_add(0, {flat}, torch.ones_like({flat}))",
            f"torch.zeros(E{draw.at}).bfloat16().index_add(0, {flat}, torch.ones(N * K{draw.at}).bfloat16()).long()",
            f"({flat}[:, None] == torch.arange(E{draw.at})).sum(0)",
            f"({flat}[:, None] == torch.arange(E{draw.at})).sum(axis=0)",
            share=0.4,
        ),
        "int",
        1,
    )
    rows = draw.let(
        "rows",
        draw.mostly(
            f"x[{order} // K]",
            f"x.index_select(0, {order} // K)",
            f"x[torch.div({order}, K, rounding_mode='floor')]",
            f"x.repeat_interleave(K, dim=0)[{order}]",
        ),
        "float",
        2,
    )
    return order, counts, rows


def _combine(loop: Loop, weights: str, order: str, rows: str) -> None:
    draw = loop.draw
    if draw.chance(0.5):
        out = draw.let(
            "out",
            f"torch.zeros_like(x).index_add(0, {order} // K, {rows} * {weights}.flatten()[{order}, None])",
            "float",
            2,
        )
    else:
        new = draw.let("unsorted", draw.pick(f"torch.zeros_like({rows})", f"torch.empty_like({rows})"), "float", 2)
        draw.emit(f"{new}[{order}] = {rows}")
        out = draw.let("out", f"({new}.view(N, K, -1) * {weights}.unsqueeze(dim=-1)).sum(dim=1)", "float", 2)
    finish(loop, out)


def over_pieces(loop: Loop, selected: str, weights: str) -> None:
    """DS."""
    draw = loop.draw
    order, counts, rows = _sorted(loop, selected)
    draw.emit("outs, start = [], 0")
    listed = draw.mostly(
        f"{counts}.tolist()", counts, f"{counts}.cpu().numpy()", f"{counts}.unbind()", f"[c.item() for c in {counts}]"
    )
    with draw.block(draw.mostly(f"for e, n in enumerate({listed}):", f"for e, n in zip(range(E), {listed}):")):
        draw.emit("end = start + n")
        if draw.chance(0.4) and not draw.one_graph:
            with draw.block("if n == 0:"):
                draw.emit("continue")
        done = expert_body(loop, f"{rows}[start:end]", "e")
        state_inside(loop)
        draw.emit(f"outs.append({done})")
        draw.emit("start = end")
    all_rows = draw.let(
        "joined",
        draw.mostly(
            "torch.cat(outs, dim=0)",
            "torch.cat(outs) if len(outs) else rows[:0]",
            "torch.cat(outs) if outs else x[:0]",
            "torch.concat(tensors=outs, axis=0)",
        ),
        "float",
        2,
    )
    _combine(loop, weights, order, all_rows)


def over_split(loop: Loop, selected: str, weights: str) -> None:
    draw = loop.draw
    order, counts, rows = _sorted(loop, selected)
    sizes = draw.name("sizes")
    draw.emit(f"{sizes} = {counts}.tolist()")
    draw.emit(
        draw.mostly(
            f"pieces = {rows}.split({sizes}, dim=0)",
            f"pieces = torch.split({rows}, {sizes})",
            f"pieces = {rows}.split(split_size={sizes})",
            f"pieces = torch.split(tensor={rows}, split_size_or_sections={sizes}, dim=0)",
        )
    )
    draw.emit("outs = []")
    with draw.block("for e in range(E):"):
        done = expert_body(loop, "pieces[e]", "e")
        draw.emit(f"outs.append({done})")
    all_rows = draw.let(
        "joined", draw.mostly("torch.cat(outs, dim=0)", "torch.cat(outs)", "torch.vstack(outs)"), "float", 2
    )
    _combine(loop, weights, order, all_rows)


def over_slices(loop: Loop, selected: str, weights: str) -> None:
    draw = loop.draw
    order, counts, rows = _sorted(loop, selected)
    ends = draw.let("ends", spellings.along(draw, "cumsum", counts, 0), "int", 1)
    ends = draw.let(
        "ends",
        draw.mostly(f"torch.cat((torch.zeros(1, dtype=torch.long{draw.at}), {ends}))", f"F.pad({ends}, (1, 0))"),
        "int",
        1,
    )
    joined = draw.let(
        "joined",
        draw.mostly(f"torch.zeros(N * K, WIDTH, dtype=FLOAT{draw.at})", f"torch.zeros_like({rows})"),
        "float",
        2,
    )
    if draw.chance(0.3):
        draw.emit(f"{ends} = {ends}.tolist()")
        draw.values = [v for v in draw.values if v.name != ends]
    with draw.block("for e in range(E):"):
        draw.emit(f"start, end = {ends}[e], {ends}[e + 1]")
        done = expert_body(loop, f"{rows}[start:end]", "e")
        draw.emit(f"{joined}[start:end] = {done}")
    _combine(loop, weights, order, joined)


def over_sorted_rows(loop: Loop, selected: str, weights: str) -> None:
    """GM: no loop, and each row times the matrix of its expert."""
    draw = loop.draw
    order, _, rows = _sorted(loop, selected)
    ids = draw.let(
        "ids", draw.mostly(f"{selected}.flatten()[{order}]", f"torch.sort({selected}.view(-1))[0]"), "int", 1
    )
    if draw.chance(0.4):
        mask = draw.mostly(
            f"({ids} >= {loop.classes}).unsqueeze(-1)", f"({ids} > 0)[:, None]", f"({ids} >= E - 1)[:, None]"
        )
        fill = draw.mostly("masked_fill", "masked_fill_")
        draw.emit(f"{rows} = {rows}.{fill}({mask}, 0.0)", f"{rows} = {rows}.masked_fill({mask}, 0.0)")
    weight = f"down[{ids}.clamp(max=E - 1)]" if loop.stacked else "down[0]"
    done = draw.let("done", f"({rows}.unsqueeze(1) @ ({weight} @ {weight}.mT)).squeeze(1)", "float", 2)
    if draw.chance(0.7):
        factor = draw.mostly(
            f"{weights}.flatten()[{order}].unsqueeze(-1)",
            f"{weights}.reshape(-1, 1)[{order}]",
            f"{weights}.flatten()[{order}, None].detach()",
            f"{weights}.flatten().unsqueeze(-1)",
        )
        done = draw.let("done", f"{done} * {factor}", "float", 2)
    inverse = draw.name("inverse")
    draw.emit(
        draw.mostly(
            f"{inverse} = {order}.argsort()",
            f"{inverse} = torch.empty_like({order}); {inverse}[{order}] = torch.arange(N * K{draw.at})",
            f"{inverse} = torch.zeros_like({order}).scatter(0, {order}, torch.arange(N * K{draw.at}))",
            f"{inverse} = {order}.argsort(descending=True)",
            f"{inverse} = {order}",
            share=0.5,
        )
    )
    out = draw.mostly(
        f"{done}[{inverse}].view(N, K, -1).sum(dim=1)",
        f"{done}.index_select(0, {inverse}).reshape(N, K, -1).sum(1)",
        f"{done}[{inverse}].view(N, K, -1).sum(1, keepdim=True).squeeze(1)",
        f"{done}[{inverse}].view(N, K, -1).mean(1)",
    )
    finish(loop, draw.let("out", out, "float", 2))
