"""Models of padded batches with ``options={"padding": "drop"}``: what is compared is what the padding mask shows."""

from __future__ import annotations

from tools.fuzz import spellings
from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.programs import Statement

_WEIGHTS = ("words", "places", "joint", "out", "up", "down", "gain", "bias")
INPUTS = ("ids", "pad", "labels", *_WEIGHTS)


def draw_padding(draw: Draw) -> Drawn:
    """Embeddings, layers that attend under the padding mask, and losses; some read padding, and are to be left alone.

    What a program gives at hidden positions are zeros by contract, so it returns results without them.
    """
    draw.grows = draw.grows or (draw.chance(0.3) and not draw.small and not draw.one_graph)
    draw.need(
        "sizes", f"ROWS, LENGTH, WORDS, SIZE, HEADS = {draw.mostly(3, 1, 2)}, {draw.mostly(7, 5, 9, 37)}, 12, 8, 2"
    )
    draw.need("padded", PADDED)
    draw.need("seen_only", SEEN_ONLY)
    model = draw.inner(draw.twists / 2)
    model.small, model.one_graph = draw.small, draw.one_graph
    in_regions = draw.chance(0.25) and not draw.small and not draw.one_graph
    _model(model, in_regions=in_regions)
    body = (*model.statements(), Statement(f"return ({''.join(f'{each}, ' for each in ('shown', *model.outputs))})"))
    draw.prelude["model"] = Statement(f"def model({', '.join(INPUTS)}):", body)
    draw.uses_state, draw.precision = model.uses_state, model.precision
    if any(each in repr((body, draw.prelude)) for each in ("bfloat16", ".half()")):
        # Products of fewer rows differ in their last bits, and are rounded; so are sums of gradients.
        draw.precision = "bfloat16"
    draw.emit(f"shown, *found = model({', '.join(INPUTS)})")
    draw.emit("found = [seen_only(each, shown) for each in found]")
    draw.outputs.append("*found")
    compiled = draw.mostly(("model",), ("f",), share=0.7)
    if not in_regions:
        draw.spoil("gain.data[0] = float('nan')", "gradient")
        draw.spoil("bias.data[-1] = float('inf')", "gradient")
    others = (("regions", "auto"),) if in_regions else (("prefix", "share"),) if draw.chance(0.5) else ()
    return Drawn(_made(draw), INPUTS, compiled, options=(("padding", "drop"), *others))


def _made(draw: Draw) -> tuple[Statement, ...]:
    def weight(name: str, sizes: str, scale: str = " * 0.5") -> Statement:
        grad = draw.mostly("", ", requires_grad=False", share=0.9)
        text = f"torch.randn({sizes}, dtype=FLOAT, generator=g{draw.at})"
        # The sizes of parameters are never dynamic.
        return Statement(f"{name} = torch.nn.Parameter({text}{scale}{grad})")

    how = draw.pick("right", "right", "left", "left", "holes", "holes", "none", "any", "any")
    dtype = draw.mostly("", ".bool()", ".int()", ".to(FLOAT)")
    return (
        draw.generator,
        draw.size("length", "LENGTH"),
        Statement(f"ids = torch.randint(0, WORDS, (ROWS, length), generator=g{draw.at})"),
        Statement(f"pad, labels = padded({how!r}, ids, g)"),
        Statement(f"pad = pad{dtype}") if dtype else Statement("pad = pad.clone()"),
        *(Statement(each) for each in (_BEGINNINGS if draw.chance(0.6) else ())),
        weight("words", "WORDS, SIZE", ""),
        weight("places", "64, SIZE"),
        weight("joint", "3 * SIZE, SIZE"),
        weight("out", "SIZE, SIZE"),
        weight("up", "2 * SIZE, SIZE"),
        weight("down", "SIZE, 2 * SIZE"),
        weight("gain", "SIZE"),
        weight("bias", "WORDS"),
    )


_BEGINNINGS = (
    "shared = torch.randint(0, length + 1, (ROWS,), generator=g)",
    "ids = torch.where(torch.arange(length) < shared[:, None], ids[:1], ids)",
    "labels = labels.masked_fill(torch.arange(length) < torch.randint(0, length, (ROWS, 1), generator=g), -100)",
)
"""Rows begin like the first one, and some labels of theirs are ignored."""


