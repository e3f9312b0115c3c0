"""Programs with attention: masks from token numbers, documents, windows and padding, in ``sdpa`` or written out."""

from __future__ import annotations

from tools.fuzz import spellings
from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.masks import Masks, Sizes
from tools.fuzz.programs import Statement


def draw_attention(draw: Draw) -> Drawn:
    """Attention with one to two layers; the statements go into ``draw``."""
    sizes = Sizes(
        batch=draw.pick(1, 1, 2),
        heads=draw.pick(1, 2, 2, 4),
        key_heads=0,
        length=draw.mostly(6, 1, 3, 8, 12),
        keys=0,
        head=draw.mostly(2, 1, 4),
    )
    sizes.key_heads = draw.pick(*(n for n in (1, 2, 4, sizes.heads, sizes.heads) if sizes.heads % n == 0))
    sizes.keys = sizes.length if draw.chance(0.9) else sizes.length + draw.integer(1, 3)
    masks = Masks(draw, sizes)
    draw.need("restarting", RESTARTING)
    draw.need("split_of", SPLIT_OF)
    draw.need(
        "sizes",
        "B, HEADS, KEY_HEADS, LENGTH, KEYS, SIZE = "
        + f"{sizes.batch}, {sizes.heads}, {sizes.key_heads}, {sizes.length}, {sizes.keys}, {sizes.head}",
    )
    for name in ("query", "key", "value"):
        draw.values.append(Value(name, "float", 4, is_leaf=True))
    draw.emit("B, T, S = query.shape[0], query.shape[2], key.shape[2]")
    hidden = "query"
    for _ in range(draw.pick(1, 1, 1, 2)):
        hidden = _layer(draw, masks, hidden)
    draw.outputs.append(hidden)
    made = [
        draw.generator,
        draw.size("T", "LENGTH"),
        draw.size("S", "KEYS"),
    ]
    for name, heads, length in (("query", "HEADS", "T"), ("key", "KEY_HEADS", "S"), ("value", "KEY_HEADS", "S")):
        grad = ".requires_grad_()" if draw.chance(0.9) else ""
        made.append(
            Statement(f"{name} = torch.randn(B, {heads}, {length}, SIZE, dtype=FLOAT, generator=g{draw.at}){grad}")
        )
    made += [Statement(f"{name} = {text}") for name, text in masks.inputs.items()]
    _offer_spoils(draw, masks)
    return Drawn(tuple(made), ("query", "key", "value", *masks.inputs))


def _offer_spoils(draw: Draw, masks: Masks) -> None:
    """Numbers that are not finite, and masks that hide all; docs/specialize_attention.md, "What differs"."""
    text = "\n".join(line for statement in draw.statements() for line in statement.lines())
    written_out = "softmax" in text
    if written_out and "inf" in text:  # all keys of a query hidden by minus infinities: zeros, if two masks do it
        has_one = text.count("inf") == text.count("softmax") == 1 and "scaled_dot" not in text
        draw.nan_may_vanish = ("gradient",) if has_one else ("output", "gradient")
    for name in masks.inputs.keys() & {"pad", "pads", "wide_pad", "starts"}:
        draw.spoil(f"{name}.zero_()")
        draw.spoil(f"{name}[:1] = 0")
    if "masked_fill" in text or "where" in text:  # a row of NaN beside zeros filled in weights
        return
    for name in ("query", "key", "value"):
        for number in ("nan", "inf"):
            # A kernel reads no value that a query does not see. Where all scores are NaN, torch's gives zeros.
            is_unread = (name, number) == ("value", "nan")
            draw.spoil(f"{name}.data[:, :, :1] = float({number!r})", "output", "gradient", is_unread=is_unread)


