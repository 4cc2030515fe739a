"""Functions that test_meetings*.py run in separate processes, in which calls of libc are slow, held, or fail.

Default schedulers use the engine of TENSORFERRY_ENGINE; `engine` is given to those made explicitly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import pathlib
import resource
import signal
import threading
import time
import warnings
import weakref
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer import runtime
from tests.support import slow_calls
from tests.support.expect import assert_equal, assert_works, contents
from tests.support.forks import passes_in_child
from tests.support.leaks import count_descriptors, settled, threads_named
from tests.support.slow_calls import Rule
from tests.support.threads import InThread

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER = "tensorferry"  # the name of a thread that drives a queue


def random_bytes(nbytes: int, seed: int) -> Any:
    """Return an array of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# A close that meets a submit


def close_during_submit(engine: str, directory: str, product: str, rounds: int) -> dict[str, int]:
    """Close a handle or file while another thread is about to submit a write to it."""
    calls = slow_calls.attached()
    outcomes = {"written": 0, "refused": 0}
    for number in range(rounds):
        path = pathlib.Path(directory) / f"late{number}"
        data = random_bytes(3_000_001, number)
        calls.order(Rule("fallocate", path.name, hold=True, times=1))
        opened: Any
        if product == "file":
            opened = tensorferry.open(path, "w", engine=engine, queue_depth=4)
            writing = InThread(lambda o=opened, d=data: o.write_from(d).result())  # type: ignore[misc]
        else:
            opened = tensorferry.aio_handle(engine=engine, intra_op_parallelism=2)
            method = getattr(opened, product)
            writing = InThread(lambda m=method, d=data, p=path: m(d, str(p)))  # type: ignore[misc]
            del method
        calls.await_held()
        closing = InThread(opened.close)
        del opened
        time.sleep(0.02 * (number % 3))  # any order is right
        calls.release()
        closing.result(f"close, round {number},")
        try:
            writing.result(f"{product}, round {number},")
        except ValueError:
            outcomes["refused"] += 1
        else:
            assert_equal(contents(path), data)
            outcomes["written"] += 1
        path.unlink()
        gc.collect()
    assert_works(tensorferry.aio_handle(engine=engine), pathlib.Path(directory))
    return outcomes


def leave_during_submit(engine: str, directory: str) -> None:
    """Exit the interpreter while threads reserve space; their submits come too late."""
    calls = slow_calls.attached()
    handle = tensorferry.aio_handle(engine=engine)
    calls.order(Rule("fallocate", "late", delay_s=1.0))
    data = np.ones(3_000_001, np.uint8)
    for work in (
        lambda: handle.async_pwrite(data, f"{directory}/late0"),
        lambda: handle.sync_pwrite(data, f"{directory}/late1"),
        lambda: tensorferry.write(f"{directory}/late2", data),
        lambda: tensorferry.write_many([(f"{directory}/late3", data)]),
    ):
        threading.Thread(target=work, daemon=True).start()
    assert settled(lambda: calls.hits() == 4)


