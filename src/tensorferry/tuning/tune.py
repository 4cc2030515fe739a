"""Tuning: measures the drives behind folders, and finds settings that are proven to be faster than the default.

There is a separate decision for each drive, each direction (read or write) and each kind of memory (host or GPU).
Candidates are the settings that are compared with the default settings.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.base.mounts import mount_or_none
from tensorferry.errors import EngineUnavailableError
from tensorferry.tuning.candidates import candidates, common, default_settings
from tensorferry.tuning.deciding import Decision, decide
from tensorferry.tuning.drive import Drive, largest_nbytes
from tensorferry.tuning.gpus import CUFILE
from tensorferry.tuning.machine.storage import IN_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tensorferry.transfer.settings import Settings

_MIB = 1 << 20
SMALLEST_NBYTES = 16 * _MIB
SECONDS = 45.0  # the time of measurements for each drive, both directions together
QUICK_SECONDS = 10.0

# The file size is what the drive transfers in this time, if there is enough space. It should fill the queues several
# times.
_MEASURED_SECONDS = 0.02
_ENOUGH_NBYTES, _LARGEST_NBYTES = 64 * _MIB, 1024 * _MIB
_PROBES = 3
_DOZEN = 12  # with more candidates than this, the time for measurements is increased in proportion


@dataclass(frozen=True)
class Job:
    """The parameters of a tuning."""

    folders: tuple[Path, ...]
    directions: tuple[str, ...] = ("write", "read")
    candidates: tuple[Settings, ...] = ()  # empty: the default candidates, about a dozen
    nbytes: int | None = None  # the size of each file; None: chosen by the drive's speed
    # The time of measurements for each folder, with up to a dozen candidates.
    seconds: float = SECONDS
    gpus: tuple[int | None, ...] = (None,)  # assigned to the folders in turn; None: host memory
    gds: bool = False  # transfer GPU memory as gds_handle does
    cufile: bool = False  # gds_handle uses cuFile, which bypasses host memory

    @property
    def folder_seconds(self) -> float:
        """The time of measurements for each folder, which is longer with many candidates."""
        return self.seconds * max(1.0, len(self.candidates) / _DOZEN)


@dataclass(frozen=True)
class Finding:
    """The decision for one direction of one folder's drive."""

    folder: Path
    file_system: str  # its type
    direction: str
    memory: str
    decision: Decision
    rates: dict[str, float]  # the rates of the chosen settings, in bytes per second
    default_rates: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        decision = self.decision
        return {
            "folder": str(self.folder),
            "file_system": self.file_system,
            "direction": self.direction,
            "memory": self.memory,
            "settings": decision.chosen._asdict(),
            "nominee": decision.nominee and decision.nominee._asdict(),
            "gain_over_default": decision.measured(),
            "rates": self.rates,
            "default_rates": self.default_rates,
        }


@dataclass
class Result:
    """The results for all folders."""

    job: Job
    default: Settings
    found: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    measurements: list[dict[str, Any]] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        """The settings for programs that use the same settings for everything, such as DeepSpeed."""
        decisions = [each.decision for each in self.found]
        speedups = [each.speedups for each in decisions]
        return common(self.default, speedups, [each.chosen for each in decisions])

    def deepspeed(self) -> dict[str, Any]:
        """Return the section for DeepSpeed's configuration."""
        more = {"use_gds": True} if self.job.gds else {}
        return {"aio": self.settings.as_deepspeed() | more}

    def rates(self) -> dict[str, dict[str, float]]:
        """Return the total bytes per second of all drives with the chosen settings, for each direction."""
        return {
            direction: {
                name: sum(each.rates[name] for each in self.found if each.direction == direction)
                for name in ("median", "low", "high")
            }
            for direction in self.job.directions
        }

    def as_json(self) -> dict[str, Any]:
        """Return a dict for JSON. Rates are in bytes per second."""
        names = ("seconds", "warnings", "measurements")
        return {name: getattr(self, name) for name in names} | {
            "tensorferry": tensorferry.__version__,
            "default": self.default._asdict(),
            "settings": self.settings._asdict(),
            "deepspeed": self.deepspeed(),
            "environment": self.settings.as_environment(),
            "rates": self.rates(),
            "found": [each.as_dict() for each in self.found],
        }


