"""One scheduler to look at, several behind it: each transfer is served by the settings that were proven for it.

Imported only where profiles are kept. A profile is of one file system, one direction and one kind of memory. The first
file on a device decides, once, which profiles its file system has; then a transfer looks up its direction and memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer import profiles as store
from tensorferry.transfer.stats import summed_stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorferry.transfer.profiles import Profile
    from tensorferry.transfer.settings import Settings

    MakeScheduler = Callable[[Settings], _core.Scheduler]
    Location = tuple[int, int]

# Schedulers own threads and rings: beyond so many different settings, and devices, the plain one serves.
_MAX_SCHEDULERS = 8
_MAX_DEVICES = 256

_WAIT_SLICE_SECONDS = 0.1


def with_profiles(
    plain: _core.Scheduler, path: str, make: MakeScheduler
) -> _core.Scheduler | ProfiledScheduler:
    """Return a scheduler that uses the profiles of a file, each by one that `make` gives; without any, `plain`."""
    profiles = store.load(Path(path))
    return ProfiledScheduler(plain, profiles, make) if profiles else plain


class SeveralSchedulers:
    """Serves as a `_core.Scheduler`; `plain` moves what no profile is for. All are used and looked at as one."""

    def __init__(self, plain: _core.Scheduler) -> None:
        self.plain = plain
        self._latest = plain
        self._settings: dict[_core.Scheduler, Settings] = {}  # of all but the plain one

    def of(
        self, file: _core.File, write: bool, location: Location | None = None
    ) -> _core.Scheduler:
        """Return the scheduler for a transfer; ``location`` is that of GPU memory."""
        raise NotImplementedError

    def of_file(self, file: _core.File) -> SeveralSchedulers | _core.Scheduler:  # noqa: ARG002
        """Return what serves all transfers of a file."""
        return self

    def all(self) -> list[_core.Scheduler]:
        """Return all of them, the plain one first."""
        raise NotImplementedError

    def run(self, file: _core.File, *arguments: Any) -> _core.Request | None:
        """Move one array of a blocking call, as the core does."""
        write, location = arguments[3], arguments[9] if len(arguments) > 9 else None
        return self.of(file, write, location).run(file, *arguments)

    def run_plain(
        self, file: _core.File, array: object, offset: object, write: bool, *how: bool
    ) -> bool:
        """Move one plain array, which is in host memory, of a blocking call, as the core does."""
        sync, background = how
        return self.of(file, write).run_plain(file, array, offset, write, sync, background)

    def start_plain(
        self, file: _core.File, array: object, offset: object, write: bool, *how: bool
    ) -> Any:
        """Begin to move one plain array, which is in host memory, as the core does."""
        sync, background = how
        return self.of(file, write).start_plain(file, array, offset, write, sync, background)

    def latest_settings(self) -> Settings | None:
        """Return the settings that the last transfer went by; None if they were no profile's."""
        return self._settings.get(self._latest)

    def reap(self) -> None:
        """Drop the owners of what has finished."""
        for scheduler in self.all():
            scheduler.reap()

    def outstanding(self) -> int:
        """Return how many transfers have not ended."""
        return sum(scheduler.outstanding() for scheduler in self.all())

    def wait_for_progress(self, timeout_seconds: float) -> bool:
        """Wait until a transfer ends; False when time is over, True at once where none is outstanding."""
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
        """Raise ValueError once closed, RuntimeError in a forked child."""
        self.plain.check_usable()

    def belongs_to_this_process(self) -> bool:
        """Return whether this is the process that made it."""
        return self.plain.belongs_to_this_process()

    @property
    def engine(self) -> str:
        """The engine that moved the last transfer."""
        return self._latest.engine

    @property
    def refusals(self) -> list[tuple[str, str]]:
        """The engines that the plain scheduler tried first, and why each could not be had."""
        return self.plain.refusals

    def stats(self) -> dict[str, Any]:
        """Return the sums of all counters."""
        return {
            **summed_stats([scheduler.stats() for scheduler in self.all()]),
            "engine": self.engine,
        }

    def close(self, patience_seconds: float, interruptible: bool = False) -> bool:
        """Finish what is outstanding and end all workers; return whether the kernel finished all."""
        return all(_core.close_together(self.all(), patience_seconds, interruptible))


