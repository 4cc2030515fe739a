"""Loading: torch's FileSystemReader, at the drive's speed, and verified.

All that a load needs of the files is asked for in the order in which it lies there. Planners are asked for destinations
only shortly before their bytes come, and told when they are there, by the thread that loads.
"""

from __future__ import annotations

import bisect
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

from tensorferry.base.checks import one_of
from tensorferry.base.file_locks import read_directory
from tensorferry.base.ranks import checked_broadcast
from tensorferry.base.reprs import once_made
from tensorferry.base.warned import warn
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.progress import Meter, checked_listener
from tensorferry.checkpoint.storage import delivery, hooks, sharing
from tensorferry.checkpoint.storage.contents import Contents, Item
from tensorferry.checkpoint.storage.metadata import (
    check_metadata,
    metadata_path,
    parse_metadata,
    read_metadata,
)
from tensorferry.checkpoint.storage.names import METADATA_NAME
from tensorferry.checkpoint.storage.reading import Reading
from tensorferry.transfer.remote import ObjectPath

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    import torch.distributed as dist

    from tensorferry.base.checks import Readable
    from tensorferry.base.ranks import Broadcast
    from tensorferry.checkpoint.progress import Listener, Throughput
    from tensorferry.checkpoint.storage.contents import Located
    from tensorferry.checkpoint.storage.reading import DataFile, Want
    from tensorferry.checkpoint.zipformat.blobs import Payload

Verify = Literal["read", "before", "off"]
_LEVELS = ("read", "before", "off")
_SHOWN_NAMES = 4


