"""Small reads, many tensors of all sizes, and the time of an import."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorferry
from benchmarks import memory
from benchmarks.bench import (
    GIB,
    MIB,
    Config,
    first,
    measured,
    scenario,
    seeds,
)
from benchmarks.memory import Stopwatch, write_pattern
from benchmarks.peers import byte_view, new_tensor, ordinary_tensor
from tensorferry.store import TensorStore
from tensorferry.tuning import fio
from tensorferry.tuning.rounds import MeasurementError, Sample, throughput
from tensorferry.tuning.scratch import make_cold, remove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import torch

    from benchmarks.bench import Bench, Measure

SEED = 17
BLOCK_NBYTES = 4096
DEPTH = 128
_CONFIGS = [
    Config("io_uring", BLOCK_NBYTES, DEPTH),
    Config("io_uring", BLOCK_NBYTES, DEPTH, registered=True),
    Config("io_uring", BLOCK_NBYTES, DEPTH, registered=True, huge_pages=True),
    Config("libaio", BLOCK_NBYTES, DEPTH),
]
# Report percentiles of the total latency, which is the caller's waiting time.
_LATENCIES = ("--percentile_list=50:99", "--lat_percentiles=1", "--clat_percentiles=0")
_MEDIAN = "50.000000"


class RandomReads:
    """Reads of 4 KiB at random offsets of one cold file: many in one ``read_many``, or a sequence of blocking reads."""

    def __init__(self, count: int, aligned: bool) -> None:
        self.count = count
        self.flat = new_tensor(count * BLOCK_NBYTES, aligned)

    def many(self, path: Path, file_nbytes: int, seed: int) -> dict[str, Any]:
        places = list(self._places(file_nbytes, seed))
        blocks = list(self.flat.view(self.count, BLOCK_NBYTES))
        requests = [(path, a, o) for a, o in zip(blocks, places, strict=True)]
        with Stopwatch() as watch:
            tensorferry.read_many(requests)
        with open(path, "rb", buffering=0) as file:
            for number in range(0, len(places), max(1, len(places) // 100)):
                file.seek(places[number])
                if blocks[number].numpy().tobytes() != file.read(BLOCK_NBYTES):
                    raise MeasurementError("read other bytes than the file holds")
        nbytes = len(requests) * BLOCK_NBYTES
        return watch.as_value(self.count / watch.seconds / 1000, nbytes)

    def blocking(self, path: Path, file_nbytes: int, seed: int) -> dict[str, Any]:
        with tensorferry.open(path, direct=True) as file:
            block = self.flat[:BLOCK_NBYTES]
            return self._timed(lambda at: file.read(block, at), file_nbytes, seed)

    def plain(self, path: Path, file_nbytes: int, seed: int) -> dict[str, Any]:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        block = byte_view(self.flat[:BLOCK_NBYTES])
        try:
            return self._timed(lambda at: os.preadv(descriptor, [block], at), file_nbytes, seed)
        finally:
            os.close(descriptor)

    def _places(self, file_nbytes: int, seed: int) -> Iterator[int]:
        generator = random.Random(seed)
        for _ in range(self.count):
            yield generator.randrange(file_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES

    def _timed(self, read: Callable[[int], object], file_nbytes: int, seed: int) -> dict[str, Any]:
        microseconds = []
        for offset in self._places(file_nbytes, seed):
            start = time.perf_counter_ns()
            read(offset)
            microseconds.append((time.perf_counter_ns() - start) / 1000)
        return {"value": statistics.median(microseconds), "seconds": sum(microseconds) / 1e6}


class _Reads:
    """A file for random reads, and the measurements that read it."""

    def __init__(self, bench: Bench, count: int) -> None:
        self.bench, self.count = bench, count
        self.path = bench.directory / "source"
        write_pattern(self.path, bench.nbytes, SEED)

    def by(self, call: str, *, aligned: bool) -> Measure:
        worker = self.bench.worker(RandomReads, count=self.count, aligned=aligned)
        where = {"path": self.path, "file_nbytes": self.bench.nbytes, "seed": seeds(SEED)}
        return measured(worker, call, make_cold, [self.path], **where)

    def by_fio(self, config: Config, number: int, *options: str) -> dict[str, Any]:
        make_cold(self.path)
        size, seed = f"--io_size={self.count * BLOCK_NBYTES}", f"--randseed={SEED + number}"
        chosen = [*config.arguments(), size, seed, "--norandommap", *options]
        job: dict[str, Any] = fio.run([self.path], "randread", self.bench.nbytes, chosen)[0]
        return job


@scenario
def random_reads(bench: Bench) -> None:
    """Compare many reads in one call with fio's randread at the same depth."""
    reads = _Reads(bench, 64 if bench.smoke else 10_000)

    def theirs(config: Config, number: int) -> Sample:
        sample = fio.sample(reads.by_fio(config, number), "read")
        return replace(sample, value=sample.nbytes / BLOCK_NBYTES / sample.seconds / 1000)

    ours = {
        "tensorferry.read_many, tensorferry.empty": reads.by("many", aligned=True),
        "tensorferry.read_many, torch.empty": reads.by("many", aligned=False),
    }
    comparison = bench.compare(
        "random read",
        f"{reads.count:,} reads of {BLOCK_NBYTES} bytes, depth {DEPTH}, cold file, O_DIRECT",
        ours=ours,
        more=bench.each_fio(_CONFIGS, theirs),
        unit="kIOPS",
    )
    for label in ours:
        bench.over_fio(f"random: {label}", 0.9, comparison, label)


