"""Tuning: from folders to the settings that suit their drives, to a profile that is used from then on."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tensorferry
from tensorferry import runtime
from tensorferry.tuning import profiles
from tensorferry.tuning.drive import Drives, Measurement, largest_nbytes
from tensorferry.tuning.gpus import CUFILE
from tensorferry.tuning.journal import Journal
from tensorferry.tuning.race import Found, Step, Turn, race, sweep
from tensorferry.tuning.sizes import format_nbytes
from tensorferry.tuning.space import Space, default_settings

if TYPE_CHECKING:
    from tensorferry.tuning.settings import Settings

_MIB = 1 << 20
SMALLEST_NBYTES = 16 * _MIB

# The file is as large as the drive moves in so long, as far as there is room: long enough to be timed well. At least
# it should hold full queues.
_MEASURED_SECONDS = 0.3
_ENOUGH_NBYTES = 128 * _MIB
_PROBE_NBYTES = 64 * _MIB
_LARGEST_NBYTES = 4096 * _MIB


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

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON knows it: two jobs with the same one may share measurements."""
        content = dataclasses.asdict(self)
        content["folders"] = [str(folder) for folder in self.folders]
        content["tensorferry"] = tensorferry.__version__
        plain: dict[str, Any] = json.loads(json.dumps(content))
        return plain


class Watcher(Protocol):
    """Who looks on."""

    def stage(self, name: str, points: int, rounds: int) -> None:
        """Hear that a stage begins."""

    def turn(self, step: Step, turn: Turn) -> None:
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
    resumed: int
    saved: Path | None = None
    not_saved: str | None = None  # why it could not be stored
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON knows it; rates are in bytes a second."""
        found = self.found
        return {
            "tensorferry": tensorferry.__version__,
            "job": self.job.as_json(),
            "file_systems": [dataclasses.asdict(each) for each in self.file_systems],
            "nbytes": self.nbytes,
            "direct": self.direct,
            "seconds": self.seconds,
            "settings": dataclasses.asdict(found.chosen),
            "deepspeed": self.deepspeed(),
            "rates": self.rates(),
            "gain_over_default": dataclasses.asdict(found.gain()),
            "fastest": dataclasses.asdict(found.fastest),
            "within_noise": [dataclasses.asdict(settings) for settings in found.within_noise],
            "turns": [dataclasses.asdict(turn) for turn in found.turns],
            "warnings": self.warnings,
        }

    def deepspeed(self) -> dict[str, Any]:
        """Return what DeepSpeed's configuration should have."""
        more = {"use_gds": True} if self.job.gds else {}
        return {"aio": self.found.chosen.as_deepspeed() | more}

    def rates(self) -> dict[str, Any]:
        """Return median, confidence interval and confidence of the chosen settings' rates, in bytes a second."""
        intervals = {
            name: self.found.interval(self.found.chosen, name) for name in ("write", "read")
        }
        return {name: dataclasses.asdict(each) for name, each in intervals.items() if each}


def tune(
    job: Job,
    watcher: Watcher,
    *,
    journal_path: Path | None = None,
    keep_journal: bool = False,
    resume: bool = True,
    save: bool = True,
) -> Result:
    """Find the settings that suit the drives behind some folders, and keep them as a profile.

    Parameters
    ----------
    job : Job
        What to tune.
    watcher : Watcher
        Hears of each measurement.
    journal_path : Path, optional
        Where measurements are kept until the end; by default in the user's state folder.
    keep_journal : bool
        Leave it there after success.
    resume : bool
        Go on with an unfinished run of the same job.
    save : bool
        Store the profile.

    Raises
    ------
    OSError
        A folder or the journal cannot be written, a disk is full, or a drive fails.
    MemoryError
        There is no memory for the data.
    """
    begin = time.perf_counter()
    file_systems = [profiles.file_system_of(folder) for folder in job.folders]
    with ExitStack() as resources:
        journal = resources.enter_context(_journal(resources, job, journal_path, resume))
        nbytes = job.nbytes or _suitable_nbytes(job, journal)
        drives = resources.enter_context(Drives(job.folders, nbytes, gpu=job.gpu, gds=job.gds))
        drives.measure(default_settings(), True, nbytes)  # from now on all of it is real
        points = job.space.points(nbytes)
        resumed = journal.replayed
        search = sweep if job.full else race
        runner = _Runner(job, drives, journal, watcher)
        found = search(points, _default_of(job.space), nbytes, runner)
        result = Result(
            job,
            found,
            file_systems,
            nbytes,
            drives.direct,
            time.perf_counter() - begin,
            resumed,
            warnings=_warnings(job, drives, file_systems),
        )
        if save:
            result = _save(result)
        journal.finish(keep=keep_journal)
    return result


