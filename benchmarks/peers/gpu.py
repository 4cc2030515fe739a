"""CUDA tensors in the benchmark: ours, and what else moves them between GPU memory and files.

What a peer needs that the others do not (its buffers in host memory, its imports) is made before the clock runs. A
write is over when the file is synced, a read when the GPU has the bytes. The pattern is made and checked on the GPU.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

import tensorferry
from benchmarks.harness import MIB, MeasurementError, UnavailableError
from benchmarks.measure import Stopwatch
from benchmarks.peers.base import TransferPeer, succeed
from benchmarks.peers.deepnvme import async_io
from benchmarks.peers.plain import move, sync
from tensorferry import _core
from tensorferry.tuning.gpus import why_no_gpu
from tensorferry.tuning.machine.kernel import status_of_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # pattern.py's, as a signed number
_CHUNK_WORDS = 8 << 20
_COPY_NBYTES = 256 * MIB
_SAMPLE_SECONDS = 0.01


def check_gpu() -> None:
    """Raise UnavailableError, with the reason, where CUDA tensors cannot be moved."""
    if reason := why_no_gpu():
        raise UnavailableError(f"no GPU: {reason}")


class Device:
    """What the GPU is."""

    def __init__(self) -> None:
        check_gpu()

    def describe(self) -> dict[str, Any]:
        return {
            "name": torch.cuda.get_device_name(),
            "free_nbytes": torch.cuda.mem_get_info()[0],
            "torch": torch.__version__,
        }


# The pattern


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Fill a tensor of bytes, a multiple of 8, with the pattern of pattern.py."""
    words = tensor.view(torch.int64)
    for begin in range(0, words.numel(), _CHUNK_WORDS):
        part = words[begin : begin + _CHUNK_WORDS]
        part.copy_(_words(part, seed + begin))


def matches(tensor: torch.Tensor, seed: int) -> bool:
    """Whether a tensor of bytes holds the pattern."""
    words = tensor.view(torch.int64)
    return all(
        torch.equal(part, _words(part, seed + begin))
        for begin in range(0, words.numel(), _CHUNK_WORDS)
        for part in [words[begin : begin + _CHUNK_WORDS]]
    )


def _words(like: torch.Tensor, first: int) -> torch.Tensor:
    return torch.arange(first, first + like.numel(), device=like.device) * _MULTIPLIER


# Tensors on the GPU


class TensorPeer(TransferPeer):
    """Writes and reads one tensor; subclasses say how, in ``put`` and ``get``.

    ``device="cpu"`` is for tests of the benchmark itself.
    """

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        if device == "cuda":
            check_gpu()
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)

    put: Callable[[str], None]
    get: Callable[[str], None]

    def pinned_nbytes(self) -> int:
        """Host memory pinned for transfers that the kernel does not know of: NVIDIA's driver pins by itself."""
        return 0

    def details(self) -> dict[str, Any]:
        return {}

    def save(self, path: str) -> None:
        self.put(path)
        sync(path)

    def load(self, path: str) -> None:
        self.get(path)
        _synchronize(self.tensor)

    def fill(self, seed: int) -> None:
        fill(self.tensor, seed)
        _synchronize(self.tensor)

    def matches(self, seed: int, offset: int) -> bool:
        return matches(self.tensor, seed)

    def clear(self) -> None:
        super().clear()
        _synchronize(self.tensor)

    def clock(self) -> Stopwatch:
        return LockedMemoryStopwatch()

    def result(self, watch: Stopwatch) -> dict[str, Any]:
        assert isinstance(watch, LockedMemoryStopwatch)
        pinned = max(watch.locked_nbytes, self.pinned_nbytes())
        return watch.result(self.tensor.nbytes, locked_nbytes=pinned, **self.details())


class Handle(TensorPeer):
    """Our ``aio_handle``, or another handle of ours by its name."""

    def __init__(
        self,
        nbytes: int,
        name: str = "aio_handle",
        options: dict[str, Any] | None = None,
        device: str = "cuda",
    ) -> None:
        super().__init__(nbytes, device)
        try:
            self.handle = getattr(tensorferry, name)(**options or {})
        except tensorferry.EngineUnavailableError as error:
            raise UnavailableError(str(error)) from error
        if name == "gds_handle":
            self.handle.pin_device_tensor(self.tensor)

    def put(self, path: str) -> None:
        self.handle.sync_pwrite(self.tensor, path)

    def get(self, path: str) -> None:
        self.handle.sync_pread(self.tensor, path)

    def pinned_nbytes(self) -> int:
        return _core.pinned_pool_nbytes()

    def details(self) -> dict[str, Any]:
        stats = self.handle.stats()
        return {name: stats[name] for name in ("engine", "gpu_nbytes", "gds_nbytes")}