@scenario
def latency(bench: Bench) -> None:
    """Compare the latency of sequential blocking reads with that of fio's psync engine."""
    reads = _Reads(bench, 16 if bench.smoke else 2_000)

    def psync(config: Config, number: int) -> Sample:
        report = reads.by_fio(config, number, *_LATENCIES)["read"]
        return Sample(report["lat_ns"]["percentile"][_MEDIAN] / 1000, report["runtime"] / 1000)

    ours = {
        "tensorferry file.read, tensorferry.empty": reads.by("blocking", aligned=True),
        "tensorferry file.read, torch.empty": reads.by("blocking", aligned=False),
    }
    comparison = bench.compare(
        "latency",
        f"median of {reads.count:,} blocking reads of {BLOCK_NBYTES} bytes, random offsets, O_DIRECT",
        ours=ours,
        peer={"plain Python os.preadv": reads.by("plain", aligned=True)},
        more=bench.each_fio([Config("psync", BLOCK_NBYTES, 1)], psync),
        unit="µs",
    )
    best = comparison.best("fio")
    for label in ours:
        over, note = comparison.above(label, best), comparison.describe(best, "fio psync")
        bench.at_most(f"latency: {label}, over psync", 10, over, note, "µs")


# A thousand tensors of 1 KiB to 64 MiB in a store, in random order, compared with fio with blocks of the same sizes.
#
# The sizes are powers of two, with equally many tensors of each size. fio moves as many bytes for each size, in blocks
# of that size up to 1 MiB. It moves one size after the other, each with its own file, so a small tensor never waits
# behind a large one. Writes use fresh preallocated files, O_DIRECT and no fsync. Reads are cold, except that tensors
# below 4 KiB are in the page cache; fio reads files that are written once.

COUNT = 1000
SMALLEST_NBYTES, LARGEST_NBYTES, LARGEST_BLOCK_NBYTES = 1 << 10, 64 * MIB, MIB
STORE_FIOS = [Config("io_uring", MIB, 32), Config("io_uring", MIB, 32, huge_pages=True)]
STORE_ROUNDS = 5  # each round moves up to eight times --nbytes
UNCHECKED, CHECKED = "store, no checksums", "store"


