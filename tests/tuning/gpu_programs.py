"""Functions that the tests of GPUs in benchmarks and tuning run in separate processes, on the stand-in driver."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.transfer.settings import Settings
from tensorferry.tuning import drive, gpus
from tensorferry.tuning.bench import Job
from tensorferry.tuning.drive import Drive
from tensorferry.tuning.moving import make_method
from tests.support import standin

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


class OnGpu:
    """A replacement for moving.Memory with an array instead of a torch tensor."""

    def __init__(self, device: Any) -> None:
        self.device = device

    @contextlib.contextmanager
    def buffer_for(self, write: bool) -> Iterator[Any]:
        yield self.device


def bench(directory: str, way: str, nvidia_fs: bool) -> dict[str, Any]:
    """Write and read an array with a method of `tensorferry bench`, and return its description."""
    driver = standin.loaded()
    driver.set(cufile_nvfs=nvidia_fs)
    written, found = driver.array(bytes(range(256)) * 4096), driver.array(MIB)
    path = Path(directory, "file")
    job = Job(places=(), io_nbytes=MIB, gpu=True, memory="gpu")
    said: dict[str, Any] = {"way": way}
    for operation, array in (("write", written), ("read", found)):
        memory: Any = OnGpu(array)
        measured = make_method(way, job, memory)
        measured.prepare(path, operation == "write")
        measured.move()
        stats = measured.stats or {}
        names = ("gpu_nbytes", "gds_nbytes", "compat")
        said[operation] = {name: stats[name] for name in names if name in stats}
        said["settings"] = measured.settings()
        measured.close()
    said["right"] = path.read_bytes() == driver.peek(found.address, MIB) == bytes(range(256)) * 4096
    said["pinned"] = driver.count("cufile_buffers")
    return said


def tune(directory: str, gds: bool, nvidia_fs: bool) -> dict[str, Any]:
    """Measure a file with memory of the second GPU as `tensorferry tune` does."""
    driver = standin.loaded()
    driver.set(cufile_nvfs=nvidia_fs)
    array = driver.array(16 * MIB, 1)
    drive._gpu_tensor = lambda number, nbytes: array  # torch has no tensors on the stand-in
    engine = gpus.CUFILE if gds and gpus.gds_uses_cufile() else "threads"
    with Drive(Path(directory), 16 * MIB, 1, gds=gds) as measured:
        settings = Settings(MIB, 8, engine=engine)
        for direction in ("write", "read"):
            measured.measure(settings, direction)
        stats = measured._schedulers[settings].stats()
        pinned = driver.count("cufile_buffers")
    return {
        "memory": measured.memory,
        "engine": engine,
        "gpu_nbytes": stats["gpu_nbytes"],
        "gds_nbytes": stats["gds_nbytes"],
        "pinned": pinned,
        "pinned_afterwards": driver.count("cufile_buffers"),
    }
