"""Staging for asynchronous saves: a copy of the state that training may change behind it, in memory that is used again.

All tensors are copied into one *image*: a block of memory on huge pages, allocated by the first save and kept for the
next ones, so that only the copy itself blocks training; threads copy in parallel, without the GIL. Everything else is
copied by copy.deepcopy().

An image is lent to what stage() returns and comes back when that is gone. Who stages again before gets a second image;
a third is not made, the caller waits. What only seems to be in use is let go of first: torch leaves staged states in
reference cycles (up to 2.9 after each save, later after failed ones), and failed saves keep theirs in the traceback
of their exception.
"""

from __future__ import annotations

import abc
import bisect
import copy
import ctypes
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tensorferry import _core
from tensorferry.arrays import check_storage, is_plain
from tensorferry.reprs import once_made

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

_MAX_IMAGES = 2
# How long a save may take that another one waits for; torch's process groups give up after the same time.
_MAX_WAIT_SECONDS = 1800.0
_POLL_SECONDS = 0.005
# Garbage is looked for at growing intervals while one waits.
_FIRST_SEARCH_SECONDS = 0.1
_MAX_SEARCH_SECONDS = 10.0
_CHECKPOINT_CODE = os.path.join(os.path.dirname(checkpoint.__file__), "")  # noqa: PTH118, PTH120
_MAX_THREADS = 16
_SHARED_MEMORY = "/dev/shm"
_PIECE_NBYTES = 8 << 20
# Large tensors begin with a page.
_PAGE_NBYTES = 4096
_SMALL_ALIGNMENT = 64
_MAX_ITEM_NBYTES = 16


class Stager:
    """Stages for ``torch.distributed.checkpoint.async_save``: ``async_save(..., async_stager=Stager())``.

    Make one and keep it for all saves. tensorferry's FileSystemWriter has one of its own, and needs none.

    Parameters
    ----------
    shared : bool
        Keep images in shared memory (/dev/shm), so that nothing is copied again on the way to the process of
        ``AsyncCheckpointerType.PROCESS``.
    overlap : bool
        Return from :meth:`stage` at once with a future, and copy while training goes on (torch 2.9 and later). The
        state must not change before ``async_save(...).staging_completion`` is done: wait for it before the next
        ``optimizer.step()``.

    Notes
    -----
    Without ``overlap`` everything has been copied when :meth:`stage` returns, and the state may change. A stager holds
    one image as large as the state, or two where a save begins while the one before is still being written; with two
    of them on their way it waits. :meth:`close` frees them. Tensors on a GPU are copied to page-locked images.
    """

    # To torch: there is nothing to wait for after stage(), or the future is what to wait for.
    _synchronize_after_execute = False

    def __init__(self, *, shared: bool = False, overlap: bool = False) -> None:
        self.shared = shared
        self.overlap = overlap
        self._images: list[_Image] = []
        self._lock = threading.Lock()
        self._copying: Future[dict[str, Any]] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: there is nothing to wait for."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        """Return a copy of a state, its tensors in host memory; with ``overlap``, a future of it.

        Raises
        ------
        MemoryError
            There is no memory for it; for shared memory, /dev/shm may be too small.
        TimeoutError
            Two earlier states have not been let go of for half an hour.
        """
        if not self.overlap:
            return self._stage(state_dict)
        self.synchronize_staging()  # one at a time: the state of each is that of its call
        copying: Future[dict[str, Any]] = Future()

        def work() -> None:
            try:
                copying.set_result(self._stage(state_dict))
            except BaseException as error:
                copying.set_exception(error)

        self._copying = copying
        try:
            threading.Thread(target=work, name="tensorferry-stage").start()
        except RuntimeError:  # a limit of processes: without overlap, then
            work()
        return copying

    @torch.no_grad()
    def _stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        plan = _Plan(state_dict)
        image = self._take_image(plan)
        try:
            staged: dict[str, Any] = copy.deepcopy(state_dict, plan.copy_into(image))
        finally:
            image.reserved = False
        return staged

    def synchronize_staging(self) -> None:
        """Wait until what stage() was called with may change."""
        if self._copying is not None:
            self._copying.exception()
            self._copying = None

    def close(self) -> None:
        """Let the images go; one that is lent stays until it is given back."""
        with self._lock:
            self._images.clear()

    @once_made
    def __repr__(self) -> str:
        images = ", ".join(f"{image.nbytes} bytes" for image in tuple(self._images)) or "none"
        given = f"shared={self.shared}, overlap={self.overlap}"
        return f"<tensorferry.checkpoint.Stager {given}: images of {images}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"shared": self.shared, "overlap": self.overlap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _take_image(self, plan: _Plan) -> _Image:
        """Return an image that nobody uses, reserved."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        search = _Search()
        while True:
            if any(image.in_use() for image in tuple(self._images)):
                search.go_on()
            with self._lock:
                image = self._free_image(plan.nbytes)
                if image is not None:
                    image.reserved = True
                    break
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{_MAX_IMAGES} staged states are still in use after {_MAX_WAIT_SECONDS:.0f} seconds: "
                    "is a save stuck, or what stage() returned kept?"
                )
            time.sleep(_POLL_SECONDS)
        if plan.has_accelerator_tensors:
            image.lock_pages()
        return image

    def _free_image(self, nbytes: int) -> _Image | None:
        """Return an image that nobody uses, a new one if there may be one more."""
        free = [image for image in self._images if not image.in_use()]
        # Those that are too small go before a new one comes.
        self._images = [i for i in self._images if i not in free or i.nbytes >= nbytes]
        image = next((i for i in free if i.nbytes >= nbytes), None)
        if image is None and len(self._images) < _MAX_IMAGES:
            del free
            image = (_SharedImage if self.shared else _PrivateImage)(nbytes)
            self._images.append(image)
        return image


