"""Training steps that save much for backward: layers of products, attention, writes and views, checkpointed or not."""

from __future__ import annotations

from tools.fuzz.draw import Draw, Drawn, Value
from tools.fuzz.programs import Statement

INPUTS = ("x", "up", "down", "gain", "frozen", "buffer", "ids")


def draw_steps(draw: Draw) -> Drawn:
    """Two to six layers ``(hidden, *INPUTS[1:]) -> hidden``, some of them the same function."""
    draw.need("sizes", f"ROWS, WIDTH = {draw.mostly(6, 1, 4, 9)}, {draw.mostly(4, 2, 8)}")
    draw.values += [Value(name, "float", 2, is_leaf=True) for name in ("x", "up", "down")]
    draw.values += [Value("gain", "float", 1, is_leaf=True), Value("ids", "int", 1)]
    draw.emit("hidden = x")
    draw.values.append(Value("hidden", "float", 2))
    how = draw.mostly("checkpoint", "inline", "policy", "policy", "layers", share=0.5)
    given = ", ".join(INPUTS[1:])
    names = [_layer_function(draw) for _ in range(draw.integer(1, 3))] if how != "inline" else []
    kept: list[str] = []
    # What the backward of several layers reads, and none computes again.
    gate = draw.let("gate", "torch.sigmoid(hidden @ frozen)", "float", 2) if not names and draw.chance(0.3) else None
    for _ in range(2 if draw.small else draw.integer(2, 5)):
        if not names:
            _layer(draw)
            if gate and draw.chance(0.8):
                draw.emit(f"hidden = hidden * {gate}")
        elif how == "layers" or draw.chance(0.15):
            draw.emit(f"hidden = {draw.pick(*names)}(hidden, {given})")
        else:
            contexts = f", context_fn={_policy(draw)}" if how == "policy" else ""
            draw.emit(f"hidden = checkpoint({draw.pick(*names)}, hidden, {given}, use_reentrant=False{contexts})")
        draw.maybe_twist()
        if draw.chance(0.15):
            kept.append(draw.let("kept", "hidden", "float", 2))
    if kept and draw.chance(0.7):
        draw.emit(f"hidden = hidden + {draw.pick(*kept)}.tanh()")
    if draw.chance(0.2):
        draw.emit(draw.pick("buffer.mul_(0.5)", "buffer.copy_(hidden.detach()[:1])", "buffer.data.add_(1)"))
    draw.outputs.append("hidden")
    draw.spoil("x.data[:1] = float('nan')")
    draw.spoil("gain.data[0] = float('inf')")
    draw.spoil("buffer.fill_(float('nan'))")
    draw.outputs += [name for name in kept if draw.chance(0.3)]
    return Drawn(_made(draw), INPUTS, tuple(names) if how == "layers" else ("f",))


def _made(draw: Draw) -> tuple[Statement, ...]:
    def drawn(name: str, sizes: str, grad: str = ".requires_grad_()") -> Statement:
        return Statement(f"{name} = torch.randn({sizes}, dtype=FLOAT, generator=g{draw.at}){grad}")

    frozen = draw.mostly("", ".requires_grad_()", share=0.8)
    return (
        draw.generator,
        draw.size("rows", "ROWS"),
        drawn("x", "rows, WIDTH", draw.mostly(".requires_grad_()", "")),
        drawn("up", "2 * WIDTH, WIDTH"),
        drawn("down", "WIDTH, 2 * WIDTH", draw.mostly(".requires_grad_()", "")),
        drawn("gain", "WIDTH"),
        drawn("frozen", "WIDTH, WIDTH", frozen),
        drawn("buffer", "1, WIDTH", ""),
        Statement(f"ids = torch.randint(0, WIDTH, (rows,), generator=g{draw.at})"),
    )


def _layer_function(draw: Draw) -> str:
    inner = draw.inner()
    inner.values += [Value("hidden", "float", 2), Value("up", "float", 2, is_leaf=True), Value("ids", "int", 1)]
    _layer(inner)
    name = draw.name("layer_")
    statements = (*inner.statements(), Statement("return hidden"))
    draw.prelude[name] = Statement(f"def {name}(hidden, {', '.join(INPUTS[1:])}):", statements)
    return name


