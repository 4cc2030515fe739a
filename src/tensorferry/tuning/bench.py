"""``tensorferry bench``: how fast files are written and read, by which way, and at what cost.

Processes with memory and a file each (``moving``) start each loop together. Contenders take turns in rounds, a loop of
each in each; the first rounds warm up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.base.checks import format_nbytes
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import fio, gpus, machine
from tensorferry.tuning.machine.limits import available_nbytes
from tensorferry.tuning.machine.storage import IN_MEMORY, mount_of
from tensorferry.tuning.rounds import GB, Comparison, Contender, Row, Sample, take_turns, throughput
from tensorferry.tuning.scratch import remove, scratch_directory
from tensorferry.tuning.workers import UnavailableError, Worker, WorkerError, call_all, closing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorferry.tuning.rounds import Kind

Files = dict[str, list[Path]]  # of one process, by operation; loops go through them in turn

_TASK = "tensorferry.tuning.moving:Task"
_PYTHON, _FIO = "python", "fio"
_SECTOR_NBYTES = 4096


class BenchError(Exception):
    """The machine could not do the job; the message says why and what helps. Nothing is left behind."""


@dataclass(frozen=True)
class Place:
    """Where one process works: a folder, and the GPU that its memory is on, if any."""

    folder: Path
    device: int


@dataclass(frozen=True)
class Job:
    """What a benchmark does: sizes in bytes, a place for each process."""

    places: tuple[Place, ...]
    operations: tuple[str, ...] = ("write", "read")
    io_nbytes: int = 1 << 30
    engine: str = "aio_handle"
    settings: dict[str, Any] = field(default_factory=dict)  # of aio_handle: those that were given
    loops: int = 3
    warmup_loops: int = 1
    include_warmup_time: bool = False
    different_file_each_iteration: bool = False
    validate: bool = False
    memory: str = "locked"  # or "gpu": CUDA tensors go to handles and files as they are
    gpu: bool = False
    use_gds: bool = False
    compare: bool = False
    keep_files: bool = False

    @property
    def way(self) -> str:
        """What is measured: the engine, or the handle that takes its place."""
        return "gds_handle" if self.use_gds else self.engine

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        places = [{"folder": str(p.folder), "device": p.device} for p in self.places]
        return dataclasses.asdict(self) | {"places": places}


def problems_of(job: Job) -> list[str]:
    """Return what this machine lacks for a job, and what does not go together; a line for each, with the option."""
    problems = []
    engine = job.settings.get("engine")
    if engine and (reason := tensorferry.engines()[engine]):
        problems.append(f"--io-engine: {engine} cannot be had here: {reason}")
    if job.engine == "torch_io" and importlib.util.find_spec("torch") is None:
        problems.append(f"--engine {job.engine}: {gpus.NO_TORCH}")
    if job.engine == "files":
        refused = {"intra_op_parallelism": "--io-parallel", "single_submit": "--single-submit"}
        problems += [
            f"{option}: tensorferry.open() has no such setting"
            for name, option in refused.items()
            if name in job.settings
        ]
    if job.use_gds:
        if not job.gpu:
            problems.append("--use-gds: needs --gpu")
        if job.engine != "aio_handle":
            problems.append(
                f"--use-gds: gds_handle takes the place of aio_handle, not of {job.engine}"
            )
        if engine is not None:
            problems.append("--io-engine: gds_handle has an engine of its own, cuFile")
        if reason := gpus.why_no_gds():
            problems.append(f"--use-gds: {reason}")
    if job.gpu and (reason := gpus.why_no_gpu()):
        problems.append(f"--gpu: {reason}")
    elif job.gpu:
        count = gpus.device_count()
        problems += [
            f"--gpu: there is no device {device}; torch finds {count}, counted from 0"
            for device in sorted({place.device for place in job.places if place.device >= count})
        ]
    return problems


@dataclass
class Results:
    """All that a benchmark found: a comparison for writes, one for reads."""

    job: Job
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON; sizes in bytes, a GB is 10^9 of them."""
        folders = dict.fromkeys(place.folder for place in self.job.places)
        return {
            "tensorferry": tensorferry.__version__,
            "machine": {str(folder): machine.describe(folder) for folder in folders},
            "job": self.job.as_dict(),
            "notes": list(dict.fromkeys(self.notes)),
            "results": [
                _result(comparison.name, row, self.job)
                for comparison in self.comparisons
                for row in comparison.rows
                if row.usable
            ],
        }


