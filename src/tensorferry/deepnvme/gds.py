"""DeepNVMe's handle for GPU memory, on cuFile (GPUDirect Storage), and the GPU memory that is pinned for it.

Pinning keeps the memory allocated, and registers it with cuFile if the handle uses cuFile.

If the machine supports direct transfers between drive and GPU, cuFile transfers the aligned parts of a tensor. If not,
cuFile would copy through host memory. The handle then uses tensorferry's own bounce buffers for GPU memory, which
overlap copies and I/O better.
"""

from __future__ import annotations

import itertools
import operator
import os
from typing import Any, NamedTuple

from tensorferry import _core
from tensorferry.base.processes import module_lock
from tensorferry.deepnvme.handles import aio_handle
from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer.arrays import Memory, has_moved, memory_of
from tensorferry.transfer.memory import elements_like, gpu_in_use
from tensorferry.transfer.runtime import start_scheduler

_VARIABLE = "TENSORFERRY_GDS"


class gds_handle(aio_handle):  # noqa: N801  DeepNVMe's name
    """DeepNVMe's ``gds_handle``: GPUDirect Storage for CUDA tensors; other tensors are moved as by :class:`aio_handle`.

    Parameters
    ----------
    block_size : int
        As for :class:`aio_handle`.
    queue_depth : int
        The maximum number of blocks in flight for each worker.
    single_submit, overlap_events : bool
        As for :class:`aio_handle`.
    intra_op_parallelism : int
        The number of workers, which share the blocks of all requests.
    num_threads : int, optional
        Another name for ``intra_op_parallelism``.

    Raises
    ------
    ValueError
        An argument is out of range.
    EngineUnavailableError
        The CUDA driver or cuFile is missing or does not work; the message has the reason and the remedy.

    Notes
    -----
    Without the nvidia-fs module and without PCI P2P DMA, cuFile would copy through host memory. The handle then
    transfers GPU memory as :class:`aio_handle` does: ``handle.engine`` ends with "(compat)",
    ``handle.engine_refusals["cufile"]`` has the reason, and ``stats()["compat"]`` is True. For comparisons, the
    environment variable ``TENSORFERRY_GDS=cufile`` makes the handle use cuFile in this case, too.

    Tensors need not be pinned, but pinning saves cuFile a copy inside the GPU. The memory of a pinned tensor is kept
    until the tensor is unpinned or freed, or the handle that pinned it is closed: torch must not reuse the memory while
    it is registered with cuFile. Pinned tensors are known to all handles of the process.

    cuFile is configured as usual, by ``CUFILE_ENV_PATH_JSON``. It writes ``cufile.log`` into the current folder, or to
    ``CUFILE_LOGFILE_PATH`` if that is set.
    """

    def __init__(
        self,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        # The reason why cuFile does not bypass host memory; None if it does.
        self._compat: str | None = None
        self._uses_cufile = False
        self._pinner = object()  # identifies this handle in _pins
        super().__init__(
            block_size,
            queue_depth,
            single_submit,
            overlap_events,
            intra_op_parallelism,
            num_threads=num_threads,
        )

    def _make_scheduler(self) -> _core.Scheduler:
        # Imported here, because it would add noticeably to the time of `import tensorferry`.
        from tensorferry.base.libraries import cufile_folders

        forced = os.environ.get(_VARIABLE, "")
        if forced not in ("", "cufile"):
            raise ValueError(f'{_VARIABLE}: {forced!r} is not "cufile"')
        refusal, native, detail = _core.open_cufile(cufile_folders(), max(gpu_in_use(), 0))
        if refusal is not None:
            supported = "host memory" if _core.cuda_refusal() else "CUDA tensors without it"
            raise EngineUnavailableError(
                f"GPUDirect Storage is not available: {refusal}; aio_handle supports {supported}"
            )
        self._compat = None if native else detail
        self._uses_cufile = native or forced == "cufile"
        if self._uses_cufile:
            return start_scheduler("cufile", self._settings)
        return super()._make_scheduler()

    # Memory

    def new_pinned_device_tensor(
        self, num_elem: int, example_tensor: Any = None, *, example_tenosr: Any = None
    ) -> Any:
        """Return a pinned CUDA tensor.

        Parameters
        ----------
        num_elem : int
            The number of elements.
        example_tensor : torch.Tensor
            A tensor with the dtype, and with the device if it is on a GPU; otherwise the current GPU is used.
            DeepNVMe's ``gds_handle`` spells the keyword ``example_tenosr``; both spellings work.

        Returns
        -------
        torch.Tensor
            A one-dimensional tensor with uninitialized values. :meth:`free_pinned_device_tensor` unpins it.

        Raises
        ------
        EngineUnavailableError
            torch has no CUDA device.
        StorageError
            cuFile cannot pin that amount of memory.
        """
        example = example_tensor if example_tensor is not None else example_tenosr
        count, dtype = elements_like(num_elem, example)
        import torch

        if not torch.cuda.is_available():
            raise EngineUnavailableError(
                "torch has no CUDA device to create a tensor on (remedy: install torch with CUDA, or pass GPU arrays "
                "of another library to pin_device_tensor)"
            )
        device = example.device if example.is_cuda else "cuda"
        tensor = torch.empty(operator.index(count), dtype=dtype, device=device)
        if tensor.nbytes > 0:
            self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: Any) -> bool:
        """Call :meth:`unpin_device_tensor`; the memory is freed with the last tensor that shares it."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: Any) -> bool:
        """Register GPU memory with cuFile, which makes transfers of the tensor and of its parts faster.

        Parameters
        ----------
        tensor : torch.Tensor or any other array in GPU memory
            A contiguous array. It stays referenced until it is unpinned or the handle is closed. Resizing its storage
            meanwhile makes the registration useless.

        Returns
        -------
        bool
            True.

        Raises
        ------
        ValueError
            The array is not in GPU memory, is empty, or shares memory with a tensor that is pinned already.
        StorageError
            cuFile cannot pin the memory; the message has the reason.
        """
        self._scheduler.check_usable()
        memory = memory_of(tensor, writable=True, name="tensor")
        if memory[1] == 0:
            raise ValueError("tensor: an empty tensor cannot be pinned")
        if memory[3] is None:
            raise ValueError(
                "tensor: expected GPU memory, got host memory (remedy: allocate host memory with "
                "new_cpu_locked_tensor, which needs no pinning)"
            )
        _pin(memory, self._pinner, self._uses_cufile)
        return True

    def unpin_device_tensor(self, tensor: Any) -> bool:
        """Wait for this handle's transfers, then undo :meth:`pin_device_tensor`.

        Parameters
        ----------
        tensor : torch.Tensor or any other array
            The tensor that was pinned, by any handle, or a view with the same first byte.

        Returns
        -------
        bool
            False if the tensor is not pinned.
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
        """Return whether a buffer is page-locked host memory, or inside a pinned GPU tensor."""
        if super().is_pinned(buffer):
            return True
        address, nbytes, _, location = memory_of(buffer, writable=False, name="buffer")
        return location is not None and _is_pinned(address, nbytes)

    # Settings

    @property
    def engine(self) -> str:
        """The engine: "cufile", or another engine's name and " (compat)" if GPU memory passes through host memory."""
        return super().engine + (" (compat)" if self._compat is not None else "")

    @property
    def engine_refusals(self) -> dict[str, str]:
        """The reason why cuFile cannot bypass host memory, if any, and the reasons why other engines do not work."""
        return ({} if self._compat is None else {"cufile": self._compat}) | super().engine_refusals

    def stats(self) -> dict[str, Any]:
        """Return counters since the handle was created.

        Returns
        -------
        dict
            Those of :meth:`aio_handle.stats`, and ``compat``: whether GPU memory passes through host memory.
        """
        return super().stats() | {"engine": self.engine, "compat": self._compat is not None}

    def _release_resources(self) -> None:
        _unpin_all_of(self._pinner)


