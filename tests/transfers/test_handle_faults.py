"""Rows of DeepNVMe's fault table about handles: waiting, order, threads, the GIL, many of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support.engines import one_engine
from tests.support.expect import (
    as_bytes,
    assert_equal,
    assert_works,
    contents,
    storage_error,
)
from tests.support.faultfs import Fault, FaultFS
from tests.support.leaks import nothing_leaks
from tests.support.optional import torch
from tests.support.threads import JOIN_TIMEOUT_S, in_threads

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes

Handle = tensorferry.aio_handle


@pytest.mark.covers("wait_nothing_pending", "wait_twice")
def test_waiting_for_nothing_returns_zero(handle: Handle, directory: pathlib.Path) -> None:
    assert handle.wait() == 0
    assert handle.wait() == 0
    handle.async_pwrite(np.ones(4096, np.uint8), str(directory / "file"))
    assert handle.wait() == 1
    assert handle.wait() == 0


@pytest.mark.covers("two_writes_same_file")
def test_of_two_writes_of_one_range_the_later_wins(handle: Handle, directory: pathlib.Path) -> None:
    path = directory / "file"
    for value in (1, 2):
        assert handle.async_pwrite(np.full(8 << 20, value, np.uint8), str(path)) == 0
    assert handle.wait() == 2
    assert_equal(contents(path), np.full(8 << 20, 2, np.uint8))


@pytest.mark.covers("two_writes_same_file_diff_size")
@pytest.mark.parametrize("sizes", [(8 << 20, 4_000_003), (4_000_003, 8 << 20)])
def test_of_two_writes_of_different_sizes_the_later_wins_and_the_longer_keeps_its_end(
    handle: Handle, directory: pathlib.Path, sizes: tuple[int, int]
) -> None:
    path = directory / "file"
    wanted = np.zeros(max(sizes), np.uint8)
    for value, nbytes in enumerate(sizes, 1):
        handle.async_pwrite(np.full(nbytes, value, np.uint8), str(path))
        wanted[:nbytes] = value
    assert handle.wait() == 2
    assert_equal(contents(path), wanted)


@pytest.mark.covers("write_then_read_same_file_async")
def test_a_read_beside_a_write_sees_old_or_new_bytes_and_afterwards_new_ones(
    handle: Handle, directory: pathlib.Path
) -> None:
    path = directory / "file"
    np.full(2 << 20, 1, np.uint8).tofile(path)
    target = np.zeros(2 << 20, np.uint8)
    handle.async_pwrite(np.full(2 << 20, 2, np.uint8), str(path))
    handle.async_pread(target, str(path))
    assert handle.wait() == 2
    assert set(np.unique(target)) <= {1, 2}
    handle.async_pread(target, str(path))
    assert handle.wait() == 1
    assert (target == 2).all()


@pytest.mark.covers("mixed_async_then_sync")
def test_a_sync_call_with_others_pending_completes_and_counts_them(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    first, second = random_bytes(4 << 20), random_bytes(4096)
    handle.async_pwrite(first, str(directory / "first"))
    completed = handle.sync_pwrite(second, str(directory / "second"))
    assert completed == 2
    assert handle.wait() == 0
    assert_equal(contents(directory / "first"), first)
    assert_equal(contents(directory / "second"), second)


@pytest.mark.covers("threads_shared_handle_sync")
def test_threads_that_share_a_handle_each_get_their_own_completion(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    sources = [random_bytes(300_003) for _ in range(8)]
    counts = [[0, 0] for _ in range(8)]

    def work(index: int) -> None:
        path = str(directory / f"file{index}")
        target = np.zeros(300_003, np.uint8)
        counts[index][0] = handle.sync_pwrite(sources[index], path)
        counts[index][1] = handle.sync_pread(target, path)
        assert_equal(target, sources[index])

    in_threads(8, work)
    assert counts == [[1, 1]] * 8
    assert handle.wait() == 0


@pytest.mark.covers("threads_shared_handle_async", "threads_deadlock_async_vs_wait")
@pytest.mark.parametrize("waiting_apart", [1, 3])
def test_threads_that_submit_and_wait_on_one_handle_count_each_completion_once(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, waiting_apart: int
) -> None:
    sources = [random_bytes(10_003 + index) for index in range(100)]
    waited = [0, 0, 0, 0]

    def work(index: int) -> None:
        for number in range(index, len(sources), 4):
            handle.async_pwrite(sources[number], str(directory / f"file{number}"))
            if number % waiting_apart == 0:
                waited[index] += handle.wait()

    in_threads(4, work)
    assert sum(waited) + handle.wait() == len(sources)
    for number, source in enumerate(sources):
        assert_equal(contents(directory / f"file{number}"), source)


@pytest.mark.covers("threads_deadlock_async_vs_wait")
def test_a_thread_may_submit_while_another_waits(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(4096)
    data.tofile(faultfs.path / "file")
    targets = [np.zeros(4096, np.uint8) for _ in range(2)]
    waited: list[int] = []
    faultfs.order(Fault("read", hold=True))
    handle.async_pread(targets[0], str(faultfs.path / "file"))
    waiter = threading.Thread(target=lambda: waited.append(handle.wait()), daemon=True)
    waiter.start()
    faultfs.await_held()
    handle.async_pread(targets[1], str(faultfs.path / "file"))
    faultfs.release()
    waiter.join(JOIN_TIMEOUT_S)
    assert not waiter.is_alive()
    assert sum(waited) + handle.wait() == 2
    for target in targets:
        assert_equal(target, data)


@pytest.mark.covers("gil_async_pwrite_unpinned", "gil_async_pwrite_locked")
@pytest.mark.parametrize("locked", [False, True])
def test_submitting_a_write_returns_while_the_drive_is_stuck(
    handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes, locked: bool
) -> None:
    """This thread releases the write, so the submit has to return before."""
    source = torch.from_numpy(random_bytes(4 << 20))
    if locked:
        source = handle.new_cpu_locked_tensor(4 << 20, source).copy_(source)
    faultfs.order(Fault("write", hold=True))
    handle.async_pwrite(source, str(faultfs.path / "file"))
    faultfs.await_held()
    assert faultfs.held() >= 1
    faultfs.release()
    assert handle.wait() == 1
    assert_equal(contents(faultfs.path / "file"), source)


@pytest.mark.covers("gil_read_write_methods")
@pytest.mark.parametrize(
    "method", ["read", "write", "sync_pread", "sync_pwrite", "pread", "pwrite", "wait", "close"]
)
def test_python_threads_run_while_a_blocking_call_waits(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes, method: str
) -> None:
    """Another thread lets the transfer go; it could not if the call held the GIL."""
    handle = make_handle()
    path = faultfs.path / "file"
    data = random_bytes(100_003)
    data.tofile(path)
    array = np.zeros_like(data) if "read" in method else data
    faultfs.order(Fault("read", hold=True), Fault("write", hold=True))
    freed: list[bool] = []

    def let_go() -> None:
        faultfs.await_held()
        faultfs.release()
        freed.append(True)

    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    if method in ("wait", "close"):
        array = np.zeros_like(data)
        handle.async_pread(array, str(path))
        getattr(handle, method)()
    elif method in ("pread", "pwrite"):
        getattr(handle, method)(array, str(path), False, False)
    else:
        getattr(handle, method)(array, str(path))
    thread.join(JOIN_TIMEOUT_S)
    assert freed
    assert_equal(array, data)
    assert_equal(contents(path), data)


@pytest.mark.covers("fd_leak_per_async")
def test_thousands_of_reads_of_one_file_leave_no_descriptor_open(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    data = random_bytes(1 << 16)
    data.tofile(path)
    targets = np.zeros((2000, 4096), np.uint8)
    for target in targets[:500]:  # until all threads run that there may be
        handle.async_pread(target, str(path))
    handle.wait()
    with nothing_leaks(resident_slack_nbytes=16 << 20):
        for index, target in enumerate(targets):
            handle.async_pread(target, str(path), index % 15 * 4096 + index % 7)
        assert handle.wait() == 2000
    for index, target in enumerate(targets):
        offset = index % 15 * 4096 + index % 7
        assert_equal(target, data[offset : offset + 4096])


@pytest.mark.covers("fd_leak_on_exception")
def test_calls_that_fail_leave_nothing_behind(handle: Handle, directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    target = torch.zeros(1 << 20, dtype=torch.uint8)

    def fail() -> None:
        with pytest.raises(tensorferry.ShortReadError):
            handle.sync_pread(target, str(path))
        with pytest.raises(ValueError, match="not contiguous"):
            handle.async_pread(target[::2], str(path))
        with pytest.raises(tensorferry.StorageError):
            handle.async_pread(target, str(directory / "missing"))

    for _ in range(50):
        fail()
    with nothing_leaks():
        for _ in range(1000):
            fail()
    assert_works(handle, directory)


@pytest.mark.covers("many_handles_content")
def test_many_handles_work_at_once(
    make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handles = [make_handle(queue_depth=16) for _ in range(100)]
    sources = [random_bytes(50_003) for _ in handles]
    for index, (handle, source) in enumerate(zip(handles, sources, strict=True)):
        handle.async_pwrite(source, str(directory / f"file{index}"))
    for handle in handles:
        assert handle.wait() == 1
    for index, source in enumerate(sources):
        assert_equal(contents(directory / f"file{index}"), source)


@pytest.mark.covers("concurrent_create_same_handle_two_threads_write")
def test_two_threads_create_one_file_through_one_handle(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    for attempt in range(20):
        path = directory / f"file{attempt}"
        data = random_bytes(600_006)
        halves = np.split(data, 2)
        in_threads(
            2,
            lambda index, path=path, halves=halves: handle.sync_pwrite(  # type: ignore[misc]
                halves[index], str(path), index * 300_003
            ),
        )
        assert_equal(contents(path), data)


@pytest.mark.covers("async_then_free_buffer")
def test_freeing_a_locked_tensor_while_it_is_written_keeps_its_memory_to_the_end(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    data = random_bytes(15 << 20)
    locked = handle.new_cpu_locked_tensor(data.size, torch.empty(0, dtype=torch.uint8))
    locked.copy_(torch.from_numpy(data))
    handle.async_pwrite(locked, str(path))
    assert handle.free_cpu_locked_tensor(locked) is True
    del locked
    assert handle.wait() == 1
    assert_equal(contents(path), data)


@pytest.mark.covers("bounce_during_pending_mutation")
def test_changing_a_source_while_it_is_written_mixes_old_and_new_bytes_at_worst(
    handle: Handle, directory: pathlib.Path
) -> None:
    path = directory / "file"
    source = torch.full((16 << 20,), 1, dtype=torch.uint8)
    handle.async_pwrite(source, str(path))
    source.fill_(2)
    assert handle.wait() == 1
    data = contents(path)
    assert data.size == 16 << 20
    assert set(np.unique(data)) <= {1, 2}


@pytest.mark.covers("temp_tensor_async")
def test_temporary_tensors_live_until_they_are_written(
    handle: Handle, directory: pathlib.Path
) -> None:
    for index in range(200):
        handle.async_pwrite(torch.full((25_001,), index), str(directory / f"file{index}"))
        torch.full((25_001,), -1)  # would get the memory if it had been freed
    assert handle.wait() == 200
    for index in range(200):
        data = np.fromfile(directory / f"file{index}", np.int64)
        assert data.size == 25_001
        assert (data == index).all()


SOURCES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.full((70_001,), 5, dtype=torch.uint8),
    "transposed tensor": lambda: torch.full((7, 10_003), 5, dtype=torch.uint8).t(),
    "array": lambda: np.full(70_001, 5, np.uint8),
    "transposed array": lambda: np.full((7, 10_003), 5, np.uint8).T,
    "bytes": lambda: b"\5" * 70_001,
    "bytearray": lambda: bytearray(b"\5" * 70_001),
}


@pytest.mark.covers("temp_tensor_async")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_temporary_source_of_any_kind_lives_until_it_is_written(
    handle: Handle, faultfs: FaultFS, kind: str
) -> None:
    path = faultfs.path / "file"
    faultfs.order(Fault("write", hold=True))
    handle.async_pwrite(SOURCES[kind](), str(path))
    faultfs.await_held()
    usurper = np.full(70_001, 9, np.uint8)  # would get the memory if it had been freed
    faultfs.release()
    assert handle.wait() == 1
    assert (contents(path) == 5).all()
    assert path.stat().st_size == len(as_bytes(SOURCES[kind]()))
    assert usurper[0] == 9


@one_engine
@pytest.mark.covers("wait_nothing_pending")
def test_a_closed_handle_raises_value_error(handle: Handle, directory: pathlib.Path) -> None:
    handle.close()
    handle.close()
    buffer = np.zeros(10, np.uint8)
    for call in (handle.sync_pwrite, handle.async_pwrite, handle.sync_pread, handle.read):
        with pytest.raises(ValueError, match="closed"):
            call(buffer, str(directory / "file"))
    with pytest.raises(ValueError, match="closed"):
        handle.wait()
    assert not list(directory.iterdir())


@pytest.mark.covers("threads_shared_handle_async")
def test_a_failure_among_many_is_raised_by_the_wait_that_covers_it(
    handle: Handle, directory: pathlib.Path, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4096)
    for name in ("good", "bad"):
        data.tofile(faultfs.path / name)
    faultfs.order(Fault("read", error=5, name="bad"))
    targets = [np.zeros(4096, np.uint8) for _ in range(9)]
    for index, target in enumerate(targets):
        handle.async_pread(target, str(faultfs.path / ("bad" if index == 4 else "good")))
    with storage_error(5, faultfs.path / "bad", expected=4096):
        handle.wait()
    assert handle.wait() == 0
    for index, target in enumerate(targets):
        if index != 4:
            assert_equal(target, data)
    assert_works(handle, directory)
