"""What the tests of GPUs in benchmarks and tuning run in processes of their own, on the stand-in driver."""

from __future__ import annotations

import contextlib
import pathlib
from typing import TYPE_CHECKING, Any

from tensorferry.transfer.settings import Settings
from tensorferry.tuning import drive, gpus
from tensorferry.tuning.bench.arguments import Job
from tensorferry.tuning.bench.ways import make_way
from tensorferry.tuning.drive import Drives
from tests.support import standin

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


class OnGpu:
    """Serves as bench.memory.Memory with an array that is no torch tensor."""

    def __init__(self, device: Any) -> None:
        self.device = device

    @contextlib.contextmanager
    def transferred(self, operation: str) -> Iterator[Any]:
        yield self.device


def bench(directory: str, way: str, nvidia_fs: bool) -> dict[str, Any]:
    """Write and read an array by a way of `tensorferry bench`, and return what it says of itself."""
    driver = standin.loaded()
    driver.set(cufile_nvfs=nvidia_fs)
    written, found = driver.array(bytes(range(256)) * 4096), driver.array(MIB)
    path = pathlib.Path(directory, "file")
    job = Job(places=(), operations=("write", "read"), io_nbytes=MIB, gpu=True, memory="gpu")
    said: dict[str, Any] = {"way": way}
    for operation, array in (("write", written), ("read", found)):
        memory: Any = OnGpu(array)
        measured = make_way(way, job, memory)
        measured.prepare(operation, path)  # type: ignore[arg-type]
        measured.transfer()
        said[operation] = measured.gpu()
        said["settings"] = measured.settings()
        measured.close()
    said["right"] = path.read_bytes() == driver.peek(found.address, MIB) == bytes(range(256)) * 4096
    said["pinned"] = driver.count("cufile_buffers")
    return said


def tune(directory: str, gds: bool, nvidia_fs: bool) -> dict[str, Any]:
    """Measure two files on two GPUs as `tensorferry tune` does."""
    driver = standin.loaded()
    driver.set(cufile_nvfs=nvidia_fs)
    arrays = [driver.array(16 * MIB, device) for device in (0, 1)]
    drive._gpu_tensors = lambda count, nbytes: arrays[:count]  # torch's cannot be on the stand-in
    engine = gpus.CUFILE if gds and gpus.gds_uses_cufile() else "threads"
    folders = [pathlib.Path(directory)] * 2
    with Drives(folders, 16 * MIB, gpu=True, gds=gds) as drives:
        settings = Settings(MIB, 8, engine=engine)
        moved = [drives.measure(settings, write, 16 * MIB).nbytes for write in (True, False)]
        stats = [scheduler.stats() for scheduler in drives._schedulers[settings]]
        pinned = driver.count("cufile_buffers")
    return {
        "moved": moved,
        "engine": engine,
        "gpu_nbytes": [each["gpu_nbytes"] for each in stats],
        "gds_nbytes": [each["gds_nbytes"] for each in stats],
        "pinned": pinned,
        "pinned_afterwards": driver.count("cufile_buffers"),
    }
