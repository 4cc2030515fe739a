"""Reading an archive of torch.save: its directory, and its payloads, which are read ahead and verified.

An archive is a zip file of records, and its payloads are the records with the bytes of storages. Records are
consecutive, so the directory alone gives the location of each payload. Each payload is read into separate memory with
direct I/O: a large one by one transfer of the core, small ones many at a time. Local headers are compared with the
directory, and so are the CRC-32s that the core computes during the transfer.
"""

from __future__ import annotations

import struct
import sys
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch

import tensorferry
from tensorferry import _core
from tensorferry._core import crc32
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.objects.skeleton import MARK_NBYTES
from tensorferry.checkpoint.zipformat import zips
from tensorferry.transfer import python_files
from tensorferry.transfer.checksums import Checksums
from tensorferry.transfer.pipeline import Pipeline, Read, read_ahead_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PAGE_NBYTES = 4096
# Payloads of at least this size are read by a separate transfer, and need no copy.
_LARGE_NBYTES = 1 << 20
# Small payloads are read together, up to this size.
_RUN_NBYTES = 4 << 20

# More payloads than this, with at most so many bytes on average, count as many small ones.
_MANY, _SMALL_NBYTES = 1000, 32 << 10
# Many small payloads of up to this size altogether are read before torch begins. Until it has copied them, they are in
# memory about four times.
_MAX_READ_FIRST_NBYTES = 64 << 20

_TORCHS_RECORDS = ("data", "byteorder", "version", ".format_version", ".storage_alignment")

# Exceptions that zipfile raises for a damaged archive.
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(NotImplementedError, EOFError, RuntimeError, ValueError),
)


def are_small(count: int, nbytes: int) -> bool:
    """Return whether payloads are so many and small that the work for each counts more than that for their bytes."""
    return count > _MANY and nbytes <= count * _SMALL_NBYTES


class Record(NamedTuple):
    """A record of an archive, as described by the directory."""

    name: str
    header: int  # the offset of its local header in the file
    begin: int  # the offset of its data
    nbytes: int
    crc: int

    @property
    def end(self) -> int:
        """The end of its data."""
        return self.begin + self.nbytes