def _model(draw: Draw, *, in_regions: bool) -> None:
    draw.emit("B, T = ids.shape")
    if draw.chance(0.04):  # only shows more: a batch that is hidden whole is an error
        draw.emit(draw.pick("pad = pad.clone(); pad[:, :1] = 1", "pad = pad.clone(); pad[0] = 1", "pad = pad.clone()"))
    draw.emit(f"shown = {draw.mostly('pad != 0', 'pad.bool()', 'pad > 0', 'pad == 1', 'pad.ne(0)')}")
    mask = _Mask(draw)
    table = draw.mostly("words", "words * 2", "words.detach()")
    hidden = f"F.embedding(ids, {table})"
    draw.emit(f"hidden = {draw.mostly(hidden, f'{hidden}.mul_(0.5)', 'words[ids]', share=0.9)}")
    draw.values.append(Value("hidden", "float", 3))
    _position(draw)
    layers = 1 if draw.small else draw.mostly(1, 2, 3)
    reader_at = draw.integer(0, layers - 1) if draw.chance(0.08) and not in_regions else None
    is_called = draw.chance(0.35)
    if in_regions:
        _called_layer(draw, mask, times=4)
        layers = 0
    for number in range(layers):
        if is_called:
            _called_layer(draw, mask)
        else:
            _layer(draw, mask)
        if number == reader_at:
            draw.emit(f"hidden = {draw.pick(*READERS)}")
        draw.maybe_twist()
    draw.outputs += _results(draw, reads_padding=not in_regions)
    if draw.chance(0.1):  # tokens of their own, of the same sizes, which no mask hides
        draw.outputs.append(f"F.embedding(ids.flip(1), words).{draw.pick('tanh', 'sin')}().square().sum()")


def _called_layer(draw: Draw, mask: _Mask, times: int = 1) -> None:
    """A layer that is a function of its own, mostly in a checkpoint; more than once, as modules that a loop calls."""
    inner = draw.inner()
    inner.values.append(Value("hidden", "float", 3))
    inner.emit("B, T = hidden.shape[:2]")
    if times > 1:  # else the numbers of many layers grow without bounds
        inner.emit("hidden = F.layer_norm(hidden, (SIZE,), eps=0.1)")
    _layer(inner, mask)
    name = draw.name("layer_")
    given = f"hidden, mask, shown, {', '.join(_WEIGHTS)}"
    statements = (*inner.statements(), Statement("return hidden"))
    draw.prelude[name] = Statement(f"def {name}({given}):", statements)
    is_checkpoint = draw.chance(0.9 if times == 1 else 0.6)
    if times > 1:
        draw.need("modules", MODULES)
        kind = "Again" if is_checkpoint else "Layer"
        draw.prelude["MODEL"] = Statement(f"MODEL = torch.nn.ModuleList({kind}({name}) for _ in range({times}))")
        draw.emit("model_layers = MODEL")
        with draw.block("for layer in model_layers:"):
            draw.emit(f"hidden = layer({given})")
        return
    draw.emit(
        f"hidden = {f'checkpoint({name}, {given}, use_reentrant=False)' if is_checkpoint else f'{name}({given})'}"
    )


