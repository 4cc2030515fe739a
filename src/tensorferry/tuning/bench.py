"""The benchmark of ``tensorferry bench``: the throughput and the cost of writing and reading files.

Several processes, each with its own memory and file (module ``moving``), begin each loop at the same time. A loop is
one transfer of the file. A method is a way to transfer it: tensorferry's handles or files, torch, plain Python, or fio.
The methods are measured alternately: each round has one loop of every method. The first rounds warm up.
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

Files = dict[str, list[Path]]  # the files of one process by operation; the loops use them in turn

_TASK = "tensorferry.tuning.moving:Task"
_PYTHON, _FIO = "python", "fio"
_SECTOR_NBYTES = 4096


class BenchError(Exception):
    """The benchmark failed. The message has the reason and a remedy. All files and processes have been removed."""


@dataclass(frozen=True)
class Place:
    """The folder of one process, and the number of its GPU, which is ignored unless the job uses GPUs."""

    folder: Path
    device: int


@dataclass(frozen=True)
class Job:
    """The parameters of a benchmark. There is one process for each place."""

    places: tuple[Place, ...]
    operations: tuple[str, ...] = ("write", "read")
    io_nbytes: int = 1 << 30
    engine: str = "aio_handle"
    settings: dict[str, Any] = field(default_factory=dict)  # the explicit settings of aio_handle
    loops: int = 3
    warmup_loops: int = 1
    include_warmup_time: bool = False
    different_file_each_iteration: bool = False
    validate: bool = False
    memory: str = "locked"  # the kind of memory; see moving.Memory
    gpu: bool = False  # transfer CUDA tensors; through host memory unless `memory` is "gpu"
    use_gds: bool = False
    compare: bool = False
    keep_files: bool = False

    @property
    def method(self) -> str:
        """The measured method of tensorferry or torch: gds_handle if ``use_gds`` is set, otherwise ``engine``."""
        return "gds_handle" if self.use_gds else self.engine

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        places = [{"folder": str(p.folder), "device": p.device} for p in self.places]
        return dataclasses.asdict(self) | {"places": places}


def problems_of(job: Job) -> list[str]:
    """Return the problems of a job: missing features of the machine, and conflicts. Each line begins with an option."""
    problems = []
    engine = job.settings.get("engine")
    if engine and (reason := tensorferry.engines()[engine]):
        problems.append(f"--io-engine: {engine} is not available: {reason}")
    if job.engine == "torch_io" and importlib.util.find_spec("torch") is None:
        problems.append(f"--engine {job.engine}: {gpus.NO_TORCH}")
    if job.engine == "files":
        refused = {"intra_op_parallelism": "--io-parallel", "single_submit": "--single-submit"}
        problems += [
            f"{option}: is not valid with --engine files, because tensorferry.open() has no such setting"
            for name, option in refused.items()
            if name in job.settings
        ]
    if job.use_gds:
        if not job.gpu:
            problems.append("--use-gds: needs --gpu")
        if job.engine != "aio_handle":
            problems.append(f"--use-gds: gds_handle replaces aio_handle, not {job.engine}")
        if engine is not None:
            problems.append(
                "--io-engine: has no effect with --use-gds, which always uses cuFile (remedy: leave out one of them)"
            )
        if reason := gpus.gds_refusal():
            problems.append(f"--use-gds: {reason}")
    if job.gpu and (reason := gpus.gpu_refusal()):
        problems.append(f"--gpu: {reason}")
    elif job.gpu:
        count = gpus.device_count()
        problems += [
            f"--gpu: device {device} does not exist; torch finds {count}, counted from 0"
            for device in sorted({place.device for place in job.places if place.device >= count})
        ]
    return problems


@dataclass
class Results:
    """The results of a benchmark: a comparison for writes, and one for reads."""

    job: Job
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON. A GB is 10^9 bytes."""
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
    """Return the figures of several loops, of one process or of all processes combined."""
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


def run(job: Job, on_progress: Callable[[str, int, int], None] = lambda *_: None) -> Results:
    """Run a benchmark. Its processes and files are removed in all cases.

    Raises
    ------
    BenchError
        For example, a folder is not writable, the disk is full, memory is insufficient, a process was killed, or a file
        has other content than was written.
    """
    results = Results(job)
    try:
        _check_memory(job)
        for folder in dict.fromkeys(place.folder for place in job.places):
            if mount_of(folder)["type"] in IN_MEMORY:
                results.notes.append(f"{folder} is in memory, so its reads are never cold")
        with _file_paths(job) as files:
            _check_space(job, files)
            with closing([Worker(_TASK, job, *each) for each in enumerate(files)]) as workers:
                for operation in job.operations:
                    _measure(results, workers, operation, files, on_progress)
    except (WorkerError, UnavailableError, OSError, LookupError) as error:
        raise BenchError(str(error)) from error
    return results


