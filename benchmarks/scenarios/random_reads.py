"""Many small reads at random offsets in one call, against fio's randread at the same depth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.actions import measured, seeds
from benchmarks.bench import contenders, scenario

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Measure
    from benchmarks.harness import Sample

SEED = 17
BLOCK_NBYTES = 4096
DEPTH = 128
_CONFIGS = [
    fio.Config("io_uring", BLOCK_NBYTES, DEPTH),
    fio.Config("io_uring", BLOCK_NBYTES, DEPTH, registered=True),
    fio.Config("io_uring", BLOCK_NBYTES, DEPTH, registered=True, huge_pages=True),
    fio.Config("libaio", BLOCK_NBYTES, DEPTH),
]


@scenario
def run(bench: Bench) -> None:
    count = 64 if bench.smoke else 10_000
    path = bench.directory / "source"
    files.write_pattern(path, bench.nbytes, SEED)

    def ours(*, aligned: bool) -> Measure:
        options = {"count": count, "block_nbytes": BLOCK_NBYTES, "aligned": aligned}
        worker = bench.worker("benchmarks.peers.ours:RandomReads", **options)
        where: dict[str, Any] = {"path": str(path), "file_nbytes": bench.nbytes}
        read = measured(worker, "read", files.make_cold, [path], **where, seed=seeds(SEED))
        return lambda number: _in_operations(read(number))

    def theirs(config: fio.Config, number: int) -> Sample:
        files.make_cold(path)
        options = fio.random_options(count * BLOCK_NBYTES, SEED + number)
        job = fio.run(config, path, "randread", bench.nbytes, *options)
        return _in_operations(fio.sample(job, "read"))

    ways = {
        "tensorferry.read_many, tensorferry.empty": ours(aligned=True),
        "tensorferry.read_many, torch.empty": ours(aligned=False),
    }
    by_fio = fio.each_of(fio.usable(_CONFIGS, bench.settings), theirs)
    comparison = bench.compare(
        "random read",
        f"{count:,} reads of {BLOCK_NBYTES} bytes, depth {DEPTH}, cold file, O_DIRECT",
        contenders("ours", ways) + by_fio,
        "kIOPS",
    )
    for label in ways:
        bench.over_fio(f"random: {label}", 0.9, comparison, label)


def _in_operations(sample: Sample) -> Sample:
    """The same sample in thousands of operations a second."""
    return replace(sample, value=sample.nbytes / BLOCK_NBYTES / sample.seconds / 1000)
