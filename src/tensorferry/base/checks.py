"""Arguments: checked, with the argument's name in what is raised; and sizes as people write them (4096, 64K, "5GB")."""

from __future__ import annotations

import operator
import os
import re
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import TypeGuard

Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
# A path, a URL, or a pair of an obstore store and a key.
Readable: TypeAlias = "Path | tuple[Any, str]"
Direct: TypeAlias = "bool | Literal['auto']"

# Offsets are signed 64-bit numbers in the kernel.
MAX_FILE_NBYTES = (1 << 63) - 1

# pathlib makes one slash of two: of those only known ones are told from a folder whose name ends with a colon.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|(s3|gs|gcs|hf|az|abfss?|hdfs|https?|ftp|file):/")

# Those that are read, and stores that callers have made: see transfer.remote.
_READ_URL = re.compile(
    r"(s3|gs|az|abfss?|https?):/|(s3a|adl|azure|[a-z0-9]+\+[0-9a-f]{6})://", re.ASCII
)

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


def direct_mode(direct: Direct) -> str:
    """Return the core's name of what a caller says of O_DIRECT."""
    if direct == "auto":
        return "auto"
    if direct is True:
        return "always"
    if direct is False:
        return "never"
    raise ValueError(f'direct: {direct!r} is none of "auto", True and False')


def checked_path(path: Path, name: str = "path") -> str:
    """Return a path as text, which os.fsencode() turns back into its bytes."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{name}: {path!r} is no path")
    text = os.fsdecode(path)
    if ":/" in text and _URL.match(text):
        raise ValueError(
            f"{name}: {path!r} is a URL, and a local file is meant here (remedy: a local folder, or one where the "
            "storage is mounted; buckets are read by tensorferry.open, and by what loads models and checkpoints)"
        )
    if "\0" in text:
        raise ValueError(f"{name}: {path!r} has a null character")
    if not text.isascii():
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: {path!r} is no path: {error}") from None
    return text


def is_url(path: object) -> bool:
    """Return whether this is a place that is read, and is in none of this machine's file systems."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    return isinstance(text, str) and ":/" in text and _READ_URL.match(text) is not None


def is_pair(path: object) -> TypeGuard[tuple[Any, str]]:
    """Return whether this is a pair of an obstore store and a key."""
    return (
        isinstance(path, tuple)
        and len(path) == 2
        and isinstance(path[1], str)
        and not isinstance(path[0], (str, bytes, os.PathLike))
    )


def can_be_path(text: str) -> bool:
    """Return whether a text can be a file's name: half a surrogate pair, which JSON and pickles can have, cannot."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def kept_path(path: Path, name: str = "path") -> str:
    """Return the absolute path of what is used after the call: the process may change its directory meanwhile."""
    text = checked_path(path, name)
    return text if text.startswith("/") else f"{os.getcwd()}/{text}"  # noqa: PTH109 (a fifth of the time)


def checked_descriptor(descriptor: int, name: str = "path") -> int:
    """Return a descriptor, which is no bool and fits a C int."""
    if isinstance(descriptor, bool):
        raise TypeError(f"{name}: {descriptor!r} is neither a path nor a descriptor")
    if not -1 << 31 <= descriptor < 1 << 31:
        raise ValueError(f"{name}: {descriptor} is no descriptor")
    return descriptor


def checked_offset(offset: int, nbytes: int, name: str = "offset") -> int:
    """Return an offset that a file can have, with `nbytes` behind it."""
    if not hasattr(offset, "__index__"):
        raise TypeError(f"{name}: {offset!r} is no integer")
    offset = offset.__index__()
    if offset < 0:
        raise ValueError(f"{name}: {offset} is negative")
    if offset + nbytes > MAX_FILE_NBYTES:
        raise ValueError(f"{name}: {offset} + {nbytes} bytes is beyond what a file can hold")
    return offset
