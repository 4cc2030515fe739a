"""One large tensor to a fresh file and back cold: default handle against the best fio.

Rules: O_DIRECT and no fsync on either side; every write goes to a new preallocated file; the file
is dropped from the page cache before each read. Only "plain Python write + fsync, readinto" goes
through the page cache. What memory is needed besides the tensor shows in the same rows. The same on
a fast block device: ext4 on a loop device with direct I/O over memory (root only).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import fio
from benchmarks.actions import fresh_and_cold
from benchmarks.bench import contenders, scenario
from benchmarks.harness import GIB, MIB

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.harness import Comparison, Contender

SEED = 7
LOOP_DEPTH = 32
ODD_NBYTES = 1_000_003
ODD_OFFSET = 7
_GROWTH_NBYTES_MAX = 16 * MIB  # beside the bounce pool

LOCKED = "tensorferry handle, locked"
PLAIN = "tensorferry handle, torch.empty"
ODD = f"tensorferry handle, torch.empty, + {ODD_NBYTES:,} bytes at offset {ODD_OFFSET}"
FUNCTIONS = "tensorferry.write/read, torch.empty"


@scenario
def run(bench: Bench) -> None:
    targets = {LOCKED: 0.97, PLAIN: 0.92, ODD: 0.92}
    for comparison, what in _transfers(bench, "large", {}, fio.LARGE, targets):
        for tag, limit in (("unregistered", 1.1), ("registered", 1.5)):
            least = comparison.least_cpu("fio", "io_uring", "1M", tag)  # the size of our blocks
            over = comparison.cpu_over(LOCKED, least)
            note = f"{least.label}, {least.cpu_seconds_per_gb or 0:.4f} s/GB" if least else "no fio"
            bench.at_most(f"{what}, locked: CPU over fio io_uring {tag}", limit, over, note)


@scenario
def run_on_loop_device(bench: Bench) -> None:
    configs = [config for config in fio.LARGE if config.queue_depth == LOOP_DEPTH]
    with bench.on_loop_device(3 * (bench.nbytes + 2 * ODD_NBYTES) + 64 * MIB) as quick:
        _transfers(quick, "loop", {"queue_depth": LOOP_DEPTH}, configs, {LOCKED: 0.95})


def _transfers(
    bench: Bench,
    name: str,
    options: dict[str, Any],
    configs: list[fio.Config],
    targets: dict[str, float],
) -> list[tuple[Comparison, str]]:
    """Write and read one large tensor, and say what each comparison is of.

    The targets are parts of the best fio's speed.
    """
    nbytes, odd_nbytes = bench.nbytes, bench.nbytes + ODD_NBYTES
    handle, functions = "benchmarks.peers.ours:Handle", "benchmarks.peers.ours:Functions"
    plain = "benchmarks.peers.plain"
    worker = bench.worker
    ours = {
        LOCKED: worker(handle, nbytes=nbytes, locked=True, options=options),
        PLAIN: worker(handle, nbytes=nbytes, locked=False, options=options),
        ODD: worker(handle, nbytes=odd_nbytes, locked=False, options=options),
        "tensorferry.write/read, tensorferry.empty": worker(functions, nbytes=nbytes, aligned=True),
        FUNCTIONS: worker(functions, nbytes=nbytes, aligned=False),
    }
    peers = {
        "plain Python write + fsync, readinto": worker(f"{plain}:Buffered", nbytes=nbytes),
        "plain Python, O_DIRECT 8 MiB blocks": worker(f"{plain}:Direct", nbytes=nbytes),
    }

    def ways(action: Any) -> list[Contender]:
        at = {ODD: {"offset": ODD_OFFSET}}
        mine = {label: action(w, **at.get(label, {})) for label, w in ours.items()}
        theirs = {label: action(w) for label, w in peers.items()}
        return contenders("ours", mine) + contenders("peer", theirs)

    # The longer reads end with the file.
    compared = fresh_and_cold(bench, name, ways, configs, SEED, ODD_OFFSET + odd_nbytes)
    if not any(config.huge_pages for config in fio.usable(configs, bench.settings)):
        bench.note("no huge pages for fio's buffers: its best configuration is missing")
    pool_nbytes = ours[FUNCTIONS].call("pool_nbytes")["pool_nbytes"]
    found = []
    for comparison, verb in zip(compared, ("write", "cold read"), strict=True):
        what = f"{name}: {nbytes / GIB:.3g} GiB {verb}"
        for label, target in targets.items():
            short = label.removeprefix("tensorferry handle, ")
            bench.over_fio(f"{what}, {short}", target, comparison, label)
        peak = f"{what}, growth of the peak over the pool's {pool_nbytes // MIB} MiB + 16"
        bench.peak(peak, pool_nbytes + _GROWTH_NBYTES_MAX, comparison, FUNCTIONS)
        found.append((comparison, what))
    return found
