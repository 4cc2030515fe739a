"""A thousand tensors of 1 KiB to 64 MiB in a store, in random order, beside fio with the same sizes.

Sizes are powers of two, as many of each. fio moves as many bytes in blocks of each size up to 1 MiB, one size after the
other, to one file: so it never waits for a small tensor beside a large one. Fresh preallocated files, O_DIRECT, no
fsync; cold reads (tensors below 4 KiB are in the page cache), of fio from files that are written once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    GIB,
    MIB,
    Comparison,
    Contender,
    Figure,
    Outcome,
    Sample,
    Settings,
    compare,
    ratio,
    throughput,
)
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = 29
COUNT = 1000
SMALLEST_NBYTES, LARGEST_NBYTES, BLOCK_NBYTES = 1 << 10, 64 * MIB, MIB
CONFIGS = [
    fio.Config("io_uring", "1M", 32),
    fio.Config("io_uring", "1M", 32, huge=True),
]
ROUNDS = 5  # of eight times the settings' bytes
PLAIN, CHECKED = "store, no checksums", "store"


def run(settings: Settings) -> Outcome:
    sizes = tensor_sizes(settings)
    total = sum(sizes)
    configs = fio.usable(CONFIGS, settings)
    outcome = Outcome()
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        worker = make("benchmarks.peers.ours:Store", sizes=sizes)
        for call, rules in (
            ("write", "space reserved, O_DIRECT, no fsync"),
            ("read", "cold files, O_DIRECT"),
        ):
            comparison = Comparison(f"store: {call}", f"{COUNT} tensors, random order, {rules}")
            contenders = [
                Contender(label, "ours", _ours(worker, call, directory, label == CHECKED))
                for label in (PLAIN, CHECKED)
            ]
            contenders += [
                Contender(config.label, "fio", _theirs(config, call, directory, sizes), config.tags)
                for config in configs
            ]
            few = replace(settings, rounds=min(settings.rounds, ROUNDS))
            outcome.comparisons.append(compare(few, comparison, contenders))
            best = comparison.best("fio")
            note = f"best fio: {best.label}, {best.median:.2f} GB/s" if best else "no fio"
            what = f"store: {COUNT} tensors, {total / GIB:.3g} GiB {call}"
            outcome.figures += [
                Figure(f"{what}, {label}", ">=", 0.9, ratio(comparison.row(label), best), "", note)
                for label in (PLAIN, CHECKED)
            ]
    return outcome


def tensor_sizes(settings: Settings) -> list[int]:
    """Return the tensors' bytes, in the order in which they are written: eight times the settings' at most."""
    largest = LARGEST_NBYTES
    while True:
        kinds = (largest // SMALLEST_NBYTES).bit_length()
        sizes = [SMALLEST_NBYTES << at % kinds for at in range(COUNT)]
        if sum(sizes) <= 8 * settings.nbytes or largest == SMALLEST_NBYTES:
            break
        largest //= 2
    random.Random(SEED).shuffle(sizes)
    return sizes


def _ours(worker: Worker, call: str, directory: Path, checked: bool) -> Callable[[int], Any]:
    def measure(number: int) -> Any:
        return worker.sample(
            call, directory=str(directory), checked=checked, seed=SEED + number, check=number == 0
        )

    return measure


def _theirs(
    config: fio.Config, call: str, directory: Path, sizes: list[int]
) -> Callable[[int], Sample]:
    # What fio is to move in blocks of each size. Less than 4 KiB cannot pass the page cache.
    blocks: Counter[int] = Counter()
    for nbytes in sizes:
        blocks[min(max(nbytes, 4096), BLOCK_NBYTES)] += max(nbytes, 4096)

    def measure(_: int) -> Sample:
        seconds = cpu = 0.0
        for block, nbytes in sorted(blocks.items()):
            path = directory / f"fio-{block}"
            if call == "write":
                files.remove(path)
            else:
                if not path.exists():
                    files.write_pattern(path, nbytes, SEED)
                files.make_cold(path)
            job = fio.run(replace(config, block_size=f"{block >> 10}k"), path, call, nbytes)
            part = fio.sample(job, call)
            seconds += part.seconds
            cpu += part.cpu_seconds or 0.0
        return throughput(seconds, sum(sizes), cpu)

    return measure
