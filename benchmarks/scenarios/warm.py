"""Reading a file that the page cache holds: tensorferry must take the faster way by itself."""

from __future__ import annotations

from benchmarks import files, fio
from benchmarks.actions import reads
from benchmarks.harness import Comparison, Contender, Figure, Outcome, Settings, compare, ratio
from benchmarks.worker import workers

SEED = 13
READINTO = "plain Python readinto"
DIRECT = "tensorferry.read direct=True"
DIRECT_PYTHON = "plain Python, O_DIRECT 8 MiB blocks"


def run(settings: Settings) -> Outcome:
    """Every contender reads the same file; it is brought back into the cache before each."""
    nbytes, ours, plain = settings.nbytes, "benchmarks.peers.ours", "benchmarks.peers.plain"
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        path = directory / "source"
        files.write_pattern(path, nbytes, SEED)
        read = reads(path, files.make_warm, seed=SEED)
        ordinary = make(f"{ours}:Functions", nbytes=nbytes, aligned=False)
        aligned = make(f"{ours}:Functions", nbytes=nbytes, aligned=True)
        handle = make(f"{ours}:Handle", nbytes=nbytes, locked=True)
        contenders = [
            Contender("tensorferry.read, torch.empty", "ours", read(ordinary), ("auto",)),
            Contender("tensorferry.read, tensorferry.empty", "ours", read(aligned), ("auto",)),
            Contender("tensorferry handle, locked", "ours", read(handle), ("auto",)),
            Contender(DIRECT, "ours", read(aligned, direct=True)),
            Contender("tensorferry.read direct=False", "ours", read(aligned, direct=False)),
            Contender(READINTO, "peer", read(make(f"{plain}:Buffered", nbytes=nbytes))),
            Contender(DIRECT_PYTHON, "peer", read(make(f"{plain}:Direct", nbytes=nbytes))),
        ]
        configs = fio.usable([fio.Config("psync", "1M", 1, direct=False)], settings)
        contenders += fio.contenders(configs, path, "read", nbytes, files.make_warm)
        comparison = Comparison("warm read", "the whole file in the page cache")
        compare(settings, comparison, contenders)
    known = [row for label in (READINTO, DIRECT, DIRECT_PYTHON) if (row := comparison.row(label))]
    better = max(known, key=lambda row: row.median, default=None)
    note = f"better way: {better.label}, {better.median:.2f} GB/s" if better else ""
    return Outcome(
        [comparison],
        [
            Figure(f"warm: {row.label}", ">=", 0.95, ratio(row, better), "", note)
            for row in comparison.rows
            if "auto" in row.tags and row.usable
        ],
    )
