"""Small asynchronous reads beside one large write of the same process, against fio's for the same mixture.

A 4 KiB read is begun every few milliseconds, at a random offset of a file that is not in the page cache, while a write
of ordinary memory (2 GiB unless the sizes are smaller) is on its way through the same scheduler, with default settings.
fio does both as two jobs of one process: `randread` of 4 KiB at depth 1 with the same pause between reads, and a
sequential direct `write` of 1 MiB blocks at depth 32: as many bytes in flight as saturate the drives we have met, and
less than ours may have by default (128 MiB). More would make fio's reads wait longer, so this is the harder comparison;
the row at depth 128 is ours in bytes, for the record.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.bench import contenders, scenario
from benchmarks.harness import GIB, MIB, MeasurementError, Row, Sample
from tensorferry.tuning.fio import jobs_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.bench import Bench, Measure

SEED = 23
BLOCK_NBYTES = 4096
PAUSE_SECONDS = 0.004
WRITE_NBYTES_MAX = 2 * GIB
OURS = "tensorferry file.read_into beside file.write_from"
_DEPTHS = (32, 128)


@scenario
def run(bench: Bench) -> None:
    nbytes = min(WRITE_NBYTES_MAX, 2 * bench.nbytes)
    source, target = bench.directory / "source", bench.directory / "target"
    files.write_pattern(source, bench.nbytes, SEED)
    worker = bench.worker("benchmarks.peers.ours:ReadsBesideWrite", nbytes=nbytes)

    reading = {"source": str(source), "target": str(target), "file_nbytes": bench.nbytes}

    def fresh(measure: Callable[[int], dict[str, Any]]) -> Measure:
        """With a file that is cold and one that is not there."""

        def measured(number: int) -> Sample:
            files.make_cold(source)
            files.remove(target)
            return _sample(measure(number))

        return measured

    def ours(number: int) -> dict[str, Any]:
        return worker.call("read", **reading, pause_seconds=PAUSE_SECONDS, seed=SEED + number)

    compared = contenders("ours", {OURS: fresh(ours)})
    for depth in _DEPTHS if fio.installed() else ():
        label = f"fio io_uring, randread qd1 beside write 1M qd{depth}"
        theirs = partial(_fio, source, bench.nbytes, target, nbytes, depth)
        compared += contenders("fio", {label: fresh(theirs)}, f"qd{depth}")
    comparison = bench.compare(
        "fairness",
        f"median latency of {BLOCK_NBYTES} byte reads every {PAUSE_SECONDS * 1000:.0f} ms beside one write of "
        f"{nbytes / MIB:,.0f} MiB, uncached, O_DIRECT",
        compared,
        "ms",
    )
    row, best = comparison.row(OURS), comparison.best("fio", f"qd{_DEPTHS[0]}")
    note = f"{_described(row)}; fio {_described(best)}"
    bench.at_most("fairness: median, over fio", 3, comparison.over(OURS, best), note)
    bench.at_most("fairness: median", 30, comparison.median(OURS), note, "ms")
    for row in comparison.rows:
        if row.usable:
            bench.note(f"{row.label}: {_described(row)}")


def _fio(
    source: Path, source_nbytes: int, target: Path, nbytes: int, depth: int, number: int
) -> dict[str, Any]:
    """Run both jobs; the reads end when the write has."""
    # Percentiles of whole latencies: what the caller waits.
    percentiles = ("--percentile_list=50:99", "--lat_percentiles=1", "--clat_percentiles=0")
    write = ("--name=write", f"--filename={target}", "--rw=write", f"--size={nbytes}", "--bs=1M")
    pause = f"--thinktime={int(PAUSE_SECONDS * 1e6)}"
    jobs = jobs_of(
        [
            *("--ioengine=io_uring", "--direct=1", *percentiles),
            *(*write, f"--iodepth={depth}", "--exitall"),
            *("--name=read", f"--filename={source}", "--rw=randread", f"--size={source_nbytes}"),
            *(f"--bs={BLOCK_NBYTES}", "--iodepth=1", pause, "--norandommap"),
            *(f"--randseed={SEED + number}", "--time_based", "--runtime=600"),
        ]
    )
    written, read = jobs[0]["write"], jobs[1]["read"]
    if written["io_bytes"] != nbytes:
        raise MeasurementError(f"fio wrote {written['io_bytes']} of {nbytes} bytes")
    latency = read["lat_ns"]
    return {
        "count": read["total_ios"],
        "median_ms": latency["percentile"]["50.000000"] / 1e6,
        "p99_ms": latency["percentile"]["99.000000"] / 1e6,
        "maximum_ms": latency["max"] / 1e6,
        "write_seconds": max(written["runtime"], 1) / 1000,
        "nbytes": nbytes,
    }


def _sample(answer: dict[str, Any]) -> Sample:
    seconds = answer["write_seconds"]
    details = {**answer, "write_gb_s": answer["nbytes"] / 1e9 / seconds}
    return Sample(answer["median_ms"], seconds, details=details)


def _described(row: Row | None) -> str:
    """The medians over rounds of what a row's samples say beside their value."""
    if row is None:
        return "not measured"
    samples = sorted(row.samples, key=lambda sample: sample.value)
    median = samples[len(samples) // 2].details
    return (
        f"median {median['median_ms']:.2f} ms, p99 {median['p99_ms']:.1f} ms, {median['count']} reads, "
        f"write {median['write_gb_s']:.2f} GB/s"
    )
