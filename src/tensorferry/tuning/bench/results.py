"""What a benchmark found: per process and together, as data, JSON and CSV. A GB is 10^9 bytes."""

from __future__ import annotations

import csv
import io
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorferry
from tensorferry.tuning import machine

if TYPE_CHECKING:
    from tensorferry.tuning.bench.arguments import Job, Operation
    from tensorferry.tuning.bench.task import Loop

GB = 1e9
PERCENTILES = ("p50", "p90", "p99", "p99.9")


@dataclass(frozen=True)
class ProcessResult:
    """The measured loops of one process. Latencies are those of blocks, in microseconds."""

    process: int
    folder: str
    settings: dict[str, Any]  # those in use
    nbytes: int  # in each loop
    loops: list[Loop]
    latency_microseconds: dict[str, float] | None = None
    gpu: dict[str, Any] | None = None  # how bytes of a GPU went, warm-up included


@dataclass(frozen=True)
class Summary:
    """Figures of one process, or of all together."""

    loops: int
    nbytes: int  # in all loops
    seconds: float  # of all loops
    gb_per_second: list[float] = field(repr=False)  # of each loop
    gb_per_second_median: float
    gb_per_second_total: float  # all bytes over all seconds
    cpu_seconds_per_gb: float
    peak_growth_nbytes: int | None  # memory besides the buffer and what was there before
    latency_microseconds: dict[str, float] | None


@dataclass(frozen=True)
class Result:
    """One way, reading or writing: the loops that count, in all processes."""

    operation: Operation
    way: str
    processes: list[ProcessResult]

    @property
    def seconds(self) -> list[float]:
        """How long each loop took from the first process's start to the last one's end."""
        return _seconds(self.processes)

    @property
    def nbytes(self) -> int:
        """Bytes that all processes together move in each loop."""
        return sum(process.nbytes for process in self.processes)

    @property
    def gpu(self) -> dict[str, Any] | None:
        """How bytes of GPUs went in all processes: by way of host memory, or by cuFile, and how that did it."""
        known = [p.gpu for p in self.processes if p.gpu]
        names = dict.fromkeys(name for each in known for name in each)
        together = {name: sum(each.get(name, 0) for each in known) for name in names}
        if "compat" in together:
            together["compat"] = bool(together["compat"])
        return together or None

    @property
    def latency_microseconds(self) -> dict[str, float] | None:
        """Percentiles of the process that was slowest at each."""
        return _slowest(self.processes)

    def summary(self, process: ProcessResult | None = None) -> Summary:
        """Return the figures of one process, or of all together."""
        processes = self.processes if process is None else [process]
        seconds = _seconds(processes)
        nbytes = sum(each.nbytes for each in processes)
        speeds = [nbytes / GB / max(each, 1e-9) for each in seconds]
        in_all = nbytes * len(seconds)
        peaks = [[loop.peak_growth_nbytes for loop in each.loops] for each in processes]
        growths = [max(known) for each in peaks if (known := [g for g in each if g is not None])]
        return Summary(
            loops=len(seconds),
            nbytes=in_all,
            seconds=sum(seconds),
            gb_per_second=speeds,
            gb_per_second_median=statistics.median(speeds),
            gb_per_second_total=in_all / GB / max(sum(seconds), 1e-9),
            cpu_seconds_per_gb=sum(loop.cpu_seconds for each in processes for loop in each.loops)
            / (in_all / GB),
            peak_growth_nbytes=sum(growths) if growths else None,
            latency_microseconds=_slowest(processes),
        )

    def summaries(self) -> list[tuple[ProcessResult | None, Summary]]:
        """Return the figures of each process, and at last, beside None, those of all."""
        return [(each, self.summary(each)) for each in (*self.processes, None)]


def _seconds(processes: list[ProcessResult]) -> list[float]:
    return [
        max(loop.ended for loop in loops) - min(loop.started for loop in loops)
        for loops in zip(*(process.loops for process in processes), strict=True)
    ]


def _slowest(processes: list[ProcessResult]) -> dict[str, float] | None:
    known = [p.latency_microseconds for p in processes if p.latency_microseconds]
    found = {
        name: max(percentiles[name] for percentiles in known)
        for name in PERCENTILES
        if known and all(name in percentiles for percentiles in known)
    }
    return found or None


@dataclass(frozen=True)
class Results:
    """All that a benchmark found."""

    job: Job
    results: list[Result]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        folders = dict.fromkeys(place.folder for place in self.job.places)
        return {
            "tensorferry": tensorferry.__version__,
            "machine": {str(folder): machine.describe(folder) for folder in folders},
            "job": self.job.as_dict(),
            "notes": self.notes,
            "results": [
                {
                    "operation": result.operation,
                    "way": result.way,
                    "settings": result.processes[0].settings,
                    "gpu": result.gpu,
                    "all": vars(result.summary()),
                    # What is summed up takes the place of what it is of.
                    "processes": [vars(p) | vars(result.summary(p)) for p in result.processes],
                }
                for result in self.results
            ],
        }

    def as_csv(self) -> str:
        """Return a line for each process of each result, and one for all together."""
        columns = ["loops", "nbytes", "seconds", "gb_per_second_median", "gb_per_second_total"]
        columns += ["cpu_seconds_per_gb", "peak_growth_nbytes"]
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        latencies = [f"latency_{name}_microseconds" for name in PERCENTILES]
        writer.writerow(["operation", "way", "process", "folder", *columns, *latencies])
        for result in self.results:
            for process, summary in result.summaries():
                whose = ["all", ""] if process is None else [process.process, process.folder]
                latency = summary.latency_microseconds or {}
                writer.writerow(
                    [result.operation, result.way, *whose]
                    + [getattr(summary, name) for name in columns]
                    + [latency.get(name) for name in PERCENTILES]
                )
        return lines.getvalue()
