"""Handles, tensors and processes that end, are interrupted or fork while I/O is pending."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer import requests as transfers
from tests.support import child
from tests.support.expect import assert_equal, assert_works, contents, interrupted, storage_error
from tests.support.faultfs import Fault, FaultFS
from tests.support.leaks import settled
from tests.support.threads import InThread, in_threads, threads_in

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes

Handle = tensorferry.aio_handle

PROGRAMS = "tests.transfers.programs"


class Array(np.ndarray):  # type: ignore[type-arg]
    """An array that can be watched."""


@pytest.mark.covers("del_handle_with_pending", "del_handle_with_pending_locked")
@pytest.mark.parametrize("locked", [False, True])
def test_dropping_a_handle_completes_its_writes(
    engine: str, directory: pathlib.Path, locked: bool
) -> None:
    torch = pytest.importorskip("torch")
    handle = tensorferry.aio_handle(engine=engine)
    for index in range(8):
        source = torch.full((16 << 20,), index + 1, dtype=torch.uint8)
        if locked:
            source = handle.new_cpu_locked_tensor(16 << 20, source).copy_(source)
        handle.async_pwrite(source, str(directory / f"file{index}"))
    del handle, source
    gc.collect()
    for index in range(8):
        data = contents(directory / f"file{index}")
        assert data.size == 16 << 20
        assert (data == index + 1).all()


@pytest.mark.covers("del_handle_with_pending")
def test_dropping_a_handle_completes_writes_that_are_stuck(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(100_003)
    faultfs.order(Fault("write", delay_s=0.3, times=1))
    handle = tensorferry.aio_handle(engine=engine)
    handle.async_pwrite(data.copy(), str(faultfs.path / "file"))
    del handle
    assert_equal(contents(faultfs.path / "file"), data)


@pytest.mark.covers("del_handle_with_pending")
@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_a_handle_that_goes_with_failures_nobody_saw_warns_of_each(
    engine: str, faultfs: FaultFS, how: str
) -> None:
    handles = [tensorferry.aio_handle(engine=engine)]
    faultfs.order(Fault("write", error=5, name="bad1"), Fault("write", error=28, name="bad2"))
    for name in ("good1", "bad1", "good2", "bad2"):
        handles[0].async_pwrite(np.ones(4096, np.uint8), str(faultfs.path / name))
    gc.collect()  # objects of earlier tests must not add their warnings
    with pytest.warns(RuntimeWarning) as caught:
        handles[0].close() if how == "closed" else handles.clear()
    (first, second) = (str(warning.message) for warning in caught)
    assert "bad1" in first
    assert os.strerror(5) in first
    assert "bad2" in second
    assert os.strerror(28) in second


@pytest.mark.covers("del_handle_with_pending")
def test_closing_a_handle_completes_its_writes(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4 << 20)
    with tensorferry.aio_handle(engine=engine) as handle:
        for index in range(8):
            handle.async_pwrite(data, str(directory / f"file{index}"))
    for index in range(8):
        assert_equal(contents(directory / f"file{index}"), data)


@pytest.mark.covers("del_handle_with_pending")
def test_an_exception_in_a_with_block_is_kept_and_the_writes_complete(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4 << 20)

    def fail() -> None:
        with (
            tensorferry.aio_handle(engine=engine) as handle,
            tensorferry.open(directory / "other", "w", engine=engine) as file,
        ):
            handle.async_pwrite(data, str(directory / "file"))
            file.write_from(data)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_equal(contents(directory / "file"), data)
    assert_equal(contents(directory / "other"), data)


def test_dropping_a_file_completes_its_writes(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4 << 20)
    file = tensorferry.open(directory / "file", "w", engine=engine)
    future = file.write_from(data.copy())
    del file
    gc.collect()
    future.result(timeout=300)
    assert_equal(contents(directory / "file"), data)


def test_dropping_a_future_completes_its_transfer(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4 << 20)
    with tensorferry.open(directory / "file", "w", engine=engine) as file:
        file.write_from(data.copy())
        gc.collect()
    assert_equal(contents(directory / "file"), data)


@pytest.mark.covers("temp_tensor_async", "async_then_free_buffer")
def test_an_array_is_released_when_its_transfer_is_complete_and_not_before(
    handle: Handle, faultfs: FaultFS
) -> None:
    path = faultfs.path / "file"
    source = np.full(100_003, 5, np.uint8).view(Array)
    watched = weakref.ref(source)
    faultfs.order(Fault("write", hold=True))
    handle.async_pwrite(source, str(path))
    del source
    gc.collect()
    faultfs.await_held()
    assert watched() is not None
    faultfs.release()
    assert handle.wait() == 1
    gc.collect()
    assert watched() is None
    assert (contents(path) == 5).all()


def test_an_array_whose_future_was_dropped_is_released_without_a_further_call(
    engine: str, directory: pathlib.Path
) -> None:
    with tensorferry.open(directory / "file", "w", engine=engine) as file:
        source = np.full(4 << 20, 5, np.uint8).view(Array)
        watched = weakref.ref(source)
        file.write_from(source)
        del source
        assert settled(lambda: watched() is None)


@pytest.mark.covers("temp_tensor_async")
@pytest.mark.parametrize("product", ["handle", "file"])
def test_a_target_that_nobody_else_holds_is_read_into_safely(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes, product: str
) -> None:
    path = faultfs.path / "file"
    random_bytes(1 << 20).tofile(path)
    faultfs.order(Fault("read", hold=True))
    with (
        tensorferry.aio_handle(engine=engine) as handle,
        tensorferry.open(path, engine=engine) as file,
    ):
        for _ in range(4):
            target = np.zeros(1 << 20, np.uint8)
            handle.async_pread(target, path) if product == "handle" else file.read_into(target)
        del target
        gc.collect()
        faultfs.await_held()
        usurpers = [np.full(1 << 20, 9, np.uint8) for _ in range(8)]
        faultfs.release()
    assert all((usurper == 9).all() for usurper in usurpers)


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["data", "set_", "del"])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_a_tensor_whose_storage_is_swapped_meanwhile_keeps_its_memory_for_the_transfer(
    default_engine: str, faultfs: FaultFS, how: str, write: bool, many: bool
) -> None:
    torch = pytest.importorskip("torch")
    path = faultfs.path / "file"
    np.full(100_003, 1, np.uint8).tofile(path)
    tensor = torch.full((100_003,), 7, dtype=torch.uint8)
    faultfs.order(Fault("write" if write else "read", hold=True, times=1))
    with tensorferry.aio_handle(4096, 1, engine=default_engine) as handle:
        if many:
            move = tensorferry.write_many if write else tensorferry.read_many
            items = [(path, tensor, 0)] * (2 if write else 1)  # no destination twice
            moving = InThread(lambda: move(items))
        else:
            (handle.async_pwrite if write else handle.async_pread)(tensor, path)
        faultfs.await_held()
        if how == "data":
            tensor.data = torch.zeros(3, dtype=torch.uint8)
        elif how == "set_":
            tensor.set_(torch.zeros(3, dtype=torch.uint8))
        else:
            del tensor
        gc.collect()
        usurpers = [torch.full((100_003,), 9, dtype=torch.uint8) for _ in range(8)]
        faultfs.release()
        if many:
            moving.result()
        else:
            assert handle.wait() == 1
    assert all((usurper == 9).all() for usurper in usurpers)
    assert (contents(path) == (7 if write else 1)).all()


@pytest.mark.parametrize("how", ["resize_", "storage", "numpy"])
@pytest.mark.parametrize(
    "call", ["async_pwrite", "write_from", "File.write", "write", "write_many"]
)
def test_an_array_that_gives_its_memory_back_meanwhile_is_told(
    default_engine: str, faultfs: FaultFS, how: str, call: str
) -> None:
    torch = pytest.importorskip("torch")
    path = faultfs.path / "file"
    # One block, which is at the file system when the array is dropped.
    array = np.full(4096, 7, np.uint8) if how == "numpy" else torch.full((1024,), 7.0)
    faultfs.order(Fault("write", hold=True, times=1))

    def write() -> None:
        if call == "write":
            tensorferry.write(path, array)
        elif call == "write_many":
            tensorferry.write_many([(path, array)])
        elif call == "async_pwrite":
            with tensorferry.aio_handle(engine=default_engine) as handle:
                handle.async_pwrite(array, path)
                handle.wait()
        else:
            with tensorferry.open(path, "w") as file:
                file.write(array) if call == "File.write" else file.write_from(array).result()

    writing = InThread(write)
    faultfs.await_held()
    if how == "numpy":
        array.resize(1_000_000, refcheck=False)
    elif how == "resize_":
        array.resize_(1_000_000)
    else:
        array.untyped_storage().resize_(0)
    faultfs.release()
    with storage_error(errno.EFAULT, path, expected=4096):
        writing.result()


@pytest.mark.covers(
    "exit_with_pending", "exit_with_pending_locked", "exit_with_pending_locked_check"
)
def test_leaving_the_interpreter_completes_the_writes(engine: str, directory: pathlib.Path) -> None:
    nbytes = 16_000_003
    program = f"{PROGRAMS}:leave_with_pending_writes"
    child.call(program, engine=engine, directory=directory, count=8, nbytes=nbytes)
    _assert_complete(directory, 8, nbytes)


@pytest.mark.covers("exit_with_pending")
def test_leaving_the_interpreter_completes_writes_that_are_stuck(
    engine: str, faultfs: FaultFS
) -> None:
    faultfs.order(Fault("write", delay_s=0.5))
    program = f"{PROGRAMS}:leave_with_pending_writes"
    child.call(program, engine=engine, directory=faultfs.path, count=3, nbytes=10_003)
    faultfs.clear()
    _assert_complete(faultfs.path, 3, 10_003)


@pytest.mark.covers("exit_with_pending")
def test_leaving_through_an_exception_completes_the_writes(
    engine: str, directory: pathlib.Path
) -> None:
    ended = child.call(
        f"{PROGRAMS}:leave_by_exception", engine=engine, directory=directory, nbytes=4_000_003
    )
    assert "on the way out" in ended.output
    _assert_complete(directory, 3, 4_000_003)


@pytest.mark.covers("exit_with_pending")
def test_leaving_with_failures_that_nobody_saw_says_so(engine: str, faultfs: FaultFS) -> None:
    faultfs.order(Fault("write", error=5, delay_s=0.2))
    path = faultfs.path / "file"
    ended = child.call(f"{PROGRAMS}:leave_with_unseen_failure", engine=engine, path=path)
    assert str(path) in ended.output


def _assert_complete(directory: pathlib.Path, count: int, nbytes: int) -> None:
    values = {f"file{index}": index + 1 for index in range(count)} | {"future": 99}
    for name, value in values.items():
        data = contents(directory / name)
        assert data.size == nbytes, f"{name} has {data.size} bytes"
        assert (data == value).all()


@pytest.mark.covers("interrupt_sigint")
@pytest.mark.parametrize(
    ("method", "nbytes"),
    [
        ("wait", 4096),
        ("wait", 8 << 20),
        ("result", 4096),
        # Only large ones: the calling thread does small transfers itself, and a signal cannot interrupt a thread
        # that FUSE holds.
        ("sync_pread", 8 << 20),
        ("file.read", 8 << 20),
        ("tensorferry.read", 8 << 20),
    ],
)
def test_ctrl_c_interrupts_a_call_that_waits_for_a_read_that_is_stuck(
    engine: str,
    default_engine: str,
    faultfs: FaultFS,
    directory: pathlib.Path,
    method: str,
    nbytes: int,
) -> None:
    """The read is released only after the call has raised."""
    path = faultfs.path / "file"
    np.full(nbytes, 5, np.uint8).tofile(path)
    arguments = {"engine": engine, "method": method, "nbytes": nbytes}
    faultfs.order(Fault("read", hold=True, times=1))
    with faultfs.released_by(directory / "raised"):
        child.call(f"{PROGRAMS}:interrupt", path=path, raised=directory / "raised", **arguments)


def test_ctrl_c_ends_a_blocking_read_before_its_time(engine: str, faultfs: FaultFS) -> None:
    np.full(4 << 20, 5, np.uint8).tofile(faultfs.path / "file")
    target = np.zeros(4 << 20, np.uint8)
    faultfs.order(Fault("read", hold=True))
    with tensorferry.aio_handle(engine=engine, block_size=64 << 10, queue_depth=4) as handle:
        with interrupted(faultfs):
            handle.sync_pread(target, faultfs.path / "file")
        faultfs.release()
    assert 0 in target, "blocks that had not begun were read nevertheless"


@pytest.mark.usefixtures("default_engine")
def test_read_many_that_fails_half_way_touches_nothing_afterwards(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_or_break(path: str, *arguments: Any, **options: Any) -> Any:
        if path == "broken":
            faultfs.await_held()  # of the items before this one
            raise ZeroDivisionError
        return open_for_transfer(path, *arguments, **options)

    open_for_transfer = transfers.open_for_transfer
    monkeypatch.setattr(transfers, "open_for_transfer", open_or_break)
    np.full(1 << 20, 5, np.uint8).tofile(faultfs.path / "file")
    target = np.zeros(1 << 20, np.uint8)
    pieces = [(faultfs.path / "file", target[at : at + 4096], at) for at in range(0, 1 << 20, 4096)]
    returned = threading.Event()

    def release() -> None:
        faultfs.await_held()
        returned.wait(0.5)
        faultfs.release()

    faultfs.order(Fault("read", hold=True))
    releaser = threading.Thread(target=release)
    releaser.start()
    with pytest.raises(ZeroDivisionError):
        tensorferry.read_many([*pieces, ("broken", bytearray(1))])
    held = faultfs.held()
    returned.set()
    releaser.join()
    assert held == 0, "reads into the arrays were still on their way"


@pytest.mark.covers("fork_after_handle")
def test_a_forked_child_may_not_use_what_its_parent_opened_but_may_open_its_own(
    engine: str, default_engine: str, directory: pathlib.Path
) -> None:
    child.call(f"{PROGRAMS}:fork", engine=engine, directory=directory)


@pytest.mark.covers("fork_after_handle")
def test_a_forked_child_leaves_normally_and_the_parents_writes_complete(
    engine: str, directory: pathlib.Path
) -> None:
    child.call(f"{PROGRAMS}:fork_and_leave_normally", engine=engine, directory=directory)


def test_first_transfers_import_nothing(default_engine: str, directory: pathlib.Path) -> None:
    """A child that another thread forks during an import would wait for the import lock forever."""
    program = f"{PROGRAMS}:modules_imported_by_first_calls"
    assert child.call(program, engine=default_engine, directory=directory).result == []


@pytest.mark.covers("fork_after_handle")
def test_children_of_children_work(engine: str, directory: pathlib.Path) -> None:
    child.call(f"{PROGRAMS}:fork_in_a_row", engine=engine, directory=directory)


@pytest.mark.in_turn
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_work(
    default_engine: str, directory: pathlib.Path, method: str
) -> None:
    program = f"{PROGRAMS}:multiprocess"
    ended = child.call(program, engine=default_engine, directory=directory, method=method)
    assert ended.result == list(range(1, 9))


def test_workers_of_torchs_data_loader_work(default_engine: str, directory: pathlib.Path) -> None:
    pytest.importorskip("torch")
    program = f"{PROGRAMS}:load_with_workers"
    ended = child.call(program, imports=["torch"], engine=default_engine, directory=directory)
    assert ended.result == [float(index) for index in range(12)]


def test_futures_of_two_threads_on_one_file_each_complete_once(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(1 << 20)
    data.tofile(directory / "file")
    calls: list[list[int]] = [[0] * 200 for _ in range(2)]
    with tensorferry.open(directory / "file", engine=engine) as file:

        def work(thread: int) -> None:
            targets = [np.zeros(5003, np.uint8) for _ in range(200)]
            futures = []
            for index, target in enumerate(targets):
                future = file.read_into(target, index * 5003 + thread)

                def count(_: object, index: int = index) -> None:
                    calls[thread][index] += 1

                future.add_done_callback(count)
                futures.append(future)
            for index, (future, target) in enumerate(zip(futures, targets, strict=True)):
                future.result(timeout=300)
                start = index * 5003 + thread
                assert_equal(target, data[start : start + 5003])

        in_threads(2, work)
    settled(lambda: sum(map(sum, calls)) >= 400)  # the thread of callbacks may be behind
    assert calls == [[1] * 200] * 2


def test_closing_a_handle_while_another_thread_waits_lets_both_end(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4096)
    data.tofile(faultfs.path / "file")
    target = np.zeros(4096, np.uint8)
    handle = tensorferry.aio_handle(engine=engine)
    faultfs.order(Fault("read", hold=True))
    handle.async_pread(target, str(faultfs.path / "file"))
    waiting = InThread(handle.wait)
    assert settled(lambda: threads_in(handle.wait), 120)
    faultfs.await_held()
    closing = InThread(handle.close)
    assert settled(lambda: "closed" in repr(handle), 120)
    faultfs.release()
    closing.result()
    with contextlib.suppress(ValueError):
        assert waiting.result() in (0, 1)
    assert_equal(target, data)


def test_closing_a_file_gives_up_where_nothing_moves_and_loses_nothing(
    faultfs: FaultFS, random_bytes: RandomBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorferry.transfer.runtime, "CLOSE_PATIENCE_SECONDS", 0.2)
    path = faultfs.path / "file"
    data = random_bytes(100_003)
    file = tensorferry.open(path, "w")
    faultfs.order(Fault("write", hold=True))
    future = file.write_from(data.copy())
    faultfs.await_held()
    with pytest.warns(RuntimeWarning, match=f"transfers of {str(path)!r} .* abandoned"):
        file.close()
    assert file.closed
    assert not future.done()
    gc.collect()
    faultfs.release()
    future.result(120)
    assert_equal(contents(path), data)


def test_whoever_closes_a_file_first_or_second_returns_when_its_transfers_have_ended(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(100_003)
    file = tensorferry.open(faultfs.path / "file", "w", engine=engine)
    faultfs.order(Fault("write", hold=True))
    future = file.write_from(data)
    faultfs.await_held()

    def close() -> bool:
        file.close()
        return future.done()

    closing = [InThread(close) for _ in range(3)]
    closing[1].thread.join(0.2)
    assert all(thread.is_alive() for thread in closing)
    faultfs.release()
    assert [thread.result() for thread in closing] == [True] * 3
    assert_equal(contents(faultfs.path / "file"), data)


def test_a_file_loses_none_of_the_futures_that_threads_begin(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.zeros(8192, np.uint8).tofile(faultfs.path / "file")
    done = tensorferry.Future.done

    def slow_done(future: tensorferry.Future) -> bool:
        time.sleep(0)  # lets other threads run here
        return done(future)

    monkeypatch.setattr(tensorferry.Future, "done", slow_done)
    with tensorferry.open(faultfs.path / "file") as file:
        faultfs.order(Fault("read", hold=True))

        def begin(_: int) -> None:
            for _ in range(100):
                file.read_into(np.zeros(8192, np.uint8))

        in_threads(8, begin)
        pending = len(file._pending)
        monkeypatch.undo()
        faultfs.release()
    assert pending == 800


def test_a_handle_closed_beside_io_that_does_not_end_says_what_it_left(
    faultfs: FaultFS, random_bytes: RandomBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = faultfs.path / "file"
    data = random_bytes(100_003)
    handle = tensorferry.aio_handle()
    faultfs.order(Fault("write", hold=True))
    handle.async_pwrite(data.copy(), path)
    faultfs.await_held()
    # As after 60 seconds without progress.
    monkeypatch.setattr(tensorferry.transfer.runtime, "CLOSE_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(tensorferry.deepnvme.handles, "close_scheduler", lambda _, **__: False)
    with pytest.warns(RuntimeWarning, match="offset 0 of .*file.*: it has not ended"):
        handle.close()
    monkeypatch.undo()
    faultfs.release()
    handle.close()
    assert_equal(contents(path), data)


def test_a_forked_child_that_waits_for_its_parents_transfer_is_told(
    engine: str, faultfs: FaultFS, directory: pathlib.Path
) -> None:
    asked = directory / "asked"
    program = f"{PROGRAMS}:fork_and_wait_for_the_parents_future"
    faultfs.order(Fault("write", hold=True))
    with faultfs.released_by(asked):
        child.call(program, engine=engine, path=faultfs.path / "file", asked=asked)


def test_a_closed_file_raises_value_error(directory: pathlib.Path) -> None:
    (directory / "file").write_bytes(bytes(100))
    file = tensorferry.open(directory / "file")
    file.close()
    file.close()
    for call in (file.read, file.read_into):
        with pytest.raises(ValueError, match="closed"):
            call(np.zeros(10, np.uint8))


def test_a_handle_in_a_reference_cycle_is_collected(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(100_003)

    class Owner:
        handle: Handle
        owner: Owner

    owner = Owner()
    owner.owner = owner
    owner.handle = tensorferry.aio_handle(engine=engine)
    owner.handle.async_pwrite(data, str(directory / "file"))
    del owner
    gc.collect()
    assert_equal(contents(directory / "file"), data)
    assert_works(tensorferry.aio_handle(engine=engine), directory)