def no_thread_left(engine: str, directory: str, started: int) -> dict[str, Any]:
    """Let the start of the core's threads fail after `started` of them; then go on."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory)
    os.environ.pop("TENSORFERRY_ENGINE", None)
    calls.order(Rule("pthread_create", error=errno.EAGAIN, skip=started, times=1))
    refusal = ""
    try:
        # The requested engine is tried first; others may replace it only if none was requested.
        handle = tensorferry.aio_handle(engine=engine, intra_op_parallelism=3)
    except tensorferry.EngineUnavailableError as error:
        refusal = str(error)
    else:
        assert_works(handle, path)
        handle.close()
    hits = calls.hits()
    calls.order(Rule("pthread_create", error=errno.EAGAIN, skip=started, times=1))
    automatic = tensorferry.aio_handle(intra_op_parallelism=3)
    calls.clear()
    assert_works(automatic, path)
    for _ in range(20):
        assert_works(tensorferry.aio_handle(engine=engine, intra_op_parallelism=3), path)
    assert_works(automatic, path)
    return {"refusal": refusal, "hits": hits, "refusals": automatic.engine_refusals}


# Release of memory that is no longer needed


def memory_is_given_back(engine: str, directory: str, nbytes: int) -> list[str]:
    """Return the ways to write and read after which memory is still held when the caller has let it go."""
    import torch

    path = pathlib.Path(directory) / "file"
    handle = tensorferry.aio_handle(engine=engine)
    np.zeros(2 * nbytes, np.uint8).tofile(path)
    file = tensorferry.open(path, "r+", engine=engine)

    def awaited(begin: Callable[[], Any]) -> None:
        async def main() -> None:
            await begin()

        asyncio.run(main())

    def called_back(begin: Callable[[], Any]) -> None:
        ended = threading.Event()
        begin().add_done_callback(lambda _: ended.set())
        assert ended.wait(120)

    def polled(begin: Callable[[], Any]) -> None:
        future = begin()
        while not future.done():
            time.sleep(0.0005)

    ways: dict[str, Callable[[Any], object]] = {
        "handle.sync_pwrite": lambda a: handle.sync_pwrite(a, str(path)),
        "handle.sync_pread": lambda a: handle.sync_pread(a, str(path)),
        "handle.write": lambda a: handle.write(a, str(path)),
        "handle.read": lambda a: handle.read(a, str(path)),
        "handle.async_pwrite, wait": lambda a: (handle.async_pwrite(a, str(path)), handle.wait()),
        "handle.async_pread, wait": lambda a: (handle.async_pread(a, str(path)), handle.wait()),
        "file.write": file.write,
        "file.read": file.read,
        "file.write_from, result": lambda a: file.write_from(a).result(),
        "file.read_into, result": lambda a: file.read_into(a).result(),
        "file.write_from, exception": lambda a: file.write_from(a).exception(),
        "file.write_from, polled": lambda a: polled(lambda: file.write_from(a)),
        "file.write_from, awaited": lambda a: awaited(lambda: file.write_from(a)),
        "file.read_into, awaited": lambda a: awaited(lambda: file.read_into(a)),
        "file.write_from, callback": lambda a: called_back(lambda: file.write_from(a)),
        "write": lambda a: tensorferry.write(path, a),
        "read": lambda a: tensorferry.read(path, a),
        "write_many": lambda a: tensorferry.write_many([(path, a), (path, a, nbytes)]),
        "read_many": lambda a: tensorferry.read_many([(path, a)]),
    }
    held = []
    gc.disable()  # the release must not depend on the garbage collector
    for kind in ("numpy", "torch"):
        for name, way in ways.items():
            array = np.ones(nbytes, np.uint8)
            watched = weakref.ref(array)  # for a tensor it is alive until its storage is freed
            moved: Any = array if kind == "numpy" else torch.from_numpy(array)
            del array
            way(moved)
            del moved
            if "callback" in name:  # its thread is on its way back from the call
                settled(lambda: watched() is None)  # noqa: B023
            if watched() is not None:
                held.append(f"{name} ({kind})")
                handle.wait()
                tensorferry.read(path, np.zeros(1, np.uint8))
    return held


# A direct transfer that is refused


def refused_direct_transfers(engine: str, directory: str, write: bool, direct: bool) -> int | None:
    """Have the kernel refuse blocks of a transfer past the page cache; return its errno, or None."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "file"
    data = random_bytes(1465 * 4096, 1)  # whole pages: an edge would use the page cache
    np.zeros_like(data).tofile(path) if write else data.tofile(path)
    with path.open() as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with tensorferry.open(path, "r+", engine=engine, direct=direct or "auto") as opened:
        call = {"threads": "pwrite" if write else "pread", "libaio": "io_submit"}[engine]
        calls.order(Rule(call, path.name, error=errno.EINVAL, times=3))
        try:
            moved = opened.write(data) if write else opened.read(np.zeros_like(data))
        except tensorferry.StorageError as error:
            return error.errno
        assert calls.hits() == 3
    assert_equal(contents(path) if write else moved, data)
    return None


# A close(2) that fails