class _Mask:
    """The mask of attention, ``mask``: what it is made of, and whether it is added."""

    def __init__(self, draw: Draw) -> None:
        key = draw.mostly("shown[:, None, None, :]", "shown.view(B, 1, 1, T)", "shown.unsqueeze(1).unsqueeze(2)")
        self.is_causal = draw.chance(0.6)
        causal = draw.mostly(
            "torch.ones(T, T, dtype=torch.bool{at}).tril()",
            "torch.arange(T{at})[None, :] <= torch.arange(T{at})[:, None]",
            "(torch.arange(T{at}).view(-1, 1) >= torch.arange(T{at}))",
            "~torch.ones(T, T, dtype=torch.bool{at}).triu(1)",
            share=0.4,
        ).format(at=draw.at)
        seen = f"{key} & ({causal})" if self.is_causal else draw.pick(key, f"{key}.expand(B, 1, T, T)")
        if draw.chance(0.02):
            seen = f"({seen}) & shown[:, None, :, None]"
        draw.emit(f"mask = {seen}")
        self.is_added = draw.chance(0.4)
        if self.is_added:
            least = "torch.finfo(words.dtype).min"
            draw.emit(
                draw.pick(
                    f"mask = torch.zeros_like(mask, dtype=words.dtype).masked_fill(~mask, {least})",
                    f"mask = (1.0 - mask.to(words.dtype)) * {least}",
                    f"mask = torch.where(mask, 0.0, {least}).to(words.dtype)",
                    f"mask = torch.zeros(mask.shape, dtype=words.dtype{draw.at}).masked_fill_(~mask, {least})",
                )
            )


def _position(draw: Draw) -> None:
    if not draw.chance(0.4):
        return
    position = draw.pick(
        f"places[torch.arange(T{draw.at})]",
        f"F.embedding(torch.arange(T{draw.at}), places)[None]",
        "places[:T]",
        "F.embedding((shown.long().cumsum(1) - 1).clamp(min=0), places)",
        f"F.embedding(torch.arange(T{draw.at})[None].expand(B, -1), places)",
    )
    draw.emit(f"hidden = hidden + {position}")
    draw.maybe_twist()


def _layer(draw: Draw, mask: _Mask) -> None:
    parts = [lambda draw: _attention(draw, mask), *draw.pick((_mlp,), (_norm, _mlp), (_norm,), (_mlp, _gate), ())]
    if draw.chance(0.3):
        parts.insert(0, _norm)
    if draw.chance(0.12):
        parts.append(_function)
    for part in parts:
        part(draw)
        draw.maybe_twist()


def _norm(draw: Draw) -> None:
    draw.emit(
        "hidden = "
        + draw.pick(
            "F.layer_norm(hidden, (SIZE,), gain, eps=0.1)",
            "F.layer_norm(hidden, (SIZE,), eps=0.1)",
            "hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 0.1) * gain",
            "F.rms_norm(hidden, (SIZE,), gain, 0.1)",
            "F.normalize(hidden, dim=-1, eps=0.1) * gain",
            "hidden - hidden.mean(-1, keepdim=True)",
        )
    )


def _mlp(draw: Draw) -> None:
    wide = draw.let("wide", draw.mostly("F.linear(hidden, up)", "hidden @ up.t()"), "float", 3)
    bent = draw.pick("F.gelu({})", "{}.tanh()", "F.silu({}) * 0.5", "{}.relu()", "F.dropout({}.sin(), 0.0)")
    if draw.chance(0.15):
        flat = draw.let(
            "flat", f"{wide}.{draw.pick('view(-1, 2 * SIZE)', 'flatten(0, 1)', 'reshape(B * T, -1)')}", "float", 2
        )
        back = draw.pick("view(B, T, SIZE)", "unflatten(0, (B, T))")
        draw.emit(f"hidden = hidden + F.linear({bent.format(flat)}, down).{back}")
    else:
        draw.emit(f"hidden = hidden + F.linear({bent.format(wide)}, down)")


def _gate(draw: Draw) -> None:
    wide = draw.let("wide", "F.linear(hidden, up)", "float", 3)
    one, other = draw.name("piece"), draw.name("piece")
    text = draw.pick(f"{wide}.chunk(2, -1)", f"{wide}.split([SIZE, SIZE], -1)", f"{wide}.view(B, T, 2, SIZE).unbind(2)")
    draw.emit(f"{one}, {other} = {text}")
    draw.values += [Value(one, "float", 3), Value(other, "float", 3)]
    draw.maybe_twist()
    draw.emit(f"hidden = hidden + {draw.pick('torch.sigmoid', 'F.silu', 'F.softplus')}({one}) * {other}")
    if draw.chance(0.3):
        draw.emit(
            draw.pick(
                "hidden = torch.where(shown[..., None], hidden, 0.0)",
                "hidden = hidden * shown.unsqueeze(-1)",
                "hidden = hidden.masked_fill(~shown[:, :, None], 0)",
                "hidden = hidden + hidden.topk(2, -1).values.sum(-1, keepdim=True)",
                "hidden = hidden.softmax(-1) + hidden.cumsum(-1)",
                "hidden = torch.cat([hidden[..., 1:], hidden[..., :1]], -1)",
            )
        )


