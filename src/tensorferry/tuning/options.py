"""Options of commands as data: said once, for typer, argparse and whoever reads their values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_MAX_FILE_NBYTES = (1 << 63) - 1


class BadArgumentsError(Exception):
    """Arguments cannot be used; ``problems`` has a line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Option:
    """An option. ``read`` makes a value of its text or raises ValueError; a switch has none, and is True or False."""

    name: str
    help: str
    read: Callable[[str], Any] | None = None
    metavar: str = ""
    default: str | None = None
    many: bool = False
    repeated: bool = True  # many by giving it many times; DeepSpeed's commands else take the last
    argument: bool = False  # given by its position
    ours: bool = False  # DeepSpeed's command has no such option

    @property
    def flag(self) -> str:
        """How it is written; an underscore for each hyphen will do as well."""
        return "--" + self.name.replace("_", "-")


def values_of(
    options: Iterable[Option], given: Mapping[str, Any], problems: list[str], hyphen: str = "-"
) -> dict[str, Any]:
    """Return what options say, by their names, and add what is wrong with them to the problems.

    Where nobody says anything, or it cannot be read, that is None; what may be given many times stays as it is.
    ``hyphen`` is what stands between the words of a flag.
    """
    values: dict[str, Any] = {}
    for option in options:
        text = given.get(option.name)
        text = option.default if text is None else text
        if option.read is None:
            values[option.name] = bool(text)
        elif option.many or text is None:
            values[option.name] = text
        else:
            try:
                values[option.name] = option.read(text)
            except ValueError as error:
                values[option.name] = None
                problems.append(f"--{option.name.replace('_', hyphen)}: {error}")
    return values


def count(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return what reads whole numbers between two."""

    def read(text: str) -> int:
        if not text.strip().lstrip("+-").isdecimal() or not text.isascii():
            raise ValueError(f"{text!r} is no whole number")
        value = int(text)
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not between {minimum} and {maximum}")
        return value

    return read


def nbytes(minimum: int = 1, maximum: int = _MAX_FILE_NBYTES) -> Callable[[str], int]:
    """Return what reads sizes between two."""

    def read(text: str) -> int:
        value = parse_nbytes(text)
        if value < minimum:
            raise ValueError(f"{text} is less than {format_nbytes(minimum)}")
        if value > maximum:
            raise ValueError(f"{text} is more than {format_nbytes(maximum)}")
        return value

    return read


def one_of(*choices: str) -> Callable[[str], str]:
    """Return what reads one of some words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return read


def folder_problems(option: str, folder: str | Path) -> list[str]:
    """Return what is wrong with a folder as an argument."""
    path = Path(folder)
    if not path.exists():
        return [f"{option}: the folder {str(folder)!r} does not exist (is the drive mounted?)"]
    if path.is_block_device():
        return [f"{option}: {str(folder)!r} is a device; name a folder of the file system on it"]
    return [] if path.is_dir() else [f"{option}: {str(folder)!r} is no folder"]
