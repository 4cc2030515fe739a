"""The application: the group of all commands. The module of a command is imported when the command is used."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tensorferry.cli.exit_codes import (
    INTERRUPTED,
    open_missing_streams,
    reporting_failures,
    reporting_output_errors,
    say_problems,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "tensorferry"
# For each command, the module with the function of the same name.
COMMANDS = {name: name for name in ("report", "bench", "tune")}
COMMANDS |= dict.fromkeys(("ls", "verify", "convert"), "checkpoints")

_STYLE: dict[str, Any] = {
    "rich_markup_mode": None,  # rich's boxes truncate long options on a narrow terminal
    # Options can also be written with underscores, as in DeepSpeed's tools: --block_size is --block-size.
    "context_settings": {
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
}
# click's ClickException. Some versions of typer contain their own copy of click, so it is found in the class hierarchy.
_ClickError: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def run(arguments: list[str] | None = None) -> None:
    """Run the command line of ``tensorferry``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = f"{_NAME} {arguments[0]}" if arguments and arguments[0] in COMMANDS else _NAME
    run_command(app, name, arguments or ["--help"], _NAME)


def run_command(command: Any, name: str, arguments: list[str], program: str) -> None:
    """Run a command and exit. Errors in its arguments are printed after its name, with exit code 2."""
    open_missing_streams()
    try:
        with reporting_output_errors(program):
            code = command(arguments, prog_name=program, standalone_mode=False)
    except _ClickError as error:
        say_problems(name, [error.format_message()])
        code = error.exit_code
    except typer.Abort:  # Ctrl-C before the command's function runs
        code = INTERRUPTED
    sys.exit(code)


def command_of(function: Callable[..., None], name: str, prefix: str) -> Any:
    """Return a function as a command. Its errors are printed after ``prefix``."""
    single = typer.Typer(add_completion=False, **_STYLE)
    text = unwrap(function.__doc__ or "")
    single.command(
        name,
        help=text,
        short_help=text.partition("\n\n")[0],
        context_settings=_STYLE["context_settings"],
    )(reporting_failures(prefix)(function))
    command: Any = typer.main.get_command(single)
    for each in command.params:
        if each.param_type_name == "argument":
            each.display_type_rich = _no_type
    return command


class _Commands(TyperGroup):
    """A group that imports the module of a command when the command is used."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tensorferry.cli.{COMMANDS[cmd_name]}")
        return command_of(getattr(module, cmd_name), cmd_name, f"{_NAME} {cmd_name}")


def _no_type(**_: Any) -> None:
    """Return None as the type of an argument. Some versions of typer would show the Python type next to its name."""


def unwrap(text: str) -> str:
    """Return a docstring with one line for each paragraph, which click wraps to the width of the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False, **_STYLE)


def _print_version(requested: bool) -> None:
    if requested:
        import tensorferry

        typer.echo(f"{_NAME} {tensorferry.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Inspect, measure and tune a machine's drives, and list, verify and convert checkpoints."""
