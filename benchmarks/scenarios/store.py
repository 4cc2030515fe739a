"""A thousand tensors of 1 KiB to 64 MiB in a store, in random order, beside fio with the same sizes.

Sizes are powers of two, as many of each. fio moves as many bytes in blocks of each size up to 1 MiB, one size after the
other, to one file: so it never waits for a small tensor beside a large one. Fresh preallocated files, O_DIRECT, no
fsync; cold reads (tensors below 4 KiB are in the page cache), of fio from files that are written once.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import files, fio
from benchmarks.actions import first, measured, seeds
from benchmarks.bench import contenders, scenario
from benchmarks.harness import GIB, MIB, Sample, Settings, throughput

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench

SEED = 29
COUNT = 1000
SMALLEST_NBYTES, LARGEST_NBYTES, BLOCK_NBYTES = 1 << 10, 64 * MIB, MIB
CONFIGS = [
    fio.Config("io_uring", MIB, 32),
    fio.Config("io_uring", MIB, 32, huge_pages=True),
]
ROUNDS = 5  # of eight times the settings' bytes
PLAIN, CHECKED = "store, no checksums", "store"


@scenario
def run(bench: Bench) -> None:
    sizes = tensor_sizes(bench.settings)
    worker = bench.worker("benchmarks.peers.ours:Store", sizes=sizes)
    configs = fio.usable(CONFIGS, bench.settings)
    for call, rules in (
        ("write", "space reserved, O_DIRECT, no fsync"),
        ("read", "cold files, O_DIRECT"),
    ):
        ways = {
            label: measured(
                *(worker, call),
                directory=str(bench.directory),
                checked=label == CHECKED,
                seed=seeds(SEED),
                check=first,
            )
            for label in (PLAIN, CHECKED)
        }
        by_fio = fio.each_of(configs, partial(_theirs, call, bench.directory, sizes))
        comparison = bench.compare(
            f"store: {call}",
            f"{COUNT} tensors, random order, {rules}",
            contenders("ours", ways) + by_fio,
            rounds=bench.rounds_at_most(ROUNDS),
        )
        what = f"store: {COUNT} tensors, {sum(sizes) / GIB:.3g} GiB {call}"
        for label in ways:
            bench.over_fio(f"{what}, {label}", 0.9, comparison, label)


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


def _theirs(call: str, directory: Path, sizes: list[int], config: fio.Config, _: int) -> Sample:
    # What fio is to move in blocks of each size. Less than 4 KiB cannot pass the page cache.
    blocks: Counter[int] = Counter()
    for nbytes in sizes:
        blocks[min(max(nbytes, 4096), BLOCK_NBYTES)] += max(nbytes, 4096)
    seconds = cpu = 0.0
    for block, nbytes in sorted(blocks.items()):
        path = directory / f"fio-{block}"
        if call == "write":
            files.remove(path)
        else:
            if not path.exists():
                files.write_pattern(path, nbytes, SEED)
            files.make_cold(path)
        job = fio.run(replace(config, block_size=block), path, call, nbytes)
        part = fio.sample(job, call)
        seconds += part.seconds
        cpu += part.cpu_seconds or 0.0
    return throughput(seconds, sum(sizes), cpu)