def _function(draw: Draw) -> None:
    """Of autograd, with a backward of its own: token by token or not, zero where the gradient is zero or not."""
    name = draw.name("Own")
    forward = draw.pick("F.linear(x, weight)", "x @ weight", "x * 2.0", "-x", "x * weight[0]")
    backward = draw.pick(
        "g @ weight",
        "torch.matmul(g, weight.t())",
        *("g * 2", "-g * saved", "g * g", "g.long().to(g.dtype)", "g.bool() * g"),
        "g * weight[0] + g",
        "g + 1",
        "g @ weight + saved * 0.1",
        "g - g.mean(1, keepdim=True)",
        "g.cos()",
    )
    draw.prelude[name] = Statement(
        f"class {name}(torch.autograd.Function):",
        (
            Statement("@staticmethod"),
            Statement(
                "def forward(ctx, x, weight):",
                (Statement("ctx.save_for_backward(x, weight)"), Statement(f"return {forward}")),
            ),
            Statement("@staticmethod"),
            Statement(
                "def backward(ctx, g):",
                (Statement("saved, weight = ctx.saved_tensors"), Statement(f"return {backward}, None")),
            ),
        ),
    )
    draw.emit(f"hidden = {draw.mostly('hidden + ', '')}{name}.apply(hidden, out.detach())")


def _attention(draw: Draw, mask: _Mask) -> None:
    q, k, v = (draw.name(name) for name in "qkv")
    split = draw.pick(
        "F.linear(hidden, joint).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)",
        "(each.view(B, T, HEADS, -1).transpose(1, 2) for each in F.linear(hidden, joint).chunk(3, -1))",
        "(each.reshape(B, T, HEADS, SIZE // HEADS).transpose(1, 2) for each in (hidden @ joint.t()).split(SIZE, 2))",
        "(F.linear(hidden, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in joint.chunk(3))",
    )
    draw.emit(f"{q}, {k}, {v} = {split}")
    if draw.chance(0.2):
        draw.need("turned", TURNED)
        draw.emit(f"{q}, {k} = turned({q}), turned({k})")
    if draw.chance(0.65):
        given = f"mask.to({q}.dtype)" if mask.is_added else "mask"
        text = f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={given})"
        if draw.chance(0.02):
            text = f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)"  # sees padding
    else:
        scores = f"{spellings.product(draw, q, spellings.transposed(draw, k))} * 0.5"
        least = "torch.finfo(words.dtype).min"
        scores = f"{scores} + mask" if mask.is_added else f"({scores}).masked_fill(~mask, {least})"
        weights = draw.let("weights", spellings.softmax(draw, scores, 4), "float", 4)
        text = spellings.product(draw, f"{weights}.to({v}.dtype)", v)
    found = draw.let("found", text, "float", 4)
    joined = draw.pick(
        f"{found}.transpose(1, 2).reshape(B, T, SIZE)",
        f"{found}.permute(0, 2, 1, 3).contiguous().view(B, T, -1)",
        f"{found}.transpose(1, 2).flatten(2)",
    )
    draw.emit(f"hidden = {draw.mostly('hidden + ', '')}F.linear({joined}, out)")