def failing_close(engine: str, path: str, error: int, interposed: bool) -> dict[str, Any]:
    """Write 3,000,001 bytes in every way to files with a failing close(2); return the error of each way."""
    calls = slow_calls.attached() if interposed else None
    handle = tensorferry.aio_handle(engine=engine)
    small, large = np.full(5_003, 1, np.uint8), np.full(3_000_001, 2, np.uint8)
    neighbour = path.replace("victim", "neighbour")
    warm_up = path.replace("victim", "warm-up")
    for array in (small, large):
        tensorferry.write_many([(warm_up, array), (warm_up, array, array.size)])
        tensorferry.read(warm_up, np.zeros_like(array))
        handle.sync_pwrite(array, warm_up)

    def in_file(array: Any, asynchronous: bool = False) -> None:
        with tensorferry.open(path, "r+", engine=engine) as file:
            if asynchronous:
                file.write_from(array)
            else:
                file.write(array)

    def waited(array: Any) -> None:
        handle.async_pwrite(array, path)
        handle.wait()

    ways: dict[str, Callable[[Any], object]] = {
        "write": lambda a: tensorferry.write(path, a),
        "write, sync": lambda a: tensorferry.write(path, a, sync=True),
        "write_many": lambda a: tensorferry.write_many([(neighbour, a), (path, a)]),
        "write_many, pieces": lambda a: tensorferry.write_many([(path, a), (path, a, a.size)]),
        "handle.write": lambda a: handle.write(a, path),
        "handle.sync_pwrite": lambda a: handle.sync_pwrite(a, path),
        "handle.async_pwrite, wait": waited,
        "file.write, close": in_file,
        "file.write_from, close": lambda a: in_file(a, asynchronous=True),
    }
    readings: dict[str, Callable[[Any], object]] = {
        "read": lambda a: tensorferry.read(path, np.zeros_like(a)),
        "read_many": lambda a: tensorferry.read_many([(path, np.zeros_like(a))]),
        "handle.sync_pread": lambda a: handle.sync_pread(np.zeros_like(a), path),
    }
    outcomes: dict[str, Any] = {}
    before = count_descriptors()
    if calls:
        calls.order(Rule("close", pathlib.Path(path).name, error=error, after=True))
    for size, array in (("small", small), ("large", large)):
        for name, way in (ways | readings).items():
            try:
                way(array)
                outcomes[f"{name}, {size}"] = None
            except tensorferry.StorageError as raised:
                outcome = [raised.errno, os.fsdecode(raised.filename), str(raised)]
                outcomes[f"{name}, {size}"] = outcome
    if calls:
        calls.clear()
    gc.collect()
    assert count_descriptors() == before, "descriptors leaked"
    assert handle.wait() == 0
    return outcomes


# A page cache that is emptied while it is read


def checksums_of_what_was_cached(engine: str, directory: str, nbytes: int, error: int) -> int:
    """Read a cached file while each read from the cache is refused in turn; return the number of refused reads."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "evicted"
    data = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
    data.tofile(path)
    expected = [zlib.crc32(data[begin : begin + (1 << 20)]) for begin in range(0, nbytes, 1 << 20)]
    refused = 0
    with tensorferry.open(path, engine=engine, block_size=1 << 20) as file:
        for skip in range(2 * nbytes >> 17):
            calls.order(Rule("preadv2_nowait", "evicted", error=error, skip=skip, times=2))
            ways: list[dict[str, Any]] = [{}, {"expected": expected}]
            ways.append({"expected": expected, "in_place": True})
            for known in ways:
                sums = tensorferry.Checksums(1 << 20, segments=True, **known)
                parts = [np.zeros(part, np.uint8) for part in (100_003, nbytes - 100_003)]
                file.read_into(parts, checksums=sums).result()
                assert_equal(np.concatenate(parts), data)
                assert sums.chunks == expected
                assert sums.segments == [zlib.crc32(part) for part in parts]
            refused += calls.hits()
    return refused


# Calls that must not run on a thread that drives a queue


def calls_that_may_block(engine: str, directory: str) -> dict[str, list[str]]:
    """Return, by the thread's name, which calls that may block were made."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory)
    handle = tensorferry.aio_handle(engine=engine)
    calls.watch(path)
    _work_of_all_kinds(handle, path, engine)
    assert threads_named(WORKER)
    made = defaultdict(set)
    moves = ["pread", "preadv2", "pwrite", "pwritev2"]
    for seen in calls.seen("open", "open_directory", "close", "ftruncate", "fallocate", *moves):
        made[seen.thread_name].add(seen.call)
    return {name: sorted(each) for name, each in made.items()}


def sleeps_of_workers(engine: str, path: str) -> dict[str, int]:
    """Write while libc or the file system returns EAGAIN 40 times; return the counts of sleeps and of these errors."""
    calls = slow_calls.attached()
    handle = tensorferry.aio_handle(engine=engine)
    data = np.full(100_003, 7, np.uint8)
    calls.order(Rule("pwrite", "again", error=errno.EAGAIN, times=40))
    calls.watch(path)
    handle.async_pwrite(data, path)
    assert handle.wait() == 1
    assert_equal(contents(pathlib.Path(path)), data)
    sleeps = sum(seen.thread_name == WORKER for seen in calls.seen("sleep"))
    return {"sleeps": sleeps, "hits": calls.hits()}


