"""The schedulers of this process: created on demand, again after fork(), and closed at interpreter exit.

A scheduler is the core's object that owns worker threads with a queue each. It moves the blocks of requests (what calls
have submitted). Its engine is how blocks reach the kernel: io_uring, libaio or threads.
"""

from __future__ import annotations

import atexit
import os
import resource
import sys
import threading
import time
import weakref
from errno import EMFILE, ENFILE
from typing import TYPE_CHECKING, TypeVar

from tensorferry import _core
from tensorferry.base.caller_warnings import warn
from tensorferry.base.processes import module_lock
from tensorferry.errors import StorageError
from tensorferry.transfer import futures
from tensorferry.transfer.settings import DEFAULT_BLOCK_NBYTES, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

# The block size of large requests, unless the caller chose one. Blocks of this size halve the processor time, compared
# with the default size, and are faster on fast drives.
_LARGE_BLOCK_NBYTES = 4 << 20

# close() stops waiting after this time without any progress.
CLOSE_PATIENCE_SECONDS = 60.0

# While closing, the interval between two checks for progress.
_STEP_SECONDS = 1.0

# Requests may always have _MIN_REQUEST_FILES files open. At a descriptor limit a call checks every _POLL_SECONDS
# whether files have been closed, at most _MAX_WAITS times. It gives up when no byte has moved for _NO_PROGRESS_SECONDS.
_MIN_REQUEST_FILES = 64
_POLL_SECONDS = 0.05
_NO_PROGRESS_SECONDS = 5.0
_MAX_WAITS = 1024

# The priority of multiprocessing's finalizers: those of the program run before ours.
_LAST = -1_000_000

_Result = TypeVar("_Result")

# All schedulers that exist. The exit handler waits for their transfers.
_schedulers: weakref.WeakSet[_core.Scheduler] = weakref.WeakSet()
_lock = module_lock()
_default: _core.Scheduler | None = None
_child = 0  # the process whose finalizers call finish_at_exit()


def engines() -> dict[str, str | None]:
    """Return the engines in order of preference, each with None if it works here, else the reason and the remedy."""
    return dict(_core.probe_engines())


def make_scheduler(settings: Settings) -> _core.Scheduler:
    """Start a scheduler's workers with the engine of the settings, else TENSORFERRY_ENGINE, else the first that works.

    Raises
    ------
    ValueError
        A setting is out of range, or the engine's name is unknown.
    EngineUnavailableError
        The engine does not work on this machine.
    """
    engine = settings.engine
    if engine is None:
        engine = os.environ.get("TENSORFERRY_ENGINE") or ""
    if engine and engine not in _core.engine_names():
        raise ValueError(f"engine: {engine!r} is not one of {', '.join(_core.engine_names())}")
    return start_scheduler(engine, settings)


def start_scheduler(engine: str, settings: Settings) -> _core.Scheduler:
    """Start a scheduler's workers with an engine of the core; an empty name selects the first that works."""
    block = settings.block_size
    large = _LARGE_BLOCK_NBYTES if block == DEFAULT_BLOCK_NBYTES else block
    how = settings.queue_depth, settings.intra_op_parallelism, settings.single_submit
    _finish_with_child()
    scheduler = _core.Scheduler(engine, block, large, *how)
    _schedulers.add(scheduler)
    return scheduler


def default_scheduler() -> _core.Scheduler:
    """Return the scheduler of the module's functions and of files without settings; a forked child has its own."""
    global _default
    scheduler = _default
    if scheduler is not None and scheduler.belongs_to_this_process():
        return scheduler
    with _lock:
        if _default is None or not _default.belongs_to_this_process():
            _default = make_scheduler(Settings.of())
        return _default


def with_descriptors(
    scheduler: _core.Scheduler, action: Callable[[], _Result], *, opens: bool = True
) -> _Result:
    """Call ``action``, which opens files; at a descriptor limit, wait until requests have closed files and retry.

    With ``opens``, the action certainly opens a file. This function then first waits while the process uses more
    than half of its descriptors, which leaves the other half to the rest of the program. If waiting does not help, it
    calls the action nevertheless.
    """
    if opens:
        _wait_while_over_half(scheduler)
    waiting = None
    while True:
        try:
            return action()
        except StorageError as error:
            if error.errno not in (EMFILE, ENFILE) or (waiting and waiting.is_over):
                raise
        # The retry is outside of the `except` block: the exception's traceback keeps alive the files that the action
        # had opened, and they are closed only when the exception is gone.
        waiting = waiting or _DescriptorWait(scheduler)
        waiting.wait()


def _wait_while_over_half(scheduler: _core.Scheduler) -> None:
    # Query the limit each time: the process may change it, and the query costs less than opening a file.
    waiting = None
    while (
        _core.open_descriptors() > _MIN_REQUEST_FILES
        and _core.open_descriptors() > descriptor_limit()
    ):
        waiting = waiting or _DescriptorWait(scheduler)
        # If requests have only a few files open, the others belong to the program, and waiting closes none of them.
        if _core.files_of_requests()[0] <= _MIN_REQUEST_FILES or waiting.is_over:
            break
        waiting.wait()


