"""One large tensor to a fresh file and back cold: default handle against the best fio.

Rules: O_DIRECT and no fsync on either side; every write goes to a new preallocated file; the file
is dropped from the page cache before each read. Only "plain Python write + fsync, readinto" goes
through the page cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    GIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Settings,
    compare,
    cpu_ratio,
    ratio,
)
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = 7
ODD_NBYTES = 1_000_003
ODD_OFFSET = 7

LOCKED = "tensorferry handle, locked"
PLAIN = "tensorferry handle, torch.empty"
ODD = f"tensorferry handle, torch.empty, + {ODD_NBYTES:,} bytes at offset {ODD_OFFSET}"
ALIGNED_FUNCTIONS = "tensorferry.write/read, tensorferry.empty"
PLAIN_FUNCTIONS = "tensorferry.write/read, torch.empty"


def run(settings: Settings) -> Outcome:
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        return transfers(settings, directory, make, "large")


def transfers(
    settings: Settings,
    directory: Path,
    make: Callable[..., Worker],
    name: str,
    options: dict[str, Any] | None = None,
    configs: list[fio.Config] | None = None,
    locked_target: float = 0.97,
    ordinary_target: float | None = 0.92,
) -> Outcome:
    """Write and read one large tensor in a directory, whatever file system that is on.

    The targets are the parts of the best fio's speed that locked and ordinary memory must reach;
    without the latter, CPU time has none either.
    """
    ours = "benchmarks.peers.ours"
    options = options or {}
    odd_nbytes = settings.nbytes + ODD_NBYTES
    locked = make(f"{ours}:Handle", nbytes=settings.nbytes, locked=True, options=options)
    plain = make(f"{ours}:Handle", nbytes=settings.nbytes, locked=False, options=options)
    odd = make(f"{ours}:Handle", nbytes=odd_nbytes, locked=False, options=options)
    aligned_functions = make(f"{ours}:Functions", nbytes=settings.nbytes, aligned=True)
    plain_functions = make(f"{ours}:Functions", nbytes=settings.nbytes, aligned=False)
    buffered = make("benchmarks.peers.plain:Buffered", nbytes=settings.nbytes)
    direct = make("benchmarks.peers.plain:Direct", nbytes=settings.nbytes)
    configs = fio.large_configs(settings) if configs is None else configs

    target, source = directory / "target", directory / "source"

    def write(worker: Worker, **arguments: Any) -> Callable[[int], Any]:
        def measure(number: int) -> Any:
            files.remove(target)
            check = number == 0
            return worker.sample("write", path=str(target), seed=SEED, check=check, **arguments)

        return measure

    def read(worker: Worker, **arguments: Any) -> Callable[[int], Any]:
        def measure(number: int) -> Any:
            files.make_cold(source)
            return worker.sample("read", path=str(source), seed=SEED, **arguments)

        return measure

    def python_contenders(action: Callable[..., Callable[[int], Any]]) -> list[Contender]:
        return [
            Contender(LOCKED, "ours", action(locked)),
            Contender(PLAIN, "ours", action(plain)),
            Contender(ODD, "ours", action(odd, offset=ODD_OFFSET)),
            Contender(ALIGNED_FUNCTIONS, "ours", action(aligned_functions)),
            Contender(PLAIN_FUNCTIONS, "ours", action(plain_functions)),
            Contender("plain Python write + fsync, readinto", "peer", action(buffered)),
            Contender("plain Python, O_DIRECT 8 MiB blocks", "peer", action(direct)),
        ]

    written = Comparison(f"{name} write", "fresh preallocated files, O_DIRECT, no fsync")
    contenders = python_contenders(write)
    contenders += fio.contenders(configs, target, "write", settings.nbytes, files.remove)
    compare(settings, written, contenders)
    files.remove(target)

    # One file for all: where a file lies makes a difference, too. The longer reads end with it.
    files.write_pattern(source, ODD_OFFSET + odd_nbytes, SEED)
    was_read = Comparison(f"{name} read", "cold file, O_DIRECT")
    contenders = python_contenders(read)
    contenders += fio.contenders(configs, source, "read", settings.nbytes, files.make_cold)
    compare(settings, was_read, contenders)

    outcome = Outcome([written, was_read])
    if not configs:
        outcome.notes.append("fio is not installed: nothing to compare with")
    elif not any(config.huge for config in configs):
        outcome.notes.append("no huge pages for fio's buffers: its best configuration is missing")
    size = f"{settings.nbytes / GIB:.3g} GiB"
    for comparison, verb in ((written, "write"), (was_read, "cold read")):
        outcome.figures += _figures(
            comparison, f"{name}: {size} {verb}", locked_target, ordinary_target
        )
    return outcome


def _figures(
    comparison: Comparison, what: str, locked_target: float, ordinary_target: float | None
) -> list[Figure]:
    best = comparison.best("fio")
    note = f"best fio: {best.label}, {best.median:.2f} GB/s" if best else "no fio"
    small = comparison.best("fio", "small")
    if small and best and small is not best:
        note += f"; with 4 KiB pages: {small.label}, {small.median:.2f} GB/s"
    figures = [
        Figure(
            f"{what}, locked", ">=", locked_target, ratio(comparison.row(LOCKED), best), "", note
        )
    ]
    if ordinary_target is None:
        return figures
    for label in (PLAIN, ODD):
        short = label.removeprefix("tensorferry handle, ")
        figures.append(
            Figure(
                f"{what}, {short}",
                ">=",
                ordinary_target,
                ratio(comparison.row(label), best),
                "",
                note,
            )
        )
    for tag, limit in (("unregistered", 1.1), ("registered", 1.5)):
        least = comparison.least_cpu("fio", "io_uring", "1M", tag)  # the size of our blocks
        figures.append(
            Figure(
                f"{what}, locked: CPU over fio io_uring {tag}",
                "<=",
                limit,
                cpu_ratio(comparison.row(LOCKED), least),
                "",
                f"{least.label}, {least.cpu_seconds_per_gb or 0:.4f} s/GB" if least else "no fio",
            )
        )
    return figures
