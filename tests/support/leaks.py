"""What a process holds: descriptors, locked and resident memory, threads, Python objects."""

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

# Only what fails waits for so long. Reads that were given up end when a busy drive has come to them.
SETTLE_TIMEOUT_S = 300.0
STEADY_TIMEOUT_S = 5.0

# The threads engine starts its threads as blocks wait for one, up to this many: how many run after a warm-up is
# chance. What leaks a thread each time shows over the hundreds of repetitions that these tests make.
MAX_ENGINE_THREADS = 32


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment."""

    descriptors: int
    locked_nbytes: int  # mlock, and pages registered with io_uring
    resident_nbytes: int
    threads: int
    objects: int

    @staticmethod
    def now() -> Holdings:
        """Count, after collecting garbage, and what transfers that have ended would give back at the next call."""
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
    """Return those threads of this process whose whole names a regular expression fits.

    Their number tells less: of those that earlier tests have left, some may be ending.
    """
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if re.fullmatch(pattern, (task / "comm").read_text().strip()):
                found.add(task)
    return found


def steady(count: Callable[[], T]) -> T:
    """Return what count() gives for a while: threads that have just begun bear the names of their makers."""
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


def descriptors() -> list[str]:
    """Return what the open descriptors of this process lead to."""
    targets = []
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(link.readlink()))
    return sorted(targets)


@contextlib.contextmanager
def nothing_leaks(
    *, resident_slack_nbytes: int = 8 << 20, objects_slack: int = 500
) -> Iterator[None]:
    """Fail if the process holds more at the end of the block than at its beginning.

    Warm up before: pools, threads and caches that grow once and then stay are no leaks.
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
    """Return whether done() comes true: threads that are ending, and the kernel, take a moment."""
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
