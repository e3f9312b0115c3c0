"""What programs compute of rows of logits: losses, log-probabilities, entropies, predictions."""

from __future__ import annotations

from tools.fuzz.draw import Draw


def draw_number(draw: Draw, y: str, target: str, dims: int) -> tuple[str, int]:
    """An expression of logits ``y`` ``[*rows, V]`` and ``target`` ``[*rows]``, and how many dimensions it has."""
    how = draw.integer(0, 9)
    if how < 4:
        return cross_entropy(draw, y, target, dims)
    classes = f"{target}.clamp(min=0).unsqueeze(-1)"
    scores = draw.mostly(
        f"{y}.log_softmax(-1)",
        f"F.log_softmax({y}, dim=-1)",
        f"torch.log_softmax({y}, {dims - 1})",
        f"({y} - {y}.logsumexp(-1, keepdim=True))",
        f"({y} - torch.logsumexp({y}, -1).unsqueeze(-1))",
        f"{y}.softmax(-1)",
        y,
    )
    if how < 6:
        one = draw.mostly(
            f"{scores}.gather(-1, {classes})",
            f"torch.gather({scores}, dim={dims - 1}, index={classes})",
            f"torch.take_along_dim({scores}, {classes}, -1)",
        )
        one, dims = draw.mostly((f"{one}.squeeze(-1)", dims - 1), (one, dims), (f"{one}[..., 0]", dims - 1))
        return draw.mostly(one, f"-{one}", f"{one}.exp()", f"{one} * 0.5"), dims
    p = draw.mostly(f"{y}.softmax(-1)", f"F.softmax({y}, dim=-1)", f"{y}.log_softmax(-1).exp()")
    one = f"{y}.log_softmax(-1).gather(-1, {classes})"
    by_row = (
        f"{y}.logsumexp(-1)",
        f"torch.logsumexp({y}, dim=-1).pow(2)",
        f"-({p} * {y}.log_softmax(-1)).sum(-1)",
        f"({y}.log_softmax(-1) * {p}).sum(dim=-1)",
        f"{y}.logsumexp(-1) - ({p} * {y}).sum(-1)",
        f"torch.special.entr({p}).sum(-1)",
        f"{y}.sum(-1)",
        f"{y}.mean(-1)",
        f"{scores}.mean(-1)",
        f"{scores}.sum(dim=-1)",
        f"{y}.argmax(-1)",
        f"{y}.argmax(dim=-1)",
        f"{y}.max(-1)[1]",
        f"torch.max({y}, dim=-1).indices",
        f"({y}.argmax(-1) == {target}).to({y}.dtype)",
        f"{y}.logsumexp(-1) - {y}.gather(-1, {classes}).squeeze(-1)",
        f"({one} - {one.replace(y, f'{y}.detach()', 1)}).exp().squeeze(-1)",
        f"({p} * {y}.detach()).sum(-1)",
        f"({p}.detach() * {y}.log_softmax(-1)).sum(-1)",
        f"{y}.amax(-1)",
        f"{y}.max(-1).values",
        f"{y}.topk(1).values.squeeze(-1)",
    )
    text = draw.pick(*by_row[: len(by_row) if draw.chance(0.3) else -3])
    if text.endswith("(-1)") and "unsqueeze" not in text and draw.chance(0.15) and "squeeze" not in text:
        return f"{text[:-1]}, keepdim=True)" if text.startswith(y) else text, dims if text.startswith(y) else dims - 1
    if draw.chance(0.2) and "arg" not in text and "max" not in text:
        mixed, _ = cross_entropy(draw, y, target, dims)
        return f"({mixed}).double().sum() + 0.1 * ({text}).mean()", 0
    return text, dims - 1


def cross_entropy(draw: Draw, y: str, target: str, dims: int) -> tuple[str, int]:
    reduction = draw.pick("mean", "mean", "sum", "none")
    ignored = draw.mostly(-100, 0, 1, -1, 50, share=0.8)
    if ignored == -1 or ignored == 50:  # what is ignored by default would be out of range
        target = f"torch.where({target} < 0, {ignored}, {target})"
    elif ignored != -100:
        target = f"{target}.clamp(min=0)"
    result = dims - 1 if reduction == "none" else 0
    if dims > 2:
        how = draw.integer(0, 3)
        if how < 2:
            y, target = f"{y}.flatten(0, -2)", f"{target}.flatten()"
            result = min(result, 1)
        elif how == 2:
            y = f"{y}.transpose(1, 2)" if dims == 3 else f"{y}.movedim(-1, 1)"
        else:
            y = f"{y}.movedim(-1, 1)"
    weight = draw.mostly("", ", weight=class_weight", f", weight=class_weight.to({y}.dtype)", share=0.65)
    further = f", ignore_index={ignored}" if ignored != -100 or draw.chance(0.1) else ""
    further += f", reduction='{reduction}'" if reduction != "mean" or draw.chance(0.2) else ""
    further = weight + further
    smooth = draw.mostly("", ", label_smoothing=0.2", ", label_smoothing=1.0")
    over = "1" if y.endswith((")", "_")) and ("transpose(1, 2)" in y or "movedim" in y) else "-1"
    text = draw.mostly(
        f"F.cross_entropy({y}, {target}{further}{smooth})",
        f"F.cross_entropy(target={target}, input={y}{further}{smooth})",
        f"torch.nn.CrossEntropyLoss({(further + smooth).removeprefix(', ')})({y}, {target})",
        f"F.nll_loss(F.log_softmax({y}, dim={over}), {target}{further})",
        f"F.nll_loss(F.log_softmax({y}, dim={over}), {target}{further})",
        f"F.cross_entropy(F.log_softmax({y}, dim={over}), {target}{further}{smooth})",
    )
    return text, result
