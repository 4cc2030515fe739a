"""Reading an archive of torch.save: its directory, and its payloads ahead of their use, each verified.

Records lie one behind the other, so that the directory alone says where each payload is. A large payload is read with
the header before it, in whole pages past the page cache, into memory of its own that lies in the page as the payload
does in the file; small ones are read many at a time and copied. The header is compared with the directory, and the
payload's CRC-32 computed by a few threads, piece after piece as they arrive.
"""

from __future__ import annotations

import abc
import ctypes
import os
import struct
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

import tensorferry
from tensorferry import _core
from tensorferry.checkpoint.checksums import crc32, crc32_combine
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.pipeline import MAX_THREADS
from tensorferry.checkpoint.skeleton import MARK_NBYTES

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterator

# Where this process finds the files that it has open, whatever has happened to their names.
OWN_FILES = "/proc/self/fd/"

_PAGE_NBYTES = 4096
# Payloads from this size on get memory of their own and no copy.
_LARGE_NBYTES = 1 << 20
# Small ones are read together up to this.
_RUN_NBYTES = 4 << 20
# Payloads are read so far ahead of their use: what they take beyond the result where that is on another device.
_AHEAD_NBYTES = 256 << 20

# Where zipfile looks for the end of the directory.
_TAIL_NBYTES = 65557

# What zipfile raises where an archive is damaged.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
    EOFError,
    RuntimeError,
    ValueError,
    struct.error,
)

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_HAS_DESCRIPTOR = 0x8
_MAX_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Record:
    """A record of an archive, as its directory has it."""

    name: str
    header: int  # where its local header begins in the file
    begin: int  # and its data
    nbytes: int
    crc: int

    @property
    def short_name(self) -> str:
        """The name without that of the archive."""
        return self.name.partition("/")[2]

    @property
    def end(self) -> int:
        """Where its data ends."""
        return self.begin + self.nbytes


