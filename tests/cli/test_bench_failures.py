"""Failures of `tensorferry bench`: the message, the exit code, and no files left."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.cli.running import BENCH, bench, ended
from tests.support import mounts, processes, required
from tests.support.child import ROOT
from tests.support.faultfs import Fault
from tests.support.leaks import settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.faultfs import FaultFS

SIZE = 3 << 20
INTERRUPTED = "tensorferry bench: interrupted; its files were removed and its processes ended"


def test_a_refused_engine_is_named_with_the_remedy(directory: Path) -> None:
    required.module("pyseccomp")
    prefix = [sys.executable, "-m", "tests.support.seccomp", "--block", "io_uring", "--"]
    done = ended(*prefix, *BENCH, directory, "--io-engine=io_uring", expect=2)
    assert "io_uring is not available" in done.stderr


def test_more_than_fits_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    with mounts.tmpfs(tmp_path / "small", 8 << 20) as directory:
        done = bench(directory, "--io-size=16M", expect=1)
        assert "only 0.01 GiB are free" in done.stderr
        assert list(directory.iterdir()) == []


def test_more_memory_than_there_is_is_refused(directory: Path) -> None:
    done = bench(directory, "--io-size=64T", expect=1)
    assert "of memory" in done.stderr or "are free" in done.stderr


@pytest.mark.parametrize("operation", ["--write", "--read"])
def test_a_full_disk_is_told_and_nothing_is_left(operation: str, tmp_path: Path) -> None:
    # The root and the scratch folder use both inodes of the file system, so making a file fails with ENOSPC.
    mount = mounts.mounted(tmp_path / "full", "-t", "tmpfs", "-o", "nr_inodes=2", "tmpfs")
    with mount as directory:
        done = bench(directory, f"--io-size={SIZE}", operation, expect=1)
        assert "No space left on device" in done.stderr
        assert list(directory.iterdir()) == []


def test_a_disk_that_fills_while_it_runs_is_told_and_nothing_is_left(faultfs: FaultFS) -> None:
    faultfs.order(Fault("write", error=errno.ENOSPC, skip=4))
    done = bench(faultfs.path, "--io-size=8M", "--write", "--multi-process=2", expect=1)
    assert "No space left on device" in done.stderr
    assert list(faultfs.path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with mounts.read_only(tmp_path / "source", tmp_path / "read-only") as read_only:
        for options in ([], ["--keep-files"]):
            done = bench(read_only, f"--io-size={SIZE}", *options, expect=1)
            assert "Read-only file system" in done.stderr


def test_an_error_of_the_drive_is_told_with_its_place(faultfs: FaultFS) -> None:
    faultfs.order(Fault("read", error=errno.EIO, start=2 << 20))
    done = bench(faultfs.path, "--io-size=4M", "--read", expect=1)
    assert "Input/output error" in done.stderr
    assert f"_aio_read_{4 << 20}.pt.0_0" in done.stderr
    assert list(faultfs.path.iterdir()) == []


@contextlib.contextmanager
def started(directory: Path, *arguments: str, files: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Start a bench that would never end, and wait until it has so many files: with two its processes transfer."""
    process = subprocess.Popen(
        [*BENCH, directory, "--io-size=4M", "--loops=1000000", "--multi-process=2", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert settled(lambda: any(directory.iterdir()) and files_below(directory) >= files)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def files_below(directory: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(path.is_file() for path in directory.rglob("*"))
    return 0


def assert_ends(process: subprocess.Popen[str], directory: Path, code: int, said: str) -> None:
    """Check how a bench ends, and that it leaves no files and no processes."""
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    assert said in errors
    assert len(errors.splitlines()) == 1
    assert list(directory.iterdir()) == []
    assert settled(lambda: not processes.of_session(process.pid))


@pytest.mark.parametrize("keep", [[], ["--keep-files"]])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("whole_group", [True, False])
def test_an_interrupted_bench_leaves_no_files_and_no_processes(
    keep: list[str], number: signal.Signals, whole_group: bool, directory: Path
) -> None:
    with started(directory, *keep) as process:
        (os.killpg if whole_group else os.kill)(process.pid, number)
        assert_ends(process, directory, 130, INTERRUPTED)


@pytest.mark.parametrize("delay_s", [0, 0.05, 0.1, 0.2, 0.3, 0.4])
def test_an_interrupt_while_processes_start_leaves_nothing(delay_s: float, directory: Path) -> None:
    with started(directory, files=0) as process:
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGTERM)  # a repeated signal has no effect
        assert_ends(process, directory, 130, INTERRUPTED)


# Repeated signals at the end of the interpreter: during atexit's functions, and while it clears modules.
IMPATIENT = """
import atexit, os, signal

class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)

last = Last()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
from tensorferry.cli.exit_codes import reporting_failures
with reporting_failures("this"):
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupted_command_that_ends_is_not_stopped_by_a_second_signal() -> None:
    done = ended(sys.executable, "-c", IMPATIENT, expect=130)
    assert done.stderr == "this: interrupted; its files were removed and its processes ended\n"


def test_processes_whose_bench_was_killed_clean_up_and_leave(directory: Path) -> None:
    with started(directory) as process:
        process.kill()
        process.wait()
        assert settled(lambda: not processes.of_session(process.pid))
        assert list(directory.iterdir()) == []
