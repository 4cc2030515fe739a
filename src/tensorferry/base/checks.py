"""Checks of arguments, with the argument's name in error messages, and sizes in text form (4096, "64K", "5GB")."""

from __future__ import annotations

import operator
import os
import re
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import TypeGuard

# The path of a local file.
Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
# A file or object that can be read: a local path, a URL, or a pair of an obstore store and a key.
Readable: TypeAlias = "Path | tuple[Any, str]"
# The argument `direct`, which selects O_DIRECT: see direct_mode().
Direct: TypeAlias = "bool | Literal['auto']"

# Offsets are signed 64-bit numbers in the kernel.
MAX_FILE_NBYTES = (1 << 63) - 1

# Matches URLs, which are rejected where a local path is required. pathlib turns the two slashes of a URL into one. A
# text with a single slash counts as a URL only if its scheme is known, because the name of a local folder may end with
# a colon.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|(s3|gs|gcs|hf|az|abfss?|hdfs|https?|ftp|file):/")

# Matches the URLs from which tensorferry can read, and the texts by which transfer.remote identifies objects in a store
# that the caller has created (such as "s3+1f3a5c://bucket/key").
_READ_URL = re.compile(
    r"(s3|gs|az|abfss?|https?):/|(s3a|adl|azure|[a-z0-9]+\+[0-9a-f]{6})://", re.ASCII
)

# The units of parse_nbytes(), for sizes of memory, blocks and benchmark files: powers of 1024, as in DeepSpeed and fio.
# The units of decimal_nbytes(), for the sizes of shards only: powers of 1000, as in huggingface_hub, so the same text
# gives the same shards. decimal_nbytes() refuses texts that huggingface_hub does not know ("5G", "5GiB").
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def integer(
    value: Any,
    name: str,
    minimum: int | None = None,
    maximum: int | None = None,
    multiple_of: int = 1,
) -> int:
    """Return an argument as an int after checking that it is an integer, in range, and a multiple of ``multiple_of``.

    The argument must have ``__index__`` and must not be a bool. ``name`` is its name in error messages.

    Raises
    ------
    TypeError, ValueError
        The check failed.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: {value!r} is not an integer")
    number = operator.index(value)
    if minimum is not None and maximum is not None and not minimum <= number <= maximum:
        raise ValueError(f"{name}: {number} is not between {minimum} and {maximum}")
    if minimum is not None and number < minimum:
        raise ValueError(
            f"{name}: {number} is {'negative' if minimum == 0 else f'below {minimum}'}"
        )
    if maximum is not None and number > maximum:
        raise ValueError(f"{name}: {number} is above {maximum}")
    if number % multiple_of:
        raise ValueError(f"{name}: {number} is not a multiple of {multiple_of}")
    return number


def positive(value: Any, name: str, maximum: int = (1 << 31) - 1) -> int:
    """Return an argument after checking that it is an integer from 1 to ``maximum``; errors as for :func:`integer`."""
    return integer(value, name, 1, maximum)


def one_of(value: Any, name: str, choices: Collection[Any]) -> None:
    """Raise ValueError if an argument is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, choices))}")


def parse_nbytes(text: str) -> int:
    """Return the number of bytes for a text such as "4096", "64K", "1MB" or "2GiB"; all units are powers of 1024.

    Raises
    ------
    ValueError
        The text is not a size.
    """
    shortened = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = shortened[-1:] if shortened[-1:] in "KMGT" else ""
    number = shortened.removesuffix(unit)
    if not number.isascii() or not number.isdigit():
        raise ValueError(f"{text!r} is not a size such as 4096, 64K, 1M or 2G")
    return int(number) * _UNITS[unit]


