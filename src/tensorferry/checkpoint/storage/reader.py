"""FileSystemReader: a fast, verifying replacement for torch's FileSystemReader.

An item (torch's ReadItem) is one slice of a stored tensor, or one object, that a load plan requests. A planner, torch's
or the program's, supplies the destination of each item. A blob is the bytes that torch.save wrote for a tensor or
object; the payload is the range of a blob that has the tensor's elements.

A load requests the bytes that it needs in the order of their file offsets. The loading thread asks the planner for each
destination shortly before its bytes are read, and commits it to the planner when they have arrived.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import functools
import io
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tensorferry.base.caller_warnings import warn
from tensorferry.base.checks import one_of
from tensorferry.base.file_locks import reader_lock
from tensorferry.base.ranks import checked_broadcast
from tensorferry.base.reprs import first_of, safe_repr
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import destinations, hooks, sharing
from tensorferry.checkpoint.storage.contents import Contents, Item
from tensorferry.checkpoint.storage.metadata import (
    check_metadata,
    metadata_path,
    parse_metadata,
    read_metadata,
)
from tensorferry.checkpoint.storage.names import METADATA_NAME, metadata_files
from tensorferry.checkpoint.storage.reading import Reading
from tensorferry.transfer.remote import ObjectPath

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

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


class FileSystemReader(filesystem.FileSystemReader):
    """Reads checkpoints of :class:`FileSystemWriter` and of torch's, for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path : str or PathLike, or pair of store and key
        The checkpoint's folder, or its prefix in a bucket, in any form that :func:`tensorferry.open` accepts.
    _extension_registry : optional
        As in torch 2.7 and later. Tensors that were saved through extensions are read by torch's own code.
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
        folder = hooks.first_folder(self, FileSystemReader, path, reads=True)
        super().__init__(folder, *(() if _extension_registry is None else (_extension_registry,)))
        hooks.set_object_path(self, folder)
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
        folder = checkpoint_id and hooks.folder(self, checkpoint_id, reads=True)
        super().reset(folder)
        hooks.set_object_path(self, folder)
        self._metadata = self._checked = self._global_error = None
        self._release_folder()

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Read and check `.metadata`, or the metadata of one ``rank``.

        Raises
        ------
        CheckpointError
            The metadata is damaged, or holds objects that torch does not write.
        """
        hooks.check_folder(self)
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
            if self._overridden_hooks():
                metadata = self._read_metadata_by_torch(rank)
            else:
                path = metadata_path(self.path, rank)
                metadata = read_metadata(path, trust_pickle=self._trust_pickle)
        except FileNotFoundError:
            if rank is None or self._global_error is None:
                if not self._overridden_hooks() and not isinstance(self.path, ObjectPath):
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
        """Set the metadata that loads use, and lock the folder, so that writers keep the checkpoint during the load."""
        if isinstance(metadata, _UnreadableMetadata):
            raise metadata.error
        # Check metadata that read_metadata() has not returned. Where a subclass overrides hooks, torch's code uses the
        # metadata, and the subclass is responsible for the check.
        if metadata is not self._checked and not self._overridden_hooks():
            check_metadata(metadata, str(self.path))
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata
        self._release_folder()
        if hooks.has_own_files(self) or isinstance(self.path, ObjectPath):
            return
        try:  # with this lock held, writers do not remove the checkpoint while it is being loaded
            self._release_folder = reader_lock(self, self.path, METADATA_NAME)
        except FileNotFoundError as error:
            why = "the checkpoint has been removed since its metadata was read"
            raise FileNotFoundError(
                error.errno, f"{error.strerror}; {why}", str(self.path)
            ) from None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify the bytes that this rank needs, with ``verify="before"``; a failure ends the load on all ranks."""
        if changed := self._overridden_hooks():
            if self._verify == "before":
                raise ValueError(
                    f"verify: 'before' is not possible, as {type(self).__name__} changes {', '.join(sorted(changed))}"
                )
            if self._verify != "off":
                hooks.warn_torch_code(
                    self, changed, "nothing is verified (pass verify='off' to silence this)"
                )
            return super().prepare_local_plan(plan)
        if self._verify == "before":
            self._contents().verify(plan.items)
        plan = super().prepare_local_plan(plan)
        return sharing.with_offer(plan, self._broadcast, self._group, self.path)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Decide which tensors ranks share, and which rank reads each part."""
        plans = super().prepare_global_plan(plans)
        return plans if self._overridden_hooks() else sharing.with_shares(plans, self._contents)

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
        try:
            if self._overridden_hooks():
                self._read_by_torch(plan, planner, meter)
            else:
                load = PlanLoad(self._contents(), planner, meter)
                load.read(plan, self._group, lambda own: self._read_own(own, load, planner, meter))
                self.nbytes_read = load.nbytes_read
        finally:
            self._release_folder()
        self.last_load = meter.finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_own(self, plan: LoadPlan, load: PlanLoad, planner: LoadPlanner, meter: Meter) -> None:
        """Read the items that only this rank needs; torch's code reads those that were saved through extensions."""
        contents = self._contents()
        by_torch = contents.transformed_items(plan.items)
        if by_torch and self._verify != "off":
            contents.verify(by_torch)
        chosen = {id(request) for request in by_torch}
        meter.expect(contents.nbytes_of(by_torch), files=0)
        load.read_own([each for each in plan.items if id(each) not in chosen])
        if by_torch:
            self._read_by_torch(dataclasses.replace(plan, items=by_torch), planner, meter)

    def _read_by_torch(self, plan: LoadPlan, planner: LoadPlanner, meter: Meter) -> None:
        """Read a plan by torch's code, with each blob checked before the planner unpickles it."""
        checked: Any = (
            planner if self._trust_pickle else _BlobCheckingPlanner(planner, self._contents())
        )
        super().read_data(plan, checked).wait()
        infos = (self.storage_data[item.storage_index] for item in plan.items)
        meter.add(sum(getattr(info, "length", 0) for info in infos))

    def _read_metadata_by_torch(self, rank: int | None) -> Metadata:
        """Read metadata from the path that torch's code would use, but with the safe unpickler."""
        path: str | os.PathLike[str]
        if hasattr(self, "_get_metadata_path"):
            path = self._get_metadata_path(rank)
        else:  # before torch 2.9
            path = self.fs.concat_path(self.path, METADATA_NAME)
        with self.fs.create_stream(path, "rb") as stream:
            data = stream.read()
        return parse_metadata(data, str(path), trust_pickle=self._trust_pickle)

    def _overridden_hooks(self) -> frozenset[str]:
        """Return the overridden attributes that our code would ignore; if there are any, torch's code does the work."""
        return hooks.overridden(self, _HOOKS)

    def _contents(self) -> Contents:
        if self._metadata is None:
            raise RuntimeError("set_up_storage_reader() has not been called")
        metadata = self._metadata
        # A subclass may replace storage_data; torch's reader uses the attribute, so do the same.
        if self.storage_data is not metadata.storage_data:
            metadata = dataclasses.replace(metadata, storage_data=self.storage_data)
            if not self._overridden_hooks():
                check_metadata(metadata, str(self.path))
        return Contents(
            self.path, metadata, verify=self._verify != "off", trusted=self._trust_pickle
        )


