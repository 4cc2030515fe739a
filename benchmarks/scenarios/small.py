"""Small reads, rows of a table, many tensors of all sizes, and the time of an import."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorferry
from benchmarks import memory
from benchmarks.bench import (
    GIB,
    MIB,
    Config,
    contenders_of,
    first,
    measured,
    scenario,
    seeds,
)
from benchmarks.memory import Stopwatch, write_pattern
from benchmarks.peers import byte_view, new_tensor, ordinary_tensor
from tensorferry.store import TensorStore
from tensorferry.tuning import fio
from tensorferry.tuning.rounds import MeasurementError, Row, Sample, throughput
from tensorferry.tuning.scratch import make_cold, make_warm, remove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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


# The CPU time of one small asynchronous read, from memory, without waiting for a device

FUTURES, AWAITED = "file.read_into, result", "file.read_into, await"
_AT_ONCE = 64


class SmallFutures:
    """Reads of 4 KiB of a file on tmpfs: 64 are begun, and then awaited one after the other."""

    def __init__(self, count: int) -> None:
        self.rounds = count // _AT_ONCE
        self.blocks = [ordinary_tensor(BLOCK_NBYTES, 0) for _ in range(_AT_ONCE)]

    def result(self, path: Path) -> dict[str, Any]:
        with tensorferry.open(path) as file, Stopwatch() as watch:
            for _ in range(self.rounds):
                for future in self._begun(file):
                    future.result()
        return self._value(watch)

    def awaited(self, path: Path) -> dict[str, Any]:
        async def read(file: tensorferry.File) -> None:
            for _ in range(self.rounds):
                for future in self._begun(file):
                    await future

        with tensorferry.open(path) as file, Stopwatch() as watch:
            asyncio.run(read(file))
        return self._value(watch)

    def blocking(self, path: Path) -> dict[str, Any]:
        with tensorferry.open(path) as file, Stopwatch() as watch:
            for _ in range(self.rounds):
                for at, block in enumerate(self.blocks):
                    file.read(block, at * BLOCK_NBYTES)
        return self._value(watch)

    def plain(self, path: Path) -> dict[str, Any]:
        views = [byte_view(block) for block in self.blocks]
        descriptor = os.open(path, os.O_RDONLY)
        with Stopwatch() as watch:
            for _ in range(self.rounds):
                for at, view in enumerate(views):
                    os.preadv(descriptor, [view], at * BLOCK_NBYTES)
        os.close(descriptor)
        return self._value(watch)

    def _begun(self, file: tensorferry.File) -> list[tensorferry.Future[Any]]:
        blocks = enumerate(self.blocks)
        return [file.read_into(block, at * BLOCK_NBYTES) for at, block in blocks]

    def _value(self, watch: Stopwatch) -> dict[str, Any]:
        return watch.as_value(watch.cpu_seconds / (self.rounds * _AT_ONCE) * 1e6)


@scenario
def futures(bench: Bench) -> None:
    """Compare the CPU time of one read of 4 KiB with that of a plain system call."""
    count = _AT_ONCE * (2 if bench.smoke else 500)
    worker = bench.worker(SmallFutures, count=count)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "source"
        write_pattern(path, _AT_ONCE * BLOCK_NBYTES, SEED)

        def by(call: str) -> Measure:
            return measured(worker, call, lambda _: None, [path], path=path)

        comparison = bench.compare(
            "futures",
            f"CPU time of one read of {BLOCK_NBYTES} bytes, {_AT_ONCE} at a time, tmpfs",
            ours={FUTURES: by("result"), AWAITED: by("awaited"), "file.read": by("blocking")},
            peer={"plain Python os.preadv": by("plain")},
            unit="µs",
        )
    bench.at_most("futures: result", 8, comparison.median(FUTURES), unit="µs")
    bench.at_most("futures: await", 12, comparison.median(AWAITED), unit="µs")


# Random rows of a table in a safetensors file, which all contenders can read, by row number.
#
# Each sample makes a new memory map, because mapped pages cannot be dropped from the page cache. With a warm file there
# is also a contender that keeps its map, and has no more page faults.

ROWS = 4096
ROW_SIZES = (4096, 320)
TABLE_AT = 4096  # offset of the table; the header before it is padded to this size
OURS_OF_ROWS = "tensorferry.Table.gather"
_READERS = 32  # threads


class Rows:
    """A contender that reads rows by number into new memory, with the methods of several libraries."""

    def __init__(self, path: Path, rows: int, row_nbytes: int) -> None:
        self.path, self.shape = path, (rows, row_nbytes)
        self.kept: Any = None

    def gather(self, seed: int) -> dict[str, Any]:
        import numpy as np

        with tensorferry.Table(self.path, self.shape, np.uint8, TABLE_AT) as table:
            return self._timed(table.gather, seed)

    def memmap(self, seed: int) -> dict[str, Any]:
        return self._timed(lambda ids: self._map()[ids], seed)

    def kept_memmap(self, seed: int) -> dict[str, Any]:
        self.kept = self._map() if self.kept is None else self.kept
        return self._timed(lambda ids: self.kept[ids], seed)

    def from_file(self, seed: int) -> dict[str, Any]:
        import torch

        count = TABLE_AT + self.shape[0] * self.shape[1]

        def read(ids: Any) -> Any:
            flat = torch.from_file(str(self.path), size=count, dtype=torch.uint8)
            return flat[TABLE_AT:].view(self.shape)[torch.from_numpy(ids)].numpy()

        return self._timed(read, seed)

    def get_slice(self, module: str, seed: int) -> dict[str, Any]:
        import importlib

        import numpy as np

        library = importlib.import_module(module)

        def read(ids: Any) -> Any:
            with library.safe_open(self.path, "np") as file:
                part = file.get_slice("table")
                if module == "safetensors":  # its slices do not accept lists of rows
                    return np.concatenate([part[row : row + 1] for row in ids.tolist()])
                return part[ids.tolist()]

        return self._timed(read, seed)

    def threads(self, seed: int) -> dict[str, Any]:
        import numpy as np

        def read(ids: Any) -> Any:
            found = np.empty((len(ids), self.shape[1]), np.uint8)
            descriptor = os.open(self.path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            places = sorted(zip(ids.tolist(), found, strict=True), key=lambda one: one[0])

            def part(first: int) -> None:
                for row, place in places[first::_READERS]:
                    os.preadv(descriptor, [place], TABLE_AT + row * self.shape[1])

            with ThreadPoolExecutor(_READERS) as pool:
                list(pool.map(part, range(_READERS)))
            os.close(descriptor)
            return found

        return self._timed(read, seed)

    def _map(self) -> Any:
        import numpy as np

        return np.memmap(self.path, np.uint8, "r", TABLE_AT, self.shape)

    def _timed(self, read: Callable[[Any], Any], seed: int) -> dict[str, Any]:
        import numpy as np

        ids = np.random.default_rng(seed).integers(0, self.shape[0], ROWS)
        before = memory.drive_nbytes("read")
        with Stopwatch() as watch:
            found = read(ids)
        nbytes = memory.drive_nbytes("read") - before
        for at in range(0, ROWS, 64):
            begin = int(ids[at]) * self.shape[1] + TABLE_AT
            if not memory.matches(found[at].tobytes(), SEED, begin):
                raise MeasurementError("read other bytes than the file holds")
        pages = {
            page
            for begin in (ids * self.shape[1] + TABLE_AT).tolist()
            for page in range(begin // 4096, (begin + self.shape[1] - 1) // 4096 + 1)
        }
        return watch.as_value(
            ROWS / watch.seconds / 1000, found.nbytes, over_pages=nbytes / 4096 / len(pages)
        )


@scenario
def gather(bench: Bench) -> None:
    """Compare reads of rows of a table of four times ``--nbytes``, cold and cached, with others and fio's randread."""
    path, whole = bench.directory / "table", math.lcm(*ROW_SIZES)
    nbytes = 4 * bench.nbytes // whole * whole
    write_pattern(path, TABLE_AT + nbytes, SEED)
    config = Config("io_uring", BLOCK_NBYTES, DEPTH)

    def by_fio(config: Config, number: int) -> Sample:
        make_cold(path)
        size, seed = f"--io_size={ROWS * BLOCK_NBYTES}", f"--randseed={SEED + number}"
        chosen = [*config.arguments(), size, seed, "--norandommap"]
        sample = fio.sample(fio.run([path], "randread", nbytes, chosen)[0], "read")
        return replace(sample, value=sample.nbytes / BLOCK_NBYTES / sample.seconds / 1000)

    for state, prepare in (("cold", make_cold), ("cached", make_warm)):
        for row_nbytes in ROW_SIZES:
            if bench.smoke and (state == "cold") != (row_nbytes == BLOCK_NBYTES):
                continue  # a smoke test needs each state and each size once only
            rows = nbytes // row_nbytes
            _write_header(path, rows, row_nbytes)
            reader = {"path": path, "rows": rows, "row_nbytes": row_nbytes}

            def by(call: str, prepare: Any = prepare, **more: Any) -> Measure:
                worker = bench.worker(Rows, **reader)  # noqa: B023
                return measured(worker, call, prepare, [path], seed=seeds(SEED), **more)

            others = {
                "numpy.memmap": by("memmap"),
                "torch.from_file": by("from_file"),
                "safetensors get_slice": by("get_slice", module="safetensors"),
                f"{_READERS} threads with preadv": by("threads"),
            }
            if state == "cached":
                others["numpy.memmap, kept"] = by("kept_memmap")
            depths = [replace(config, queue_depth=depth) for depth in (32, DEPTH, 256)]
            comparison = bench.compare(
                f"{row_nbytes} B, {state}",
                f"{ROWS:,} random rows of {row_nbytes} bytes of {nbytes / GIB:.3g} GiB, {state}",
                ours={OURS_OF_ROWS: by("gather")}
                | {"tensorferry get_slice": by("get_slice", module="tensorferry.safetensors")},
                peer=others,
                more=bench.each_fio(depths, by_fio) if state == "cold" else (),
                unit="krows/s",
            )
            what = f"gather of {row_nbytes} B, {state}"
            row = comparison.row(OURS_OF_ROWS)
            samples = row.samples if row else []
            if state == "cold":
                bench.over_fio(what, 0.9, comparison, OURS_OF_ROWS)
                read = [sample.details["over_pages"] for sample in samples]
                middle = statistics.median(read) if read else None
                bench.at_most(f"{what}: bytes read over distinct pages", 1.05, middle)
            else:
                costs = [(sample.cpu_seconds or 0.0) / ROWS * 1e6 for sample in samples]
                middle = statistics.median(costs) if costs else None
                most = 2.0 if row_nbytes < BLOCK_NBYTES else 2.5
                bench.at_most(f"{what}: CPU for each row", most, middle, unit="µs")
            for label in others:
                least = 1 / 1.2 if state == "cached" and "memmap" in label else 1.0
                bench.at_least(f"{what}: over {label}", least, comparison.over(OURS_OF_ROWS, label))


