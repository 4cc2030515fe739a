"""A file on each drive under test, and how fast settings write and read it.

The files have no name, so that nothing stays behind however the process ends. They are written in full before anything
is timed; writes go over them in place, reads find nothing of them in the page cache. Where O_DIRECT does not work,
writes are made durable within the time measured. The memory is the host's, or that of GPUs.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry import _core
from tensorferry.errors import EngineUnavailableError, StorageError
from tensorferry.transfer.arrays import memory_of
from tensorferry.transfer.requests import start
from tensorferry.transfer.runtime import close_scheduler, start_scheduler
from tensorferry.tuning.machine.limits import available_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tensorferry.transfer.futures import Future
    from tensorferry.transfer.settings import Settings

_PATTERN_NBYTES = 4 << 20
_CLOSERS = 8
_MAX_IDLE = 8  # settings whose workers wait for their next turn
# Of the free space, and of the memory available, a file takes at most one part in so many.
_FREE_SHARE = 4


@dataclass(frozen=True)
class Measurement:
    """One write or read: bytes moved over all drives, and what it took.

    ``stopped`` is set where it was cut short, because it had already taken too long to matter. ``drive_seconds`` is how
    long each of several drives took for its share.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    stopped: bool = False
    drive_seconds: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes in a second."""
        return max(self.nbytes, 1) / max(self.seconds, 1e-9)

    @property
    def drive_rates(self) -> tuple[float, ...]:
        """Bytes in a second of each drive, beside the others."""
        share = self.nbytes / max(len(self.drive_seconds), 1)
        return tuple(share / max(s, 1e-9) for s in self.drive_seconds) or (self.rate,)


class Drives:
    """Files in folders, one in each, measured at the same time. Close it, or use it as a context manager.

    Parameters
    ----------
    folders : sequence of Path
        On the drives.
    nbytes : int
        Of each file.
    gpu : bool
        Move memory of GPUs: the first folder's is on the first GPU, and so on, as in ds_nvme_tune.
    gds : bool
        Pin it for cuFile, as a user of gds_handle does.

    Raises
    ------
    OSError
        A folder cannot be written to, or has no room.
    MemoryError
        The system has no memory for the data.
    """

    def __init__(
        self, folders: Sequence[Path], nbytes: int, *, gpu: bool = False, gds: bool = False
    ) -> None:
        self.nbytes = nbytes
        self._closers = ThreadPoolExecutor(_CLOSERS)
        self._schedulers: dict[Settings, list[_core.Scheduler]] = {}
        self._resources = ExitStack()
        try:
            self._files = [self._make_file(folder, nbytes) for folder in folders]
            arrays = _gpu_tensors(len(folders), nbytes) if gpu else [_host_memory(nbytes)]
            self._memories = [memory_of(array, writable=True) for array in arrays]
            if gds:
                handle = self._resources.enter_context(tensorferry.gds_handle())
                for tensor in arrays:
                    handle.pin_device_tensor(tensor)
        except BaseException:
            self._resources.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether all files are read and written past the page cache."""
        return all(file.direct for _, file in self._files)

    def measure(
        self, settings: Settings, write: bool, nbytes: int, limit_seconds: float | None = None
    ) -> Measurement:
        """Write or read the first `nbytes` of every file, and stop after `limit_seconds`.

        Raises
        ------
        StorageError
            A transfer failed.
        """
        schedulers = self._schedulers_with(settings)
        futures: list[Future] = []
        ended: dict[Future, float] = {}
        if not write:
            for descriptor, _ in self._files:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        cpu_begin, begin = time.process_time(), time.perf_counter()
        try:
            for number, (scheduler, (_, file)) in enumerate(
                zip(schedulers, self._files, strict=True)
            ):
                address, _, owner, location = self._memories[number % len(self._memories)]
                memory = (address, nbytes, owner, location)
                sync = write and not file.direct
                futures.append(start(scheduler, file, owner, memory, 0, write=write, sync=sync))
            if len(futures) > 1:
                for future in futures:
                    future.add_done_callback(lambda f: ended.update({f: time.perf_counter()}))
            moved = [_finish(future, nbytes, begin, limit_seconds) for future in futures]
        except BaseException:
            for future in futures:
                future._abandon()
            raise
        end = time.perf_counter()
        cpu_seconds = time.process_time() - cpu_begin
        stopped = sum(moved) < nbytes * len(moved)
        each = tuple(min(ended.get(future, end), end) - begin for future in futures)
        return Measurement(sum(moved), end - begin, cpu_seconds, stopped, each)

    def close(self) -> None:
        """Give files, descriptors and threads back."""
        self._close_schedulers()
        self._closers.shutdown()
        self._resources.close()
        self._files = []

    def __enter__(self) -> Drives:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _schedulers_with(self, settings: Settings) -> list[_core.Scheduler]:
        """Return one scheduler for each file: those of an earlier measurement, if it had the same settings lately."""
        if settings not in self._schedulers:
            if len(self._schedulers) >= _MAX_IDLE:
                self._close_schedulers()
            try:
                self._make_schedulers(settings)
            except EngineUnavailableError:  # the others may hold what is short
                self._close_schedulers()
                self._make_schedulers(settings)
        return self._schedulers[settings]

    def _make_schedulers(self, settings: Settings) -> None:
        made = self._schedulers[settings] = []
        for _ in self._files:  # each is kept at once, to be closed should the next be refused
            scheduler = start_scheduler(
                settings.engine or "",
                settings.block_size,
                settings.queue_depth,
                settings.intra_op_parallelism,
                settings.single_submit,
            )
            made.append(scheduler)

    def _close_schedulers(self) -> None:
        """End them, all at once: the kernel lets a worker of libaio wait for its end, and no clock runs meanwhile."""
        closing = [each for some in self._schedulers.values() for each in some]
        self._schedulers = {}
        list(self._closers.map(close_scheduler, closing))

    def _make_file(self, folder: Path, nbytes: int) -> tuple[int, _core.File]:
        try:
            made = tempfile.TemporaryFile(dir=folder, prefix=".tensorferry-tune-")  # noqa: SIM115
            descriptor = self._resources.enter_context(made).fileno()
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:  # the file's made-up name, or none, would only puzzle
            raise OSError(error.errno, error.strerror, str(folder)) from None
        file = _core.file_from_descriptor(descriptor, True, "auto")
        if file.direct:  # and then without a look into the page cache
            file = _core.file_from_descriptor(descriptor, True, "always")
        return descriptor, file


