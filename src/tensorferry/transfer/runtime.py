"""The schedulers of this process: made on demand, remade after fork, finished before the interpreter leaves."""

from __future__ import annotations

import atexit
import os
import resource
import threading
import time
import weakref
from errno import EMFILE, ENFILE
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from tensorferry import _core
from tensorferry.base.processes import in_forked_children
from tensorferry.base.warned import warn
from tensorferry.errors import StorageError
from tensorferry.transfer import futures
from tensorferry.transfer.defaults import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.transfer.profiled import SeveralSchedulers
    from tensorferry.transfer.settings import Settings

# Settings given: a scheduler. None given: it may be several that look like one.
AnyScheduler: TypeAlias = "_core.Scheduler | SeveralSchedulers"

# Blocks of large requests, unless a block size was chosen: half the processor time, and some speed on fast drives.
_LARGE_BLOCK_NBYTES = 4 << 20

# After so long without any progress whoever closes something gives up.
CLOSE_PATIENCE_SECONDS = 60.0

# Looks after its transfers' progress, when something is closed.
_SLICE_SECONDS = 1.0

# As many files as requests may always have open. Who lacks descriptors looks again after a moment, so many times at
# most, and no more when nothing has moved for so long.
_FEW_FILES = 64
_MOMENT_SECONDS = 0.05
_QUIET_SECONDS = 5.0
_MAX_WAITS = 1024

_Result = TypeVar("_Result")

_schedulers: weakref.WeakSet[_core.Scheduler] = weakref.WeakSet()
_lock = threading.Lock()
_default: AnyScheduler | None = None


def engines() -> dict[str, str | None]:
    """Return the engines in order of preference, each with None where it works here, else why not and what helps."""
    return dict(_core.probe_engines())


def make_scheduler(
    engine: str | None,
    block_nbytes: int,
    queue_depth: int,
    worker_count: int,
    single_submit: bool,
) -> _core.Scheduler:
    """Start workers with the engine asked for: by argument, by TENSORFERRY_ENGINE, else the first that works.

    Raises
    ------
    ValueError
        An argument is out of range, or the engine's name is not known.
    EngineUnavailableError
        The engine cannot be had here.
    """
    if engine is None:
        engine = os.environ.get("TENSORFERRY_ENGINE") or ""
    if engine and engine not in _core.engine_names():
        raise ValueError(f"engine: {engine!r} is none of {', '.join(_core.engine_names())}")
    return start_scheduler(engine, block_nbytes, queue_depth, worker_count, single_submit)


def start_scheduler(
    engine: str,
    block_nbytes: int,
    queue_depth: int,
    worker_count: int,
    single_submit: bool,
) -> _core.Scheduler:
    """Start workers with an engine by the core's name for it, or with the first that works if that is empty."""
    large = _LARGE_BLOCK_NBYTES if block_nbytes == DEFAULT_BLOCK_NBYTES else block_nbytes
    scheduler = _core.Scheduler(
        engine, block_nbytes, large, queue_depth, worker_count, single_submit
    )
    _schedulers.add(scheduler)
    return scheduler


def scheduler_with(settings: Settings) -> _core.Scheduler:
    """Do as :func:`make_scheduler` with settings that a profile keeps or a sweep tries."""
    return make_scheduler(
        settings.engine,
        settings.block_size,
        settings.queue_depth,
        settings.intra_op_parallelism,
        settings.single_submit,
    )


def automatic_scheduler() -> AnyScheduler:
    """Return a new scheduler for callers who gave no setting: the defaults, and profiles where some are kept."""
    scheduler = make_scheduler(None, DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH, 1, False)
    path = profiles_path()
    # An engine set in the environment is an explicit setting.
    if path is None or os.environ.get("TENSORFERRY_ENGINE") or not os.path.exists(path):  # noqa: PTH110
        return scheduler
    from tensorferry.transfer.profiled import with_profiles

    return with_profiles(scheduler, path, scheduler_with)


def profiles_path() -> str | None:
    """Return where ``tensorferry tune`` keeps what it found; None where profiles are switched off.

    The environment variable TENSORFERRY_PROFILES names the file, or is "0"; else it is in the configuration folder.
    """
    chosen = os.environ.get("TENSORFERRY_PROFILES")
    if chosen:
        return None if chosen == "0" else chosen
    # pathlib alone would take a third of the time of `import tensorferry`.
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return f"{folder}/tensorferry/profiles.json"


def scheduler_of(
    scheduler: AnyScheduler,
    file: _core.File,
    write: bool,
    location: tuple[int, int] | None = None,
) -> _core.Scheduler:
    """Return the one that serves a transfer of a file; ``location`` is that of GPU memory."""
    if isinstance(scheduler, _core.Scheduler):
        return scheduler
    return scheduler.of(file, write, location)


def schedulers_of(scheduler: AnyScheduler, file: _core.File) -> AnyScheduler:
    """Return what serves all transfers of a file."""
    if isinstance(scheduler, _core.Scheduler):
        return scheduler
    return scheduler.of_file(file)


