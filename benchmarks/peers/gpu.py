"""CUDA tensors in the benchmark: ours, and what else moves them between GPU memory and files.

What a peer needs that the others do not (its buffers in host memory, its imports) is made before the clock runs. A
write is over when the file is synced, a read when the GPU has the bytes. The pattern is made and checked on the GPU.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tensorferry
from benchmarks import files
from benchmarks.harness import MIB, MeasurementError, UnavailableError
from benchmarks.measure import Stopwatch
from benchmarks.peers.base import succeed
from benchmarks.peers.deepnvme import async_io
from tensorferry import _core
from tensorferry.tuning.gpus import why_no_gpu
from tensorferry.tuning.machine.kernel import status_of_process

if TYPE_CHECKING:
    from types import TracebackType

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # pattern.py's, as a signed number
_CHUNK_WORDS = 8 << 20
_BLOCK_NBYTES = 8 * MIB
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


class TensorPeer:
    """Writes and reads one tensor; subclasses say how, in ``save`` and ``load``.

    ``device="cpu"`` is for tests of the benchmark itself.
    """

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        if device == "cuda":
            check_gpu()
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def write(self, path: str, seed: int, check: bool) -> dict[str, Any]:
        fill(self.tensor, seed)
        _synchronize(self.tensor)
        with LockedMemory() as locked, Stopwatch() as watch:
            self.save(path)
            sync(path)
        if check and not files.file_matches(Path(path), self.tensor.nbytes, seed):
            raise MeasurementError("wrote other bytes than it was given")
        return self._result(watch, locked)

    def read(self, path: str, seed: int) -> dict[str, Any]:
        self.tensor.zero_()
        _synchronize(self.tensor)
        with LockedMemory() as locked, Stopwatch() as watch:
            self.load(path)
            _synchronize(self.tensor)
        if not matches(self.tensor, seed):
            raise MeasurementError("read other bytes than the file holds")
        return self._result(watch, locked)

    def save(self, path: str) -> None:
        raise NotImplementedError

    def load(self, path: str) -> None:
        raise NotImplementedError

    def pinned_nbytes(self) -> int:
        """Host memory pinned for transfers that the kernel does not know of: NVIDIA's driver pins by itself."""
        return 0

    def details(self) -> dict[str, Any]:
        return {}

    def _result(self, watch: Stopwatch, locked: LockedMemory) -> dict[str, Any]:
        pinned = max(locked.growth_nbytes, self.pinned_nbytes())
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

    def save(self, path: str) -> None:
        self.handle.sync_pwrite(self.tensor, path)

    def load(self, path: str) -> None:
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

    def save(self, path: str) -> None:
        succeed(self.handle.sync_pwrite(self.tensor, path, 0))

    def load(self, path: str) -> None:
        succeed(self.handle.sync_pread(self.tensor, path, 0))


class KvikIO(TensorPeer):
    """kvikio's ``CuFile``, with as many threads as make it fast."""

    def __init__(self, nbytes: int, threads: int) -> None:
        os.environ["KVIKIO_NTHREADS"] = str(threads)
        import kvikio  # type: ignore[import-not-found]

        super().__init__(nbytes)
        self.open = kvikio.CuFile

    def save(self, path: str) -> None:
        with self.open(path, "w") as file:
            self._succeed(file.write(self.tensor))

    def load(self, path: str) -> None:
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

    def save(self, path: str) -> None:
        self.host.copy_(self.tensor, non_blocking=True)
        _synchronize(self.tensor)
        if self.threads:
            transfer(path, self.host, self.threads, write=True)
        else:
            self.handle.sync_pwrite(self.host, path)

    def load(self, path: str) -> None:
        if self.threads:
            transfer(path, self.host, self.threads, write=False)
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
            direct = transfer(path, self.memory, self.threads, write=True)
            sync(path)
        return watch.result(self.memory.nbytes, direct=direct)

    def read(self, path: str, seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            direct = transfer(path, self.memory, self.threads, write=False)
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


# Host memory and files


def host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """Page-aligned memory that has been touched; pinned, or in huge pages where the kernel has them."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def transfer(path: str, memory: torch.Tensor, threads: int, *, write: bool) -> bool:
    """Move page-aligned memory to or from a file in blocks of 8 MiB; return whether the page cache was passed by."""
    descriptor, direct = _open(path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY)
    view = memoryview(memory.numpy())
    call = os.pwritev if write else os.preadv

    def move(begin: int) -> None:
        end = min(begin + _BLOCK_NBYTES, len(view))
        while begin < end:
            count = call(descriptor, [view[begin:end]], begin)
            if not count:
                raise MeasurementError(f"the file ends at {begin}")
            begin += count

    try:
        if write:
            os.posix_fallocate(descriptor, 0, len(view))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(move, range(0, len(view), _BLOCK_NBYTES)):
                pass
    finally:
        os.close(descriptor)
    return direct


def sync(path: str) -> None:
    """Have the drive hold a file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: str, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644), True
    except OSError:  # tmpfs before Linux 6.6
        return os.open(path, flags, 0o644), False


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


class LockedMemory:
    """Context manager that looks every 10 ms how much memory is locked or pinned, as far as Linux knows."""

    growth_nbytes = 0

    def __enter__(self) -> LockedMemory:
        self._before = _locked_nbytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.growth_nbytes = max(self.growth_nbytes, _locked_nbytes() - self._before)
            time.sleep(_SAMPLE_SECONDS)


def _locked_nbytes() -> int:
    values = status_of_process()
    return sum(int(values.get(name, "0 kB").split()[0]) for name in ("VmLck", "VmPin")) * 1024
