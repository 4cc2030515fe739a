"""Futures: waiting, timing out, callbacks and await."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import logging
import os
import queue
import re
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tests.conftest import ROOT
from tests.support import required
from tests.support.faultfs import Fault, FaultFS
from tests.support.leaks import settled

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Awaitable, Callable, Iterator

    from tests.support.data import RandomBytes

SLOWLY: dict[str, Any] = {"block_size": 4096, "queue_depth": 1, "direct": True}


def test_results(engine: str, directory: pathlib.Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(3_000_001).tobytes()
    with tensorferry.open(directory / "file", "w+", engine=engine) as file:
        written = file.write_from(data, 5, sync=True)
        assert written.result() is data
        assert written.done()
        assert written.exception() is None
        buffer = bytearray(len(data))
        assert file.read_into(buffer, 5).result(120) is buffer
        assert buffer == data


@pytest.fixture
def failing(faultfs: FaultFS) -> pathlib.Path:
    """Return a file with reads that are held, and fail when they are released."""
    path = faultfs.path / "file"
    path.write_bytes(bytes(100_000))
    faultfs.order(Fault("read", hold=True, error=errno.EIO))
    return path


def test_a_failure_is_the_result(engine: str, faultfs: FaultFS, failing: pathlib.Path) -> None:
    with tensorferry.open(failing, engine=engine) as file:
        future = file.read_into(bytearray(100_000))
        assert not future.done()
        faultfs.release()
        failure = future.exception()
        assert isinstance(failure, tensorferry.StorageError)
        with pytest.raises(tensorferry.StorageError) as raised:
            future.result()
        assert future.done()
    assert failure is raised.value is future.exception()


def test_waiting_may_time_out_and_be_taken_up_again(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(30_000_000).tobytes()
    with tensorferry.open(directory / "file", "w", engine=engine, **SLOWLY) as file:
        future = file.write_from(data)
        with pytest.raises(TimeoutError):
            future.result(0)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0.001)
        assert future.result(1e300) is data


def test_callbacks_are_called_once_each_with_the_future(
    engine: str, directory: pathlib.Path
) -> None:
    called: list[tensorferry.Future] = []
    with tensorferry.open(directory / "file", "w", engine=engine) as file:
        futures = [file.write_from(bytes(100_000), 100_000 * index) for index in range(50)]
        everything = threading.Semaphore(0)

        def note(future: tensorferry.Future) -> None:
            assert future.done()
            called.append(future)
            everything.release()

        for future in futures:
            future.add_done_callback(note)
        for _ in futures:
            assert everything.acquire(timeout=300)
        futures[0].add_done_callback(note)  # on a done future it runs at once, in this thread
    assert len(called) == 51
    assert set(map(id, called)) == set(map(id, futures))


def test_an_exception_in_a_callback_is_logged_and_harms_nobody(
    directory: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    after = threading.Event()
    with tensorferry.open(directory / "file", "w") as file:
        future = file.write_from(bytes(20_000_000))
        future.add_done_callback(lambda _: 1 / 0)
        future.add_done_callback(lambda _: after.set())
        assert after.wait(120)
    # A callback that is added to a done future runs at once, perhaps before the other one has run on its thread.
    assert settled(lambda: "ZeroDivisionError" in caplog.text)


def test_await(engine: str, directory: pathlib.Path, random_bytes: RandomBytes) -> None:
    data = [random_bytes(1_000_000 + index).tobytes() for index in range(8)]
    path = directory / "file"

    async def main() -> None:
        with tensorferry.open(path, "w+", engine=engine) as file:
            await asyncio.gather(*(write(file, index) for index in range(8)))
            for index in range(8):
                buffer = bytearray(len(data[index]))
                assert await file.read_into(buffer, 2_000_000 * index) is buffer
                assert buffer == data[index]

    async def write(file: tensorferry.File, index: int) -> None:
        assert await file.write_from(data[index], 2_000_000 * index) is data[index]

    for _ in range(2):  # each event loop has its own listener
        asyncio.run(main())


def test_awaiting_a_failure_raises_it(faultfs: FaultFS, failing: pathlib.Path) -> None:
    async def main() -> None:
        with tensorferry.open(failing) as file:
            future = file.read_into(bytearray(100_000))
            asyncio.get_running_loop().call_soon(faultfs.release)  # when it is awaited
            with pytest.raises(tensorferry.StorageError):
                await future

    asyncio.run(main())


def test_a_cancelled_transfer_ends_early_and_says_so(engine: str, directory: pathlib.Path) -> None:
    data = bytes(30_000_000)
    with tensorferry.open(directory / "file", "w", engine=engine, **SLOWLY) as file:
        future = file.write_from(data)
        assert future.running()
        assert not future.cancelled()
        assert future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(120)
        with pytest.raises(concurrent.futures.CancelledError):
            future.exception()
        assert (future.done(), future.running(), future.cancelled()) == (True, False, True)
        assert not future.cancel()
        assert file.write_from(b"next").result() == b"next"


def test_what_has_ended_cannot_be_cancelled(
    directory: pathlib.Path, faultfs: FaultFS, failing: pathlib.Path
) -> None:
    with tensorferry.open(directory / "file", "w+") as file:
        future = file.write_from(b"12345")
        future.result()
        assert not future.cancel()
        assert not future.cancelled()
    faultfs.release()
    with tensorferry.open(failing) as file:
        failed = file.read_into(bytearray(100_000))
        assert isinstance(failed.exception(), tensorferry.StorageError)
        assert not failed.cancel()
        assert not failed.cancelled()


def test_nothing_touches_the_array_of_a_cancelled_read_once_it_is_done(
    engine: str, directory: pathlib.Path
) -> None:
    path = directory / "file"
    path.write_bytes(b"\1" * 20_000_000)
    os.sync()
    with tensorferry.open(path, engine=engine, block_size=65536, direct=True) as file:
        for _ in range(20):
            buffer = bytearray(20_000_000)
            future = file.read_into(buffer)
            future.cancel()
            while not future.done():
                time.sleep(0)
            buffer[:] = bytes(len(buffer))
            file.read_into(bytearray(1_000_000)).result()
            assert not any(buffer)


def test_a_future_does_not_keep_the_copy_of_what_was_not_contiguous(
    directory: pathlib.Path,
) -> None:
    np = pytest.importorskip("numpy")
    source = np.zeros((2, 4 << 20), np.uint8).T
    tracemalloc.start()
    try:
        with tensorferry.open(directory / "file", "w") as file:
            future = file.write_from(source)
            assert tracemalloc.get_traced_memory()[1] > source.nbytes, "it was not copied"
            assert future.result() is source
            assert tracemalloc.get_traced_memory()[0] < source.nbytes / 2
    finally:
        tracemalloc.stop()


def test_a_cancelled_future_is_not_warned_of(directory: pathlib.Path) -> None:
    with warnings.catch_warnings(), tensorferry.open(directory / "file", "w", **SLOWLY) as file:
        warnings.simplefilter("error")
        assert file.write_from(bytes(30_000_000)).cancel()
        file.close()
        gc.collect()


def test_callbacks_of_a_cancelled_transfer_are_called_when_it_has_ended(
    directory: pathlib.Path,
) -> None:
    called = queue.Queue[Any]()
    with tensorferry.open(directory / "file", "w", **SLOWLY) as file:
        future = file.write_from(bytes(30_000_000))
        future.add_done_callback(lambda ended: called.put((ended.done(), ended.cancelled())))
        future.cancel()
        assert called.get(timeout=300) == (True, True)


def test_repr_says_what_it_is(faultfs: FaultFS, failing: pathlib.Path) -> None:
    with tensorferry.open(failing, "r+", **SLOWLY) as file:
        failed = file.read_into(bytearray(100_000))
        begun = repr(failed)
        assert "reading 100000 bytes at offset 0" in begun
        assert str(failing) in begun
        assert begun.endswith("running>")
        faultfs.release()
        failed.exception()
        assert "failed: [Errno 5] Input/output error" in repr(failed)
        done = file.write_from(bytes(100_000), 4096)
        done.result()
        assert "writing 100000 bytes at offset 4096" in repr(done)
        assert repr(done).endswith("done>")
        faultfs.order(Fault("write", hold=True))
        stopped = file.write_from(bytes(100_000))
        faultfs.await_held()
        stopped.cancel()
        assert repr(stopped).endswith("being cancelled>")
        faultfs.release()
        with pytest.raises(concurrent.futures.CancelledError):
            stopped.result()
        assert repr(stopped).endswith(": cancelled>")


def test_a_future_is_generic_in_its_result(directory: pathlib.Path) -> None:
    assert tensorferry.Future[bytes] is not None
    program = directory / "program.py"
    program.write_text(
        """
