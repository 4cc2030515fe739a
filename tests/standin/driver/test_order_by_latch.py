"""The operations that transfers wait for, and those that they do not: tested with kernels that a latch holds."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support import standin
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu
    from tests.support.standin import StandIn

SIZES = [100, 4096, 5_000_003]
PATIENCE_S = 30


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_asynchronous_write_returns_before_the_kernel_has_ended_and_moves_nothing_yet(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, nbytes: int
) -> None:
    handle = make_handle()
    array = gpu.array(nbytes)
    with tensorferry.open(directory / "future", "w", engine=handle.engine) as file:
        with gpu.new_stream(), driver.held(array, 7):
            assert handle.async_pwrite(array, directory / "file") == 0
            future = file.write_from(array)
            with pytest.raises(TimeoutError):
                future.result(timeout=0.1)
            assert not handle._pending[0].future.done()
            assert driver.count("dtoh_nbytes") == 0
        assert handle.wait() == 1
        future.result(timeout=PATIENCE_S)
    assert driver.count("dtoh_nbytes") == 2 * nbytes
    for name in ("file", "future"):
        found = contents(directory / name)
        assert found.size == nbytes
        assert (found == 7).all()


@pytest.mark.parametrize("nbytes", SIZES)
def test_an_asynchronous_read_returns_before_the_kernel_has_ended_and_moves_nothing_yet(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    nbytes: int,
) -> None:
    handle = make_handle()
    data = random_bytes(nbytes)
    data.tofile(directory / "file")
    array = gpu.array(nbytes)
    with gpu.new_stream(), driver.held(array, 7):
        assert handle.async_pread(array, directory / "file") == 0
        time.sleep(0.1)
        assert not handle._pending[0].future.done()
        assert driver.count("htod_nbytes") == 0
        assert driver.peek(array.address, nbytes) == bytes(nbytes)
    assert handle.wait() == 1
    assert_equal(gpu.bytes_of(array), data)


@pytest.mark.parametrize("stream", ["own", "legacy", "per thread"])
def test_every_kind_of_stream_is_waited_for(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, stream: str
) -> None:
    handle = make_handle()
    streams: dict[str, Any] = {
        "own": gpu.new_stream,
        "legacy": lambda: driver.stream(standin.LEGACY_STREAM),
        "per thread": lambda: driver.stream(standin.PER_THREAD_STREAM),
    }
    for nbytes in SIZES:
        array = gpu.array(nbytes)
        with streams[stream](), driver.held(array, 7):
            handle.async_pwrite(array, directory / "file")
            time.sleep(0.02)
            assert not handle._pending[0].future.done()
        assert handle.wait() == 1
        assert (contents(directory / "file") == 7).all()


@pytest.mark.in_turn
@pytest.mark.parametrize("held", [1, 40])
def test_kernels_that_never_end_hold_up_no_other_transfer(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    held: int,
) -> None:
    """More transfers wait than there are workers, blocks in a queue, or buffers of pinned memory."""
    handle = make_handle(queue_depth=2)
    data = random_bytes(3_000_003)
    data.tofile(directory / "data")
    with contextlib.ExitStack() as kernels:
        stuck = [gpu.array(4_000_000) for _ in range(held)]
        for index, array in enumerate(stuck):
            with gpu.new_stream():
                kernels.enter_context(driver.held(array, 7))
                handle.async_pwrite(array, directory / f"stuck{index}")
        pending = list(handle._pending)
        found, on_host = gpu.array(data.size), np.zeros_like(data)
        with tensorferry.open(directory / "file", "w+", engine=handle.engine) as file:
            for turn in range(5):
                with gpu.new_stream():
                    file.write_from(gpu.array(data), turn).result(timeout=PATIENCE_S)
                    file.read_into(found, turn).result(timeout=PATIENCE_S)
                    assert driver.peek(found.address, data.size) == data.tobytes()
        with gpu.new_stream():
            assert handle.write(gpu.array(data), directory / "gpu") == 0
            assert handle.read(found, directory / "data") == 0
            assert handle.write(data, directory / "host") == 0
            assert handle.read(on_host, directory / "data") == 0
            small = gpu.array(data[:1000])
            assert handle.write(small, directory / "small") == 0
        assert not any(operation.future.done() for operation in pending)
    assert handle.wait() == held
    for name in ("gpu", "host"):
        assert_equal(contents(directory / name), data)
    assert_equal(on_host, data)
    for index in range(held):
        assert (contents(directory / f"stuck{index}") == 7).all()


def test_a_blocking_call_that_waits_for_a_kernel_holds_up_no_other_thread(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
) -> None:
    handle = make_handle()
    data = random_bytes(1_000_003)
    for nbytes in SIZES:
        array = gpu.array(nbytes)

        def write(array: Any = array) -> None:
            with driver.stream(stream):
                handle.write(array, directory / "file")

        with gpu.new_stream() as stream, driver.held(array, 7):
            writing = threading.Thread(target=write)
            writing.start()
            time.sleep(0.05)
            assert writing.is_alive()
            with gpu.new_stream():
                other = gpu.array(data)
                assert handle.write(other, directory / "other") == 0
                driver.poke(other.address, bytes(data.size))
                assert handle.read(other, directory / "other") == 0
                assert driver.peek(other.address, data.size) == data.tobytes()
            assert writing.is_alive()
        writing.join(PATIENCE_S)
        assert not writing.is_alive()
        assert (contents(directory / "file") == 7).all()


def test_a_stream_is_given_up_without_waiting_for_kernels(
    driver: StandIn, gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    """The copies of its arrays have not begun."""
    file = tensorferry.open(directory / "file", "w", engine=engine)
    stream = file.stream()
    with gpu.new_stream(), driver.held(array := gpu.array(1_000_003), 7):
        for _ in range(5):
            stream.append(array)
        giving_up = threading.Thread(target=stream.abort)
        giving_up.start()
        giving_up.join(PATIENCE_S)
        assert not giving_up.is_alive()
    file.close()
    assert (directory / "file").stat().st_size == 0


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_read_is_done_only_when_the_gpu_has_all_of_it(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    nbytes: int,
) -> None:
    """Copies are slow, and the GPU's memory is looked at without waiting for any stream."""
    handle = make_handle()
    data = random_bytes(nbytes)
    data.tofile(directory / "file")
    array = gpu.array(nbytes)

    def check() -> None:
        assert driver.peek(array.address, nbytes) == data.tobytes()
        driver.poke(array.address, bytes(nbytes))

    driver.set(copy_delay_us=20_000)
    handle.sync_pread(array, directory / "file")
    check()
    handle.async_pread(array, directory / "file")
    handle.wait()
    check()
    tensorferry.read(directory / "file", array)
    check()
    tensorferry.read_many([(directory / "file", array)])
    check()
    with tensorferry.open(directory / "file", engine=handle.engine) as file:
        file.read_into(array).result()
        check()


