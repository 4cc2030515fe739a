"""Loading: torch's FileSystemReader, at the drive's speed, and verified.

All that a load needs of the files is asked for in one sweep over them, in the order in which it lies there. Planners
are asked for destinations only shortly before their bytes come, and told when they are there, by the thread that loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tensorferry.checkpoint import delivery
from tensorferry.checkpoint.contents import Contents, Item
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.metadata import check_metadata, metadata_path, read_metadata
from tensorferry.checkpoint.pipeline import READING_BUFFER_COUNT, Pipeline
from tensorferry.checkpoint.sweep import Queue, Sweep, cuts

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from tensorferry.checkpoint.blobs import Payload
    from tensorferry.checkpoint.sweep import DataFile, Wanted

Verify = Literal["read", "before", "off"]
_LEVELS = ("read", "before", "off")


class FileSystemReader(filesystem.FileSystemReader):
    """Reads checkpoints of :class:`FileSystemWriter` and of torch's, for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path : str or PathLike
        The checkpoint's folder.
    _extension_registry : optional
        As torch's (from 2.7 on). What went through extensions is read by torch's own code.
    thread_count : int, optional
        As versions of torch to come have it. Without effect: speed does not depend on it.
    verify : "read", "before" or "off"
        "read": all that is read is verified on its way, and nothing that is damaged gets into a tensor; but tensors
        loaded before the damage is met keep what they got. "before": all ranks verify what they need before any of
        them changes its first tensor, which reads it twice. "off": no checksums are computed.
    trust_pickle : bool
        Let `.metadata` and what is no tensor be any object (which may run any code when it is read), and data files be
        links that lead out of the folder. Else objects are plain values: numbers, text, bytes, None, containers of the
        standard library, times, NumPy's arrays and scalars, tensors; anything else is refused, by name.

    Attributes
    ----------
    nbytes_read : int
        Bytes that the last load has read from data files.

    Notes
    -----
    Checkpoints that torch wrote have a checksum for each tensor, but none for parts of it. Of those, "read" verifies
    tensors that are read whole, after their bytes have been copied; "before" verifies all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        thread_count: int | None = None,  # noqa: ARG002 (what torch takes)
        *,
        verify: Verify = "read",
        trust_pickle: bool = False,
    ) -> None:
        if verify not in _LEVELS:
            raise ValueError(f"verify: {verify!r} is none of {', '.join(_LEVELS)}")
        super().__init__(path, *(() if _extension_registry is None else (_extension_registry,)))
        self.nbytes_read = 0
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._metadata: Metadata | None = None
        self._checked: Metadata | None = None
        self._global_error: Exception | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another folder next, if one is given."""
        super().reset(checkpoint_id)
        self._metadata = self._checked = self._global_error = None

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Read and check `.metadata`, or that of one ``rank``.

        Raises
        ------
        CheckpointError
            It is damaged, or holds what torch does not put there.
        """
        self._check_hooks()
        rank = kwargs.get("rank")
        try:
            return self._read_metadata(rank)
        except Exception as error:
            if rank is None:
                raise
            # torch would catch it, and raise an AssertionError, which says nothing in torch 2.9.
            unread: Any = _Unread(error)
            return unread  # type: ignore[no-any-return]

    def _read_metadata(self, rank: int | None) -> Metadata:
        path = metadata_path(self.path, rank)
        try:
            metadata = read_metadata(path, trust_pickle=self._trust_pickle)
        except FileNotFoundError:
            if rank is None or self._global_error is None:
                raise
            # torch looks here when it could not read the metadata of all ranks; why not is what matters.
            raise self._global_error from None
        except CheckpointError as error:
            self._global_error = error
            raise
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage_meta.load_id = self.load_id
        metadata.storage_meta = storage_meta
        self._checked = metadata
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata that loads will go by."""
        self._check_hooks()
        if isinstance(metadata, _Unread):
            raise metadata.error
        if metadata is not self._checked:
            check_metadata(metadata, str(self.path))
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify what this rank is going to read, with ``verify="before"``: a failure ends the load on all ranks."""
        if self._verify == "before":
            self._contents().verify(plan.items)
        return super().prepare_local_plan(plan)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for into the planner's tensors.

        Raises
        ------
        CheckpointError
            Something is damaged, or not there.
        StorageError
            Something could not be read.
        AssertionError
            A destination has another size than what is to be read into it.
        """
        self.nbytes_read = 0
        contents = self._contents()
        by_torch = contents.transformed(plan.items)
        if by_torch and self._verify != "off":
            contents.verify(by_torch)
        chosen = {id(request) for request in by_torch}
        with Pipeline(READING_BUFFER_COUNT) as pipeline, Sweep(pipeline) as sweep:
            load = _Load(contents, sweep, planner)
            load.run([request for request in plan.items if id(request) not in chosen])
            self.nbytes_read = sweep.nbytes_read
        if by_torch:
            checked: Any = planner if self._trust_pickle else _Checked(planner, contents)
            super().read_data(dataclasses.replace(plan, items=by_torch), checked).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_hooks(self) -> None:
        """Refuse what torch's reader would use, and this one does not."""
        if type(self.fs) is not filesystem.FileSystem:
            raise TypeError(
                f"{type(self).__name__} sets fs to a {type(self.fs).__name__}, but tensorferry's FileSystemReader "
                "reads local files by itself; derive from "
                "torch.distributed.checkpoint.filesystem.FileSystemReader"
            )

    def _contents(self) -> Contents:
        if self._metadata is None:
            raise RuntimeError("set_up_storage_reader() has not been called")
        return Contents(
            self.path, self._metadata, verify=self._verify != "off", trusted=self._trust_pickle
        )


