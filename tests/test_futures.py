"""Futures: waiting, timing out, callbacks and await."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

import tensorferry

if TYPE_CHECKING:
    import pathlib


def test_results(engine: str, directory: pathlib.Path) -> None:
    data = os.urandom(3_000_001)
    with tensorferry.open(directory / "file", "w+", engine=engine) as file:
        written = file.write_from(data, 5, sync=True)
        assert written.result() is data
        assert written.done()
        assert written.exception() is None
        buffer = bytearray(len(data))
        assert file.read_into(buffer, 5).result(60) is buffer
        assert buffer == data


def test_a_failure_is_the_result(engine: str, directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(50_000_000))
    os.sync()
    with tensorferry.open(path, engine=engine, block_size=4096, queue_depth=1, direct=True) as file:
        futures = [file.read_into(bytearray(50_000_000)) for _ in range(2)]
        os.truncate(path, 1_000_000)
        failures = [future.exception() for future in futures]
        assert isinstance(failures[1], tensorferry.ShortReadError)
        assert failures[1] is futures[1].exception()
        with pytest.raises(tensorferry.ShortReadError):
            futures[1].result()
        assert futures[1].done()


def test_waiting_may_time_out_and_be_taken_up_again(engine: str, directory: pathlib.Path) -> None:
    data = os.urandom(30_000_000)
    with tensorferry.open(
        directory / "file", "w", engine=engine, block_size=4096, queue_depth=1
    ) as file:
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
        futures = [file.write_from(os.urandom(100_000), 100_000 * index) for index in range(50)]
        everything = threading.Semaphore(0)

        def note(future: tensorferry.Future) -> None:
            assert future.done()
            called.append(future)
            everything.release()

        for future in futures:
            future.add_done_callback(note)
        for _ in futures:
            assert everything.acquire(timeout=60)
        futures[0].add_done_callback(note)  # done: called at once, here
    assert len(called) == 51
    assert set(map(id, called)) == set(map(id, futures))


def test_an_exception_in_a_callback_is_logged_and_harms_nobody(
    directory: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    after = threading.Event()
    with tensorferry.open(directory / "file", "w") as file:
        future = file.write_from(os.urandom(20_000_000))
        future.add_done_callback(lambda _: 1 / 0)
        future.add_done_callback(lambda _: after.set())
        assert after.wait(60)
    assert "ZeroDivisionError" in caplog.text


def test_await(engine: str, directory: pathlib.Path) -> None:
    data = [os.urandom(1_000_000 + index) for index in range(8)]
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

    for _ in range(2):  # a second loop has its own listener
        asyncio.run(main())


def test_awaiting_a_failure_raises_it(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(20_000_000))

    async def main() -> None:
        with tensorferry.open(path, block_size=4096, queue_depth=1, direct=True) as file:
            file.read_into(bytearray(20_000_000)).add_done_callback(
                lambda future: future.exception()
            )
            future = file.read_into(bytearray(20_000_000))
            os.truncate(path, 5)
            with pytest.raises(tensorferry.ShortReadError):
                await future

    asyncio.run(main())


def test_cancelling_the_task_that_awaits_leaves_the_transfer_alone(directory: pathlib.Path) -> None:
    data = os.urandom(30_000_000)

    async def main() -> None:
        with tensorferry.open(directory / "file", "w", block_size=4096, queue_depth=1) as file:
            future = file.write_from(data)

            async def wait() -> None:
                await future

            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await future is data

    asyncio.run(main())
    assert (directory / "file").read_bytes() == data


def test_the_event_loop_stays_free_while_a_transfer_is_awaited(directory: pathlib.Path) -> None:
    data = os.urandom(20_000_000)
    turns = 0

    async def main() -> None:
        nonlocal turns
        with tensorferry.open(directory / "file", "w", block_size=4096, queue_depth=1) as file:
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


def test_a_failure_that_nobody_asks_about_is_warned_of(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(20_000_000))
    with tensorferry.open(path, block_size=4096, queue_depth=1, direct=True) as file:
        first = file.read_into(bytearray(20_000_000))
        file.read_into(bytearray(20_000_000))
        os.truncate(path, 5)
        first.exception()
        with pytest.warns(RuntimeWarning, match="nobody asked"):
            file.close()


def test_callbacks_run_before_the_interpreter_leaves(directory: pathlib.Path) -> None:
    program = f"""
import tensorferry
file = tensorferry.open({str(directory / "file")!r}, "w")
future = file.write_from(b"x" * 30_000_000)
future.add_done_callback(lambda future: print("called", future.exception()))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "called None\n", run.stderr
    assert run.returncode == 0
    assert (directory / "file").stat().st_size == 30_000_000
