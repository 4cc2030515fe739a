"""Many small reads at random offsets in one call, against fio's randread at the same depth."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import files, fio
from benchmarks.harness import (
    Comparison,
    Contender,
    Figure,
    Outcome,
    Sample,
    Settings,
    compare,
    ratio,
)
from benchmarks.worker import Worker, workers

SEED = 17
BLOCK_NBYTES = 4096
DEPTH = 128
_CONFIGS = [
    fio.Config("io_uring", "4k", DEPTH),
    fio.Config("io_uring", "4k", DEPTH, registered=True),
    fio.Config("io_uring", "4k", DEPTH, registered=True, huge=True),
    fio.Config("libaio", "4k", DEPTH),
]


def run(settings: Settings) -> Outcome:
    count = 64 if settings.smoke else 10_000
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        path = directory / "source"
        files.write_pattern(path, settings.nbytes, SEED)

        def ours(worker: Worker, number: int) -> Sample:
            files.make_cold(path)
            sample = worker.sample(
                "read", path=str(path), file_nbytes=settings.nbytes, seed=SEED + number
            )
            return _in_operations(sample)

        def theirs(config: fio.Config, number: int) -> Sample:
            files.make_cold(path)
            options = (
                f"--io_size={count * BLOCK_NBYTES}",
                f"--randseed={SEED + number}",
                "--norandommap",
            )
            job = fio.run(config, path, "randread", settings.nbytes, *options)
            return _in_operations(fio.sample(job, "read"))

        def contender(memory: str, aligned: bool) -> Contender:
            options = {"count": count, "block_nbytes": BLOCK_NBYTES, "aligned": aligned}
            worker = make("benchmarks.peers.ours:RandomReads", **options)
            label = f"tensorferry.read_many, {memory}"
            return Contender(label, "ours", lambda number: ours(worker, number))

        def by_fio(config: fio.Config) -> Contender:
            return Contender(
                config.label, "fio", lambda number: theirs(config, number), config.tags
            )

        contenders = [contender("tensorferry.empty", True), contender("torch.empty", False)]
        contenders += [by_fio(config) for config in fio.usable(_CONFIGS, settings)]
        comparison = Comparison(
            "random read",
            f"{count:,} reads of {BLOCK_NBYTES} bytes, depth {DEPTH}, cold file, O_DIRECT",
            "kIOPS",
        )
        compare(settings, comparison, contenders)
    best = comparison.best("fio")
    note = f"best fio: {best.label}, {best.median:.1f} kIOPS" if best else "no fio"
    return Outcome(
        [comparison],
        [
            Figure(
                f"random: {row.label}",
                ">=",
                0.9,
                ratio(row if row.usable else None, best),
                "",
                note,
            )
            for row in comparison.rows
            if row.kind == "ours"
        ],
    )


def _in_operations(sample: Sample) -> Sample:
    """The same sample in thousands of operations a second."""
    return replace(sample, value=sample.nbytes / BLOCK_NBYTES / sample.seconds / 1000)
