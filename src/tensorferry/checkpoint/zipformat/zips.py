"""Zip archives as torch.save writes them: their structures, and the location of records in an untrusted archive.

An archive consists of records, each with a local header, a name, padding, uncompressed data, and a descriptor (size and
CRC-32 again); then the central directory, with one entry for each record; then the end records, which locate the
directory. :func:`layout` compares all values that occur twice. Numbers of more than 32 bits are in a zip64 field, which
torch's directory entries have. This module does not need torch.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from tensorferry.transfer import python_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    Bytes = bytes | bytearray | memoryview
    Fields = tuple[int, ...]

# A local header and an entry of the directory begin with the same fields: signature, version (the entry has two),
# flags, method, time, date, CRC-32, packed size, size, and the lengths of name and extra field. An entry has further
# fields.
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
ENTRY = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
LOCATOR = struct.Struct("<4sLQL")
ZIP64_END = struct.Struct("<4sQ2H2L4Q")
ENTRY_CRC = 16
"""The offset of the CRC-32 in an entry."""
DESCRIPTOR_CRC = 4
"""The offset of the CRC-32 in a descriptor."""
MAX_32 = 0xFFFFFFFF
HAS_DESCRIPTOR = 0x8

_HEADER_SIGNATURE, _ENTRY_SIGNATURE, _DESCRIPTOR_SIGNATURE = b"PK\3\4", b"PK\1\2", b"PK\7\10"
_END_SIGNATURE, _LOCATOR_SIGNATURE, _ZIP64_SIGNATURE = b"PK\5\6", b"PK\6\7", b"PK\6\6"
_ZIP64_FIELD = struct.Struct("<2H2Q")
_VERSION = 45  # of the format, with zip64
_ZIP64_END_NBYTES = ZIP64_END.size - 12  # the size field excludes its own 12 leading bytes
_MAX_DIRECTORY_NBYTES = 256 << 20
_MAX_DESCRIPTOR_NBYTES = 24


class UnknownArchiveError(Exception):
    """An archive differs from those that torch writes."""


class DirectoryEntry(NamedTuple):
    """An entry of the central directory.

    Attributes
    ----------
    header : int
        The offset of the record's local header in the archive.
    name : bytes
        The record's name.
    shared : tuple of int
        The fields that are in the local header as well: version, flags, method, time, date.
    crc, nbytes : int
        The CRC-32 and size of the data.
    at : int
        The offset of the entry in the archive.
    """

    header: int
    name: bytes
    shared: Fields
    crc: int
    nbytes: int
    at: int


class Span(NamedTuple):
    """The location of a record's data in an archive, and their CRC-32, which is 0 if there is none."""

    name: str
    begin: int
    nbytes: int
    crc: int


def reader_of(
    file: BinaryIO, first: int = 0, nbytes: int | None = None
) -> tuple[Callable[[int, int], bytes], int]:
    """Return a function of (begin, end) that reads from a part of an open file, and the part's size."""
    pread, file_nbytes = python_files.reader_and_size(file)
    size = file_nbytes if nbytes is None else nbytes

    def read(begin: int, end: int) -> bytes:
        count = min(end, size) - begin
        return pread(count, first + begin) if begin >= 0 and count > 0 else b""

    return read, size


def begins(data: Bytes) -> bool:
    """Return whether bytes are the beginning of an archive."""
    return data[:4] == _HEADER_SIGNATURE


def ends(data: Bytes) -> bool:
    """Return whether bytes are the end of an archive."""
    return len(data) >= END.size and data[len(data) - END.size :][:4] == _END_SIGNATURE


def find_end(data: Bytes) -> int:
    """Return the offset of the last end record, which may be incomplete, or -1 if there is none."""
    return bytes(data).rfind(_END_SIGNATURE)


def local_header(data: Bytes, at: int = 0) -> tuple[bytes, int, Fields]:
    """Return the name in a local header, the size of the header with name and padding, and its fields.

    Raises
    ------
    UnknownArchiveError, struct.error
        There is no local header at ``at``.
    """
    fields = LOCAL_HEADER.unpack_from(data, at)
    _require(at >= 0 and fields[0] == _HEADER_SIGNATURE, "a record has no signature")
    name_at = at + LOCAL_HEADER.size
    name = bytes(data[name_at : name_at + fields[9]])
    return name, LOCAL_HEADER.size + fields[9] + fields[10], fields[1:]


def is_descriptor(data: Bytes) -> bool:
    """Return whether bytes begin with a descriptor, which follows a record's data."""
    return data[:4] == _DESCRIPTOR_SIGNATURE


