"""Many pieces of memory as one transfer, with and without checksums, beside one array of the same size.

Ordinary memory on every side; fresh preallocated files, O_DIRECT, no fsync; cold reads. Once where the files are, and
once on a block device over memory, where the processor is the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import fio
from benchmarks.actions import fresh_and_cold, measured
from benchmarks.bench import contenders, scenario
from benchmarks.harness import GIB, MIB
from benchmarks.scenarios.large import LOOP_DEPTH

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.harness import Comparison, Contender

SEED = 11
SEGMENT_NBYTES = (16 << 10, 64 << 10, MIB)
ONE = "one array"
LIMIT = "one copy and one CRC-32, one thread"


@scenario
def run(bench: Bench) -> None:
    for comparison, what in _transfers(bench, "segments", {}, fio.LARGE):
        _figures(bench, comparison, what, 0.95)
    name, options = "segments, fast device", {"queue_depth": LOOP_DEPTH}
    configs = [config for config in fio.LARGE if config.queue_depth == LOOP_DEPTH]
    with bench.on_loop_device(3 * bench.nbytes + 64 * MIB) as quick:
        for comparison, what in _transfers(quick, name, options, configs):
            _figures(bench, comparison, what, 0.85)
            for label, target in ((ONE, 0.85), (_label(0, True), 0.75)):
                bench.over_fio(f"{what}, {label} over fio", target, comparison, label)


def _label(segment_nbytes: int, checked: bool) -> str:
    what = f"{segment_nbytes >> 10} KiB" if segment_nbytes else ONE
    return f"{what}, checksums" if checked else what


def _transfers(
    bench: Bench, name: str, options: dict[str, Any], configs: list[fio.Config]
) -> list[tuple[Comparison, str]]:
    """Write and read, and say what each comparison is of."""
    ours, nbytes = "benchmarks.peers.ours", bench.nbytes
    peers = {
        each: bench.worker(
            f"{ours}:Segments", nbytes=nbytes, segment_nbytes=each or nbytes, options=options
        )
        for each in (0, *SEGMENT_NBYTES)
    }
    limit = measured(bench.worker(f"{ours}:CopyAndChecksum", nbytes=nbytes), "run")

    def ways(action: Any) -> list[Contender]:
        moves = {
            _label(each, checked): action(worker, checked=checked)
            for each, worker in peers.items()
            for checked in (False, True)
        }
        return contenders("ours", moves) + contenders("limit", {LIMIT: limit})

    written, was_read = fresh_and_cold(bench, f"{name}:", ways, configs, SEED)
    what = f"{name}: {nbytes / GIB:.3g} GiB"
    return [(written, f"{what} write"), (was_read, f"{what} cold read")]


def _figures(bench: Bench, comparison: Comparison, what: str, wanted: float) -> None:
    for nbytes in SEGMENT_NBYTES:
        plain, checked = _label(nbytes, False), _label(nbytes, True)
        bench.at_least(f"{what}, {plain} over {ONE}", wanted, comparison.over(plain, ONE))
        over_plain = comparison.over(checked, plain)
        bench.at_least(f"{what}, {checked} over without", wanted, over_plain)
        cpu = comparison.cpu_over(checked, LIMIT)
        bench.at_most(f"{what}, {checked}: CPU over {LIMIT}", 1.4, cpu)
