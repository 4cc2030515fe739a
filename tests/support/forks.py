"""Helpers for tests of forked children: work that ends the child, and a parent that waits with a timeout."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHILD_TIMEOUT_S = 120


@contextlib.contextmanager
def held_by_another_thread(lock: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Have another thread hold a lock: a child that is forked within can never get it."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def in_child(work: Callable[[], object]) -> None:
    """Do the work of a forked child, and leave it: with 0, or 1 if it raised."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def passes_in_child(work: Callable[[], object]) -> None:
    """Fork, and do the work in the child."""
    pid = os.fork()
    if pid == 0:
        in_child(work)
    assert_exits_with_zero(pid)


def assert_exits_with_zero(pid: int) -> None:
    """Wait for a child; end one that hangs."""
    deadline = time.monotonic() + CHILD_TIMEOUT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status}"
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hung")