def _work_of_all_kinds(handle: tensorferry.aio_handle, path: pathlib.Path, engine: str) -> None:
    large, small = np.full(9_000_001, 1, np.uint8), np.full(5_003, 2, np.uint8)
    for array in (large, small):
        for index in range(4):
            handle.async_pwrite(array, str(path / f"victim{index}"), index * 1_000)
        handle.wait()
        tensorferry.write(path / "victim-w", array, truncate=True, sync=True)
        items = [(path / f"victim-m{index}", array) for index in range(4)]
        tensorferry.write_many([*items, (path / "victim-m0", array, array.size)], truncate=True)
        tensorferry.write_many(items, sync=True)
        for file in (
            path / "victim0",
            path / "victim-w",
        ):  # into the page cache: all of one, half of the other
            contents(file)
        for index in range(4):
            handle.async_pread(np.zeros_like(array), str(path / f"victim{index}"))
        handle.wait()
        tensorferry.read_many([(name, np.zeros_like(array)) for name, _ in items])
        with tensorferry.open(path / "victim-w", "r+", engine=engine) as file:
            futures = [file.write_from(array), file.read_into(np.zeros_like(array))]
            for future in futures:
                future.result()


# Forks


def space_refused_half_way(engine: str, directory: str) -> dict[str, int | None]:
    """Reserve space of which the file gets some before the rest is refused."""
    path = pathlib.Path(directory) / "file"
    path.write_bytes(bytes(1_000))
    calls = slow_calls.attached()
    calls.order(Rule("fallocate", "file", error=errno.ENOSPC, after=True, times=1))
    number = None
    with tensorferry.open(path, "r+", engine=engine) as file:
        try:
            file.preallocate(1 << 20)
        except tensorferry.StorageError as error:
            number = error.errno
    return {"errno": number, "size": path.stat().st_size}


def fork_during_reservation(engine: str, directory: str) -> None:
    """Fork while a thread reserves space for a file; the child writes to that very file."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "shared"
    data = random_bytes(3_000_001, 1)
    handle = tensorferry.aio_handle(engine=engine)
    calls.order(Rule("fallocate", path.name, hold=True, times=1))
    writing = InThread(lambda: handle.sync_pwrite(data, str(path)))
    calls.await_held()

    def work() -> None:
        own = tensorferry.aio_handle(engine=engine)
        own.async_pwrite(data, str(path), 4 << 20)
        own.wait()
        tensorferry.write(path, data, 8 << 20)
        assert_equal(contents(path)[4 << 20 :][: data.size], data)
        assert_equal(contents(path)[8 << 20 :], data)
        assert_works(own, path.parent)

    passes_in_child(work)
    calls.release()
    writing.result("the parent's write")
    assert_equal(contents(path)[: data.size], data)


def ask_futures_that_ended_before_the_fork(engine: str, path: str) -> None:
    """Query, in a child, futures of transfers that ended before the fork."""
    data = np.full(100_003, 4, np.uint8)
    file = tensorferry.open(path, "w", engine=engine)
    future = file.write_from(data)
    while not future.done():
        time.sleep(0.001)
    passes_in_child(lambda: assert_equal(future.result(), data))
    file.close()


# A close that gives up


def close_over_hung_writes(
    engine: str, path: str, product: str, patience_s: float
) -> dict[str, Any]:
    """Close handles and files with hung writes; check that the memory of these writes is not changed."""
    runtime.CLOSE_PATIENCE_SECONDS = patience_s
    if engine == "threads":
        slow_calls.attached().order(Rule("pwrite", "hung", hold=True))
    sources = [np.full(nbytes, 5, np.uint8) for nbytes in (4_096, 100_003, 3_000_001)]
    watched = [weakref.ref(source) for source in sources]
    opened: Any
    if product == "handle":
        opened = tensorferry.aio_handle(engine=engine)
        for index in range(3):
            opened.async_pwrite(sources[index], f"{path}{index}")
    else:
        opened = tensorferry.open(f"{path}0", "w", engine=engine)
        futures = [opened.write_from(sources[index], index << 22) for index in range(3)]
        del futures
    del sources
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        InThread(opened.close).result("close")
    del opened
    gc.collect()
    usurpers = [np.full(3_000_001, 9, np.uint8) for _ in range(8)]
    alive = [reference() is not None for reference in watched]
    assert all((usurper == 9).all() for usurper in usurpers)
    assert all((reference() == 5).all() for reference in watched)
    pathlib.Path(path).with_name("looked").touch()
    return {"alive": alive, "warnings": [str(warning.message) for warning in caught]}


# Writes of one file


def truncate_beside_a_later_write(engine: str, directory: str, method: str) -> None:
    """Begin a truncating write; while it cuts the file, write beyond its end."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "cut"
    first, second = random_bytes(200_003, 1), random_bytes(300_007, 2)
    np.zeros(2 << 20, np.uint8).tofile(path)
    calls.order(Rule("ftruncate", path.name, hold=True, times=1))
    if method == "write":
        truncating = InThread(lambda: tensorferry.write(path, first, truncate=True))
    else:
        truncating = InThread(lambda: tensorferry.write_many([(path, first)], truncate=True))
    calls.await_held()
    handle = tensorferry.aio_handle(engine=engine)
    writing = InThread(lambda: handle.sync_pwrite(second, str(path), 1 << 20))
    writing.thread.join(0.3)  # it may wait for the truncation, or be done before it
    calls.release()
    truncating.result("the truncating write")
    writing.result("the later write")
    assert_equal(contents(path)[: first.size], first)
    assert_equal(contents(path)[1 << 20 :], second)


