"""Transfers run after earlier work on the array's stream, and before later work.

Each test queues a slow kernel: a transfer that did not wait for it would end first.
"""

from __future__ import annotations

import threading
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu

SLOW_S = 0.1

# Inline in the calling thread; in blocks of a worker; in more blocks than fit into pinned memory at a time.
SMALL, SOME, MANY = SIZES = [4096, 5_000_003, 80_000_000]


def _write_file(handle: tensorferry.aio_handle, array: Any, path: pathlib.Path) -> None:
    with tensorferry.open(path, "w", engine=handle.engine) as file:
        file.write_from(array)


def _write_many(handle: tensorferry.aio_handle, array: Any, path: pathlib.Path) -> None:
    tensorferry.write_many([(path.with_name("other"), b"host"), (path, array)])


WRITES: dict[str, Any] = {
    "sync_pwrite": lambda handle, array, path: handle.sync_pwrite(array, path),
    "async_pwrite": lambda handle, array, path: handle.async_pwrite(array, path),
    "function": lambda handle, array, path: tensorferry.write(path, array),
    "file": _write_file,
    "many": _write_many,
}


def _read_file(handle: tensorferry.aio_handle, array: Any, path: pathlib.Path) -> None:
    with tensorferry.open(path, engine=handle.engine) as file:
        file.read_into(array).result()


READS: dict[str, Any] = {
    "sync_pread": lambda handle, array, path: handle.sync_pread(array, path),
    "async_pread": lambda handle, array, path: handle.async_pread(array, path),
    "function": lambda handle, array, path: tensorferry.read(path, array),
    "file": _read_file,
    "many": lambda handle, array, path: tensorferry.read_many([(path, array)]),
}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("write", "nbytes"), [*product(WRITES, [SMALL, SOME]), ("async_pwrite", MANY)]
)
def test_a_write_has_what_a_kernel_queued_before_it_puts_there(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, write: str, nbytes: int
) -> None:
    handle = make_handle()
    array = gpu.array(nbytes)
    with gpu.new_stream():
        gpu.fill_later(array, 7, SLOW_S)
        WRITES[write](handle, array, directory / "file")
    handle.wait()
    found = contents(directory / "file")
    assert found.size == nbytes
    assert (found == 7).all()


def test_a_write_on_the_default_stream_has_what_a_kernel_queued_before_it_puts_there(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    for nbytes in SIZES:
        array = gpu.array(nbytes)
        gpu.fill_later(array, 7, SLOW_S)
        handle.async_pwrite(array, directory / "file")
        assert handle.wait() == 1
        assert (contents(directory / "file") == 7).all()


def test_a_write_has_the_last_of_many_values(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    """Each write is finished before the next value is queued; each kernel is still running when its write begins."""
    handle = make_handle(block_size=65536)
    array = gpu.array(1_000_003)
    with gpu.new_stream():
        for value in range(1, 11):
            gpu.fill_later(array, value, 0.02)
            handle.async_pwrite(array, directory / "file")
            assert handle.wait() == 1
            assert (contents(directory / "file") == value).all()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("read", "nbytes"), [*product(READS, [SMALL, SOME]), ("async_pread", MANY)]
)
def test_a_read_comes_after_kernels_that_still_use_the_array(
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    read: str,
    nbytes: int,
) -> None:
    """One transfer reads the old bytes, another then writes bytes that the read must replace."""
    handle = make_handle()
    data = random_bytes(nbytes)
    data.tofile(directory / "file")
    before = random_bytes(nbytes)
    array, copy, elsewhere = gpu.array(before), gpu.array(nbytes), gpu.array(64)
    with gpu.new_stream():
        gpu.fill_later(elsewhere, 1, SLOW_S)
        gpu.copy_later(array, copy)
        gpu.fill_later(array, 9, 0)
        READS[read](handle, array, directory / "file")
    handle.wait()
    assert_equal(gpu.bytes_of(copy), before)
    assert_equal(gpu.bytes_of(array), data)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("read", "nbytes"), [*product(READS, [SMALL, SOME]), ("async_pread", MANY)]
)
def test_what_was_read_is_there_for_kernels_of_every_stream(
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    read: str,
    nbytes: int,
) -> None:
    handle = make_handle()
    data = random_bytes(nbytes)
    data.tofile(directory / "file")
    array, copies = gpu.array(nbytes), [gpu.array(nbytes) for _ in range(3)]
    with gpu.new_stream():
        READS[read](handle, array, directory / "file")
        handle.wait()
        gpu.copy_later(array, copies[0])
    gpu.copy_later(array, copies[1])
    with gpu.new_stream():
        gpu.copy_later(array, copies[2])
    for copy in copies:
        assert_equal(gpu.bytes_of(copy), data)


