"""One blocking 4 KiB read on an open file, over what fio's psync needs for the same."""

from __future__ import annotations

import statistics

from benchmarks import files, fio
from benchmarks.harness import (
    Comparison,
    Contender,
    Figure,
    Outcome,
    Sample,
    Settings,
    compare,
    difference,
)
from benchmarks.worker import Worker, workers

SEED = 19
BLOCK_NBYTES = 4096
ALIGNED = "tensorferry file.read, tensorferry.empty"
PLAIN = "tensorferry file.read, torch.empty"


def run(settings: Settings) -> Outcome:
    count = 16 if settings.smoke else 2_000
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        path = directory / "source"
        files.write_pattern(path, settings.nbytes, SEED)

        def python(worker: Worker, number: int) -> Sample:
            files.make_cold(path)
            answer = worker.call(
                "read", path=str(path), file_nbytes=settings.nbytes, count=count, seed=SEED + number
            )
            times = answer["microseconds"]
            seconds = sum(times) / 1e6
            mean = statistics.fmean(times)
            return Sample(statistics.median(times), seconds, details={"mean_microseconds": mean})

        def psync(number: int) -> Sample:
            files.make_cold(path)
            config = fio.Config("psync", "4k", 1)
            options = (
                f"--io_size={count * BLOCK_NBYTES}",
                f"--randseed={SEED + number}",
                "--norandommap",
                "--percentile_list=50",
                "--lat_percentiles=1",
                "--clat_percentiles=0",
            )
            report = fio.run(config, path, "randread", settings.nbytes, *options)["read"]
            latency = report["lat_ns"]
            mean = latency["mean"] / 1000
            median = latency["percentile"]["50.000000"] / 1000
            return Sample(median, report["runtime"] / 1000, details={"mean_microseconds": mean})

        ours = "benchmarks.peers.ours:BlockingReads"
        aligned = make(ours, block_nbytes=BLOCK_NBYTES, aligned=True)
        plain = make(ours, block_nbytes=BLOCK_NBYTES, aligned=False)
        preadv = make("benchmarks.peers.plain:BlockingReads", block_nbytes=BLOCK_NBYTES)
        contenders = [
            Contender(ALIGNED, "ours", lambda number: python(aligned, number)),
            Contender(PLAIN, "ours", lambda number: python(plain, number)),
            Contender("plain Python os.preadv", "peer", lambda number: python(preadv, number)),
        ]
        if fio.installed():
            contenders.append(Contender("fio psync", "fio", psync))
        comparison = Comparison(
            "latency",
            f"median of {count:,} blocking reads of {BLOCK_NBYTES} bytes, random offsets, O_DIRECT",
            "µs",
            higher_is_better=False,
        )
        compare(settings, comparison, contenders)
    outcome = Outcome([comparison])
    theirs = comparison.best("fio")
    for label in (ALIGNED, PLAIN):
        row = comparison.row(label)
        over = difference(row, theirs)
        note = f"fio psync {theirs.median:.1f} µs" if theirs else "no fio"
        outcome.figures.append(Figure(f"latency: {label}, over psync", "<=", 10, over, "µs", note))
    return outcome