def sync_in_unreadable_directory(engine: str, directory: str, how: str) -> dict[str, Any]:
    """Write durably in a directory that cannot be opened; return the syncs that were made, or the error."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "file"
    tensorferry.write(pathlib.Path(directory).parent / "warm-up", np.ones(1, np.uint8), sync=True)
    if how == "mode":
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        except PermissionError as error:
            return {"skip": f"becoming another user needs root: {error}"}
        try:
            os.listdir(directory)  # noqa: PTH208
        except PermissionError:
            pass
        else:
            return {"skip": "the directory can be read all the same"}
    else:
        calls.order(Rule("open_directory", directory, error=errno.EACCES))
    calls.watch(directory)
    raised = None
    try:
        tensorferry.write(path, np.full(100_003, 3, np.uint8), sync=True)
    except tensorferry.StorageError as error:
        raised = [error.errno, str(error)]
    return {"error": raised, "syncs": dict(calls.count())}


def count_syncs(engine: str, directory: str, pieces: int) -> dict[str, dict[str, int]]:
    """Return how often files and directories were synced: of a new file, of an old one, of two new ones."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory)
    data = np.full(pieces * 4096, 3, np.uint8)
    one = [(path / "file", data[at : at + 4096], at) for at in range(0, data.size, 4096)]
    counts = {}
    for name, items in (
        ("new file", one),
        ("old file", one),
        ("two new files", [(path / name, data) for name in ("first", "second")]),
    ):
        calls.watch(path)
        tensorferry.write_many(items, sync=True)
        counts[name] = dict(calls.count())
        assert_equal(contents(path / items[0][0]), data)
    return counts


def write_pieces_twice(engine: str, directory: str, pieces: int) -> None:
    """Write a new file in pieces, and again; in a process that has made no other names."""
    data = np.arange(pieces * 1024, dtype=np.uint32).view(np.uint8)
    path = pathlib.Path(directory) / "file"
    items = [(path, data[at : at + 4096], at) for at in range(0, data.size, 4096)]
    for _ in range(2):
        tensorferry.write_many(items, sync=True)
    assert_equal(contents(path), data)


# Defects that reviewers found by trying to break the package


def come_back_after_giving_up(engine: str, directory: str) -> str:
    """Close a handle with a hung write, drop it, then let the write continue; return how the write ended."""
    runtime.CLOSE_PATIENCE_SECONDS = 0.3
    calls = slow_calls.attached()
    data = np.full(3_000_001, 5, np.uint8)
    path = pathlib.Path(directory) / "hung"
    handle = tensorferry.aio_handle(engine="threads")
    handle.sync_pwrite(data, str(path) + "-warm-up")
    calls.order(Rule("pwrite", "hung", hold=True))
    handle.async_pwrite(data, str(path))
    future = handle._pending[0].future
    calls.await_held()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.close()
    del handle
    gc.collect()
    calls.release()
    future.result(120)
    assert_equal(contents(path), data)
    return "well"