def test_what_was_read_is_there_for_another_thread_that_waited_for_its_future(
    gpu: Gpu, engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(20_000_003)
    data.tofile(directory / "file")
    array, copy = gpu.array(data.size), gpu.array(data.size)
    copied = threading.Event()

    def consume(_: object) -> None:
        with gpu.new_stream():
            gpu.copy_later(array, copy)
        copied.set()

    with gpu.new_stream(), tensorferry.open(directory / "file", engine=engine) as file:
        file.read_into(array).add_done_callback(consume)
    assert copied.wait(60)
    assert_equal(gpu.bytes_of(copy), data)


def test_what_is_written_is_the_value_before_kernels_queued_when_it_is_done(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """A write is done only after the whole array has been read; the caller may overwrite it then."""
    handle = make_handle()
    data = random_bytes(50_000_003)
    array = gpu.array(data)
    with gpu.new_stream():
        handle.async_pwrite(array, directory / "file")
        assert handle.wait() == 1
        gpu.fill_later(array, 1, 0)
        assert_equal(contents(directory / "file"), data)


def test_a_file_goes_through_the_gpu_and_back_while_kernels_run(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """Read, copy on the GPU, write: each step runs after the previous one, and only the handle is waited for."""
    handle = make_handle()
    data = random_bytes(3_000_001)
    data.tofile(directory / "0")
    arrays = [gpu.array(data.size) for _ in range(2)]
    with gpu.new_stream():
        for turn in range(8):
            gpu.fill_later(arrays[0], 3, 0.01)
            handle.async_pread(arrays[0], directory / str(turn))
            assert handle.wait() == 1
            gpu.copy_later(*arrays)
            handle.async_pwrite(arrays[1], directory / str(turn + 1))
            assert handle.wait() == 1
    assert_equal(contents(directory / "8"), data)


def test_two_writes_of_one_array_wait_for_the_kernels_before_each(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    """Parts of one allocation, on two streams with separate kernels."""
    handle = make_handle()
    whole = gpu.array(8_000_000)
    halves = [gpu.part(whole, 0, 4_000_000), gpu.part(whole, 4_000_000, 8_000_000)]
    for value, half in enumerate(halves, 1):
        with gpu.new_stream():
            gpu.fill_later(half, value, SLOW_S / value)
            handle.async_pwrite(half, directory / str(value))
    assert handle.wait() == 2
    for value in (1, 2):
        assert (contents(directory / str(value)) == value).all()


def test_overlapping_writes_keep_their_order_while_one_waits_for_its_kernel(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    later = random_bytes(1_000_003)
    array = gpu.array(later.size)
    path = directory / "file"
    with gpu.new_stream():
        gpu.fill_later(array, 7, SLOW_S)
        handle.async_pwrite(array, path)
    handle.async_pwrite(later, path, 100_000)
    assert handle.wait() == 2
    found = contents(path)
    assert (found[:100_000] == 7).all()
    assert_equal(found[100_000:], later)


def test_two_devices_at_once(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    if gpu.count < 2:
        pytest.skip("needs two GPUs")
    handle = make_handle(intra_op_parallelism=2)
    data = [random_bytes(10_000_003) for _ in range(2)]
    arrays = [gpu.array(data[device].size, device) for device in range(2)]
    for device in range(2):
        with gpu.new_stream(device):
            gpu.fill_later(arrays[device], 5 + device, SLOW_S)
            handle.async_pwrite(arrays[device], directory / f"kernel{device}")
    assert handle.wait() == 2
    for device in range(2):
        assert (contents(directory / f"kernel{device}") == 5 + device).all()
        data[device].tofile(directory / str(device))
    requests = [(directory / str(device), arrays[device]) for device in range(2)]
    for _ in range(5):
        tensorferry.read_many(requests)
        for device in range(2):
            assert_equal(gpu.bytes_of(arrays[device]), data[device])
            gpu.fill_later(arrays[device], 0, 0)


def test_a_kernel_that_runs_does_not_change_what_is_read_into_other_arrays(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """Many transfers in one handle; every other one is queued after a kernel on a separate stream."""
    handle = make_handle(intra_op_parallelism=2)
    data = [random_bytes(300_001 + index) for index in range(16)]
    arrays = []
    for index, bytes_ in enumerate(data):
        bytes_.tofile(directory / str(index))
        arrays.append(gpu.array(bytes_.size))
        if index % 2:
            with gpu.new_stream():
                gpu.fill_later(arrays[-1], 1, SLOW_S / 4)
                handle.async_pread(arrays[-1], directory / str(index))
        else:
            handle.async_pread(arrays[-1], directory / str(index))
    assert handle.wait() == len(data)
    for array, bytes_ in zip(arrays, data, strict=True):
        assert_equal(gpu.bytes_of(array), bytes_)


def test_pending_kernels_do_not_disturb_host_memory(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(2_000_003)
    array, found = gpu.array(4096), np.zeros_like(data)
    with gpu.new_stream():
        gpu.fill_later(array, 7, SLOW_S)
        handle.async_pwrite(array, directory / "gpu")
        handle.async_pwrite(data, directory / "host")
        tensorferry.write(directory / "host2", data)
        tensorferry.read(directory / "host2", found)
    assert handle.wait() == 2
    assert_equal(found, data)
    assert_equal(contents(directory / "host"), data)
    assert (contents(directory / "gpu") == 7).all()
