"""Staging for asynchronous saves: a copy of the state, in reused memory, that training cannot change.

All tensors of a state, in any containers and objects, are copied into one *image*: a block of memory on huge pages. The
first save allocates it and later saves reuse it, so only the copy itself blocks training; threads copy in parallel,
without the GIL. Everything else is copied by copy.deepcopy(), which gets the copied tensors through its memo. As with
torch's stager, copies of tensors that share memory share memory, too, and copies keep strides and attributes.

An image is in use until the copy that stage() returned has been freed. If stage() is called again before that, it
allocates a second image. It never allocates a third, but waits. While it waits it collects garbage, because torch
leaves staged states in reference cycles (torch up to 2.9 after each save, later versions after failed saves).

The traceback of a failed save's exception refers to the staged state, and a caller may keep the exception for long. So
once the thread of a save has ended, its image no longer counts as one of the two. It is freed with the exception.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import copy
import copyreg
import ctypes
import gc
import itertools
import os
import pickle
import threading
import time
import types
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tensorferry import _core
from tensorferry.base.reprs import safe_repr
from tensorferry.checkpoint.garbage import collection_paused
from tensorferry.transfer.arrays import check_storage, is_dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAX_IMAGES = 2
# record_saver() looks for a staged tensor among this many tensors of a state: one is enough, and a state that no stager
# has made is not searched completely.
_MAX_LOOKED_AT = 64
# The maximum time to wait for an earlier save; torch's process groups have the same timeout.
_MAX_WAIT_SECONDS = 1800.0
_POLL_SECONDS = 0.005
# While _take_image() waits, it collects garbage: first at this interval, then at growing ones up to the maximum.
_FIRST_SEARCH_SECONDS = 0.1
_MAX_SEARCH_SECONDS = 10.0
_MAX_THREADS = 16
_SHARED_MEMORY = "/dev/shm"
_PIECE_NBYTES = 8 << 20  # the size that a thread copies at a time
# Large tensors are aligned to pages.
_PAGE_NBYTES = 4096
_SMALL_ALIGNMENT = 64
_MAX_ITEM_NBYTES = 16  # of complex128, the largest dtype
# The calling thread copies regions of up to this size: another thread would need longer to get the GIL than to copy.
_SMALL_NBYTES = 64 << 10
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


_all_images: weakref.WeakSet[_Block] = weakref.WeakSet()


def record_saver(tensors: Iterable[Any]) -> None:
    """Record that the current thread saves these tensors, which a stager may have made."""
    images = tuple(_all_images)
    parts = (getattr(each, "_local_tensor", each) for each in tensors) if images else ()
    plain = (each for each in parts if isinstance(each, torch.Tensor) and is_dense(each))
    # All tensors of a staged state are in the same image, so one of them is enough to find it.
    for tensor in itertools.islice((each for each in plain if each.is_cpu), _MAX_LOOKED_AT):
        for image in images:
            if tensor.numel() and image.holds(tensor.data_ptr()):
                image.saver = threading.current_thread()
                return


class Stager:
    """A stager for ``torch.distributed.checkpoint.async_save``: ``async_save(..., async_stager=Stager())``.

    Create one stager and use it for all saves. tensorferry's FileSystemWriter creates its own stager.

    Parameters
    ----------
    shared : bool
        Keep images in shared memory (/dev/shm), which avoids another copy on the way to the process of
        ``AsyncCheckpointerType.PROCESS``.
    overlap : bool
        Return a future from :meth:`stage` immediately, and copy while training continues (torch 2.9 and later). The
        state must not change before ``async_save(...).staging_completion`` is done: wait for it before the next
        ``optimizer.step()``.

    Notes
    -----
    Without ``overlap`` the state has been copied when :meth:`stage` returns, and may change. A stager holds one image
    (a block of memory) as large as the state, or two images if a save begins while the previous one is still being
    written. If both images are in use, it waits. :meth:`close` frees the images. Tensors on a GPU are copied to
    page-locked images.
    """

    # Tells torch that stage() needs no synchronization: either the copy is complete, or torch waits for the future.
    _synchronize_after_execute = False

    def __init__(self, *, shared: bool = False, overlap: bool = False) -> None:
        self.shared = shared
        self.overlap = overlap
        self._images: list[_Block] = []
        self._lock = threading.Lock()
        self._copying: Future[dict[str, Any]] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: torch need not call :meth:`synchronize_staging` after :meth:`stage`."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        """Return a copy of a state, its tensors in host memory; with ``overlap``, a future of the copy.

        Raises
        ------
        MemoryError
            There is no memory for an image; for shared memory, /dev/shm may be too small.
        TimeoutError
            Two earlier states are still in use after half an hour.
        """
        if not self.overlap:
            return self._stage(state_dict)
        self.synchronize_staging()  # wait for an earlier copy: only one state is copied at a time
        copying: Future[dict[str, Any]] = Future()

        def work() -> None:
            try:
                copying.set_result(self._stage(state_dict))
            except BaseException as error:
                copying.set_exception(error)

        self._copying = copying
        try:
            threading.Thread(target=work, name="tensorferry-stage").start()
        except RuntimeError:  # the limit of threads is reached: copy in this thread
            work()
        return copying

    @torch.no_grad()
    def _stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        plan = _Plan(state_dict)
        image = self._take_image(plan.nbytes)
        try:
            if plan.has_accelerator_tensors:
                image.lock_pages()
            staged: dict[str, Any] = plan.copy_state(state_dict, image)
        finally:
            image.reserved = False
        return staged

    def synchronize_staging(self) -> None:
        """Wait until the state that was passed to stage() may change."""
        if self._copying is not None:
            self._copying.exception()
            self._copying = None

    def close(self) -> None:
        """Release the images; one that is in use is freed later, with the tensors in it."""
        with self._lock:
            self._images.clear()

    @safe_repr
    def __repr__(self) -> str:
        images = ", ".join(f"{image.nbytes} bytes" for image in tuple(self._images)) or "none"
        given = f"shared={self.shared}, overlap={self.overlap}"
        return f"<tensorferry.checkpoint.Stager {given}: images of {images}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"shared": self.shared, "overlap": self.overlap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _take_image(self, nbytes: int) -> _Block:
        """Wait until an image is free; reserve it, and return it."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        next_search = 0.0
        interval_seconds = _FIRST_SEARCH_SECONDS
        while True:
            in_use = any(image.in_use() for image in tuple(self._images))
            if in_use and (begin := time.monotonic()) >= next_search:
                gc.collect()
                took_seconds = time.monotonic() - begin
                # A collection holds the GIL: spend at most about a tenth of the time on it.
                interval_seconds = max(
                    min(2 * interval_seconds, _MAX_SEARCH_SECONDS), 10 * took_seconds
                )
                next_search = begin + took_seconds + interval_seconds
            with self._lock:
                image = self._free_image(nbytes)
                if image is not None:
                    image.reserved, image.saver = True, None
                    return image
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{_MAX_IMAGES} staged states are still in use after {_MAX_WAIT_SECONDS:.0f} seconds: "
                    "is a save stuck, or does something keep the return value of stage() or a failed save's exception?"
                )
            time.sleep(_POLL_SECONDS)

    def _free_image(self, nbytes: int) -> _Block | None:
        """Return a free image, or a new one if the limit is not reached; otherwise None."""
        # A save is over when its thread has ended. Only the save's exception can then still refer to the state, so its
        # image no longer counts towards the limit.
        self._images = [i for i in self._images if not (i.in_use() and i.is_saved())]
        free = [image for image in self._images if not image.in_use()]
        # Drop free images that are too small before allocating a new one.
        self._images = [i for i in self._images if i not in free or i.nbytes >= nbytes]
        image = next((i for i in free if i.nbytes >= nbytes), None)
        if image is None and len(self._images) < _MAX_IMAGES:
            del free
            image = (_SharedImage if self.shared else _PrivateImage)(nbytes)
            self._images.append(image)
            # Only a complete image may be in this set, because other threads call methods of all images in it.
            _all_images.add(image)
        return image


