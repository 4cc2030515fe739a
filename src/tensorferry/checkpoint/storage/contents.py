"""A checkpoint's data files: where the items of a load plan lie in them, and whether they are what was written."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from tensorferry.base.ranges import is_inside
from tensorferry.checkpoint.errors import CheckpointError, RefusedCheckpointError
from tensorferry.checkpoint.garbage import uncollected
from tensorferry.checkpoint.storage import delivery, plain_objects
from tensorferry.checkpoint.storage.metadata import (
    chunk_of,
    data_file,
    file_checksums,
    payload_of,
    read_metadata,
)
from tensorferry.checkpoint.storage.names import METADATA_NAME, RANK_METADATA
from tensorferry.checkpoint.storage.reading import DataFile, Reading, Want
from tensorferry.checkpoint.zipformat import blobs
from tensorferry.checkpoint.zipformat.pickles import MalformedError, RefusedError, screen
from tensorferry.errors import StorageError
from tensorferry.transfer.remote import place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import BinaryIO

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import ReadItem


@dataclass(slots=True)
class Item:
    """An item of a load plan, and where it lies.

    Attributes
    ----------
    request : ReadItem
        The item.
    info : _StorageInfo
        The place of its blob.
    payload : Payload or None
        The place of its elements in the file; None where the blob is read whole.
    """

    request: ReadItem
    info: _StorageInfo
    payload: blobs.Payload | None = None

    @property
    def begin(self) -> int:
        """Before this place in the file it needs nothing."""
        begin: int = self.info.offset if self.payload is None else self.payload.begin
        return begin

    @property
    def nbytes(self) -> int:
        """How many bytes are asked for."""
        if self.payload is None:
            return int(self.info.length)
        return math.prod(self.request.lengths) * self.payload.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of what it is a slice of."""
        assert self.payload is not None
        return self.payload.sizes

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the elements that are delivered, if that is known."""
        return None if self.payload is None else self.payload.dtype

    def deliver(
        self,
        whole: delivery.Delivery,
        target: torch.Tensor,
        gap_nbytes: int,
        boxes: delivery.Boxes,
    ) -> Iterator[Want]:
        """Return what puts it into a plain tensor."""
        assert self.payload is not None
        offsets, lengths = self.request.storage_offsets, self.request.lengths
        return delivery.deliver(whole, self.payload, offsets, lengths, target, gap_nbytes, boxes)

    @property
    def is_whole(self) -> bool:
        """Whether all elements of the payload are asked for."""
        return self.payload is not None and tuple(self.request.lengths) == self.payload.sizes


class StoredItem(NamedTuple):
    """A tensor in a data file, or the part of it that a rank has saved.

    Attributes
    ----------
    place : tuple
        The data file's name, and where in it: sorts as the files are read.
    dtype : dtype
        Of its elements.
    """

    place: tuple[str, int]
    dtype: torch.dtype


class Located:
    """Data files, and where in them lies what plans ask for. A subclass says where one item lies, and opens files."""

    def open(self, name: str) -> DataFile:
        """Open a data file."""
        raise NotImplementedError

    def item(self, request: ReadItem) -> Item:
        """Return where what is asked for lies."""
        raise NotImplementedError

    def stored(self, request: ReadItem) -> StoredItem | None:
        """Return what an item asks for, if it is known to be a plain tensor, or a part of one, before anything is read.

        Metadata of torch's own checkpoints do not say it: subclasses, which quantize for example, have the same there.
        """
        item = self.item(request)
        if item.payload is None:
            return None
        return StoredItem((item.info.relative_path, item.info.offset), item.payload.dtype)

    def locate(self, requests: Sequence[ReadItem]) -> dict[str, list[Item]]:
        """Return the items of each data file, in the order in which they lie there."""
        by_file: dict[str, list[Item]] = {}
        with uncollected():
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
        begin: Callable[[Item, DataFile], Iterator[Want]],
    ) -> None:
        """Read items; of each, ``begin`` is asked what it wants of the file shortly before that is read."""
        for name, items in by_file.items():
            file = self.open(name)
            reading.begin_file(file)
            for item in items:
                file.require(item.info.offset + item.info.length)
                _check_slice(item, file)
            for item in items:
                reading.advance(item.begin)
                reading.add(begin(item, file))
        reading.finish()

    def _parse(self, by_file: dict[str, list[Item]]) -> None:
        """Find the payloads of items that have none yet."""


class Contents(Located):
    """What the metadata says of data files.

    Parameters
    ----------
    folder : PathLike
        The checkpoint's.
    metadata : Metadata
        Checked by :func:`tensorferry.checkpoint.storage.metadata.check_metadata`.
    verify : bool
        Whether what is read is verified.
    trusted : bool
        Whether data files may lie elsewhere.
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
        """Open a data file."""
        path = data_file(self._folder, name, trusted=self._trusted)
        checksums = self._checksums.get(name)
        try:
            return DataFile(
                path, name, checksums, self.names_at, verify=self._verify, damaged=damaged
            )
        except StorageError as error:
            if error.errno == errno.ENOENT:
                if not place(self._folder).exists():
                    why = "the checkpoint has been removed since its metadata was read"
                    error.strerror = f"{error.strerror}; {why}"
                elif self._named_now is not None and name not in self._named_now:
                    why = "another save has replaced the checkpoint since its metadata was read: load again"
                    error.strerror = f"{error.strerror}; {why}"
            raise

    @functools.cached_property
    def _named_now(self) -> set[str] | None:
        """The files that present metadata names, looked up once; None where there is none that can be read."""
        named: set[str] | None = None
        try:
            paths = [*place(self._folder).iterdir()]
        except OSError:  # it goes as well; what failed before is what matters
            return None
        for path in paths:
            if path.name == METADATA_NAME or RANK_METADATA.fullmatch(path.name):
                with contextlib.suppress(OSError, CheckpointError):
                    metadata = read_metadata(path, trust_pickle=self._trusted)
                    named = named or set()
                    named |= {info.relative_path for info in metadata.storage_data.values()}
        return named

    def has_checksums(self, name: str) -> bool:
        """Return whether parts of a data file can be verified by themselves."""
        return name in self._checksums

    def names_at(self, name: str, begin: int, end: int) -> tuple[str, ...]:
        """Return the names of what lies in a range of a file."""
        places = sorted(
            (info.offset, index.fqn)
            for index, info in self._metadata.storage_data.items()
            if info.relative_path == name
            and info.offset < end
            and begin < info.offset + info.length
        )
        return tuple(dict.fromkeys(fqn for _, fqn in places))

    def item(self, request: ReadItem) -> Item:
        """Return where what is asked for lies, as far as the metadata says it."""
        info = self._info(request.storage_index)
        payload = self._payload(request, info) if _is_tensor(request) else None
        return Item(request, info, payload)

    def transformed(self, requests: Sequence[ReadItem]) -> list[ReadItem]:
        """Return those items that went through extensions, which torch has to undo."""
        found = []
        for request in requests:
            info = self._info(request.storage_index)
            if getattr(info, "transform_descriptors", None):
                data_file(self._folder, info.relative_path, trusted=self._trusted)
                found.append(request)
        return found

    def nbytes_of(self, requests: Sequence[ReadItem]) -> int:
        """Return how many bytes items take in data files."""
        return sum(self._info(request.storage_index).length for request in requests)

    def verify(self, requests: Sequence[ReadItem]) -> None:
        """Read what a plan needs, and verify it.

        Raises
        ------
        CheckpointError
            Something is damaged.
        """
        with Reading() as reading:
            self.read(reading, self.locate(requests), self._checks)

    def check_payload(self, item: Item, file: DataFile, crc: int) -> None:
        """Compare the CRC-32 of an item's payload with the one it had when it was written."""
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
        """Verify a blob by the checksums that are in it, where there are no others."""
        if not self._verify or self.has_checksums(file.name):
            return
        problem = blobs.examine(data).problem
        if problem is not None:
            raise self._damage(problem, item, file)

    def harmless(self, index: MetadataIndex, data: BinaryIO) -> BinaryIO:
        """Return a blob that a planner may unpickle: what torch's planners do with it runs any code that is in it."""
        if self._trusted:
            return data
        info = self._info(index)
        # Bytes that have been verified are not damaged, whatever is in them.
        kind = RefusedCheckpointError if self._verify else CheckpointError
        try:
            return io.BytesIO(plain_objects.harmless(data.read()))
        except RefusedError as error:
            kind, reason = RefusedCheckpointError, plain_objects.refused(error)
        except MalformedError as error:
            reason = f"it is not an object of torch.save's that can be read without trust ({error})"
        path = data_file(self._folder, info.relative_path, trusted=self._trusted)
        end = info.offset + info.length
        raise kind(reason, path, names=(index.fqn,), begin=info.offset, end=end)

    def contradiction(
        self, index: MetadataIndex, info: _StorageInfo, read: Callable[[int, int], bytes]
    ) -> str | None:
        """Return what a sound blob has that the metadata says otherwise, and torch's reader would stumble over."""
        chunk = chunk_of(self._metadata, index)
        ends = [read(begin, end) for begin, end in _ends(0, info.length)]
        payload = blobs.parse(ends[0], ends[-1], info.length)
        if chunk is None or payload is None or tuple(chunk.sizes) == payload.sizes:
            return None
        return f"it has the size {list(payload.sizes)} and not {list(chunk.sizes)}, as the metadata says"

    def check_tensor_blob(self, item: Item, file: DataFile, data: BinaryIO) -> None:
        """Refuse what would crash torch.load(weights_only=True), or what it may run, as before torch 2.6."""
        try:
            reader = torch._C.PyTorchFileReader(data)
            if "constants.pkl" in reader.get_all_records():
                raise MalformedError("a program of TorchScript's")
            screen(reader.get_record("data.pkl"))
        except (RuntimeError, MalformedError) as error:
            raise self._damage(f"it is no tensor of torch.save's ({error})", item, file) from None
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
        """Return whether an item can be verified, but only by reading its payload whole."""
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
                "the checkpoint is incomplete: it describes this, but does not say where it lies",
                os.fspath(self._folder),
                names=(index.fqn,),
            )
        return info

    def _payload(self, request: ReadItem, info: _StorageInfo) -> blobs.Payload | None:
        """Return where the metadata says that elements lie."""
        place = payload_of(info)
        chunk = chunk_of(self._metadata, request.storage_index)
        if place is None or chunk is None or getattr(info, "transform_descriptors", None):
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
        """Find the payloads of those tensors of which the metadata does not say where they are."""
        unknown: dict[str, dict[tuple[int, int], list[Item]]] = {}  # by place of the blob
        for name, items in by_file.items():
            for item in items:
                transformed = getattr(item.info, "transform_descriptors", None)
                if item.payload is None and _is_tensor(item.request) and not transformed:
                    place = item.info.offset, item.info.length
                    unknown.setdefault(name, {}).setdefault(place, []).append(item)
        if not unknown:
            return
        with Reading() as reading:
            for name, blobs_of_file in unknown.items():
                file = self.open(name)
                reading.begin_file(file)
                for (offset, length), items in sorted(blobs_of_file.items()):
                    file.require(offset + length)
                    reading.advance(offset)
                    reading.add(_parsing(items, _ends(offset, length)))
            reading.finish()

    def _checks(self, item: Item, file: DataFile) -> Iterator[Want]:
        """Return what verifies an item."""
        payload, request = item.payload, item.request
        begin, end = item.info.offset, item.info.offset + item.info.length
        if payload is not None and self.has_checksums(file.name):
            return delivery.verification(
                payload, request.storage_offsets, request.lengths, file.gap_nbytes
            )
        if self.has_checksums(file.name):
            return iter([Want(begin, end, delivery.Memory(delivery.Delivery(0)))])
        if self.has_only_payload_crc(item, file):
            assert payload is not None
            whole = delivery.Delivery(
                payload.nbytes,
                lambda: self.check_payload(item, file, whole.crc),
                takes_crc=True,
            )
            end = payload.begin + payload.nbytes
            wants = [Want(payload.begin, end, delivery.Memory(whole))] if payload.nbytes else []
            return whole.begin(iter(wants))
        data = bytearray(item.info.length)
        return delivery.collected(
            [(begin, end, data)], lambda: self.check_blob(item, file, io.BytesIO(data))
        )


