"""A checkpoint's data files: locating the items of a load plan in them, and verifying their bytes.

An item is one slice of a stored tensor, or one object, that a load plan requests. A blob is the bytes that torch.save
writes for one tensor or object. The payload is the range of a blob that has the elements of the tensor. Files that
tensorferry wrote have a checksum for each chunk of the file (:mod:`tensorferry.checkpoint.storage.reading`); in other
files only the checksums inside each blob are available.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from tensorferry.base.ranges import is_inside
from tensorferry.checkpoint.errors import CheckpointError, RefusedCheckpointError
from tensorferry.checkpoint.garbage import collection_paused
from tensorferry.checkpoint.storage import destinations, safe_objects
from tensorferry.checkpoint.storage.metadata import (
    chunk_of,
    data_file,
    file_checksums,
    payload_of,
    read_metadata,
)
from tensorferry.checkpoint.storage.names import metadata_files
from tensorferry.checkpoint.storage.reading import DataFile, Reading, ReadRequest
from tensorferry.checkpoint.zipformat import blobs
from tensorferry.checkpoint.zipformat.unpickling import MalformedError, RefusedError
from tensorferry.errors import StorageError
from tensorferry.transfer.remote import as_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import BinaryIO

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import ReadItem


@dataclass(slots=True)
class Item:
    """An item of a load plan with its location.

    Attributes
    ----------
    request : ReadItem
        The item.
    info : _StorageInfo
        The location of the blob that has the item.
    payload : Payload or None
        The location of the tensor's elements in the file; None where the whole blob is read.
    """

    request: ReadItem
    info: _StorageInfo
    payload: blobs.Payload | None = None

    @property
    def begin(self) -> int:
        """The first byte of the file that the item needs."""
        begin: int = self.info.offset if self.payload is None else self.payload.begin
        return begin

    @property
    def nbytes(self) -> int:
        """The number of bytes that are read into the destination."""
        if self.payload is None:
            return int(self.info.length)
        return math.prod(self.request.lengths) * self.payload.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of the stored tensor that the item is a slice of."""
        assert self.payload is not None
        return self.payload.sizes

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the delivered elements, if it is known."""
        return None if self.payload is None else self.payload.dtype

    def slice_requests(
        self,
        whole: destinations.ItemCompletion,
        target: torch.Tensor,
        gap_nbytes: int,
        pool: destinations.BufferPool,
    ) -> Iterator[ReadRequest]:
        """Return the requests that read the item into a plain tensor."""
        assert self.payload is not None
        offsets, lengths = self.request.storage_offsets, self.request.lengths
        return destinations.slice_requests(
            whole, self.payload, offsets, lengths, target, gap_nbytes, pool
        )


class ItemLocator:
    """Locates the items of load plans in data files. A subclass defines how to locate one item and to open a file."""

    def open(self, name: str) -> DataFile:
        """Open a data file."""
        raise NotImplementedError

    def item(self, request: ReadItem) -> Item:
        """Return an item of a plan with its location."""
        raise NotImplementedError

    def locate(self, requests: Sequence[ReadItem]) -> dict[str, list[Item]]:
        """Return the items of each data file, in the order of their offsets."""
        by_file: dict[str, list[Item]] = {}
        with collection_paused():
            for request in requests:
                item = self.item(request)
                by_file.setdefault(item.info.relative_path, []).append(item)
        self._parse(by_file)
        for items in by_file.values():
            items.sort(key=operator.attrgetter("begin"))
        return by_file

    def read(
        self,
        reading: Reading,
        by_file: dict[str, list[Item]],
        begin: Callable[[Item, DataFile], Iterator[ReadRequest]],
    ) -> None:
        """Read items; ``begin`` returns an item's requests, and is called shortly before they are read."""
        for name, items in by_file.items():
            file = self.open(name)
            reading.begin_file(file)
            for item in items:
                file.check_end(item.info.offset + item.info.length)
                _check_slice(item, file)
            for item in items:
                reading.advance(item.begin)
                reading.add(begin(item, file))
        reading.finish()

    def _parse(self, by_file: dict[str, list[Item]]) -> None:
        """Set the payloads of items that :meth:`item` has returned without a payload; by default, do nothing."""