def default_scheduler() -> AnyScheduler:
    """Return the scheduler behind the module's functions and files; a forked child gets its own."""
    global _default
    scheduler = _default
    if scheduler is not None and scheduler.belongs_to_this_process():
        return scheduler
    with _lock:
        if _default is None or not _default.belongs_to_this_process():
            _default = automatic_scheduler()
        return _default


def with_descriptors(
    scheduler: AnyScheduler, action: Callable[[], _Result], *, opens: bool = True
) -> _Result:
    """Do what opens files, or may; at a descriptor limit, wait for requests to close those that they opened.

    What surely ``opens`` a file leaves half of the process's descriptors to others, as long as waiting helps.
    """
    if opens:
        _leave_half_to_others(scheduler)
    waiting = None
    while True:
        try:
            return action()
        except StorageError as error:
            if error.errno not in (EMFILE, ENFILE) or (waiting and waiting.is_over):
                raise
        # Out here the exception is gone, and with it the files that the action had opened.
        waiting = waiting or _WaitingForFiles(scheduler)
        waiting.wait()


def _leave_half_to_others(scheduler: AnyScheduler) -> None:
    # The limit is looked up each time: a process may change it, and that costs less than opening a file.
    waiting = None
    while _core.open_descriptors() > _FEW_FILES and _core.open_descriptors() > descriptor_limit():
        waiting = waiting or _WaitingForFiles(scheduler)
        # Files that users keep open are not closed by waiting.
        if _core.files_of_requests()[0] <= _FEW_FILES or waiting.is_over:
            break
        waiting.wait()


class _WaitingForFiles:
    """Waits for files that were opened for one request each, until there is no sense in it.

    That is where none of them is open, where nothing has moved for some seconds, or where others have been faster very
    often. Other files are nothing to wait for: they stay open, whatever ends.
    """

    def __init__(self, scheduler: AnyScheduler) -> None:
        self.is_over = False
        self._scheduler = scheduler
        self._times = 0
        self._quiet_seconds = 0.0

    def wait(self) -> None:
        """Return when such a file has been closed, or after a moment."""
        count, before = _core.files_of_requests()
        moved = self._moved()
        end = time.monotonic() + _MOMENT_SECONDS
        while count and _core.files_of_requests()[1] == before:
            left = end - time.monotonic()
            if left <= 0:
                break
            if self._scheduler.outstanding():
                self._scheduler.wait_for_progress(left)
            else:  # another one's
                time.sleep(0.001)
        quiet = _core.files_of_requests()[1] == before and self._moved() == moved
        # Moments are counted, since the clock goes on while the process is stopped.
        self._quiet_seconds = self._quiet_seconds + _MOMENT_SECONDS if quiet else 0.0
        self._times += 1
        self.is_over = (
            count == 0 or self._times >= _MAX_WAITS or self._quiet_seconds >= _QUIET_SECONDS
        )

    def _moved(self) -> object:
        counted = self._scheduler.stats()
        return counted["read_nbytes"], counted["written_nbytes"]


def descriptor_limit() -> int:
    """Return how many descriptors of this process are ours: half of what it may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def close_scheduler(
    scheduler: AnyScheduler, *, patient: bool = True, interruptible: bool = False
) -> bool:
    """Finish what is outstanding, end the workers, and say so, and return False, where the kernel would not finish.

    After an interruption nothing new is taken, and it is to be called again.
    """
    ended = scheduler.close(CLOSE_PATIENCE_SECONDS if patient else 0.0, interruptible)
    if not ended:
        warn_of_left_behind("outstanding I/O")
    return ended


def patiently(step: Callable[[float], bool], *schedulers: AnyScheduler) -> bool:
    """Take steps, of so many seconds each, until one returns True; False where the schedulers move nothing for long."""
    # Steps are counted, since the clock goes on while the process is stopped (SIGSTOP, a frozen container).
    step_seconds = min(_SLICE_SECONDS, CLOSE_PATIENCE_SECONDS / 10)
    seen, left = None, 0.0
    while not step(step_seconds):
        moved = [_moved(scheduler) for scheduler in schedulers]
        left = CLOSE_PATIENCE_SECONDS if moved != seen else left - step_seconds
        if left <= 0:
            return False
        seen = moved
    return True


def _moved(scheduler: AnyScheduler) -> object:
    """Return what changes as long as blocks end."""
    counted = scheduler.stats()
    return [counted[name] for name in ("read_nbytes", "written_nbytes", "failed_requests")]


def warn_of_left_behind(what: str) -> None:
    """Warn of I/O that closing gave up on. Its memory is kept for ever."""
    warn(
        f"tensorferry: {what} made no progress for {CLOSE_PATIENCE_SECONDS:g} seconds and was left behind; "
        "data may be missing"
    )


def _leave() -> None:
    # All at once: where several drives hang, each has had its time when the first one has.
    if not all(_core.close_together(list(_schedulers), CLOSE_PATIENCE_SECONDS)):
        warn_of_left_behind("outstanding I/O")
    futures.leave()


@in_forked_children
def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it at fork


atexit.register(_leave)
