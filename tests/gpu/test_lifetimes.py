"""GPU arrays, handles and processes that end while transfers are pending."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tests.gpu.programs import assert_moves
from tests.support import child
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu

PROGRAMS = "tests.gpu.programs"
SLOW_S = 0.1


def test_arrays_dropped_at_once_are_written(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """The bytes of new arrays, which allocators place at the addresses of freed ones, do not reach their files."""
    handle = make_handle()
    data = [random_bytes(1_000_003) for _ in range(16)]
    before = gpu.live()
    with gpu.new_stream():
        elsewhere = gpu.array(64)
        gpu.fill_later(elsewhere, 1, SLOW_S)
        for index, bytes_ in enumerate(data):
            array = gpu.array(bytes_)
            handle.async_pwrite(array, directory / str(index))
            del array
        gc.collect()
        usurpers = [gpu.array(b"\xff" * 1_000_003) for _ in data]
    assert handle.wait() == len(data)
    for index, bytes_ in enumerate(data):
        assert_equal(contents(directory / str(index)), bytes_)
    del usurpers, elsewhere
    gc.collect()
    assert gpu.live() == before


def test_arrays_that_a_kernel_still_fills_may_be_dropped(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    with gpu.new_stream():
        for value in range(1, 5):
            array = gpu.array(2_000_003)
            gpu.fill_later(array, value, SLOW_S / 2)
            handle.async_pwrite(array, directory / str(value))
            del array
            gc.collect()
    assert handle.wait() == 4
    for value in range(1, 5):
        assert (contents(directory / str(value)) == value).all()


def test_reads_into_arrays_that_nobody_holds_touch_no_others(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    random_bytes(1_000_003).tofile(directory / "file")
    with gpu.new_stream():
        elsewhere = gpu.array(64)
        gpu.fill_later(elsewhere, 1, SLOW_S)
        for _ in range(8):
            handle.async_pread(gpu.array(1_000_003), directory / "file")
        gc.collect()
        usurpers = [gpu.array(b"\xff" * 1_000_003) for _ in range(8)]
    assert handle.wait() == 8
    for usurper in usurpers:
        assert gpu.bytes_of(usurper) == b"\xff" * 1_000_003


@pytest.mark.in_turn
def test_many_transfers_are_outstanding_at_once(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """Far more bytes than the pool of pinned memory has."""
    handle = make_handle()
    data = random_bytes(100_000_003)
    whole = gpu.array(data)
    sizes = [17, 4096, 70_001, 1_000_003] * 100
    with gpu.new_stream():
        elsewhere = gpu.array(64)
        gpu.fill_later(elsewhere, 1, SLOW_S)
        begins, begin = [], 0
        for nbytes in sizes:
            begin = (begin + 1_234_567) % (data.size - nbytes)
            begins.append(begin)
            part = gpu.part(whole, begin, begin + nbytes)
            handle.async_pwrite(part, directory / "file", sum(sizes[: len(begins) - 1]))
    assert handle.wait() == len(sizes)
    found = contents(directory / "file")
    position = 0
    for begin, nbytes in zip(begins, sizes, strict=True):
        assert_equal(found[position : position + nbytes], data[begin : begin + nbytes])
        position += nbytes
    assert position == found.size


@pytest.mark.parametrize("how", ["closed", "deleted", "left by an exception"])
def test_a_handle_that_goes_completes_its_writes(
    gpu: Gpu, engine: str, directory: pathlib.Path, how: str
) -> None:
    handle: Any = tensorferry.aio_handle(engine=engine)
    with gpu.new_stream():
        for value in range(1, 9):
            array = gpu.array(2_000_003)
            gpu.fill_later(array, value, SLOW_S / 4)
            handle.async_pwrite(array, directory / str(value))
            del array
    if how == "closed":
        handle.close()
    elif how == "deleted":
        del handle
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError), handle:
            raise ZeroDivisionError
    for value in range(1, 9):
        found = contents(directory / str(value))
        assert found.size == 2_000_003
        assert (found == value).all()


def test_a_file_and_its_futures_that_go_complete_their_transfers(
    gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    with gpu.new_stream():
        array = gpu.array(4_000_003)
        gpu.fill_later(array, 3, SLOW_S)
        with tensorferry.open(directory / "file", "w", engine=engine) as file:
            file.write_from(array)
            del array
            gc.collect()
    found = contents(directory / "file")
    assert found.size == 4_000_003
    assert (found == 3).all()


def test_a_transfer_keeps_its_array_only_until_it_is_done(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    gc.collect()
    before = gpu.live()
    for turn in range(5):
        array = gpu.array(1_000_003)
        handle.async_pwrite(array, directory / "file")
        del array
        assert handle.wait() == 1
        handle.async_pread(gpu.array(1_000_003), directory / "file")
        assert handle.wait() == 1
        gc.collect()
        assert gpu.live() == before, f"in turn {turn}"


@pytest.mark.parametrize(
    ("nbytes", "slow_s"), [(16_000_003, 0.0), (1_000_003, SLOW_S), (100, SLOW_S)]
)
def test_leaving_the_interpreter_completes_the_writes(
    gpu: Gpu, engine: str, directory: pathlib.Path, nbytes: int, slow_s: float
) -> None:
    program = f"{PROGRAMS}:leave_with_pending_writes"
    arguments = {"count": 4, "nbytes": nbytes, "slow_s": slow_s}
    child.call(program, engine=engine, directory=directory, **arguments)
    values = {f"file{index}": index + 1 for index in range(4)} | {"future": 99}
    for name, value in values.items():
        found = contents(directory / name)
        assert found.size == nbytes, f"{name} has {found.size} bytes"
        assert (found == value).all()


def test_leaving_the_interpreter_with_reads_pending_is_safe(
    gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    program = f"{PROGRAMS}:leave_with_pending_reads"
    child.call(program, engine=engine, directory=directory, count=20, nbytes=5_000_003)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("method", "nbytes"),
    [
        ("wait", 5_000_003),
        ("wait", 4096),
        ("sync_pwrite", 5_000_003),
        ("sync_pwrite", 4096),
        ("sync_pread", 4096),
        ("function", 4096),
    ],
)
def test_ctrl_c_interrupts_a_call_that_waits_for_a_kernel(
    gpu: Gpu, engine: str, directory: pathlib.Path, method: str, nbytes: int
) -> None:
    program = f"{PROGRAMS}:interrupt"
    ended = child.call(program, engine=engine, directory=directory, method=method, nbytes=nbytes)
    assert ended.result is True


def test_a_forked_child_is_told_that_it_cannot_use_the_gpu(
    gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    """The child may move host memory with a new handle; the parent's transfers continue."""
    ended = child.call(f"{PROGRAMS}:fork", engine=engine, directory=directory)
    assert len(ended.result) == 4
    for answer in ended.result:
        kind, _, text = answer.partition(":")
        assert kind in ("EngineUnavailableError", "RuntimeError"), answer
        assert "fork" in text, answer


def test_two_threads_that_submit_and_wait_without_pause(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(1 << 20)
    data.tofile(directory / "file")
    waited = [0, 0]
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            device = thread % gpu.count
            with gpu.new_stream(device):
                for index in range(150):
                    array = gpu.array(4096, device)
                    if index % 10 == 0:
                        gpu.fill_later(array, 1, 0.002)
                    future = file.read_into(array, index * 3000)
                    handle.async_pwrite(array, directory / f"out{thread}")
                    waited[thread] += handle.wait()
                    future.result(timeout=60)
                    wanted = data[index * 3000 : index * 3000 + 4096]
                    assert_equal(gpu.bytes_of(array), wanted)
        except BaseException as failure:
            failures.append(failure)

    with tensorferry.open(directory / "file", engine=handle.engine) as file:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    assert sum(waited) + handle.wait() == 300
    assert_moves(gpu, handle, directory)