class Directory:
    """What an archive's directory says, and the small records, which are read and verified at once.

    Parameters
    ----------
    path : str
        What the file is called in messages.
    file : BinaryIO
        The archive, open as long as this is used.

    Raises
    ------
    CheckpointError
        It is none, or damaged.

    Attributes
    ----------
    payloads : list of Record
        The storages that are long enough for a mark, in the file's order.
    contents : list of (str, int, bytes)
        All other records: name, size and data.
    foreign : bool
        Whether only torch can make something of it: records are compressed, bytes are in another order, or it is
        TorchScript.
    own_path : str
        Where the file can be opened again, whatever has happened to its name.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path = path
        self.own_path = f"{OWN_FILES}{file.fileno()}"
        self.nbytes = os.fstat(file.fileno()).st_size
        self.payloads: list[Record] = []
        self.contents: list[tuple[str, int, bytes]] = []
        # zipfile takes a failing drive for a file that is no archive.
        os.pread(file.fileno(), _TAIL_NBYTES, max(0, self.nbytes - _TAIL_NBYTES))
        try:
            self._archive = zipfile.ZipFile(file)
        except _DAMAGE as error:
            raise CheckpointError(f"damaged or cut short: {error}", path) from error
        entries = sorted(self._archive.infolist(), key=lambda entry: entry.header_offset)
        end = self._archive.start_dir
        self.foreign = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if not self.foreign:
            ends = [entry.header_offset for entry in entries[1:]] + [end]
            self._sort([self._record(entry, end) for entry, end in zip(entries, ends, strict=True)])

    def check_all(self) -> None:
        """Verify all records, in whatever way they are written."""
        for entry in self._archive.infolist():
            if entry.CRC == 0:
                continue  # for none
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
        """Return the data of records, verified."""
        buffers = [bytearray(record.end - record.header) for record in records]
        tensorferry.read_many(
            [(self.own_path, buffer, r.header) for r, buffer in zip(records, buffers, strict=True)]
        )
        for record, buffer in zip(records, buffers, strict=True):
            view = memoryview(buffer)
            self.check_header(record, view)
            self.check_crc(record, crc32(view[record.begin - record.header :]))
        return [
            bytes(memoryview(buffer)[record.begin - record.header :])
            for record, buffer in zip(records, buffers, strict=True)
        ]

    def check_header(self, record: Record, header: memoryview) -> None:
        """Compare a record's local header, which begins in the view, with the directory."""
        fields = _LOCAL_HEADER.unpack_from(header)
        name_nbytes, extra_nbytes = fields[9:11]
        name = bytes(header[_LOCAL_HEADER.size : _LOCAL_HEADER.size + name_nbytes])
        begin = record.header + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if fields[0] != b"PK\3\4" or name != record.name.encode() or begin != record.begin:
            raise self.damaged(record, "its header is not what the directory says")

    def check_crc(self, record: Record, crc: int) -> None:
        """Compare a record's CRC-32 with the directory; 0 stands for none (torch's compute_crc32 off)."""
        if crc != record.crc != 0:
            raise self.damaged(record, f"its CRC-32 is {crc:08x} instead of {record.crc:08x}")

    def damaged(self, record: Record, problem: str) -> CheckpointError:
        """Return the exception for a record."""
        return CheckpointError(
            f"damaged: {problem}",
            self.path,
            names=(record.name,),
            begin=record.header,
            end=record.end,
        )

    def _record(self, entry: zipfile.ZipInfo, end: int) -> Record:
        """Find an entry's data, which ends, with its descriptor, where the next record begins."""
        descriptor_nbytes = 0
        if entry.flag_bits & _HAS_DESCRIPTOR and entry.file_size > 0:
            wide = max(entry.file_size, entry.header_offset) >= _MAX_32
            descriptor_nbytes = 24 if wide else 16
        begin = end - descriptor_nbytes - entry.file_size
        record = Record(entry.filename, entry.header_offset, begin, entry.file_size, entry.CRC)
        if begin < entry.header_offset + _LOCAL_HEADER.size + len(entry.filename.encode()):
            raise self.damaged(record, "there is no room for it before the next one")
        return record


class Payloads:
    """A context manager that gives the payloads of an archive as storages, and reads ahead in the file's order.

    Parameters
    ----------
    directory : Directory
        The archive's.
    """

    def __init__(self, directory: Directory) -> None:
        self._runs = list(_runs(directory))
        self._run_of = {
            record: (index, k)
            for index, run in enumerate(self._runs)
            for k, record in enumerate(run.records)
        }
        self._begun = 0  # of the runs
        self._taken = 0
        self._ahead_nbytes = 0
        self._file = tensorferry.open(directory.own_path)
        count = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(count, "tensorferry-load")

    def take(self, record: Record) -> Any:
        """Return a payload once it is read and verified. It can be taken once.

        Raises
        ------
        CheckpointError
            It is damaged.
        StorageError
            It could not be read.
        """
        index, k = self._run_of.pop(record)
        while self._taken <= index:
            self._ahead_nbytes -= self._runs[self._taken].nbytes
            self._taken += 1
        while self._begun <= index or (
            self._begun < len(self._runs) and self._ahead_nbytes < _AHEAD_NBYTES
        ):
            run = self._runs[self._begun]
            run.begin_reading(self._file, self._threads)
            self._ahead_nbytes += run.nbytes
            self._begun += 1
        return self._runs[index].take(k)

    def __enter__(self) -> Payloads:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for run in self._runs[: self._begun]:
            run.forget()
        self._file.close()