@dataclass
class _Region:
    """A range of a storage that is copied as a unit, so that overlapping tensors also overlap in the image."""

    storage: torch.UntypedStorage
    begin: int  # in the storage
    end: int
    offset: int = 0  # in the image


class _Plan:
    """Assigns the tensors of a state to offsets in an image."""

    @collection_paused()
    def __init__(self, state: object) -> None:
        self.nbytes = 0
        self.has_accelerator_tensors = False
        self._regions: dict[tuple[object, ...], list[_Region]] = {}  # by storage, sorted by offset
        # For each region, by its id: the storage in the image that the copies of all tensors of the region share, and
        # the region's offset there. A storage has one region, at offset 0; in a shared image it has all regions.
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        finder = _Finder()
        finder.dump(state)
        self._tensors = finder.tensors
        # For each tensor, a function that makes its copy. The copy of a tensor in a region only refers to the region's
        # memory in the image; _copy_all() copies the elements there.
        self._recipes = [self._recipe(tensor) for tensor in self._tensors]
        for regions in self._regions.values():
            if len(regions) > 1:
                regions[:] = _merge_overlapping(regions)
            for region in regions:
                region.offset = self._reserve(region.end - region.begin)

    @collection_paused()
    def copy_state(self, state: Any, image: _Block) -> Any:
        """Return a copy of the state with its tensors in an image."""
        for regions in self._regions.values():
            for region in regions:
                nbytes = region.end - region.begin
                self._storages[id(region)] = image.storage(region.offset, nbytes)
        copies = [recipe(image) for recipe in self._recipes]
        self._recipes.clear()  # they refer to this plan, and would keep the image in use
        self._storages.clear()
        _copy_all([each for some in self._regions.values() for each in some], image)
        # The memo uses ids, which stay unique because this plan keeps the tensors alive until the end.
        memo: dict[int, Any] = {
            id(tensor): copied for tensor, copied in zip(self._tensors, copies, strict=True)
        }
        for tensor, copied in zip(self._tensors, copies, strict=True):
            for name, value in _attributes(tensor).items():
                if name not in _attributes(copied):  # a rebuilt wrapper may already have it
                    setattr(copied, name, copy.deepcopy(value, memo))
        return copy.deepcopy(state, memo)

    def _recipe(self, tensor: Any) -> Callable[[_Block], Any]:
        """Return a function that makes the copy of a tensor. Its argument is the image, which holds most copies."""
        if type(tensor) not in _PLAIN_CLASSES and (recipe := self._recipe_of_subclass(tensor)):
            return recipe
        if tensor.is_meta:
            return lambda _: torch.empty_like(tensor)
        # These are copied outside of the image: sparse, quantized and similar tensors, and conjugate and negative
        # views, which would lose their flag on the way to another process.
        if not is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
            return lambda _: _as_kind_of(tensor.detach().to("cpu", copy=True), tensor)
        if tensor.numel() == 0:
            return lambda _: _as_kind_of(torch.empty_like(tensor, device="cpu"), tensor)
        self.has_accelerator_tensors |= not tensor.is_cpu
        regions, begin = self._add_to_region(tensor)

        def place(_: _Block) -> torch.Tensor:
            region = regions[0]
            if len(regions) > 1:
                region = regions[bisect.bisect(regions, begin, key=lambda one: one.begin) - 1]
            storage, base = self._storages[id(region)]
            offset = (base + begin - region.begin) // tensor.element_size()
            empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
            empty.set_(storage, offset, tensor.size(), tensor.stride())
            return _as_kind_of(empty, tensor)

        return place

    def _recipe_of_subclass(self, tensor: Any) -> Callable[[_Block], Any] | None:
        if hasattr(tensor, "trigger_wait"):
            tensor.trigger_wait()  # the result of a collective that may still be running
        if hasattr(tensor, "__tensor_flatten__"):  # DTensor and other wrappers
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            recipes = {k: self._recipe(v) for k, v in parts.items() if isinstance(v, torch.Tensor)}

            def rebuild(image: _Block) -> Any:
                inner = parts | {name: recipe(image) for name, recipe in recipes.items()}
                make = type(tensor).__tensor_unflatten__
                return make(inner, context, tensor.size(), tensor.stride())

            return rebuild
        if isinstance(tensor, ShardedTensor):  # cpu() may return the tensor itself
            return lambda _: copy.deepcopy(tensor.cpu())
        return None

    def _add_to_region(self, tensor: torch.Tensor) -> tuple[list[_Region], int]:
        """Add a region for a tensor; return all regions of its storage, and the tensor's offset in the storage.

        The returned list changes later, when the constructor merges regions that overlap.
        """
        storage, itemsize = tensor.untyped_storage(), tensor.element_size()
        begin = int(tensor.storage_offset()) * itemsize
        if tensor.is_contiguous():
            end = begin + tensor.numel() * itemsize
        else:
            places = zip(tensor.size(), tensor.stride(), strict=True)
            end = begin + (1 + sum((size - 1) * stride for size, stride in places)) * itemsize
        if end > storage.nbytes():
            check_storage(tensor, "state")
        key = (tensor.device, storage.data_ptr(), storage.nbytes())
        regions = self._regions.setdefault(key, [])
        regions.append(_Region(storage, begin, end))
        return regions, begin

    def _reserve(self, nbytes: int) -> int:
        """Reserve bytes, and return their offset."""
        alignment = _PAGE_NBYTES if nbytes >= _PAGE_NBYTES else _SMALL_ALIGNMENT
        offset = -(-self.nbytes // alignment) * alignment
        self.nbytes = offset + nbytes
        return offset


def _as_kind_of(copied: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return copied elements with the class and requires_grad of the original tensor."""
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a tensor, without the inner tensors of a wrapper."""
    if type(tensor) in _PLAIN_CLASSES:
        return vars(tensor)
    if isinstance(tensor, ShardedTensor):
        return {}
    if hasattr(tensor, "__tensor_flatten__"):
        parts, _ = tensor.__tensor_flatten__()
        return {name: value for name, value in vars(tensor).items() if name not in parts}
    slots = (name for name in getattr(type(tensor), "__slots__", ()) if hasattr(tensor, name))
    return vars(tensor) | {name: getattr(tensor, name) for name in slots}


def _merge_overlapping(regions: list[_Region]) -> list[_Region]:
    """Return regions of a storage in the order of their offsets, with overlapping regions merged."""
    united: list[_Region] = []
    for region in sorted(regions, key=lambda one: one.begin):
        last = united[-1] if united else None
        if last is None or region.begin >= last.end:
            united.append(region)
        elif (region.begin, region.end) != (last.begin, last.end):
            # A tensor begins at a multiple of its item size in the storage. If the merged region begins at a multiple
            # of the largest item size, this is true in the image as well, so all elements are aligned there.
            last.begin -= last.begin % _MAX_ITEM_NBYTES
            last.end = max(last.end, region.end)
    return united


class _Nowhere:
    """A file object that discards its data."""

    def write(self, data: bytes) -> int:
        return len(data)


# Types that copy.deepcopy() does not copy.
_ATOMIC = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.CodeType, property),
    *(weakref.ref, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class _Finder(pickle.Pickler):
    """Traverses a state as copy.deepcopy() does, and collects the tensors; the pickle itself is discarded.

    It gets the same reduction of each object (``__reduce_ex__()``) as copy.deepcopy(), and traverses the parts of that
    reduction instead of pickling the object: so classes and functions need not be importable by name.
    """

    def __init__(self) -> None:
        super().__init__(_Nowhere(), 4)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        """Return a reduction that makes the pickler traverse an object's parts."""
        if value is _nothing:
            return NotImplemented
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            attributes = _attributes(value)
            return _nothing, (attributes,) if attributes else ()
        if isinstance(value, _ATOMIC) or hasattr(value, "__deepcopy__"):
            return _nothing, ()
        reduce = copyreg.dispatch_table.get(type(value))
        parts = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(parts, str):
            return _nothing, ()
        arguments, state, items, pairs = (*parts[1:5], None, None, None)[:4]
        return _nothing, (arguments, state, tuple(items or ()), tuple(pairs or ()))


def _nothing(*_parts: Any) -> None:
    """Stand in for the constructor of an object."""


def _copy_all(regions: list[_Region], image: _Block) -> None:
    """Copy regions to an image; threads copy host memory without the GIL.

    When this returns or raises, no thread and no GPU copies any more, so the memory may be freed or used again.
    """
    pieces = []
    devices = set()
    to = image.address()
    threads: list[threading.Thread] = []
    try:
        for region in regions:
            device, nbytes = region.storage.device, region.end - region.begin
            if device.type == "cpu":
                begin = region.storage.data_ptr() + region.begin
                if nbytes <= _SMALL_NBYTES:
                    ctypes.memmove(to + region.offset, begin, nbytes)
                    continue
                for at in range(0, nbytes, _PIECE_NBYTES):
                    size = min(_PIECE_NBYTES, nbytes - at)
                    pieces.append((to + region.offset + at, begin + at, size))
                continue
            source = _bytes_of(region.storage, region.begin, nbytes)
            copied = _bytes_of(*image.storage(region.offset, nbytes), nbytes)
            if device.type == "cuda":
                devices.add(device)
            copied.copy_(source, non_blocking=image.pages_locked and device.type == "cuda")
        queue = iter(pieces)

        def work() -> None:
            for piece in queue:
                ctypes.memmove(*piece)

        count = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces)) - 1
        # At the limit of threads, those that run share the work.
        with contextlib.suppress(RuntimeError):
            for _ in range(count):
                threads.append(threading.Thread(target=work))
                threads[-1].start()
        work()
    finally:
        pieces.clear()  # after an interruption, the threads find no further piece
        for thread in threads:
            if thread.is_alive():  # one may not have been started
                thread.join()
        for device in devices:
            torch.cuda.synchronize(device)


