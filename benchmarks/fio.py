"""fio, the benchmark everyone believes: which of its configurations ours is compared with.

How a job is run, and its report read, is the business of ``tensorferry.tuning.fio``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import (
    MIB,
    Contender,
    MeasurementError,
    Sample,
    Settings,
    UnavailableError,
    throughput,
)
from tensorferry.sizes import parse_nbytes
from tensorferry.tuning import fio as tuning
from tensorferry.tuning.fio import free_huge_pages_nbytes, installed, version  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        words = (
            "registered" * self.registered,
            "huge pages" * self.huge,
            "buffered" * (not self.direct),
        )
        depth = f"qd{self.depth}" if self.depth > 1 else ""
        named = ("fio", self.engine, self.block_size, depth, *words)
        return " ".join(word for word in named if word)

    @property
    def tags(self) -> tuple[str, ...]:
        registered = "registered" if self.registered else "unregistered"
        pages = "huge" if self.huge else "small"
        return self.engine, self.block_size, f"qd{self.depth}", registered, pages

    @property
    def settings(self) -> tuning.Settings:
        nbytes = parse_nbytes(self.block_size)
        rest = (self.depth, self.registered, self.huge, self.direct)
        return tuning.Settings(self.engine, nbytes, *rest)


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


def usable(configs: Sequence[Config], settings: Settings) -> list[Config]:
    """Those configurations this machine can run: all but the huge-page ones where none are free."""
    if not installed():
        return []
    if settings.smoke:
        return list(configs[:1])
    free = free_huge_pages_nbytes() if settings.huge_pages else 0
    return [c for c in configs if not c.huge or c.settings.memory_nbytes <= free]


def large_configs(settings: Settings) -> list[Config]:
    """What a large transfer is compared with; the best of them counts."""
    return usable(LARGE_SMALL_PAGES + LARGE_HUGE_PAGES, settings)


def run(config: Config, path: Path, kind: str, nbytes: int, *options: str) -> dict[str, Any]:
    """Run one job on one file, and return fio's report on it."""
    job: dict[str, Any] = run_many(config, [path], kind, nbytes, *options)[0]
    return job


def run_many(
    config: Config, paths: Sequence[Path], kind: str, nbytes: int, *options: str
) -> list[dict[str, Any]]:
    """Run a job on each file at once, and return fio's reports."""
    with _failures():
        return tuning.run(paths, kind, nbytes, [*config.settings.arguments(), *options])


def run_jobs(*arguments: str) -> list[dict[str, Any]]:
    """Run jobs that differ in more than their files, and return fio's reports."""
    with _failures():
        return tuning.jobs_of(arguments)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    if not installed():
        raise UnavailableError("fio is not installed (apt install fio)")
    try:
        yield
    except tuning.FioError as error:
        raise MeasurementError(str(error)) from error


def sample(job: dict[str, Any], kind: str) -> Sample:
    """A job's report as a throughput."""
    measured = tuning.measured(job, kind)
    return throughput(measured.seconds, measured.nbytes, measured.cpu_seconds)


def writes(config: Config, path: Path, nbytes: int, *options: str) -> Callable[[int], Sample]:
    """What measures writes of a fresh file, which is gone afterwards."""

    def measure(number: int) -> Sample:
        files.remove(path)
        job = run(config, path, "write", nbytes, *options)
        files.remove(path)
        return sample(job, "write")

    return measure


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
    needed = max(c.settings.memory_nbytes for c in LARGE_HUGE_PAGES) // _HUGE_PAGE_NBYTES + 8
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