class _Search:
    """Looks for states that are kept by garbage and by tracebacks alone, and lets go of them."""

    def __init__(self) -> None:
        self._next = 0.0
        self._interval_seconds = 0.0

    def go_on(self) -> None:
        """Search at once when first called, for garbage alone, and then every now and then."""
        begin = time.monotonic()
        if begin < self._next:
            return
        gc.collect()
        if self._interval_seconds > 0:
            _forget_failed_saves()
        took_seconds = time.monotonic() - begin
        self._interval_seconds = max(
            min(2 * self._interval_seconds, _MAX_SEARCH_SECONDS),
            10 * took_seconds,  # others need the GIL
            _FIRST_SEARCH_SECONDS,
        )
        self._next = begin + took_seconds + self._interval_seconds


def _forget_failed_saves() -> None:
    """Cut the tracebacks of exceptions that somebody keeps where they go through torch's code for checkpoints.

    Its frames and functions refer to staged states. What went wrong, and where, stays in the text of torch's exception.
    """
    for tracked in gc.get_objects():
        if issubclass(type(tracked), BaseException):
            above, here = None, tracked.__traceback__
            while here is not None and not _is_torchs_checkpointing(here):
                above, here = here, here.tb_next
            if above is None:
                tracked.__traceback__ = None
            elif here is not None:
                above.tb_next = None


def _is_torchs_checkpointing(here: types.TracebackType) -> bool:
    return here.tb_frame.f_code.co_filename.startswith(_CHECKPOINT_CODE)


