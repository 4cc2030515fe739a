"""Numbers of bytes as people write them: 4096, 64K, 1M, 2G, and back."""

from __future__ import annotations

import operator

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


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