def tune(job: Job, on_progress: Callable[[str, int, int], None] = lambda *_: None) -> Result:
    """Find settings that are faster than the default on the drives behind folders.

    Parameters
    ----------
    job : Job
        The parameters.
    on_progress : callable
        Called after each step with a description, the share that is done, and the total, in percent of a direction.

    Raises
    ------
    OSError
        A folder cannot be written, a disk is full, or a drive fails.
    MemoryError
        The memory for the data cannot be allocated.
    """
    begin = time.perf_counter()
    default = default_settings()
    if job.cufile:
        default = default._replace(engine=CUFILE)
    result = Result(job, default)
    chosen: dict[tuple[int, int | None], Path] = {}
    for number, folder in enumerate(job.folders):
        drive = folder.stat().st_dev, job.gpus[number % len(job.gpus)]
        if chosen.setdefault(drive, folder) is not folder:
            result.warnings.append(f"{folder}: skipped, because its file system is tuned already")
    count = len(job.directions)
    on_progress("preparing", 0, 1)
    for number, ((_, gpu), folder) in enumerate(chosen.items()):

        def tell(direction: str, share: float, folder: Path = folder, number: int = number) -> None:
            done = number * count + job.directions.index(direction) + share
            on_progress(f"{folder}: {direction}", round(100 * done), 100 * count * len(chosen))

        mount = mount_or_none(folder)
        _tune_folder(result, folder, mount["type"] if mount else "unknown", gpu, tell)
    result.seconds = time.perf_counter() - begin
    return result


def _tune_folder(
    result: Result,
    folder: Path,
    system: str,
    gpu: int | None,
    tell: Callable[[str, float], None],
) -> None:
    job, default = result.job, result.default
    nbytes = job.nbytes or _suitable_nbytes(folder, gpu, job, default)
    with Drive(folder, nbytes, gpu, gds=job.gds) as drive:
        # This write makes the file system allocate all blocks: reads of unwritten blocks would be too fast.
        drive.measure(default, "write")
        drive.samples.clear()
        result.warnings += _warnings(folder, system, drive)
        tried = _usable(job.candidates or candidates(default), drive, result.warnings)
        seconds = job.folder_seconds / len(job.directions)
        for direction in job.directions:
            told = functools.partial(tell, direction)
            told(0.0)
            measure = functools.partial(drive.measure, direction=direction)
            decision = decide(tried, default, measure, seconds, told)
            rates = [drive.rates(each, direction) or {} for each in (decision.chosen, default)]
            use = direction, drive.memory
            result.found.append(Finding(folder, system, *use, decision, *rates))
        result.measurements += [{"folder": str(folder)} | each for each in drive.measurements()]


def _usable(tried: Sequence[Settings], drive: Drive, warnings: list[str]) -> list[Settings]:
    """Return the settings with an available engine. Each is tried with one read, which also warms up."""
    found = []
    for settings in tried:
        try:
            drive.measure(settings, "read")
        except EngineUnavailableError as refusal:
            warnings.append(f"skipped: {settings}: {refusal}")
        else:
            found.append(settings)
    drive.samples.clear()
    return found


def _suitable_nbytes(folder: Path, gpu: int | None, job: Job, default: Settings) -> int:
    """Return a file size that takes long enough to be measured, and leaves space and memory for other programs."""
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


def _warnings(folder: Path, system: str, drive: Drive) -> list[str]:
    warnings = []
    if system in IN_MEMORY:
        warnings.append(f"{folder} is in memory ({system})")
    elif not drive.direct:
        warnings.append(
            f"{folder}: direct I/O does not work: writes include a sync, and reads may come from a cache"
        )
    if drive.nbytes < _ENOUGH_NBYTES:
        mib = drive.nbytes // _MIB
        warnings.append(
            f"{folder}: with only {mib} MiB of data, the figures are inaccurate (remedy: more free space or memory)"
        )
    return warnings