def reads_beside_hung_syncs(engine: str, directory: str) -> None:
    """Read by path, and close files, while all allowed helpers hang in fdatasync, and more syncs are queued."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "healthy"
    data = np.full(4 << 20, 6, np.uint8)
    tensorferry.write(path, data)
    tensorferry.write(path.with_name("warm-up"), data, sync=True)
    calls.order(Rule("fdatasync", "hung", hold=True))
    threads = [
        InThread(lambda index=index: tensorferry.write(f"{directory}/hung{index}", data, sync=True))
        for index in range(12)
    ]
    calls.await_held(8)  # max_helpers
    found = np.zeros_like(data)
    tensorferry.read(path, found)
    tensorferry.read_many([(path, np.zeros(4096, np.uint8)) for _ in range(3)])
    assert_equal(found, data)
    calls.release()
    for thread in threads:
        thread.result("a write that syncs")


def close_beside_a_slow_sync(engine: str, directory: str, new: bool) -> None:
    """Close a file while another thread's write to it is being synced."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "file"
    if not new:
        path.write_bytes(b"old")
    file = tensorferry.open(path, "w" if new else "r+")
    calls.order(Rule("fdatasync", "file", hold=True))
    calls.watch(path)
    writing = InThread(lambda: file.write(np.full(3_000_001, 7, np.uint8), sync=True))
    calls.await_held()
    closing = InThread(file.close)
    closing.thread.join(0.2)
    assert closing.is_alive()
    calls.release()
    for call in (writing, closing):
        call.result()
    assert calls.count()["fdatasync"] == 1