def entries(
    read: Callable[[int, int], bytes], nbytes: int, *, of_torch: bool
) -> tuple[list[DirectoryEntry], int]:
    """Return the entries of an archive's directory, and its offset; ``of_torch`` refuses what torch does not write."""
    count, begin, end = _directory_range(read, nbytes)
    directory, at = read(begin, end), begin
    found = []
    for _ in range(count):
        fields = ENTRY.unpack_from(directory, at - begin)
        name_nbytes, extra_nbytes, comment_nbytes = fields[10:13]
        name_at = at - begin + ENTRY.size
        name = directory[name_at : name_at + name_nbytes]
        extra = directory[name_at + name_nbytes : name_at + name_nbytes + extra_nbytes]
        nbytes, packed, header = _replace_wide(extra, [fields[9], fields[8], fields[16]])
        _require(fields[0] == _ENTRY_SIGNATURE, "an entry of the directory has no signature")
        if of_torch:
            stored = fields[4] == 0 and nbytes == packed
            _require(stored, f"the record {name!r} is compressed")
            is_plain = not any((comment_nbytes, *fields[13:16]))
            _require(is_plain, f"the entry of {name!r} has unexpected fields")
        shared = (fields[2], fields[3], *fields[4:7])
        found.append(DirectoryEntry(header, name, shared, fields[7], nbytes, at))
        at += ENTRY.size + name_nbytes + extra_nbytes + comment_nbytes
    _require(at == end, "the directory's size differs from the one in the end record")
    return found, begin


def names(read: Callable[[int, int], bytes], nbytes: int) -> list[bytes]:
    """Return the names of the records of any zip archive; for the arguments see :func:`layout`.

    Raises
    ------
    UnknownArchiveError, struct.error
        The archive has no directory.
    """
    return [entry.name for entry in entries(read, nbytes, of_torch=False)[0]]


def last_entries(tail: Bytes, tail_begin: int) -> list[DirectoryEntry]:
    """Return the directory in the last bytes of an archive, which begin at offset ``tail_begin``.

    Raises
    ------
    UnknownArchiveError, struct.error
        The directory is not in these bytes, or differs from those that torch writes.
    """

    def read(begin: int, end: int) -> bytes:
        _require(begin >= tail_begin, "its directory is longer than expected")
        return bytes(tail[begin - tail_begin : end - tail_begin])

    return entries(read, tail_begin + len(tail), of_torch=True)[0]


def layout(
    read: Callable[[int, int], bytes],
    nbytes: int,
    damaged: Callable[[str, int, int, str], None] | None = None,
) -> list[Span]:
    """Return the location of the records of an archive, and check all structures that describe it.

    Parameters
    ----------
    read : function of (begin, end)
        Returns bytes of the archive.
    nbytes : int
        The archive's size.
    damaged : function of (name, begin, end, problem), optional
        Called for each record that differs from the directory; such records are left out. By default, the first of them
        raises an error.

    Raises
    ------
    UnknownArchiveError, struct.error, UnicodeDecodeError
        The archive differs from those that torch writes.
    """
    found, directory_begin = entries(read, nbytes, of_torch=True)
    found.sort()
    places = []
    # A record that would begin behind the directory makes the one before it overlap the directory.
    next_headers = [min(entry.header, directory_begin) for entry in found[1:]] + [directory_begin]
    _require(not found or found[0].header == 0, "it does not begin with a record")
    for entry, next_header in zip(found, next_headers, strict=True):
        try:
            places.append(_locate(read, entry, next_header))
        except (UnknownArchiveError, struct.error, UnicodeDecodeError) as error:
            if damaged is None:
                raise
            name = entry.name.decode(errors="backslashreplace")
            damaged(name, entry.header, max(entry.header, next_header), str(error))
    return places


def _locate(read: Callable[[int, int], bytes], entry: DirectoryEntry, next_header: int) -> Span:
    """Compare a record with its entry, and locate its data."""
    header, name, shared, crc, size = entry[:5]
    fixed = read(header, header + LOCAL_HEADER.size)
    _require(begins(fixed), f"the record {name!r} has no signature at its beginning")
    _, header_nbytes, local = local_header(fixed)
    at, data = header + LOCAL_HEADER.size, header + header_nbytes
    _require(local[:5] == shared, f"the header of {name!r} differs from the directory")
    _require(read(at, at + local[8]) == name, f"the name of {name!r} differs in its header")
    _require(local[5] in (0, crc), f"the CRC-32 of {name!r} differs in its header")
    sound = {local[6], local[7]} <= {0, size, MAX_32}
    _require(sound, f"the size of {name!r} differs in its header")
    descriptor_nbytes = next_header - data - size
    fits = 0 <= descriptor_nbytes <= _MAX_DESCRIPTOR_NBYTES
    problem = f"the data of {name!r} overlaps the next record, or the gap between them is too large"
    _require(fits, problem)
    if descriptor_nbytes:
        sizes = struct.pack("<2L" if descriptor_nbytes == 16 else "<2Q", size, size)
        wanted = struct.pack("<4sL", _DESCRIPTOR_SIGNATURE, crc) + sizes
        found = read(data + size, next_header)
        _require(found == wanted, f"the descriptor of {name!r} is damaged")
    else:
        missing = size and shared[1] & HAS_DESCRIPTOR
        _require(not missing, f"the descriptor of {name!r} is missing")
    return Span(name.decode(), data, size, crc)