def _measure(
    results: Results,
    workers: list[Worker],
    operation: str,
    files: list[Files],
    on_progress: Callable[[str, int, int], None],
) -> None:
    job = results.job
    # tensorferry's method comes first in the first round: it reports the settings that it uses, and fio gets these.
    methods = [job.method, *([_PYTHON] if job.compare else [])]
    on_progress(f"{operation}: preparing", 0, 1)
    for notes in call_all(workers, "begin", operation, methods):
        results.notes += notes
    settings: dict[str, Any] = {}

    def measure(method: str, loop: int) -> Sample:
        try:
            call_all(workers, "prepare", method, operation, loop)
            if method == _FIO:
                return _measure_fio(job, operation, files, loop, settings)
            moved = call_all(workers, "move", method)
        except WorkerError as error:
            # take_turns() would only leave this method out of the later rounds. That is right for fio, which may be
            # missing and raises other errors. A failure of any other method ends the benchmark.
            raise BenchError(str(error)) from error
        settings.update(moved[0]["settings"])
        return _combine(job.io_nbytes, moved)

    kinds: dict[str, Kind] = {job.method: "ours"}
    if job.compare:
        kinds |= {_PYTHON: "peer", _FIO: "fio"}
    contenders = [
        Contender(method, kind, partial(measure, method)) for method, kind in kinds.items()
    ]
    rounds = job.warmup_loops + job.loops
    comparison = take_turns(Comparison(operation, ""), contenders, rounds, on_progress)
    call_all(workers, "end")
    for row in comparison.rows:
        if row.failure is not None:
            results.notes.append(f"without a comparison with {row.label}: {row.failure}")
        if not job.include_warmup_time:
            del row.samples[: job.warmup_loops]
    results.comparisons.append(comparison)
    if not job.keep_files:
        for path in {path for each in files for path in each[operation]}:
            remove(path)


def _combine(nbytes: int, moved: list[dict[str, Any]]) -> Sample:
    """Combine the measurements of all processes. The time is from the first start to the last end."""
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
        # For each percentile, the highest value of all processes.
        latency_microseconds={name: max(each[name] for each in latencies) for name in latencies[0]}
        if latencies
        else None,
    )


def _measure_fio(
    job: Job, operation: str, files: list[Files], loop: int, settings: dict[str, Any]
) -> Sample:
    """Measure fio with the same amount of data, block size, depth and engine as tensorferry's method.

    fio gets buffers that are registered with io_uring and on huge pages, where the machine allows that.
    """
    nbytes = job.io_nbytes // _SECTOR_NBYTES * _SECTOR_NBYTES
    if nbytes == 0:
        raise UnavailableError(
            f"with direct I/O, fio transfers at least {_SECTOR_NBYTES} bytes (remedy: a larger --io-size)"
        )
    ours = Settings.of()._asdict() | settings
    engine = ours["engine"] if ours["engine"] in ("io_uring", "libaio") else "libaio"
    depth = ours["queue_depth"] * ours["intra_op_parallelism"]
    base = fio.Config(engine, min(ours["block_size"], nbytes), depth)
    needed = base.memory_nbytes * len(files)
    config = dataclasses.replace(
        base,
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
    return _combine(nbytes, moved)


@contextlib.contextmanager
def _file_paths(job: Job) -> Iterator[list[Files]]:
    """Yield the files of each process. Remove new files afterwards; with ``keep_files``, only after an error."""
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
        paths = {path for each in files for some in each.values() for path in some}
        new = [path for path in paths if not path.exists()]
        try:
            yield files
        except BaseException:
            for path in new:
                path.unlink(missing_ok=True)
            raise


def _names(job: Job, operation: str, number: int) -> list[str]:
    """Return the names of one process's files for an operation, which are those that ds_io uses."""
    numbered = job.engine in ("aio_handle", "files") or job.different_file_each_iteration
    count = job.warmup_loops + job.loops if job.different_file_each_iteration else 1
    endings = [f"_{loop}" for loop in range(count)] if numbered else [""]
    return [f"_aio_{operation}_{job.io_nbytes}.pt.{number}{ending}" for ending in endings]


def _check_space(job: Job, files: list[Files]) -> None:
    """Raise BenchError if the files do not fit on the disk. Quotas and other writers are noticed only later."""
    needed: Counter[int] = Counter()
    folders = {place.folder.stat().st_dev: place.folder for place in job.places}
    for place, each in zip(job.places, files, strict=True):
        # The files of one operation are removed before those of the next are created, unless they are kept.
        counts = [sum(not path.exists() for path in each[o]) for o in job.operations]
        count = sum(counts) if job.keep_files else max(counts)
        needed[place.folder.stat().st_dev] += count * job.io_nbytes
    for device, nbytes in needed.items():
        free = shutil.disk_usage(folders[device]).free
        if nbytes > free:
            raise BenchError(
                f"{folders[device]}: needs {_format_gib(nbytes)}, but only {_format_gib(free)} are free "
                "(remedy: free some space, or use a smaller --io-size)"
            )


def _check_memory(job: Job) -> None:
    available = available_nbytes()
    # torch.load allocates a second tensor.
    each = (2 if job.engine == "torch_io" else 1) * job.io_nbytes
    needed = each * len(job.places)
    if needed > available:
        raise BenchError(
            f"needs {_format_gib(needed)} of memory ({len(job.places)} x {format_nbytes(each)}), but only "
            f"{_format_gib(available)} are available (remedy: a smaller --io-size, or fewer processes)"
        )


def _format_gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
