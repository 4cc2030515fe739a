"""Makes calls of libc slow, held, or failing in a child process, and logs the threads that make them.

`slow_calls.cpp` is preloaded into the child. Rules and log are in a file that both processes map, so rules may change
while the program runs: the test makes them, or the program by `attached()`. io_uring's submissions do not go through
libc; use the file system of `faultfs.py` for slow I/O of that engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = pathlib.Path(__file__).with_suffix(".cpp")
BUILD = ROOT / "build" / "slow-calls"
FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
FLAGS += ["-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"]
VARIABLE = "TENSORFERRY_SLOW_CALLS"

CALLS = ["", "open", "open_directory", "close", "fallocate", "ftruncate", "pread", "pwrite"]
CALLS += ["preadv2", "preadv2_nowait", "pwritev2", "fdatasync", "fsync", "syncfs", "statx"]
CALLS += ["io_submit", "sleep", "pthread_create"]
SYNCS = ("fdatasync", "fsync", "syncfs")
SEEN_MAX = 1 << 16


@dataclass(frozen=True)
class Rule:
    """A rule for one kind of call on files with `where` in their path.

    The parts add up: a call waits for `delay_s`, then (`hold`) for `SlowCalls.release`, then fails with `error`. With
    `after` the call is made before it fails, otherwise it is not made. The first `skip` calls pass, then `times` calls
    are affected (-1: all). The first matching rule applies.
    """

    call: str
    where: str = ""
    error: int = 0
    after: bool = False
    delay_s: float = 0.0
    hold: bool = False
    skip: int = 0
    times: int = -1


@dataclass(frozen=True)
class Seen:
    """One call on a file that is watched."""

    call: str
    thread: int
    thread_name: str
    path: str


class _Rule(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("after", ctypes.c_int32),
        ("hold", ctypes.c_int32),
        ("skip", ctypes.c_int32),
        ("times", ctypes.c_int32),
        ("hits", ctypes.c_uint32),
        ("held", ctypes.c_uint32),
        ("delay_microseconds", ctypes.c_int64),
        ("where", ctypes.c_char * 88),
    ]


class _Seen(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.c_uint32),
        ("thread", ctypes.c_int32),
        ("name", ctypes.c_char * 16),
        ("path", ctypes.c_char * 104),
    ]


class _Control(ctypes.Structure):
    _fields_ = [
        ("seen_count", ctypes.c_uint32),
        ("watched", ctypes.c_char * 124),
        ("rules", _Rule * 16),
        ("seen", _Seen * SEEN_MAX),
    ]


class SlowCalls:
    """The rules and the log of one child, seen from either side."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        with path.open("a+b") as file:
            file.truncate(ctypes.sizeof(_Control))
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(_Control))
        self._control = _Control.from_buffer(self._memory)

    def environment(self) -> dict[str, str]:
        """Return the variables that make a child obey."""
        return {"LD_PRELOAD": str(build()), VARIABLE: str(self.path)}

    def order(self, *rules: Rule) -> None:
        """Replace all rules, and release the held calls."""
        for slot in self._control.rules:
            slot.call = slot.hold = 0
        while any(slot.held for slot in self._control.rules):
            time.sleep(0.001)
        for slot, rule in zip(self._control.rules, rules, strict=False):
            where = os.fsencode(rule.where)
            assert len(where) < _Rule.where.size, f"too long: {rule.where}"
            slot.where, slot.error, slot.after = where, rule.error, rule.after
            slot.hold, slot.skip, slot.times, slot.hits = rule.hold, rule.skip, rule.times, 0
            slot.delay_microseconds = int(rule.delay_s * 1e6)
            slot.call = CALLS.index(rule.call)

    def clear(self) -> None:
        """No rules from now on."""
        self.order()

    def release(self) -> None:
        """Release the calls that are held, and hold no later ones."""
        for slot in self._control.rules:
            slot.hold = 0

    def await_held(self, count: int = 1, timeout_s: float = 120.0) -> None:
        """Return when at least `count` calls are held."""
        deadline = time.monotonic() + timeout_s
        while self.held() < count:
            assert time.monotonic() < deadline, f"{self.held()} calls held, not {count}"
            time.sleep(0.001)

    def held(self) -> int:
        """Return how many calls are held now."""
        return sum(slot.held for slot in self._control.rules)

    def hits(self) -> int:
        """Return how often the rules ordered last have struck."""
        return sum(slot.hits for slot in self._control.rules if slot.call)

    def watch(self, where: str | os.PathLike[str]) -> None:
        """Begin a new log of the calls on files with `where` in their path, and of all sleeps."""
        self._control.watched = b""
        self._control.seen_count = 0
        ctypes.memset(self._control.seen, 0, ctypes.sizeof(self._control.seen))
        self._control.watched = os.fsencode(where)

    def seen(self, *calls: str) -> list[Seen]:
        """Return the calls since `watch`; no rule or argument ends the watching."""
        count = self._control.seen_count
        assert count <= SEEN_MAX, f"{count} calls are more than the log holds"
        entries = [
            Seen(CALLS[e.call], e.thread, os.fsdecode(e.name), os.fsdecode(e.path))
            for e in self._control.seen[:count]
        ]
        return [entry for entry in entries if not calls or entry.call in calls]

    def count(self, calls: Iterable[str] = SYNCS) -> Counter[str]:
        """Return how often each of some calls was made since `watch`."""
        return Counter(seen.call for seen in self.seen(*calls))


def attached() -> SlowCalls:
    """Return the rules and the log of this process."""
    return SlowCalls(pathlib.Path(os.environ[VARIABLE]))


def why_unavailable() -> str | None:
    """Return why the library cannot be built here, or None."""
    return None if _compiler() else "a C++ compiler is missing"


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


@functools.cache
def build(source: pathlib.Path = SOURCE) -> pathlib.Path:
    """Compile a library unless the same source has been compiled; several processes may do so at the same time."""
    compiler = _compiler()
    assert compiler, "a C++ compiler is missing"
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode() + source.read_bytes()).hexdigest()
    library = BUILD / f"{source.stem}-{digest[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            unfinished = pathlib.Path(folder) / library.name
            command = [*compiler.split(), *FLAGS, str(source), "-o", str(unfinished), "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr}"
            with contextlib.suppress(FileNotFoundError):
                unfinished.replace(library)
    return library
