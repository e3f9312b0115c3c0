"""``glue doctor``: what is installed, what this torch is known for, and what glue will do here."""

from __future__ import annotations

import torch
import typer
from rich.table import Table

from glue_compiler import registry
from glue_compiler.cli.console import console
from glue_compiler.compat import known_problems
from glue_compiler.errors import GlueContractError, GlueOptionError
from glue_compiler.options import GlueOptions, extra_passes_in, parse_options
from glue_compiler.report.environment import environment_lines, pass_states, tested_range


def doctor() -> None:
    """Show torch, devices, known problems of this torch, and which rewrites are on here and why.

    Paste its output into a bug report. Exit code 1: `torch.compile(..., backend="glue")` would not work here.
    """
    out = console()
    faults = []
    environment = Table("", "", show_header=False, box=None, title="Environment", title_justify="left")
    for name, text in environment_lines():
        environment.add_row(f"[bold]{name}[/]", text)
    out.print(environment)
    if not known_problems.backend_is_registered():
        faults.append('torch does not find the backend "glue": install glue-compiler into this environment')
    if not known_problems.is_supported():
        out.print(f"\n[yellow]glue is tested with torch {tested_range()}; this is {torch.__version__}.[/]")
    try:
        passes = registry.with_extra(registry.all_passes(), extra_passes_in(None))
        options = parse_options(None, None, [p.name for p in passes])
    except (GlueOptionError, GlueContractError) as error:
        faults.append(str(error))
    else:
        out.print("")
        out.print(_passes_table(options))
    problems = Table("this torch", "what follows", title="Known problems", title_justify="left", show_lines=True)
    for problem in known_problems.known_problems():
        problems.add_row(problem.problem, problem.consequence)
    if problems.row_count:
        out.print("")
        out.print(problems)
    for fault in faults:
        out.print("\n[bold red]fault:[/]", fault, markup=True)
    if faults:
        raise typer.Exit(1)
    out.print('\nNothing stands in the way of torch.compile(model, backend="glue").')


def _passes_table(options: GlueOptions) -> Table:
    table = Table("rewrite", "here", "stage", "results", "why", title="What glue will do here", title_justify="left")
    for state in pass_states(options):
        on = "[green]on[/]" if state.runs else "[dim]off[/]"
        table.add_row(state.name, on, state.stage, state.numerics, state.reason)
    table.caption = f"then: {options.compiler}" + (", strict" if options.strict else "")
    return table
