"""Measures the resources of a process: descriptors, locked and resident memory, threads, Python objects."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tensorferry.transfer import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

# Only a failing test waits for so long. Abandoned reads end when a busy drive has served them.
SETTLE_TIMEOUT_S = 300.0
STEADY_TIMEOUT_S = 5.0

# The threads engine starts its threads as blocks wait for one, up to this many: how many run after a warm-up is
# chance. A leak of one thread each time is still detected, because these tests repeat an action hundreds of times.
MAX_ENGINE_THREADS = 32


@dataclass(frozen=True)
class Holdings:
    """The resources of this process at one moment."""

    descriptors: int
    locked_nbytes: int  # mlock, and pages registered with io_uring
    resident_nbytes: int
    threads: int
    objects: int

    @staticmethod
    def now() -> Holdings:
        """Count, after collecting garbage and releasing the resources of ended transfers."""
        gc.collect()
        for scheduler in list(runtime._schedulers):
            scheduler.reap()
        status = _status()
        return Holdings(
            descriptors=count_descriptors(),
            locked_nbytes=status["VmLck"] + status["VmPin"],
            resident_nbytes=status["VmRSS"],
            threads=len(list(pathlib.Path("/proc/self/task").iterdir())),
            objects=sys.getallocatedblocks(),
        )


def threads_named(pattern: str) -> set[pathlib.Path]:
    """Return the threads of this process with full names that match a regular expression.

    The set is more exact than a number, because some threads of earlier tests may be ending.
    """
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if re.fullmatch(pattern, (task / "comm").read_text().strip()):
                found.add(task)
    return found


def steady(count: Callable[[], T]) -> T:
    """Return the result of count() once it is stable: new threads have the names of their parents at first."""
    last, since = count(), time.monotonic()
    deadline = since + STEADY_TIMEOUT_S
    while time.monotonic() < min(since + 0.3, deadline):
        time.sleep(0.01)
        if (now := count()) != last:
            last, since = now, time.monotonic()
    return last


def count_descriptors() -> int:
    """Return how many descriptors this process has open, that of the counting aside."""
    return len(list(pathlib.Path("/proc/self/fd").iterdir())) - 1


def descriptors(process: int | str = "self") -> list[str]:
    """Return the targets of the open descriptors of a process, by default this one."""
    targets = []
    for link in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(link.readlink()))
    return sorted(targets)


@contextlib.contextmanager
def nothing_leaks(
    *, resident_slack_nbytes: int = 8 << 20, objects_slack: int = 500
) -> Iterator[None]:
    """Fail if the process holds more at the end of the block than at its beginning.

    Warm up before: pools, threads and caches that grow only once are not leaks.
    """
    targets = descriptors()
    before = Holdings.now()
    yield
    settled(lambda: _excess(before, resident_slack_nbytes, objects_slack) == "")
    excess = _excess(before, resident_slack_nbytes, objects_slack)
    assert not excess, f"leaked {excess}; descriptors before {targets}, after {descriptors()}"


def _excess(before: Holdings, resident_slack_nbytes: int, objects_slack: int) -> str:
    after = Holdings.now()
    slack = Holdings(0, 0, resident_slack_nbytes, MAX_ENGINE_THREADS, objects_slack)
    grown = []
    for name, allowed in vars(slack).items():
        growth = getattr(after, name) - getattr(before, name)
        if growth > allowed:
            grown.append(f"{growth} {name}")
    return ", ".join(grown)


def settled(done: Callable[[], bool], timeout_s: float = SETTLE_TIMEOUT_S) -> bool:
    """Return whether done() becomes true in time, because ending threads and the kernel need a moment."""
    deadline = time.monotonic() + timeout_s
    while not (true := done()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


def _status() -> dict[str, int]:
    values = {}
    with open("/proc/self/status") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name.startswith("Vm"):
                values[name] = int(value.split()[0]) * 1024
    return values