import tensorferry

with tensorferry.open("file", "w+") as file:
    reveal_type(file.write_from(b"x"))
    reveal_type(file.read_into(bytearray(5)).result())
    old: tensorferry.Future = file.write_from(b"x")

    async def main() -> None:
        reveal_type(await file.write_from(b"x"))
"""
    )
    required.module("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(directory / "cache")]
    command += ["--no-site-packages", "--follow-imports=silent"]  # torch's types matter to none
    checked = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, cwd=ROOT / "src", timeout=600
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    revealed = re.findall('Revealed type is "(.*)"', checked.stdout.replace("builtins.", ""))
    assert revealed == ["tensorferry.transfer.futures.Future[bytes]", "bytearray", "bytes"]


def in_a_loop(directory: pathlib.Path, use: Callable[[tensorferry.File], Awaitable[None]]) -> None:
    """Run a coroutine function with a file of 30 MB, of which reads are slow."""
    path = directory / "file"
    path.write_bytes(b"\7" * 30_000_000)
    os.sync()

    async def main() -> None:
        with tensorferry.open(path, "r+", **SLOWLY) as file:
            await use(file)

    asyncio.run(main())


def test_asyncio_takes_futures_wherever_it_takes_coroutines(directory: pathlib.Path) -> None:
    async def use(file: tensorferry.File) -> None:
        def begin(index: int = 0) -> tensorferry.Future[bytearray]:
            return file.read_into(bytearray(100_000), index)

        def whole(buffer: bytearray) -> bool:
            return buffer == b"\7" * 100_000

        assert whole(await asyncio.create_task(begin()))
        assert all(map(whole, await asyncio.gather(*map(begin, range(8)))))
        assert whole(await asyncio.wait_for(begin(), 60))
        assert whole(await asyncio.shield(begin()))
        assert all([whole(await each) for each in asyncio.as_completed(map(begin, range(8)))])
        if sys.version_info >= (3, 11):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(begin(index)) for index in range(8)]
            assert all(whole(task.result()) for task in tasks)
        done, _ = await asyncio.wait([asyncio.create_task(begin())])
        assert whole(done.pop().result())

    in_a_loop(directory, use)


def test_several_tasks_may_await_one_transfer(directory: pathlib.Path) -> None:
    async def use(file: tensorferry.File) -> None:
        buffer = bytearray(10_000_000)
        future = file.read_into(buffer)

        async def wait() -> bytearray:
            return await future

        tasks = [asyncio.create_task(each) for each in (wait(), future, wait(), future)]
        assert all(found is buffer for found in await asyncio.gather(*tasks, future))
        assert await future is buffer

    in_a_loop(directory, use)


@pytest.mark.parametrize("direct", [True, False])
def test_cancelling_a_task_that_awaits_cancels_the_transfer(
    directory: pathlib.Path, direct: bool
) -> None:
    async def use(file: tensorferry.File) -> None:
        future = file.read_into(bytearray(30_000_000))

        async def wait() -> None:
            await future

        task = asyncio.create_task(future if direct else wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.CancelledError):
            await future
        assert future.cancelled()

    in_a_loop(directory, use)


def test_a_shielded_transfer_outlives_the_task_and_a_timeout_ends_one_that_is_not(
    directory: pathlib.Path,
) -> None:
    async def use(file: tensorferry.File) -> None:
        future = file.read_into(bytearray(30_000_000))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), 0.001)
        assert not future.cancelled()
        assert bytes(await future) == b"\7" * 30_000_000
        future = file.read_into(bytearray(30_000_000))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.001)
        while not future.done():
            await asyncio.sleep(0.001)
        assert future.cancelled()

    in_a_loop(directory, use)


def test_a_callback_may_submit_again_and_close_the_file(
    engine: str, directory: pathlib.Path
) -> None:
    ended = queue.Queue[Any]()
    file = tensorferry.open(directory / "file", "w+", engine=engine)
    buffer = bytearray(1_000_000)

    def read_back(written: tensorferry.Future[bytes]) -> None:
        file.read_into(buffer).add_done_callback(close)

    def close(_: object) -> None:
        file.close()
        ended.put(file.closed)

    file.write_from(b"\5" * 1_000_000).add_done_callback(read_back)
    assert ended.get(timeout=300)
    assert buffer == b"\5" * 1_000_000


@pytest.mark.usefixtures("default_engine")
def test_callbacks_may_move_other_arrays_wait_for_others_and_close_what_serves_them(
    directory: pathlib.Path, faultfs: FaultFS
) -> None:
    data, other = b"\5" * 3_000_001, bytearray(3_000_001)
    path, beside = faultfs.path / "file", directory / "beside"
    handle = tensorferry.aio_handle()
    done = queue.Queue[Any]()
    file = tensorferry.open(path, "w+")

    def deeds() -> Iterator[object]:
        yield tensorferry.write(beside, data, sync=True)
        yield tensorferry.read_many([(beside, other), (beside, bytearray(5), 7)])
        yield tensorferry.write_many([(beside, data, 7), (path, data)], truncate=True)
        yield handle.sync_pwrite(data, directory / "by handle")
        yield handle.async_pwrite(data, directory / "by handle", 5)
        yield last.result(), last.exception()
        yield handle.close()
        yield file.close()
        raise LookupError("and a failure")

    def callback(_: object) -> None:
        try:
            for deed in deeds():
                done.put(deed)
        finally:
            done.put("ended")

    faultfs.order(Fault("write", hold=True))  # both callbacks are there before it ends
    last = file.write_from(data, len(data))  # which the callback waits for
    first = file.write_from(data)
    first.add_done_callback(callback)
    first.add_done_callback(lambda _: done.put("the next"))
    faultfs.release()
    seen = [done.get(timeout=300) for _ in range(10)]
    assert seen[8:] == ["ended", "the next"]
    assert file.closed
    assert other == data
    assert path.read_bytes() == data
    assert (directory / "by handle").read_bytes() == b"\5" * (len(data) + 5)


def test_a_callback_that_ends_its_thread_takes_no_other_with_it(directory: pathlib.Path) -> None:
    after = threading.Event()
    with tensorferry.open(directory / "file", "w", **SLOWLY) as file:
        future = file.write_from(bytes(10_000_000))
        future.add_done_callback(lambda _: sys.exit(1))
        future.add_done_callback(lambda _: after.set())
        assert after.wait(120)


def test_a_handler_of_logging_that_raises_takes_no_callback_with_it(
    directory: pathlib.Path,
) -> None:
    class Raising(logging.Handler):
        def emit(self, _: object) -> None:
            raise RuntimeError("cannot log")

    after, handler = threading.Event(), Raising()
    logging.getLogger("tensorferry").addHandler(handler)
    try:
        with tensorferry.open(directory / "file", "w", **SLOWLY) as file:
            future = file.write_from(bytes(10_000_000))
            future.add_done_callback(lambda _: 1 / 0)
            future.add_done_callback(lambda _: after.set())
            assert after.wait(20)
    finally:
        logging.getLogger("tensorferry").removeHandler(handler)


def test_threads_that_ask_at_the_same_moment_get_the_same_failure(
    faultfs: FaultFS, failing: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tensorferry.errors.storage_error

    def make_slowly(*fault: Any) -> tensorferry.StorageError:
        time.sleep(0.1)  # gives the other threads time to arrive
        return make(*fault)

    monkeypatch.setattr(tensorferry.errors, "storage_error", make_slowly)
    with tensorferry.open(failing) as file, concurrent.futures.ThreadPoolExecutor(4) as pool:
        future = file.read_into(bytearray(100_000))
        asked = [pool.submit(future.exception) for _ in range(4)]
        faultfs.release()
        first, *others = (each.result() for each in asked)
    assert isinstance(first, tensorferry.StorageError)
    assert all(other is first for other in others)


def test_the_event_loop_stays_free_while_a_transfer_is_awaited(directory: pathlib.Path) -> None:
    data = bytes(20_000_000)
    turns = 0

    async def main() -> None:
        nonlocal turns
        with tensorferry.open(directory / "file", "w", **SLOWLY) as file:
            future = file.write_from(data)

            async def tick() -> None:
                nonlocal turns
                while not future.done():
                    turns += 1
                    await asyncio.sleep(0)

            await asyncio.gather(tick(), wait(future))

    async def wait(future: tensorferry.Future) -> None:
        await future

    asyncio.run(main())
    assert turns > 10


def test_a_failure_that_nobody_asks_about_is_warned_of(
    faultfs: FaultFS, failing: pathlib.Path
) -> None:
    def fail() -> None:
        with tensorferry.open(failing) as file:
            file.read_into(bytearray(100_000))
            faultfs.release()

    with pytest.warns(RuntimeWarning, match="never retrieved"):
        fail()


def test_a_warning_that_is_an_error_leaves_the_exception_in_flight(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    path = directory / "x.bin"
    path.write_bytes(bytes(4096))
    warnings.simplefilter("error", RuntimeWarning)

    def failed() -> Any:
        expected = tensorferry.Checksums(4096, expected=[1])
        future = tensorferry.open(path).read_into(bytearray(4096), checksums=expected)
        settled(future.done)
        return future

    for future in [failed()]:
        with pytest.raises(ZeroDivisionError):
            max(future, failed(), 1 / 0)
        del future
        with pytest.raises(KeyError):
            max(failed(), {}["x"])
    assert reported
    assert all(issubclass(each.exc_type, RuntimeWarning) for each in reported)


def test_throw_needs_an_exception(directory: pathlib.Path) -> None:
    path = directory / "x.bin"
    path.write_bytes(bytes(10))
    future: Any = tensorferry.open(path).read_into(bytearray(10))
    for wrong in [(), (None,), (3,), (int,), ("x",)]:
        with pytest.raises(TypeError, match="throw"):
            future.throw(*wrong)
    with pytest.raises(KeyError):
        future.throw(KeyError)


DAEMONS = """
import sys, threading, tensorferry

