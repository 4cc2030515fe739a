"""Reads of 4 KiB at random offsets of a cold file: many in one call, and one blocking after the other.

Many are compared with fio's randread at the same depth; blocking ones with what fio's psync needs for the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import measured, seeds
from benchmarks.bench import contenders, scenario
from benchmarks.harness import Sample

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Measure

SEED = 17
BLOCK_NBYTES = 4096
DEPTH = 128
_CONFIGS = [
    fio.Config("io_uring", BLOCK_NBYTES, DEPTH),
    fio.Config("io_uring", BLOCK_NBYTES, DEPTH, registered=True),
    fio.Config("io_uring", BLOCK_NBYTES, DEPTH, registered=True, huge_pages=True),
    fio.Config("libaio", BLOCK_NBYTES, DEPTH),
]


class _Reads:
    """So many reads of one file."""

    def __init__(self, bench: Bench, count: int) -> None:
        self.bench, self.count = bench, count
        self.path = bench.directory / "source"
        files.write_pattern(self.path, bench.nbytes, SEED)

    def by(self, peer: str, **options: Any) -> Measure:
        worker = self.bench.worker(
            f"benchmarks.peers.{peer}", count=self.count, block_nbytes=BLOCK_NBYTES, **options
        )
        where: dict[str, Any] = {"path": str(self.path), "file_nbytes": self.bench.nbytes}
        return measured(worker, "read", files.make_cold, [self.path], **where, seed=seeds(SEED))

    def by_fio(self, config: fio.Config, number: int, *options: str) -> dict[str, Any]:
        files.make_cold(self.path)
        size, seed = f"--io_size={self.count * BLOCK_NBYTES}", f"--randseed={SEED + number}"
        chosen = (size, seed, "--norandommap", *options)
        return fio.run(config, self.path, "randread", self.bench.nbytes, *chosen)


@scenario
def many(bench: Bench) -> None:
    reads = _Reads(bench, 64 if bench.smoke else 10_000)

    def ours(*, aligned: bool) -> Measure:
        read = reads.by("ours:RandomReads", aligned=aligned)
        return lambda number: _in_operations(read(number))

    def theirs(config: fio.Config, number: int) -> Sample:
        return _in_operations(fio.sample(reads.by_fio(config, number), "read"))

    ways = {
        "tensorferry.read_many, tensorferry.empty": ours(aligned=True),
        "tensorferry.read_many, torch.empty": ours(aligned=False),
    }
    comparison = bench.compare(
        "random read",
        f"{reads.count:,} reads of {BLOCK_NBYTES} bytes, depth {DEPTH}, cold file, O_DIRECT",
        contenders("ours", ways) + fio.each_of(fio.usable(_CONFIGS, bench.settings), theirs),
        "kIOPS",
    )
    for label in ways:
        bench.over_fio(f"random: {label}", 0.9, comparison, label)


def _in_operations(sample: Sample) -> Sample:
    """The same sample in thousands of operations a second."""
    return replace(sample, value=sample.nbytes / BLOCK_NBYTES / sample.seconds / 1000)


@scenario
def blocking(bench: Bench) -> None:
    reads = _Reads(bench, 16 if bench.smoke else 2_000)

    def psync(config: fio.Config, number: int) -> Sample:
        options = ("--percentile_list=50", "--lat_percentiles=1", "--clat_percentiles=0")
        report = reads.by_fio(config, number, *options)["read"]
        latency = report["lat_ns"]
        mean = latency["mean"] / 1000
        median = latency["percentile"]["50.000000"] / 1000
        return Sample(median, report["runtime"] / 1000, details={"mean_microseconds": mean})

    ours = {
        "tensorferry file.read, tensorferry.empty": reads.by("ours:BlockingReads", aligned=True),
        "tensorferry file.read, torch.empty": reads.by("ours:BlockingReads", aligned=False),
    }
    config = fio.Config("psync", BLOCK_NBYTES, 1)
    theirs = {"fio psync": partial(psync, config)} if fio.installed() else {}
    comparison = bench.compare(
        "latency",
        f"median of {reads.count:,} blocking reads of {BLOCK_NBYTES} bytes, random offsets, O_DIRECT",
        [
            *contenders("ours", ours),
            *contenders("peer", {"plain Python os.preadv": reads.by("plain:BlockingReads")}),
            *contenders("fio", theirs),
        ],
        "µs",
    )
    best = comparison.best("fio")
    note = comparison.described(best, "fio psync")
    for label in ours:
        over = comparison.above(label, best)
        bench.at_most(f"latency: {label}, over psync", 10, over, note, "µs")
