"""Parsers of values of options, and DeepSpeed's syntax for options with several values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tensorferry.base.checks import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_FILE_NBYTES = (1 << 63) - 1


def parse_size(minimum: int = 1, maximum: int = MAX_FILE_NBYTES) -> Callable[[Any], int]:
    """Return a parser of sizes in bytes within limits, such as 400M, which raises BadParameter."""

    def parse(raw: Any) -> int:
        try:
            nbytes = parse_nbytes(raw) if isinstance(raw, str) else int(raw)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if not minimum <= nbytes <= maximum:
            limits = f"{format_nbytes(minimum)} to {format_nbytes(maximum)}"
            raise typer.BadParameter(f"{raw} is not in the range {limits}")
        return nbytes

    return parse


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
