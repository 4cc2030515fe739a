"""The header of a safetensors file: reading, validating and building it.

A file consists of the header's length (8 bytes, little-endian), the header (JSON in UTF-8), and the tensors' bytes,
which must cover the rest of the file exactly. The header is validated completely before any tensor is read.

This module accepts the same headers as the reference, safetensors' own parser in Rust (serde_json), with two
exceptions: the number of lists and objects is limited, and the rounding of floats, which no field uses, may differ.
Comments mark the oddities of the reference that no writer uses.

`parsing` splits the JSON into entries. This module checks the offsets and sizes.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.errors import ShortReadError
from tensorferry.safetensors.dtypes import DTYPES, Dtype
from tensorferry.safetensors.errors import SafetensorError, shortened, wrong_download
from tensorferry.safetensors.parsing import LENGTH_NBYTES, WORD, Parser
from tensorferry.safetensors.parsing import METADATA as METADATA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tensorferry.safetensors.parsing import Found
    from tensorferry.transfer.files import File

MAX_NBYTES = 100_000_000
"""The format's limit for the size of the JSON."""

_FIRST_READ_NBYTES = 64 << 10
_FEW_DIMENSIONS = 8


class Tensor(NamedTuple):  # its constructor is three times as fast as a frozen dataclass's
    """A tensor of a file.

    Attributes
    ----------
    name, dtype : str
        The name and the dtype in the header.
    shape : tuple of int
        The shape in the header, which counts single elements of F4, not pairs.
    begin, end : int
        The tensor's range in the file, in bytes from the file's start.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file's header.

    Attributes
    ----------
    metadata : dict of str to str, or None
        The metadata that the writer added, or None if the header has none.
    tensors : dict of str to Tensor
        The tensors, in the order of their offsets.
    nbytes : int
        The size of the length field and the JSON, which is the offset of the first tensor.
    file_nbytes : int
        The size of the file.
    """

    metadata: dict[str, str] | None
    tensors: dict[str, Tensor]
    nbytes: int
    file_nbytes: int


def begins(data: bytes) -> bool:
    """Return whether the first bytes of a file are the size of a JSON header and the beginning of such a header."""
    return data[8:9] == b"{" and 2 <= int.from_bytes(data[:8], "little") <= MAX_NBYTES


