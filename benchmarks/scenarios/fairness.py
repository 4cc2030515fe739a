"""Small asynchronous reads beside one large write of the same process, against fio's for the same mixture.

A 4 KiB read is begun every few milliseconds, at a random offset of a file that is not in the page cache, while a write
of ordinary memory (2 GiB unless the sizes are smaller) is on its way through the same scheduler, with default settings.
fio does both as two jobs of one process: `randread` of 4 KiB at depth 1 with the same pause between reads, and a
sequential direct `write` of 1 MiB blocks at depth 32: as many bytes in flight as saturate the drives we have met, and
less than ours may have by default (128 MiB). More would make fio's reads wait longer, so this is the harder comparison;
the row at depth 128 is ours in bytes, for the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    GIB,
    MIB,
    Comparison,
    Contender,
    Figure,
    MeasurementError,
    Outcome,
    Sample,
    Settings,
    compare,
    ratio,
)
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from pathlib import Path

SEED = 23
BLOCK_NBYTES = 4096
PAUSE_SECONDS = 0.004
WRITE_NBYTES_MAX = 2 * GIB
OURS = "tensorferry file.read_into beside file.write_from"
_DEPTHS = (32, 128)


def run(settings: Settings) -> Outcome:
    nbytes = min(WRITE_NBYTES_MAX, 2 * settings.nbytes)
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        source, target = directory / "source", directory / "target"
        files.write_pattern(source, settings.nbytes, SEED)

        def ours(worker: Worker, number: int) -> Sample:
            files.make_cold(source)
            files.remove(target)
            answer = worker.call(
                "read",
                source=str(source),
                file_nbytes=settings.nbytes,
                target=str(target),
                pause_seconds=PAUSE_SECONDS,
                seed=SEED + number,
            )
            return _sample(answer)

        def theirs(depth: int, number: int) -> Sample:
            files.make_cold(source)
            files.remove(target)
            return _sample(_fio(source, settings.nbytes, target, nbytes, depth, number))

        worker = make("benchmarks.peers.ours:ReadsBesideWrite", nbytes=nbytes)
        contenders = [Contender(OURS, "ours", lambda number: ours(worker, number))]
        if fio.installed():
            contenders += [
                Contender(
                    f"fio io_uring, randread qd1 beside write 1M qd{depth}",
                    "fio",
                    lambda number, depth=depth: theirs(depth, number),  # type: ignore[misc]
                    (f"qd{depth}",),
                )
                for depth in _DEPTHS
            ]
        comparison = Comparison(
            "fairness",
            f"median latency of {BLOCK_NBYTES} byte reads every {PAUSE_SECONDS * 1000:.0f} ms beside one write of "
            f"{nbytes / MIB:,.0f} MiB, uncached, O_DIRECT",
            "ms",
            higher_is_better=False,
        )
        compare(settings, comparison, contenders)
    outcome = Outcome([comparison])
    row, best = comparison.row(OURS), comparison.best("fio", f"qd{_DEPTHS[0]}")
    note = f"{_described(row)}; fio {_described(best)}"
    outcome.figures = [
        Figure("fairness: median, over fio", "<=", 3, ratio(row, best), "", note),
        Figure("fairness: median", "<=", 30, row.median if row else None, "ms", note),
    ]
    outcome.notes = [f"{row.label}: {_described(row)}" for row in comparison.rows if row.usable]
    return outcome


def _fio(
    source: Path, source_nbytes: int, target: Path, nbytes: int, depth: int, number: int
) -> dict[str, Any]:
    """Run both jobs; the reads end when the write has."""
    # Percentiles of whole latencies: what the caller waits.
    percentiles = ("--percentile_list=50:99", "--lat_percentiles=1", "--clat_percentiles=0")
    write = ("--name=write", f"--filename={target}", "--rw=write", f"--size={nbytes}", "--bs=1M")
    pause = f"--thinktime={int(PAUSE_SECONDS * 1e6)}"
    jobs = fio.run_jobs(
        *("--ioengine=io_uring", "--direct=1", *percentiles),
        *(*write, f"--iodepth={depth}", "--exitall"),
        *("--name=read", f"--filename={source}", "--rw=randread", f"--size={source_nbytes}"),
        *(f"--bs={BLOCK_NBYTES}", "--iodepth=1", pause, "--norandommap"),
        *(f"--randseed={SEED + number}", "--time_based", "--runtime=600"),
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


def _described(row: Any) -> str:
    """The medians over rounds of what a row's samples say beside their value."""
    if row is None:
        return "not measured"
    samples = sorted(row.samples, key=lambda sample: sample.value)
    median = samples[len(samples) // 2].details
    return (
        f"median {median['median_ms']:.2f} ms, p99 {median['p99_ms']:.1f} ms, {median['count']} reads, "
        f"write {median['write_gb_s']:.2f} GB/s"
    )