def _bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a storage as a tensor."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, begin, (nbytes,), (1,))


class _Block(abc.ABC):
    """A block of memory for the tensors of a staged state.

    Set ``reserved`` once :meth:`in_use` returns False; clear it when the tensors exist. In between it keeps another
    call of stage() from taking the block, which no tensor refers to yet.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.reserved = False
        self.pages_locked = False
        # The thread that saves the current tensors, once it has begun.
        self.saver: threading.Thread | None = None

    @abc.abstractmethod
    def address(self) -> int:
        """Return the address of the block."""

    @abc.abstractmethod
    def in_use(self) -> bool:
        """Return whether the block is reserved, or a tensor in it is alive."""

    @abc.abstractmethod
    def storage(self, offset: int, nbytes: int) -> tuple[torch.UntypedStorage, int]:
        """Return a storage with a part of the block, and the offset of that part in the storage."""

    def is_saved(self) -> bool:
        """Return whether the save of the current tensors is known to be over."""
        return not self.reserved and self.saver is not None and not self.saver.is_alive()

    def holds(self, address: int) -> bool:
        """Return whether an address is inside the block."""
        return 0 <= address - self.address() < self.nbytes

    def lock_pages(self) -> None:
        """Lock the block's pages in memory, if there is a GPU, which then copies to them directly."""
        if torch.cuda.is_available() and not self.pages_locked:
            self.pages_locked = _cuda("cudaHostRegister")(self.address(), self.nbytes, 0) == 0

    def __del__(self) -> None:
        if self.pages_locked:
            _cuda("cudaHostUnregister")(self.address())


