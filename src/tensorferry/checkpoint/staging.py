"""Staging for asynchronous saves: a copy of the state, in reused memory, that training cannot change.

The tensors of a state, in dicts, lists and the other containers that torch's pytree knows, are copied into one *image*:
a block of memory on huge pages. The first save allocates it and later saves reuse it, so only the copy itself blocks
training; threads copy in parallel, without the GIL. Everything else is copied by copy.deepcopy(), which gets the copied
tensors through its memo. Copies of tensors that share memory share memory, too.

torch passes the copy to a thread or process that saves it. That thread must know two things of the call that made the
copy: to which directory relative paths of the call refer, and which image is free once the state is saved. So the copy
is a :class:`StagedState`. torch's save() iterates over it in the thread that saves, which thereby claims it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_saver
from torch.utils._pytree import tree_leaves

from tensorferry import _core
from tensorferry.base.reprs import safe_repr
from tensorferry.checkpoint.garbage import collection_paused
from tensorferry.transfer.arrays import check_storage, is_dense

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_IMAGES = 2
# The maximum time to wait for an earlier save; torch's process groups have the same timeout.
_MAX_WAIT_SECONDS = 1800.0
_POLL_SECONDS = 0.005
_MAX_THREADS = 16
_PIECE_NBYTES = 8 << 20  # the size that a thread copies at a time
# Regions of at least a page begin at a page, others at a multiple that is enough for any dtype.
_PAGE_NBYTES = 4096
_SMALL_ALIGNMENT = 64
_MAX_ITEM_NBYTES = 16  # of complex128, the largest dtype
# The calling thread copies regions of up to this size: another thread would need longer to get the GIL than to copy.
_SMALL_NBYTES = 64 << 10
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)

# Numbers the moments at which states are staged, and at which writers get other folders.
moments = itertools.count(1)


class StagedState(dict[str, Any]):
    """The copy of a state.

    Attributes
    ----------
    directory : str or None
        The working directory at the time of the call; None if that directory has been removed.
    moment : int
        The number of that time, from :data:`moments`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory: str | None = None
        with contextlib.suppress(FileNotFoundError):
            self.directory = os.getcwd()  # noqa: PTH109 (as in checks.absolute_path)
        self.moment = next(moments)
        self._caller = os.getpid(), threading.get_ident()
        self._free: Callable[[], None] = _nothing_to_free

    def release(self) -> None:
        """Let the stager use the state's memory again, although the state still exists."""
        self._free()

    def items(self) -> Any:
        """Return the items. If torch's save() asks for them, in another thread than the caller's, claim the state."""
        is_saved = sys._getframe(1).f_globals.get("__name__") == state_dict_saver.__name__
        is_new = getattr(current_claim(), "moment", None) != self.moment
        if is_saved and is_new and self._caller != (os.getpid(), threading.get_ident()):
            _claims.current = Claim(self.directory, self.moment, self._free)
        return super().items()

    def __reduce__(self) -> Any:
        # Files get a dict that torch.load() accepts.
        return OrderedDict, (), None, None, iter(dict(self).items())


class Claim:
    """The use of a staged state by the thread that saves it; once that is over, the state's image is free.

    It is over when the writer drops the claim, when the thread begins to save something else, and when the thread ends.
    """

    def __init__(self, directory: str | None, moment: int, free: Callable[[], None]) -> None:
        self.directory, self.moment = directory, moment
        weakref.finalize(self, free).atexit = False


_claims = threading.local()


def current_claim() -> Claim | None:
    """Return the claim of the current thread, or None."""
    claim: Claim | None = getattr(_claims, "current", None)
    return claim


def take_claim() -> Claim | None:
    """Return the claim of the current thread, or None; the caller keeps it until the state has been saved."""
    claim = current_claim()
    _claims.current = None
    return claim


def _nothing_to_free() -> None:
    """Do nothing, for a state that has no image."""


def _reduce_for_process(staged: StagedState) -> Any:
    # In another process, which saves the state, the image does not exist.
    attributes = vars(staged) | {"_free": _nothing_to_free}
    return StagedState, (), attributes, None, iter(dict(staged).items())


ForkingPickler.register(StagedState, _reduce_for_process)


