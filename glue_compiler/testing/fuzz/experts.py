"""Programs with a loop over experts, in all spellings that models have: see docs/group_experts.md."""

from __future__ import annotations

from dataclasses import dataclass

from glue_compiler.testing.fuzz import spellings
from glue_compiler.testing.fuzz.draw import Draw, Drawn, Value
from glue_compiler.testing.fuzz.programs import Statement


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


def draw_experts(draw: Draw) -> Drawn:
    loop = Loop(
        draw,
        experts=draw.mostly(3, 1, 2, 4),
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
    spellings_of_loops = [*[_over_masks] * 4, _over_pieces, _split, _slice, _bool]
    if not draw.one_graph:
        spellings_of_loops += [_over_hits] * 2
    spelled = draw.pick(*spellings_of_loops)
    spelled(loop, selected, weights)
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


def _rows_of(loop: Loop, selected: str, mask: str | None, e: str) -> tuple[str, str]:
    """(token, slot) names of the rows of expert ``e``; emitted into the loop."""
    draw = loop.draw
    token, slot = draw.name("token"), draw.name("slot")
    if mask is not None:
        of = f"{mask}[{e}]"
        draw.emit(
            f"{slot}, {token} = {_found(draw, of)}",
            f"{slot}, {token} = torch.where({of})",
        )
    else:
        of = spellings.binary(draw, "eq", selected, e)
        draw.emit(
            f"{token}, {slot} = {_found(draw, of)}",
            f"{token}, {slot} = torch.where({selected} == {e})",
        )
    draw.values += [Value(token, "int", 1), Value(slot, "int", 1)]
    draw.maybe_twist()
    return token, slot


def _found(draw: Draw, condition: str) -> str:
    """The indices of what is true."""
    return draw.mostly(
        f"torch.where({condition})",
        f"{condition}.nonzero(as_tuple=True)",
        f"torch.nonzero({condition}, as_tuple=True)",
        f"{condition}.nonzero().t()",
        f"torch.nonzero({condition}).unbind(-1)",
        f"torch.where(condition={condition})",
    )


def _body(loop: Loop, rows: str, e: str) -> str:
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


def _weighted(loop: Loop, rows: str, weights: str, token: str, slot: str) -> str:
    draw = loop.draw
    factor = draw.mostly(
        f"{weights}[{token}, {slot}, None]",
        f"{weights}[{token}, {slot}].unsqueeze(-1)",
        f"{weights}[{token}, {slot}][:, None]",
        f"{weights}[({token}, {slot})].view(-1, 1)",
    )
    return draw.mostly(f"{rows} * {factor}", f"{factor} * {rows}", f"torch.mul({rows}, {factor})", rows)


def _added(loop: Loop, out: str, token: str, rows: str) -> None:
    draw = loop.draw
    draw.emit(
        draw.mostly(
            f"{out}.index_add_(0, {token}, {rows})",
            f"{out}.index_add_(0, {token}, ({rows}).to({out}.dtype))",
            f"{out}[{token}] += {rows}",
            f"{out} = {out}.index_add(0, {token}, {rows})",
            f"{out}.index_add_(dim=0, index={token}, source={rows})",
            f"{out}.index_add_(0, {token}, {rows}, alpha=2)",
            f"{out} = torch.index_add({out}, 0, {token}, {rows})",
            f"{out}.index_put_(({token},), {rows}, accumulate=True)",
            f"{out}.scatter_add_(0, {token}[:, None].expand(-1, WIDTH), {rows})",
            f"{out}[{token}] = {out}[{token}] + {rows}",
            f"{out}[{token}] = {rows}",
            share=0.6,
        )
    )


def _zeros(draw: Draw) -> str:
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


def _finish(loop: Loop, out: str) -> None:
    loop.draw.outputs.append(out)


def _counter(loop: Loop, out: str) -> tuple[str, str]:
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


def _state_inside(loop: Loop) -> None:
    if loop.draw.chance(0.08):
        from glue_compiler.testing.fuzz.twists import state

        state(loop.draw, Value("x", "float", 2))


def _over_masks(loop: Loop, selected: str, weights: str) -> None:
    """R and RG."""
    draw = loop.draw
    mask = _mask(loop, selected) if draw.chance(0.6) else None
    out = _zeros(draw)
    inside, behind = _counter(loop, out)
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
        token, slot = _rows_of(loop, selected, mask, "e")
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
                _one_expert(loop, weights, out, token, slot, "e", inside)
        else:
            _one_expert(loop, weights, out, token, slot, "e", inside)
    if behind:
        draw.emit(behind, twist=True)
    _finish(loop, out)


def _one_expert(loop: Loop, weights: str, out: str, token: str, slot: str, e: str, inside: str) -> None:
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
    done = _body(loop, rows, e)
    if inside:
        draw.emit(inside, twist=True)
    _state_inside(loop)
    rows = draw.let("rows", _weighted(loop, done, weights, token, slot), "float", 2)
    _added(loop, out, token, rows)


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
    out = _zeros(draw)
    inside, behind = _counter(loop, out)
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
            done = _body(loop, f"x[{token}]", "e")
            if inside:
                draw.emit(inside, twist=True)
            _added(loop, out, token, f"{done} * {dense}[{token}, e, None]")
        else:
            _one_expert(loop, weights, out, token, slot, "e", inside)
    if behind:
        draw.emit(behind, twist=True)
    _finish(loop, out)


def _bool(loop: Loop, selected: str, weights: str) -> None:
    """BOOL: research code."""
    draw = loop.draw
    out = _zeros(draw)
    inside, behind = _counter(loop, out)
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
        done = _body(loop, f"x[{chosen}]", "e")
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
    _finish(loop, out)


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
    _finish(loop, out)


def _over_pieces(loop: Loop, selected: str, weights: str) -> None:
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
        done = _body(loop, f"{rows}[start:end]", "e")
        _state_inside(loop)
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


def _split(loop: Loop, selected: str, weights: str) -> None:
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
        done = _body(loop, "pieces[e]", "e")
        draw.emit(f"outs.append({done})")
    all_rows = draw.let(
        "joined", draw.mostly("torch.cat(outs, dim=0)", "torch.cat(outs)", "torch.vstack(outs)"), "float", 2
    )
    _combine(loop, weights, order, all_rows)


def _slice(loop: Loop, selected: str, weights: str) -> None:
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
        done = _body(loop, f"{rows}[start:end]", "e")
        draw.emit(f"{joined}[start:end] = {done}")
    _combine(loop, weights, order, joined)
