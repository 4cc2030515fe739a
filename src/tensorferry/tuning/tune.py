"""Tuning: from folders to what is proven for their drives, to profiles that are used from then on.

Each drive, each direction and each kind of memory is decided on by itself. Where nothing is proven, nothing is stored.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer import profiles, runtime
from tensorferry.tuning import storing
from tensorferry.tuning.candidates import candidates, common, default_settings
from tensorferry.tuning.deciding import Decision, decide
from tensorferry.tuning.drive import Drive, largest_nbytes
from tensorferry.tuning.gpus import CUFILE
from tensorferry.tuning.machine.storage import IN_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tensorferry.transfer.settings import Settings

_MIB = 1 << 20
SMALLEST_NBYTES = 16 * _MIB
SECONDS = 45.0  # for a drive, both directions together
QUICK_SECONDS = 10.0

# A file is as large as the drive moves in so long, as far as there is room: it should fill queues several times.
_MEASURED_SECONDS = 0.02
_ENOUGH_NBYTES, _LARGEST_NBYTES = 64 * _MIB, 1024 * _MIB
_PROBES = 3
_DOZEN = 12


@dataclass(frozen=True)
class Job:
    """What to tune, and how."""

    folders: tuple[Path, ...]
    directions: tuple[str, ...] = ("write", "read")
    candidates: tuple[Settings, ...] = ()  # none: about a dozen
    nbytes: int | None = None  # of each file; None: as the drive's speed asks for
    seconds: float = SECONDS  # of measurements, for each folder
    gpus: tuple[int | None, ...] = (None,)  # whose memory is moved, folder by folder in turn
    gds: bool = False  # as gds_handle does
    cufile: bool = False  # which then moves it past the host's memory


@dataclass(frozen=True)
class Found:
    """What was decided for one direction of one folder's drive."""

    folder: Path
    file_system: profiles.FileSystem
    direction: str
    memory: str
    decision: Decision
    rates: dict[str, float]  # of what was chosen, in bytes a second
    default_rates: dict[str, float]

    def profile(self) -> profiles.Profile | None:
        """Return what is to be stored; None where nothing is."""
        decision = self.decision
        if decision.chosen == decision.default or self.file_system.type in IN_MEMORY:
            return None
        now = datetime.datetime.now(datetime.timezone.utc)
        found = {
            "gain": decision.measured(),
            "rates": self.rates,
            "when": now.isoformat(timespec="seconds"),
            "tensorferry": tensorferry.__version__,
        }
        use = self.direction, self.memory
        return profiles.Profile(self.file_system, decision.chosen, *use, found)

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        decision = self.decision
        return {
            "folder": str(self.folder),
            "file_system": dataclasses.asdict(self.file_system),
            "direction": self.direction,
            "memory": self.memory,
            "settings": dataclasses.asdict(decision.chosen),
            "nominee": decision.nominee and dataclasses.asdict(decision.nominee),
            "gain_over_default": decision.measured(),
            "rates": self.rates,
            "default_rates": self.default_rates,
        }