class _Run(abc.ABC):
    """Records next to each other that are read at once."""

    piece_nbytes: int  # what is read and checked by itself

    def __init__(self, directory: Directory, records: list[Record]) -> None:
        self.records = records
        self._directory = directory
        # Whole pages, so that nothing needs a copy on its way to memory that begins with a page.
        self._begin = records[0].header // _PAGE_NBYTES * _PAGE_NBYTES
        self._end = min(-(-records[-1].end // _PAGE_NBYTES) * _PAGE_NBYTES, directory.nbytes)
        self._view = memoryview(b"")
        self._reads: list[tensorferry.Future] = []
        self._checks: list[concurrent.futures.Future[Any]] = []

    @property
    def nbytes(self) -> int:
        """How much is read."""
        return self._end - self._begin

    def begin_reading(self, file: tensorferry.File, threads: ThreadPoolExecutor) -> None:
        """Have all pieces read, and checked by threads as they come."""
        memory, _ = _core.allocate(self.nbytes, False)
        self._view = memoryview(memory)
        for begin in range(self._begin, self._end, self.piece_nbytes):
            end = min(begin + self.piece_nbytes, self._end)
            read = file.read_into(self._part(begin, end), begin)
            self._reads.append(read)
            self._checks.append(threads.submit(self._arrive, read, begin, end))

    @abc.abstractmethod
    def take(self, index: int) -> Any:
        """Return the storage for a record when all of it is here."""

    def forget(self) -> None:
        """Wait for what is on its way; nobody will ask for what failed."""
        for read in self._reads:
            read.exception()

    def _arrive(self, read: tensorferry.Future, begin: int, end: int) -> Any:
        read.result()
        return self._check(begin, end)

    @abc.abstractmethod
    def _check(self, begin: int, end: int) -> Any:
        """Do what can be done with a piece that has been read, bytes of the file, and return it for take()."""

    def _part(self, begin: int, end: int) -> memoryview:
        """Return bytes of the file."""
        return self._view[begin - self._begin : end - self._begin]


class _LargeRun(_Run):
    """One record, whose payload stays where it was read to."""

    piece_nbytes = 4 << 20

    def take(self, index: int) -> Any:
        record = self.records[index]
        crc = 0
        for check in self._checks:
            crc = crc32_combine(crc, *check.result())
        self._directory.check_header(record, self._part(record.header, record.begin))
        self._directory.check_crc(record, crc)
        payload = self._part(record.begin, record.end)
        self._view = memoryview(b"")
        return torch.frombuffer(payload, dtype=torch.uint8).untyped_storage()

    def _check(self, begin: int, end: int) -> tuple[int, int]:
        """Return the CRC-32 of the payload's bytes in the piece, and how many they are."""
        record = self.records[0]
        begin, end = max(begin, record.begin), min(end, record.end)
        return (crc32(self._part(begin, end)), end - begin) if begin < end else (0, 0)


class _SmallRun(_Run):
    """Records that are read together, and copied."""

    piece_nbytes = _RUN_NBYTES + 2 * _PAGE_NBYTES  # all

    def take(self, index: int) -> Any:
        return self._checks[0].result()[index]

    def _check(self, begin: int, end: int) -> list[Any]:
        """Return storages of all records."""
        assert (begin, end) == (self._begin, self._end)
        new_storage: Any = torch.UntypedStorage
        storages = []
        for record in self.records:
            self._directory.check_header(record, self._part(record.header, record.begin))
            payload = self._part(record.begin, record.end)
            self._directory.check_crc(record, crc32(payload))
            storages.append(new_storage(record.nbytes))
            source = ctypes.addressof(ctypes.c_char.from_buffer(payload))
            ctypes.memmove(storages[-1].data_ptr(), source, record.nbytes)
        self._view = memoryview(b"")
        return storages


def _runs(directory: Directory) -> Iterator[_Run]:
    together: list[Record] = []
    for record in directory.payloads:
        large = record.nbytes >= _LARGE_NBYTES
        if together and (large or record.end - together[0].header > _RUN_NBYTES):
            yield _SmallRun(directory, together)
            together = []
        if large:
            yield _LargeRun(directory, [record])
        else:
            together.append(record)
    if together:
        yield _SmallRun(directory, together)
