"""The host memory that transfers of GPU memory need: bounded while they run, and none afterwards."""

from __future__ import annotations

import gc
import pathlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tensorferry import _core
from tests.gpu.programs import assert_moves
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    from tests.conftest import MakeHandle
    from tests.support.gpus import Gpu

PINNED_NBYTES_MAX = 128 << 20
LARGE = 400_000_007
REPETITIONS = 500


class HostMemory:
    """A context manager that samples the growth of this process's host memory every 2 ms."""

    growth_nbytes = 0
    locked_nbytes = 0

    def __enter__(self) -> HostMemory:
        self._before = _status_nbytes("VmRSS")
        self._locked_before = _status_nbytes("VmLck") + _status_nbytes("VmPin")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            locked = _status_nbytes("VmLck") + _status_nbytes("VmPin") - self._locked_before
            self.locked_nbytes = max(self.locked_nbytes, locked)
            self.growth_nbytes = max(self.growth_nbytes, _status_nbytes("VmRSS") - self._before)


def _status_nbytes(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.in_turn
@pytest.mark.parametrize("workers", [1, 4])
def test_a_large_transfer_takes_little_host_memory(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, workers: int
) -> None:
    handle = make_handle(intra_op_parallelism=workers)
    array = gpu.array(LARGE)
    gpu.fill_later(array, 7, 0)
    gpu.synchronize()
    with HostMemory() as writing:
        handle.sync_pwrite(array, directory / "file")
    gpu.fill_later(array, 0, 0)
    gpu.synchronize()
    with HostMemory() as reading:
        handle.async_pread(array, directory / "file")
        handle.wait()
    for memory in (writing, reading):
        assert memory.locked_nbytes <= PINNED_NBYTES_MAX
        assert memory.growth_nbytes <= PINNED_NBYTES_MAX
    assert 0 < _core.pinned_pool_nbytes() <= PINNED_NBYTES_MAX
    for begin in range(0, LARGE, 1 << 28):
        end = min(LARGE, begin + (1 << 28))
        assert (np.frombuffer(gpu.bytes_of(gpu.part(array, begin, end)), np.uint8) == 7).all()


@pytest.mark.in_turn
@pytest.mark.parametrize("nbytes", [4096, 300_001])
def test_hundreds_of_transfers_leak_nothing(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, nbytes: int
) -> None:
    handle = make_handle(block_size=65536)
    path = directory / "file"
    array = gpu.array(nbytes)

    with tensorferry.open(path, "w+", engine=handle.engine) as file:

        def transfer() -> None:
            handle.sync_pwrite(array, path)
            handle.async_pread(gpu.array(nbytes), path)
            handle.wait()
            file.read_into(array).result()
            tensorferry.read_many([(path, array), (path, gpu.array(100))])

        for _ in range(REPETITIONS // 10):
            transfer()
        live = gpu.live()
        with nothing_leaks(objects_slack=REPETITIONS // 2):
            for _ in range(REPETITIONS):
                transfer()
        gc.collect()
        assert gpu.live() == live
    assert_moves(gpu, handle, directory)


@pytest.mark.in_turn
def test_hundreds_of_failures_leak_nothing(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    short = directory / "short"
    short.write_bytes(bytes(1000))
    array = gpu.array(12_003)

    def fail() -> None:
        for call in (
            lambda: handle.sync_pread(array, directory / "missing"),
            lambda: handle.sync_pread(array, short),
            lambda: handle.async_pread(array, short),
            lambda: tensorferry.read_many([(short, array)]),
        ):
            with pytest.raises(tensorferry.StorageError):
                call()

    for _ in range(REPETITIONS // 10):
        fail()
    live = gpu.live()
    with nothing_leaks(objects_slack=REPETITIONS // 2):
        for _ in range(REPETITIONS):
            fail()
    gc.collect()
    assert gpu.live() == live
    assert_moves(gpu, handle, directory)


@pytest.mark.in_turn
def test_a_hundred_handles_leak_nothing(gpu: Gpu, engine: str, directory: pathlib.Path) -> None:
    """Their threads and objects on the GPU are freed with them, or reused by the next ones."""
    array = gpu.array(300_001)

    def use() -> None:
        with tensorferry.aio_handle(engine=engine, queue_depth=4, block_size=65536) as handle:
            handle.async_pwrite(array, directory / "file")
            handle.sync_pread(array, directory / "file")

    for _ in range(10):
        use()
    with nothing_leaks(resident_slack_nbytes=16 << 20):
        for _ in range(100):
            use()
