"""A file on the drive under test, and measurements of writing and reading it with different settings.

The file has no name, so the kernel removes it when the process ends, for any reason. It is written completely before
the first measurement. Writes overwrite it in place. Before a read, it is dropped from the page cache. If O_DIRECT does
not work, a write only copies into the page cache, so its measured time includes a sync. The memory is on the host or on
one GPU.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry import _core
from tensorferry.transfer.arrays import memory_of
from tensorferry.transfer.requests import start
from tensorferry.transfer.runtime import close_scheduler, start_scheduler
from tensorferry.tuning.machine.limits import available_nbytes
from tensorferry.tuning.moving import pattern

if TYPE_CHECKING:
    from pathlib import Path

    from tensorferry.transfer.settings import Settings

# The number of schedulers that are kept for later rounds. A scheduler has the worker threads for one of the settings.
_MAX_IDLE = 16
# A file takes at most one part in _FREE_SHARE of the free space, and of the available memory.
_FREE_SHARE = 4


class Drive:
    """A file in a folder on the drive. Close it, or use it as a context manager.

    Parameters
    ----------
    folder : Path
        The folder.
    nbytes : int
        The size of the file.
    gpu : int, optional
        The number of the GPU for the memory; by default host memory is used.
    gds : bool
        Whether to pin the GPU memory for cuFile, as a user of gds_handle does.

    Raises
    ------
    OSError
        The folder is not writable, or the disk is full.
    MemoryError
        The memory for the data cannot be allocated.
    """

    def __init__(
        self, folder: Path, nbytes: int, gpu: int | None = None, *, gds: bool = False
    ) -> None:
        self.nbytes = nbytes
        self.memory = "host" if gpu is None else f"gpu{gpu}"
        self.samples: dict[tuple[Settings, str], list[tuple[float, float]]] = defaultdict(list)
        self._schedulers: dict[Settings, _core.Scheduler] = {}
        self._resources = ExitStack()
        try:
            file = tempfile.TemporaryFile(dir=folder, prefix=".tensorferry-tune-")  # noqa: SIM115
            self._descriptor = self._resources.enter_context(file).fileno()
            os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            # The folder is more useful in the message than the name of a temporary file.
            raise OSError(error.errno, error.strerror, str(folder)) from None
        try:
            self._file = _core.file_from_descriptor(self._descriptor, True, "auto")
            if self._file.direct:  # "always" skips the check of the page cache before each read
                self._file = _core.file_from_descriptor(self._descriptor, True, "always")
            array = _host_memory(nbytes) if gpu is None else _gpu_tensor(gpu, nbytes)
            self._array = memory_of(array, writable=True)
            if gds:
                handle = self._resources.enter_context(tensorferry.gds_handle())
                handle.pin_device_tensor(array)
        except BaseException:
            self._resources.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether the file is read and written with direct I/O."""
        return self._file.direct

    def measure(self, settings: Settings, direction: str) -> float:
        """Write or read the file, and return the time in seconds.

        Raises
        ------
        EngineUnavailableError
            The engine of the settings is not available.
        StorageError
            The transfer failed.
        """
        scheduler, write = self._scheduler_with(settings), direction == "write"
        if not write:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        address, _, owner, location = self._array
        memory, sync = (address, self.nbytes, owner, location), write and not self._file.direct
        cpu_begin, begin = time.process_time(), time.perf_counter()
        future = start(scheduler, self._file, owner, memory, 0, write=write, sync=sync)
        try:
            future.result()
        except BaseException:
            future._abandon()
            raise
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        self.samples[settings, direction].append((seconds, cpu_seconds))
        return seconds

    def rates(self, settings: Settings, direction: str) -> dict[str, float] | None:
        """Return the median, lowest and highest bytes per second and the CPU seconds per 10^9 bytes, if measured."""
        samples = self.samples.get((settings, direction))
        if not samples:
            return None
        rates = [self.nbytes / max(seconds, 1e-9) for seconds, _ in samples]
        cpu = statistics.median(cpu_seconds for _, cpu_seconds in samples)
        return {
            "median": statistics.median(rates),
            "low": min(rates),
            "high": max(rates),
            "cpu_seconds_per_gb": cpu / self.nbytes * 1e9,
        }

    def measurements(self) -> list[dict[str, Any]]:
        """Return all measurements for JSON."""
        return [
            {"direction": direction, "settings": settings._asdict()}
            | {"seconds": [s for s, _ in samples], "cpu_seconds": [cpu for _, cpu in samples]}
            for (settings, direction), samples in self.samples.items()
        ]

    def close(self) -> None:
        """Close the file, and release the descriptors and threads."""
        self._close_schedulers()
        self._file.close()
        self._resources.close()

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scheduler_with(self, settings: Settings) -> _core.Scheduler:
        if settings not in self._schedulers:
            if len(self._schedulers) >= _MAX_IDLE:
                self._close_schedulers()
            self._schedulers[settings] = start_scheduler(settings.engine or "", settings)
        return self._schedulers[settings]

    def _close_schedulers(self) -> None:
        closing, self._schedulers = self._schedulers, {}
        for scheduler in closing.values():
            close_scheduler(scheduler)


def largest_nbytes(folder: Path, gpu: int | None = None) -> int:
    """Return the maximum size of a file: a quarter of the free space and of the available memory."""
    status = os.statvfs(folder)
    free = available_nbytes()
    if gpu is not None:
        import torch

        free = torch.cuda.mem_get_info(gpu)[0]
    return min(free, status.f_bavail * status.f_frsize) // _FREE_SHARE


def _host_memory(nbytes: int) -> Any:
    memory, _ = _core.allocate(nbytes, True)
    _fill(memoryview(memory))
    return memory


def _gpu_tensor(number: int, nbytes: int) -> Any:
    import torch

    content = bytearray(nbytes)
    _fill(memoryview(content))
    try:
        return torch.frombuffer(content, dtype=torch.uint8).to(f"cuda:{number}")
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{nbytes} bytes of GPU memory cannot be allocated: {error}") from None


def _fill(memory: memoryview) -> None:
    """Fill memory with bytes that a drive cannot compress; otherwise it would be measured as too fast."""
    for begin, part in pattern(len(memory), 1):
        memory[begin : begin + len(part)] = part