@dataclass
class Result:
    """What came out, of all folders."""

    job: Job
    default: Settings
    found: list[Found] = field(default_factory=list)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    stored_for: list[str] = field(default_factory=list)  # mount point, direction and memory
    dropped_for: list[str] = field(
        default_factory=list
    )  # had a profile that is not proven any more
    not_stored: str | None = None  # why what was to be stored could not be

    @property
    def settings(self) -> Settings:
        """One answer for programs that take only one, such as DeepSpeed."""
        decisions = [each.decision for each in self.found]
        speedups = [each.speedups for each in decisions]
        return common(self.default, speedups, [each.chosen for each in decisions])

    def deepspeed(self) -> dict[str, Any]:
        """Return what DeepSpeed's configuration should have."""
        more = {"use_gds": True} if self.job.gds else {}
        return {"aio": self.settings.as_deepspeed() | more}

    def rates(self) -> dict[str, dict[str, float]]:
        """Return by direction the bytes in a second of what was chosen, of all drives together."""
        return {
            direction: {
                name: sum(each.rates[name] for each in self.found if each.direction == direction)
                for name in ("median", "low", "high")
            }
            for direction in self.job.directions
        }

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON knows it; rates are in bytes a second."""
        names = ("seconds", "warnings", "measurements", "stored_for", "dropped_for")
        return {name: getattr(self, name) for name in names} | {
            "tensorferry": tensorferry.__version__,
            "default": dataclasses.asdict(self.default),
            "settings": dataclasses.asdict(self.settings),
            "deepspeed": self.deepspeed(),
            "rates": self.rates(),
            "found": [each.as_dict() for each in self.found],
        }


class Progress:
    """How far a run has come: what it does, its share of the whole, and how long the rest takes at most."""

    def __init__(self, job: Job, told: Callable[[Progress], None]) -> None:
        self.what = "preparing"
        self._parts = len(job.folders) * len(job.directions)
        self._done, self._share_of_part = 0, 0.0
        self._expected_seconds = len(job.folders) * job.seconds
        self._begin = time.perf_counter()
        self._told = told
        told(self)

    @property
    def share(self) -> float:
        """The share of the whole that is done."""
        return min(1.0, (self._done + self._share_of_part) / self._parts)

    @property
    def seconds_left(self) -> float:
        """How long the rest takes, if no drive is decided on early."""
        elapsed = time.perf_counter() - self._begin
        guessed = self._expected_seconds * (1 - self.share)
        return (
            max(guessed, elapsed / self.share * (1 - self.share)) if self.share > 0.1 else guessed
        )

    def part(self, what: str) -> Callable[[float], None]:
        """Hear that the next part begins; what is returned is told how far it is."""
        self.what = what
        self._told(self)

        def told(share: float) -> None:
            self._share_of_part = share
            self._told(self)

        return told

    def part_ends(self) -> None:
        """Hear that it is decided, perhaps early."""
        self._done, self._share_of_part = self._done + 1, 0.0


def tune(job: Job, told: Callable[[Progress], None], *, save: bool = True) -> Result:
    """Find what is faster than the default settings on the drives behind some folders, and keep it as profiles.

    Parameters
    ----------
    job : Job
        What to tune.
    told : callable
        Is told of each step.
    save : bool
        Store what is proven, and drop earlier profiles for the same that are not any more.

    Raises
    ------
    OSError
        A folder or the file of profiles cannot be written, a disk is full, or a drive fails.
    MemoryError
        There is no memory for the data.
    """
    begin = time.perf_counter()
    path = runtime.profiles_path()
    store = Path(path) if path is not None and save and not job.cufile else None
    if store is not None:
        storing.check_writable(store)
    default = default_settings()
    if job.cufile:
        default = dataclasses.replace(default, engine=CUFILE)
    result = Result(job, default)
    progress = Progress(job, told)
    seen: list[tuple[profiles.FileSystem, int | None]] = []
    for number, folder in enumerate(job.folders):
        system, gpu = profiles.file_system_of(folder), job.gpus[number % len(job.gpus)]
        if any(system.is_same(other) and gpu == used for other, used in seen):
            result.warnings.append(f"{folder}: left out, of a file system that was named before")
            continue
        seen.append((system, gpu))
        _tune_folder(result, folder, system, gpu, progress)
    if save and job.cufile:
        result.warnings.append("not stored: gds_handle takes its settings from you")
    elif save and path is None:
        result.warnings.append("not stored: TENSORFERRY_PROFILES=0 switches profiles off")
    if store is not None:
        _store(result, store)
    result.seconds = time.perf_counter() - begin
    return result


def _tune_folder(
    result: Result,
    folder: Path,
    system: profiles.FileSystem,
    gpu: int | None,
    progress: Progress,
) -> None:
    job, default = result.job, result.default
    nbytes = job.nbytes or _suitable_nbytes(folder, gpu, job, default)
    with Drive(folder, nbytes, gpu, gds=job.gds) as drive:
        drive.measure(default, "write")  # from now on all of it is real
        drive.samples.clear()
        result.warnings += _warnings(folder, system, drive)
        tried = usable(job.candidates or candidates(default), drive, result.warnings)
        for direction in job.directions:
            part = progress.part(f"{folder}: {direction}")
            decision = decide_for(drive, direction, tried, default, job, part)
            progress.part_ends()
            rates = [drive.rates(each, direction) or {} for each in (decision.chosen, default)]
            use = direction, drive.memory
            result.found.append(Found(folder, system, *use, decision, *rates))
        result.measurements += [{"folder": str(folder)} | each for each in drive.measurements()]


def decide_for(
    drive: Drive,
    direction: str,
    tried: Sequence[Settings],
    default: Settings,
    job: Job,
    told: Callable[[float], None],
) -> Decision:
    """Decide for one direction of a drive, in its share of the time."""
    seconds = job.seconds * max(1.0, len(tried) / _DOZEN) / len(job.directions)
    return decide(tried, default, lambda each: drive.measure(each, direction), seconds, told)


def usable(tried: Sequence[Settings], drive: Drive, warnings: list[str]) -> list[Settings]:
    """Return the settings that can be had here: each is used once, outside of what counts."""
    found = []
    for settings in tried:
        try:
            drive.measure(settings, "read")
        except EngineUnavailableError as refusal:
            warnings.append(f"left out: {settings}: {refusal}")
        else:
            found.append(settings)
    drive.samples.clear()
    return found


def _suitable_nbytes(folder: Path, gpu: int | None, job: Job, default: Settings) -> int:
    """Return a file size that takes long enough to be timed, and leaves the drive and the memory room for others."""
    largest = largest_nbytes(folder, gpu)
    probe = max(SMALLEST_NBYTES, min(_ENOUGH_NBYTES, largest))
    with Drive(folder, probe, gpu, gds=job.gds) as drive:
        drive.measure(default, "write")
        seconds = [drive.measure(default, d) for d in ("write", "read") for _ in range(_PROBES)]
    nbytes = SMALLEST_NBYTES
    wanted = min(
        largest, _LARGEST_NBYTES, max(probe, int(probe * _MEASURED_SECONDS / min(seconds)))
    )
    while 2 * nbytes <= wanted:
        nbytes *= 2
    return nbytes


def _warnings(folder: Path, system: profiles.FileSystem, drive: Drive) -> list[str]:
    warnings = []
    if system.type in IN_MEMORY:
        warnings.append(f"{folder} is in memory ({system.type}): nothing is stored for it")
    elif not drive.direct:
        warnings.append(
            f"{folder}: direct I/O does not work: writes include making them durable, reads may come from a cache"
        )
    if drive.nbytes < _ENOUGH_NBYTES:
        mib = drive.nbytes // _MIB
        warnings.append(
            f"{folder}: with {mib} MiB of data only, the figures are rough (more free space or memory helps)"
        )
    return warnings


def _store(result: Result, store: Path) -> None:
    """Store what is proven for file systems that are drives; drop what is not."""
    for folder in dict.fromkeys(each.folder for each in result.found):
        found = [each for each in result.found if each.folder == folder]
        profiles_found = {(each.direction, each.memory): each.profile() for each in found}
        system = found[0].file_system
        try:
            dropped = storing.store(store, system, profiles_found)
        except (OSError, ValueError) as error:  # what was found is still worth printing
            result.not_stored = f"{store}: {getattr(error, 'strerror', None) or error}"
            return
        stored = [use for use, profile in profiles_found.items() if profile is not None]
        result.stored_for += [f"{system.mount_point}: {' '.join(use)}" for use in stored]
        result.dropped_for += [f"{system.mount_point}: {' '.join(use)}" for use in dropped]