def _write_header(path: Path, rows: int, row_nbytes: int) -> None:
    """Write the header of a safetensors file with a table of rows at the start of the file."""
    table = {"dtype": "U8", "shape": [rows, row_nbytes], "data_offsets": [0, rows * row_nbytes]}
    header = json.dumps({"table": table}).encode().ljust(TABLE_AT - 8)
    with path.open("rb+") as file:
        file.write(len(header).to_bytes(8, "little") + header)


# Small asynchronous reads during one large write of the same process, compared with fio for the same mixture.
#
# fio runs two jobs in one process: randread of 4 KiB at depth 1 with the same pause between reads, and a sequential
# direct write of 1 MiB blocks at depth 32. That depth saturates the drives that we have measured, with fewer bytes in
# flight than tensorferry's default (128 MiB). With a larger depth fio's reads would wait longer, so this is the harder
# comparison. The row at depth 128 has as many bytes in flight as tensorferry; no figure depends on it.

PAUSE_SECONDS = 0.004
WRITE_NBYTES_MAX = 2 * GIB
OURS = "tensorferry file.read_into during file.write_from"
_DEPTHS = (32, 128)


class ReadsBesideWrite:
    """Sequential asynchronous reads of 4 KiB with pauses, while a large write is in flight."""

    def __init__(self, nbytes: int) -> None:
        self.tensor, self.block = ordinary_tensor(nbytes), ordinary_tensor(BLOCK_NBYTES, 0)

    def read(self, source: Path, target: Path, file_nbytes: int, seed: int) -> dict[str, Any]:
        """Measure the latencies of the reads and the duration of the write."""
        generator = random.Random(seed)
        milliseconds = []
        with tensorferry.open(source) as reading, tensorferry.open(target, "w") as writing:
            start = time.perf_counter()
            write = writing.write_from(self.tensor)
            while True:
                offset = generator.randrange(file_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
                begun = time.perf_counter()
                reading.read_into(self.block, offset).result()
                milliseconds.append((time.perf_counter() - begun) * 1000)
                if write.done():
                    break
                time.sleep(PAUSE_SECONDS)
            write.result()
            seconds = time.perf_counter() - start
        milliseconds.sort()
        count = len(milliseconds)
        return _reads(milliseconds[count // 2], milliseconds[count * 99 // 100], count, seconds)


def _reads(median: float, p99: float, count: int, write_seconds: float) -> dict[str, Any]:
    details = {"p99_ms": p99, "count": count}
    return {"value": median, "seconds": write_seconds, "details": details}


@scenario
def fairness(bench: Bench) -> None:
    nbytes = min(WRITE_NBYTES_MAX, 2 * bench.nbytes)
    source, target = bench.directory / "source", bench.directory / "target"
    write_pattern(source, bench.nbytes, SEED)
    worker = bench.worker(ReadsBesideWrite, nbytes=nbytes)

    def fresh(path: Path) -> None:
        (make_cold if path == source else remove)(path)

    def by_fio(depth: int, number: int) -> Sample:
        fresh(source)
        fresh(target)
        return Sample(**_mixed_by_fio(source, bench.nbytes, target, nbytes, depth, number))

    where = {"source": source, "target": target, "file_nbytes": bench.nbytes}
    theirs = []
    for depth in _DEPTHS if fio.installed() else ():
        label = f"fio io_uring, randread qd1 during write 1M qd{depth}"
        theirs += contenders_of("fio", {label: partial(by_fio, depth)}, f"qd{depth}")
    comparison = bench.compare(
        "fairness",
        f"median latency of {BLOCK_NBYTES} byte reads every {PAUSE_SECONDS * 1000:.0f} ms during one write of "
        f"{nbytes / MIB:,.0f} MiB, uncached, O_DIRECT",
        ours={OURS: measured(worker, "read", fresh, [source, target], **where, seed=seeds(SEED))},
        more=theirs,
        unit="ms",
    )
    best = comparison.best("fio", f"qd{_DEPTHS[0]}")
    bench.at_most("fairness: median, over fio", 3, comparison.over(OURS, best))
    bench.at_most("fairness: median", 30, comparison.median(OURS), unit="ms")
    for row in comparison.sorted_rows():
        bench.note(f"{row.label}: {_described(row, nbytes)}")


def _mixed_by_fio(
    source: Path, source_nbytes: int, target: Path, nbytes: int, depth: int, number: int
) -> dict[str, Any]:
    """Run both jobs of fio; the reads end with the write (--exitall)."""
    write = ("--name=write", f"--filename={target}", "--rw=write", f"--size={nbytes}", "--bs=1M")
    jobs = fio.jobs_of(
        [
            *("--ioengine=io_uring", "--direct=1", *_LATENCIES),
            *(*write, f"--iodepth={depth}", "--exitall"),
            *("--name=read", f"--filename={source}", "--rw=randread", f"--size={source_nbytes}"),
            *(f"--bs={BLOCK_NBYTES}", "--iodepth=1", f"--thinktime={int(PAUSE_SECONDS * 1e6)}"),
            *(f"--randseed={SEED + number}", "--norandommap", "--time_based", "--runtime=600"),
        ]
    )
    written, read = jobs[0]["write"], jobs[1]["read"]
    if written["io_bytes"] != nbytes:
        raise MeasurementError(f"fio wrote {written['io_bytes']} of {nbytes} bytes")
    median, p99 = (read["lat_ns"]["percentile"][name] / 1e6 for name in (_MEDIAN, "99.000000"))
    return _reads(median, p99, read["total_ios"], max(written["runtime"], 1) / 1000)


def _described(row: Row, nbytes: int) -> str:
    """Describe the sample that is the median."""
    sample = sorted(row.samples, key=lambda each: each.value)[len(row.samples) // 2]
    return (
        f"median {sample.value:.2f} ms, p99 {sample.details['p99_ms']:.1f} ms, {sample.details['count']} reads, "
        f"write {nbytes / 1e9 / sample.seconds:.2f} GB/s"
    )


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