def _result(operation: str, row: Row, job: Job) -> dict[str, Any]:
    processes = [
        [sample.details["processes"][number] for sample in row.samples]
        for number in range(len(job.places))
    ]
    return {
        "operation": operation,
        "way": row.label,
        "settings": row.samples[-1].details["settings"],
        "gpu": row.samples[-1].details["gpu"],
        "all": summary(row.samples),
        "processes": [
            {"process": number, "folder": str(job.places[number].folder), **summary(samples)}
            for number, samples in enumerate(processes)
        ],
    }


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Return the figures of some loops, of one process or of all together."""
    nbytes, seconds = sum(s.nbytes for s in samples), sum(s.seconds for s in samples)
    growths = [s.peak_growth_nbytes for s in samples if s.peak_growth_nbytes is not None]
    return {
        "loops": len(samples),
        "nbytes": nbytes,
        "seconds": seconds,
        "gb_per_second": [sample.value for sample in samples],
        "gb_per_second_median": statistics.median(sample.value for sample in samples),
        "gb_per_second_total": nbytes / GB / max(seconds, 1e-9),
        "cpu_seconds_per_gb": sum(s.cpu_seconds or 0 for s in samples) / max(nbytes / GB, 1e-9),
        "peak_growth_nbytes": max(growths, default=None),
        "latency_microseconds": samples[-1].details["latency_microseconds"],
    }


def run(job: Job, told: Callable[[str, int, int], None] = lambda *_: None) -> Results:
    """Do a job and return what was measured. Its processes and files are gone afterwards, whatever happens.

    Raises
    ------
    BenchError
        A folder is not writable, the disk is full, memory is short, a process was killed, a file is not what was
        written, ...
    """
    results = Results(job)
    try:
        _check_memory(job)
        for folder in dict.fromkeys(place.folder for place in job.places):
            if mount_of(folder)["type"] in IN_MEMORY:
                results.notes.append(f"{folder} lies in memory: no read is cold there")
        with _places_for_files(job) as files:
            _check_space(job, files)
            with closing([Worker(_TASK, job, *each) for each in enumerate(files)]) as crew:
                for operation in job.operations:
                    _measure(results, crew, operation, files, told)
    except (WorkerError, UnavailableError, OSError, LookupError) as error:
        raise BenchError(str(error)) from error
    return results


def _measure(
    results: Results,
    crew: list[Worker],
    operation: str,
    files: list[Files],
    told: Callable[[str, int, int], None],
) -> None:
    job = results.job
    # Ours comes first: fio gets its settings.
    ways = [job.way, *([_PYTHON] if job.compare else [])]
    told(f"{operation}: preparing", 0, 1)
    for notes in call_all(crew, "begin", operation, ways):
        results.notes += notes
    used: dict[str, Any] = {}
    failures: list[WorkerError] = []

    def measured(way: str, loop: int) -> Sample:
        try:
            call_all(crew, "prepare", way, operation, loop)
            if way == _FIO:
                return _by_fio(job, operation, files, loop, used)
            moved = call_all(crew, "move", way)
        except WorkerError as error:
            failures.append(error)  # of ours and of Python nothing is left out
            raise
        used.update(moved[0]["settings"])
        return _together(job.io_nbytes, moved)

    kinds: dict[str, Kind] = {job.way: "ours"}
    if job.compare:
        kinds |= {_PYTHON: "peer", _FIO: "fio"}
    contenders = [Contender(way, kind, partial(measured, way)) for way, kind in kinds.items()]
    rounds = job.warmup_loops + job.loops
    comparison = take_turns(Comparison(operation, ""), contenders, rounds, told)
    call_all(crew, "end")
    if failures:
        raise failures[0]
    for row in comparison.rows:
        if row.failure is not None:
            results.notes.append(f"not compared with {row.label}: {row.failure}")
        if not job.include_warmup_time:
            del row.samples[: job.warmup_loops]
    results.comparisons.append(comparison)
    if not job.keep_files:
        for path in {path for each in files for path in each[operation]}:
            remove(path)


def _together(nbytes: int, moved: list[dict[str, Any]]) -> Sample:
    """Return what processes took together: from the first one's start to the last one's end."""
    costs = ("cpu_seconds", "peak_growth_nbytes")
    processes = [
        throughput(each["ended"] - each["started"], nbytes, *(each[cost] for cost in costs))
        for each in moved
    ]
    for sample, each in zip(processes, moved, strict=True):
        sample.details["latency_microseconds"] = each["latency_microseconds"]
    seconds = max(each["ended"] for each in moved) - min(each["started"] for each in moved)
    growths = [s.peak_growth_nbytes for s in processes if s.peak_growth_nbytes is not None]
    latencies = [each["latency_microseconds"] for each in moved if each["latency_microseconds"]]
    gpu: Counter[str] = Counter()
    for each in moved:
        gpu.update(each["gpu"] or {})
    together: dict[str, Any] = dict(gpu)
    if "compat" in together:
        together["compat"] = bool(together["compat"])
    return throughput(
        seconds,
        nbytes * len(moved),
        sum(each["cpu_seconds"] for each in moved),
        sum(growths) if growths else None,
        processes=processes,
        settings=moved[0]["settings"],
        gpu=together or None,
        # Percentiles of the process that was slowest at each.
        latency_microseconds={name: max(each[name] for each in latencies) for name in latencies[0]}
        if latencies
        else None,
    )


def _by_fio(
    job: Job, operation: str, files: list[Files], loop: int, used: dict[str, Any]
) -> Sample:
    """Let fio move as much: the same blocks, as many in flight, the same engine, memory as good as can be had."""
    nbytes = job.io_nbytes // _SECTOR_NBYTES * _SECTOR_NBYTES
    if nbytes == 0:
        raise UnavailableError(f"it moves no less than {_SECTOR_NBYTES} bytes past the page cache")
    ours = dataclasses.asdict(Settings()) | used
    engine = ours["engine"] if ours["engine"] in ("io_uring", "libaio") else "libaio"
    depth = ours["queue_depth"] * ours["intra_op_parallelism"]
    plain = fio.Config(engine, min(ours["block_size"], nbytes), depth)
    needed = plain.memory_nbytes * len(files)
    config = dataclasses.replace(
        plain,
        registered=engine == "io_uring" and fio.may_register(needed),
        huge_pages=fio.free_huge_pages_nbytes() >= needed + len(files) * (2 << 20),
    )
    paths = [each[operation][loop % len(each[operation])] for each in files]
    jobs = fio.run(paths, operation, nbytes, config.arguments())
    samples = [fio.sample(each, operation) for each in jobs]
    moved = [
        {"started": 0.0, "ended": sample.seconds, "cpu_seconds": sample.cpu_seconds}
        | {"peak_growth_nbytes": None, "gpu": None, "settings": dataclasses.asdict(config)}
        | {"latency_microseconds": sample.details["latency_microseconds"]}
        for sample in samples
    ]
    return _together(nbytes, moved)


@contextlib.contextmanager
def _places_for_files(job: Job) -> Iterator[list[Files]]:
    """Give each process's files by operation, and remove the new ones: always, or where they are kept, on failure."""
    with contextlib.ExitStack() as stack:
        folders = {place.folder: place.folder for place in job.places}
        if not job.keep_files:
            for folder in folders:
                scratch = scratch_directory(folder, "tensorferry-bench-")
                folders[folder] = stack.enter_context(scratch)
        files = [
            {o: [folders[place.folder] / n for n in _names(job, o, number)] for o in job.operations}
            for number, place in enumerate(job.places)
        ]
        every = {path for each in files for some in each.values() for path in some}
        new = [path for path in every if not path.exists()]
        try:
            yield files
        except BaseException:
            for path in new:
                path.unlink(missing_ok=True)
            raise


