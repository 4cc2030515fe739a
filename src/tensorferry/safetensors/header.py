"""The header of a safetensors file: parsed before anything of the file is believed, and built.

A file is 8 bytes with the header's length, little-endian; the header, JSON in UTF-8; and the tensors' bytes, which
cover the rest of the file exactly. What is accepted is what the reference accepts, safetensors' own parser in Rust
(serde_json), but for the number of lists and objects, and for a rounding of numbers that nobody needs. So oddities of
it that no writer makes use of are here too, and said where they are.

This room has the rules; `parsing` takes the JSON apart.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.errors import ShortReadError
from tensorferry.safetensors.dtypes import DTYPES, Dtype
from tensorferry.safetensors.errors import SafetensorError, shortened, something_else
from tensorferry.safetensors.parsing import LENGTH_NBYTES, WORD, Parser
from tensorferry.safetensors.parsing import METADATA as METADATA

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tensorferry.safetensors.parsing import Found
    from tensorferry.transfer.files import File

MAX_NBYTES = 100_000_000
"""Of the JSON; the format's limit."""

_FIRST_READ_NBYTES = 64 << 10
_FEW_DIMENSIONS = 8
_MAX_KEPT, _MAX_KEPT_NBYTES = 8, 4 << 20


class Tensor(NamedTuple):  # made three times as fast as a frozen dataclass
    """A tensor of a file.

    Attributes
    ----------
    name, dtype : str
        As the header has them.
    shape : tuple of int
        As the header has it: of F4, elements, not pairs.
    begin, end : int
        Where in the file, in bytes from its start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What a file's header says.

    Attributes
    ----------
    metadata : dict of str to str, or None
        What its writer added; None where there was nothing.
    tensors : dict of str to Tensor
        In the order of their bytes.
    nbytes : int
        Of the length and the JSON: where the first tensor begins.
    file_nbytes : int
        Of the file.
    """

    metadata: dict[str, str] | None
    tensors: dict[str, Tensor]
    nbytes: int
    file_nbytes: int


def read(file: File) -> Header:
    """Read and check the header of an open file. At most 100 MB are read, and none before they are known to be there.

    Raises
    ------
    SafetensorError
        The file breaks a rule of the format, or changed its size meanwhile.
    StorageError
        It cannot be read.
    """
    path, file_nbytes = file.path, file.size
    try:
        begin = bytes(file.read(bytearray(min(file_nbytes, _FIRST_READ_NBYTES))))
        nbytes = length(begin, file_nbytes, path)
        if nbytes > len(begin):
            rest = file.read(bytearray(nbytes - len(begin)), len(begin))
            begin += rest
    except ShortReadError:
        raise SafetensorError("the file was cut short while its header was read", path) from None
    data = begin[:nbytes]
    keep = len(data) <= _MAX_KEPT_NBYTES
    header = (_parsed_before if keep else parse)(data, file_nbytes, path)
    if file.size != file_nbytes:
        raise SafetensorError(
            f"the file had {file_nbytes} bytes, and has {file.size} after its header was read", path
        )
    return header


def length(begin: bytes, file_nbytes: int, path: str) -> int:
    """Return how many bytes the length and the JSON have, told by a file's first 8 bytes.

    Raises
    ------
    SafetensorError
        It cannot be, or the file has not so many.
    """
    if file_nbytes < LENGTH_NBYTES or len(begin) < LENGTH_NBYTES:
        raise SafetensorError(
            f"the file has {file_nbytes} bytes, and the header's length alone has {LENGTH_NBYTES}",
            path,
        )
    nbytes = int.from_bytes(begin[:LENGTH_NBYTES], "little")
    if nbytes > min(MAX_NBYTES, file_nbytes) and (other := something_else(begin)):
        raise SafetensorError(other, path)
    if nbytes > MAX_NBYTES:
        raise SafetensorError(
            f"its header would have {nbytes} bytes, more than the {MAX_NBYTES} of the format: "
            "it is no safetensors file, or damaged",
            path,
        )
    if nbytes > file_nbytes - LENGTH_NBYTES:
        raise SafetensorError(
            f"its header would have {nbytes} bytes, and the file has {file_nbytes} altogether: "
            "it was cut short, or is no safetensors file",
            path,
        )
    return LENGTH_NBYTES + nbytes


def parse(data: bytes, file_nbytes: int, path: str) -> Header:
    """Return what a header says.

    Parameters
    ----------
    data : bytes
        The file's first bytes: the length, and all of the JSON.
    file_nbytes : int
        Of the file.
    path : str
        For messages.

    Raises
    ------
    SafetensorError
        A rule of the format is broken.
    """
    nbytes = length(data, file_nbytes, path)
    if len(data) < nbytes:
        raise SafetensorError(f"{len(data)} bytes of a header of {nbytes} were given", path)
    try:
        text = data[LENGTH_NBYTES:nbytes].decode()
    except UnicodeDecodeError as error:
        raise SafetensorError(
            f"its header is not UTF-8: {error.reason} at byte {LENGTH_NBYTES + error.start}", path
        ) from None
    metadata, found = Parser(text, path).run()
    return Header(metadata, _placed(found, nbytes, file_nbytes, path), nbytes, file_nbytes)


# Some libraries open a file anew for each tensor (accelerate). The bytes alone tell what a header says, and what was
# made of them is not changed.
_parsed_before = functools.lru_cache(_MAX_KEPT)(parse)


