"""The commands of ``tensorferry``, put together: a command's module is imported when it is asked for."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tensorferry.cli.leaving import (
    INTERRUPTED,
    leave_for,
    leaving_well,
    open_missing_streams,
    say_problems,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "tensorferry"
# Each command's function has its name; the module that it stands in.
COMMANDS = {name: name for name in ("report", "bench", "tune")}
COMMANDS |= dict.fromkeys(("ls", "verify", "convert"), "checkpoints")

_LOOK: dict[str, Any] = {
    "rich_markup_mode": None,  # whose boxes cut long options off where a terminal is narrow
    # Options may be written with underscores as well: --block_size is what DeepSpeed's tools call --block-size.
    "context_settings": {
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
}
# click's, which some versions of typer have a copy of.
_ClickError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def run(arguments: list[str] | None = None) -> None:
    """Run the command line of ``tensorferry``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = f"{_NAME} {arguments[0]}" if arguments and arguments[0] in COMMANDS else _NAME
    run_command(app, name, arguments or ["--help"], _NAME)


def run_command(command: Any, name: str, arguments: list[str], program: str) -> None:
    """Run a command and exit; what is wrong with its arguments is told after its name, with exit code 2."""
    open_missing_streams()
    try:
        code = command(arguments, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except _ClickError as error:
        say_problems(name, [error.format_message()])
        code = error.exit_code
    except OSError as error:
        leave_for(program, error)
    except typer.Abort:  # Ctrl-C before a command has begun
        code = INTERRUPTED
    sys.exit(code)


def command_of(function: Callable[..., None], name: str, told_as: str) -> Any:
    """Return a function as a command; what goes wrong in it is told after ``told_as``."""
    alone = typer.Typer(add_completion=False, **_LOOK)
    text = unwrapped(function.__doc__ or "")
    alone.command(
        name,
        help=text,
        short_help=text.partition("\n\n")[0],
        context_settings=_LOOK["context_settings"],
    )(leaving_well(told_as)(function))
    command: Any = typer.main.get_command(alone)
    for each in command.params:
        if each.param_type_name == "argument":
            each.display_type_rich = _no_type
    return command


class _Commands(TyperGroup):
    """Makes a command of the function that has its name."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tensorferry.cli.{COMMANDS[cmd_name]}")
        return command_of(getattr(module, cmd_name), cmd_name, f"{_NAME} {cmd_name}")


def _no_type(**_: Any) -> None:
    """Return no type of an argument: some versions of typer would show Python's beside its name."""


def unwrapped(text: str) -> str:
    """Return a docstring with a line for each paragraph, which every terminal wraps for itself."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False, **_LOOK)


def _version(wanted: bool) -> None:
    if wanted:
        import tensorferry

        typer.echo(f"{_NAME} {tensorferry.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Move tensors between files and memory at the drive's speed: look at a machine, measure it, tune for it."""