class Stager:
    """A stager for ``torch.distributed.checkpoint.async_save``: ``async_save(..., async_stager=Stager())``.

    Create one stager and use it for all saves. tensorferry's FileSystemWriter creates its own stager.

    Parameters
    ----------
    overlap : bool
        Return a future from :meth:`stage` immediately, and copy while training continues (torch 2.9 and later). The
        state must not change before ``async_save(...).staging_completion`` is done: wait for it before the next
        ``optimizer.step()``.

    Notes
    -----
    Without ``overlap`` the state has been copied when :meth:`stage` returns, and may change. A stager holds one image
    (a block of memory) as large as the state, or two images if a save begins while the previous one is still being
    written. If both are in use, it waits. Memory is used again once the state has been saved, even if the copy still
    exists. :meth:`close` frees the images. Tensors on a GPU are copied to page-locked images; those inside objects that
    torch's pytree does not know stay on the GPU.
    """

    # Tells torch that stage() needs no synchronization: either the copy is complete, or torch waits for the future.
    _synchronize_after_execute = False

    def __init__(self, *, overlap: bool = False) -> None:
        self.overlap = overlap
        self._images: list[_Image] = []
        self._lock = threading.Lock()
        self._copying: Future[StagedState] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: torch need not call :meth:`synchronize_staging` after :meth:`stage`."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        """Return a copy of a state, its tensors in host memory; with ``overlap``, a future of the copy.

        Raises
        ------
        MemoryError
            There is no memory for an image.
        TimeoutError
            Two earlier states are still in use after half an hour.
        """
        staged = StagedState()
        if not self.overlap:
            return self._fill(staged, state_dict)
        self.synchronize_staging()  # wait for an earlier copy: only one state is copied at a time
        copying: Future[StagedState] = Future()

        def work() -> None:
            try:
                copying.set_result(self._fill(staged, state_dict))
            except BaseException as error:
                copying.set_exception(error)

        self._copying = copying
        try:
            threading.Thread(target=work, name="tensorferry-stage").start()
        except RuntimeError:  # the limit of threads is reached: copy in this thread
            work()
        return copying

    @torch.no_grad()
    def _fill(self, staged: StagedState, state: dict[str, Any]) -> StagedState:
        plan = _Plan(state)
        image = self._take_image(plan.nbytes)
        try:
            if plan.has_accelerator_tensors:
                image.lock_pages()
            staged.update(plan.copy_state(state, image))
            staged._free = image.end_use()
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
        return f"<tensorferry.checkpoint.Stager overlap={self.overlap}: images of {images}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"overlap": self.overlap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _take_image(self, nbytes: int) -> _Image:
        """Wait until an image is free; reserve it, and return it."""
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        if sum(image.in_use() for image in tuple(self._images)) == _MAX_IMAGES:
            gc.collect()  # frees states that are in use only by reference cycles
        while True:
            with self._lock:
                # Drop free images that are too small before another one is allocated.
                self._images = [i for i in self._images if i.in_use() or i.nbytes >= nbytes]
                image = next((i for i in self._images if not i.in_use()), None)
                if image is None and len(self._images) < _MAX_IMAGES:
                    image = _Image(nbytes)
                    self._images.append(image)
                if image is not None:
                    image.reserved = True
                    return image
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{_MAX_IMAGES} staged states are still in use after {_MAX_WAIT_SECONDS:.0f} seconds: is a save "
                    "stuck, or does something keep the return value of stage()?"
                )
            time.sleep(_POLL_SECONDS)


@dataclass
class _Region:
    """The range of a storage that the tensors of a state use, which is copied as a unit."""

    storage: torch.UntypedStorage
    begin: int  # in the storage
    end: int
    offset: int = 0  # in the image
    copied: torch.UntypedStorage | None = None


class _Plan:
    """Assigns the tensors of a state to offsets in an image."""

    @collection_paused()
    def __init__(self, state: object) -> None:
        self.nbytes = 0
        self.has_accelerator_tensors = False
        self._regions: dict[tuple[object, ...], _Region] = {}  # by storage
        leaves = tree_leaves(state)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # For each tensor, a function that makes its copy. The copy of a tensor in a region only refers to the region's
        # memory in the image; _copy_all() copies the elements there.
        self._recipes = [self._recipe(tensor) for tensor in self._tensors]
        for region in self._regions.values():
            # A tensor begins at a multiple of its item size in the storage. If the region begins at a multiple of the
            # largest item size, this is true in the image as well.
            region.begin -= region.begin % _MAX_ITEM_NBYTES
            nbytes = region.end - region.begin
            alignment = _PAGE_NBYTES if nbytes >= _PAGE_NBYTES else _SMALL_ALIGNMENT
            region.offset = -(-self.nbytes // alignment) * alignment
            self.nbytes = region.offset + nbytes

    @collection_paused()
    def copy_state(self, state: Any, image: _Image) -> Any:
        """Return a copy of the state with its tensors in an image."""
        regions = list(self._regions.values())
        for region in regions:
            region.copied = image.storage(region.offset, region.end - region.begin)
        copies = [recipe() for recipe in self._recipes]
        _copy_all(regions, image)
        # The memo uses ids, which stay unique because this plan keeps the tensors alive until the end.
        memo: dict[int, Any] = dict(zip(map(id, self._tensors), copies, strict=True))
        for tensor, copied in zip(self._tensors, copies, strict=True):
            for name, value in _attributes(tensor).items():
                if name not in vars(copied):  # a rebuilt wrapper may already have it
                    setattr(copied, name, copy.deepcopy(value, memo))
        return copy.deepcopy(dict(state), memo)

    def _recipe(self, tensor: Any) -> Callable[[], Any]:
        if hasattr(tensor, "trigger_wait"):
            tensor.trigger_wait()  # the result of a collective that may still be running
        if hasattr(tensor, "__tensor_flatten__"):  # DTensor and other wrappers
            return self._recipe_of_wrapper(tensor)
        if isinstance(tensor, ShardedTensor):  # cpu() may return the tensor itself
            return lambda: copy.deepcopy(tensor.cpu())
        if isinstance(tensor, torch.nn.Parameter) and type(tensor) is not torch.nn.Parameter:
            return lambda: copy.deepcopy(tensor)  # detach() would drop its class
        if tensor.is_meta:
            return lambda: torch.empty_like(tensor)
        # These are copied outside of the image: sparse, quantized and similar tensors, and conjugate and negative
        # views, which would lose their flag on the way to another process.
        if not is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
            return lambda: _as_kind_of(tensor.detach().to("cpu", copy=True), tensor)
        if tensor.numel() == 0:
            return lambda: _as_kind_of(torch.empty_like(tensor, device="cpu"), tensor)
        self.has_accelerator_tensors |= not tensor.is_cpu
        region, begin = self._region_of(tensor)

        def place() -> torch.Tensor:
            offset = (begin - region.begin) // tensor.element_size()
            assert region.copied is not None
            empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
            empty.set_(region.copied, offset, tensor.size(), tensor.stride())
            return _as_kind_of(empty, tensor)

        return place

    def _recipe_of_wrapper(self, tensor: Any) -> Callable[[], Any]:
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        recipes = {k: self._recipe(v) for k, v in parts.items() if isinstance(v, torch.Tensor)}

        def rebuild() -> Any:
            inner = parts | {name: recipe() for name, recipe in recipes.items()}
            make = type(tensor).__tensor_unflatten__
            return make(inner, context, tensor.size(), tensor.stride())

        return rebuild

    def _region_of(self, tensor: torch.Tensor) -> tuple[_Region, int]:
        """Return the region of a tensor's storage, extended to the tensor, and the tensor's offset in the storage."""
        storage, itemsize = tensor.untyped_storage(), tensor.element_size()
        begin = int(tensor.storage_offset()) * itemsize
        places = zip(tensor.size(), tensor.stride(), strict=True)
        end = begin + (1 + sum((size - 1) * stride for size, stride in places)) * itemsize
        if end > storage.nbytes():
            check_storage(tensor, "state")
        key = (tensor.device, storage.data_ptr(), storage.nbytes())
        region = self._regions.setdefault(key, _Region(storage, begin, end))
        region.begin, region.end = min(region.begin, begin), max(region.end, end)
        return region, begin


def _as_kind_of(copied: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return copied elements with the class and requires_grad of the original tensor."""
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a tensor, without the inner tensors of a wrapper."""
    if isinstance(tensor, ShardedTensor):
        return {}
    parts, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ((), None)
    return {name: value for name, value in vars(tensor).items() if name not in parts}


def _copy_all(regions: list[_Region], image: _Image) -> None:
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
            assert region.copied is not None
            if device.type == "cuda":
                devices.add(device)
            non_blocking = image.pages_locked and device.type == "cuda"
            _bytes_of(region.copied, 0, nbytes).copy_(source, non_blocking=non_blocking)
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


class _Image:
    """A block of memory for the tensors of a staged state.

    Set ``reserved`` once :meth:`in_use` returns False; clear it when the tensors exist. In between it keeps another
    call of stage() from taking the block, which no tensor refers to yet.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.reserved = False
        self.pages_locked = False
        memory, _ = _core.allocate(max(nbytes, 1), False)
        self._view = memoryview(memory)
        # All storages of a staged state refer to one view, so a weak reference to it shows whether any is alive.
        self._borrowed: weakref.ref[memoryview] | None = None

    def address(self) -> int:
        """Return the address of the block."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._view))

    def in_use(self) -> bool:
        """Return whether the block is reserved, or has tensors of a state that is not known to be saved."""
        return self.reserved or (self._borrowed is not None and self._borrowed() is not None)

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage with a part of the block."""
        view = self._borrowed() if self._borrowed is not None else None
        if view is None:
            view = memoryview(self._view)
            self._borrowed = weakref.ref(view)
        part = torch.frombuffer(view, dtype=torch.uint8, count=nbytes, offset=offset)
        return part.untyped_storage()

    def end_use(self) -> Callable[[], None]:
        """Return a function that declares the current tensors unneeded; they may exist, but their memory is free."""
        current = self._borrowed

        def end() -> None:
            if self._borrowed is current:
                self._borrowed = None

        return end

    def lock_pages(self) -> None:
        """Lock the block's pages in memory, if there is a GPU, which then copies to them directly."""
        if torch.cuda.is_available() and not self.pages_locked:
            self.pages_locked = _cuda("cudaHostRegister")(self.address(), self.nbytes, 0) == 0

    def __del__(self) -> None:
        if self.pages_locked:
            _cuda("cudaHostUnregister")(self.address())


def _cuda(name: str) -> Any:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return getattr(runtime, name)
