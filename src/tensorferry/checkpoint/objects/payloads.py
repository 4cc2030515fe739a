"""Reading an archive of torch.save: its directory, and its payloads, which are read ahead and verified.

An archive is a zip file of records, and its payloads are the records with the bytes of storages. Records are
consecutive, so the directory alone gives the location of each payload. Each payload is read into separate memory with
direct I/O: a large one by one transfer of the core, small ones many at a time. Local headers are compared with the
directory, and so are the CRC-32s that the core computes during the transfer.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

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
    from collections.abc import Iterator

_PAGE_NBYTES = 4096
# Payloads of at least this size are read by a separate transfer, and need no copy.
_LARGE_NBYTES = 1 << 20
# Small payloads are read together, up to this size.
_RUN_NBYTES = 4 << 20

_TORCHS_RECORDS = ("data", "byteorder", "version", ".format_version", ".storage_alignment")

# Exceptions that zipfile raises for a damaged archive.
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(NotImplementedError, EOFError, RuntimeError, ValueError),
)


@dataclass(frozen=True)
class Record:
    """A record of an archive, as described by the directory."""

    name: str
    header: int  # the offset of its local header in the file
    begin: int  # the offset of its data
    nbytes: int
    crc: int

    @property
    def short_name(self) -> str:
        """The name without the prefix with the archive's name."""
        return self.name.partition("/")[2]

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
        _, self.nbytes = python_files.reader_and_size(file)
        self.payloads: list[Record] = []
        self.contents: list[tuple[str, int, bytes]] = []
        handled = sys.exc_info()[1]
        try:
            self._archive = zipfile.ZipFile(file)
        except _DAMAGE as error:
            # zipfile reports an error of the drive as "not a zip file".
            if isinstance(error.__context__, OSError) and error.__context__ is not handled:
                raise error.__context__ from None
            raise CheckpointError(f"damaged or cut short: {error}", path) from error
        entries = sorted(self._archive.infolist(), key=lambda entry: entry.header_offset)
        end = self._archive.start_dir
        self.foreign = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        for short in (entry.filename.partition("/")[2] for entry in entries):
            # torch looks up records without regard to case, and could use this record in place of the one that it
            # wrote, which is the one that is verified here.
            if short != short.lower() and short.lower().startswith(_TORCHS_RECORDS):
                raise CheckpointError(
                    f"damaged: the record {short!r} differs from one of torch's by its case only",
                    path,
                )
        if not self.foreign:
            ends = [entry.header_offset for entry in entries[1:]] + [end]
            self._sort([self._record(entry, end) for entry, end in zip(entries, ends, strict=True)])

    def reopen(self) -> tensorferry.File:
        """Open the archive again, even if it has been renamed or removed."""
        return python_files.reopen(self._file)

    def check_all(self) -> None:
        """Verify all records, however they are stored."""
        for entry in self._archive.infolist():
            if entry.CRC == 0:
                continue  # there is no checksum
            try:
                with self._archive.open(entry) as data:
                    while data.read(_RUN_NBYTES):
                        pass
            except _DAMAGE as error:
                names = (entry.filename,)
                raise CheckpointError(f"damaged: {error}", self.path, names=names) from error

    def _sort(self, records: list[Record]) -> None:
        small: list[Record] = []
        for record in records:
            is_payload = record.short_name.startswith("data/")
            (self.payloads if is_payload and record.nbytes >= MARK_NBYTES else small).append(record)
        for record, data in zip(small, self._read(small), strict=True):
            self.contents.append((record.name, record.nbytes, data))
            self.foreign |= record.short_name == "constants.pkl"
            self.foreign |= record.short_name == "byteorder" and data != sys.byteorder.encode()

    def _read(self, records: list[Record]) -> list[bytes]:
        """Read and verify records, and return their data."""
        buffers = [bytearray(record.end - record.header) for record in records]
        if not records:
            return []
        at = records[0].header
        segments: list[Any] = []
        for record, buffer in zip(records, buffers, strict=True):
            segments += [record.header - at, buffer]
            at = record.end
        with self.reopen() as file:
            file.read(segments, records[0].header)
        contents = []
        for record, buffer in zip(records, buffers, strict=True):
            self.check_header(record, memoryview(buffer))
            contents.append(bytes(memoryview(buffer)[record.begin - record.header :]))
            self.check_crc(record, crc32(contents[-1]))
        return contents

    def check_header(self, record: Record, header: memoryview) -> None:
        """Compare a record's local header, at the beginning of the view, with the directory."""
        with contextlib.suppress(zips.UnknownArchiveError):
            name, nbytes, _ = zips.local_header(header)
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

    def _record(self, entry: zipfile.ZipInfo, end: int) -> Record:
        """Locate an entry's data: they end, together with the descriptor, where the next record begins."""
        descriptor_nbytes = 0
        if entry.flag_bits & zips.HAS_DESCRIPTOR and entry.file_size > 0:
            wide = max(entry.file_size, entry.header_offset) >= zips.MAX_32
            descriptor_nbytes = 24 if wide else 16
        begin = end - descriptor_nbytes - entry.file_size
        record = Record(entry.filename, entry.header_offset, begin, entry.file_size, entry.CRC)
        if entry.header_offset < 0:  # zipfile does not check the offsets in the directory
            raise self.damage_error(record, "the zip directory gives a negative offset for it")
        if begin < entry.header_offset + zips.LOCAL_HEADER.size + len(entry.filename.encode()):
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
        self._run_of = {record: (run, k) for run in runs for k, record in enumerate(run.records)}
        # If torch copies payloads to another device, those that are read ahead need memory in addition to the result.
        # The limit counts payloads that have been read, or are being read, and that torch has not taken yet.
        self._pipeline = Pipeline(runs, memory_nbytes=read_ahead_nbytes())
        self._pipeline.files[directory] = file

    def take(self, record: Record) -> Any:
        """Return a payload when it has been read and verified. Each payload can be taken once.

        Raises
        ------
        CheckpointError
            The payload is damaged.
        StorageError
            The payload could not be read.
        """
        run, k = self._run_of.pop(record)
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
