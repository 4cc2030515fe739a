"""aio_handle with GPU memory: DeepNVMe's contract, on every engine."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tests.gpu.arrays import Amid, Described
from tests.support.expect import assert_equal, assert_works, contents

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu


def test_return_values(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    path = str(directory / "file")
    data = random_bytes(100_003)
    source, found = gpu.array(data), gpu.array(data.size)
    assert handle.wait() == 0
    assert handle.sync_pwrite(source, path) == 1
    assert handle.sync_pread(found, path) == 1
    assert_equal(gpu.bytes_of(found), data)
    assert handle.write(source, path, False) == 0
    assert handle.read(found, path, True) == 0
    assert handle.pwrite(source, path, True, False) == 1
    assert handle.pread(found, path, False, True) == 0
    assert handle.pread(found, path, validate=True, **{"async": True}) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    handle.async_pwrite(source, path)
    handle.async_pwrite(source, path + "2", 5)
    assert handle.sync_pread(found, path) == 3  # this call and the two pending ones
    assert handle.wait() == 0
    assert_equal(contents(directory / "file2")[5:], data)


def test_every_call_moves_the_bytes(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle(block_size=65536, intra_op_parallelism=2)
    data = random_bytes(3_000_017)
    writers = {
        "write": lambda array, path: handle.write(array, path, True, 7),
        "sync_pwrite": lambda array, path: handle.sync_pwrite(array, path, 7),
        "async_pwrite": lambda array, path: handle.async_pwrite(array, path, 7),
        "pwrite": lambda array, path: handle.pwrite(array, path, True, False, 7),
        "pwrite async": lambda array, path: handle.pwrite(array, path, True, True, 7),
    }
    readers = {
        "read": lambda array, path: handle.read(array, path, True, 7),
        "sync_pread": lambda array, path: handle.sync_pread(array, path, 7),
        "async_pread": lambda array, path: handle.async_pread(array, path, 7),
        "pread": lambda array, path: handle.pread(array, path, True, False, 7),
        "pread async": lambda array, path: handle.pread(array, path, True, True, 7),
    }
    source = Amid(gpu, data, 13)
    for name, write in writers.items():
        write(source.array, directory / name)
        assert handle.wait() == ("async" in name)
        assert_equal(contents(directory / name)[7:], data)
    for name, read in readers.items():
        found = Amid(gpu, data.size, 4099)
        read(found.array, directory / "write")
        assert handle.wait() == ("async" in name)
        assert_equal(found.contents(), data)


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [{"block_size": 4096}, {"queue_depth": 1}, {"num_threads": 4}])
@pytest.mark.parametrize("nbytes", [4097, 1 << 20, 20_000_003])
def test_settings_of_every_kind(
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    options: dict[str, int],
    nbytes: int,
) -> None:
    handle = make_handle(**options)
    data = random_bytes(nbytes)
    found = Amid(gpu, nbytes, 1)
    assert handle.sync_pwrite(gpu.array(data), directory / "file", 3) == 1
    assert handle.sync_pread(found.array, directory / "file", 3) == 1
    assert_equal(found.contents(), data)


def test_descriptors(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(1_000_003)
    source = gpu.array(data)
    descriptor = os.open(directory / "file", os.O_CREAT | os.O_RDWR)
    assert handle.async_pwrite(source, descriptor) == 0
    assert handle.async_pwrite(gpu.part(source, 0, 10), fd=descriptor, file_offset=data.size) == 0
    os.close(descriptor)  # at once
    assert handle.wait() == 2
    assert_equal(contents(directory / "file"), data.tobytes() + data[:10].tobytes())


def test_validation_finds_a_difference(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    path = directory / "file"
    data = random_bytes(100_000)
    handle.sync_pwrite(data, path)
    found = gpu.array(data.size)
    handle.pread(found, path, True, True)
    while not handle._pending[0].future.done():
        pass
    gpu.fill_later(
        gpu.part(found, 12_345, 12_346), int(data[12_345]) ^ 1, 0
    )  # before it is validated
    gpu.synchronize()
    with pytest.raises(tensorferry.StorageError, match="12345") as caught:
        handle.wait()
    assert caught.value.offset == 12_345
    assert handle.read(found, path, True) == 0
    assert handle.pwrite(found, path, True, False) == 1


def test_host_and_gpu_memory_through_one_handle(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """Overlapping writes are done in the order in which they were asked for, whatever their memory."""
    handle = make_handle(block_size=65536)
    on_gpu, on_host = random_bytes(2_000_003), random_bytes(2_000_003)
    array = gpu.array(on_gpu)
    for _ in range(5):
        handle.async_pwrite(on_host, directory / "gpu wins", 1)
        handle.async_pwrite(array, directory / "gpu wins", 1)
        handle.async_pwrite(array, directory / "host wins", 1)
        handle.async_pwrite(on_host, directory / "host wins", 1)
    assert handle.wait() == 20
    assert_equal(contents(directory / "gpu wins")[1:], on_gpu)
    assert_equal(contents(directory / "host wins")[1:], on_host)
    assert_works(handle, directory)


def test_threads_share_a_handle_and_each_completion_counts_once(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle(intra_op_parallelism=2)
    counts: list[int] = []
    failures: list[BaseException] = []
    data = [random_bytes(20_000 + index) for index in range(4)]

    def work(index: int) -> None:
        try:
            device = index % gpu.count
            with gpu.new_stream(device):
                source = gpu.array(data[index], device)
                for turn in range(50):
                    handle.async_pwrite(source, directory / f"{index}-{turn % 3}")
                    counts.append(handle.wait())
                found = gpu.array(data[index].size, device)
                for turn in range(3):
                    handle.read(found, directory / f"{index}-{turn}")
                    assert_equal(gpu.bytes_of(found), data[index])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert sum(counts) + handle.wait() == 200


def test_counters(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    handle.sync_pwrite(gpu.array(random_bytes(8 << 20)), directory / "file")
    handle.sync_pread(gpu.array(1 << 20), directory / "file")
    stats = handle.stats()
    assert stats["requests"] == 2
    assert stats["written_nbytes"] == 8 << 20
    assert stats["read_nbytes"] == 1 << 20
    assert stats["gpu_nbytes"] == 9 << 20
    assert stats["gds_nbytes"] == 0


def test_arrays_of_any_library_that_describes_them(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(1_000_000)
    source, found = Described(gpu.array(data)), gpu.array(data.size)
    handle.sync_pwrite(source, directory / "file")
    assert_equal(contents(directory / "file"), data)
    for changes in (
        {"version": 2},
        {"stream": None},
        {"strides": (1,)},
        {"typestr": "<f4", "shape": (data.size // 4,)},
        {"typestr": "<f4", "shape": (data.size // 8, 2), "strides": (8, 4)},
    ):
        with gpu.new_stream():
            gpu.fill_later(found, 0, 0)
            gpu.synchronize()
            tensorferry.read(directory / "file", Described(found, **changes))
        assert_equal(gpu.bytes_of(found), data)


def test_arrays_that_cannot_be_moved_as_they_are(gpu: Gpu, directory: pathlib.Path) -> None:
    path = directory / "never"
    array = gpu.array(4096)
    address = Described(array).address
    read_only = Described(array, data=(address, True))
    strided = Described(array, shape=(64, 32), strides=(64, 2))
    with pytest.raises(ValueError, match="read-only"):
        tensorferry.read(path, read_only)
    with pytest.raises(ValueError, match="contiguous"):
        tensorferry.write(path, strided)
    with pytest.raises(ValueError, match="contiguous"):
        tensorferry.read(path, strided)
    host = bytearray(4096)
    from_host = (id(host), False)  # an address that is none of a GPU's
    with pytest.raises(ValueError, match=r"GPU|CUDA"):
        tensorferry.write(path, Described(array, data=from_host))
    assert not path.exists()
    tensorferry.write(path, read_only)
    assert path.read_bytes() == bytes(4096)


def test_empty_arrays(gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path) -> None:
    handle = make_handle()
    empty = gpu.array(0)
    assert handle.sync_pwrite(empty, directory / "file") == 1
    assert (directory / "file").stat().st_size == 0
    assert handle.sync_pread(empty, directory / "file") == 1
    handle.async_pread(empty, directory / "file")
    assert handle.wait() == 1
