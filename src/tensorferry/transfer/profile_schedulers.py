"""Several schedulers behind the interface of one: each transfer uses the settings of the profile for it.

A scheduler is the core's object that owns worker threads, which move blocks with one combination of settings.

This module is imported only if profiles are stored. A profile has settings that ``tensorferry tune`` measured for one
file system, one direction and one kind of memory. When the first file on a device is opened, the profiles of its file
system are looked up; later transfers only select among these by direction and memory. Transfers without a profile use
the plain scheduler, which has default settings.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer import profiles as profile_store
from tensorferry.transfer.stats import summed_stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.transfer.profiles import Profile
    from tensorferry.transfer.settings import Settings

    MakeScheduler = Callable[[Settings], _core.Scheduler]
    Location = tuple[int, int]

# Every scheduler owns threads and rings. Beyond _MAX_SCHEDULERS different settings, or for files on more than
# _MAX_DEVICES devices, the plain scheduler is used.
_MAX_SCHEDULERS = 8
_MAX_DEVICES = 256

# wait_for_progress() waits at most this long for one scheduler before it waits for the next one.
_WAIT_SLICE_SECONDS = 0.1


def with_profiles(
    plain: _core.Scheduler, path: str, make: MakeScheduler
) -> _core.Scheduler | ProfiledScheduler:
    """Return a scheduler that uses the profiles in a file, or ``plain`` if the file has none.

    ``make(settings)`` creates the scheduler of a profile.
    """
    profiles = profile_store.load(Path(path))
    return ProfiledScheduler(plain, profiles, make) if profiles else plain


class SchedulerGroup:
    """Several schedulers with the interface of a `_core.Scheduler`; `plain` serves transfers without a profile."""

    def __init__(self, plain: _core.Scheduler) -> None:
        self.plain = plain
        self._latest = plain
        # The settings of all schedulers except the plain one.
        self._settings: dict[_core.Scheduler, Settings] = {}

    def of(
        self, file: _core.File, write: bool, location: Location | None = None
    ) -> _core.Scheduler:
        """Return the scheduler of a transfer; ``location`` is that of its GPU memory, or None for host memory."""
        raise NotImplementedError

    def of_file(self, file: _core.File) -> SchedulerGroup | _core.Scheduler:  # noqa: ARG002
        """Return what serves all transfers of a file: one scheduler, or a group that selects among several."""
        return self

    def all(self) -> list[_core.Scheduler]:
        """Return all schedulers, the plain one first."""
        raise NotImplementedError

    def run(self, file: _core.File, *arguments: Any) -> _core.Request | None:
        """Move one array in a blocking call; see `_core.Scheduler.run`."""
        return self.of(file, arguments[3], arguments[9]).run(file, *arguments)

    def run_plain(
        self, file: _core.File, array: object, offset: object, write: bool, *how: bool
    ) -> bool:
        """Move one contiguous array in host memory in a blocking call; see `_core.Scheduler.run_plain`."""
        return self.of(file, write).run_plain(file, array, offset, write, *how)

    def start_plain(
        self, file: _core.File, array: object, offset: object, write: bool, *how: bool
    ) -> Any:
        """Start to move one contiguous array in host memory; see `_core.Scheduler.start_plain`."""
        return self.of(file, write).start_plain(file, array, offset, write, *how)

    def latest_settings(self) -> Settings | None:
        """Return the settings of the last transfer if they were those of a profile, else None."""
        return self._settings.get(self._latest)

    def reap(self) -> None:
        """Release the references to the memory of transfers that have ended."""
        for scheduler in self.all():
            scheduler.reap()

    def outstanding(self) -> int:
        """Return the number of transfers that have not ended."""
        return sum(scheduler.outstanding() for scheduler in self.all())

    def wait_for_progress(self, timeout_seconds: float) -> bool:
        """Wait until a transfer ends; return False on timeout, and True immediately if none is outstanding."""
        end = time.monotonic() + timeout_seconds
        while busy := [scheduler for scheduler in self.all() if scheduler.outstanding() > 0]:
            for scheduler in busy:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                if scheduler.wait_for_progress(min(left, _WAIT_SLICE_SECONDS)):
                    return True
        return True

    def check_usable(self) -> None:
        """Raise ValueError after close(), RuntimeError in a forked child."""
        self.plain.check_usable()

    def belongs_to_this_process(self) -> bool:
        """Return whether this process created the schedulers."""
        return self.plain.belongs_to_this_process()

    @property
    def engine(self) -> str:
        """The engine of the last transfer."""
        return self._latest.engine

    @property
    def refusals(self) -> list[tuple[str, str]]:
        """The engines that the plain scheduler tried without success, each with the reason."""
        return self.plain.refusals

    def stats(self) -> dict[str, Any]:
        """Return the counters of all schedulers, added up."""
        return {
            **summed_stats([scheduler.stats() for scheduler in self.all()]),
            "engine": self.engine,
        }

    def close(self, patience_seconds: float, interruptible: bool = False) -> bool:
        """Wait for outstanding requests and end all workers; return whether all requests ended."""
        return all(_core.close_together(self.all(), patience_seconds, interruptible))


class FileSystemSchedulers(SchedulerGroup):
    """The schedulers for the files of one file system, by direction and memory."""

    def __init__(
        self,
        plain: _core.Scheduler,
        tuned: dict[profile_store.Use, _core.Scheduler],
        settings: dict[_core.Scheduler, Settings],
    ) -> None:
        super().__init__(plain)
        self._settings = settings
        self._tuned = tuned
        # The names that profiles have for the memory of each GPU (the key is its number) and for host memory (None).
        self._names: dict[int | None, str] = {None: profile_store.HOST}
        self._latest = next(iter(tuned.values()), plain)

    def of(
        self,
        file: _core.File,  # noqa: ARG002
        write: bool,
        location: Location | None = None,
    ) -> _core.Scheduler:
        """Return the scheduler of a transfer."""
        device = None if location is None else location[0]
        memory = self._names.get(device)
        if memory is None:
            memory = self._names[device] = profile_store.memory_name(device)
        direction = "write" if write else "read"
        self._latest = self._tuned.get((direction, memory), self.plain)
        return self._latest

    def all(self) -> list[_core.Scheduler]:
        """Return all schedulers, each once."""
        return list(dict.fromkeys([self.plain, *self._tuned.values()]))

    def stats(self) -> dict[str, Any]:
        """Return the counters, added up, of the schedulers for host memory and of those with a profile."""
        host = [
            self._tuned.get((each, profile_store.HOST), self.plain)
            for each in profile_store.DIRECTIONS
        ]
        counted = dict.fromkeys([*host, *self._tuned.values()])
        every = [scheduler.stats() for scheduler in counted]
        return {**summed_stats(every), "engine": self.engine}


class ProfiledScheduler(SchedulerGroup):
    """The schedulers of all file systems, selected by the device of each file.

    File systems with equal settings share a scheduler.
    """

    def __init__(
        self, plain: _core.Scheduler, profiles: list[Profile], make: MakeScheduler
    ) -> None:
        super().__init__(plain)
        self._make = make
        self._profiles = profiles
        self._by_device: dict[int, FileSystemSchedulers | _core.Scheduler] = {}
        # The settings of the profiles in use, by mount point, and then by direction and memory.
        self._in_use: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()  # reentrant: see module_lock()
        self._closed = False

    def of_file(self, file: _core.File) -> SchedulerGroup | _core.Scheduler:
        """Return the schedulers of a file; the plain scheduler if its file system has no profile."""
        return self._by_device.get(file.device) or self._choose(file)

    def of(
        self, file: _core.File, write: bool, location: Location | None = None
    ) -> _core.Scheduler:
        """Return the scheduler of a transfer."""
        found = self.of_file(file)
        if not isinstance(found, _core.Scheduler):
            found = found.of(file, write, location)
        self._latest = found
        return found

    def all(self) -> list[_core.Scheduler]:
        """Return all schedulers created so far."""
        return [self.plain, *self._settings]

    def stats(self) -> dict[str, Any]:
        """Return the counters, added up, and the profiles in use by mount point, direction and memory."""
        return {**super().stats(), "profiles": dict(self._in_use)}

    def close(self, patience_seconds: float, interruptible: bool = False) -> bool:
        """Wait for outstanding requests and end all workers; return whether all requests ended."""
        with self._lock:
            self._closed = True
        return super().close(patience_seconds, interruptible)

    def _choose(self, file: _core.File) -> FileSystemSchedulers | _core.Scheduler:
        with self._lock:
            if self._closed or len(self._by_device) >= _MAX_DEVICES:
                return self.plain
            found: FileSystemSchedulers | _core.Scheduler = self.plain
            # If the file's mount is not visible to this process, or no further workers can be started, the device keeps
            # the plain scheduler.
            with contextlib.suppress(OSError, ValueError, EngineUnavailableError):
                system = profile_store.file_system_of_open(file.descriptor)
                profiles = profile_store.profiles_of(system, self._profiles)
                tuned = {each.use: self._scheduler_with(each.settings) for each in profiles}
                if tuned:
                    found = FileSystemSchedulers(self.plain, tuned, self._settings)
                    self._in_use = self._in_use | {
                        system.mount_point: {
                            " ".join(each.use): each.settings._asdict()
                            for each in profiles
                            if tuned[each.use] is not self.plain
                        }
                    }
            self._by_device[file.device] = found
            return found

    def _scheduler_with(self, settings: Settings) -> _core.Scheduler:
        for scheduler, its in self._settings.items():
            if its == settings:
                return scheduler
        if len(self._settings) >= _MAX_SCHEDULERS:
            return self.plain
        try:
            scheduler = self._make(settings)
        except EngineUnavailableError:
            # An engine that was tuned outside of a container may not work inside.
            scheduler = self._make(settings._replace(engine=None))
        # Replace the dict instead of changing it, because other threads may be iterating over it without the lock.
        self._settings = {**self._settings, scheduler: settings}
        return scheduler