_HOOKS = hooks.hooks_of(FileSystemReader, filesystem.FileSystemReader)


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
    converts : bool
        Whether a destination may have another dtype than the stored tensor.

    Attributes
    ----------
    nbytes_read : int
        Bytes that have been read from data files.
    """

    def __init__(
        self, contents: ItemLocator, planner: LoadPlanner, meter: Meter, *, converts: bool = False
    ) -> None:
        self.nbytes_read = 0
        self._contents: Any = contents
        self._planner = planner
        self._meter = meter
        self._destinations = _Destinations(planner, converts=converts)

    def read(
        self,
        plan: LoadPlan,
        group: dist.ProcessGroup | None,
        read_own: Callable[[LoadPlan], None] | None = None,
    ) -> None:
        """Read all items; ``read_own``, by default :meth:`read_own`, reads those that only this rank needs."""
        read_own = read_own or (lambda own: self.read_own(own.items))
        if isinstance(plan.storage_data, sharing.Share):
            self._read_shared(plan.storage_data, plan, group, read_own)
        else:
            read_own(plan)
        self._destinations.warn()

    def read_own(self, items: list[ReadItem]) -> None:
        """Read items from their data files, without other ranks."""
        by_file = self._contents.locate(items)
        nbytes = sum(item.nbytes for items in by_file.values() for item in items)
        self._meter.expect(nbytes, files=len(by_file))
        with Reading(lambda: self._meter.add(0, files=1)) as reading:
            load = ItemLoad(
                self._contents, reading, self._planner, self._meter.add, self._destinations
            )
            self._contents.read(reading, by_file, load.begin)
            self.nbytes_read += reading.nbytes_read

    def _read_shared(
        self,
        share: sharing.Share,
        plan: LoadPlan,
        group: dist.ProcessGroup | None,
        read_own: Callable[[LoadPlan], None],
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
            own = [item for item in plan.items if id(item) not in chosen]
            read_own(dataclasses.replace(plan, items=own))
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
    """Gets and checks a planner's destinations; ``converts`` allows a dtype other than the stored one."""

    def __init__(self, planner: LoadPlanner, *, converts: bool = False) -> None:
        self._planner = planner
        self._converts = converts
        self._narrowed: dict[
            str, str
        ] = {}  # "stored dtype to wanted dtype" of conversions that may lose values, by name

    def resolve(self, request: ReadItem, stored: torch.dtype | None) -> torch.Tensor:
        """Return the destination of an item; raise for a wrong size, or a dtype that torch would refuse."""
        target = self._planner.resolve_tensor(request)
        # Only with this layout does copy_() into a detached tensor change the planner's tensor, too.
        if target.layout is torch.strided:
            target = target.detach()
        if stored is not None and target.dtype != stored:
            # Raise where the installed torch's reader raises; versions up to 2.15 convert.
            if not self._converts and (kind := _torch_dtype_error()) is not None:
                raise kind(
                    f"req {request.storage_index} mismatch dtypes {target.dtype} vs {stored}"
                )
            if _narrows(stored, target.dtype):
                self._narrowed[request.storage_index.fqn] = f"{stored} to {target.dtype}"
        if target.size() != torch.Size(request.lengths):
            raise AssertionError(
                f"req {request.storage_index} mismatch sizes {target.size()} vs {torch.Size(request.lengths)}"
            )
        return target

    def warn(self) -> None:
        """Warn once of all conversions that may lose values."""
        if self._narrowed:
            names = [f"{name!r} ({how})" for name, how in self._narrowed.items()]
            found = first_of(names, _SHOWN_NAMES)
            warn(f"tensors are converted to dtypes that may not hold their values: {found}")


