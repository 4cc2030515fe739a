"""Tuning: from folders to the settings that suit their drives, to a profile that is used from then on."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tensorferry
from tensorferry.base.checks import format_nbytes
from tensorferry.transfer import profiles, runtime
from tensorferry.tuning import storing
from tensorferry.tuning.drive import Drives, Measurement, largest_nbytes
from tensorferry.tuning.gpus import CUFILE
from tensorferry.tuning.intervals import interval
from tensorferry.tuning.race import Found, Step, Turn, expected_nbytes, search
from tensorferry.tuning.space import Space, default_settings

if TYPE_CHECKING:
    from tensorferry.transfer.settings import Settings

_MIB = 1 << 20
SMALLEST_NBYTES = 16 * _MIB

# The file is as large as the drive moves in so long, as far as there is room: long enough to be timed well. At least
# it should hold full queues.
_MEASURED_SECONDS = 0.3
_ENOUGH_NBYTES = 128 * _MIB
_PROBE_NBYTES = 64 * _MIB
_LARGEST_NBYTES = 4096 * _MIB
# What a drive is taken for until something was measured.
_GUESSED_RATE = 2e9

_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Job:
    """What to tune, and how."""

    folders: tuple[Path, ...]
    space: Space
    nbytes: int | None = None  # of the file in each folder; None: as the drive's speed asks for
    read: bool = True
    write: bool = True
    full: bool = False
    loops: int = 1  # times the data is moved in each measurement
    gpu: bool = False  # move GPU memory
    gds: bool = False  # as gds_handle does


@dataclass(frozen=True)
class Progress:
    """How far a run has come: its share of the whole, and how long the rest is likely to take."""

    share: float
    seconds_left: float


class Watcher(Protocol):
    """Who looks on."""

    def stage(self, name: str, points: int, progress: Progress) -> None:
        """Hear that a stage begins, with so many settings."""

    def turn(self, turn: Turn, progress: Progress) -> None:
        """Hear what a step measured."""


@dataclass(frozen=True)
class Result:
    """What came out, and for which file systems."""

    job: Job
    found: Found
    file_systems: list[profiles.FileSystem]
    nbytes: int
    direct: bool
    seconds: float
    warnings: list[str] = field(default_factory=list)
    stored_for: list[str] = field(default_factory=list)  # mount points
    dropped_for: list[str] = field(
        default_factory=list
    )  # had a profile that proved to be no better
    not_stored: str | None = None  # why what was to be stored could not be

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON knows it; rates are in bytes a second."""
        found = self.found
        names = ("nbytes", "direct", "seconds", "warnings", "stored_for", "dropped_for")
        content = {name: getattr(self, name) for name in names} | {
            "tensorferry": tensorferry.__version__,
            "job": self.job,
            "file_systems": self.file_systems,
            "settings": found.chosen,
            "deepspeed": self.deepspeed(),
            "rates": self.rates(),
            "gain_over_default": found.gain,
            "trials": [vars(trial) | {"pairs": len(trial.pairs)} for trial in found.trials],
            "turns": found.turns,
        }
        plain: dict[str, Any] = json.loads(json.dumps(content, default=_as_plain))
        return plain

    def deepspeed(self) -> dict[str, Any]:
        """Return what DeepSpeed's configuration should have."""
        more = {"use_gds": True} if self.job.gds else {}
        return {"aio": self.found.chosen.as_deepspeed() | more}

    def rates(self, drive: int | None = None) -> dict[str, Any]:
        """Return median and confidence of the chosen settings' rates, of one drive or of all, in bytes a second."""
        rates: dict[str, Any] = {}
        turns = self.found.turns_of(self.found.chosen)
        for name in ("write", "read"):
            known = [each for turn in turns if (each := getattr(turn, name)) is not None]
            if known:
                values = [m.rate if drive is None else m.drive_rates[drive] for m in known]
                rates[name] = dataclasses.asdict(interval(values))
        return rates


