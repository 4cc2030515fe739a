"""Running fio, the standard benchmark for storage, and parsing its report.

fio opens, creates and preallocates its files outside its measured time. A measurement of tensorferry includes these
operations where the measured call performs them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import format_nbytes
from tensorferry.tuning.rounds import MeasurementError, Sample, throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_PERCENTILES = {"p50": "50.000000", "p90": "90.000000", "p99": "99.000000", "p99.9": "99.900000"}


@dataclass(frozen=True)
class Config:
    """A configuration of fio.

    With ``registered``, fio registers its buffers and files with io_uring. With ``huge_pages``, its buffers are on huge
    pages, which must be reserved. With ``direct``, it uses direct I/O.
    """

    engine: str
    block_size: int
    queue_depth: int
    registered: bool = False
    huge_pages: bool = False
    direct: bool = True

    @property
    def memory_nbytes(self) -> int:
        """The size of the buffers of one job in bytes."""
        return self.block_size * self.queue_depth

    @property
    def label(self) -> str:
        """The name of this configuration in tables."""
        words = (
            f"qd{self.queue_depth}" * (self.queue_depth > 1),
            "registered" * self.registered,
            "huge pages" * self.huge_pages,
            "buffered" * (not self.direct),
        )
        return " ".join(word for word in ("fio", self.engine, self._block, *words) if word)

    @property
    def tags(self) -> tuple[str, ...]:
        """The words by which a comparison selects this configuration (see :class:`.rounds.Contender`)."""
        registered = "registered" if self.registered else "unregistered"
        pages = "huge" if self.huge_pages else "small"
        return self.engine, self._block, registered, pages

    def arguments(self) -> list[str]:
        """Return fio's options."""
        return [
            f"--ioengine={self.engine}",
            f"--bs={self.block_size}",
            f"--iodepth={self.queue_depth}",
            f"--direct={int(self.direct)}",
            *(["--fixedbufs", "--registerfiles"] if self.registered else []),
            *(["--iomem=mmaphuge"] if self.huge_pages else []),
        ]

    @property
    def _block(self) -> str:
        return format_nbytes(self.block_size).replace("K", "k")


def installed() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


def version() -> str | None:
    """Return the output of ``fio --version``, or None if fio is not installed."""
    if not installed():
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def run(files: Sequence[Path], kind: str, nbytes: int, arguments: Sequence[str]) -> list[Any]:
    """Run one job for each file, all concurrently, and return the jobs of fio's report.

    Parameters
    ----------
    files : sequence of Path
        The file of each job. fio creates missing files.
    kind : str
        fio's ``rw``: "read", "write", "randread", ...
    nbytes : int
        The size of each file.
    arguments : sequence of str
        Options for all jobs, such as ``--bs=1M``.

    Raises
    ------
    MeasurementError
        fio is not installed, or failed.
    """
    options = [f"--size={nbytes}", f"--rw={kind}", *arguments]
    for number, path in enumerate(files):
        escaped = str(path).replace(":", "\\:")  # a colon separates files
        options += [f"--name=job{number}", f"--filename={escaped}"]
    return jobs_of(options)


def jobs_of(arguments: Sequence[str]) -> list[Any]:
    """Run fio with options, and return the jobs of its report. Options after a ``--name`` apply to that job only.

    Raises
    ------
    MeasurementError
        fio is not installed, or failed.
    """
    if not installed():
        raise MeasurementError("fio is not installed (apt install fio)")
    command = [
        "fio",
        "--output-format=json",
        "--name=global",
        "--fallocate=native",
        "--invalidate=0",  # the benchmark controls the page cache itself
        "--scramble_buffers=0",  # otherwise fio modifies each block before it writes it, which costs CPU time
        "--thread",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise MeasurementError(f"fio failed: {words[0][:200] if words else done.returncode}")
    jobs: list[Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return jobs


def sample(job: dict[str, Any], direction: str) -> Sample:
    """Return the sample for the "read" or "write" part of a job's report."""
    report = job[direction]
    percentiles = report.get("clat_ns", {}).get("percentile", {})
    latency = {
        name: percentiles[key] / 1000 for name, key in _PERCENTILES.items() if key in percentiles
    }
    # The report has the CPU time as percentages of the run time.
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    seconds = max(report["runtime"], 1) / 1000
    return throughput(seconds, report["io_bytes"], cpu, latency_microseconds=latency or None)


def may_register(nbytes: int) -> bool:
    """Return whether RLIMIT_MEMLOCK allows this process to register ``nbytes`` of buffers with io_uring."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return os.geteuid() == 0 or limit == resource.RLIM_INFINITY or limit >= nbytes


def free_huge_pages_nbytes() -> int:
    """Return the free part of the memory that is reserved for huge pages of 2 MiB, in bytes."""
    try:
        return int((HUGE_PAGES / "free_hugepages").read_text()) * (2 << 20)
    except (OSError, ValueError):
        return 0
