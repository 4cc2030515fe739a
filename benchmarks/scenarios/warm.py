"""Reading a file that the page cache holds: tensorferry must take the faster way by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import files, fio
from benchmarks.actions import reads
from benchmarks.bench import contenders, scenario

if TYPE_CHECKING:
    from benchmarks.bench import Bench

SEED = 13
READINTO = "plain Python readinto"
DIRECT = "tensorferry.read direct=True"
DIRECT_PYTHON = "plain Python, O_DIRECT 8 MiB blocks"


@scenario
def run(bench: Bench) -> None:
    """Every contender reads the same file; it is brought back into the cache before each."""
    nbytes, worker = bench.nbytes, bench.worker
    ours, plain = "benchmarks.peers.ours", "benchmarks.peers.plain"
    path = bench.directory / "source"
    files.write_pattern(path, nbytes, SEED)
    read = reads(path, files.make_warm, seed=SEED)
    ordinary = worker(f"{ours}:Functions", nbytes=nbytes, aligned=False)
    aligned = worker(f"{ours}:Functions", nbytes=nbytes, aligned=True)
    by_itself = {
        "tensorferry.read, torch.empty": read(ordinary),
        "tensorferry.read, tensorferry.empty": read(aligned),
        "tensorferry handle, locked": read(
            worker(f"{ours}:Handle", nbytes=nbytes, locked=True),
        ),
    }
    told = {
        DIRECT: read(aligned, direct=True),
        "tensorferry.read direct=False": read(aligned, direct=False),
    }
    peers = {
        READINTO: read(worker(f"{plain}:Buffered", nbytes=nbytes)),
        DIRECT_PYTHON: read(worker(f"{plain}:Direct", nbytes=nbytes)),
    }
    buffered = [fio.Config("psync", 1 << 20, 1, direct=False)]
    comparison = bench.compare(
        "warm read",
        "the whole file in the page cache",
        [
            *contenders("ours", by_itself, "auto"),
            *contenders("ours", told),
            *contenders("peer", peers),
            *fio.contenders(bench.settings, buffered, path, "read", nbytes, files.make_warm),
        ],
    )
    known = [row for label in (READINTO, DIRECT, DIRECT_PYTHON) if (row := comparison.row(label))]
    better = max(known, key=lambda row: row.median, default=None)
    for label in by_itself:
        over = comparison.over(label, better)
        bench.at_least(f"warm: {label}", 0.95, over, comparison.described(better, "better way"))
