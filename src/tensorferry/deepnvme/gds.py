"""DeepNVMe's handle for GPU memory, on cuFile (GPUDirect Storage); and the GPU memory that is pinned for it.

Where the machine lets the drive and the GPU talk to each other, aligned parts of a tensor go by cuFile. Where it does
not, cuFile would copy through host memory; our own way between files and GPUs then does that, which overlaps better.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base.processes import in_forked_children
from tensorferry.deepnvme.handles import (
    BLOCK_SIZE,
    OVERLAP_EVENTS,
    PARALLELISM,
    QUEUE_DEPTH,
    SINGLE_SUBMIT,
    aio_handle,
)
from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer.arrays import Memory, memory_of, moved
from tensorferry.transfer.memory import elements_like, gpu_in_use
from tensorferry.transfer.runtime import start_scheduler

if TYPE_CHECKING:
    from tensorferry.transfer.runtime import AnyScheduler

_VARIABLE = "TENSORFERRY_GDS"


class gds_handle(aio_handle):  # noqa: N801  DeepNVMe's name
    """Read and write CUDA tensors by GPUDirect Storage, others as :class:`aio_handle`: DeepNVMe's ``gds_handle``.

    Parameters
    ----------
    block_size : int
        As for :class:`aio_handle`.
    queue_depth : int
        Blocks in flight at most, for each worker.
    single_submit, overlap_events : bool
        As for :class:`aio_handle`.
    intra_op_parallelism : int
        Workers, which share the blocks of all requests.
    num_threads : int, optional
        Another name for ``intra_op_parallelism``.

    Raises
    ------
    ValueError
        An argument is out of range.
    EngineUnavailableError
        There is no CUDA driver or no cuFile here; the message says why and what helps.

    Notes
    -----
    Where neither the nvidia-fs module nor PCI P2P DMA is there, cuFile would copy through host memory itself. The
    handle then moves GPU memory as :class:`aio_handle` does: ``handle.engine`` ends with "(compat)",
    ``handle.engine_refusals["cufile"]`` says why, and ``stats()["compat"]`` is True. The environment variable
    ``TENSORFERRY_GDS=cufile`` has cuFile do it nevertheless, for comparisons.

    Tensors need not be pinned: that saves cuFile a copy within the GPU. A pinned tensor's memory is kept until it is
    unpinned or freed, or the handle that pinned it is closed, since torch must not give it to anybody while cuFile
    has it. All handles of the process know what is pinned.

    cuFile is configured as always, by ``CUFILE_ENV_PATH_JSON``; it writes ``cufile.log`` into the current folder unless
    ``CUFILE_LOGFILE_PATH`` names another place.
    """

    def __init__(
        self,
        block_size: int = BLOCK_SIZE,
        queue_depth: int = QUEUE_DEPTH,
        single_submit: bool = SINGLE_SUBMIT,
        overlap_events: bool = OVERLAP_EVENTS,
        intra_op_parallelism: int = PARALLELISM,
        *,
        num_threads: int | None = None,
    ) -> None:
        self._compat: str | None = None  # why cuFile does not bypass host memory
        self._by_cufile = False
        self._pinner = object()
        super().__init__(
            block_size,
            queue_depth,
            single_submit,
            overlap_events,
            intra_op_parallelism,
            num_threads=num_threads,
        )

    def _make_scheduler(self, engine: str | None, automatic: bool) -> AnyScheduler:
        # What it imports would be a good part of the time of `import tensorferry`.
        from tensorferry.base.libraries import cufile_folders

        forced = os.environ.get(_VARIABLE, "")
        if forced not in ("", "cufile"):
            raise ValueError(f'{_VARIABLE}: {forced!r} is not "cufile"')
        refusal, native, detail = _core.open_cufile(cufile_folders(), max(gpu_in_use(), 0))
        if refusal is not None:
            moves = "host memory" if _core.cuda_refusal() else "CUDA tensors without it"
            raise EngineUnavailableError(
                f"GPUDirect Storage cannot be had: {refusal}; aio_handle moves {moves}"
            )
        self._compat = None if native else detail
        self._by_cufile = native or forced == "cufile"
        if self._by_cufile:
            return start_scheduler("cufile", *self._settings_of_workers())
        return super()._make_scheduler(engine, automatic)

    # Memory

    def new_pinned_device_tensor(
        self, num_elem: int, example_tensor: Any = None, *, example_tenosr: Any = None
    ) -> Any:
        """Return a pinned CUDA tensor.

        Parameters
        ----------
        num_elem : int
            Its number of elements.
        example_tensor : torch.Tensor
            Whose dtype it gets, and whose device if that is a GPU, else the current one. DeepNVMe's ``gds_handle``
            spells the keyword ``example_tenosr``; both work.

        Returns
        -------
        torch.Tensor
            One-dimensional; its values are whatever was in that memory. :meth:`free_pinned_device_tensor` lets it go.

        Raises
        ------
        EngineUnavailableError
            torch has no CUDA device.
        StorageError
            cuFile cannot pin so much.
        """
        example = example_tensor if example_tensor is not None else example_tenosr
        count, dtype = elements_like(num_elem, example)
        import torch

        if not torch.cuda.is_available():
            raise EngineUnavailableError(
                "torch has no CUDA device to make a tensor on (remedy: a torch for CUDA; pin_device_tensor takes "
                "any library's GPU arrays)"
            )
        device = example.device if example.is_cuda else "cuda"
        tensor = torch.empty(operator.index(count), dtype=dtype, device=device)
        if tensor.nbytes > 0:
            self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: Any) -> bool:
        """Do as :meth:`unpin_device_tensor`; the memory goes with the last tensor that shares it."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: Any) -> bool:
        """Have cuFile keep GPU memory at hand: transfers of the tensor, and of its parts, are faster.

        Parameters
        ----------
        tensor : torch.Tensor or any other array in GPU memory
            Contiguous. It is kept until it is unpinned or the handle is closed; resizing its storage meanwhile makes
            the pin worthless.

        Returns
        -------
        bool
            True.

        Raises
        ------
        ValueError
            It is not in GPU memory, is empty, or shares memory with a tensor that is pinned already.
        StorageError
            cuFile cannot pin it; the message says why.
        """
        self._scheduler.check_usable()
        memory = memory_of(tensor, writable=True, name="tensor")
        if memory[1] == 0:
            raise ValueError("tensor: it is empty, so there is nothing to pin")
        if memory[3] is None:
            raise ValueError(
                "tensor: it is in host memory (remedy: new_cpu_locked_tensor for memory that needs no copy)"
            )
        _pin(memory, self._pinner, self._by_cufile)
        return True

    def unpin_device_tensor(self, tensor: Any) -> bool:
        """Undo :meth:`pin_device_tensor`, when this handle's transfers have ended.

        Parameters
        ----------
        tensor : torch.Tensor or any other array
            The one that was pinned, by any handle, or a view that begins where it does.

        Returns
        -------
        bool
            False if it is not pinned.
        """
        self._scheduler.check_usable()
        address, _, _, location = memory_of(tensor, writable=False, name="tensor")
        if location is None:
            return False
        with self._lock:
            unfinished = [*self._awaited.values(), list(self._pending)]
        for operation in itertools.chain(*unfinished):
            operation.future._request.wait(None)
        return _unpin(address)

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether a buffer is page-locked host memory, or in a pinned tensor of a GPU."""
        if super().is_pinned(buffer):
            return True
        address, nbytes, _, location = memory_of(buffer, writable=False, name="buffer")
        return location is not None and _is_pinned(address, nbytes)

    # Settings

    @property
    def engine(self) -> str:
        """The engine in use: "cufile", or with " (compat)" the one that moves GPU memory through host memory."""
        return super().engine + (" (compat)" if self._compat is not None else "")

    @property
    def engine_refusals(self) -> dict[str, str]:
        """Why cuFile cannot bypass host memory, where it cannot; and the engines that could not be had."""
        return ({} if self._compat is None else {"cufile": self._compat}) | super().engine_refusals

    def stats(self) -> dict[str, Any]:
        """Return counters since the handle was made.

        Returns
        -------
        dict
            As of :meth:`aio_handle.stats`; and ``compat``, whether GPU memory passes through host memory.
        """
        return super().stats() | {"engine": self.engine, "compat": self._compat is not None}

    def _let_go(self) -> None:
        _unpin_all_of(self._pinner)


class _Pin(NamedTuple):
    """GPU memory that is pinned."""

    memory: Memory  # which keeps its owner
    pinner: object
    registered: bool  # with cuFile


# By address. A child made by fork() gets none of it to do with: its handles are refused before.
_pins: dict[int, _Pin] = {}
_lock = threading.Lock()


@in_forked_children
def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it at fork


def _pin(memory: Memory, pinner: object, by_cufile: bool) -> None:
    address, nbytes, _, location = memory
    assert location is not None
    with _lock:
        for other in list(_pins.values()):
            begin, other_nbytes, _, _ = other.memory
            if address >= begin + other_nbytes or begin >= address + nbytes:
                continue
            if not moved(other.memory):
                raise ValueError(
                    f"tensor: its memory ({nbytes} bytes at {address:#x}) shares bytes with a tensor that is pinned "
                    f"already ({other_nbytes} bytes at {begin:#x})"
                )
            _forget(begin)
        if by_cufile:
            _core.register_gpu_buffer(address, nbytes, location[0])
        _pins[address] = _Pin(memory, pinner, by_cufile)


def _unpin(address: int) -> bool:
    with _lock:
        return address in _pins and _forget(address)


def _unpin_all_of(pinner: object) -> None:
    with _lock:
        for address in [address for address, pin in _pins.items() if pin.pinner is pinner]:
            _forget(address)


def _forget(address: int) -> bool:
    # The memory goes last: torch may give it to others then.
    pin = _pins.pop(address)
    return not pin.registered or _core.deregister_gpu_buffer(address)


def _is_pinned(address: int, nbytes: int) -> bool:
    with _lock:
        return any(
            begin <= address and address + nbytes <= begin + pin.memory[1]
            for begin, pin in _pins.items()
        )