class _Pin(NamedTuple):
    """A range of GPU memory that is pinned."""

    memory: Memory  # includes a reference to the owner, which keeps the memory alive
    pinner: object  # identifies the handle that pinned the memory; closing that handle unpins it
    registered: bool  # whether the memory is registered with cuFile


# Pinned memory by address. A forked child never uses it, because its handles refuse to work.
_pins: dict[int, _Pin] = {}
_lock = module_lock()


def _pin(memory: Memory, pinner: object, by_cufile: bool) -> None:
    address, nbytes, _, location = memory
    assert location is not None
    with _lock:
        for other in list(_pins.values()):
            begin, other_nbytes, _, _ = other.memory
            if address >= begin + other_nbytes or begin >= address + nbytes:
                continue
            if not has_moved(other.memory):
                raise ValueError(
                    f"tensor: its memory ({nbytes} bytes at {address:#x}) overlaps a tensor that is pinned already "
                    f"({other_nbytes} bytes at {begin:#x})"
                )
            _remove_pin(begin)
        if by_cufile:
            _core.register_gpu_buffer(address, nbytes, location[0])
        _pins[address] = _Pin(memory, pinner, by_cufile)


def _unpin(address: int) -> bool:
    with _lock:
        return _remove_pin(address)


def _unpin_all_of(pinner: object) -> None:
    with _lock:
        for address in [address for address, pin in _pins.items() if pin.pinner is pinner]:
            _remove_pin(address)


def _remove_pin(address: int) -> bool:
    # `pin` keeps the memory alive until it has been deregistered. After that torch may reuse the memory.
    pin = _pins.pop(address, None)
    if pin is None:  # a finalizer has closed the handle that pinned it
        return False
    return not pin.registered or _core.deregister_gpu_buffer(address)


def _is_pinned(address: int, nbytes: int) -> bool:
    with _lock:
        return any(
            begin <= address and address + nbytes <= begin + pin.memory[1]
            for begin, pin in _pins.items()
        )
