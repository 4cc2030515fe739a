"""Many pieces of memory as one transfer, with and without checksums, beside one array of the same size.

Ordinary memory on every side; fresh preallocated files, O_DIRECT, no fsync; cold reads. Once where the files are, and
once on a block device over memory, where the processor is the limit.
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
    UnavailableError,
    cpu_ratio,
    ratio,
)
from benchmarks.scenarios.loop_device import DEPTH, loop_mounted
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = 11
SEGMENT_NBYTES = (16 << 10, 64 << 10, MIB)
ONE = "one array"
LIMIT = "one copy and one CRC-32, one thread"


def run(settings: Settings) -> Outcome:
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        _transfers(settings, directory, make, outcome, "segments", 0.95, None)
    try:
        with loop_mounted(3 * settings.nbytes + 64 * MIB) as directory, workers() as make:
            _transfers(settings, directory, make, outcome, "segments, fast device", 0.85, DEPTH)
    except UnavailableError as reason:
        outcome.notes.append(str(reason))
    return outcome


def _label(segment_nbytes: int, checked: bool) -> str:
    what = f"{segment_nbytes >> 10} KiB" if segment_nbytes else ONE
    return f"{what}, checksums" if checked else what


def _transfers(
    settings: Settings,
    directory: Path,
    make: Callable[..., Worker],
    outcome: Outcome,
    name: str,
    wanted: float,
    depth: int | None,
) -> None:
    peers = {
        nbytes: make(
            "benchmarks.peers.ours:Segments",
            nbytes=settings.nbytes,
            segment_nbytes=nbytes or settings.nbytes,
            options={} if depth is None else {"queue_depth": depth},
        )
        for nbytes in (0, *SEGMENT_NBYTES)
    }
    limit = make("benchmarks.peers.ours:CopyAndChecksum", nbytes=settings.nbytes)
    configs = fio.large_configs(settings)
    if depth is not None:
        configs = [config for config in configs if config.depth == depth]

    def contenders(action: Any) -> list[Contender]:
        ours = [
            Contender(_label(nbytes, checked), "ours", action(worker, checked=checked))
            for nbytes, worker in peers.items()
            for checked in (False, True)
        ]
        return [*ours, Contender(LIMIT, "limit", lambda _: limit.sample("run"))]

    written, was_read = fresh_and_cold(settings, directory, f"{name}:", contenders, configs, SEED)
    outcome.comparisons += [written, was_read]
    for comparison, verb in ((written, "write"), (was_read, "cold read")):
        outcome.figures += _figures(
            comparison,
            f"{name}: {settings.nbytes / GIB:.3g} GiB {verb}",
            wanted,
            fast=depth is not None,
        )


def _figures(comparison: Comparison, what: str, wanted: float, *, fast: bool) -> list[Figure]:
    def figure(text: str, target: float, label: str, other: str) -> Figure:
        value = ratio(comparison.row(label), comparison.row(other))
        return Figure(f"{what}, {text}", ">=", target, value)

    figures = []
    for nbytes in SEGMENT_NBYTES:
        plain, checked = _label(nbytes, False), _label(nbytes, True)
        figures.append(figure(f"{plain} over {ONE}", wanted, plain, ONE))
        figures.append(figure(f"{checked} over without", wanted, checked, plain))
        cpu = cpu_ratio(comparison.row(checked), comparison.row(LIMIT))
        figures.append(Figure(f"{what}, {checked}: CPU over {LIMIT}", "<=", 1.4, cpu))
    if fast:
        best = comparison.best("fio")
        note = f"best fio: {best.label}, {best.median:.2f} GB/s" if best else "no fio"
        for label, target in ((ONE, 0.85), (_label(0, True), 0.75)):
            value = ratio(comparison.row(label), best)
            figures.append(Figure(f"{what}, {label} over fio", ">=", target, value, "", note))
    return figures