class FileSystemSchedulers(SeveralSchedulers):
    """The schedulers for the files of one file system, by direction and memory; others serve there as well."""

    def __init__(
        self,
        plain: _core.Scheduler,
        tuned: dict[store.Use, _core.Scheduler],
        settings: dict[_core.Scheduler, Settings],
    ) -> None:
        super().__init__(plain)
        self._settings = settings
        self._tuned = tuned
        self._names: dict[int | None, str] = {None: store.HOST}
        self._latest = next(iter(tuned.values()), plain)

    def of(
        self,
        file: _core.File,  # noqa: ARG002
        write: bool,
        location: Location | None = None,
    ) -> _core.Scheduler:
        """Return the scheduler for a transfer."""
        device = None if location is None else location[0]
        memory = self._names.get(device)
        if memory is None:
            memory = self._names[device] = store.memory_name(device)
        direction = "write" if write else "read"
        self._latest = self._tuned.get((direction, memory), self.plain)
        return self._latest

    def all(self) -> list[_core.Scheduler]:
        """Return all of them, each once."""
        return list(dict.fromkeys([self.plain, *self._tuned.values()]))

    def stats(self) -> dict[str, Any]:
        """Return the sums of the counters of those that move host memory, or have a profile."""
        host = [self._tuned.get((each, store.HOST), self.plain) for each in store.DIRECTIONS]
        counted = dict.fromkeys([*host, *self._tuned.values()])
        every = [scheduler.stats() for scheduler in counted]
        return {**summed_stats(every), "engine": self.engine}


class ProfiledScheduler(SeveralSchedulers):
    """Looks up the file system of each file. Equal settings share a scheduler, whichever file systems have them."""

    def __init__(
        self, plain: _core.Scheduler, profiles: list[Profile], make: MakeScheduler
    ) -> None:
        super().__init__(plain)
        self._make = make
        self._profiles = profiles
        self._by_device: dict[int, FileSystemSchedulers | _core.Scheduler] = {}
        self._in_use: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def of_file(self, file: _core.File) -> SeveralSchedulers | _core.Scheduler:
        """Return what serves a file, in either direction: the plain one where its file system has no profile."""
        return self._by_device.get(file.device) or self._choose(file)

    def of(
        self, file: _core.File, write: bool, location: Location | None = None
    ) -> _core.Scheduler:
        """Return the scheduler for a transfer."""
        found = self.of_file(file)
        if not isinstance(found, _core.Scheduler):
            found = found.of(file, write, location)
        self._latest = found
        return found

    def all(self) -> list[_core.Scheduler]:
        """Return all that were made."""
        return [self.plain, *self._settings]

    def stats(self) -> dict[str, Any]:
        """Return the sums of all counters and, by mount point, direction and memory, the profiles in use."""
        return {**super().stats(), "profiles": dict(self._in_use)}

    def close(self, patience_seconds: float, interruptible: bool = False) -> bool:
        """Finish what is outstanding and end all workers; return whether the kernel finished all."""
        with self._lock:
            self._closed = True
        return super().close(patience_seconds, interruptible)

    def _choose(self, file: _core.File) -> FileSystemSchedulers | _core.Scheduler:
        with self._lock:
            if self._closed or len(self._by_device) >= _MAX_DEVICES:
                return self.plain
            found: FileSystemSchedulers | _core.Scheduler = self.plain
            # Its mount may be out of sight, and stays so.
            with contextlib.suppress(OSError, ValueError):
                system = store.file_system_of_open(file.descriptor)
                profiles = store.profiles_of(system, self._profiles)
                tuned = {each.use: self._scheduler_with(each.settings) for each in profiles}
                if tuned:
                    found = FileSystemSchedulers(self.plain, tuned, self._settings)
                    self._in_use = self._in_use | {
                        system.mount_point: {
                            " ".join(each.use): dataclasses.asdict(each.settings)
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
            # What was tuned outside a container may not be had inside.
            scheduler = self._make(dataclasses.replace(settings, engine=None))
        # Replaced as a whole: other threads may be going through them.
        self._settings = {**self._settings, scheduler: settings}
        return scheduler