@dataclass
class _Region:
    """Bytes of a storage that go to an image together: tensors that overlap here overlap there."""

    storage: torch.UntypedStorage
    begin: int  # in the storage
    end: int
    offset: int = 0  # in the image

    def bytes(self) -> torch.Tensor:
        """Return them."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.begin, (self.end - self.begin,), (1,))


class _Plan:
    """Which tensors of a state go where in an image."""

    def __init__(self, state: object) -> None:
        self.nbytes = 0
        self.has_accelerator_tensors = False
        # Of contiguous tensors, by storage and in its order. Others have an offset of their own.
        self._regions: dict[tuple[object, ...], list[_Region]] = {}
        self._offsets: dict[tuple[object, ...], int] = {}
        self._copied: dict[tuple[object, ...], torch.Tensor] = {}
        self._moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        # How to make the copy of each tensor, by its id.
        self._recipes = {id(tensor): self._recipe(tensor) for tensor in _tensors_in(state)}
        for regions in self._regions.values():
            regions[:] = _united(regions)
            for region in regions:
                region.offset = self._reserve(region.end - region.begin)

    def copy_into(self, image: _Image) -> dict[int, Any]:
        """Copy the tensors, and return a memo for copy.deepcopy() that has the copies."""
        for regions in self._regions.values():
            for region in regions:
                source = region.bytes()
                copied = image.tensor(region.offset, source.dtype, source.size(), source.stride())
                self._moves.append((copied, source))
        memo = {key: recipe(image) for key, recipe in self._recipes.items()}
        _copy_all(self._moves, image.pages_locked)
        self._recipes.clear()  # they refer to this plan, which has the copies
        return memo

    def _recipe(self, tensor: Any) -> Callable[[_Image], Any]:
        if hasattr(tensor, "trigger_wait"):
            tensor.trigger_wait()  # the result of a collective that may be on its way
        if hasattr(tensor, "__tensor_flatten__"):  # DTensor and other wrappers
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            recipes = {k: self._recipe(v) for k, v in parts.items() if isinstance(v, torch.Tensor)}

            def rebuild(image: _Image) -> Any:
                inner = parts | {name: recipe(image) for name, recipe in recipes.items()}
                make = type(tensor).__tensor_unflatten__
                return make(inner, context, tensor.size(), tensor.stride())

            return rebuild
        if isinstance(tensor, ShardedTensor):  # which cpu() may return as it is
            return lambda _: copy.deepcopy(tensor.cpu())
        if not is_plain(tensor):  # sparse, quantized, ...
            return lambda _: tensor.detach().to("cpu", copy=True)
        if tensor.numel() == 0:
            return lambda _: torch.empty_like(tensor, device="cpu")
        check_storage(tensor, "state")
        self.has_accelerator_tensors |= not tensor.is_cpu
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            find = self._add_to_region(tensor)
            return lambda image: self._tensor(image, find(), tensor, tensor.stride())
        return self._own_place(tensor)

    def _add_to_region(self, tensor: torch.Tensor) -> Callable[[], int]:
        """Return a function that tells the tensor's offset, once all are known."""
        storage = tensor.untyped_storage()
        begin = int(tensor.storage_offset()) * tensor.element_size()
        key = (tensor.device, storage.data_ptr(), storage.nbytes())
        regions = self._regions.setdefault(key, [])
        regions.append(_Region(storage, begin, begin + tensor.nbytes))

        def find() -> int:
            region = regions[bisect.bisect(regions, begin, key=lambda one: one.begin) - 1]
            return region.offset + begin - region.begin

        return find

    def _own_place(self, tensor: torch.Tensor) -> Callable[[_Image], Any]:
        key = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if key not in self._offsets:
            self._offsets[key] = self._reserve(tensor.nbytes)
        offset = self._offsets[key]

        def begin_copy(image: _Image) -> torch.Tensor:
            # The strides of clone(): as they are where the elements fill their memory, else as for a new tensor.
            stride = torch.empty_like(tensor, device="meta").stride()
            known = len(self._copied)
            copied = self._tensor(image, offset, tensor, stride)
            if len(self._copied) > known:
                # torch copies no integers of few bits; whatever has one byte is copied as such.
                if tensor.element_size() == 1:
                    self._moves.append((copied.view(torch.uint8), tensor.view(torch.uint8)))
                else:
                    self._moves.append((copied, tensor))
            return copied

        return begin_copy

    def _reserve(self, nbytes: int) -> int:
        """Return the offset of that many bytes."""
        alignment = _PAGE_NBYTES if nbytes >= _PAGE_NBYTES else _SMALL_ALIGNMENT
        offset = -(-self.nbytes // alignment) * alignment
        self.nbytes = offset + nbytes
        return offset

    def _tensor(
        self, image: _Image, offset: int, like: torch.Tensor, stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the tensor in the image at an offset; the same for tensors that are the same memory."""
        key = (offset, like.dtype, like.size(), stride, like.requires_grad)
        if key not in self._copied:
            copied = image.tensor(offset, like.dtype, like.size(), stride)
            self._copied[key] = copied.requires_grad_(like.requires_grad)
        return self._copied[key]


def _united(regions: list[_Region]) -> list[_Region]:
    """Return regions of a storage in its order, those that overlap as one."""
    united: list[_Region] = []
    for region in sorted(regions, key=lambda one: one.begin):
        last = united[-1] if united else None
        if last is None or region.begin >= last.end:
            united.append(region)
        elif (region.begin, region.end) != (last.begin, last.end):
            last.begin -= last.begin % _MAX_ITEM_NBYTES  # so that elements of all are aligned
            last.end = max(last.end, region.end)
    return united


def _tensors_in(state: object) -> Iterator[torch.Tensor]:
    """Yield each tensor that containers of a state hold."""
    seen: set[int] = set()
    stack = [state]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield value
        elif isinstance(value, Mapping):
            seen.add(id(value))
            stack.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            seen.add(id(value))
            stack.extend(value)


def _copy_all(moves: list[tuple[torch.Tensor, torch.Tensor]], pages_locked: bool) -> None:
    """Copy tensors; plain memory by threads without the GIL."""
    pieces = []
    devices = set()
    for copied, tensor in moves:
        if (
            tensor.is_cpu
            and tensor.stride() == copied.stride()
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        ):
            to, source, nbytes = copied.data_ptr(), tensor.data_ptr(), tensor.nbytes
            for begin in range(0, nbytes, _PIECE_NBYTES):
                pieces.append((to + begin, source + begin, min(_PIECE_NBYTES, nbytes - begin)))
        else:
            copied.detach().copy_(tensor, non_blocking=pages_locked and tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
    queue = iter(pieces)

    def work() -> None:
        for piece in queue:
            ctypes.memmove(*piece)

    count = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces)) - 1
    threads = [threading.Thread(target=work) for _ in range(count)]
    for at, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:  # a limit of processes: those that run, and this one, do all
            del threads[at:]
            break
    work()
    for thread in threads:
        thread.join()
    for device in devices:
        torch.cuda.synchronize(device)


class _Image(abc.ABC):
    """A block of memory, lent as tensors.

    Who wants to use it sets ``reserved``, when :meth:`in_use` says no, until the tensors are made.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.reserved = False
        self.pages_locked = False

    @abc.abstractmethod
    def address(self) -> int:
        """Return where it begins."""

    @abc.abstractmethod
    def in_use(self) -> bool:
        """Return whether it is reserved, or some tensor in it is still there."""

    @abc.abstractmethod
    def tensor(
        self, offset: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a tensor that begins at an offset, in bytes."""

    def lock_pages(self) -> None:
        """Let GPUs copy into it directly."""
        if not self.pages_locked and torch.cuda.is_available():
            self.pages_locked = _cuda("cudaHostRegister")(self.address(), self.nbytes, 0) == 0

    def __del__(self) -> None:
        if self.pages_locked:
            _cuda("cudaHostUnregister")(self.address())


class _PrivateImage(_Image):
    """Memory of this process, on huge pages."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        memory, _ = _core.allocate(max(nbytes, 1), False)
        self._view = memoryview(memory)
        self._borrow: weakref.ref[memoryview] | None = None

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._view))

    def in_use(self) -> bool:
        return self.reserved or (self._borrow is not None and self._borrow() is not None)

    def tensor(
        self, offset: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        # Storages refer to this view, and so tell whether there are any. Each has just its tensor's bytes.
        view = self._borrow() if self._borrow is not None else None
        if view is None:
            view = memoryview(self._view)
            self._borrow = weakref.ref(view)
        count = math.prod(size) * dtype.itemsize
        part = torch.frombuffer(view, dtype=torch.uint8, count=count, offset=offset)
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            part.untyped_storage(), 0, size, stride
        )


class _SharedImage(_Image):
    """One shared storage, of which processes pass each other the descriptor."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        status = os.statvfs(_SHARED_MEMORY)
        free_nbytes = status.f_bavail * status.f_frsize
        if nbytes > free_nbytes:
            raise MemoryError(
                f"{_SHARED_MEMORY} has {free_nbytes} bytes left, and the state takes {nbytes} (remedy: enlarge it, "
                "as by docker's --shm-size, or shared=False)"
            )
        memory: Any = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu")
        self._memory: torch.Tensor = memory.share_memory_()
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def address(self) -> int:
        return self._memory.data_ptr()

    def in_use(self) -> bool:
        if self.reserved:  # who has reserved it adds tensors
            return True
        self._tensors = [reference for reference in self._tensors if reference() is not None]
        return bool(self._tensors)

    def tensor(
        self, offset: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        storage = self._memory.untyped_storage()
        empty = torch.empty(0, dtype=dtype, device="cpu")
        tensor = empty.set_(storage, offset // dtype.itemsize, size, stride)
        self._tensors.append(weakref.ref(tensor))
        return tensor


def _cuda(name: str) -> Any:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return getattr(runtime, name)