def largest_nbytes(folders: Sequence[Path], *, gpu: bool = False) -> int:
    """Return how large a file may be without being a burden: a quarter of the free space and of the memory."""
    free = _free_gpu_nbytes(len(folders)) if gpu else [available_nbytes()]
    for folder in folders:
        status = os.statvfs(folder)
        # Folders may share a file system; then so do their files.
        free.append(status.f_bavail * status.f_frsize // len(folders))
    return min(free) // _FREE_SHARE


def _finish(future: Future, nbytes: int, begin: float, limit_seconds: float | None) -> int:
    """Wait for a transfer, end it where it takes too long, and return the bytes it moved."""
    left = None
    if limit_seconds is not None:
        left = max(0.0, begin + limit_seconds - time.perf_counter())
    try:
        failure = future.exception(left)
    except TimeoutError:
        future._request.cancel()
        ended = future.exception()
        if isinstance(ended, StorageError) and ended.errno == errno.ECANCELED:
            return ended.transferred
        failure = ended
    if failure is not None:
        raise failure
    return nbytes


def _host_memory(nbytes: int) -> Any:
    """Return memory that all files share."""
    memory, _ = _core.allocate(nbytes, True)
    _fill(memoryview(memory))
    return memory


def _gpu_tensors(count: int, nbytes: int) -> list[Any]:
    """Return a tensor on a GPU for each file: folders and GPUs belong together in their order, as in ds_nvme_tune."""
    import torch

    content = bytearray(nbytes)
    _fill(memoryview(content))
    on_host = torch.frombuffer(content, dtype=torch.uint8)
    gpus = torch.cuda.device_count()
    try:
        return [on_host.to(f"cuda:{number % gpus}") for number in range(count)]
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"no GPU memory for {nbytes} bytes: {error}") from None


def _free_gpu_nbytes(count: int) -> list[int]:
    """Return the free memory of each GPU that files use, shared among these."""
    import torch

    gpus = min(torch.cuda.device_count(), count)
    files_each = -(-count // gpus)
    return [torch.cuda.mem_get_info(number)[0] // files_each for number in range(gpus)]


def _fill(memory: memoryview) -> None:
    """Fill memory with bytes that no drive can compress, different for each stretch of a few megabytes."""
    pattern = bytearray(random.Random(len(memory)).randbytes(min(len(memory), _PATTERN_NBYTES)))
    for index, begin in enumerate(range(0, len(memory), _PATTERN_NBYTES)):
        pattern[:8] = index.to_bytes(8, "little")
        part = memory[begin : begin + _PATTERN_NBYTES]
        part[:] = memoryview(pattern)[: len(part)]