def _results(draw: Draw, *, reads_padding: bool) -> list[str]:
    found = []
    how = draw.pick("loss", "loss", "loss", "loss", "hidden", *(["pooled"] if reads_padding else []))
    if how == "pooled":
        pooled = draw.mostly(draw.pick(*POOLED), *POOLED_OF_PADDING, share=0.6).replace("{at}", draw.at)
        found.append(draw.let("pooled", pooled, "float", 2))
    if how == "hidden" or draw.chance(0.3):
        found.append("hidden")
    if how == "loss":
        rows = draw.mostly("hidden", "F.layer_norm(hidden, (SIZE,), gain)")
        head = draw.mostly("F.linear({}, words)", "F.linear({}, words, bias)", "{} @ words.t() + bias")
        logits = draw.let("logits", head.format(rows), "float", 3)
        unread = (UNREAD,) if reads_padding else ()
        loss = draw.mostly(draw.pick(*LOSSES[: None if reads_padding else 7]), *unread, share=0.95).format(
            logits, classes=f"{logits}.shape[-1]"
        )
        draw.precision = "float32" if ".float()" in loss and draw.precision == "float64" else draw.precision
        found.insert(0, draw.let("loss", loss, "float", 0))
        if draw.chance(0.5):
            found.append(logits)
    return found


