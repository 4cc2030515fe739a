"""Processes that are stopped and continued, that start other programs, that run on older kernels."""

from __future__ import annotations

import errno
import importlib.util
import os
import pathlib
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer import runtime
from tests.support import child, required
from tests.support.engines import one_engine
from tests.support.expect import assert_equal, assert_works, contents
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.faultfs import FaultFS

NBYTES = 3_000_001


def test_no_descriptor_of_ours_is_inherited_by_programs_that_are_started(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    def inherited() -> set[str]:
        listing = subprocess.run(
            ["readlink", *(f"/proc/self/fd/{number}" for number in range(3, 300))],
            close_fds=False,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        return set(listing.stdout.split())

    data = random_bytes(NBYTES)
    data.tofile(faultfs.backing / "old")
    before = inherited()
    handle = make_handle()
    called = threading.Event()
    with tensorferry.open(faultfs.path / "file", "w", engine=handle.engine) as file:
        faultfs.order(Fault("write", hold=True), Fault("read", hold=True))
        handle.async_pwrite(data, faultfs.path / "new")
        handle.async_pread(np.zeros_like(data), faultfs.path / "old")
        file.write_from(data).add_done_callback(lambda _: called.set())
        faultfs.await_held()
        during = inherited()
        faultfs.clear()
        assert handle.wait() == 2
    assert during <= before
    assert called.wait(120)


PATIENCE_S = 12.0


def close_what_is_stuck(product: str, directory: str) -> None:
    """Close during a held write, with a short timeout; the parent stops this process during the close."""
    runtime.CLOSE_PATIENCE_SECONDS = PATIENCE_S
    path = pathlib.Path(directory)
    data = np.full(NBYTES, 3, np.uint8)
    opened: Any
    if product == "file":
        opened = tensorferry.open(path / "data", "w")
        opened.write_from(data)
    else:
        opened = tensorferry.aio_handle()
        opened.async_pwrite(data, path / "data")
    (path / "closing").write_text(f"{os.getpid()} ")
    if product != "dropped handle":
        opened.close()
    del opened
    assert_equal(contents(path / "data"), data)


@pytest.mark.parametrize("product", ["file", "handle", "dropped handle"])
def test_a_process_that_is_stopped_for_long_while_it_closes_loses_nothing(
    faultfs: FaultFS, product: str
) -> None:
    faultfs.order(Fault("write", hold=True, name="data"))

    def stop_and_go_on() -> None:
        while not (name := faultfs.backing / "closing").exists() or not name.read_text():
            time.sleep(0.005)
        faultfs.await_held()
        time.sleep(0.1)
        os.kill(int(name.read_text()), signal.SIGSTOP)
        time.sleep(PATIENCE_S + 1)
        os.kill(int(name.read_text()), signal.SIGCONT)
        time.sleep(0.1)
        faultfs.release()

    stopper = threading.Thread(target=stop_and_go_on, daemon=True)
    stopper.start()
    program = f"{__name__}:close_what_is_stuck"
    ended = child.call(program, product=product, directory=faultfs.path)
    stopper.join()
    assert "abandoned" not in ended.output


def use_an_older_kernel(engine: str, directory: str, calls: list[str]) -> list[str]:
    """Write and read at odd offsets while the kernel lacks some system calls; return its answers to them."""
    import ctypes

    import pyseccomp

    numbers = {"statx": 332 if os.uname().machine == "x86_64" else 291, "cachestat": 451}
    blocked = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for call in calls:
        blocked.add_rule(pyseccomp.ERRNO(errno.ENOSYS), numbers[call])
    blocked.load()
    libc = ctypes.CDLL(None, use_errno=True)
    said = []
    for call in calls:
        libc.syscall(numbers[call], -1, None, None, 0)
        said.append(errno.errorcode[ctypes.get_errno()])
    handle = tensorferry.aio_handle(engine=engine)
    assert_works(handle, pathlib.Path(directory))
    path = pathlib.Path(directory) / "file"
    random = np.random.default_rng(len(calls))
    model = np.frombuffer(random.bytes(NBYTES), np.uint8).copy()
    handle.sync_pwrite(model, path)
    for offset, nbytes in ((0, 4096), (1, 100_003), (4095, 2_000_000), (70_001, 1 << 20)):
        new = np.frombuffer(random.bytes(nbytes), np.uint8)
        handle.async_pwrite(new, path, offset)
        handle.wait()
        model[offset : offset + nbytes] = new
        for direct in ("auto", True, False):
            found = np.zeros(nbytes + 5, np.uint8)
            tensorferry.read(path, found, offset, direct=direct)  # type: ignore[arg-type]
            assert_equal(found, model[offset : offset + nbytes + 5])
    before = handle.stats()
    handle.sync_pread(np.zeros(NBYTES, np.uint8), path)
    after = handle.stats()
    # The child cannot query the page cache, so all reads are direct or bounced.
    assert sum(after[way] - before[way] for way in ("direct_nbytes", "bounced_nbytes")) > 2_900_000
    return said


def test_kernels_without_statx_or_cachestat_serve_as_well(
    engine: str, directory: pathlib.Path
) -> None:
    required.module("pyseccomp")
    for calls in (["cachestat"], ["statx", "cachestat"]):
        ended = child.call(
            f"{__name__}:use_an_older_kernel",
            environment={"TENSORFERRY_ENGINE": engine},
            engine=engine,
            directory=directory,
            calls=calls,
        )
        assert ended.result == ["ENOSYS"] * len(calls)


def test_leaving_the_interpreter_has_one_patience_for_all_that_hangs(
    engine: str, faultfs: FaultFS, directory: pathlib.Path
) -> None:
    (faultfs.backing / "file").write_bytes(bytes(1 << 20))
    faultfs.order(Fault("read", hold=True))
    program = "tests.transfers.programs:leave_with_hung_reads"
    path = faultfs.path / "file"
    # One after the other, the reads would take longer than the timeout.
    arguments = {"engine": engine, "path": path, "over": directory / "over"}
    with faultfs.released_by(directory / "over"):
        ended = child.call(program, timeout_s=120, count=14, patience_seconds=10, **arguments)
    said = ended.output
    assert "abandoned" in said


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@one_engine
def test_an_import_in_a_sub_interpreter_is_refused_and_breaks_nothing(
    engine: str, directory: pathlib.Path, first: bool
) -> None:
    if importlib.util.find_spec("_interpreters") is None:
        pytest.importorskip("_xxsubinterpreters")
    program = "tests.transfers.programs:import_in_another_interpreter"
    said = child.call(program, engine=engine, directory=directory, first=first).result
    assert "sub-interpreter" in said
    assert (directory / "pending").stat().st_size == 3_000_001