class _DescriptorWait:
    """The state of a caller that waits, in several steps, for free descriptors.

    A descriptor becomes free when a request ends and closes the file that was opened for it.

    ``is_over`` is True when further waiting would not help: no request has a file open, no byte has moved for
    _NO_PROGRESS_SECONDS, or the caller has waited _MAX_WAITS times, because other callers took the freed descriptors.
    Files that the program opened itself are not counted, because they stay open when transfers end.
    """

    def __init__(self, scheduler: _core.Scheduler) -> None:
        self.is_over = False
        self._scheduler = scheduler
        self._times = 0
        self._quiet_seconds = 0.0

    def wait(self) -> None:
        """Return when a request has closed its file, or after a short time."""
        count, before = _core.files_of_requests()
        moved = _moved(self._scheduler)
        end = time.monotonic() + _POLL_SECONDS
        while count and _core.files_of_requests()[1] == before:
            left = end - time.monotonic()
            if left <= 0:
                break
            if self._scheduler.outstanding():
                self._scheduler.wait_for_progress(left)
            else:  # the open files belong to requests of another scheduler
                time.sleep(0.001)
        quiet = _core.files_of_requests()[1] == before and _moved(self._scheduler) == moved
        # Count intervals, not clock time, because the clock continues while the process is stopped.
        self._quiet_seconds = self._quiet_seconds + _POLL_SECONDS if quiet else 0.0
        self._times += 1
        self.is_over = (
            count == 0 or self._times >= _MAX_WAITS or self._quiet_seconds >= _NO_PROGRESS_SECONDS
        )


def descriptor_limit() -> int:
    """Return how many descriptors requests may use: half of the process's limit (RLIMIT_NOFILE)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def close_scheduler(
    scheduler: _core.Scheduler, *, patient: bool = True, interruptible: bool = False
) -> bool:
    """Wait for outstanding requests and end the workers; return whether all requests ended.

    If the kernel does not complete some of them in time, emit a warning and return False. With ``interruptible``, a
    KeyboardInterrupt ends the wait: the scheduler then accepts no new requests, and this function must be called again.
    """
    ended = scheduler.close(CLOSE_PATIENCE_SECONDS if patient else 0.0, interruptible)
    if not ended:
        warn_of_abandoned_io("outstanding I/O")
    return ended


def wait_while_progressing(step: Callable[[float], bool], *schedulers: _core.Scheduler) -> bool:
    """Call ``step(seconds)`` until it returns True; return False once the schedulers make no progress for too long.

    The limit is CLOSE_PATIENCE_SECONDS. ``step`` waits at most the given seconds for what the caller needs.
    """
    # Count steps, not clock time, because the clock continues while the process is stopped (SIGSTOP, a frozen
    # container).
    step_seconds = min(_STEP_SECONDS, CLOSE_PATIENCE_SECONDS / 10)
    seen, left = None, 0.0
    while not step(step_seconds):
        moved = [_moved(scheduler) for scheduler in schedulers]
        left = CLOSE_PATIENCE_SECONDS if moved != seen else left - step_seconds
        if left <= 0:
            return False
        seen = moved
    return True


def _moved(scheduler: _core.Scheduler) -> object:
    """Return the counters that change whenever a block ends; equal values mean no progress."""
    counted = scheduler.stats()
    return [counted[name] for name in ("read_nbytes", "written_nbytes", "failed_requests")]


def warn_of_abandoned_io(what: str) -> None:
    """Warn of I/O that close() no longer waits for. Its memory is never released: the kernel may still use it."""
    warn(
        f"tensorferry: {what} made no progress for {CLOSE_PATIENCE_SECONDS:g} seconds and was abandoned; "
        "data may be missing"
    )


def finish_at_exit() -> None:
    """Wait for outstanding transfers, and warn of failures that no code asked for.

    Schedulers stay open: exit handlers that the program registered before it imported this package run later, and
    non-daemon threads of a child of multiprocessing end later. From now on an asynchronous call returns only when its
    transfer has ended, because nothing waits for it later.
    """
    _core.begin_exit(futures.callback_thread())
    # All schedulers are waited for at the same time: if several drives hang, that takes no longer than for one.
    schedulers = list(_schedulers)
    ended = _core.wait_together(schedulers, CLOSE_PATIENCE_SECONDS)
    for scheduler, is_idle in zip(schedulers, ended, strict=True):
        if not is_idle:
            scheduler.close(0.0)
    if not all(ended):
        warn_of_abandoned_io("outstanding I/O")
    futures.finish_at_exit()


def _finish_with_child() -> None:
    """In a child of multiprocessing, have its finalizers call :func:`finish_at_exit`: it ends by ``os._exit``."""
    global _child
    process, util = map(sys.modules.get, ("multiprocessing.process", "multiprocessing.util"))
    if process is None or util is None or process.parent_process() is None:
        return
    if util.is_exiting():  # the finalizers have run, and the child waits for its last threads
        _core.begin_exit(0)
    elif _child != os.getpid():
        util.Finalize(None, finish_at_exit, exitpriority=_LAST)
        _child = os.getpid()


atexit.register(finish_at_exit)
if threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive():
    _core.begin_exit(0)  # An exit handler imports this module, and Python calls no further ones.