def work(started):
    for number in range(10**9):
        try:
            tensorferry.read_many([(sys.argv[1], bytearray(10), 5) for _ in range(300)])
            tensorferry.read(sys.argv[1] + "/not", bytearray(10))
        except Exception:
            started.set()

for _ in range(4):
    started = threading.Event()
    threading.Thread(target=work, args=[started], daemon=True).start()
    started.wait()
"""


def test_a_process_ends_with_daemon_threads_in_calls(directory: pathlib.Path) -> None:
    path = directory / "x.bin"
    path.write_bytes(bytes(4096))
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", DAEMONS, path], check=False, timeout=300)
        assert ended.returncode == 0


SLOW_IMPORTS = """
import builtins, sys, threading, time, tensorferry

file = tensorferry.open(sys.argv[1])
imported = builtins.__import__

def slow(*arguments, **options):
    time.sleep(0.05)  # another thread runs
    return imported(*arguments, **options)

builtins.__import__ = slow
threads = [threading.Thread(target=lambda: file.read_into(bytearray(9)).result()) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_begin_their_first_transfers_together(directory: pathlib.Path) -> None:
    path = directory / "x.bin"
    path.write_bytes(bytes(4096))
    subprocess.run([sys.executable, "-c", SLOW_IMPORTS, path], check=True, timeout=120)


def test_callbacks_run_before_the_interpreter_leaves(directory: pathlib.Path) -> None:
    program = f"""
import tensorferry
file = tensorferry.open({str(directory / "file")!r}, "w")
future = file.write_from(b"x" * 30_000_000)
future.add_done_callback(lambda future: print("called", future.exception()))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert run.stdout == "called None\n", run.stderr
    assert run.returncode == 0
    assert (directory / "file").stat().st_size == 30_000_000


def test_a_small_read_of_what_is_in_memory_is_done_when_it_has_begun(
    engine: str, tmpfs_directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    np = pytest.importorskip("numpy")
    data = random_bytes(1 << 20)
    (tmpfs_directory / "file").write_bytes(data.tobytes())
    with tensorferry.open(tmpfs_directory / "file", engine=engine) as file:
        for nbytes in (1, 320, 4096, 65_536):
            array = np.zeros(nbytes, np.uint8)
            future = file.read_into(array, 12_345)
            assert future.done()
            assert np.array_equal(future.result(), data[12_345 : 12_345 + nbytes])
        with pytest.raises(tensorferry.ShortReadError):
            file.read_into(np.zeros(4096, np.uint8), (1 << 20) - 4095)


def test_a_task_gets_what_was_given_also_where_that_is_a_tuple(directory: pathlib.Path) -> None:
    async def use(file: tensorferry.File) -> None:
        given = bytearray(70_000), bytearray(5)
        assert await file.read_into(given) is given
        assert await asyncio.create_task(file.read_into(given)) is given

    in_a_loop(directory, use)


def test_loops_of_several_threads_hear_of_their_own_transfers(directory: pathlib.Path) -> None:
    def run(index: int) -> None:
        async def use(file: tensorferry.File) -> None:
            for turn in range(40):
                buffer = bytearray(100_000)
                reading = file.read_into(buffer, 100_000 * (turn % 8))
                assert await asyncio.wait_for(reading, 60) is buffer
                assert buffer == b"\7" * 100_000

        (directory / str(index)).mkdir()
        in_a_loop(directory / str(index), use)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))


@pytest.mark.parametrize("nbytes", [4096, 3_000_000])
def test_a_future_that_its_array_refers_to_is_collected(
    engine: str, directory: pathlib.Path, nbytes: int
) -> None:
    np = pytest.importorskip("numpy")

    class Array(np.ndarray):  # type: ignore[misc, name-defined]  # which takes attributes
        future: tensorferry.Future

    (directory / "file").write_bytes(bytes(nbytes))
    with tensorferry.open(directory / "file", engine=engine) as file:
        array = np.zeros(nbytes, np.uint8).view(Array)
        array.future = file.read_into(array)
        array.future.result()
        gone = weakref.ref(array.future)
        file.read_into(bytearray(1)).result()  # releases what the core kept of the first
        del array
        gc.collect()
        assert gone() is None