class Contents(ItemLocator):
    """The data files of a checkpoint, as its metadata describes them.

    Parameters
    ----------
    folder : PathLike
        The checkpoint's folder.
    metadata : Metadata
        Metadata that :func:`tensorferry.checkpoint.storage.metadata.check_metadata` has checked.
    verify : bool
        Whether to verify what is read.
    trusted : bool
        Whether data files may be links out of the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        metadata: Metadata,
        *,
        verify: bool = True,
        trusted: bool = False,
    ) -> None:
        self._folder = folder
        self._metadata = metadata
        self._verify = verify
        self._trusted = trusted
        self._checksums = file_checksums(metadata)

    def open(
        self,
        name: str,
        *,
        damaged: Callable[[CheckpointError], None] | None = None,
    ) -> DataFile:
        """Open a data file; ``damaged`` is as for :class:`DataFile`."""
        path = data_file(self._folder, name, trusted=self._trusted)
        checksums = self._checksums.get(name)
        try:
            return DataFile(
                path, name, checksums, self.names_at, verify=self._verify, damaged=damaged
            )
        except StorageError as error:
            if error.errno == errno.ENOENT:
                if not as_path(self._folder).exists():
                    why = "the checkpoint has been removed since its metadata was read"
                    error.strerror = f"{error.strerror}; {why}"
                elif self._current_file_names is not None and name not in self._current_file_names:
                    why = "another save has replaced the checkpoint since its metadata was read: load again"
                    error.strerror = f"{error.strerror}; {why}"
            raise

    @functools.cached_property
    def _current_file_names(self) -> set[str] | None:
        """The files that the folder's metadata names now, read once; None if no metadata can be read."""
        named: set[str] | None = None
        # Another process may be removing the folder now. Then there is nothing to return, and the caller raises its
        # original error.
        with contextlib.suppress(OSError):
            for path in metadata_files(self._folder):
                with contextlib.suppress(OSError, CheckpointError):
                    metadata = read_metadata(path, trust_pickle=self._trusted)
                    named = named or set()
                    named |= {info.relative_path for info in metadata.storage_data.values()}
        return named

    def has_checksums(self, name: str) -> bool:
        """Return whether parts of a data file can be verified separately."""
        return name in self._checksums

    def names_at(self, name: str, begin: int, end: int) -> tuple[str, ...]:
        """Return the names of the entries in a range of a file."""
        places = sorted(
            (info.offset, index.fqn)
            for index, info in self._metadata.storage_data.items()
            if info.relative_path == name
            and info.offset < end
            and begin < info.offset + info.length
        )
        return tuple(dict.fromkeys(fqn for _, fqn in places))

    def item(self, request: ReadItem) -> Item:
        """Return an item with the location that the metadata gives."""
        info = self._info(request.storage_index)
        if transforms := getattr(info, "transform_descriptors", None):
            raise RefusedCheckpointError(
                f"it was saved through extensions {list(transforms)}, which only torch's own reader "
                "supports",
                os.fspath(self._folder),
                names=(request.storage_index.fqn,),
            )
        payload = self._payload(request, info) if _is_tensor(request) else None
        return Item(request, info, payload)

    def verify_file(
        self,
        name: str,
        damaged: Callable[[CheckpointError], None] | None = None,
        count: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Verify a data file that has checksums, including the bytes between blobs, and return its size.

        ``damaged`` is as for :meth:`open`, and ``count`` is called with the number of bytes that have been read.
        """
        file = self.open(name, damaged=damaged)
        everything = destinations.Memory(destinations.ItemCompletion(file.nbytes, count=count))
        with Reading() as reading:
            reading.begin_file(file)
            if file.nbytes:
                reading.add(iter([ReadRequest(0, file.nbytes, everything)]))
            reading.finish()
        return file.nbytes

    def verify(self, requests: Sequence[ReadItem]) -> None:
        """Read the bytes that a plan needs, and verify them.

        Raises
        ------
        CheckpointError
            The bytes are damaged.
        """
        with Reading() as reading:
            self.read(reading, self.locate(requests), self._verification_requests)

    def check_payload(self, item: Item, file: DataFile, crc: int) -> None:
        """Compare the CRC-32 of an item's payload with the stored one."""
        payload = item.payload
        assert payload is not None
        if crc != payload.crc:
            raise CheckpointError(
                f"the bytes are not those that were written (CRC-32 {crc:08x} instead of {payload.crc:08x})",
                file.path,
                names=(item.request.storage_index.fqn,),
                begin=payload.begin,
                end=payload.begin + payload.nbytes,
            )

    def check_blob(self, item: Item, file: DataFile, data: BinaryIO) -> None:
        """Verify a blob by the checksums inside it, if the metadata has none for its file."""
        if not self._verify or self.has_checksums(file.name):
            return
        problem = blobs.examine(data).problem
        if problem is not None:
            raise self._damage(problem, item, file)

    def sanitize_blob(self, index: MetadataIndex, data: BinaryIO) -> BinaryIO:
        """Return a new blob of the same object, which a planner may unpickle.

        torch's planners would run any code that the original blob contains. A trusted blob is returned unchanged.
        """
        if self._trusted:
            return data
        info = self._info(index)
        # After verification the bytes are known to be undamaged, so an object that cannot be read is refused, not
        # damaged.
        kind = RefusedCheckpointError if self._verify else CheckpointError
        try:
            return io.BytesIO(safe_objects.sanitize_pickle(data.read()))
        except RefusedError as error:
            kind, reason = RefusedCheckpointError, safe_objects.refusal_message(error)
        except MalformedError as error:
            reason = f"it is not a torch.save object that can be read without trust ({error})"
        path = data_file(self._folder, info.relative_path, trusted=self._trusted)
        end = info.offset + info.length
        raise kind(reason, path, names=(index.fqn,), begin=info.offset, end=end)

    def contradiction(
        self, index: MetadataIndex, info: _StorageInfo, read: Callable[[int, int], bytes]
    ) -> str | None:
        """Return how an undamaged blob contradicts the metadata, which would make torch's reader fail, or None.

        ``read`` returns the bytes (begin, end) of the blob.
        """
        chunk = chunk_of(self._metadata, index)
        ends = [read(begin, end) for begin, end in _head_and_tail(0, info.length)]
        payload = blobs.parse(ends[0], ends[-1], info.length)
        if chunk is None or payload is None or tuple(chunk.sizes) == payload.sizes:
            return None
        return f"it has the size {list(payload.sizes)}, but the metadata says {list(chunk.sizes)}"

    def check_tensor_blob(self, item: Item, file: DataFile, data: BinaryIO) -> None:
        """Refuse TorchScript programs, which torch.load would read in another way."""
        try:
            reader = torch._C.PyTorchFileReader(data)
            if "constants.pkl" in reader.get_all_records():
                raise MalformedError("a TorchScript program")
        except (RuntimeError, MalformedError) as error:
            raise self._damage(
                f"the file has no tensor of torch.save at this position ({error})", item, file
            ) from None
        data.seek(0)

    def _damage(self, reason: str, item: Item, file: DataFile) -> CheckpointError:
        return CheckpointError(
            reason,
            file.path,
            names=(item.request.storage_index.fqn,),
            begin=item.info.offset,
            end=item.info.offset + item.info.length,
        )

    def has_only_payload_crc(self, item: Item, file: DataFile) -> bool:
        """Return whether the only checksum of an item is that of its whole payload."""
        return (
            self._verify
            and not self.has_checksums(file.name)
            and item.payload is not None
            and item.payload.crc is not None
        )

    def _info(self, index: MetadataIndex) -> _StorageInfo:
        info: _StorageInfo | None = self._metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(
                "the checkpoint is incomplete: the metadata lists this tensor or object, but does not say in which "
                "file it is",
                os.fspath(self._folder),
                names=(index.fqn,),
            )
        return info

    def _payload(self, request: ReadItem, info: _StorageInfo) -> blobs.Payload | None:
        """Return the location of the elements, if the metadata has it."""
        place = payload_of(info)
        chunk = chunk_of(self._metadata, request.storage_index)
        if place is None or chunk is None:
            return None
        entry = self._metadata.state_dict_metadata[request.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        dtype, sizes = entry.properties.dtype, tuple(chunk.sizes)
        if place[1] != math.prod(sizes) * dtype.itemsize:
            return None
        return blobs.Payload(
            info.offset + place[0], place[1], dtype, sizes, tuple(range(len(sizes)))
        )

    def _parse(self, by_file: dict[str, list[Item]]) -> None:
        """Set the payloads that the metadata does not give, by reading the beginning and end of the tensors' blobs."""
        unknown: dict[str, dict[tuple[int, int], list[Item]]] = {}  # by location of the blob
        for name, items in by_file.items():
            for item in items:
                if item.payload is None and _is_tensor(item.request):
                    place = item.info.offset, item.info.length
                    unknown.setdefault(name, {}).setdefault(place, []).append(item)
        if not unknown:
            return
        with Reading() as reading:
            for name, blobs_of_file in unknown.items():
                file = self.open(name)
                reading.begin_file(file)
                for (offset, length), items in sorted(blobs_of_file.items()):
                    file.check_end(offset + length)
                    reading.advance(offset)
                    reading.add(_parse_requests(items, _head_and_tail(offset, length)))
            reading.finish()

    def _verification_requests(self, item: Item, file: DataFile) -> Iterator[ReadRequest]:
        """Return the requests that verify an item."""
        payload, request = item.payload, item.request
        begin, end = item.info.offset, item.info.offset + item.info.length
        if self.has_checksums(file.name):
            if payload is None:
                nowhere = destinations.Memory(destinations.ItemCompletion(0))
                return iter([ReadRequest(begin, end, nowhere)])
            return destinations.verification_requests(
                payload, request.storage_offsets, request.lengths, file.gap_nbytes
            )
        if self.has_only_payload_crc(item, file):
            assert payload is not None
            whole = destinations.ItemCompletion(
                payload.nbytes,
                lambda: self.check_payload(item, file, whole.crc),
                needs_crc=True,
            )
            request_all = ReadRequest(
                payload.begin, payload.begin + payload.nbytes, destinations.Memory(whole)
            )
            return whole.begin(iter([request_all] if payload.nbytes else []))
        data = bytearray(item.info.length)
        return destinations.range_requests(
            [(begin, end, data)], lambda: self.check_blob(item, file, io.BytesIO(data))
        )


def _is_tensor(request: ReadItem) -> bool:
    return request.type != LoadItemType.BYTE_IO


def _check_slice(item: Item, file: DataFile) -> None:
    """Check that the plan requests a slice inside the stored tensor."""
    request = item.request
    if item.payload is None or is_inside(item.sizes, request.storage_offsets, request.lengths):
        return
    raise CheckpointError(
        f"the requested slice, of size {list(request.lengths)} at offsets {list(request.storage_offsets)}, is not "
        f"inside the stored tensor of size {list(item.sizes)}",
        file.path,
        names=(request.storage_index.fqn,),
    )


def _head_and_tail(offset: int, length: int) -> list[tuple[int, int]]:
    """Return the ranges of a blob's head and tail in the file, or one range if they meet."""
    if length <= blobs.HEAD_NBYTES + blobs.TAIL_NBYTES:
        return [(offset, offset + length)]
    end = offset + length
    return [(offset, offset + blobs.HEAD_NBYTES), (end - blobs.TAIL_NBYTES, end)]


def _parse_requests(items: list[Item], ends: list[tuple[int, int]]) -> Iterator[ReadRequest]:
    """Return the requests that read a blob's head and tail, and then set the payload of its items."""
    info = items[0].info
    parts = [(begin, end, bytearray(end - begin)) for begin, end in ends]

    def parse() -> None:
        head, tail = bytes(parts[0][2]), bytes(parts[-1][2])
        payload = blobs.parse(head, tail, info.length)
        if payload is not None:
            payload = payload._replace(begin=info.offset + payload.begin)
            for item in items:
                item.payload = payload

    return destinations.range_requests(parts, parse)
