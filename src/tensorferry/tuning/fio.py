"""fio, the benchmark everyone believes: how it is run, and how its report is read.

fio opens, creates and preallocates its files before its clock starts; ours counts all of that.
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

if TYPE_CHECKING:
    from collections.abc import Sequence

_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


class FioError(Exception):
    """fio is missing or failed; the message says which."""


@dataclass(frozen=True)
class Settings:
    """How fio runs; ``registered`` are its buffers and files with io_uring, ``huge_pages`` must be reserved."""

    engine: str
    block_size: int
    queue_depth: int
    registered: bool = False
    huge_pages: bool = False
    direct: bool = True

    @property
    def memory_nbytes(self) -> int:
        """Bytes of its buffers."""
        return self.block_size * self.queue_depth

    def arguments(self) -> list[str]:
        """Return the options that say so."""
        arguments = [
            f"--ioengine={self.engine}",
            f"--bs={self.block_size}",
            f"--iodepth={self.queue_depth}",
            f"--direct={int(self.direct)}",
        ]
        if self.registered:
            arguments += ["--fixedbufs", "--registerfiles"]
        if self.huge_pages:
            arguments += ["--iomem=mmaphuge"]
        return arguments


@dataclass(frozen=True)
class Measured:
    """What fio says of one of its jobs. CPU seconds are (user + system percent) x the job's run time."""

    seconds: float
    nbytes: int
    cpu_seconds: float
    latency_microseconds: dict[str, float]


def installed() -> bool:
    """Return whether there is a fio."""
    return shutil.which("fio") is not None


def version() -> str | None:
    """Return what ``fio --version`` says, None where there is none."""
    if not installed():
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def run(files: Sequence[Path], kind: str, nbytes: int, arguments: Sequence[str]) -> list[Any]:
    """Run one job for each file, all at once, and return the jobs of fio's report.

    Parameters
    ----------
    files : sequence of Path
        The file of each job. fio creates what is missing.
    kind : str
        fio's ``rw``: "read", "write", "randread", ...
    nbytes : int
        The size of each file.
    arguments : sequence of str
        Options for all jobs, such as ``--bs=1M``.

    Raises
    ------
    FioError
        It is not installed, or failed.
    """
    options = [f"--size={nbytes}", f"--rw={kind}", *arguments]
    for number, path in enumerate(files):
        options += [f"--name=job{number}", f"--filename={_escaped(path)}"]
    return jobs_of(options)


def jobs_of(arguments: Sequence[str]) -> list[Any]:
    """Run fio with options for all jobs and, after the ``--name`` of each, its own; return the jobs of its report.

    Raises
    ------
    FioError
        It is not installed, or failed.
    """
    if not installed():
        raise FioError("fio is not installed (apt install fio)")
    command = [
        "fio",
        "--output-format=json",
        "--name=global",
        "--fallocate=native",
        "--invalidate=0",  # the benchmark decides what the page cache holds
        "--scramble_buffers=0",  # it would change each block before it is written
        "--thread",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise FioError(f"fio failed: {words[0][:200] if words else done.returncode}")
    jobs: list[Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return jobs


def measured(job: dict[str, Any], direction: str) -> Measured:
    """Return what a job's report says of its "read" or "write" side."""
    report = job[direction]
    percentiles = report.get("clat_ns", {}).get("percentile", {})
    names = {"p50": "50.000000", "p90": "90.000000", "p99": "99.000000", "p99.9": "99.900000"}
    return Measured(
        seconds=max(report["runtime"], 1) / 1000,
        nbytes=report["io_bytes"],
        cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
        latency_microseconds={
            name: percentiles[key] / 1000 for name, key in names.items() if key in percentiles
        },
    )


def may_register(nbytes: int) -> bool:
    """Return whether this process may register buffers of so many bytes with io_uring, as far as limits tell."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return os.geteuid() == 0 or limit == resource.RLIM_INFINITY or limit >= nbytes


def free_huge_pages_nbytes() -> int:
    """Return how much of the memory reserved for huge pages of 2 MiB is free."""
    try:
        return int((_HUGE_PAGES / "free_hugepages").read_text()) * (2 << 20)
    except (OSError, ValueError):
        return 0


def _escaped(path: Path) -> str:
    return str(path).replace(":", "\\:")  # a colon separates files