class _Unread:
    """What stands for metadata that could not be read, until torch uses it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error


class _Load:
    """One read_data()."""

    def __init__(self, contents: Contents, sweep: Sweep, planner: LoadPlanner) -> None:
        self._contents = contents
        self._sweep = sweep
        self._planner = planner
        self._ledger = delivery.Ledger()
        self._queue = Queue(self._want)
        self._held = _HeldMemory()

    def run(self, requests: list[ReadItem]) -> None:
        """Read items, in the order in which they lie in the files."""
        for file, items in self._contents.files(requests):
            self._sweep.begin_file(file)
            for item in items:
                self._queue.add(item.begin, lambda i=item, f=file: self._begin(i, f))  # type: ignore[misc]
            self._queue.advance()
        self._sweep.finish()
        self._ledger.settle()

    def _want(self, piece: Wanted) -> None:
        self._sweep.want(*piece)
        self._ledger.settle()

    def _begin(self, item: Item, file: DataFile) -> Iterator[Wanted]:
        """Return an item's pieces."""
        request = item.request
        if request.type == LoadItemType.BYTE_IO:
            return self._blob(item, file, lambda data: self._load_bytes(request, data))
        target = self._planner.resolve_tensor(request).detach()
        if item.payload is not None and target.dtype != item.payload.dtype:
            _refuse_as_torch_does(request, target.dtype, item.payload.dtype)
        if target.size() != torch.Size(request.lengths):
            raise AssertionError(
                f"req {request.storage_index} mismatch sizes {target.size()} vs {torch.Size(request.lengths)}"
            )
        if item.payload is None:
            return self._blob(
                item, file, lambda data: self._copy_by_torch(item, file, data, target)
            )
        return self._tensor(item, item.payload, file, target)

    def _tensor(
        self, item: Item, payload: Payload, file: DataFile, target: torch.Tensor
    ) -> Iterator[Wanted]:
        plain = delivery.is_plain(target)
        if plain and self._held.overlaps(target):
            # Two items for the same memory: the later one wins, and a planner may lend the same memory twice.
            self._queue.advance()
            self._sweep.settle()
            self._ledger.settle()
        held = self._held.add(target) if plain else None
        lengths = item.request.lengths
        inner = target if plain else torch.empty(lengths, dtype=payload.dtype)
        checksum: delivery.Checksum | None = None

        def finish() -> None:
            if checksum is not None:
                self._contents.check_payload(item, file, checksum.value())
            if held is None:
                target.copy_(inner)
            else:
                self._held.remove(held)
                _mark_changed(target)
            self._planner.commit_tensor(item.request, target)

        counter = delivery.Delivery(self._ledger, finish)
        if item.is_whole and self._contents.has_only_payload_crc(item, file):
            checksum = delivery.Checksum(counter, payload.nbytes)
        for piece in delivery.deliver(
            counter, payload, item.request.storage_offsets, lengths, inner, file.granule_nbytes
        ):
            yield piece
            if checksum is not None:
                yield piece[0], piece[1], checksum, piece[0] - payload.begin
        counter.close()

    def _blob(
        self, item: Item, file: DataFile, use: Callable[[io.BytesIO], None]
    ) -> Iterator[Wanted]:
        """Read a blob into memory, and call ``use`` with a file of it."""

        def finish() -> None:
            data = io.BytesIO(sink.data)
            self._contents.check_blob(item, file, data)
            data.seek(0)
            use(data)

        counter = delivery.Delivery(self._ledger, finish)
        sink = delivery.Bytes(counter, item.info.length)
        for begin, end in cuts(item.info.offset, item.info.offset + item.info.length):
            yield begin, end, sink, begin - item.info.offset
        counter.close()

    def _load_bytes(self, request: ReadItem, data: io.BytesIO) -> None:
        checked: Any = self._contents.harmless(request.storage_index, data)
        self._planner.load_bytes(request, checked)

    def _copy_by_torch(
        self, item: Item, file: DataFile, data: io.BytesIO, target: torch.Tensor
    ) -> None:
        """Do as torch's reader does, with what it alone knows to read."""
        request = item.request
        self._contents.check_tensor_blob(item, file, data)
        tensor = torch.load(data, map_location="cpu", weights_only=True)
        for dim, (offset, length) in enumerate(
            zip(request.storage_offsets, request.lengths, strict=True)
        ):
            if tensor.size(dim) != length:
                tensor = tensor.narrow(dim, offset, length)
        if target.size() != tensor.size():
            raise AssertionError(
                f"req {request.storage_index} mismatch sizes {target.size()} vs {tensor.size()}"
            )
        target.copy_(tensor)
        self._planner.commit_tensor(request, target)


