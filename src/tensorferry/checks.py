"""Arguments: checked, with the argument's name in what is raised; and sizes as people write them (4096, 64K, "5GB")."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def integer(
    value: Any,
    name: str,
    minimum: int | None = None,
    maximum: int | None = None,
    multiple_of: int = 1,
) -> int:
    """Return an argument that is an integer, no bool, and within bounds.

    Raises
    ------
    TypeError, ValueError
        It is not.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: {value!r} is no integer")
    number = operator.index(value)
    if minimum is not None and maximum is not None and not minimum <= number <= maximum:
        raise ValueError(f"{name}: {number} is not between {minimum} and {maximum}")
    if minimum is not None and number < minimum:
        raise ValueError(
            f"{name}: {number} is {'negative' if minimum == 0 else f'below {minimum}'}"
        )
    if number % multiple_of:
        raise ValueError(f"{name}: {number} is no multiple of {multiple_of}")
    return number


def positive(value: Any, name: str, maximum: int = (1 << 31) - 1) -> int:
    """Return an argument that is an integer from 1 on; errors as for :func:`integer`."""
    return integer(value, name, 1, maximum)


def one_of(value: Any, name: str, choices: Collection[Any]) -> None:
    """Raise ValueError where an argument is none of some."""
    if value not in choices:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(map(repr, choices))}")


def parse_nbytes(text: str) -> int:
    """Return the bytes that a text such as "4096", "64K", "1MB", "2GiB" means; units are powers of 1024.

    Raises
    ------
    ValueError
        It is no such text.
    """
    shortened = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = shortened[-1:] if shortened[-1:] in "KMGT" else ""
    number = shortened.removesuffix(unit)
    if not number.isascii() or not number.isdigit():
        raise ValueError(f"{text!r} is no size such as 4096, 64K, 1M or 2G")
    return int(number) * _UNITS[unit]


def checked_nbytes(size: int | str, name: str) -> int:
    """Return an argument's number of bytes, given as one or as a text for :func:`parse_nbytes`.

    Raises
    ------
    ValueError, TypeError
        It is none, or not positive.
    """
    try:
        nbytes = parse_nbytes(size) if isinstance(size, str) else operator.index(size)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None
    if nbytes <= 0:
        raise ValueError(f"{name}: {nbytes} is not positive")
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """Return a number of bytes as parse_nbytes() takes it, with the largest unit that leaves it whole."""
    for unit in ("T", "G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def decimal_nbytes(size: int | str, name: str) -> int:
    """Return an argument's number of bytes, given as one or as huggingface_hub has it: "5MB" is 5 * 10**6.

    Raises
    ------
    ValueError
        It is none, or not positive.
    """
    nbytes: Any = size
    if isinstance(size, str):
        number, unit = size.strip()[:-2], size.strip()[-2:].upper()
        try:
            nbytes = int(float(number) * _DECIMAL_UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            raise ValueError(f"{name}: {size!r} is no size such as 5GB or 500MB") from None
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"{name}: {size!r} is no positive number of bytes")
    return nbytes
