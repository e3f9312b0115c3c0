"""docs/cards.md: what serves each part of a step on each card, and what its kernels take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glue_compiler.ops.cards import CARDS, Card
from glue_compiler.report.card_choices import served_on
from tools.cards.flex import ATTENTIONS, estimated_attention

TITLE = """# Cards

What glue runs on a card follows from its compute capability, the dtype, the size of heads and the shared memory that a
block of threads can have. `glue doctor --card sm_89` (or `--card "RTX 4090"`) prints one of these tables. At the end of
each chain are the model's own operators: glue asks for nothing that the card does not have.
`python -m tools.cards` writes this page; it needs Triton, and no card.

Speed was measured on Hopper (sm_90) alone. For the others kernels are compiled, and what they take of the card is
checked: `make test-cards`.

## Cards of less memory

- A chunk of logits aims at a fortieth of the card's memory, and at 512 MiB at most; where that is fewer than 1,024 rows
  it is about twice as much. A copy of a mask in whole blocks takes an eightieth for each byte of its dtype.
- Where page-locked memory is refused, as WSL may, copies go by ordinary memory, and a warning says so.
- `python -m benchmarks.end_to_end --card 24GiB` gives training no more memory than such a card has:
  [Qwen3-8B QLoRA within 24 and 16 GiB](end_to_end.md#cards-of-24-and-16-gib).
- fp16 with `torch.amp.GradScaler` is computed as eager does: gradients of a loss in chunks are made in backward, with
  the loss's scale. On a T4 Inductor refuses graphs of bf16, and Dynamo runs them in eager, with glue or without.

## AMD and Intel

Glue's kernels are compiled for gfx942 by the same command, within 64 KiB of shared memory. None was run there.
FlashAttention 4, QuACK and cuDNN are off, and flex_attention has the blocks that Inductor chooses. On Intel's cards
no attention is rewritten, and glue's kernels do not run: graphs are compiled as they are.
"""


PATH = Path(__file__).parents[2] / "docs" / "cards.md"
KERNELS = "## What glue's kernels take"


@dataclass(frozen=True)
class Taken:
    """Bytes of shared memory that a kernel takes on a card; None: torch's own serves there."""

    kernel: str
    card: Card
    shared: int | None


def page(kernels: str) -> str:
    """``kernels``: the last part, of :func:`kernels_part`."""
    return "\n".join([TITLE, "## What serves", "", *_served(), *_attention(), "", kernels])


def kernels_part(taken: Sequence[Taken], version: str) -> str:
    """The part of which the numbers are a compiler's, Triton's of ``version``."""
    cards = sorted({each.card for each in taken}, key=lambda card: card.capability)
    lines = [
        KERNELS,
        "",
        f"KiB of shared memory of a block of threads, fp16, by Triton {version}: the most of its parts.",
        "sm_80 and sm_86 have the kernels of sm_89, and sm_100 those of sm_90.",
        "",
        _row("kernel", *(f"{card.name}, of {card.shared >> 10}" for card in cards)),
        _row(*["---"] * (len(cards) + 1)),
    ]
    for kernel in dict.fromkeys(each.kernel for each in taken):
        of_card = {each.card: each.shared for each in taken if each.kernel == kernel}
        cells = (of_card[card] for card in cards)
        lines.append(_row(kernel, *("torch's own" if cell is None else f"{cell / 1024:.1f}" for cell in cells)))
    return "\n".join([*lines, ""])


def _served() -> Iterable[str]:
    for card in CARDS:
        yield f"### {card.name}: {card.products}"
        yield ""
        yield _row("part of a step", "what runs it", "why")
        yield _row(*["---"] * 3)
        for served in served_on(card):
            yield _row(served.work, served.kernel, served.reason)
        yield ""


def _attention() -> Iterable[str]:
    cards = [card for card in CARDS if card.multiplies]
    yield "## What attention takes"
    yield ""
    yield "KiB of shared memory of flex_attention's forward and backward, estimated by `ops/flex_tiles.py`. **Bold**:"
    yield "the blocks that Inductor chooses would not fit, and glue asks for smaller ones, or for fewer stages."
    yield ""
    yield _row("attention", *(f"{card.name}, of {card.shared >> 10}" for card in cards))
    yield _row(*["---"] * (len(cards) + 1))
    for attention in ATTENTIONS:
        cells = []
        for card in cards:
            forward, backward, is_changed = estimated_attention(attention, card)
            text = f"{forward / 1024:.0f} / {backward / 1024:.0f}"
            cells.append(f"**{text}**" if is_changed else text)
        yield _row(str(attention).removeprefix("attention, "), *cells)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
