"""One large tensor to a fresh file and back cold: default handle against the best fio.

Rules: O_DIRECT and no fsync on either side; every write goes to a new preallocated file; the file
is dropped from the page cache before each read. Only "plain Python write + fsync, readinto" goes
through the page cache. What memory is needed besides the tensor shows in the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import fresh_and_cold
from benchmarks.harness import (
    GIB,
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Settings,
    cpu_ratio,
    peak_figure,
    ratio,
)
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = 7
ODD_NBYTES = 1_000_003
ODD_OFFSET = 7
_GROWTH_NBYTES_MAX = 16 * MIB  # beside the bounce pool

LOCKED = "tensorferry handle, locked"
PLAIN = "tensorferry handle, torch.empty"
ODD = f"tensorferry handle, torch.empty, + {ODD_NBYTES:,} bytes at offset {ODD_OFFSET}"
FUNCTIONS = "tensorferry.write/read, torch.empty"


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
    nbytes, odd_nbytes = settings.nbytes, settings.nbytes + ODD_NBYTES
    handle, functions = "benchmarks.peers.ours:Handle", "benchmarks.peers.ours:Functions"
    options = options or {}
    ours = {
        LOCKED: make(handle, nbytes=nbytes, locked=True, options=options),
        PLAIN: make(handle, nbytes=nbytes, locked=False, options=options),
        ODD: make(handle, nbytes=odd_nbytes, locked=False, options=options),
        "tensorferry.write/read, tensorferry.empty": make(functions, nbytes=nbytes, aligned=True),
        FUNCTIONS: make(functions, nbytes=nbytes, aligned=False),
    }
    peers = {
        "plain Python write + fsync, readinto": make(
            "benchmarks.peers.plain:Buffered", nbytes=nbytes
        ),
        "plain Python, O_DIRECT 8 MiB blocks": make("benchmarks.peers.plain:Direct", nbytes=nbytes),
    }
    configs = fio.large_configs(settings) if configs is None else configs

    def contenders(action: Any) -> list[Contender]:
        at = {ODD: {"offset": ODD_OFFSET}}
        return [
            Contender(label, "ours" if label in ours else "peer", action(w, **at.get(label, {})))
            for label, w in (ours | peers).items()
        ]

    # The longer reads end with the file.
    written, was_read = fresh_and_cold(
        settings, directory, name, contenders, configs, SEED, ODD_OFFSET + odd_nbytes
    )
    outcome = Outcome([written, was_read])
    if not configs:
        outcome.notes.append("fio is not installed: nothing to compare with")
    elif not any(config.huge for config in configs):
        outcome.notes.append("no huge pages for fio's buffers: its best configuration is missing")
    pool_nbytes = ours[FUNCTIONS].call("pool_nbytes")["pool_nbytes"]
    for comparison, verb in ((written, "write"), (was_read, "cold read")):
        what = f"{name}: {nbytes / GIB:.3g} GiB {verb}"
        outcome.figures += _figures(comparison, what, locked_target, ordinary_target)
        limit_nbytes = pool_nbytes + _GROWTH_NBYTES_MAX
        peak = f"{what}, growth of the peak over the pool's {pool_nbytes // MIB} MiB + 16"
        outcome.figures.append(peak_figure(peak, comparison.row(FUNCTIONS), limit_nbytes))
    return outcome


def _figures(
    comparison: Comparison, what: str, locked_target: float, ordinary_target: float | None
) -> list[Figure]:
    best, small = comparison.best("fio"), comparison.best("fio", "small")
    note = f"best fio: {best.label}, {best.median:.2f} GB/s" if best else "no fio"
    if small and best and small is not best:
        note += f"; with 4 KiB pages: {small.label}, {small.median:.2f} GB/s"
    targets = {LOCKED: locked_target}
    if ordinary_target is not None:
        targets |= {PLAIN: ordinary_target, ODD: ordinary_target}
    figures = []
    for label, target in targets.items():
        short = label.removeprefix("tensorferry handle, ")
        over = ratio(comparison.row(label), best)
        figures.append(Figure(f"{what}, {short}", ">=", target, over, "", note))
    for tag, limit in (("unregistered", 1.1), ("registered", 1.5)) if ordinary_target else ():
        least = comparison.least_cpu("fio", "io_uring", "1M", tag)  # the size of our blocks
        over = cpu_ratio(comparison.row(LOCKED), least)
        note = f"{least.label}, {least.cpu_seconds_per_gb or 0:.4f} s/GB" if least else "no fio"
        figures.append(
            Figure(f"{what}, locked: CPU over fio io_uring {tag}", "<=", limit, over, "", note)
        )
    return figures