def _narrows(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether the conversion to another dtype may lose values."""
    try:
        return torch.promote_types(stored, wanted) != wanted
    except RuntimeError:  # promote_types() does not support float8 and smaller dtypes
        return wanted.itemsize <= stored.itemsize


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
        self._checked = _BlobCheckingPlanner(planner, contents)
        self._count = count
        self._reserved = _ReservedMemory()
        self._pool = destinations.BufferPool()
        # torch's reader commits each item before it resolves the next one, and a planner that overrides commit_tensor()
        # may rely on that: Megatron's remembers the last resolved item for its commit.
        self._one_by_one = isinstance(planner, LoadPlanner) and (
            getattr(planner.commit_tensor, "__func__", None) is not DefaultLoadPlanner.commit_tensor
        )

    def begin(self, item: Item, file: DataFile) -> Iterator[ReadRequest]:
        """Return the read requests of an item."""
        request, payload = item.request, item.payload
        if self._one_by_one:
            self._reading.drain()
        if request.type == LoadItemType.BYTE_IO:
            return self._blob(item, file, functools.partial(self._checked.load_bytes, request))
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
        held = self._reserved.add(target) if plain else None
        if plain and held is None:
            # An item that is still being read has the same memory, as a planner may resolve two items to one tensor.
            # Wait for the earlier item, so that the later one overwrites it, as with torch's reader.
            self._reading.drain()
            held = self._reserved.add(target)
        request = item.request
        inner = target
        if not plain:
            inner = torch.empty(request.lengths, dtype=item.dtype, device="cpu")
        is_whole = tuple(request.lengths) == payload.sizes
        needs_crc = is_whole and self._contents.has_only_payload_crc(item, file)

        def finish() -> None:
            if needs_crc:
                self._contents.check_payload(item, file, whole.crc)
            if held is None:
                destinations.copy_values(target, destinations.apply_conj_neg(inner, payload))
            else:
                self._reserved.remove(held)
                # The core writes to memory directly, which autograd cannot see.
                if not target.is_inference():
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


class _BlobCheckingPlanner:
    """A planner proxy that checks each blob before the planner unpickles it."""

    def __init__(self, planner: LoadPlanner, contents: Contents) -> None:
        self._planner = planner
        self._contents = contents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked: Any = self._contents.sanitize_blob(read_item.storage_index, value)
        self._planner.load_bytes(read_item, checked)


class _ReservedMemory:
    """The memory ranges of destinations that are being filled; they never overlap."""

    def __init__(self) -> None:
        self._ranges: list[tuple[str, int, int]] = []  # device, begin and end; sorted

    def add(self, target: torch.Tensor) -> tuple[str, int, int] | None:
        """Reserve the memory of a tensor, and return its range; return None if it overlaps a reserved range."""
        new = device, begin, end = _memory_of(target)
        at = bisect.bisect(self._ranges, new)
        for other, other_begin, other_end in self._ranges[max(at - 1, 0) : at + 1]:
            if other == device and other_begin < end and begin < other_end:
                return None
        if begin < end:
            self._ranges.insert(at, new)
        return new

    def remove(self, held: tuple[str, int, int]) -> None:
        """Release a reserved range; that of a tensor without elements is not recorded."""
        at = bisect.bisect_left(self._ranges, held)
        if self._ranges[at : at + 1] == [held]:
            del self._ranges[at]


@functools.cache
def _torch_dtype_error() -> type[Exception] | None:
    """Return what torch's reader raises when dtypes differ, found by a trial load; None if it converts."""

    class Memory(filesystem.FileSystem):
        @contextlib.contextmanager
        def create_stream(self, *_arguments: Any) -> Any:
            yield io.BytesIO(blob.getvalue())

    class Planner(DefaultLoadPlanner):
        dtype = torch.float32

        def resolve_tensor(self, _item: ReadItem) -> torch.Tensor:
            return torch.zeros(1, dtype=self.dtype, device="cpu")

    torch.save(torch.zeros(1, device="cpu"), blob := io.BytesIO())
    origin, size = torch.Size([0]), torch.Size([1])
    index = MetadataIndex("a", origin)
    item = ReadItem(LoadItemType.TENSOR, index, origin, index, origin, size)
    reader = filesystem.FileSystemReader("")
    reader.fs = Memory()
    reader.storage_data = {index: filesystem._StorageInfo("a", 0, len(blob.getvalue()))}
    plan, planner = LoadPlan([item]), Planner()
    try:
        reader.read_data(plan, planner).wait()
    except Exception:  # the trial itself does not work with this torch
        return None
    planner.dtype = torch.float64
    try:
        reader.read_data(plan, planner).wait()
    except Exception as error:
        return type(error)
    return None


def _memory_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return a tensor's device, and the range of addresses of its elements there."""
    places = zip(tensor.size(), tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in places) if tensor.numel() else 0
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + span * tensor.element_size()
