"""fio, the benchmark everyone believes: its configurations, and how its report is read.

fio opens, creates and preallocates its file before its clock starts; ours counts all of that. Its
CPU seconds are what it reports: (user + system percent) x the job's run time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    GB,
    MIB,
    Contender,
    MeasurementError,
    Sample,
    Settings,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HUGE_PAGE_NBYTES = 2 * MIB
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@dataclass(frozen=True)
class Config:
    """One way to run fio. ``huge`` takes its buffers from huge pages (needs reserved ones)."""

    engine: str
    block_size: str
    depth: int
    registered: bool = False
    huge: bool = False
    direct: bool = True

    @property
    def label(self) -> str:
        parts = [f"fio {self.engine} {self.block_size}"]
        parts += [f"qd{self.depth}"] if self.depth > 1 else []
        parts += ["registered"] if self.registered else []
        parts += ["huge pages"] if self.huge else []
        parts += [] if self.direct else ["buffered"]
        return " ".join(parts)

    @property
    def tags(self) -> tuple[str, ...]:
        return (
            self.engine,
            self.block_size,
            f"qd{self.depth}",
            "registered" if self.registered else "unregistered",
            "huge" if self.huge else "small",
        )

    @property
    def memory_nbytes(self) -> int:
        return _size(self.block_size) * self.depth

    def arguments(self) -> list[str]:
        arguments = [
            f"--ioengine={self.engine}",
            f"--bs={self.block_size}",
            f"--iodepth={self.depth}",
            f"--direct={int(self.direct)}",
        ]
        if self.registered:
            arguments += ["--fixedbufs", "--registerfiles"]
        if self.huge:
            arguments += ["--iomem=mmaphuge"]
        return arguments


LARGE_SMALL_PAGES = [
    Config("io_uring", "1M", 32),
    Config("io_uring", "1M", 128),
    Config("io_uring", "1M", 32, registered=True),
    Config("io_uring", "1M", 128, registered=True),
    Config("io_uring", "256k", 128, registered=True),
    Config("io_uring", "4M", 32, registered=True),
    Config("libaio", "1M", 32),
    Config("libaio", "1M", 128),
]
LARGE_HUGE_PAGES = [
    Config("io_uring", "1M", 32, huge=True),
    Config("io_uring", "1M", 128, huge=True),
    Config("io_uring", "1M", 8, registered=True, huge=True),
    Config("io_uring", "1M", 32, registered=True, huge=True),
    Config("io_uring", "4M", 32, registered=True, huge=True),
    Config("libaio", "1M", 32, huge=True),
]


def installed() -> bool:
    return shutil.which("fio") is not None


def version() -> str | None:
    if not installed():
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def usable(configs: Sequence[Config], settings: Settings) -> list[Config]:
    """Those configurations this machine can run: all but the huge-page ones where none are free."""
    if not installed():
        return []
    free = free_huge_pages_nbytes() if settings.huge_pages else 0
    return [c for c in configs if not c.huge or c.memory_nbytes <= free]


def large_configs(settings: Settings) -> list[Config]:
    """What a large transfer is compared with; the best of them counts."""
    configs = LARGE_SMALL_PAGES + LARGE_HUGE_PAGES
    return usable(configs[2:3] if settings.smoke else configs, settings)


def run(config: Config, path: Path, kind: str, nbytes: int, *options: str) -> dict[str, Any]:
    """Run one job on one file, and return fio's report on it."""
    if not installed():
        raise UnavailableError("fio is not installed (apt install fio)")
    command = [
        "fio",
        "--name=job",
        f"--filename={path}",
        f"--size={nbytes}",
        f"--rw={kind}",
        "--fallocate=native",
        "--invalidate=0",  # the benchmark decides what the page cache holds
        "--scramble_buffers=0",  # it would change each block before it is written
        "--thread",
        "--output-format=json",
        *config.arguments(),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise MeasurementError(f"fio failed: {words[0][:200] if words else done.returncode}")
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job


def sample(job: dict[str, Any], kind: str) -> Sample:
    """A job's report as a throughput."""
    report = job[kind]
    seconds = max(report["runtime"], 1) / 1000
    nbytes = report["io_bytes"]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Sample(nbytes / GB / seconds, seconds, nbytes, cpu_seconds)


def contenders(
    configs: Sequence[Config], path: Path, kind: str, nbytes: int, prepare: Any
) -> list[Contender]:
    """Contenders that read or write one file; ``prepare`` (remove, make_cold) gets it before."""

    def measure(config: Config) -> Sample:
        prepare(path)
        return sample(run(config, path, kind, nbytes), kind)

    return [
        Contender(c.label, "fio", lambda number, c=c: measure(c), c.tags)  # type: ignore[misc]
        for c in configs
    ]


@contextlib.contextmanager
def reserved_huge_pages(wanted: bool) -> Iterator[None]:
    """Reserve huge pages for fio's buffers as long as the benchmark runs (root only).

    Memory in huge pages makes a large difference to fio, so a comparison without it would flatter
    us.
    """
    setting = _HUGE_PAGES / "nr_hugepages"
    needed = max(c.memory_nbytes for c in LARGE_HUGE_PAGES) // _HUGE_PAGE_NBYTES + 8
    try:
        before = int(setting.read_text())
        if not wanted or free_huge_pages_nbytes() >= needed * _HUGE_PAGE_NBYTES:
            yield
            return
        setting.write_text(str(before + needed))
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        # what we added, and no more: another benchmark may have added its own meanwhile
        setting.write_text(str(max(0, int(setting.read_text()) - needed)))


def free_huge_pages_nbytes() -> int:
    try:
        return int((_HUGE_PAGES / "free_hugepages").read_text()) * _HUGE_PAGE_NBYTES
    except (OSError, ValueError):
        return 0


def _size(text: str) -> int:
    units = {"k": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