def tune(job: Job, watcher: Watcher, *, save: bool = True) -> Result:
    """Find the settings that suit the drives behind some folders, and keep them as a profile.

    Parameters
    ----------
    job : Job
        What to tune.
    watcher : Watcher
        Hears of each measurement.
    save : bool
        Store the profile if settings are proven to be better than the default ones, else drop an earlier one.

    Raises
    ------
    OSError
        A folder or the file of profiles cannot be written, a disk is full, or a drive fails.
    MemoryError
        There is no memory for the data.
    """
    begin = time.perf_counter()
    store = _store(job) if save else None
    if store is not None:
        storing.check_writable(store)
    file_systems = [profiles.file_system_of(folder) for folder in job.folders]
    default = _default_of(job.space)
    runner = _Runner(job, watcher, default)
    nbytes = job.nbytes or _suitable_nbytes(job)
    with Drives(job.folders, nbytes, gpu=job.gpu, gds=job.gds) as drives:
        drives.measure(default, True, nbytes)  # from now on all of it is real
        runner.drives = drives
        found = search(
            job.space.points(nbytes, default),
            default,
            nbytes,
            runner,
            full=job.full,
            stored=_stored_settings(store, file_systems),
        )
        result = Result(
            job,
            found,
            file_systems,
            nbytes,
            drives.direct,
            time.perf_counter() - begin,
            warnings=_warnings(job, drives, file_systems)
            + ([] if store else _why_unsaved(job, save)),
        )
    return result if store is None else _stored(result, store)


def _as_plain(value: Any) -> Any:
    """Return an object as JSON knows it: a path as its text, a dataclass by its fields."""
    return str(value) if isinstance(value, Path) else dataclasses.asdict(value)


class _Runner:
    """Measures steps for the search, and tells the watcher how far it has come."""

    drives: Drives

    def __init__(self, job: Job, watcher: Watcher, default: Settings) -> None:
        self._job = job
        self._watcher = watcher
        self._begin: float | None = None
        self._moved_nbytes = 0
        # Not known yet, but by its time: how much a file holds follows the drive's speed.
        nbytes = job.nbytes or int(_MEASURED_SECONDS * _GUESSED_RATE)
        points = job.space.points(nbytes, default)
        self._left_nbytes = expected_nbytes(points, nbytes, full=job.full)
        watcher.stage("preparing", 0, self._progress())

    def begin(self, stage: str, points: int, left_nbytes: int) -> None:
        self._left_nbytes = left_nbytes
        self._watcher.stage(stage, points, self._progress())

    def __call__(self, step: Step) -> Turn:
        if self._begin is None:
            self._begin = time.perf_counter()
        turn = Turn(
            step.settings,
            step.nbytes,
            self._measured(step, True, step.write_limit_seconds) if self._job.write else None,
            self._measured(step, False, step.read_limit_seconds) if self._job.read else None,
        )
        self._moved_nbytes += step.nbytes
        self._left_nbytes = max(0, self._left_nbytes - step.nbytes)
        self._watcher.turn(turn, self._progress())
        return turn

    def _measured(self, step: Step, write: bool, limit_seconds: float | None) -> Measurement:
        loops = [
            self.drives.measure(step.settings, write, step.nbytes, limit_seconds)
            for _ in range(self._job.loops)
        ]
        return Measurement(
            sum(each.nbytes for each in loops),
            sum(each.seconds for each in loops),
            sum(each.cpu_seconds for each in loops),
            any(each.stopped for each in loops),
            tuple(map(sum, zip(*(each.drive_seconds for each in loops), strict=True))),
        )

    def _progress(self) -> Progress:
        if self._begin is None:
            ways = (self._job.read + self._job.write) * self._job.loops
            return Progress(0.0, ways * self._left_nbytes / _GUESSED_RATE)
        seconds = time.perf_counter() - self._begin
        left = seconds * self._left_nbytes / max(self._moved_nbytes, 1)
        return Progress(seconds / max(seconds + left, 1e-9), left)