def _layer(draw: Draw, masks: Masks, query: str) -> str:
    sizes = masks.sizes
    grouped = sizes.heads != sizes.key_heads
    use_gqa = grouped and draw.chance(0.3)
    key, value = "key", "value"
    if sizes.heads > 1 and draw.chance(0.2):
        use_gqa = draw.chance(0.7)
        divisors = [n for n in range(1, sizes.heads + 1) if sizes.heads % n == 0]
        heads = draw.pick(*divisors) if use_gqa else sizes.heads
        times = max(2, -(-heads // sizes.key_heads)) + draw.pick(0, 0, 1)
        how, piece = draw.integer(0, 4), draw.pick(f"[:, :{heads}]", f"[:, -{heads}:]", f".narrow(1, 0, {heads})")
        texts = (_repeated(name, times, how).replace("HEADS", f"{sizes.key_heads * times}") for name in (key, value))
        key, value = (draw.let("again", f"{text}{piece}", "float", 4) for text in texts)
    elif grouped and not use_gqa:
        times = sizes.heads // sizes.key_heads
        how = draw.integer(0, 4)
        key, value = (draw.let(name, _repeated(name, times, how), "float", 4) for name in (key, value))
    written = draw.chance(0.45) and not use_gqa
    if not written:
        mask = masks.boolean() if draw.chance(0.6) else masks.added()
        if not draw.one_graph and draw.chance(0.12):  # the mask goes from one graph to another
            draw.emit("torch._dynamo.graph_break()")
            draw.maybe_twist()
        return _operator(draw, query, key, value, mask, use_gqa)
    return _written_out(draw, masks, query, key, value)


def _repeated(name: str, times: int, how: int) -> str:
    wide = f"{name}[:, :, None].expand(-1, -1, {times}, -1, -1)"
    return (
        f"{wide}.reshape(B, HEADS, S, SIZE)",
        f"{wide}.flatten(1, 2)",
        f"{name}.repeat_interleave({times}, dim=1)",
        f"{name}.repeat(1, {times}, 1, 1)",
        f"torch.repeat_interleave(input={name}, repeats={times}, dim=1)",
    )[how]


def _operator(draw: Draw, query: str, key: str, value: str, mask: str, use_gqa: bool) -> str:
    further = ""
    if draw.chance(0.3):
        further += f", scale={draw.pick('0.3', '1.0', '0.0', '-0.5', '1')}"
    if draw.chance(0.2):
        further += ", dropout_p=0.0"
    if use_gqa:
        further += ", enable_gqa=True"
    if draw.chance(0.2):
        further += ", is_causal=False"
    text = draw.pick(
        f"F.scaled_dot_product_attention({query}, {key}, {value}, attn_mask={mask}{further})",
        f"F.scaled_dot_product_attention({query}, {key}, {value}, {mask}{further})",
        f"F.scaled_dot_product_attention(value={value}, query={query}, key={key}, attn_mask={mask}{further})",
    )
    return draw.let("out", text, "float", 4)


def _written_out(draw: Draw, masks: Masks, query: str, key: str, value: str) -> str:
    is_merged = draw.chance(0.35)
    if is_merged:
        merged = (_merged(draw, name, length) for name, length in ((query, "T"), (key, "S"), (value, "S")))
        query, key, value = (draw.let("rows", text, "float", 3) for text in merged)
        text = _merged_product(draw, masks, query, key)
    else:
        if draw.chance(0.06):  # a product of four dimensions with three takes one of these for each head
            key, value = (draw.let("rows", f"{each}.flatten(0, 1)", "float", 3) for each in (key, value))
        text = spellings.product(draw, query, spellings.transposed(draw, key))
    scale = draw.mostly("0.25", "0.5", "1", "0.0", "-0.5")
    text = draw.mostly(
        f"{text} * {scale}",
        text,
        f"{scale} * {text}",
        f"{text} / 2.0",
        f"torch.mul({text}, {scale})",
        f"torch.div({text}, 2)",
    )
    scores = draw.let("scores", text, "float", 3 if is_merged else 4)
    visible = factor = ""
    how = draw.integer(0, 9)
    if is_merged and how < 9:
        scores = draw.let("scores", _regrouped(draw, scores, "B, HEADS, T, S"), "float", 4)
    regroups = not is_merged and draw.chance(0.06)
    if regroups:
        scores = draw.let("scores", _regrouped(draw, scores, draw.pick("HEADS, B, T, S", "1, -1, T, S")), "float", 4)
    if how < 9 and draw.chance(0.1):  # by a mask, as openai-gpt has it, or other numbers
        factor = masks.boolean()
        by = draw.pick(factor, f"({factor}).to(FLOAT)", f"({masks.learned()}).detach()")
        scores = draw.let("scores", draw.pick(f"{scores} * {by}", f"torch.mul({by}, {scores})"), "float", 4)
    if how < 9 and draw.chance(0.2):
        scores = draw.let("scores", f"{scores} + {masks.added()}", "float", 4)
    elif how < 9 and draw.chance(0.15):  # as gpt_neo has two masks
        low = draw.pick("float('-inf')", "torch.finfo(FLOAT).min", "-1e30", "-1e9", "-20.0")
        text = f"torch.where({masks.boolean()}, {scores}, torch.full((), {low}, dtype=FLOAT{draw.at}))"
        scores = draw.let("scores", text, "float", 4)
    if how < 4:
        bias = masks.added()
        text = draw.mostly(
            f"{scores} + {bias}",
            f"{bias} + {scores}",
            f"torch.add({scores}, {bias})",
            f"{scores}.add({bias})",
            f"torch.add({scores}, {bias}, alpha=1)",
            f"torch.add({scores}, {bias}, alpha=0.5)",
            f"{scores}.sub(-{bias})",
            f"{scores}.add_({bias})",
            f"({scores} + {bias}) * 0.5",
            f"({scores} + {bias}) / 2",
        )
    elif how < 6:
        visible = factor if factor and draw.chance(0.5) else masks.boolean()
        hidden = spellings.inverted(draw, visible)
        text = draw.pick(
            f"{scores}.masked_fill({hidden}, float('-inf'))",
            f"{scores}.masked_fill({hidden}, torch.finfo(FLOAT).min)",
            f"torch.masked_fill({scores}, {hidden}, -1e30)",
            f"{scores}.masked_fill_({hidden}, -1e30)",
            f"torch.masked_fill(input={scores}, mask={hidden}, value=-1e30)",
        )
    elif how < 9:
        low = draw.pick("-1e30", f"torch.full((), -1e30, dtype=FLOAT{draw.at})", "torch.finfo(FLOAT).min")
        visible = factor if factor and draw.chance(0.5) else masks.boolean()
        text = spellings.where(draw, visible, scores, low, tensors=True)
    else:
        text = scores
    rank = 3 if is_merged and how == 9 else 4
    scores = draw.let("scores", text, "float", rank)
    if regroups:
        scores = draw.let("scores", _regrouped(draw, scores, "B, HEADS, T, S"), "float", 4)
    if is_merged and rank == 4:
        if draw.chance(0.2):
            scores = draw.let("scores", f"torch.max({scores}, torch.full((), -1e30, dtype=FLOAT{draw.at}))", "float", 4)
        rank = 3
        scores = draw.let("scores", _regrouped(draw, scores, "B * HEADS, T, S"), "float", rank)
    softmax = spellings.softmax(draw, scores, rank)
    if rank == 4 and draw.chance(0.2):
        softmax = _with_a_column(draw, masks, scores)
    weights = draw.let("weights", softmax, "float", rank, plain=f"F.softmax({scores}, dim=-1)")
    if draw.chance(0.3):
        weights = draw.let("weights", spellings.no_dropout(draw, weights), "float", rank)
    if rank == 4 and draw.chance(0.2):
        weights = draw.let("weights", _filled(draw, masks, weights, visible), "float", rank, plain=weights)
    if draw.chance(0.2):
        weights = draw.let(
            "weights",
            draw.pick(
                f"{weights}.to(query.dtype)",
                f"{weights}.type_as(query)",
                f"{weights}.half().to(FLOAT)",
                f"{weights}.to({value})",
                f"{weights}.to(torch.float64)",
            ),
            "float",
            rank,
        )
    if is_merged:
        text = draw.pick(f"torch.bmm({weights}, {value})", f"{weights} @ {value}", f"{weights}.bmm({value})")
        result = draw.let("result", text, "float", 3)
        return draw.let("out", _regrouped(draw, result, "B, HEADS, T, SIZE"), "float", 4)
    out = draw.let(
        "out",
        draw.pick(
            f"torch.matmul({weights}, {value})",
            f"{weights} @ {value}",
            f"torch.matmul(other={value}, input={weights})",
            f"{weights}.matmul({value})",
            f"torch.einsum('bhqk,bhkd->bhqd', {weights}, {value})",
        ),
        "float",
        4,
    )
    return draw.let("out", _gated(draw, masks, out, scores), "float", 4, plain=out) if draw.chance(0.2) else out


def _filled(draw: Draw, masks: Masks, weights: str, visible: str) -> str:
    """Zeros, rarely something else, where the mask hides a key, or where another one does."""
    visible = visible if visible and draw.chance(0.9) else masks.boolean()
    hidden = spellings.inverted(draw, visible)
    return draw.mostly(
        f"{weights}.masked_fill({hidden}, 0.0)",
        f"torch.where({visible}, {weights}, 0.0)",
        f"torch.masked_fill(input={weights}, mask={hidden}, value=torch.zeros((), dtype=FLOAT{draw.at}))",
        f"torch.where({visible}, {weights}, torch.zeros((), dtype=FLOAT{draw.at}))",
        f"{weights}.masked_fill({visible}, 0)",
        f"{weights}.masked_fill({hidden}, 0.5)",
    )


def _sinks(draw: Draw, masks: Masks) -> str:
    grad = ".requires_grad_()" if draw.chance(0.9) else ""
    drawn = draw.mostly(
        f"torch.randn(HEADS, dtype=FLOAT, generator=g{draw.at}){grad}",
        f"torch.full((HEADS,), float('-inf'), dtype=FLOAT{draw.at}){grad}",  # no sink
        f"torch.full((HEADS,), -1e30, dtype=FLOAT{draw.at}){grad}",
        share=0.7,
    )
    return masks.input("sinks", drawn, "float", 1, is_leaf=True)


def _with_a_column(draw: Draw, masks: Masks, scores: str) -> str:
    """Softmax over the scores and attention sinks, as gpt_oss has them; rarely another column is left out."""
    sinks = _sinks(draw, masks)
    column = draw.mostly(
        f"{sinks}.reshape(1, -1, 1, 1).expand(B, -1, T, -1)",
        f"{sinks}[None, :, None, None].expand(B, HEADS, T, 1)",
        f"{sinks}.view(1, -1, 1, 1) * torch.ones(B, HEADS, T, 1, dtype=FLOAT{draw.at})",
        f"({sinks}.view(1, -1, 1, 1) + {scores}[..., :1] * 0.5)",
        f"{sinks}.detach().view(1, -1, 1, 1).expand(B, -1, T, 1)",
    )
    joined = draw.mostly(
        f"torch.cat([{scores}, {column}], dim=-1)",
        f"torch.cat(({scores}, {column}), 3)",
        f"torch.cat([{column}, {scores}], dim=-1)",
    )
    if draw.chance(0.3):  # as gpt_oss does; the indices of the maximum nothing needs
        joined = draw.let("joined", joined, "float", 4)
        joined = f"({joined} - {joined}.max(dim=-1, keepdim=True).values)"
    every = draw.mostly(f"F.softmax({joined}, dim=-1)", f"torch.softmax({joined}, -1, dtype=FLOAT)")
    return draw.mostly(f"{every}[..., :-1]", f"{every}.narrow(-1, 0, S)", f"{every}[..., 1:]")


def _gated(draw: Draw, masks: Masks, out: str, scores: str) -> str:
    """Times what attention sinks leave of the weights, as granite_swa has them."""
    sinks = _sinks(draw, masks)
    logit = draw.mostly(
        f"torch.logsumexp({scores}, dim=-1) - {sinks}.view(1, -1, 1)",
        f"torch.sub({scores}.logsumexp(-1), {sinks}[:, None])",
        f"{scores}.logsumexp([3]) - {sinks}.reshape(HEADS, 1).expand(HEADS, T)",
        f"{scores}.logsumexp(-1) - {sinks}.view(1, -1, 1) * torch.arange(T).to(FLOAT)",
        f"torch.logsumexp({scores} * 1.0, dim=-1) - {sinks}.view(1, -1, 1)",
        f"torch.logsumexp({scores}, dim=-1) + {sinks}.view(1, -1, 1)",
        f"{scores}.logsumexp(-1).detach() - {sinks}.view(1, -1, 1)",
    )
    gate = draw.mostly(
        f"({logit}).sigmoid().unsqueeze(-1)",
        f"torch.sigmoid(({logit})[..., None])",
        f"({logit}).to(FLOAT).sigmoid()[..., None].expand(-1, -1, -1, SIZE)",
        f"({logit}).sigmoid().float().to(FLOAT).unsqueeze(3)",
        f"({logit}).tanh().unsqueeze(-1)",
    )
    return draw.pick(f"{out} * {gate}", f"{gate} * {out}", f"torch.mul(other={gate}, input={out})")


def _merged(draw: Draw, operand: str, length: str) -> str:
    """Rows and heads as one dimension, rarely with heads before rows, or of tensors with tokens in front."""
    return draw.mostly(
        f"{operand}.reshape(B * HEADS, -1, SIZE)",
        f"{operand}.contiguous().view(B * HEADS, {length}, SIZE)",
        f"{operand}.flatten(0, 1)",
        f"{operand}.transpose(0, 1).reshape(B * HEADS, -1, SIZE)",
        f"{operand}.transpose(1, 2).contiguous().transpose(1, 2).reshape(-1, {length}, SIZE)",
        f"{operand}.permute(2, 0, 1, 3).reshape({length}, B * HEADS, SIZE).transpose(0, 1)",
        share=0.6,
    )


def _merged_product(draw: Draw, masks: Masks, query: str, key: str) -> str:
    turned = f"{key}.transpose(1, 2)"
    if draw.chance(0.25):  # numbers for rows and heads together, as bloom adds them, or such that are not read
        factors = draw.mostly("alpha=0.5", "beta=1.0", "beta=0, alpha=0.25", "beta=0.5", "alpha=-0.5")
        # What is not read has a gradient of zeros.
        added = masks.learned() if "beta=0," in factors else masks.added()
        bias = f"({added}).expand(B, HEADS, T, S).reshape(B * HEADS, T, S)"
        return draw.mostly(
            f"torch.baddbmm({bias}, {query}, {turned}, {factors})",
            f"{bias}.baddbmm(batch2={turned}, batch1={query}, {factors})",
            f"torch.add(torch.bmm({query}, {turned}), {bias})",
        )
    return draw.mostly(
        f"torch.bmm({query}, {turned})",
        f"({query} @ {turned})",
        f"{query}.bmm({key}.mT)",
        f"torch.einsum('nqd,nkd->nqk', {query}, {key})",
        f"torch.baddbmm(torch.zeros((), dtype={query}.dtype{draw.at}), {query}, {turned})",
    )


def _regrouped(draw: Draw, operand: str, sizes: str) -> str:
    return draw.mostly(
        f"{operand}.view({sizes})",
        f"{operand}.reshape({sizes})",
        f"torch.reshape({operand}, ({sizes}))",
        f"{operand}.contiguous().view({sizes})",
    )


RESTARTING = """
def restarting(length, generator):
    where = torch.arange(length, device=generator.device)
    starts = torch.rand(length, generator=generator, device=generator.device) < 0.3
    return where - torch.where(starts, where, 0).cummax(0).values
"""
SPLIT_OF = """
def split_of(total, parts, generator):
    cuts = torch.randint(0, total + 1, (parts - 1,), generator=generator, device=generator.device).sort().values
    ends = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), total)])
    return ends.diff()
"""
