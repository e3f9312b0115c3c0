"""``glue doctor``: what is installed, and what glue will do here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from glue_compiler.cli.console import console
from glue_compiler.compat import dynamo, versions
from glue_compiler.errors import GlueContractError, GlueOptionError
from glue_compiler.ops import cards
from glue_compiler.options import GlueOptions, extra_passes_in, parse_options
from glue_compiler.pipeline import registry
from glue_compiler.report.card_choices import served_on
from glue_compiler.report.environment import environment_lines, pass_states, tested_range


def doctor(
    card: Annotated[
        str | None, typer.Option(help="Show what would run on this card instead, such as sm_89 or 'RTX 4090'.")
    ] = None,
) -> None:
    """Show torch, devices, and which rewrites are on here and why.

    Paste its output into a bug report. Exit code 1: `torch.compile(..., backend="glue")` would not work here.
    """
    out = console()
    if card is not None:
        out.print(_card_table(cards.named(card)))
        return
    faults = []
    sys.path.insert(0, str(Path.cwd()))  # for passes of the user's own, as "python -m" does
    environment = Table("", "", show_header=False, box=None, title="Environment", title_justify="left")
    for name, text in environment_lines():
        environment.add_row(f"[bold]{name}[/]", text)
    out.print(environment)
    if not dynamo.backend_is_registered():
        faults.append('torch does not find the backend "glue": install glue-compiler into this environment')
    if not versions.is_tested():
        out.print(f"\n[yellow]glue is tested with torch {tested_range()}; this is {torch.__version__}.[/]")
    try:
        passes = registry.with_extra(registry.all_passes(), extra_passes_in(None))
        options = parse_options(None, None, [p.name for p in passes])
    except (GlueOptionError, GlueContractError) as error:
        faults.append(str(error))
    else:
        out.print("")
        out.print(_passes_table(options))
    for fault in faults:
        out.print("\n[bold red]fault:[/]", fault, markup=True)
    if faults:
        raise typer.Exit(1)
    out.print('\nNothing stands in the way of torch.compile(model, backend="glue").')


def _card_table(card: cards.Card) -> Table:
    title = f"{card.name} ({card.products}), {card.shared >> 10} KiB of shared memory a block"
    table = Table("part of a step", "what runs it", "why", title=title, title_justify="left", show_lines=True)
    for served in served_on(card):
        table.add_row(served.work, served.kernel, served.reason)
    return table


def _passes_table(options: GlueOptions) -> Table:
    table = Table("rewrite", "here", "stage", "results", "why", title="What glue will do here", title_justify="left")
    for state in pass_states(options):
        on = "[green]on[/]" if state.runs else "[dim]off[/]"
        table.add_row(state.name, on, state.stage, state.numerics, state.reason)
    regions = ", each kind of layer once" if options.regions == "auto" else ""
    table.caption = f"then: {options.compiler}{regions}" + (", strict" if options.strict else "")
    return table