def default_journal_path(job: Job) -> Path:
    """Return where a job's measurements are kept while it runs: one file for each different job."""
    folder = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    name = hashlib.sha256(json.dumps(job.as_json(), sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / "tensorferry" / f"tune-{name}.jsonl"


def _journal(resources: ExitStack, job: Job, path: Path | None, resume: bool) -> Journal:
    """Open the journal; where the user's state folder cannot be written, one that goes with this run."""
    if path is not None:
        return Journal(path, job.as_json(), resume=resume)
    try:
        return Journal(default_journal_path(job), job.as_json(), resume=resume)
    except BlockingIOError:
        raise
    except OSError:
        folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="tensorferry-tune-"))
        return Journal(Path(folder, "journal.jsonl"), job.as_json())


class _Runner:
    """Measures steps for the search: looks into the journal first, and keeps there what is new."""

    def __init__(self, job: Job, drives: Drives, journal: Journal, watcher: Watcher) -> None:
        self._job = job
        self._drives = drives
        self._journal = journal
        self._watcher = watcher

    def begin(self, stage: str, points: int, rounds: int) -> None:
        self._watcher.stage(stage, points, rounds)

    def __call__(self, step: Step) -> Turn:
        turn = Turn(
            step.settings,
            step.nbytes,
            self._measured(step, "write", step.write_limit_seconds) if self._job.write else None,
            self._measured(step, "read", step.read_limit_seconds) if self._job.read else None,
        )
        self._watcher.turn(step, turn)
        return turn

    def _measured(self, step: Step, action: str, limit_seconds: float | None) -> Measurement:
        measured = self._journal.find(step, action)
        if measured is None:
            measured = _total(
                self._drives.measure(step.settings, action == "write", step.nbytes, limit_seconds)
                for _ in range(self._job.loops)
            )
            self._journal.add(step, action, measured)
        return measured


def _total(measurements: Any) -> Measurement:
    nbytes, seconds, cpu_seconds, stopped = 0, 0.0, 0.0, False
    for each in measurements:
        nbytes += each.nbytes
        seconds += each.seconds
        cpu_seconds += each.cpu_seconds
        stopped = stopped or each.stopped
    return Measurement(nbytes, seconds, cpu_seconds, stopped)


def _default_of(space: Space) -> Settings:
    """Return the default settings, on an engine that is swept."""
    settings = default_settings()
    if settings.engine in space.engine:
        return settings
    return dataclasses.replace(settings, engine=space.engine[0])


def _suitable_nbytes(job: Job, journal: Journal) -> int:
    """Return a file size that takes long enough to be timed, and leaves the drives and the memory room for others."""
    known = journal.facts.get("nbytes")
    if isinstance(known, int) and SMALLEST_NBYTES <= known <= _LARGEST_NBYTES:
        return known
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
    journal.keep_fact("nbytes", nbytes)
    return nbytes


def _warnings(job: Job, drives: Drives, file_systems: list[profiles.FileSystem]) -> list[str]:
    warnings = []
    for folder, system in zip(job.folders, file_systems, strict=True):
        if system.type in ("tmpfs", "ramfs"):
            warnings.append(f"{folder} is in memory ({system.type}): there is no drive to tune for")
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


def _save(result: Result) -> Result:
    if result.found.chosen.engine == CUFILE:
        return dataclasses.replace(
            result,
            warnings=[*result.warnings, "not stored: gds_handle takes its settings from you"],
        )
    path = runtime.profiles_path()
    if path is None:
        return dataclasses.replace(
            result,
            warnings=[*result.warnings, "not stored: TENSORFERRY_PROFILES=0 switches profiles off"],
        )
    found = {
        "rates": result.rates(),
        "memory": "gpu" if result.job.gpu else "host",
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tensorferry": tensorferry.__version__,
    }
    try:
        for file_system in result.file_systems:
            profile = profiles.Profile(file_system, result.found.chosen, found)
            profiles.save(Path(path), profile)
    except OSError as error:  # what was found is still worth printing
        return dataclasses.replace(result, not_saved=f"{path}: {error.strerror}")
    return dataclasses.replace(result, saved=Path(path))
