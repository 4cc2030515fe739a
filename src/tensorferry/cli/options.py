"""What typer is told of options that are data."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.tuning.options import Option

Command = TypeVar("Command", bound="Callable[..., None]")


def taking(*options: Option) -> Callable[[Command], Command]:
    """Return a decorator: its function takes these options, by their names and as texts, as if they stood there."""
    parameters = [_parameter(option) for option in options]

    def decorated(function: Command) -> Command:
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {each.name: each.annotation for each in parameters}
        return function

    return decorated


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = str | None
    default: Any = option.default
    if option.many:
        kind, default = list[str], []
    elif option.read is None:
        kind, default = bool, False
    told: Any = (
        typer.Argument(metavar=option.metavar, help=option.help, show_default=False)
        if option.argument
        else typer.Option(option.flag, metavar=option.metavar or None, help=option.help)
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, told],
    )
