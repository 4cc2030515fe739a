"""The ways that bytes can take between memory and a file: ds_io's engines, the files API, plain Python.

A way is made once in each process. What users do once (make a handle, open a file) is done there or in
``prepare``, outside the clock; ``transfer`` is what is measured.
"""

from __future__ import annotations

import dataclasses
import os
from io import FileIO
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.transfer.profiled import ProfiledScheduler
from tensorferry.transfer.runtime import default_scheduler
from tensorferry.transfer.settings import Settings
from tensorferry.tuning.bench.memory import ValidationError

if TYPE_CHECKING:
    from pathlib import Path

    from tensorferry.tuning.bench.arguments import Job, Operation
    from tensorferry.tuning.bench.memory import Memory


_OF_HANDLES = (
    "block_size",
    "queue_depth",
    "single_submit",
    "overlap_events",
    "intra_op_parallelism",
)


class Way:
    """One way; what most of them have in common."""

    # Whether a read fills the memory that is there; else it makes its own.
    fills_memory = True

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def prepare(self, operation: Operation, path: Path) -> None:
        """Get ready for one transfer."""
        self._operation = operation
        self._path = path

    def transfer(self) -> None:
        """Write the memory to the file, or read it from there."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a ValidationError where the file and what was written or read differ."""
        self._memory.check(self._path)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the last transfer went by, as far as it has any."""
        return {}

    def latency_microseconds(self) -> dict[str, float] | None:
        """Return percentiles of how long a block took, over the life of the handle; None where nobody knows."""
        return None

    def gpu(self) -> dict[str, Any] | None:
        """Return how bytes of a GPU's memory went, over the life of the handle; None where none went by ours."""
        return None

    def close(self) -> None:
        """Let go of what it has."""


def make_way(name: str, job: Job, memory: Memory) -> Way:
    """Return one of ENGINES, or "gds_handle", or "python": what most programs do."""
    settings = dict(job.settings)
    if name in ("aio_handle", "gds_handle"):
        return _HandleWay(getattr(tensorferry, name)(**settings), memory)
    if name == "files":
        settings.pop("overlap_events", None)  # queues are always refilled
        return _FilesWay(settings, memory)
    if name == "torch_io":
        return _TorchWay(job, memory)
    return _PythonWay(memory)


class _HandleWay(Way):
    """Asynchronous calls of ``aio_handle``, or of ``gds_handle`` with the GPU's memory registered once, as in ds_io."""

    def __init__(self, handle: tensorferry.aio_handle, memory: Memory) -> None:
        super().__init__(memory)
        self._handle = handle
        if isinstance(handle, tensorferry.gds_handle):
            handle.pin_device_tensor(memory.device)

    def transfer(self) -> None:
        with self._memory.transferred(self._operation) as array:
            if self._operation == "read":
                self._handle.async_pread(array, self._path)
            else:
                self._handle.async_pwrite(array, self._path)
            self._handle.wait()

    def settings(self) -> dict[str, Any]:
        used = {name: getattr(self._handle, f"get_{name}")() for name in _OF_HANDLES}
        return used | {"engine": self._handle.engine}

    def latency_microseconds(self) -> dict[str, float] | None:
        return _latency(self._handle.stats())

    def gpu(self) -> dict[str, Any] | None:
        return _gpu(self._handle.stats())

    def close(self) -> None:
        if isinstance(self._handle, tensorferry.gds_handle):
            self._handle.unpin_device_tensor(self._memory.device)
        self._handle.close()


class _FilesWay(Way):
    """``tensorferry.open`` with ``read`` and ``write``."""

    def __init__(self, settings: dict[str, Any], memory: Memory) -> None:
        super().__init__(memory)
        self._given = settings
        self._file: tensorferry.File | None = None
        self._gpu_nbytes = 0
        self._counted_before = 0  # files may share a scheduler, and its counters

    def prepare(self, operation: Operation, path: Path) -> None:
        super().prepare(operation, path)
        self._count()
        self.close()
        mode = "r" if self._operation == "read" else "r+" if path.exists() else "w"
        self._file = tensorferry.open(path, mode, **self._given)
        self._counted_before = self._file.stats()["gpu_nbytes"]

    def transfer(self) -> None:
        assert self._file is not None
        with self._memory.transferred(self._operation) as array:
            if self._operation == "read":
                self._file.read(array)
            else:
                self._file.write(array)

    def settings(self) -> dict[str, Any]:
        assert self._file is not None
        scheduler, profile = default_scheduler(), None
        if isinstance(scheduler, ProfiledScheduler) and not self._given:
            profile = scheduler.latest_settings()
        used = dataclasses.asdict(profile or Settings()) | self._given
        return {name: used[name] for name in _OF_HANDLES[:2]} | {"engine": self._file.engine}

    def latency_microseconds(self) -> dict[str, float] | None:
        return _latency(self._file.stats()) if self._file is not None else None

    def gpu(self) -> dict[str, Any] | None:
        self._count()
        return _gpu({"gpu_nbytes": self._gpu_nbytes, "gds_nbytes": 0})

    def _count(self) -> None:
        if self._file is not None:
            counted = self._file.stats()["gpu_nbytes"]
            self._gpu_nbytes += counted - self._counted_before
            self._counted_before = counted

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _TorchWay(Way):
    """``torch.save`` and ``torch.load``."""

    fills_memory = False

    def __init__(self, job: Job, memory: Memory) -> None:
        super().__init__(memory)
        self._tensor = memory.tensor()
        self._zip = not job.torch_legacy_save
        self._loaded: Any = None

    def prepare(self, operation: Operation, path: Path) -> None:
        super().prepare(operation, path)
        self._loaded = None  # its memory is needed for the next

    def transfer(self) -> None:
        import torch

        if self._operation == "read":
            self._loaded = torch.load(self._path, map_location=self._tensor.device)
        else:
            torch.save(self._tensor, self._path, _use_new_zipfile_serialization=self._zip)

    def check(self) -> None:
        import torch

        read = self._operation == "read"
        found = self._loaded if read else torch.load(self._path, map_location=self._tensor.device)
        if not torch.equal(found, self._tensor):
            raise ValidationError(
                f"validation failed: {str(self._path)!r} does not hold the tensor that was saved"
            )


class _PythonWay(Way):
    """``open`` with ``readinto``, or with ``write`` and ``os.fsync``: plain Python."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        _ = memory.host  # made now, outside the clock

    def transfer(self) -> None:
        reading = self._operation == "read"
        mode = "r" if reading else "r+" if self._path.exists() else "w"
        with self._memory.on_host(self._operation) as rest, FileIO(self._path, mode) as file:
            while rest:
                count = file.readinto(rest) if reading else file.write(rest)
                if not count:
                    raise EOFError(f"{str(self._path)!r} is shorter than it was")
                rest = rest[count:]
            if not reading:
                os.fsync(file.fileno())


def _gpu(stats: dict[str, Any]) -> dict[str, Any] | None:
    """Return bytes to and from the GPU's memory, those of them that cuFile moved, and whether it copied them itself."""
    if not stats["gpu_nbytes"]:
        return None
    return {name: stats[name] for name in ("gpu_nbytes", "gds_nbytes", "compat") if name in stats}


def _latency(stats: dict[str, Any]) -> dict[str, float] | None:
    # Blocks that the caller's thread or the page cache served are not in it.
    return stats["block_latency_microseconds"] if stats["engine_blocks"] else None