@pytest.mark.in_turn
@pytest.mark.parametrize("delay_us", [0, 5_000])
def test_buffers_are_used_again_only_when_their_copies_are_over(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    delay_us: int,
) -> None:
    handle = make_handle(intra_op_parallelism=2)
    data = random_bytes(100_000_003)
    source, found = gpu.array(data), gpu.array(data.size)
    driver.set(copy_delay_us=delay_us)
    handle.sync_pwrite(source, directory / "file", 1)
    assert_equal(contents(directory / "file")[1:], data)
    handle.sync_pread(found, directory / "file", 1)
    assert driver.peek(found.address, data.size) == data.tobytes()


def test_what_a_kernel_does_later_does_not_reach_a_file(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
) -> None:
    """A write waits for earlier work on its stream, and not for later work."""
    handle = make_handle()
    data = random_bytes(5_000_003)
    array, other = gpu.array(data), gpu.array(16)
    with gpu.new_stream():
        handle.async_pwrite(array, directory / "file")
        with driver.held(other, 1):
            assert handle.wait() == 1
    assert_equal(contents(directory / "file"), data)


def test_a_handle_is_closed_only_when_its_kernels_have_ended(
    driver: StandIn, gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    handle = tensorferry.aio_handle(engine=engine)
    arrays = [gpu.array(nbytes) for nbytes in SIZES]
    closing = threading.Thread(target=handle.close)
    with contextlib.ExitStack() as kernels, gpu.new_stream():
        for index, array in enumerate(arrays):
            kernels.enter_context(driver.held(array, 7))
            handle.async_pwrite(array, directory / str(index))
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    for index, nbytes in enumerate(SIZES):
        assert_equal(contents(directory / str(index)), b"\7" * nbytes)


def test_two_devices_do_not_wait_for_each_other(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
) -> None:
    handle = make_handle()
    data = random_bytes(5_000_003)
    stuck, free = gpu.array(data.size, 0), gpu.array(data, 1)
    with gpu.new_stream(0), driver.held(stuck, 7):
        handle.async_pwrite(stuck, directory / "stuck")
        assert handle.write(free, directory / "free") == 0
        assert_equal(contents(directory / "free"), data)
        assert handle.read(free, directory / "free") == 0
    assert handle.wait() == 1


def test_exactly_the_arrays_bytes_are_copied_by_streams_that_wait_for_no_others(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle(block_size=65536)
    pushed = driver.count("contexts_pushed")
    for nbytes in (1, 4096, 5_000_003):
        driver.reset()
        array = gpu.array(nbytes)
        handle.sync_pwrite(array, directory / "file", 3)
        assert driver.count("dtoh_nbytes") == nbytes
        handle.async_pread(array, directory / "file", 3)
        handle.wait()
        assert driver.count("htod_nbytes") == nbytes
        assert driver.count("blocking_streams_made") == 0
        assert driver.count("contexts_pushed") == pushed


@pytest.mark.in_turn
@pytest.mark.parametrize("workers", [1, 4])
def test_little_host_memory_is_registered(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, workers: int
) -> None:
    handle = make_handle(intra_op_parallelism=workers)
    array = gpu.array(300_000_003)
    handle.sync_pwrite(array, directory / "file")
    handle.sync_pread(array, directory / "file")
    assert 0 < driver.peak("registered_nbytes") <= 128 << 20