def _default_of(space: Space) -> Settings:
    """Return the settings of those who give none: what is stored must be better than these, whatever is swept."""
    settings = default_settings()
    return dataclasses.replace(settings, engine=CUFILE) if space.engine == (CUFILE,) else settings


def _suitable_nbytes(job: Job) -> int:
    """Return a file size that takes long enough to be timed, and leaves the drives and the memory room for others."""
    largest = min(largest_nbytes(job.folders, gpu=job.gpu), _LARGEST_NBYTES)
    probe = max(SMALLEST_NBYTES, min(_PROBE_NBYTES, largest))
    with Drives(job.folders, probe, gpu=job.gpu, gds=job.gds) as drives:
        settings = _default_of(job.space)
        drives.measure(settings, True, probe)
        measured = [drives.measure(settings, write, probe) for write in (True, False)]
    rate = max(each.rate for each in measured) / len(job.folders)
    wanted = min(largest, max(int(rate * _MEASURED_SECONDS), _ENOUGH_NBYTES))
    nbytes = SMALLEST_NBYTES
    while 2 * nbytes <= wanted:
        nbytes *= 2
    return nbytes


def _warnings(job: Job, drives: Drives, file_systems: list[profiles.FileSystem]) -> list[str]:
    warnings = [
        f"{folder} is in memory ({system.type}): nothing is stored for it"
        for folder, system in zip(job.folders, file_systems, strict=True)
        if system.type in _IN_MEMORY
    ]
    if not warnings and not drives.direct:
        warnings.append(
            "direct I/O does not work here: writes include making them durable, and reads may come from a cache"
        )
    if drives.nbytes < _ENOUGH_NBYTES:
        size = format_nbytes(drives.nbytes)
        warnings.append(
            f"with {size} of data only, the figures are rough (more free space or memory helps)"
        )
    return warnings


# Profiles


def _store(job: Job) -> Path | None:
    """Return the file to store a profile in; None where that is not wanted."""
    path = runtime.profiles_path()
    return None if path is None or job.space.engine == (CUFILE,) else Path(path)


def _why_unsaved(job: Job, save: bool) -> list[str]:
    if not save:
        return []
    if job.space.engine == (CUFILE,):
        return ["not stored: gds_handle takes its settings from you"]
    return ["not stored: TENSORFERRY_PROFILES=0 switches profiles off"]


def _stored_settings(store: Path | None, file_systems: list[profiles.FileSystem]) -> list[Settings]:
    """Return what is stored of the file systems: profiles that must prove themselves again, or are dropped."""
    kept = [] if store is None else profiles.load(store)
    found = [profiles.profile_of(each, kept) for each in file_systems]
    return list(dict.fromkeys(profile.settings for profile in found if profile is not None))


def _stored(result: Result, store: Path) -> Result:
    """Store what is proven to be better for all file systems that are drives; drop what is not."""
    stored, dropped = [], []
    found = {
        "gain": dataclasses.asdict(result.found.gain) if result.found.gain else None,
        "memory": "gpu" if result.job.gpu else "host",
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tensorferry": tensorferry.__version__,
    }
    try:
        for number, system in enumerate(result.file_systems):
            if result.found.chosen != result.found.default and system.type not in _IN_MEMORY:
                rates = {"rates": result.rates(number)}
                profile = profiles.Profile(system, result.found.chosen, rates | found)
                storing.save(store, profile)
                stored.append(system.mount_point)
            elif storing.forget(store, system):
                dropped.append(system.mount_point)
    except (OSError, ValueError) as error:  # what was found is still worth printing
        reason = f"{store}: {getattr(error, 'strerror', None) or error}"
        return dataclasses.replace(result, not_stored=reason)
    return dataclasses.replace(
        result,
        stored_for=list(dict.fromkeys(stored)),
        dropped_for=list(dict.fromkeys(dropped)),
    )
