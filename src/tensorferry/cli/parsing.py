"""Helpers for typer options of a command's parameters, and DeepSpeed's syntax for options with several values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorferry.base.checks import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_FILE_NBYTES = (1 << 63) - 1


def switch(name: str, text: str) -> Any:
    """Return a boolean option without a value."""
    return typer.Option(False, name, help=text)


def value(default: Any, name: str, metavar: str, text: str, **options: Any) -> Any:
    """Return an option with a value of its parameter's type."""
    return typer.Option(default, name, metavar=metavar, help=text, **options)


def number(default: Any, name: str, limits: tuple[int, int], text: str) -> Any:
    """Return an option with an integer value within limits."""
    return value(default, name, "N", text, min=limits[0], max=limits[1])


def size(
    default: Any, name: str, text: str, minimum: int = 1, maximum: int = _MAX_FILE_NBYTES
) -> Any:
    """Return an option with a size in bytes within limits, such as 400M."""

    def parse(raw: Any) -> int:
        try:
            nbytes = parse_nbytes(raw) if isinstance(raw, str) else int(raw)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if not minimum <= nbytes <= maximum:
            limits = f"{format_nbytes(minimum)} to {format_nbytes(maximum)}"
            raise typer.BadParameter(f"{raw} is not in the range {limits}")
        return nbytes

    shown = format_nbytes(default) if isinstance(default, int) else False
    return value(default, name, "BYTES", text, parser=parse, show_default=shown)


def existing_folder(text: Any) -> Path:
    """Return the path of an existing folder, or raise BadParameter."""
    path = Path(text)
    if not path.exists():
        problem = f"the folder {str(text)!r} does not exist (is the drive mounted?)"
    elif path.is_block_device():
        problem = f"{str(text)!r} is a device; name a folder of the file system on it"
    elif not path.is_dir():
        problem = f"{str(text)!r} is not a folder"
    else:
        return path
    raise typer.BadParameter(problem)


FOLDER: dict[str, Any] = {"parser": existing_folder, "metavar": "FOLDER", "show_default": False}


def repeat_option(arguments: Sequence[str], option: str, *, last: bool = False) -> list[str]:
    """Return arguments with the option's name before each of its values, which is the form that typer accepts.

    DeepSpeed's commands accept several values after one name. With ``last``, only the values after the last occurrence
    of the name count.
    """
    names = (f"--{option}", f"--{option.replace('_', '-')}")
    others: list[str] = []
    values: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in names:
            values = [] if last else values
            values += [value] if equals else []
            is_value = not equals
        elif is_value and not argument.startswith("-"):
            values.append(argument)
        else:
            is_value = False
            others.append(argument)
    return others + [word for value in values for word in (names[1], value)]