def read(file: File, check: Callable[[bytes, str], None] | None = None) -> Header:
    """Read and validate the header of an open file.

    At most 100 MB are read. The length in the file is checked against the file's size before memory is allocated.
    ``check`` is called with the bytes of the header and the path, before the header is parsed.

    Raises
    ------
    SafetensorError
        The file breaks a rule of the format, or its size changed during the call.
    StorageError
        The file cannot be read.
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
    if check is not None:
        check(data, path)
    header = parse(data, file_nbytes, path)
    if file.size != file_nbytes:
        raise SafetensorError(
            f"the file had {file_nbytes} bytes, and has {file.size} after its header was read", path
        )
    return header


def length(begin: bytes, file_nbytes: int, path: str) -> int:
    """Return the size of the length field and the JSON, given the first bytes of a file.

    Raises
    ------
    SafetensorError
        The length exceeds the format's limit or the file's size.
    """
    if file_nbytes < LENGTH_NBYTES or len(begin) < LENGTH_NBYTES:
        raise SafetensorError(
            f"the file has {file_nbytes} bytes, and the header's length alone has {LENGTH_NBYTES}",
            path,
        )
    nbytes = int.from_bytes(begin[:LENGTH_NBYTES], "little")
    if nbytes > min(MAX_NBYTES, file_nbytes) and (other := wrong_download(begin)):
        raise SafetensorError(other, path)
    if nbytes > MAX_NBYTES:
        raise SafetensorError(
            f"its header would have {nbytes} bytes, more than the {MAX_NBYTES} of the format: "
            "it is not a safetensors file, or is damaged",
            path,
        )
    if nbytes > file_nbytes - LENGTH_NBYTES:
        raise SafetensorError(
            f"its header would have {nbytes} bytes, and the file has {file_nbytes} altogether: "
            "it was cut short, or is not a safetensors file",
            path,
        )
    return LENGTH_NBYTES + nbytes


def parse(data: bytes, file_nbytes: int, path: str) -> Header:
    """Parse and validate a header.

    Parameters
    ----------
    data : bytes
        The first bytes of the file: the length field and all of the JSON.
    file_nbytes : int
        The size of the file.
    path : str
        The path of the file, for messages.

    Raises
    ------
    SafetensorError
        The header breaks a rule of the format.
    """
    nbytes = length(data, file_nbytes, path)
    if len(data) < nbytes:
        raise SafetensorError(
            f"data has only {len(data)} of the {nbytes} bytes of the header", path
        )
    try:
        text = data[LENGTH_NBYTES:nbytes].decode()
    except UnicodeDecodeError as error:
        raise SafetensorError(
            f"its header is not UTF-8: {error.reason} at byte {LENGTH_NBYTES + error.start}", path
        ) from None
    metadata, found = Parser(text, path).run()
    return Header(metadata, _check_offsets(found, nbytes, file_nbytes, path), nbytes, file_nbytes)


def build(
    tensors: Iterable[tuple[str, str, Iterable[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[str]]:
    """Build the header of a file. It is byte-identical to the header that safetensors writes.

    Parameters
    ----------
    tensors : iterable of (name, dtype, shape)
        Dtypes have the format's names. Shapes count single elements of F4, not pairs.
    metadata : mapping of str to str, optional
        The metadata, which are written in the order of their keys. safetensors' own order changes from run to run.

    Returns
    -------
    bytes
        The length field and the JSON, padded with spaces to a multiple of 8.
    list of str
        The names, in the order in which the tensors' bytes must follow the header without gaps.

    Raises
    ------
    SafetensorError
        A name is duplicate or cannot be encoded, a dtype is unknown, a shape is invalid or too large, elements of less
        than 8 bits do not fill whole bytes, metadata are not strings, or the header exceeds the format's limit.
    """
    entries: list[tuple[int, str, Dtype, tuple[int, ...]]] = []
    seen = set()
    for name, kind, shape in tensors:
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise SafetensorError(f"{kind!r} is not a dtype of the format", name=name)
        if name in seen:
            raise SafetensorError("there are two tensors of this name", name=name)
        if name == METADATA:
            raise SafetensorError("the format reserves this name for metadata", name=name)
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
            raise SafetensorError("its end exceeds the 2**64 bytes of the format", name=name)
        content[name] = {"dtype": dtype.name, "shape": shape, "data_offsets": (begin, at)}
    try:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        wrong = shortened(error.object[max(0, error.start - 20) : error.end + 20])
        raise SafetensorError(
            f"a name or metadata has half of a surrogate pair, which UTF-8 cannot represent: {wrong}"
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
                f"metadata must be strings, and {shortened(key)}: {shortened(value)} is not a pair of strings"
            )
    return dict(sorted(metadata.items()))


def _nbytes_of(dtype: Dtype, shape: tuple[int, ...], path: str, name: str) -> int:
    """Return the size of a tensor in bytes.

    The product is computed from left to right and refused at the first overflow of 64 bits, as in the reference, even
    if a later dimension is 0.
    """
    elements = 1
    for size in shape:
        if not 0 <= size < WORD:
            raise SafetensorError(
                f"its shape contains {size}, which is not a size", path, name=name
            )
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
            f"shape {shortened(shape)} of {dtype.name} has {bits} bits, which is not a number of whole bytes",
            path,
            name=name,
        )
    return bits // 8


def _check_offsets(
    found: dict[str, Found],
    nbytes: int,
    file_nbytes: int,
    path: str,
) -> dict[str, Tensor]:
    """Return the tensors in the order of their offsets. They must cover the file after the header exactly."""
    tensors = {}
    at = 0
    for name, (dtype, shape, begin, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin != at or end < begin:
            raise SafetensorError(_misplaced(begin, end, at), path, name=name)
        # Fast path: if the whole product is within 64 bits and not 0, so is each partial product, and _nbytes_of() need
        # not be called. All other shapes take this exact check. Shapes with many dimensions skip math.prod(), which can
        # take hours for thousands of large sizes, because it computes with integers of any length.
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
            f"{file_nbytes - nbytes - at} bytes belong to no tensor",
            path,
        )
    return tensors


def _misplaced(begin: int, end: int, at: int) -> str:
    where = f"its data_offsets are {begin} to {end}"
    if end < begin:
        return f"{where}, and the end precedes the begin"
    if begin > at:
        return f"{where}, and the {begin - at} bytes before belong to no tensor"
    return f"{where}, and the bytes up to {at} belong to another tensor"
