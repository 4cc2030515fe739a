"""FileSystemReader: a fast, verifying replacement for torch's FileSystemReader.

An item (torch's ReadItem) is one slice of a stored tensor, or one object, that a load plan requests. A planner, torch's
or the program's, supplies the destination of each item. A blob is the bytes that torch.save wrote for a tensor or
object; the payload is the range of a blob that has the tensor's elements.

A load requests the bytes that it needs in the order of their file offsets. The loading thread asks the planner for each
destination shortly before its bytes are read, and commits it to the planner when they have arrived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tensorferry.base.caller_warnings import warn
from tensorferry.base.checks import one_of
from tensorferry.base.file_locks import reader_lock
from tensorferry.base.ranks import checked_broadcast
from tensorferry.base.reprs import first_of, safe_repr
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import destinations, sharing
from tensorferry.checkpoint.storage.contents import Contents, Item
from tensorferry.checkpoint.storage.metadata import check_metadata, metadata_path, read_metadata
from tensorferry.checkpoint.storage.names import METADATA_NAME, metadata_files
from tensorferry.checkpoint.storage.reading import Reading
from tensorferry.checkpoint.storage.torch_classes import InPlaceOfTorchs
from tensorferry.transfer.remote import ObjectPath, as_path, source_path

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch.distributed as dist

    from tensorferry.base.checks import Readable
    from tensorferry.base.ranks import Broadcast
    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.storage.contents import ItemLocator
    from tensorferry.checkpoint.storage.reading import DataFile, ReadRequest
    from tensorferry.checkpoint.zipformat.blobs import Payload

Verify = Literal["read", "before", "off"]
_LEVELS = ("read", "before", "off")
_SHOWN_NAMES = 4


class FileSystemReader(InPlaceOfTorchs, filesystem.FileSystemReader):
    """Reads checkpoints of :class:`FileSystemWriter` and of torch's, for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path : str or PathLike, or pair of store and key
        The checkpoint's folder, or its prefix in a bucket, in any form that :func:`tensorferry.open` accepts.
    _extension_registry : None
        Tensors that were saved through extensions are refused, because only torch's own reader supports them.
    thread_count : int, optional
        Accepted for compatibility with coming versions of torch. It has no effect: the speed does not depend on it.
    verify : "read", "before" or "off"
        "read": every byte is verified as it is read, and damaged bytes never reach a tensor; but tensors that were
        loaded before the damage was found keep their new values. "before": all ranks verify the bytes that they need
        before any rank changes a tensor, which reads everything twice. "off": no checksums are computed.
    trust_pickle : bool
        Allow arbitrary objects in `.metadata` and in entries that are not tensors (unpickling them may run any code),
        and allow data files to be links that lead out of the folder. By default only plain values are accepted:
        numbers, text, bytes, None, containers of the standard library, times, NumPy's arrays and scalars, tensors.
        Anything else is refused with an error that names it.
    progress : function of a Progress, optional
        Called by the loading thread, at most every 0.1 seconds and once at the end, with this rank's progress. An
        exception that it raises ends the load.
    broadcast : False, True or "auto"
        Whether plain tensors that several ranks of a node need, of a checkpoint that our writer saved, are read only
        once: each of these ranks reads a part, and the process group distributes the parts. "auto": only where the
        group moves memory of GPUs (NCCL), or the folder is not on a local drive. All ranks must pass the same value.
    process_group : ProcessGroup, optional
        The group that is passed to ``load()``; by default the group of all ranks.

    Attributes
    ----------
    nbytes_read : int
        Bytes that the last load read from data files.
    last_load : Throughput or None
        The bytes that the last load delivered to tensors and objects of this rank, and the time it took; None if it
        failed.

    Notes
    -----
    Checkpoints that torch wrote have a checksum for each tensor, but none for parts of a tensor. In those, "read"
    verifies the tensors that are read whole, after their bytes have been copied; "before" verifies all tensors.
    """

    def __init__(
        self,
        path: Readable,
        _extension_registry: Any = None,
        thread_count: int | None = None,  # noqa: ARG002 (torch's parameter)
        *,
        verify: Verify = "read",
        trust_pickle: bool = False,
        progress: Listener | None = None,
        broadcast: Broadcast = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        one_of(verify, "verify", _LEVELS)
        if _extension_registry is not None:
            raise ValueError(
                f"_extension_registry: only torch's own reader supports {_extension_registry!r} (remedy: "
                f"{filesystem.__name__}.FileSystemReader)"
            )
        super().__init__("")
        self.path: Any = as_path(source_path(path))
        self.nbytes_read = 0
        self.last_load: Throughput | None = None
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._progress = checked_listener(progress)
        self._broadcast = checked_broadcast(broadcast)
        self._group = process_group
        self._metadata: Metadata | None = None
        self._checked: Metadata | None = None  # the metadata that read_metadata() has checked
        # Why `.metadata`, the metadata of all ranks, could not be read.
        self._global_error: Exception | None = None
        self._release_folder: Callable[[], Any] = _hold_nothing  # drops the read lock on the folder

    def __getstate__(self) -> dict[str, Any]:
        # A copy, perhaps in another process, does not have the lock, and must not release it.
        return self.__dict__ | {"_release_folder": _hold_nothing}

    @safe_repr
    def __repr__(self) -> str:
        last = self.last_load and f"{self.last_load.nbytes} bytes in {self.last_load.seconds:.3g} s"
        given = f"{str(self.path)!r}, verify={self._verify!r}"
        return f"<tensorferry.checkpoint.FileSystemReader {given}: last load {last}>"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for the next load, from another folder if one is given."""
        super().reset()
        if checkpoint_id:
            self.path = as_path(source_path(checkpoint_id, "checkpoint_id"))
        self._metadata = self._checked = self._global_error = None

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Read and check `.metadata`, or the metadata of one ``rank``.

        Raises
        ------
        CheckpointError
            The metadata is damaged, or holds objects that torch does not write.
        """
        rank = kwargs.get("rank")
        try:
            return self._read_metadata(rank)
        except Exception as error:
            if rank is None:
                raise
            # torch would catch the error and raise an AssertionError, which has no message in torch 2.9.
            unread: Any = _UnreadableMetadata(error)
            return unread  # type: ignore[no-any-return]

    def _read_metadata(self, rank: int | None) -> Metadata:
        try:
            path = metadata_path(self.path, rank)
            metadata = read_metadata(path, trust_pickle=self._trust_pickle)
        except FileNotFoundError:
            if rank is None or self._global_error is None:
                if not isinstance(self.path, ObjectPath):
                    self._require_some_metadata()
                raise
            # When `.metadata` is unreadable, torch tries the metadata of this rank alone, which is missing here. Raise
            # the first error: it says what is wrong with `.metadata`.
            raise self._global_error from None
        except CheckpointError as error:
            self._global_error = error
            raise
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage_meta.load_id = self.load_id
        metadata.storage_meta = storage_meta
        self._checked = metadata
        return metadata

    def _require_some_metadata(self) -> None:
        """Raise a FileNotFoundError that describes the folder if it has no metadata, not even of another rank."""
        try:
            metadata_files(self.path)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from None

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Set the metadata that loads use."""
        if isinstance(metadata, _UnreadableMetadata):
            raise metadata.error
        if metadata is not self._checked:  # read_metadata() has not returned it
            check_metadata(metadata, str(self.path))
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    @contextlib.contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Lock the folder in the block, so that writers do not remove the checkpoint; a block inside has no effect.

        Raises
        ------
        FileNotFoundError
            The folder has been removed.
        """
        if self._release_folder is not _hold_nothing or isinstance(self.path, ObjectPath):
            yield
            return
        try:
            self._release_folder = reader_lock(self, self.path, METADATA_NAME)
        except FileNotFoundError as error:
            why = "the checkpoint has been removed since its metadata was read"
            raise FileNotFoundError(
                error.errno, f"{error.strerror}; {why}", str(self.path)
            ) from None
        try:
            yield
        finally:
            release, self._release_folder = self._release_folder, _hold_nothing
            release()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify the bytes that this rank needs, with ``verify="before"``; a failure ends the load on all ranks."""
        if self._verify == "before":
            with self.holding_folder():
                self._contents().verify(plan.items)
        return sharing.with_offer(plan, self._broadcast, self._group, self.path)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Decide which tensors ranks share, and which rank reads each part."""
        return sharing.with_shares(plans, self._contents)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the planner's tensors.

        Raises
        ------
        CheckpointError
            Data is damaged or missing.
        StorageError
            A file could not be read.
        AssertionError
            A destination and the slice that is read into it differ in size.
        """
        self.nbytes_read = 0
        self.last_load = None
        meter = Meter(self._progress)
        with self.holding_folder():
            load = PlanLoad(self._contents(), planner, meter)
            load.read(plan, self._group)
            self.nbytes_read = load.nbytes_read
        self.last_load = meter.finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _contents(self) -> Contents:
        if self._metadata is None:
            raise RuntimeError("set_up_storage_reader() has not been called")
        metadata = self._metadata
        # A subclass may replace storage_data; torch's reader uses the attribute, so do the same.
        if self.storage_data is not metadata.storage_data:
            metadata = dataclasses.replace(metadata, storage_data=self.storage_data)
            check_metadata(metadata, str(self.path))
        return Contents(
            self.path, metadata, verify=self._verify != "off", trusted=self._trust_pickle
        )