def _names(job: Job, operation: str, number: int) -> list[str]:
    """Return the names that ds_io gives its files."""
    numbered = job.engine in ("aio_handle", "files") or job.different_file_each_iteration
    count = job.warmup_loops + job.loops if job.different_file_each_iteration else 1
    endings = [f"_{loop}" for loop in range(count)] if numbered else [""]
    return [f"_aio_{operation}_{job.io_nbytes}.pt.{number}{ending}" for ending in endings]


def _check_space(job: Job, files: list[Files]) -> None:
    """Refuse what cannot fit, before the first byte; quotas and others who write are noticed later."""
    needed: Counter[int] = Counter()
    folders = {place.folder.stat().st_dev: place.folder for place in job.places}
    for place, each in zip(job.places, files, strict=True):
        # One operation's files are gone before the next one's are made, unless they are kept.
        counts = [sum(not path.exists() for path in each[o]) for o in job.operations]
        count = sum(counts) if job.keep_files else max(counts)
        needed[place.folder.stat().st_dev] += count * job.io_nbytes
    for device, nbytes in needed.items():
        free = shutil.disk_usage(folders[device]).free
        if nbytes > free:
            raise BenchError(
                f"{folders[device]}: needs {_rounded(nbytes)}, but only {_rounded(free)} are free; "
                "free some, or use a smaller --io-size"
            )


def _check_memory(job: Job) -> None:
    available = available_nbytes()
    each = (2 if job.engine == "torch_io" else 1) * job.io_nbytes  # torch.load makes its own
    needed = each * len(job.places)
    if needed > available:
        raise BenchError(
            f"needs {_rounded(needed)} of memory ({len(job.places)} x {format_nbytes(each)}), but only "
            f"{_rounded(available)} are available; use a smaller --io-size or fewer processes"
        )


def _rounded(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