class _PrivateImage(_Block):
    """Private memory of this process, on huge pages."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        memory, _ = _core.allocate(max(nbytes, 1), False)
        self._view = memoryview(memory)
        self._borrow: weakref.ref[memoryview] | None = None

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._view))

    def in_use(self) -> bool:
        return self.reserved or (self._borrow is not None and self._borrow() is not None)

    def storage(self, offset: int, nbytes: int) -> tuple[torch.UntypedStorage, int]:
        # All storages refer to this view, so a weak reference to it shows whether any storage is alive. Each storage
        # has only the bytes of its region.
        view = self._borrow() if self._borrow is not None else None
        if view is None:
            view = memoryview(self._view)
            self._borrow = weakref.ref(view)
        part = torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)
        return part.untyped_storage(), 0


class _SharedImage(_Block):
    """One shared storage; processes pass its file descriptor to each other."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        status = os.statvfs(_SHARED_MEMORY)
        free_nbytes = status.f_bavail * status.f_frsize
        if nbytes > free_nbytes:
            raise MemoryError(
                f"{_SHARED_MEMORY} has {free_nbytes} bytes left, and the state needs {nbytes} (remedy: enlarge it, "
                "as by docker's --shm-size, or shared=False)"
            )
        storage = torch.UntypedStorage(max(nbytes, 1), device="cpu")  # type: ignore[no-untyped-call]
        self._storage: torch.UntypedStorage = storage.share_memory_()
        self._idle_count = self._use_count()

    def address(self) -> int:
        return self._storage.data_ptr()

    def in_use(self) -> bool:
        return self.reserved or self._use_count() > self._idle_count

    def storage(self, offset: int, nbytes: int) -> tuple[torch.UntypedStorage, int]:  # noqa: ARG002
        return self._storage, offset

    def _use_count(self) -> int:
        """Return how many tensors and other objects refer to the storage."""
        return torch._C._storage_Use_Count(self._storage._cdata)


def _cuda(name: str) -> Any:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return getattr(runtime, name)