def _layer(draw: Draw) -> None:
    for _ in range(draw.integer(1, 3)):
        draw.pick(_mlp, _mlp, _attention, _pieces, _norm, _choice)(draw)
        draw.maybe_twist()


def _mlp(draw: Draw) -> None:
    bent = draw.pick("F.gelu({})", "torch.tanh({})", "F.silu({}) * 0.5", "{}.relu()", "torch.sin({}).exp()")
    wide = draw.let("wide", draw.mostly("hidden @ up.t()", "F.linear(hidden, up)", "hidden @ down"), "float", 2)
    if draw.chance(0.25):
        draw.emit(draw.pick(f"{wide}.mul_(0.5)", f"{wide}[:, 1:] += 1", f"{wide}.clamp_(max=2)", f"{wide}[0] = 0"))
    value = draw.let("bent", bent.format(wide), "float", 2)
    narrow = draw.mostly(f"F.linear({value}, down)", f"{value} @ up", f"({value}.t().t()) @ up", share=0.5)
    draw.emit(draw.mostly(f"hidden = hidden + {narrow}", f"hidden = {narrow}", f"hidden = {narrow} * gain", share=0.6))


def _attention(draw: Draw) -> None:
    keys = draw.let("keys", draw.mostly("hidden @ frozen", "F.linear(hidden, frozen, gain)", "hidden"), "float", 2)
    scores = f"(hidden @ {keys}.t()) * 0.3"
    values = draw.mostly("hidden", keys, "hidden * gain")
    fused = f"F.scaled_dot_product_attention(hidden[None, None], {keys}[None, None], ({values})[None, None])[0, 0]"
    draw.emit(f"hidden = hidden + {draw.pick(f'torch.softmax({scores}, -1) @ {values}', fused)}")


def _pieces(draw: Draw) -> None:
    wide = draw.let("wide", "F.linear(hidden, up)", "float", 2)
    one, other = draw.name("piece"), draw.name("piece")
    draw.emit(
        f"{one}, {other} = "
        + draw.pick(f"{wide}.chunk(2, -1)", f"{wide}.view(-1, 2, WIDTH).unbind(1)", f"{wide}.split([WIDTH, WIDTH], -1)")
    )
    draw.values += [Value(one, "float", 2), Value(other, "float", 2)]
    draw.emit(f"hidden = hidden + torch.sigmoid({one}) * {draw.pick(other, f'{other}.exp().clamp(max=3)')}")


def _norm(draw: Draw) -> None:
    draw.emit(
        "hidden = "
        + draw.pick(
            "F.layer_norm(hidden, (WIDTH,), gain)",
            "hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * gain",
            "hidden - hidden.mean(-1, keepdim=True)",
            "hidden - torch.var_mean(hidden, -1, keepdim=True)[1] * gain",
            "hidden * torch.cos(buffer)",
            "torch.cumsum(hidden, 0) * 0.3",
            "hidden.t().contiguous().t() * 0.9",
        )
    )


def _choice(draw: Draw) -> None:
    draw.emit(
        draw.pick(
            "hidden = hidden.sort(0).values * gain",
            "hidden = hidden + hidden.topk(1, -1).values",
            "hidden = hidden + hidden.gather(1, ids[:, None])",
            "hidden = hidden[ids % hidden.shape[0]] * 0.5 + hidden",
            "hidden = torch.where(hidden > 0, hidden, hidden * 0.1)",
            "hidden = hidden + hidden.detach().max(0).values",
            "hidden = hidden.clone()",
            "hidden = hidden + frozen[ids].to(hidden.dtype)",
        )
    )


def _policy(draw: Draw) -> str:
    """A selective checkpoint's ``context_fn``: what it says of products, and of all else."""
    kinds = ("MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "PREFER_CPU_OFFLOAD")
    products, others = draw.pick(*kinds), draw.pick("PREFER_RECOMPUTE", "PREFER_RECOMPUTE", *kinds[:4])
    draw.need("policies", POLICIES)
    name = f"{products}_{others}".lower()
    return draw.need(name, f"{name} = policies({products!r}, {others!r})")


# Dynamo captures context functions that are partials of what it can name.
POLICIES = """
import functools
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
def policies(products, others):
    def policy(ctx, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return getattr(CheckpointPolicy, products if is_product else others)
    return functools.partial(create_selective_checkpoint_contexts, policy)
"""
