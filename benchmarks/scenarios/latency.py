"""One blocking 4 KiB read on an open file, over what fio's psync needs for the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import measured, seeds
from benchmarks.bench import contenders, scenario
from benchmarks.harness import Sample, difference

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Measure

SEED = 19
BLOCK_NBYTES = 4096
ALIGNED = "tensorferry file.read, tensorferry.empty"
PLAIN = "tensorferry file.read, torch.empty"


@scenario
def run(bench: Bench) -> None:
    count = 16 if bench.smoke else 2_000
    path = bench.directory / "source"
    files.write_pattern(path, bench.nbytes, SEED)

    def python(peer: str, **options: bool) -> Measure:
        worker = bench.worker(f"benchmarks.peers.{peer}", block_nbytes=BLOCK_NBYTES, **options)
        where: dict[str, Any] = {"path": str(path), "file_nbytes": bench.nbytes, "count": count}
        return measured(worker, "read", files.make_cold, [path], **where, seed=seeds(SEED))

    def psync(config: fio.Config, number: int) -> Sample:
        files.make_cold(path)
        options = (
            *fio.random_options(count * BLOCK_NBYTES, SEED + number),
            *("--percentile_list=50", "--lat_percentiles=1", "--clat_percentiles=0"),
        )
        report = fio.run(config, path, "randread", bench.nbytes, *options)["read"]
        latency = report["lat_ns"]
        mean = latency["mean"] / 1000
        median = latency["percentile"]["50.000000"] / 1000
        return Sample(median, report["runtime"] / 1000, details={"mean_microseconds": mean})

    ours = {
        ALIGNED: python("ours:BlockingReads", aligned=True),
        PLAIN: python("ours:BlockingReads", aligned=False),
    }
    configs = fio.usable([fio.Config("psync", BLOCK_NBYTES, 1)], bench.settings)
    comparison = bench.compare(
        "latency",
        f"median of {count:,} blocking reads of {BLOCK_NBYTES} bytes, random offsets, O_DIRECT",
        [
            *contenders("ours", ours),
            *contenders("peer", {"plain Python os.preadv": python("plain:BlockingReads")}),
            *fio.each_of(configs, psync),
        ],
        "µs",
    )
    theirs = comparison.best("fio")
    for label in ours:
        over = difference(comparison.row(label), theirs)
        note = comparison.described(theirs, "fio psync")
        bench.at_most(f"latency: {label}, over psync", 10, over, note, "µs")
