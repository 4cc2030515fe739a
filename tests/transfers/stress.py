"""The program of test_random_meetings.py, for a separate process: threads that use and close each other's handles.

Only one thread writes each file, and it has a model of the expected bytes. The threads use handles and files that other
threads close and drop at any moment. They cancel and fork, and the main thread is interrupted. An operation that
reports success has written or read every byte, and a refused operation has changed none. A cancelled or interrupted
operation has written only its own bytes, and the file does not change after it has ended.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import faulthandler
import os
import pathlib
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

import tensorferry
from tests.support.expect import assert_equal
from tests.support.leaks import Holdings, nothing_leaks, settled

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 8
FILE_NBYTES = 6 << 20
HANG_S = 240.0
FORKS_APART_S = 0.4
M_MMAP_THRESHOLD = -3
CANCELLED: tuple[type[BaseException], ...] = (concurrent.futures.CancelledError,)


class Interrupts:
    """SIGINT for the main thread: raised while it is armed, otherwise ignored."""

    def __init__(self) -> None:
        self._armed = False
        self.raised = 0
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self.raised += 1
            raise KeyboardInterrupt

    def during(self, action: Callable[[], object]) -> bool:
        """Return whether the action ended before it was interrupted."""
        try:
            self._armed = True
            action()
            self._armed = False
        except KeyboardInterrupt:
            return False
        finally:
            self._armed = False
        return True


class Slot:
    """A handle or file that any thread may close; its owner may wait until that is done."""

    def __init__(self, opened: Any) -> None:
        self.opened = opened
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def close(self) -> None:
        """Close, and notify the owner at the end."""
        with self._lock:  # a second close may return before the first has ended
            self.opened.close()
        self._closed.set()

    def await_close(self) -> None:
        """Return when another's close has ended."""
        assert self._closed.wait(HANG_S), "a close hung"


class Refused(Exception):  # noqa: N818
    """The handle or file was closed, so the operation did not begin."""


