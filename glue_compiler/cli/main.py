"""The commands of ``glue``; each is a function in a file of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import glue_compiler
from glue_compiler.cli.bisect import bisect as run_bisect
from glue_compiler.cli.diff import diff
from glue_compiler.cli.doctor import doctor
from glue_compiler.cli.explain import explain
from glue_compiler.cli.replay import replay as run_replay
from glue_compiler.cli.view import view
from glue_compiler.errors import GlueError

app = typer.Typer(
    name="glue",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    """Run the command line; glue's own errors are one message and exit code 2."""
    try:
        app()
    except GlueError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]glue:[/] {type(error).__name__}:", str(error), sep=" ")
        sys.exit(2)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"glue {glue_compiler.__version__}")
        raise typer.Exit


@app.callback()
def _glue(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print glue's version.")
    ] = False,
) -> None:
    """See, check and debug what `torch.compile(model, backend="glue")` does.

    Most commands read a dump: run your program with `GLUE_DUMP=folder` first, then `glue view folder`.
    """


app.command()(doctor)
app.command()(explain)
app.command()(diff)
app.command()(view)


@app.command()
def replay(
    file: Annotated[
        Path, typer.Argument(exists=True, help="A dumped graph, or the folder that a failed verification left.")
    ],
) -> None:
    """Run one dumped graph alone, time it, and check it against the graph before.

    Inputs are random, of the recorded shapes, or those that a failed verification saved. Exit code 1: the results
    differ.
    """
    raise typer.Exit(run_replay(file))


@app.command()
def bisect(
    command: Annotated[list[str], typer.Argument(help="The program to run again and again, after `--`.")],
    metric: Annotated[
        str | None,
        typer.Option(help="Regular expression; its last match in the output is a number to compare, such as a loss."),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far that number may be from the run without passes.")] = 0.0,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="A run that takes longer is ended, and fails. Else: far longer than those before."
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the runnable file for the wrong rewrite goes.")] = Path(
        "glue_bisect"
    ),
) -> None:
    """Find the pass, and in it the single rewrite, that makes a program fail.

    `glue bisect -- python train.py` looks at the exit code; with `--metric 'loss (\\S+)'` a printed number must stay
    the same. Each run gets the same standard input. Exit code 0: found; 2: nothing to find.
    """
    raise typer.Exit(run_bisect(command, metric=metric, tolerance=tolerance, limit=limit, folder=folder))