class ArchiveDirectory:
    """An archive's directory, and its small records, which are read and verified immediately.

    Parameters
    ----------
    path : str
        The file's name for messages.
    file : BinaryIO
        The archive, which must stay open while this is used.

    Raises
    ------
    CheckpointError
        The file is not an archive, or is damaged.

    Attributes
    ----------
    payloads : list of Record
        The records of storages that are long enough for a mark of :class:`Skeleton`, in file order.
    contents : list of (str, int, bytes)
        The name, size and data of all other records.
    foreign : bool
        Whether only torch can load the file: records are compressed, bytes are in another order, or it is TorchScript.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        read, self.nbytes = zips.reader_of(file)
        self.payloads: list[Record] = []
        self.contents: list[tuple[str, int, bytes]] = []
        self.foreign = False
        try:
            entries, end = zips.entries(read, self.nbytes, of_torch=True)
            named = [(entry, entry.name.decode()) for entry in sorted(entries)]
        except (zips.UnknownArchiveError, struct.error, UnicodeDecodeError):
            self.foreign = True
            return
        self._check_names(name for _, name in named)
        ends = [entry.header for entry, _ in named[1:]] + [end]
        self._sort([self._record(*each, end) for each, end in zip(named, ends, strict=True)])

    def reopen(self) -> tensorferry.File:
        """Open the archive again, even if it has been renamed or removed."""
        return python_files.reopen(self._file)

    def check_all(self) -> None:
        """Verify all records, however they are stored."""
        try:
            archive = python_files.open_zip(self._file)
        except _DAMAGE as error:
            raise CheckpointError(f"damaged or cut short: {error}", self.path) from error
        self._check_names(archive.namelist())
        for entry in archive.infolist():
            if entry.CRC == 0:
                continue  # there is no checksum
            try:
                if entry.header_offset < 0:  # zipfile does not check the offsets in the directory
                    raise ValueError("the directory gives a negative offset")
                with archive.open(entry) as data:
                    while data.read(_RUN_NBYTES):
                        pass
            except _DAMAGE as error:
                names = (entry.filename,)
                raise CheckpointError(f"damaged: {error}", self.path, names=names) from error

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            short = name.partition("/")[2]
            # torch looks up records without regard to case, and could use this record in place of the one that it
            # wrote, which is the one that is verified here.
            if short != short.lower() and short.lower().startswith(_TORCHS_RECORDS):
                raise CheckpointError(
                    f"damaged: the record {short!r} differs from one of torch's by its case only",
                    self.path,
                )

    def _sort(self, records: list[Record]) -> None:
        small: list[Record] = []
        for record in records:
            is_payload = record.name.partition("/")[2].startswith("data/")
            (self.payloads if is_payload and record.nbytes >= MARK_NBYTES else small).append(record)
        nbytes = sum(record.nbytes for record in self.payloads)
        if nbytes <= _MAX_READ_FIRST_NBYTES and are_small(len(self.payloads), nbytes):
            self.payloads, small = [], records
        for record, data in zip(small, self._read(small), strict=True):
            self.contents.append((record.name, record.nbytes, data))
        for name, _, data in self.contents:
            self.foreign |= name.endswith("/constants.pkl")
            self.foreign |= name.endswith("/byteorder") and data != sys.byteorder.encode()

    def _read(self, records: list[Record]) -> list[bytes]:
        """Read and verify records, and return their data."""
        if not records:
            return []
        groups: list[list[Record]] = []
        for record in records:
            if groups and record.header - groups[-1][-1].end <= _PAGE_NBYTES:
                groups[-1].append(record)
            else:
                groups.append([record])
        views = [memoryview(bytearray(each[-1].end - each[0].header)) for each in groups]
        segments: list[Any] = []
        at = records[0].header
        for group, view in zip(groups, views, strict=True):
            segments += [group[0].header - at, view]
            at = group[-1].end
        with self.reopen() as file:
            file.read(segments, records[0].header)
        contents = []
        for group, view in zip(groups, views, strict=True):
            for record in group:
                whole = view[record.header - group[0].header : record.end - group[0].header]
                self.check_header(record, whole)
                contents.append(bytes(whole[record.begin - record.header :]))
                self.check_crc(record, crc32(contents[-1]))
        return contents

    def check_header(self, record: Record, header: memoryview) -> None:
        """Compare a record's local header, at the beginning of the view, with the directory."""
        try:
            name, nbytes, _ = zips.local_header(header)
        except zips.UnknownArchiveError:
            name, nbytes = b"", 0
        if name == record.name.encode() and record.header + nbytes == record.begin:
            return
        raise self.damage_error(record, "its header differs from its entry in the zip directory")

    def check_crc(self, record: Record, crc: int) -> None:
        """Compare a record's CRC-32 with the directory, where 0 means none (torch's compute_crc32 is off)."""
        if crc != record.crc != 0:
            raise self.damage_error(record, f"its CRC-32 is {crc:08x} instead of {record.crc:08x}")

    def damage_error(self, record: Record, problem: str) -> CheckpointError:
        """Return the error for a damaged record."""
        where: Any = {"names": (record.name,), "begin": record.header, "end": record.end}
        return CheckpointError(f"damaged: {problem}", self.path, **where)

    def _record(self, entry: zips.DirectoryEntry, name: str, end: int) -> Record:
        """Locate an entry's data: they end, together with the descriptor, where the next record begins."""
        descriptor_nbytes = 0
        if entry.shared[1] & zips.HAS_DESCRIPTOR and entry.nbytes > 0:
            wide = max(entry.nbytes, entry.header) >= zips.MAX_32
            descriptor_nbytes = 24 if wide else 16
        begin = end - descriptor_nbytes - entry.nbytes
        record = Record(name, entry.header, begin, entry.nbytes, entry.crc)
        if begin < entry.header + zips.LOCAL_HEADER.size + len(entry.name):
            raise self.damage_error(
                record, "its data does not fit between its header and the next record"
            )
        return record