class Store:
    """Tensors of many sizes to and from a store, in random order; a pool of memory limits the bytes in flight."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.pool = ordinary_tensor(max(4 * max(sizes), 64 * MIB))
        self.stores: dict[bool, TensorStore] = {}
        self.seeds: dict[bool, int] = {}

    def write(self, directory: Path, checked: bool, seed: int, check: bool) -> dict[str, Any]:
        memory.fill(byte_view(self.pool), seed)
        if checked in self.stores:
            self.stores.pop(checked).close()
        store = self.stores[checked] = TensorStore(str(directory), checksums=checked)
        store.reserve({str(at): nbytes for at, nbytes in enumerate(self.sizes)}, in_flight_nbytes=0)
        self.seeds[checked] = seed
        order = range(len(self.sizes))
        with Stopwatch() as watch:
            self._move(order, lambda at, part: store.write(str(at), part))
        return self._result(watch, store, seed if check else None)

    def read(self, directory: Path, checked: bool, seed: int, check: bool) -> dict[str, Any]:
        store, order = self.stores[checked], list(range(len(self.sizes)))
        random.Random(seed).shuffle(order)
        with Stopwatch() as watch:
            self._move(order, lambda at, part: store.read(str(at), out=part))
        return self._result(watch, store, self.seeds[checked] if check else None)

    def _move(self, order: Iterable[int], begin: Callable[[int, torch.Tensor], Any]) -> None:
        """Begin all transfers in order, each with a part of the pool, as soon as earlier transfers of that part end."""
        pending: deque[tuple[int, int, Any]] = deque()
        last = 0
        for at, start in self._parts(order):
            end = start + self.sizes[at]
            # The queue begins with the oldest transfers. When the parts begin at offset 0 of the pool again, wait for
            # all transfers in its rest; then for those that overlap this part.
            while pending and (start < last <= pending[0][0] or start <= pending[0][0] < end):
                pending.popleft()[2].result()
            pending.append((start, end, begin(at, self.pool[start:end])))
            last = end
        for _, _, ticket in pending:
            ticket.result()

    def _parts(self, order: Iterable[int]) -> Iterator[tuple[int, int]]:
        start = 0
        for at in order:
            space = -(-self.sizes[at] // 4096) * 4096
            if start + space > self.pool.nbytes:
                start = 0
            yield at, start
            start += space

    def _result(self, watch: Stopwatch, store: TensorStore, seed: int | None) -> dict[str, Any]:
        for at, start in self._parts(range(len(self.sizes))) if seed is not None else ():
            if not memory.matches(byte_view(store.read(str(at)).result()), seed, start):  # type: ignore[arg-type]
                raise MeasurementError(f"read other bytes of tensor {at} than were written")
        return watch.result(sum(self.sizes))


@scenario
def store(bench: Bench) -> None:
    sizes = tensor_sizes(bench.nbytes)
    worker = bench.worker(Store, sizes=sizes)
    for call, rules in (
        ("write", "space reserved, O_DIRECT, no fsync"),
        ("read", "cold files, O_DIRECT"),
    ):
        how = {"directory": bench.directory, "seed": seeds(SEED), "check": first}
        ways = {
            label: measured(worker, call, checked=label == CHECKED, **how)
            for label in (UNCHECKED, CHECKED)
        }
        comparison = bench.compare(
            f"store: {call}",
            f"{COUNT} tensors, random order, {rules}",
            ours=ways,
            more=bench.each_fio(STORE_FIOS, partial(_by_fio, call, bench.directory, sizes)),
            rounds=bench.rounds_at_most(STORE_ROUNDS),
        )
        what = f"store: {COUNT} tensors, {sum(sizes) / GIB:.3g} GiB {call}"
        for label in ways:
            bench.over_fio(f"{what}, {label}", 0.9, comparison, label)


def tensor_sizes(nbytes: int) -> list[int]:
    """Return the sizes of the tensors in the order of their writes; their sum is at most eight times ``nbytes``."""
    largest = LARGEST_NBYTES
    while True:
        kinds = (largest // SMALLEST_NBYTES).bit_length()
        sizes = [SMALLEST_NBYTES << at % kinds for at in range(COUNT)]
        if sum(sizes) <= 8 * nbytes or largest == SMALLEST_NBYTES:
            break
        largest //= 2
    random.Random(SEED).shuffle(sizes)
    return sizes


def _by_fio(call: str, directory: Path, sizes: list[int], config: Config, _: int) -> Sample:
    # The bytes that fio moves in blocks of each size; direct I/O needs blocks of at least 4 KiB.
    blocks: Counter[int] = Counter()
    for nbytes in sizes:
        blocks[min(max(nbytes, 4096), LARGEST_BLOCK_NBYTES)] += max(nbytes, 4096)
    parts = []
    for block, nbytes in sorted(blocks.items()):
        path = directory / f"fio-{block}"
        if call == "read" and not path.exists():
            write_pattern(path, nbytes, SEED)
        (remove if call == "write" else make_cold)(path)
        arguments = replace(config, block_size=block).arguments()
        parts.append(fio.sample(fio.run([path], call, nbytes, arguments)[0], call))
    seconds = sum(part.seconds for part in parts)
    return throughput(seconds, sum(sizes), sum(part.cpu_seconds or 0.0 for part in parts))


# The time of `import tensorferry` in a fresh interpreter, which must not import torch

IMPORT_ROUNDS_MIN = 15
BARE, IMPORT = "bare interpreter", "import tensorferry"
_CHECK = "import sys, tensorferry; sys.exit('torch' in sys.modules)"


@scenario
def import_time(bench: Bench) -> None:
    _run(_CHECK)
    comparison = bench.compare(
        "import",
        "whole process, files in the page cache",
        ours={IMPORT: partial(_time, IMPORT)},
        peer={BARE: partial(_time, "pass"), "import numpy": partial(_time, "import numpy")},
        unit="ms",
        rounds=2 if bench.smoke else max(IMPORT_ROUNDS_MIN, bench.settings.rounds),
    )
    over = comparison.above(IMPORT, BARE)
    bench.at_most("import tensorferry, without torch", 60, over, "over a bare interpreter", "ms")


def _time(code: str, _: int) -> Sample:
    start = time.perf_counter()
    _run(code)
    seconds = time.perf_counter() - start
    return Sample(seconds * 1000, seconds)


def _run(code: str) -> None:
    # Allow Python to write .pyc files, which exist on every machine where the package was imported before.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise MeasurementError(words[-1] if words else "importing tensorferry imports torch")