class DeepSpeedHandle(TensorPeer):
    """DeepSpeed's ``aio_handle``, given the same tensor."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.handle = async_io().aio_handle()

    def put(self, path: str) -> None:
        succeed(self.handle.sync_pwrite(self.tensor, path, 0))

    def get(self, path: str) -> None:
        succeed(self.handle.sync_pread(self.tensor, path, 0))


class KvikIO(TensorPeer):
    """kvikio's ``CuFile``, with as many threads as make it fast."""

    def __init__(self, nbytes: int, threads: int) -> None:
        os.environ["KVIKIO_NTHREADS"] = str(threads)
        import kvikio  # type: ignore[import-not-found]

        super().__init__(nbytes)
        self.open = kvikio.CuFile

    def put(self, path: str) -> None:
        with self.open(path, "w") as file:
            self._succeed(file.write(self.tensor))

    def get(self, path: str) -> None:
        with self.open(path, "r") as file:
            self._succeed(file.read(self.tensor))

    def _succeed(self, nbytes: int) -> None:
        if nbytes != self.tensor.nbytes:
            raise MeasurementError(f"moved {nbytes} of {self.tensor.nbytes} bytes")


class CopyThen(TensorPeer):
    """What DeepNVMe does, better: all of the tensor goes through pinned memory of its size, kept for the next time.

    Our ``aio_handle`` moves that, or so many threads with ``pwritev``/``preadv`` past the page cache.
    """

    def __init__(self, nbytes: int, threads: int = 0, device: str = "cuda") -> None:
        super().__init__(nbytes, device)
        self.host = host_memory(nbytes, pinned=device == "cuda")
        self.threads = threads
        self.handle = tensorferry.aio_handle()

    def put(self, path: str) -> None:
        self.host.copy_(self.tensor, non_blocking=True)
        _synchronize(self.tensor)
        if self.threads:
            move(path, self.host, self.threads, write=True)
        else:
            self.handle.sync_pwrite(self.host, path)

    def get(self, path: str) -> None:
        if self.threads:
            move(path, self.host, self.threads, write=False)
        else:
            self.handle.sync_pread(self.host, path)
        self.tensor.copy_(self.host, non_blocking=True)

    def pinned_nbytes(self) -> int:
        return self.host.nbytes


# The two limits


class StorageLimit:
    """A file system alone, where fio is missing or not at its best: ``pwritev``/``preadv`` from several threads.

    What the bytes are does not matter.
    """

    def __init__(self, nbytes: int, threads: int) -> None:
        self.threads = threads
        self.memory = host_memory(nbytes, pinned=False)

    def write(self, path: str, seed: int, check: bool) -> dict[str, Any]:
        with Stopwatch() as watch:
            direct = move(path, self.memory, self.threads, write=True)
            sync(path)
        return watch.result(self.memory.nbytes, direct=direct)

    def read(self, path: str, seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            direct = move(path, self.memory, self.threads, write=False)
        return watch.result(self.memory.nbytes, direct=direct)


class CopyLimit:
    """The copy alone: between a GPU and 256 MiB of pinned memory, again and again."""

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        if device == "cuda":
            check_gpu()
        piece = min(nbytes, _COPY_NBYTES)
        self.times = nbytes // piece
        self.host = host_memory(piece, pinned=device == "cuda")
        self.tensor = torch.ones(piece, dtype=torch.uint8, device=device)

    def to_host(self) -> dict[str, Any]:
        return self._copy(self.host, self.tensor)

    def to_device(self) -> dict[str, Any]:
        return self._copy(self.tensor, self.host)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> dict[str, Any]:
        _synchronize(self.tensor)
        with Stopwatch() as watch:
            for _ in range(self.times):
                to.copy_(source, non_blocking=True)
            _synchronize(self.tensor)
        return watch.result(self.times * self.tensor.nbytes)


# Host memory


def host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """Page-aligned memory that has been touched; pinned, or in huge pages where the kernel has them."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


class LockedMemoryStopwatch(Stopwatch):
    """Looks every 10 ms how much memory is locked or pinned, too, as far as Linux knows."""

    locked_nbytes = 0

    def __enter__(self) -> LockedMemoryStopwatch:
        self._before = _locked_nbytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.locked_nbytes = max(self.locked_nbytes, _locked_nbytes() - self._before)
            time.sleep(_SAMPLE_SECONDS)


def _locked_nbytes() -> int:
    values = status_of_process()
    return sum(int(values.get(name, "0 kB").split()[0]) for name in ("VmLck", "VmPin")) * 1024