def _is_tensor(request: ReadItem) -> bool:
    return request.type != LoadItemType.BYTE_IO


def _check_slice(item: Item, file: DataFile) -> None:
    """Check that the plan asks for something that is there."""
    request = item.request
    if item.payload is None or is_inside(item.sizes, request.storage_offsets, request.lengths):
        return
    raise CheckpointError(
        f"it has the size {list(item.sizes)}, in which there are no {list(request.lengths)} at "
        f"{list(request.storage_offsets)}",
        file.path,
        names=(request.storage_index.fqn,),
    )


def _ends(offset: int, length: int) -> list[tuple[int, int]]:
    """Return the two ranges of a file where a blob's head and tail lie, or the one that is both."""
    if length <= blobs.HEAD_NBYTES + blobs.TAIL_NBYTES:
        return [(offset, offset + length)]
    end = offset + length
    return [(offset, offset + blobs.HEAD_NBYTES), (end - blobs.TAIL_NBYTES, end)]


def _parsing(items: list[Item], ends: list[tuple[int, int]]) -> Iterator[Want]:
    """Return what reads the ends of a blob, and sets the payload of the items that it has."""
    info = items[0].info
    parts = [(begin, end, bytearray(end - begin)) for begin, end in ends]

    def parse() -> None:
        head, tail = bytes(parts[0][2]), bytes(parts[-1][2])
        payload = blobs.parse(head, tail, info.length)
        if payload is not None:
            payload = payload._replace(begin=info.offset + payload.begin)
            for item in items:
                item.payload = payload

    return delivery.collected(parts, parse)