def refused_pieces(engine: str, directory: str, pieces: int) -> int:
    """Truncate a file to pieces that do not fit on the drive; return its size afterwards."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "file"
    path.write_bytes(bytes(1_450_000))
    calls.order(Rule("fallocate", "/file", error=errno.ENOSPC))
    piece = np.ones(1_500_000 // pieces, np.uint8)
    items = [(path, piece, index * piece.size) for index in range(pieces)]
    with pytest.raises(tensorferry.StorageError) as caught:
        tensorferry.write_many(items, truncate=True)
    assert caught.value.errno == errno.ENOSPC
    assert len(caught.value.others) == pieces - 1
    return path.stat().st_size


def piece_refused_by_another_name(engine: str, directory: str) -> int:
    """Truncate a file to two pieces, of which one, by another name, has no room; return the size that it has then."""
    calls = slow_calls.attached()
    path, link = (pathlib.Path(directory) / name for name in ("file", "link"))
    path.write_bytes(bytes(1_450_000))
    link.symlink_to(path)
    calls.order(Rule("fallocate", "/file", error=errno.ENOSPC))
    piece = np.ones(100_000, np.uint8)
    with pytest.raises(tensorferry.StorageError) as caught:
        tensorferry.write_many([(path, piece, 1_400_000), (link, piece)], truncate=True)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes()[: piece.size] == piece.tobytes()
    return path.stat().st_size


def pieces_with_few_descriptors(engine: str, directory: str, count: int, sync: bool) -> None:
    """Write pieces of one file among so many new files that descriptors run short."""
    path = pathlib.Path(directory)
    tensorferry.write(path / "warm-up", np.ones(1, np.uint8))
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
    first, last = np.full(1_000_003, 1, np.uint8), np.full(1_000_003, 2, np.uint8)
    small = np.full(5_003, 3, np.uint8)
    others = [(path / f"other{index}", small) for index in range(count)]
    tensorferry.write_many(
        [(path / "pieces", last, first.size), *others, (path / "pieces", first, 0)],
        truncate=True,
        sync=sync,
    )
    assert_equal(contents(path / "pieces"), np.concatenate([first, last]))
    for other, _ in others:
        assert_equal(contents(other), small)


# Streams during the reservation of their space


def file_closed_while_its_stream_reserves(engine: str, directory: str) -> int:
    """Close a file while space for its stream is reserved, open another; return how long that one has become."""
    calls = slow_calls.attached()
    calls.order(
        Rule("fallocate", "streamed", hold=True, skip=1, times=1)
    )  # that which sets the size
    file = tensorferry.open(pathlib.Path(directory) / "streamed", "w")
    stream = file.stream()
    stream.append(np.ones(6 << 20, np.uint8))
    calls.await_held()
    closing = InThread(file.close)
    closing.thread.join(0.3)
    others = [(pathlib.Path(directory) / f"other{number}").open("wb") for number in range(20)]
    assert closing.is_alive()
    calls.release()
    closing.result("close()")
    with contextlib.suppress(tensorferry.StorageError, ValueError):
        stream.finish()
    stream.abort()
    longest = max(os.fstat(other.fileno()).st_size for other in others)
    for other in others:
        other.close()
    return longest


def stream_dropped_while_it_reserves(engine: str, directory: str) -> bool:
    """Drop a stream while the reservation of its space hangs; return whether its array is released at once."""
    calls = slow_calls.attached()
    calls.order(Rule("fallocate", "streamed", hold=True, times=1))
    with tensorferry.open(pathlib.Path(directory) / "streamed", "w", engine=engine) as file:
        streams = [file.stream()]
        array = np.ones(6 << 20, np.uint8)
        gone = weakref.ref(array)
        streams[0].append(array)
        calls.await_held()
        del array
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            InThread(streams.clear).result("dropping the stream")
        free = gone() is None
        calls.release()
    return free


# A stream that is given up while every thread that could go on with it is held


def stream_given_up_beside_held_ones(engine: str, directory: str, way: str) -> None:
    """Abandon a stream, in one of several ways, while other held streams occupy all threads for streams."""
    calls = slow_calls.attached()
    folder = pathlib.Path(directory)
    count = 8
    calls.order(Rule("fallocate", "held", hold=True))
    with contextlib.ExitStack() as files:
        others = []
        for index in range(count):
            other = files.enter_context(tensorferry.open(folder / f"held{index}", "w"))
            others.append(other.stream())
            others[index].append(np.ones(2 << 20, np.uint8))
        file = files.enter_context(tensorferry.open(folder / "stream", "w"))
        calls.await_held(count)
        array: Any = np.ones(1 << 20, np.uint8)
        kept = weakref.ref(array)
        stream: Any = file.stream()
        stream.append(array, kept=True)
        del array
        assert kept() is not None
        if way == "abort":
            stream.abort()
        elif way == "collect":
            cycle = [stream]
            cycle.append(cycle)
            del cycle
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del stream
            gc.collect()
        assert kept() is None
        assert calls.held() == count
        calls.release()
        for other_stream in others:
            other_stream.finish()
    assert_works(tensorferry.aio_handle(engine=engine), folder)


# Calls that a signal interrupts


def _victim(directory: str) -> pathlib.Path:
    path = pathlib.Path(directory) / "victim"
    path.write_bytes(bytes(range(256)) * 64)
    return path


def interrupted_calls(engine: str, directory: str) -> dict[str, Any]:
    """Send Ctrl-C during a system call of a small transfer; this call and all later ones then return EINTR.

    Returns the number of system calls, and the outcome, of each transfer.
    """
    calls = slow_calls.attached()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = _victim(directory)
    small = tensorferry.empty(4096, "u1")  # one block, which the caller moves
    found: dict[str, Any] = {}
    with tensorferry.open(path, "r+", engine=engine) as file:
        attempts: dict[str, tuple[str, Callable[[], Any]]] = {
            "read": ("pread", lambda: file.read(small)),
            "write": ("pwrite", lambda: file.write(small)),
            "open": ("open", lambda: tensorferry.open(path)),
            "open a new one": ("open", lambda: tensorferry.open(f"{path}2", "w")),
            "read by path": ("pread", lambda: tensorferry.read(path, small)),
            "write by path": ("ftruncate", lambda: tensorferry.write(path, small)),
            "synced write": ("fdatasync", lambda: file.write(small, sync=True)),
            "sync": ("fdatasync", file.sync),
            "truncate": ("ftruncate", lambda: file.truncate(100)),
            "preallocate": ("fallocate", lambda: file.preallocate(1 << 20)),
            "reserving write": ("fallocate", lambda: file.write(np.zeros(1 << 20, np.uint8), 4096)),
        }
        for name, (call, attempt) in attempts.items():
            calls.order(Rule(call, "victim", error=errno.EINTR, hold=True))

            def interrupt() -> None:
                calls.await_held()
                os.kill(os.getpid(), signal.SIGINT)
                calls.release()

            interrupting = InThread(interrupt)
            try:
                attempt()
                outcome = "nothing"
                interrupting.result()
            except BaseException as error:
                outcome = repr(error)
            found[name] = [calls.hits(), outcome]
            interrupting.result()
            calls.clear()
            size = file.size
            _ = file.read(bytearray(100)), file.write(small[:100]), file.sync()
            assert file.size == size
            file.truncate(256 * 64)
    return found


def interrupted_without_end(engine: str, directory: str, times: int) -> dict[str, Any]:
    """Make system calls return EINTR without a signal; return the number of calls, and the errno."""
    calls = slow_calls.attached()
    path = _victim(directory)
    small = np.zeros(5_003, np.uint8)
    found = {}
    with tensorferry.open(path, "r+", engine=engine) as file:
        attempts: dict[str, tuple[str, Callable[[], Any]]] = {
            "open": ("open", lambda: tensorferry.open(path)),
            "read": ("pread", lambda: file.read(small)),
            "sync": ("fdatasync", file.sync),
            "truncate": ("ftruncate", lambda: file.truncate(100)),
            "preallocate": ("fallocate", lambda: file.preallocate(1 << 20)),
        }
        for name, (call, attempt) in attempts.items():
            calls.order(Rule(call, "victim", error=errno.EINTR, times=times))
            number = None
            try:
                attempt()
            except tensorferry.StorageError as error:
                number = error.errno
            found[name] = [calls.hits(), number]
            calls.clear()
            file.sync()
            file.truncate(256 * 64)
    return found


def handler_that_writes_the_same_file(engine: str, directory: str, call: str) -> None:
    """Write a file in a signal handler that interrupts a small write of the same file: the handler's write is later."""
    calls = slow_calls.attached()
    path = _victim(directory)
    first, second = (np.full(nbytes, value, np.uint8) for nbytes, value in ((3000, 1), (1600, 2)))
    called = []

    def write(*_: object) -> None:
        tensorferry.write(path, second)
        called.append(path.read_bytes() == second.tobytes())

    signal.signal(signal.SIGUSR1, write)
    tensorferry.write(path, first)  # the default engine
    calls.order(Rule(call, "victim", error=errno.EINTR, hold=True, times=1))

    def interrupt() -> None:
        calls.await_held()
        os.kill(os.getpid(), signal.SIGUSR1)
        calls.release()

    path.write_bytes(bytes(5000))
    interrupting = InThread(interrupt)
    tensorferry.write(path, first, sync=True)
    interrupting.result()
    assert called == [True]
    assert path.read_bytes() == second.tobytes()
    assert_works(tensorferry.aio_handle(engine=engine), pathlib.Path(directory))


