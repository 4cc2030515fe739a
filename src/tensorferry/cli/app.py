"""The commands of ``tensorferry``, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import tensorferry
from tensorferry.cli.bench import bench
from tensorferry.cli.ls import ls
from tensorferry.cli.report import report
from tensorferry.cli.tune import tune
from tensorferry.cli.verify import verify

# Options may be written with underscores as well: --block_size is what DeepSpeed's tools call --block-size.
CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
}

app = typer.Typer(
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for command in (report, bench, tune, ls, verify):
    app.command(context_settings=CONTEXT_SETTINGS)(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tensorferry {tensorferry.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Move tensors between files and memory at the drive's speed: look at a machine, measure it, tune for it."""