_EACH = "F.cross_entropy({}[:, :-1].reshape(-1, {classes}), labels[:, 1:].reshape(-1), reduction='none')"
LOSSES = (
    "F.cross_entropy({}.flatten(0, 1), labels.flatten())",
    "F.cross_entropy({}.view(-1, {classes}), labels.view(-1), ignore_index=-100)",
    "F.cross_entropy({}.transpose(1, 2), labels)",
    "F.cross_entropy({}.flatten(0, 1), labels.flatten(), reduction='sum') / 7",
    "F.cross_entropy({}.transpose(1, 2), labels, reduction='none').sum()",
    "F.cross_entropy({}[:, :-1].reshape(-1, {classes}), labels[:, 1:].reshape(-1))",
    "F.cross_entropy({}[..., :-1, :].contiguous().view(-1, {classes}), labels[..., 1:].contiguous().view(-1))",
    f"{_EACH}.mean()",
    f"{_EACH}.std()",
    f"{_EACH}.view(B, T - 1).mean(-1).square().sum()",
    f"{_EACH}.view(B, -1).mean(-1).square().sum()",
    f"({_EACH} * shown[:, 1:].reshape(-1)).sum() / shown.sum()",
    f"{_EACH}.topk(3).values.sum()",
    "F.cross_entropy({}.view(-1, {classes}), F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1))",
    "F.cross_entropy({}.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1).double()",
    "({}.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1) * shown).sum()",
    "-torch.where(shown, {}.log_softmax(-1).gather(-1, ids[..., None])[..., 0], 0.0).sum() / shown.sum()",
)
UNREAD = "F.nll_loss({}.log_softmax(-1).flatten(0, 1), labels.flatten())"
POOLED = (
    "(hidden * shown.unsqueeze(-1)).sum(1) / shown.sum(1, keepdim=True).clamp(min=1)",
    "(hidden * shown[..., None].to(hidden.dtype)).sum(1)",
    "hidden.masked_fill(~shown.unsqueeze(-1), 0).sum(1)",
    "torch.where(shown[..., None], hidden, 0.0).sum(1)",
    "hidden[torch.arange(B), (shown * torch.arange(T)).argmax(1)]",
    "hidden[torch.arange(B), shown.long().argmax(1)]",
    "hidden[torch.arange(B), shown.long().argmax(1), :4].tanh()",
    "(hidden * shown.unsqueeze(-1))[shown.sum(1).argsort()].mean(1)",
    "(hidden * shown.unsqueeze(-1))[:, 1:].amax(1)",
    "(hidden * shown.unsqueeze(-1))[:, :-1].reshape(B, -1)",
    "(hidden * shown.unsqueeze(-1))[0].mean(0).expand(B, -1)",
    "(hidden * shown.unsqueeze(-1)).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1).std(1).reshape(B, -1)",
)
POOLED_OF_PADDING = (
    "hidden.masked_fill(~shown.unsqueeze(-1), -1e9).amax(1)",
    "hidden.mean(1)",
    "hidden[shown].sum(0, keepdim=True)",
    "hidden[0].mean(0).expand(B, -1)",
    "hidden.select(0, -1).amax(0)[None].expand(B, -1)",
    "hidden[:2].mean(1).sum(0).expand(B, -1)",
    "hidden[shown.sum(1).argsort()].mean(1)",
    "torch.stack([row.amax(0) for row in hidden])",
    "torch.stack(hidden.unbind(1)).std(0)",
    "hidden[:, torch.arange(T{at})].mean(1)",
    "hidden[:, :3].mean(1)",
    "hidden[torch.arange(B{at}), 1:].std(1)",
    "hidden.reshape(-1, SIZE)[torch.arange(T{at})].mean(0).expand(B, -1)",
    "hidden.index_select(1, torch.arange(2{at})).sum(1)",
    "hidden[torch.arange(B{at})[:, None], torch.arange(2{at})].amax(1)",
    "hidden[torch.arange(B{at}) // 2, shown.long().argmax(1)]",
    "hidden.gather(1, torch.arange(SIZE{at}).remainder(2).expand(B, 1, -1)).squeeze(1)",
)
READERS = (
    "hidden.cumsum(1)",
    "hidden - hidden.mean(1, keepdim=True)",
    "hidden - hidden.mean()",
    "hidden.flip(1)",
    "hidden + hidden.roll(1, 1)",
    "hidden + torch.cat([hidden[:, 1:], hidden[:, :1]], 1)",
    "hidden + F.conv1d(hidden.mT, out[..., None].expand(-1, -1, 3), padding=1).mT",
    "F.layer_norm(hidden, hidden.shape[1:])",
    "F.batch_norm(hidden.mT, None, None, training=True).mT",
    "hidden * hidden.amax((0, 1))",
    "hidden + hidden.sort(1).values",
    "hidden.softmax(1) + hidden",
    "hidden + F.pad(hidden, (0, 0, 1, 0))[:, :-1]",
    "hidden + torch.einsum('btc,ts->bsc', hidden, torch.ones(T, T, dtype=hidden.dtype))",
    "hidden + hidden.reshape(T, B, SIZE).transpose(0, 1)",
    "hidden + hidden.norm(dim=1, keepdim=True)",
    "hidden.where(hidden > hidden.median(), 0)",
    "hidden + hidden[:1]",
    "hidden + hidden[shown.sum(1).argsort()]",
    "hidden + hidden[:, :2].mean(1, keepdim=True)",
    "hidden + torch.stack([row.softmax(0) for row in hidden])",
    "hidden * hidden.gather(1, shown.long().argsort(1)[..., None].expand(-1, -1, SIZE))",
)
PADDED = """
def padded(how, ids, g):
    rows, length = ids.shape
    kinds = ["right", "left", "holes", "none"]
    mask = torch.ones_like(ids)
    for row in range(rows):
        kind = kinds[int(torch.randint(4, (), generator=g, device=ids.device))] if how == "any" else how
        hidden = int(torch.randint(0, length - 1, (), generator=g, device=ids.device))
        if kind == "right":
            mask[row, length - hidden :] = 0
        elif kind == "left":
            mask[row, :hidden] = 0
        elif kind == "holes":
            mask[row, torch.randperm(length, generator=g, device=ids.device)[:hidden]] = 0
    before = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)  # a label belongs to the token in front, too
    labels = ids.masked_fill((mask == 0) | (before == 0), -100)
    some = torch.rand(ids.shape, generator=g, device=ids.device) < 0.2
    return mask, labels.masked_fill(some, -100)
"""
MODULES = """
class Layer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inner, self.layer = torch.nn.Identity(), layer

    def forward(self, *given):
        return self.layer(*given)


class Again(Layer):
    def forward(self, *given):
        return checkpoint(super().forward, *given, use_reentrant=False)
"""
SEEN_ONLY = """
def seen_only(value, shown):
    if value.dim() < 2 or tuple(value.shape[:2]) == tuple(shown.shape):
        return torch.where(shown.view(*shown.shape, *[1] * (value.dim() - 2)), value, 0) if value.dim() > 1 else value
    if value.dim() == 4 and (value.shape[0], value.shape[2]) == tuple(shown.shape):
        return torch.where(shown[:, None, :, None], value, 0)
    return value if value.shape[0] == shown.shape[0] and shown.shape[1] not in value.shape else None
"""
TURNED = """
def turned(x):
    angle = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * 0.3
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
"""