class Payloads:
    """A context manager that returns the payloads of an archive as storages, and reads ahead in file order.

    Parameters
    ----------
    directory : ArchiveDirectory
        The archive's directory.
    """

    def __init__(self, directory: ArchiveDirectory) -> None:
        file = directory.reopen()
        runs = list(_runs(directory, file))
        self._places = [(run, k) for run in runs for k in range(len(run.records))]
        # If torch copies payloads to another device, those that are read ahead need memory in addition to the result.
        # The limit counts payloads that have been read, or are being read, and that torch has not taken yet.
        self._pipeline = Pipeline(runs, memory_nbytes=read_ahead_nbytes())
        self._pipeline.files[directory] = file

    def take(self, index: int) -> Any:
        """Return the payload of this number when it has been read and verified. Each payload can be taken once.

        Raises
        ------
        CheckpointError
            The payload is damaged.
        StorageError
            The payload could not be read.
        """
        run, k = self._places[index]
        if run.is_checked:
            return run.take(k)
        while not run.released and (oldest := self._pipeline.first()) is not None:
            self._pipeline.release(oldest)
        self._pipeline.advance()
        return run.take(k)

    def __enter__(self) -> Payloads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.close()


class _RecordRun(Read):
    """Consecutive records that one transfer reads; ``is_checked`` is whether they have been verified."""

    def __init__(
        self, directory: ArchiveDirectory, records: list[Record], file: tensorferry.File
    ) -> None:
        self.records = records
        self.nbytes = records[-1].end - records[0].header
        self._directory = directory
        self._file = file
        self._headers: list[bytearray] = []
        self._payloads: list[torch.Tensor | None] = []
        self._sums = Checksums(segments=True)
        self.is_checked = False

    def begin(self) -> None:
        segments: list[Any] = []
        at = self.records[0].header
        for record in self.records:
            self._headers.append(bytearray(record.begin - record.header))
            self._payloads.append(_memory_for(record))
            # The gap before a header is the descriptor of the previous record.
            segments += [record.header - at, self._headers[-1], self._payloads[-1]]
            at = record.end
        offset = self.records[0].header
        self.futures = (self._file.read_into(segments, offset, checksums=self._sums),)

    def take(self, index: int) -> Any:
        """Return the storage of a record, once all records of the run have been read and verified."""
        if not self.is_checked:
            self.wait()
            self.futures = ()  # they refer to all payloads
            crcs = self._sums.segments[2::3]
            for record, header, crc in zip(self.records, self._headers, crcs, strict=True):
                self._directory.check_header(record, memoryview(header))
                self._directory.check_crc(record, crc)
            self.is_checked = True
        # Drop the reference, because the caller may copy the payload to another device and free it.
        payload, self._payloads[index] = self._payloads[index], None
        assert payload is not None
        return payload.untyped_storage()


def _memory_for(record: Record) -> torch.Tensor:
    """Return memory for a payload; for direct I/O, a large payload has the same offset in a page as in the file."""
    if record.nbytes < _LARGE_NBYTES:
        return torch.empty(record.nbytes, dtype=torch.uint8, device="cpu")
    start = record.begin % _PAGE_NBYTES
    memory, _ = _core.allocate(start + record.nbytes, False)
    return torch.frombuffer(memoryview(memory)[start : start + record.nbytes], dtype=torch.uint8)


def _runs(directory: ArchiveDirectory, file: tensorferry.File) -> Iterator[_RecordRun]:
    together: list[Record] = []
    for record in directory.payloads:
        large = record.nbytes >= _LARGE_NBYTES
        if together and (large or record.end - together[0].header > _RUN_NBYTES):
            yield _RecordRun(directory, together, file)
            together = []
        if large:
            yield _RecordRun(directory, [record], file)
        else:
            together.append(record)
    if together:
        yield _RecordRun(directory, together, file)
