"""Leaving the interpreter while daemon threads wait for the drive: no hang, no crash, nothing lost."""

from __future__ import annotations

import pathlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import tensorferry
from tensorferry.transfer import runtime
from tests.support import child
from tests.support.expect import assert_equal, contents
from tests.support.faultfs import Fault
from tests.support.leaks import settled

if TYPE_CHECKING:
    from tests.support.faultfs import FaultFS

NBYTES = 3_000_001
WRITERS = [
    "write",
    "write_many",
    "sync_pwrite",
    "wait",
    "result",
    "callback",
    "file.close",
    "close",
]


def leave(engine: str, directory: str) -> None:
    """Start daemon threads that wait in calls of all kinds, and return when the writes have begun."""
    global kept
    path = pathlib.Path(directory)
    data = np.full(NBYTES, 7, np.uint8)
    handles = [tensorferry.aio_handle(engine=engine) for _ in range(3)]
    handles[1].async_pwrite(data, path / "wait")
    handles[2].async_pwrite(data, path / "close")
    files = {
        name: tensorferry.open(path / name, "w", engine=engine)
        for name in ("result", "callback", "file.close")
    }
    futures = {name: file.write_from(data) for name, file in files.items()}
    target = np.zeros(NBYTES, np.uint8)
    calls: list[Any] = [
        lambda: tensorferry.write(path / "write", data),
        lambda: tensorferry.write_many([(path / "write_many", data)], sync=True),
        lambda: handles[0].sync_pwrite(data, path / "sync_pwrite"),
        handles[1].wait,
        futures["result"].result,
        lambda: futures["callback"].add_done_callback(lambda _: time.sleep(0.1)),
        files["file.close"].close,
        handles[2].close,
        lambda: tensorferry.read(path / "old", target),
        lambda: tensorferry.read_many([(path / "old", target)]),
        lambda: tensorferry.aio_handle(engine=engine).read(target, path / "old"),
    ]
    begun = threading.Barrier(len(calls) + 1)

    def run(call: Any) -> None:
        begun.wait(120)
        call()

    for call in calls:
        threading.Thread(target=run, args=(call,), daemon=True).start()
    kept = handles, files, futures
    begun.wait(120)
    of_all = runtime.default_scheduler().stats
    assert settled(lambda: of_all()["requests"] == 4 and handles[0].stats()["requests"] == 1)
    assert settled(lambda: all((path / name).exists() for name in WRITERS))


kept: Any = None


def test_daemon_threads_in_calls_neither_hang_nor_crash_the_end_of_the_interpreter(
    engine: str, faultfs: FaultFS
) -> None:
    np.zeros(NBYTES, np.uint8).tofile(faultfs.backing / "old")
    faultfs.order(Fault("read", delay_s=1.0), Fault("write", delay_s=1.0))
    child.call(
        f"{__name__}:leave",
        environment={"TENSORFERRY_ENGINE": engine},
        engine=engine,
        directory=faultfs.path,
    )
    for name in WRITERS:
        assert_equal(contents(faultfs.backing / name), np.full(NBYTES, 7, np.uint8))