def checked_nbytes(size: int | str, name: str) -> int:
    """Return the number of bytes of an argument, which is an integer or a text for :func:`parse_nbytes`.

    Raises
    ------
    ValueError, TypeError
        The argument is not a size, or not positive.
    """
    if isinstance(size, bool):
        raise TypeError(f"{name}: {size!r} is not a size")
    try:
        nbytes = parse_nbytes(size) if isinstance(size, str) else operator.index(size)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None
    if nbytes <= 0:
        raise ValueError(f"{name}: {nbytes} is not positive")
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """Return a number of bytes as a text for parse_nbytes(), with the largest unit that gives an integer."""
    for unit in ("T", "G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def decimal_nbytes(size: int | str, name: str) -> int:
    """Return the number of bytes of an argument, an integer or a text as in huggingface_hub ("5MB" is 5 * 10**6).

    Raises
    ------
    ValueError
        The argument is not a size, or not positive.
    """
    nbytes: Any = size
    if isinstance(size, str):
        number, unit = size.strip()[:-2], size.strip()[-2:].upper()
        try:
            nbytes = int(float(number) * _DECIMAL_UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            raise ValueError(f"{name}: {size!r} is not a size such as 5GB or 500MB") from None
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"{name}: {size!r} is not a positive number of bytes")
    return nbytes


def direct_mode(direct: Direct) -> str:
    """Return the name that the native core (``_core``) has for a value of ``direct``.

    The value decides when transfers bypass the page cache (O_DIRECT).

    Raises
    ------
    ValueError
        The value is none of "auto", True and False.
    """
    if direct == "auto":
        return "auto"
    if direct is True:
        return "always"
    if direct is False:
        return "never"
    raise ValueError(f'direct: {direct!r} is not one of "auto", True and False')


def checked_path(path: Path, name: str = "path") -> str:
    """Return a local path as a str that os.fsencode() converts to the original bytes.

    Raises
    ------
    TypeError, ValueError
        The argument is not a local path, but for example a URL.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{name}: expected a path, got {type(path).__name__}")
    text = os.fsdecode(path)
    if ":/" in text and _URL.match(text):
        raise ValueError(
            f"{name}: expected a local path, got the URL {path!r} (remedy: use a local folder, or one where the "
            "storage is mounted; only tensorferry.open and the functions that load models and checkpoints read URLs)"
        )
    if "\0" in text:
        raise ValueError(f"{name}: {path!r} contains a null character")
    if not text.isascii():
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: {path!r} is not a path: {error}") from None
    return text


def is_url(path: object) -> bool:
    """Return whether ``path`` is a URL that can be read, or the text of an object in a store (see transfer.remote)."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    return isinstance(text, str) and ":/" in text and _READ_URL.match(text) is not None


def is_pair(path: object) -> TypeGuard[tuple[Any, str]]:
    """Return whether ``path`` is a pair of an obstore store and a key. The store's type is not checked here."""
    return (
        isinstance(path, tuple)
        and len(path) == 2
        and isinstance(path[1], str)
        and not isinstance(path[0], (str, bytes, os.PathLike))
    )


def can_be_path(text: str) -> bool:
    """Return whether a text can be encoded as a file name.

    A text from JSON or a pickle may contain half of a surrogate pair, which has no encoding.
    """
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def absolute_path(path: Path, name: str = "path") -> str:
    """Make a path absolute, and thus valid even if the process changes its directory before using it."""
    text = checked_path(path, name)
    return text if text.startswith("/") else f"{os.getcwd()}/{text}"  # noqa: PTH109 (five times as fast as pathlib)


def checked_descriptor(descriptor: int, name: str = "path") -> int:
    """Return a descriptor after checking that it is not a bool and fits into a C int."""
    if isinstance(descriptor, bool):
        raise TypeError(f"{name}: {descriptor!r} is neither a path nor a file descriptor")
    if not -1 << 31 <= descriptor < 1 << 31:
        raise ValueError(f"{name}: {descriptor} is not a file descriptor")
    return descriptor


def checked_offset(offset: int, nbytes: int, name: str = "offset") -> int:
    """Return an offset after checking that ``nbytes`` bytes from it on do not exceed the largest file size."""
    if isinstance(offset, bool) or not hasattr(offset, "__index__"):
        raise TypeError(f"{name}: {offset!r} is not an integer")
    offset = offset.__index__()
    if offset < 0:
        raise ValueError(f"{name}: {offset} is negative")
    if offset + nbytes > MAX_FILE_NBYTES:
        raise ValueError(
            f"{name}: {offset} + {nbytes} bytes exceeds the largest file size ({MAX_FILE_NBYTES})"
        )
    return offset
