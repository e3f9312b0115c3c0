"""The commands of ``glue``; each is a function in a file of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

import glue_compiler
from glue_compiler.cli.bisect import bisect
from glue_compiler.cli.diff import diff
from glue_compiler.cli.doctor import doctor
from glue_compiler.cli.explain import explain
from glue_compiler.cli.replay import replay
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


for command in (doctor, explain, diff, view, replay, bisect):
    app.command()(command)