class _Checked:
    """A planner that gets no blob unchecked from torch's code."""

    def __init__(self, planner: LoadPlanner, contents: Contents) -> None:
        self._planner = planner
        self._contents = contents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked: Any = self._contents.harmless(read_item.storage_index, value)
        self._planner.load_bytes(read_item, checked)


class _HeldMemory:
    """The memory of destinations that are being filled."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[str, int], set[tuple[int, int, int]]] = {}
        self._count = 0

    def add(self, target: torch.Tensor) -> tuple[tuple[str, int], tuple[int, int, int]]:
        """Hold the memory of a tensor."""
        key, begin, end = _memory_of(target)
        self._count += 1
        held = (begin, end, self._count)
        self._ranges.setdefault(key, set()).add(held)
        return key, held

    def remove(self, held: tuple[tuple[str, int], tuple[int, int, int]]) -> None:
        """Let go of it."""
        key, entry = held
        self._ranges[key].discard(entry)
        if not self._ranges[key]:
            del self._ranges[key]

    def overlaps(self, target: torch.Tensor) -> bool:
        """Return whether some of a tensor's memory is held."""
        key, begin, end = _memory_of(target)
        return any(
            begin < other_end and other_begin < end
            for other_begin, other_end, _ in self._ranges.get(key, ())
        )


def _refuse_as_torch_does(request: ReadItem, wanted: torch.dtype, stored: torch.dtype) -> None:
    """Refuse a tensor of another dtype where torch's reader does; versions up to 2.15 convert it."""
    kind = _torchs_refusal()
    if kind is not None:
        raise kind(f"req {request.storage_index} mismatch dtypes {wanted} vs {stored}")


@functools.cache
def _torchs_refusal() -> type[Exception] | None:
    """Have torch's reader load one number into another dtype, and return what it raises."""

    class Memory(filesystem.FileSystem):
        @contextlib.contextmanager
        def create_stream(self, *_arguments: Any) -> Any:
            yield io.BytesIO(blob.getvalue())

    class Planner(DefaultLoadPlanner):
        dtype = torch.float32

        def resolve_tensor(self, _item: ReadItem) -> torch.Tensor:
            return torch.zeros(1, dtype=self.dtype)

    torch.save(torch.zeros(1), blob := io.BytesIO())
    origin, size = torch.Size([0]), torch.Size([1])
    index = MetadataIndex("a", origin)
    item = ReadItem(LoadItemType.TENSOR, index, origin, index, origin, size)
    reader = filesystem.FileSystemReader("")
    reader.fs = Memory()
    reader.storage_data = {index: filesystem._StorageInfo("a", 0, len(blob.getvalue()))}
    plan, planner = LoadPlan([item]), Planner()
    try:
        reader.read_data(plan, planner).wait()
    except Exception:  # it is not about dtypes, then
        return None
    planner.dtype = torch.float64
    try:
        reader.read_data(plan, planner).wait()
    except Exception as error:
        return type(error)
    return None


def _memory_of(tensor: torch.Tensor) -> tuple[tuple[str, int], int, int]:
    """Return what tells storages apart, and the bytes of it that a tensor has."""
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    begin = int(tensor.storage_offset()) * tensor.element_size()
    end = begin + (int(span) * tensor.element_size() if tensor.numel() else 0)
    return (str(tensor.device), tensor.untyped_storage().data_ptr()), begin, end


def _mark_changed(target: torch.Tensor) -> None:
    """Tell autograd that a tensor has changed, which it does not see where bytes are copied."""
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)