def interrupted_by_a_fork(engine: str, directory: str) -> None:
    """Fork in a signal handler that interrupts a small read: the parent continues.

    In the child the read fails, unless a helper had completed it before the fork.
    """
    calls = slow_calls.attached()
    path = _victim(directory)
    small = np.zeros(5_003, np.uint8)
    children = []

    def fork(*_: object) -> None:
        children.append(os.fork())

    signal.signal(signal.SIGUSR1, fork)
    with tensorferry.open(path, "r+", engine=engine) as file:
        calls.order(Rule("pread", "victim", error=errno.EINTR, hold=True, times=1))

        def interrupt() -> None:
            calls.await_held()
            os.kill(os.getpid(), signal.SIGUSR1)
            calls.release()

        interrupting = InThread(interrupt)
        try:
            file.read(small)
        except RuntimeError as error:
            os._exit(0 if children == [0] and "fork" in str(error) else 1)
        while not children:  # a helper was faster, so the handler runs after the call
            time.sleep(0.001)
        if children == [0]:
            os._exit(0 if small.tobytes() == path.read_bytes()[:5_003] else 2)
        interrupting.result()
        assert small.tobytes() == path.read_bytes()[:5_003]
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


# Files in memory


def copied_by_the_caller(engine: str, directory: str, write: bool) -> None:
    """Move a file in memory while all system calls that do are held; return when the caller has made one of them."""
    calls = slow_calls.attached()
    path = pathlib.Path(directory) / "memory"
    data = random_bytes(64 << 20, 1)
    data.tofile(path)
    found = np.zeros_like(data)
    caller = threading.get_native_id()
    call = "pwrite" if write else "pread"
    calls.order(Rule(call, path.name, hold=True))
    calls.watch(path.name)

    def await_caller() -> None:
        assert settled(lambda: any(seen.thread == caller for seen in calls.seen(call)), 60.0)
        calls.release()

    awaiting = InThread(await_caller)
    with tensorferry.open(path, "r+", engine=engine) as file:
        if write:
            file.write(~data)
        else:
            file.read(found)
    awaiting.result()
    assert_equal(contents(path) if write else found, ~data if write else data)