class Meetings:
    """The state that the threads share."""

    def __init__(self, directory: pathlib.Path, engines: list[str], seed: int) -> None:
        self.directory = directory
        self.engines = engines
        self.seed = seed
        self.over = threading.Event()
        self.failures: list[str] = []
        self.counts: dict[str, int] = {}
        self.handles: list[Slot] = []  # for blocking calls of all threads
        # For asynchronous calls; each handle belongs to one thread, because wait() waits for all calls of a handle.
        self.queues: list[Slot] = []
        self.files: list[Slot] = []
        self.arrays: list[weakref.ref[Any]] = []
        self.fork_lock = threading.Lock()
        self.last_fork = 0.0
        self.interrupts = Interrupts()

    def count(self, name: str) -> None:
        # A race between threads may lose a count, which does not matter.
        self.counts[name] = self.counts.get(name, 0) + 1

    def run(self, seconds: float) -> None:
        """Run the threads for so long; raise the first failure."""
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, from 3.12 on
        actors = [Actor(self, number) for number in range(THREADS)]
        self.handles = [Slot(actor.new_handle()) for actor in actors]
        self.queues = [Slot(actor.new_handle()) for actor in actors]
        self.files = [Slot(actor.new_file()) for actor in actors]
        threads = [
            threading.Thread(target=self._run, args=[actor], daemon=True) for actor in actors[1:]
        ]
        threads.append(threading.Thread(target=self._interrupt, daemon=True))
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.start()
        try:
            while time.monotonic() < deadline and not self.failures:
                actors[0].act(self.interrupts)
        except BaseException:
            self.failures.append(traceback.format_exc())
        self.over.set()
        give_up = time.monotonic() + HANG_S
        for thread in threads:
            thread.join(max(give_up - time.monotonic(), 0))
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(all_threads=True)
            self.failures.append("a thread hung")
        if self.failures:
            raise AssertionError(self.failures[0])
        for slot in (*self.handles, *self.queues, *self.files):
            slot.close()
        for actor in actors:
            actor.compare()
            self.arrays += actor.arrays

    def _run(self, actor: Actor) -> None:
        try:
            while not self.over.is_set():
                actor.act(None)
        except BaseException:
            self.failures.append(traceback.format_exc())
            self.over.set()

    def _interrupt(self) -> None:
        moments = random.Random(self.seed)
        while not self.over.wait(moments.expovariate(100)):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class Actor:
    """One thread, its file, and the expected contents."""

    def __init__(self, meetings: Meetings, number: int) -> None:
        self.meetings = meetings
        self.number = number
        self.random = random.Random(meetings.seed * 1000 + number)
        self.bytes = np.random.default_rng([meetings.seed, number])
        self.path = meetings.directory / f"file{number}"
        self.path.write_bytes(b"")
        self.model = np.zeros(FILE_NBYTES, np.uint8)
        self.known_nbytes = 0
        self.arrays: list[weakref.ref[Any]] = []

    def new_handle(self) -> tensorferry.aio_handle:
        return tensorferry.aio_handle(
            block_size=self.random.choice([64 << 10, 1 << 20]),
            queue_depth=self.random.choice([1, 8, 64]),
            intra_op_parallelism=self.random.choice([1, 1, 2]),
            engine=self.random.choice(self.meetings.engines),
        )

    def new_file(self) -> tensorferry.File:
        engine = self.random.choice([None, *self.meetings.engines])
        return tensorferry.open(self.path, "r+", engine=engine)

    def act(self, interrupts: Interrupts | None) -> None:
        """Do something."""
        kinds: list[tuple[int, Callable[[], None]]] = [
            (20, lambda: self.write(interrupts)),
            (12, lambda: self.read(interrupts)),
            (6, self.cancel),
            (4, self.write_and_drop),
            (4, self.close_anothers),
            (2, self.close_own),
            (1, self.fork),
        ]
        weights = [weight for weight, _ in kinds]
        action = self.random.choices([action for _, action in kinds], weights)[0]
        action()

    # Transfers

    def piece(self) -> tuple[Any, int]:
        """Return new bytes, and their offset in the file."""
        nbytes = self.random.choice([1, 4096, 5_003, 70_001, 1 << 20, 1_100_003, 3 << 20])
        offset = self.random.randrange(0, FILE_NBYTES - nbytes + 1)
        if self.random.random() < 0.5:
            offset &= -4096
        data = self.bytes.integers(0, 256, nbytes, np.uint8)
        self._watch(data)
        return data, offset

    def _watch(self, array: Any) -> None:
        if len(self.arrays) > 500:
            self.arrays = [watched for watched in self.arrays if watched() is not None]
        self.arrays.append(weakref.ref(array))

    def write(self, interrupts: Interrupts | None) -> None:
        """Write in some way."""
        data, offset = self.piece()
        ways = [self._sync, self._async, self._file, self._future, self._function, self._many]
        way = self.random.choice(ways)
        self._attempt(lambda: way(True, data, offset), interrupts, data, offset)

    def read(self, interrupts: Interrupts | None) -> None:
        """Read in some way, and compare."""
        if not self.known_nbytes:
            return
        offset = self.random.randrange(self.known_nbytes)
        nbytes = min(self.random.choice([1, 5_003, 70_001, 3 << 20]), self.known_nbytes - offset)
        target = np.zeros(nbytes, np.uint8)
        self._watch(target)
        ways = [self._sync, self._async, self._file, self._future, self._function, self._many]
        way = self.random.choice(ways)
        try:
            if interrupts is None:
                way(False, target, offset)
            elif not interrupts.during(lambda: way(False, target, offset)):
                self.meetings.count("reads interrupted")
                return
        except Refused:
            return
        self._assert_equal(way.__name__, target, self.model[offset : offset + nbytes])
        self.meetings.count("reads")

    def _assert_equal(self, what: str, found: Any, wanted: Any) -> None:
        try:
            assert_equal(found, wanted)
        except AssertionError as error:
            untouched = "; nothing but zeros was found" if not found.any() else ""
            raise AssertionError(f"{what}, thread {self.number}: {error}{untouched}") from None

    def _attempt(
        self, action: Callable[[], None], interrupts: Interrupts | None, data: Any, offset: int
    ) -> None:
        try:
            if interrupts is None:
                action()
            elif not interrupts.during(action):
                # The interrupted write may still be in flight; a later write to the same bytes is ordered after it.
                self.meetings.count("writes interrupted")
                tensorferry.write(self.path, data, offset)
        except Refused:
            self.meetings.count("writes refused")
            return
        self._written(data, offset)

    def _written(self, data: Any, offset: int) -> None:
        self.model[offset : offset + data.size] = data
        self.known_nbytes = max(self.known_nbytes, offset + data.size)
        self.meetings.count("writes")

    def _sync(self, write: bool, array: Any, offset: int) -> None:
        handle = self.random.choice(self.meetings.handles).opened
        method = handle.sync_pwrite if write else handle.sync_pread
        with _refusals():
            method(array, str(self.path), offset)

    def _async(self, write: bool, array: Any, offset: int) -> None:
        slot = self.meetings.queues[self.number]
        method = slot.opened.async_pwrite if write else slot.opened.async_pread
        with _refusals():
            method(array, str(self.path), offset)
        try:
            with _refusals():
                slot.opened.wait()
        except Refused:  # the write was accepted, so the close has completed it
            slot.await_close()

    def _file(self, write: bool, array: Any, offset: int) -> None:
        file = self._own_file()
        with _refusals():
            (file.write if write else file.read)(array, offset)

    def _future(self, write: bool, array: Any, offset: int) -> None:
        file = self._own_file()
        with _refusals():
            future = (file.write_from if write else file.read_into)(array, offset)
        future.result(HANG_S)

    def _function(self, write: bool, array: Any, offset: int) -> None:
        (tensorferry.write if write else tensorferry.read)(self.path, array, offset)

    def _many(self, write: bool, array: Any, offset: int) -> None:
        cuts = sorted(self.random.randrange(array.size + 1) for _ in range(6))
        ends = [*cuts, array.size]
        items = [
            (self.path, array[begin:end], offset + begin)
            for begin, end in zip([0, *cuts], ends, strict=True)
        ]
        (tensorferry.write_many if write else tensorferry.read_many)(items)

    def cancel(self) -> None:
        """Begin a write, and cancel it a moment later."""
        data, offset = self.piece()
        file = self._own_file()
        try:
            with _refusals():
                future = file.write_from(data, offset)
        except Refused:
            return
        time.sleep(self.random.choice([0, 0, 0.0002, 0.002]))
        getattr(future, "cancel", future._request.cancel)()
        try:
            future.result(HANG_S)
        except CANCELLED:
            pass
        except tensorferry.StorageError as error:
            if error.errno != errno.ECANCELED:
                raise
        else:
            self._written(data, offset)
            return
        # Each byte is the old or the new one, and stays so.
        found = self._contents()
        old, new = self.model[offset : offset + data.size], found[offset : offset + data.size]
        assert ((new == old) | (new == data)).all(), "a cancelled write wrote other bytes"
        old[:] = new
        self.meetings.count("writes cancelled")

    def write_and_drop(self) -> None:
        """Begin a write by a handle that is dropped, which finishes it."""
        data, offset = self.piece()
        handle = self.new_handle()
        handle.async_pwrite(data, str(self.path), offset)
        del handle
        self._written(data, offset)

    # Closing

    def _own_file(self) -> tensorferry.File:
        """Return this thread's file; open it again if another thread has closed it."""
        slot = self.meetings.files[self.number]
        if slot.opened.closed:
            slot = self.meetings.files[self.number] = Slot(self.new_file())
        return slot.opened  # type: ignore[no-any-return]

    def close_anothers(self) -> None:
        """Close a handle or file that another thread may be using; put a new one in its place."""
        slots, new = self._some_slots()
        number = self.random.randrange(THREADS)
        if slots is self.meetings.files and number != self.number:
            # Files belong to their owners' paths.
            slots[number].close()
            return
        slot, slots[number] = slots[number], Slot(new())
        slot.close()
        self.meetings.count("closes")

    def close_own(self) -> None:
        """Put a new handle or file in the place of this thread's own."""
        slots, new = self._some_slots()
        slot, slots[self.number] = slots[self.number], Slot(new())
        if self.random.random() < 0.5:
            slot.close()

    def _some_slots(self) -> tuple[list[Slot], Callable[[], Any]]:
        slots = self.random.choice(
            [self.meetings.handles, self.meetings.queues, self.meetings.files]
        )
        return slots, self.new_file if slots is self.meetings.files else self.new_handle

    # Forks

    def fork(self) -> None:
        """Fork; the child cannot use the parent's handles and files, and works with its own."""
        with self.meetings.fork_lock:
            if time.monotonic() - self.meetings.last_fork < FORKS_APART_S:
                return
            self.meetings.last_fork = time.monotonic()
        slot = self.random.choice(self.meetings.handles)
        data = self.bytes.integers(0, 256, 300_007, np.uint8)
        path = self.meetings.directory / f"child{self.number}"
        engine = self.random.choice(self.meetings.engines)
        pid = os.fork()
        if pid == 0:
            _in_child(lambda: _work_in_child(slot, data, path, engine))
        deadline = time.monotonic() + HANG_S
        ended = 0
        while not ended:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                assert time.monotonic() < deadline, "a forked child hung"
                time.sleep(0.005)
        assert os.waitstatus_to_exitcode(status) == 0, f"a forked child ended with {status}"
        assert_equal(np.fromfile(path, np.uint8), data)
        self.meetings.count("forks")

    def compare(self) -> None:
        """Compare the file with its model."""
        self._assert_equal("at the end", self._contents(), self.model)

    def _contents(self) -> Any:
        found = np.fromfile(self.path, np.uint8)
        assert found.size <= FILE_NBYTES
        return np.pad(
            found, (0, FILE_NBYTES - found.size)
        )  # space may be reserved, and not written


