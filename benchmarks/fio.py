"""fio, the benchmark everyone believes: which of its configurations ours is compared with.

How a job is run, and its report read, is the business of ``tensorferry.tuning.fio``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.harness import MIB, Contender, Sample, Settings, throughput
from tensorferry.base.checks import format_nbytes
from tensorferry.tuning import fio
from tensorferry.tuning.fio import free_huge_pages_nbytes, installed

__all__ = ["Config", "contenders", "each_of", "installed", "run", "sample", "usable"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_HUGE_PAGE_NBYTES = 2 * MIB
_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@dataclass(frozen=True)
class Config(fio.Settings):
    """One way to run fio, with the names it has in tables. Huge pages must be reserved."""

    @property
    def label(self) -> str:
        words = (
            f"qd{self.queue_depth}" * (self.queue_depth > 1),
            "registered" * self.registered,
            "huge pages" * self.huge_pages,
            "buffered" * (not self.direct),
        )
        named = ("fio", self.engine, _shortened(self.block_size), *words)
        return " ".join(word for word in named if word)

    @property
    def tags(self) -> tuple[str, ...]:
        registered = "registered" if self.registered else "unregistered"
        pages = "huge" if self.huge_pages else "small"
        depth = f"qd{self.queue_depth}"
        return self.engine, _shortened(self.block_size), depth, registered, pages


LARGE_SMALL_PAGES = [
    Config("io_uring", MIB, 32),
    Config("io_uring", MIB, 128),
    Config("io_uring", MIB, 32, registered=True),
    Config("io_uring", MIB, 128, registered=True),
    Config("io_uring", MIB // 4, 128, registered=True),
    Config("io_uring", 4 * MIB, 32, registered=True),
    Config("libaio", MIB, 32),
    Config("libaio", MIB, 128),
]
LARGE_HUGE_PAGES = [
    Config("io_uring", MIB, 32, huge_pages=True),
    Config("io_uring", MIB, 128, huge_pages=True),
    Config("io_uring", MIB, 8, registered=True, huge_pages=True),
    Config("io_uring", MIB, 32, registered=True, huge_pages=True),
    Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
    Config("libaio", MIB, 32, huge_pages=True),
]
LARGE = LARGE_SMALL_PAGES + LARGE_HUGE_PAGES  # what a large transfer is compared with


def usable(configs: Sequence[Config], settings: Settings) -> list[Config]:
    """Those configurations this machine can run: all but the huge-page ones where none are free."""
    if not installed():
        return []
    if settings.smoke:
        return list(configs[:1])
    free = free_huge_pages_nbytes() if settings.huge_pages else 0
    return [c for c in configs if not c.huge_pages or c.memory_nbytes <= free]


def run(config: Config, path: Path, kind: str, nbytes: int, *options: str) -> dict[str, Any]:
    """Run one job on one file, and return fio's report on it."""
    job: dict[str, Any] = fio.run([path], kind, nbytes, [*config.arguments(), *options])[0]
    return job


def sample(job: dict[str, Any], kind: str) -> Sample:
    """A job's report as a throughput."""
    measured = fio.measured(job, kind)
    return throughput(measured.seconds, measured.nbytes, measured.cpu_seconds)


def contenders(
    settings: Settings,
    configs: Sequence[Config],
    path: Path,
    kind: str,
    nbytes: int,
    prepare: Callable[[Path], None] | None = None,
    options: Sequence[str] = (),
) -> list[Contender]:
    """Those that can be had, reading a file that is cold, or as ``prepare`` has it; or writing one, gone afterwards."""

    def measure(config: Config) -> Sample:
        if kind == "write":
            files.remove(path)
        else:
            (prepare or files.make_cold)(path)
        found = sample(run(config, path, kind, nbytes, *options), kind)
        if kind == "write":
            files.remove(path)
        return found

    return each_of(usable(configs, settings), lambda config, _: measure(config))


def each_of(configs: Sequence[Config], measure: Callable[[Config, int], Sample]) -> list[Contender]:
    """A contender for each configuration, of what measures it in a round."""
    return [
        Contender(c.label, "fio", lambda number, c=c: measure(c, number), c.tags)  # type: ignore[misc]
        for c in configs
    ]


@contextlib.contextmanager
def reserved_huge_pages(wanted: bool) -> Iterator[None]:
    """Reserve huge pages for fio's buffers as long as the benchmark runs (root only).

    Memory in huge pages makes a large difference to fio, so a comparison without it would flatter us.
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


def _shortened(nbytes: int) -> str:
    return format_nbytes(nbytes).replace("K", "k")