class PlanLoad:
    """Reads the items of a plan: those that only this rank needs, and those that it shares with other ranks.

    Parameters
    ----------
    contents : ItemLocator
        Finds the items in the data files.
    planner : LoadPlanner
        Resolves the destinations.
    meter : Meter
        Counts the bytes that arrive.

    Attributes
    ----------
    nbytes_read : int
        Bytes that have been read from data files.
    """

    def __init__(self, contents: ItemLocator, planner: LoadPlanner, meter: Meter) -> None:
        self.nbytes_read = 0
        self._contents: Any = contents
        self._planner = planner
        self._meter = meter
        self._destinations = _Destinations(planner)

    def read(self, plan: LoadPlan, group: dist.ProcessGroup | None) -> None:
        """Read all items."""
        if isinstance(plan.storage_data, sharing.Share):
            self._read_shared(plan.storage_data, plan, group)
        else:
            self._read_own(plan.items)
        self._destinations.warn()

    def _read_own(self, requests: Sequence[ReadItem]) -> None:
        """Read items from their data files, without other ranks.

        torch's reader reads the items one after the other, in the order of the plan. Where the order matters, because a
        planner acts when an item is committed, or destinations share memory, it is the same here.
        """
        by_file = self._contents.locate(requests)
        by_request = {id(item.request): item for items in by_file.values() for item in items}
        in_turn = [by_request[id(request)] for request in requests]
        self._meter.expect(sum(item.nbytes for item in in_turn), files=len(by_file))
        if not self._acts_on_commit():
            self._destinations.resolve_all(in_turn)
            in_turn = self._destinations.overlapping(in_turn)
        later: dict[str, list[Item]] = {}
        for item in in_turn:
            later.setdefault(item.info.relative_path, []).append(item)
        chosen = set(map(id, in_turn))
        for name, items in list(by_file.items()):
            by_file[name] = [item for item in items if id(item) not in chosen]
            if not by_file[name]:
                del by_file[name]
        with Reading(lambda: self._meter.add(0, files=1)) as reading:
            load = ItemLoad(
                self._contents, reading, self._planner, self._meter.add, self._destinations
            )
            self._contents.read(reading, by_file, load.begin)
            self._contents.read(reading, later, load.begin_alone)
            self.nbytes_read += reading.nbytes_read

    def _acts_on_commit(self) -> bool:
        """Return whether the planner does something when an item is committed.

        Megatron's planner, for example, remembers the last resolved item for its commit.
        """
        return isinstance(self._planner, LoadPlanner) and (
            getattr(self._planner.commit_tensor, "__func__", None)
            is not DefaultLoadPlanner.commit_tensor
        )

    def _read_shared(
        self,
        share: sharing.Share,
        plan: LoadPlan,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Read the items that only this rank needs, then this rank's part of the shared ones.

        If the first of these fails, exchange.run() still tells the other ranks, which would wait for this one
        otherwise.
        """
        shared = sharing.shared_items(share, plan)
        chosen = {id(item) for item in shared}

        def read(boxes: list[tuple[sharing.SharedBox, torch.Tensor]]) -> None:
            requests = [(piece.request, box) for piece, box in boxes]
            self.nbytes_read += read_boxes(self._contents, requests)

        arrivals = sharing.Arrivals(
            shared, self._destinations.resolve, self._planner.commit_tensor, self._meter.add
        )
        exchange = sharing.Exchange(share, group, read, arrivals.add)
        failure: BaseException | None = None
        try:
            self._meter.expect(sharing.nbytes_of(share), files=0)
            self._read_own([item for item in plan.items if id(item) not in chosen])
        except BaseException as error:
            failure = error
        exchange.run(failure)


def _hold_nothing() -> None:
    """Do nothing, in place of the release of a lock that is not held."""


class _UnreadableMetadata:
    """Stands in for metadata that could not be read; any use of it by torch raises the original error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error


class PreallocatedPlanner:
    """A planner that resolves each item to memory that its creator has allocated."""

    def __init__(self, requests: list[tuple[ReadItem, torch.Tensor]]) -> None:
        self._requests = requests  # keeps the requests alive, and so their ids unique
        self._memory = {id(request): memory for request, memory in requests}

    def resolve_tensor(self, request: ReadItem) -> torch.Tensor:
        """Return the memory for an item."""
        return self._memory[id(request)]

    def commit_tensor(self, request: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing, as the creator of the planner uses the memory after the load."""


def read_items(contents: ItemLocator, planner: Any, items: Sequence[ReadItem]) -> int:
    """Read items into a planner's destinations; return the number of bytes that were read from files."""
    with Reading() as reading:
        load = ItemLoad(contents, reading, planner, lambda _: None)
        contents.read(reading, contents.locate(items), load.begin)
        return reading.nbytes_read


def read_boxes(contents: ItemLocator, boxes: list[tuple[ReadItem, torch.Tensor]]) -> int:
    """Read items into tensors of their sizes and dtypes; return the number of bytes that were read from files."""
    return read_items(contents, PreallocatedPlanner(boxes), [item for item, _ in boxes])


class _Destinations:
    """Gets a planner's destinations, and checks them."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self._resolved: dict[int, torch.Tensor] = {}  # by the id of the item's request
        # "stored dtype to wanted dtype" of conversions that may lose values, by name
        self._narrowed: dict[str, str] = {}

    def resolve(self, request: ReadItem, stored: torch.dtype | None) -> torch.Tensor:
        """Return the destination of an item; AssertionError if it has another size."""
        if (target := self._resolved.pop(id(request), None)) is not None:
            return target
        target = self._planner.resolve_tensor(request)
        # Only with this layout does copy_() into a detached tensor change the planner's tensor, too.
        if target.layout is torch.strided:
            target = target.detach()
        if target.size() != torch.Size(request.lengths):
            raise AssertionError(
                f"req {request.storage_index} mismatch sizes {target.size()} vs {torch.Size(request.lengths)}"
            )
        if stored not in (None, target.dtype) and not holds(target.dtype, stored):
            self._narrowed[request.storage_index.fqn] = f"{stored} to {target.dtype}"
        return target

    def resolve_all(self, items: Iterable[Item]) -> None:
        """Resolve the destinations of all items, in their order, before the first is read."""
        for item in items:
            if _is_tensor(item.request):
                target = self.resolve(item.request, item.dtype)
                self._resolved[id(item.request)] = target

    def overlapping(self, items: Sequence[Item]) -> list[Item]:
        """Return those resolved items whose destinations may share memory, in their order."""
        places = sorted(
            (*destinations.memory_of(target), number)
            for number, item in enumerate(items)
            if (target := self._resolved.get(id(item.request))) is not None
            and destinations.is_in_memory(target)
        )
        shared: set[int] = set()
        before: tuple[str, int, int, int] = ("", 0, 0, 0)
        for place in places:
            device, begin, end, number = place
            if device == before[0] and begin < before[2]:
                shared |= {before[3], number}
            if device != before[0] or end > before[2]:
                before = place
        return [items[number] for number in sorted(shared)]

    def warn(self) -> None:
        """Warn once of all conversions that may lose values."""
        if self._narrowed:
            names = [f"{name!r} ({how})" for name, how in self._narrowed.items()]
            found = first_of(names, _SHOWN_NAMES)
            warn(f"tensors are converted to dtypes that may not hold their values: {found}")


def holds(wanted: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a dtype can hold every value of another one."""
    if stored == torch.bool:
        return True
    if wanted.is_complex:
        return holds(wanted.to_real(), stored.to_real() if stored.is_complex else stored)
    if stored.is_complex or wanted == torch.bool:
        return False
    try:
        if not stored.is_floating_point:
            least, most = torch.iinfo(stored).min, torch.iinfo(stored).max
            if not wanted.is_floating_point:
                return torch.iinfo(wanted).min <= least and most <= torch.iinfo(wanted).max
            return most <= 2 / torch.finfo(wanted).eps and most <= torch.finfo(wanted).max
        old, new = torch.finfo(stored), torch.finfo(wanted)
    except TypeError:  # from a floating-point dtype to integers, or a dtype of a few bits
        return False
    return new.eps <= old.eps and new.max >= old.max and new.tiny <= old.tiny


class ItemLoad:
    """Reads items into a planner's destinations."""

    def __init__(
        self,
        contents: Any,
        reading: Reading,
        planner: LoadPlanner,
        count: Callable[[int], None],
        found: _Destinations | None = None,
    ) -> None:
        self._contents = contents
        self._destinations = found or _Destinations(planner)
        self._reading = reading
        self._planner = planner
        self._count = count
        self._pool = destinations.BufferPool()

    def begin_alone(self, item: Item, file: DataFile) -> Iterator[ReadRequest]:
        """Return the read requests of an item once all earlier items have been committed."""
        self._reading.drain()
        return self.begin(item, file)

    def begin(self, item: Item, file: DataFile) -> Iterator[ReadRequest]:
        """Return the read requests of an item."""
        request, payload = item.request, item.payload
        if not _is_tensor(request):
            return self._blob(item, file, functools.partial(self._load_bytes, request))
        target = self._destinations.resolve(request, item.dtype)
        if payload is None:
            return self._blob(
                item, file, lambda data: self._copy_by_torch(item, file, data, target)
            )
        return self._tensor(item, payload, file, target)

    def _tensor(
        self, item: Item, payload: Payload, file: DataFile, target: torch.Tensor
    ) -> Iterator[ReadRequest]:
        plain = destinations.is_plain(target) and not (payload.conj or payload.neg)
        request = item.request
        inner = target
        if not plain:
            inner = torch.empty(request.lengths, dtype=item.dtype, device="cpu")
        is_whole = tuple(request.lengths) == payload.sizes
        needs_crc = is_whole and self._contents.has_only_payload_crc(item, file)

        def finish() -> None:
            if needs_crc:
                self._contents.check_payload(item, file, whole.crc)
            if not plain:
                destinations.copy_values(target, destinations.apply_conj_neg(inner, payload))
            elif not target.is_inference():
                # The core writes to memory directly, which autograd cannot see.
                torch.autograd.graph.increment_version(target)
            self._planner.commit_tensor(request, target)

        whole = destinations.ItemCompletion(item.nbytes, finish, self._count, needs_crc=needs_crc)
        return whole.begin(item.slice_requests(whole, inner, file.gap_nbytes, self._pool))

    def _blob(
        self, item: Item, file: DataFile, use: Callable[[io.BytesIO], None]
    ) -> Iterator[ReadRequest]:
        """Read a blob into memory, and call ``use`` with it as a file object."""
        data = bytearray(item.info.length)

        def finish() -> None:
            stream = io.BytesIO(data)
            self._contents.check_blob(item, file, stream)
            stream.seek(0)
            use(stream)

        begin = item.info.offset
        return destinations.range_requests([(begin, begin + len(data), data)], finish, self._count)

    def _load_bytes(self, request: ReadItem, data: io.BytesIO) -> None:
        safe: Any = self._contents.sanitize_blob(request.storage_index, data)
        self._planner.load_bytes(request, safe)

    def _copy_by_torch(
        self, item: Item, file: DataFile, data: io.BytesIO, target: torch.Tensor
    ) -> None:
        """Copy a slice of a blob's tensor to ``target`` by torch's code, for blobs that only torch.load can read."""
        request = item.request
        self._contents.check_tensor_blob(item, file, data)
        with torch.device("cpu"):  # sparse tensors would be created on the default device otherwise
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
        destinations.copy_values(target, tensor)
        self._planner.commit_tensor(request, target)


def _is_tensor(request: ReadItem) -> bool:
    return request.type != LoadItemType.BYTE_IO