class FileSystemReader(filesystem.FileSystemReader):
    """Reads checkpoints of :class:`FileSystemWriter` and of torch's, for ``torch.distributed.checkpoint.load``.

    Parameters
    ----------
    path : str or PathLike, or pair of store and key
        The checkpoint's folder; also a place in a bucket, as :func:`tensorferry.open` has them.
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
    progress : function of a Progress, optional
        Called by the thread that loads, at most every 0.1 seconds and once at the end, with how far this rank has come.
        What it raises ends the load.
    broadcast : False, True or "auto"
        Whether plain tensors that several ranks of a node want, of a checkpoint that our writer saved, are read by one
        of them, in parts, and handed on by the process group. "auto": where the group moves memory of GPUs (NCCL), or
        the folder is on no local drive. All ranks must say the same.
    process_group : ProcessGroup, optional
        The one that ``load()`` is given; by default that of all ranks.

    Attributes
    ----------
    nbytes_read : int
        Bytes that the last load has read from data files.
    last_load : Throughput or None
        How many bytes the last load has given to tensors and objects of this rank, and in what time; None if it failed.

    Notes
    -----
    Checkpoints that torch wrote have a checksum for each tensor, but none for parts of it. Of those, "read" verifies
    tensors that are read whole, after their bytes have been copied; "before" verifies all.
    """

    def __init__(
        self,
        path: Readable,
        _extension_registry: Any = None,
        thread_count: int | None = None,  # noqa: ARG002 (what torch takes)
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
        hooks.keep_place(self, folder)
        self.nbytes_read = 0
        self.last_load: Throughput | None = None
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._progress = checked_listener(progress)
        self._broadcast = checked_broadcast(broadcast)
        self._group = process_group
        self._metadata: Metadata | None = None
        self._checked: Metadata | None = None
        self._global_error: Exception | None = None
        self._let_go: Callable[[], Any] = lambda: None  # of the folder

    @once_made
    def __repr__(self) -> str:
        last = self.last_load and f"{self.last_load.nbytes} bytes in {self.last_load.seconds:.3g} s"
        given = f"{str(self.path)!r}, verify={self._verify!r}"
        return f"<tensorferry.checkpoint.FileSystemReader {given}: last load {last}>"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another folder next, if one is given."""
        folder = checkpoint_id and hooks.folder(self, checkpoint_id, reads=True)
        super().reset(folder)
        hooks.keep_place(self, folder)
        self._metadata = self._checked = self._global_error = None
        self._let_go()

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Read and check `.metadata`, or that of one ``rank``.

        Raises
        ------
        CheckpointError
            It is damaged, or holds what torch does not put there.
        """
        hooks.check_folder(self)
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
        try:
            if self._changed():
                metadata = self._read_metadata_by_torch(rank)
            else:
                path = metadata_path(self.path, rank)
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
        if isinstance(metadata, _Unread):
            raise metadata.error
        # A subclass that reads by itself knows what its own metadata says.
        if metadata is not self._checked and not self._changed():
            check_metadata(metadata, str(self.path))
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata
        self._let_go()
        if hooks.has_own_files(self) or isinstance(self.path, ObjectPath):
            return
        try:  # who keeps checkpoints removes none that is being loaded
            self._let_go = read_directory(self, self.path, METADATA_NAME)
        except FileNotFoundError as error:
            why = "the checkpoint has been removed since its metadata was read"
            raise FileNotFoundError(
                error.errno, f"{error.strerror}; {why}", str(self.path)
            ) from None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify what this rank is going to read, with ``verify="before"``: a failure ends the load on all ranks."""
        if changed := self._changed():
            if self._verify == "before":
                raise ValueError(
                    f"verify: 'before' is not possible, as {type(self).__name__} changes {', '.join(sorted(changed))}"
                )
            if self._verify != "off":
                hooks.tell(
                    self, changed, "nothing is verified (verify='off' says that this is known)"
                )
            return super().prepare_local_plan(plan)
        if self._verify == "before":
            self._contents().verify(plan.items)
        plan = super().prepare_local_plan(plan)
        return sharing.offered(plan, self._broadcast, self._group, self.path)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Find what ranks are to share."""
        plans = super().prepare_global_plan(plans)
        return plans if self._changed() else sharing.shared(plans, self._contents)

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
        self.last_load = None
        meter = Meter(self._progress)
        try:
            if self._changed():
                self._read_by_torch(plan, planner, meter)
            else:
                load = PlanLoad(self._contents(), planner, meter)
                load.read(plan, self._group, lambda own: self._read_own(own, load, planner, meter))
                self.nbytes_read = load.nbytes_read
        finally:
            self._let_go()
        self.last_load = meter.finish()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_own(self, plan: LoadPlan, load: PlanLoad, planner: LoadPlanner, meter: Meter) -> None:
        """Read what this rank has for itself, some of it perhaps by torch's code."""
        contents = self._contents()
        by_torch = contents.transformed(plan.items)
        if by_torch and self._verify != "off":
            contents.verify(by_torch)
        chosen = {id(request) for request in by_torch}
        meter.expect(contents.nbytes_of(by_torch), files=0)
        load.read_own([each for each in plan.items if id(each) not in chosen])
        if by_torch:
            self._read_by_torch(dataclasses.replace(plan, items=by_torch), planner, meter)

    def _read_by_torch(self, plan: LoadPlan, planner: LoadPlanner, meter: Meter) -> None:
        """Have torch's code read what a plan asks for; no planner gets a blob from it that may run code."""
        checked: Any = planner if self._trust_pickle else _Checked(planner, self._contents())
        super().read_data(plan, checked).wait()
        infos = (self.storage_data[item.storage_index] for item in plan.items)
        meter.add(sum(getattr(info, "length", 0) for info in infos))

    def _read_metadata_by_torch(self, rank: int | None) -> Metadata:
        """Read metadata where torch's code would, without what it would run."""
        path: str | os.PathLike[str]
        if hasattr(self, "_get_metadata_path"):
            path = self._get_metadata_path(rank)
        else:  # before torch 2.9
            path = self.fs.concat_path(self.path, METADATA_NAME)
        with self.fs.create_stream(path, "rb") as stream:
            data = stream.read()
        return parse_metadata(data, str(path), trust_pickle=self._trust_pickle)

    def _changed(self) -> frozenset[str]:
        """Return what a subclass has changed that only torch's code uses."""
        return hooks.changed(self, _HOOKS)

    def _contents(self) -> Contents:
        if self._metadata is None:
            raise RuntimeError("set_up_storage_reader() has not been called")
        metadata = self._metadata
        if self.storage_data is not metadata.storage_data:  # by a subclass; torch's goes by this
            metadata = dataclasses.replace(metadata, storage_data=self.storage_data)
            if not self._changed():
                check_metadata(metadata, str(self.path))
        return Contents(
            self.path, metadata, verify=self._verify != "off", trusted=self._trust_pickle
        )


_HOOKS = hooks.hooks_of(FileSystemReader, filesystem.FileSystemReader)


class PlanLoad:
    """Reads what a plan asks for: what a rank has for itself, and what it shares with others.

    Parameters
    ----------
    contents : Located
        Where that lies.
    planner : LoadPlanner
        Who is asked where it goes.
    meter : Meter
        Told of bytes that have arrived.
    converts : bool
        Whether they may have another dtype there.

    Attributes
    ----------
    nbytes_read : int
        Bytes that have been read from data files.
    """

    def __init__(
        self, contents: Located, planner: LoadPlanner, meter: Meter, *, converts: bool = False
    ) -> None:
        self.nbytes_read = 0
        self._contents: Any = contents
        self._planner = planner
        self._meter = meter
        self._converts = converts
        self._narrowed = Narrowed()

    def read(
        self,
        plan: LoadPlan,
        group: dist.ProcessGroup | None,
        read_own: Callable[[LoadPlan], None] | None = None,
    ) -> None:
        """Read all; ``read_own`` what this rank has for itself, by default :meth:`read_own`."""
        read_own = read_own or (lambda own: self.read_own(own.items))
        if isinstance(plan.storage_data, sharing.Share):
            self._read_shared(plan.storage_data, plan, group, read_own)
        else:
            read_own(plan)
        self._narrowed.warn()

    def read_own(self, items: list[ReadItem]) -> None:
        """Read items of a plan."""
        by_file = self._contents.locate(items)
        nbytes = sum(item.nbytes for items in by_file.values() for item in items)
        self._meter.expect(nbytes, files=len(by_file))
        with Reading(lambda: self._meter.add(0, files=1)) as reading:
            self._read(reading, by_file, self._planner, self._meter.add)

    def _read_shared(
        self,
        share: sharing.Share,
        plan: LoadPlan,
        group: dist.ProcessGroup | None,
        read_own: Callable[[LoadPlan], None],
    ) -> None:
        """Read what this rank has for itself, then its part of what ranks share."""
        shared = sharing.shared_items(share, plan)
        chosen = {id(item) for item in shared}

        def read(boxes: list[tuple[sharing.SharedBox, torch.Tensor]]) -> None:
            requests = [(piece.request, box) for piece, box in boxes]
            lent: Any = Lent(requests)
            with Reading() as reading:
                by_file = self._contents.locate([request for request, _ in requests])
                self._read(reading, by_file, lent, lambda _: None)

        resolve = functools.partial(
            _resolved, self._planner, self._narrowed, converts=self._converts
        )
        commit, count = self._planner.commit_tensor, self._meter.add
        arrivals = sharing.Arrivals(shared, resolve, commit, count)
        exchange = sharing.Exchange(share, group, read, arrivals.add)
        failure: BaseException | None = None
        try:
            self._meter.expect(sharing.nbytes_of(share), files=0)
            own = [item for item in plan.items if id(item) not in chosen]
            read_own(dataclasses.replace(plan, items=own))
        except BaseException as error:
            failure = error
        exchange.run(failure)

    def _read(
        self,
        reading: Reading,
        by_file: dict[str, list[Item]],
        planner: LoadPlanner,
        count: Callable[[int], None],
    ) -> None:
        load = ItemLoad(
            self._contents,
            reading,
            planner,
            count,
            converts=self._converts,
            narrowed=self._narrowed,
        )
        self._contents.read(reading, by_file, load.begin)
        self.nbytes_read += reading.nbytes_read


class _Unread:
    """What stands for metadata that could not be read, until torch uses it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error


class Lent:
    """A planner that lends memory for pieces of tensors."""

    def __init__(self, requests: list[tuple[ReadItem, torch.Tensor]]) -> None:
        self._requests = requests  # which keeps the ids
        self._memory = {id(request): memory for request, memory in requests}

    def resolve_tensor(self, request: ReadItem) -> torch.Tensor:
        """Return the memory for an item."""
        return self._memory[id(request)]

    def commit_tensor(self, request: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is to be done."""


class Narrowed:
    """Tensors whose destinations have a dtype that cannot hold what was saved."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def note(self, name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
        """Take note of a tensor, if its destination has such a dtype."""
        try:
            narrows = torch.promote_types(stored, wanted) != wanted
        except RuntimeError:  # of what has eight bits or fewer
            narrows = wanted.itemsize <= stored.itemsize
        if narrows and stored != wanted:
            self._found[name] = f"{stored} to {wanted}"

    def warn(self) -> None:
        """Say which they are."""
        if self._found:
            shown = [f"{name!r} ({how})" for name, how in list(self._found.items())[:_SHOWN_NAMES]]
            more = len(self._found) - len(shown)
            names = ", ".join(shown) + (f" and {more} more" if more else "")
            warn(f"values of tensors are converted to what may not hold them: {names}")


class ItemLoad:
    """Reads items to where a planner wants them; ``converts`` says whether they may have another dtype there."""

    def __init__(
        self,
        contents: Contents,
        reading: Reading,
        planner: LoadPlanner,
        count: Callable[[int], None],
        *,
        converts: bool = False,
        narrowed: Narrowed | None = None,
    ) -> None:
        self._narrowed = narrowed or Narrowed()
        self._contents = contents
        self._converts = converts
        self._reading = reading
        self._planner = planner
        self._checked = _Checked(planner, contents)
        self._count = count
        self._held = _HeldMemory()
        self._boxes = delivery.Boxes()
        # torch's reader commits each item before it asks for the next one, and planners that do something there may go
        # by that: Megatron's keeps the last item for it.
        self._one_by_one = isinstance(planner, LoadPlanner) and (
            getattr(planner.commit_tensor, "__func__", None) is not DefaultLoadPlanner.commit_tensor
        )

    def begin(self, item: Item, file: DataFile) -> Iterator[Want]:
        """Return what an item wants of its file."""
        request, payload = item.request, item.payload
        if self._one_by_one:
            self._reading.drain()
        if request.type == LoadItemType.BYTE_IO:
            return self._blob(item, file, functools.partial(self._checked.load_bytes, request))
        target = _resolved(
            self._planner, self._narrowed, request, item.dtype, converts=self._converts
        )
        if payload is None:
            return self._blob(
                item, file, lambda data: self._copy_by_torch(item, file, data, target)
            )
        return self._tensor(item, payload, file, target)

    def _tensor(
        self, item: Item, payload: Payload, file: DataFile, target: torch.Tensor
    ) -> Iterator[Want]:
        plain = delivery.is_plain(target) and not (payload.conj or payload.neg)
        held = self._held.add(target) if plain else None
        if plain and held is None:
            # Two items for the same memory: the later one wins, and a planner may lend the same memory twice.
            self._reading.drain()
            held = self._held.add(target)
        request = item.request
        inner = target
        if not plain:
            inner = torch.empty(request.lengths, dtype=item.dtype, device="cpu")
        takes_crc = item.is_whole and self._contents.has_only_payload_crc(item, file)

        def finish() -> None:
            if takes_crc:
                self._contents.check_payload(item, file, whole.crc)
            if held is None:
                target.copy_(delivery.resolved(inner, payload))
            else:
                self._held.remove(held)
                if not target.is_inference():  # autograd does not see where bytes are copied
                    torch.autograd.graph.increment_version(target)
            self._planner.commit_tensor(request, target)

        whole = delivery.Delivery(item.nbytes, finish, self._count, takes_crc=takes_crc)
        return whole.begin(item.deliver(whole, inner, file.gap_nbytes, self._boxes))

    def _blob(
        self, item: Item, file: DataFile, use: Callable[[io.BytesIO], None]
    ) -> Iterator[Want]:
        """Read a blob into memory, and call ``use`` with a file of it."""
        data = bytearray(item.info.length)

        def finish() -> None:
            stream = io.BytesIO(data)
            self._contents.check_blob(item, file, stream)
            stream.seek(0)
            use(stream)

        begin = item.info.offset
        return delivery.collected([(begin, begin + len(data), data)], finish, self._count)

    def _copy_by_torch(
        self, item: Item, file: DataFile, data: io.BytesIO, target: torch.Tensor
    ) -> None:
        """Do as torch's reader does, with what it alone knows to read."""
        request = item.request
        self._contents.check_tensor_blob(item, file, data)
        with torch.device("cpu"):  # sparse ones would be made on the default device
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
        with torch.no_grad():
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
    """The memory of destinations that are being filled; none of it twice."""

    def __init__(self) -> None:
        # By storage, in order: what is held has no byte in common.
        self._begins: dict[tuple[str, int], list[int]] = {}
        self._ends: dict[tuple[str, int], list[int]] = {}

    def add(self, target: torch.Tensor) -> tuple[tuple[str, int], int] | None:
        """Hold the memory of a tensor; None if some of it is held."""
        key, begin, end = _memory_of(target)
        if begin == end:
            return key, _NOTHING
        begins, ends = self._begins.setdefault(key, []), self._ends.setdefault(key, [])
        at = bisect.bisect_right(begins, begin)
        if (at and ends[at - 1] > begin) or (at < len(begins) and begins[at] < end):
            return None
        begins.insert(at, begin)
        ends.insert(at, end)
        return key, begin

    def remove(self, held: tuple[tuple[str, int], int]) -> None:
        """Let go of it."""
        key, begin = held
        if begin == _NOTHING:
            return
        begins, ends = self._begins[key], self._ends[key]
        at = bisect.bisect_left(begins, begin)
        del begins[at], ends[at]
        if not begins:
            del self._begins[key], self._ends[key]


_NOTHING = -1


def _resolved(
    planner: LoadPlanner,
    narrowed: Narrowed,
    request: ReadItem,
    stored: torch.dtype | None,
    *,
    converts: bool = False,
) -> torch.Tensor:
    """Return where the planner wants an item; what cannot go there is refused."""
    target = planner.resolve_tensor(request)
    if target.layout is torch.strided:  # what another one gets would not reach the planner's
        target = target.detach()
    if stored is not None and target.dtype != stored:
        # Where torch's reader does not; versions up to 2.15 convert it.
        if not converts and (kind := _torchs_refusal()) is not None:
            raise kind(f"req {request.storage_index} mismatch dtypes {target.dtype} vs {stored}")
        narrowed.note(request.storage_index.fqn, stored, target.dtype)
    if target.size() != torch.Size(request.lengths):
        raise AssertionError(
            f"req {request.storage_index} mismatch sizes {target.size()} vs {torch.Size(request.lengths)}"
        )
    return target


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