def build(
    tensors: Iterable[tuple[str, str, Iterable[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[str]]:
    """Return what stands before the data of a file, as safetensors writes it to the byte.

    Parameters
    ----------
    tensors : iterable of (name, dtype, shape)
        The names of the format, and shapes as headers have them: of F4, elements, not pairs.
    metadata : mapping of str to str, optional
        Written in the order of its keys' names; safetensors' order changes from run to run.

    Returns
    -------
    bytes
        The length and the JSON, padded with spaces to a multiple of 8.
    list of str
        The names, in the order in which the tensors' bytes must follow, without gaps.

    Raises
    ------
    SafetensorError
        A name comes twice or cannot be written, a dtype is unknown, a shape is none or too large, elements of less than
        a byte do not fill bytes, metadata are no strings, or the header becomes larger than the format allows.
    """
    entries: list[tuple[int, str, Dtype, tuple[int, ...]]] = []
    seen = set()
    for name, kind, shape in tensors:
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise SafetensorError(f"{kind!r} is no dtype of the format", name=name)
        if name in seen:
            raise SafetensorError("there are two of this name", name=name)
        if name == METADATA:
            raise SafetensorError("the format keeps this name for metadata", name=name)
        seen.add(name)
        entries.append((-_RANK[kind], name, dtype, tuple(map(operator.index, shape))))
    entries.sort(key=lambda entry: entry[:2])
    content: dict[str, Any] = {}
    if metadata is not None:
        content[METADATA] = _text_only(metadata)
    at = 0
    for _, name, dtype, shape in entries:
        begin, at = at, at + _nbytes_of(dtype, shape, "", name)
        if at >= WORD:
            raise SafetensorError("more than 2**64 bytes end here", name=name)
        content[name] = {"dtype": dtype.name, "shape": shape, "data_offsets": (begin, at)}
    try:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        wrong = shortened(error.object[max(0, error.start - 20) : error.end + 20])
        raise SafetensorError(
            f"a name or metadata with half a surrogate pair cannot be written: {wrong}"
        ) from None
    text += b" " * (-len(text) % LENGTH_NBYTES)
    if len(text) > MAX_NBYTES:
        raise SafetensorError(
            f"the header would have {len(text)} bytes, more than the {MAX_NBYTES} of the format"
        )
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text, [entry[1] for entry in entries]


_RANK = {name: rank for rank, name in enumerate(DTYPES)}


def _text_only(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise SafetensorError(
                f"metadata are strings, and {shortened(key)}: {shortened(value)} are not"
            )
    return dict(sorted(metadata.items()))


def _nbytes_of(dtype: Dtype, shape: tuple[int, ...], path: str, name: str) -> int:
    """Return how many bytes a tensor has; counted in this order, since the reference's 64 bits may overflow."""
    elements = 1
    for size in shape:
        if not 0 <= size < WORD:
            raise SafetensorError(f"its shape has {size}", path, name=name)
        elements *= size
        if elements >= WORD:
            break
    bits = elements * dtype.bits
    if bits >= WORD:
        raise SafetensorError(
            f"shape {shortened(shape)} of {dtype.name} is larger than any file", path, name=name
        )
    if bits % 8:
        raise SafetensorError(
            f"shape {shortened(shape)} of {dtype.name} has {bits} bits, which do not fill bytes",
            path,
            name=name,
        )
    return bits // 8


def _placed(
    found: dict[str, Found],
    nbytes: int,
    file_nbytes: int,
    path: str,
) -> dict[str, Tensor]:
    """Return the tensors in the order of their bytes, which must cover the file behind the header exactly."""
    tensors = {}
    at = 0
    for name, (dtype, shape, begin, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin != at or end < begin:
            raise SafetensorError(_misplaced(begin, end, at), path, name=name)
        # A product that is not 0 has none that is larger before it; all else is looked at closely. One of thousands of
        # large numbers would take hours.
        if (
            len(shape) > _FEW_DIMENSIONS
            or not 0 < math.prod(shape) * dtype.bits == 8 * (end - begin) < WORD
        ):
            expected = _nbytes_of(dtype, shape, path, name)
            if end - begin != expected:
                raise SafetensorError(
                    f"shape {shortened(shape)} of {dtype.name} has {expected} bytes, and its data_offsets "
                    f"{begin} to {end} have {end - begin}",
                    path,
                    name=name,
                )
        at = end
        if at > file_nbytes - nbytes:
            raise SafetensorError(
                f"its data end at {nbytes + end}, and the file at {file_nbytes}: it was cut short",
                path,
                name=name,
            )
        tensors[name] = Tensor(name, dtype.name, shape, nbytes + begin, nbytes + end)
    if at != file_nbytes - nbytes:
        raise SafetensorError(
            f"the tensors end at {nbytes + at}, and the file at {file_nbytes}: "
            f"{file_nbytes - nbytes - at} bytes are no tensor's",
            path,
        )
    return tensors


def _misplaced(begin: int, end: int, at: int) -> str:
    where = f"its data_offsets are {begin} to {end}"
    if end < begin:
        return f"{where}, backwards"
    if begin > at:
        return f"{where}, and {begin - at} bytes before are no tensor's"
    return f"{where}, and bytes up to {at} are another tensor's"
