"""One scheduler to look at, several behind it: each file is served by the settings its file system was tuned to.

Imported only where profiles are kept. The first file on a device decides, once, whether a profile suits its file
system; then a lookup by the device's number is all that a transfer pays.
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


class ProfiledScheduler:
    """Serves as a `_core.Scheduler`; `plain` moves what no profile is for.

    File systems with equal settings share a scheduler. All of them are made, used and closed as one.
    """

    def __init__(
        self, plain: _core.Scheduler, profiles: list[Profile], make: MakeScheduler
    ) -> None:
        self.plain = plain
        self._make = make
        self._profiles = profiles
        self._by_device: dict[int, _core.Scheduler] = {}
        self._by_settings: dict[Settings, _core.Scheduler] = {}
        self._in_use: dict[str, dict[str, Any]] = {}
        self._latest = plain
        self._lock = threading.Lock()
        self._closed = False

    # Which

    def of(self, file: _core.File) -> _core.Scheduler:
        """Return the scheduler for a file."""
        scheduler = self._by_device.get(file.device) or self._choose(file)
        self._latest = scheduler
        return scheduler

    def latest_settings(self) -> Settings | None:
        """Return the settings that the last transfer went by; None if they were no profile's."""
        for settings, scheduler in self._by_settings.items():
            if scheduler is self._latest:
                return settings
        return None

    def in_use(self) -> dict[str, dict[str, Any]]:
        """Return the profiles' settings in use, by mount point."""
        return dict(self._in_use)

    def _choose(self, file: _core.File) -> _core.Scheduler:
        with self._lock:
            if self._closed or len(self._by_device) >= _MAX_DEVICES:
                return self.plain
            profile = None
            # Its mount may be out of sight, and stays so.
            with contextlib.suppress(OSError, ValueError):
                file_system = store.file_system_of_open(file.descriptor)
                profile = store.profile_of(file_system, self._profiles)
            scheduler = self.plain if profile is None else self._scheduler_with(profile)
            self._by_device[file.device] = scheduler
            return scheduler

    def _scheduler_with(self, profile: Profile) -> _core.Scheduler:
        settings = profile.settings
        scheduler = self._by_settings.get(settings)
        if scheduler is None:
            if len(self._by_settings) >= _MAX_SCHEDULERS:
                return self.plain
            try:
                scheduler = self._make(settings)
            except EngineUnavailableError:
                # What was tuned outside a container may not be had inside.
                scheduler = self._make(dataclasses.replace(settings, engine=None))
            # Replaced as a whole: other threads may be going through them.
            self._by_settings = {**self._by_settings, settings: scheduler}
        self._in_use = {
            **self._in_use,
            profile.file_system.mount_point: dataclasses.asdict(settings),
        }
        return scheduler

    # What a scheduler does

    def run(self, file: _core.File, *arguments: Any) -> _core.Request | None:
        """Move one array of a blocking call, as the core does."""
        return self.of(file).run(file, *arguments)

    def run_plain(self, file: _core.File, *arguments: Any) -> bool:
        """Move one plain array of a blocking call, as the core does."""
        return self.of(file).run_plain(file, *arguments)

    def reap(self) -> None:
        """Drop the owners of what has finished."""
        for scheduler in self._all():
            scheduler.reap()

    def outstanding(self) -> int:
        """Return how many transfers have not ended."""
        return sum(scheduler.outstanding() for scheduler in self._all())

    def wait_for_progress(self, timeout_seconds: float) -> bool:
        """Wait until a transfer ends; False when time is over, True at once where none is outstanding."""
        end = time.monotonic() + timeout_seconds
        while busy := [scheduler for scheduler in self._all() if scheduler.outstanding() > 0]:
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
        """Return the sums of all counters, and the profiles in use."""
        every = [scheduler.stats() for scheduler in self._all()]
        return {**summed_stats(every), "engine": self.engine, "profiles": self.in_use()}

    def close(self, patience_seconds: float, interruptible: bool = False) -> bool:
        """Finish what is outstanding and end all workers; return whether the kernel finished all."""
        with self._lock:
            self._closed = True
        return all(_core.close_together(self._all(), patience_seconds, interruptible))

    def _all(self) -> list[_core.Scheduler]:
        return [self.plain, *self._by_settings.values()]