def _directory_range(read: Callable[[int, int], bytes], nbytes: int) -> tuple[int, int, int]:
    """Return the number of entries in the central directory, and the offsets of its start and end."""
    at = nbytes - END.size
    end = END.unpack(read(max(0, at), nbytes))
    count, size, begin = end[4], end[5], end[6]
    sound = end[0] == _END_SIGNATURE and not any((*end[1:3], end[7])) and end[3] == count
    _require(sound, "the end record of the zip archive is damaged")
    locator = read(at - LOCATOR.size, at) if at >= LOCATOR.size else b""
    where = at
    if locator[:4] == _LOCATOR_SIGNATURE or MAX_32 in (size, begin) or count == 0xFFFF:
        signature, disk, where, disks = LOCATOR.unpack(locator)
        is_before = where + ZIP64_END.size + LOCATOR.size == at
        sound = signature == _LOCATOR_SIGNATURE and (disk, disks) == (0, 1) and is_before
        _require(sound, "the zip64 locator of the zip archive is damaged")
        wide = ZIP64_END.unpack(read(where, where + ZIP64_END.size))
        begins_soundly = wide[:2] == (_ZIP64_SIGNATURE, _ZIP64_END_NBYTES)
        sound = begins_soundly and not any(wide[4:6]) and wide[6] == wide[7]
        _require(sound, "the zip64 end record of the zip archive is damaged")
        _require(count in (wide[7], 0xFFFF), "its two end records differ")
        sound = size in (wide[8], MAX_32) and begin in (wide[9], MAX_32)
        _require(sound, "its two end records differ")
        count, size, begin = wide[7:]
    sound = begin + size == where and size <= _MAX_DIRECTORY_NBYTES
    _require(sound, "its directory is not at its end")
    _require(count * ENTRY.size <= size, "its directory is too short")
    return count, begin, begin + size


def _replace_wide(extra: Bytes, values: list[int]) -> list[int]:
    """Return the numbers of an entry; one that does not fit in 32 bits is replaced by that in the zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, position + 4))
            return [next(wide, value) if value == MAX_32 else value for value in values]
        position += 4 + nbytes
    return values


def pack_header(name: bytes, nbytes: int, crc: int, at: int, alignment: int = 1) -> bytes:
    """Return a local header for the offset ``at``, padded so that the data are aligned.

    It does not have the size of data of 4 GiB and more, which only the directory has.
    """
    padding = -(at + LOCAL_HEADER.size + len(name)) % alignment
    short = min(nbytes, MAX_32)
    fields = (_VERSION, 0, 0, 0, 0, crc, short, short, len(name), padding)
    return LOCAL_HEADER.pack(_HEADER_SIGNATURE, *fields) + name + bytes(padding)


def pack_entry(name: bytes, nbytes: int, crc: int, header: int) -> bytes:
    """Return the directory entry of a record; ``header``, the offset of its local header, must be below 4 GiB."""
    extra = b"" if nbytes < MAX_32 else _ZIP64_FIELD.pack(1, 16, nbytes, nbytes)
    short = min(nbytes, MAX_32)
    fields = (_VERSION, _VERSION, 0, 0, 0, 0, crc, short, short, len(name), len(extra))
    return ENTRY.pack(_ENTRY_SIGNATURE, *fields, 0, 0, 0, 0, header) + name + extra


def pack_ends(count: int, begin: int, nbytes: int) -> bytes:
    """Return the end records for a directory with ``count`` entries, which has ``nbytes`` bytes at offset ``begin``."""
    versions = (_ZIP64_END_NBYTES, _VERSION, _VERSION)
    wide = ZIP64_END.pack(_ZIP64_SIGNATURE, *versions, 0, 0, count, count, nbytes, begin)
    locator = LOCATOR.pack(_LOCATOR_SIGNATURE, 0, begin + nbytes, 1)
    return wide + locator + END.pack(_END_SIGNATURE, 0, 0, 0xFFFF, 0xFFFF, MAX_32, MAX_32, 0)


def _require(fact: object, otherwise: str) -> None:
    if not fact:
        raise UnknownArchiveError(otherwise)