@contextlib.contextmanager
def _refusals() -> Any:
    """Turn the errors of closed handles and files into Refused."""
    try:
        yield
    except ValueError as error:
        if "closed" not in str(error):
            raise
        raise Refused from error


def _in_child(work: Callable[[], None]) -> None:
    try:
        signal.alarm(int(HANG_S) // 2)
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _work_in_child(slot: Slot, data: Any, path: pathlib.Path, engine: str) -> None:
    # Of the parent's handle: an error, of one that was made before the fork or closed; no hang.
    with contextlib.suppress(RuntimeError, ValueError):
        slot.opened.async_pwrite(data, str(path))
        raise AssertionError("a forked child used its parent's handle")
    own = tensorferry.aio_handle(engine=engine)
    own.async_pwrite(data, str(path))
    assert own.wait() == 1
    found = np.zeros_like(data)
    tensorferry.read(path, found)
    assert_equal(found, data)
    tensorferry.write(path, data)
    own.close()


def held_of(arrays: list[weakref.ref[Any]]) -> int:
    """Return how many of these arrays are still held."""
    Holdings.now()  # releases the remains of interrupted calls
    return sum(watched() is not None for watched in arrays)


def run(directory: str, engines: list[str], seconds: float, seed: int) -> dict[str, Any]:
    """Run the threads for a while; check that there are no failures and no leaks."""
    # Arrays get separate mappings, which free() returns to the system. Memory that free() keeps would hide a leak.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 32 << 10)
    path = pathlib.Path(directory)
    Meetings(path, engines, seed).run(
        min(seconds / 5, 1.0)
    )  # warm-up: pools, threads, the default scheduler
    with nothing_leaks(resident_slack_nbytes=64 << 20, objects_slack=5_000):
        meetings = Meetings(path, engines, seed + 1)
        meetings.run(seconds)
        counts = meetings.counts | {"interrupts": meetings.interrupts.raised}
        arrays = meetings.arrays
        del meetings
        assert settled(lambda: not held_of(arrays)), f"{held_of(arrays)} arrays are still held"
        arrays.clear()
    return {"counts": counts, "threads": Holdings.now().threads}
