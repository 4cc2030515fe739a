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
    from collections.abc import Sequence

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

    @property
    def seconds(self) -> list[float]:
        """How long each loop took."""
        return [loop.seconds for loop in self.loops]


@dataclass(frozen=True)
class Result:
    """One way, reading or writing: the loops that count, in all processes."""

    operation: Operation
    way: str
    processes: list[ProcessResult]

    @property
    def seconds(self) -> list[float]:
        """How long each loop took from the first process's start to the last one's end."""
        return [
            max(loop.ended for loop in loops) - min(loop.started for loop in loops)
            for loops in zip(*(process.loops for process in self.processes), strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that all processes together move in each loop."""
        return sum(process.nbytes for process in self.processes)

    @property
    def gpu(self) -> dict[str, Any] | None:
        """How bytes of GPUs went in all processes: by way of host memory, or by cuFile, and how that did it."""
        known = [p.gpu for p in self.processes if p.gpu]
        if not known:
            return None
        names = dict.fromkeys(name for each in known for name in each)
        return {
            name: any(each.get(name) for each in known)
            if name == "compat"
            else sum(each[name] for each in known)
            for name in names
        }

    @property
    def latency_microseconds(self) -> dict[str, float] | None:
        """Percentiles of the process that was slowest at each."""
        known = [p.latency_microseconds for p in self.processes if p.latency_microseconds]
        if not known:
            return None
        return {
            name: max(percentiles[name] for percentiles in known)
            for name in PERCENTILES
            if all(name in percentiles for percentiles in known)
        }

    def summary(self, process: ProcessResult | None = None) -> Summary:
        """Return the figures of one process, or of all together."""
        if process is None:
            return Summary.of(self.nbytes, self.seconds, self.processes, self.latency_microseconds)
        return Summary.of(process.nbytes, process.seconds, [process], process.latency_microseconds)


@dataclass(frozen=True)
class Summary:
    """Figures of one process, or of all together."""

    loops: int
    nbytes: int  # in all loops
    seconds: float  # of all loops
    gb_per_second: list[float] = field(repr=False)  # of each loop
    gb_per_second_median: float = 0.0
    gb_per_second_total: float = 0.0  # all bytes over all seconds
    cpu_seconds_per_gb: float = 0.0
    peak_growth_nbytes: int | None = None  # memory besides the buffer and what was there before
    latency_microseconds: dict[str, float] | None = None

    @classmethod
    def of(
        cls,
        nbytes: int,
        seconds: Sequence[float],
        processes: Sequence[ProcessResult],
        latency: dict[str, float] | None,
    ) -> Summary:
        """Make it of loops of nbytes each that took these seconds."""
        speeds = [nbytes / GB / max(s, 1e-9) for s in seconds]
        total_nbytes = nbytes * len(seconds)
        cpu_seconds = sum(loop.cpu_seconds for p in processes for loop in p.loops)
        growths = [
            max(known)
            for p in processes
            if (known := [g for loop in p.loops if (g := loop.peak_growth_nbytes) is not None])
        ]
        return cls(
            loops=len(seconds),
            nbytes=total_nbytes,
            seconds=sum(seconds),
            gb_per_second=speeds,
            gb_per_second_median=statistics.median(speeds),
            gb_per_second_total=total_nbytes / GB / max(sum(seconds), 1e-9),
            cpu_seconds_per_gb=cpu_seconds / (total_nbytes / GB),
            peak_growth_nbytes=sum(growths) if growths else None,
            latency_microseconds=latency,
        )


@dataclass(frozen=True)
class Results:
    """All that a benchmark found."""

    job: Job
    results: list[Result]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "tensorferry": tensorferry.__version__,
            "machine": {
                str(folder): machine.describe(folder)
                for folder in dict.fromkeys(place.folder for place in self.job.places)
            },
            "job": self.job.as_dict(),
            "notes": self.notes,
            "results": [
                {
                    "operation": result.operation,
                    "way": result.way,
                    "settings": result.processes[0].settings,
                    "gpu": result.gpu,
                    "all": vars(result.summary()),
                    "processes": [
                        {
                            "process": p.process,
                            "folder": p.folder,
                            "settings": p.settings,
                            "gpu": p.gpu,
                            **vars(result.summary(p)),
                        }
                        for p in result.processes
                    ],
                }
                for result in self.results
            ],
        }

    def as_csv(self) -> str:
        """Return a line for each process of each result, and one for all together."""
        columns = (
            "loops",
            "nbytes",
            "seconds",
            "gb_per_second_median",
            "gb_per_second_total",
            "cpu_seconds_per_gb",
            "peak_growth_nbytes",
        )
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        latencies = [f"latency_{name}_microseconds" for name in PERCENTILES]
        writer.writerow(["operation", "way", "process", "folder", *columns, *latencies])
        for result in self.results:
            rows = [(str(p.process), p.folder, result.summary(p)) for p in result.processes]
            for process, folder, summary in [*rows, ("all", "", result.summary())]:
                latency = summary.latency_microseconds or {}
                writer.writerow(
                    [result.operation, result.way, process, folder]
                    + [getattr(summary, name) for name in columns]
                    + [latency.get(name) for name in PERCENTILES]
                )
        return lines.getvalue()
