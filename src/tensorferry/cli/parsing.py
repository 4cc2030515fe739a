"""Options as defaults of a command's parameters, for typer; and how DeepSpeed spells what may be many."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorferry.base.checks import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_FILE_NBYTES = (1 << 63) - 1


def switch(name: str, text: str) -> Any:
    """Return an option that is given or not."""
    return typer.Option(False, name, help=text)


def value(default: Any, name: str, metavar: str, text: str, **how: Any) -> Any:
    """Return an option with a value, of its parameter's type."""
    return typer.Option(default, name, metavar=metavar, help=text, **how)


def number(default: Any, name: str, limits: tuple[int, int], text: str) -> Any:
    """Return an option that is a whole number between two."""
    return value(default, name, "N", text, min=limits[0], max=limits[1])


def size(
    default: Any, name: str, text: str, minimum: int = 1, maximum: int = _MAX_FILE_NBYTES
) -> Any:
    """Return an option that is a size between two, such as 400M."""

    def read(given: Any) -> int:
        try:
            nbytes = parse_nbytes(given) if isinstance(given, str) else int(given)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if not minimum <= nbytes <= maximum:
            limits = f"{format_nbytes(minimum)} to {format_nbytes(maximum)}"
            raise typer.BadParameter(f"{given} is not in the range {limits}")
        return nbytes

    shown = format_nbytes(default) if isinstance(default, int) else False
    return value(default, name, "BYTES", text, parser=read, show_default=shown)


def existing_folder(text: Any) -> Path:
    """Return the path of a folder, or say why there is none."""
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


def with_repeated(arguments: Sequence[str], option: str, *, last: bool = False) -> list[str]:
    """Return arguments in which each value of an option has the option's name before it, as typer wants it.

    DeepSpeed's commands take several values after one name. Where ``last``, only those of its last mention count.
    """
    names = (f"--{option}", f"--{option.replace('_', '-')}")
    found: list[str] = []
    values: list[str] = []
    inside = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in names:
            values = [] if last else values
            values += [value] if equals else []
            inside = not equals
        elif inside and not argument.startswith("-"):
            values.append(argument)
        else:
            inside = False
            found.append(argument)
    return found + [word for value in values for word in (names[1], value)]
