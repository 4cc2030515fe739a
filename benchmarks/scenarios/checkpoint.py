"""Saves and loads of a 2 GiB state of a transformer with AdamW: tensorferry, torch, and fio for as many bytes.

Rules: each contender runs in a separate process. Saves write fresh files and directories, and the measured time of
every contender includes fsync. fio moves one file of as many bytes with O_DIRECT.

Before each save the memory that it needs is touched. A virtual machine may have returned that memory to its host, and
the host's page faults would count for the contenders that write through the page cache or allocate memory. For a cold
load the file is dropped from the page cache, for a warm load it is read into the cache. The loaded values are compared
with the saved ones. A smaller variant uses a fast block device: ext4 on a loop device with direct I/O over memory (root
only).
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from benchmarks.bench import FEW, MIB, Config, measured, scenario
from benchmarks.memory import Stopwatch, drive_nbytes, touch_memory
from benchmarks.peers import byte_view
from tensorferry import checkpoint as ours
from tensorferry._core import crc32
from tensorferry.tuning.rounds import Comparison, MeasurementError, Sample
from tensorferry.tuning.scratch import make_cold, make_warm, remove
from tensorferry.tuning.workers import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benchmarks.bench import Bench, Measure

LAZY_NBYTES = 8 * MIB
_LAYERS, _VOCABULARY = 12, 8_000

warnings.filterwarnings("ignore", module="torch")


def state_of(nbytes: int) -> dict[str, Any]:
    """Return a state of about so many bytes: some 600 float32 tensors of all sizes that transformers have."""
    width = 16
    while 12 * sum(map(_count, _shapes(width + 16).values())) <= nbytes:  # weights and two moments
        width += 16
    generator = torch.Generator().manual_seed(17)
    weights = {
        name: torch.empty(shape).normal_(generator=generator)
        for name, shape in _shapes(width).items()
    }
    moments = {
        name: {
            "step": torch.tensor(1000.0),
            "exp_avg": weight * 0.5,
            "exp_avg_sq": weight * 0.25,
        }
        for name, weight in weights.items()
    }
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-4}]}}


def tensors(state: dict[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors of a state."""
    found: list[torch.Tensor] = []
    for value in state.values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors(value)
    return found


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    matrices = {
        "attention.in": (3 * width, width),
        "attention.out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    layer: dict[str, tuple[int, ...]] = {f"{n}.weight": shape for n, shape in matrices.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    layer |= {f"{n}.{part}": (width,) for n in ("norm1", "norm2") for part in ("weight", "bias")}
    layers = {f"layers.{k}.{name}": shape for k in range(_LAYERS) for name, shape in layer.items()}
    ends: dict[str, tuple[int, ...]] = {"norm.weight": (width,), "norm.bias": (width,)}
    return {"embedding.weight": (_VOCABULARY, width), **layers, **ends}


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# In the workers


class Holder:
    """A holder of a state, in a worker."""

    def __init__(self, nbytes: int) -> None:
        self.state = state_of(nbytes)
        self.nbytes = sum(tensor.nbytes for tensor in tensors(self.state))


class Saver(Holder):
    """A contender that saves to new directories, with tensorferry's writer or with torch's and its options."""

    planner: Any = None

    def __init__(self, nbytes: int, options: dict[str, Any] | None) -> None:
        super().__init__(nbytes)
        self.writer: Any = ours.FileSystemWriter if options is None else dcp.FileSystemWriter
        self.options = options or {}

    def save(self, path: Path) -> dict[str, Any]:
        planner = self.planner() if self.planner else None
        touch_memory(2 * self.nbytes)
        with Stopwatch() as watch:
            writer = self.writer(path, **self.options)
            dcp.save(self.state, storage_writer=writer, planner=planner, no_dist=True)
        return watch.result(self.nbytes)


class _LazyPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return torch.full((LAZY_NBYTES // 4,), 1.0)


class LazySaver(Saver):
    """A contender that saves a state with tensorferry's writer; the planner makes each tensor on demand."""

    planner = _LazyPlanner

    def __init__(self, nbytes: int) -> None:
        super().__init__(0, None)
        # Set M_MMAP_THRESHOLD (-3): blocks above 1 MiB are then mapped, and unmapped as soon as they are freed.
        # Otherwise free memory that the C library keeps would count as memory that the save needs. See mallopt(3).
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
        # As many tensors as the planner makes. An expanded tensor has the shape without the memory.
        count = max(1, nbytes // LAZY_NBYTES)
        self.state = {f"tensor{k}": torch.zeros(1).expand(LAZY_NBYTES // 4) for k in range(count)}
        self.nbytes = sum(tensor.nbytes for tensor in tensors(self.state))


class AsyncSaver(Holder):
    """A contender that saves repeatedly with ``async_save``, with the same writer and stager."""

    def __init__(self, nbytes: int, writer: str, overlap: bool) -> None:
        super().__init__(nbytes)
        kinds: dict[str, Any] = {"ours": ours.FileSystemWriter, "torch": dcp.FileSystemWriter}
        self.options: dict[str, Any] = {"storage_writer": kinds[writer]("unused")} if writer else {}
        if overlap:
            if "async_stager" not in inspect.signature(dcp.async_save).parameters:
                raise UnavailableError("async_save needs torch 2.9 or later for stagers")
            self.options["async_stager"] = ours.Stager(overlap=True)

    def save(self, path: Path) -> dict[str, Any]:
        """Save to a new directory, and measure how long the call blocked."""
        touch_memory(2 * self.nbytes)
        begin = time.perf_counter()
        answer: Any = dcp.async_save(self.state, checkpoint_id=path, **self.options)
        blocked = time.perf_counter() - begin
        getattr(answer, "upload_completion", answer).result()
        return {"value": blocked, "seconds": time.perf_counter() - begin}


class Loader(Holder):
    """A contender that loads into existing tensors; ``verify`` is the reader's mode, None means torch's reader."""

    def __init__(self, nbytes: int, verify: str | None) -> None:
        super().__init__(nbytes)
        self.verify = verify

    def save(self, path: Path) -> None:
        """Save the checkpoint to be loaded."""
        dcp.save(self.state, storage_writer=ours.FileSystemWriter(path), no_dist=True)

    def load(self, path: Path) -> dict[str, Any]:
        """Load the whole state, into tensors that have other values before."""
        with Restored(self.state), Stopwatch() as watch:
            dcp.load(self.state, storage_reader=self._reader(path), no_dist=True)
        return watch.result(self.nbytes)

    def load_half(self, path: Path) -> dict[str, Any]:
        """Load the first half of each tensor's rows, and measure the fraction of all bytes that the drive read."""
        targets = {
            index: tensor[: len(tensor) // 2].clone() for index, tensor in _with_rows(self.state)
        }
        reader = self._reader(path)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plan = LoadPlan([_rows(index, target) for index, target in targets.items()])
        with Restored(targets):
            before = drive_nbytes("read")
            with Stopwatch() as watch:
                reader.read_data(plan, _Targets(targets)).wait()
            nbytes_read = drive_nbytes("read") - before
        whole = sum(2 * target.nbytes for target in targets.values())
        return watch.as_value(nbytes_read / whole, nbytes_read)

    def _reader(self, path: Path) -> Any:
        if self.verify is None:
            return dcp.FileSystemReader(path)
        return ours.FileSystemReader(path, verify=self.verify)  # type: ignore[arg-type]


class Restored:
    """A context manager that overwrites the tensors of a state, and checks at its end that a load restored them."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self._tensors = tensors(state)

    def __enter__(self) -> None:
        self._crcs = [crc32(byte_view(tensor.reshape(-1))) for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.fill_(-1.0)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        now = [crc32(byte_view(tensor.reshape(-1))) for tensor in self._tensors]
        if kind is None and now != self._crcs:
            raise MeasurementError("loaded other values than were saved")


def _with_rows(value: Any, name: str = "") -> Iterable[tuple[MetadataIndex, torch.Tensor]]:
    """Yield the tensors of a state with an even number of rows, and their indexes in the checkpoint."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _with_rows(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, torch.Tensor) and value.dim() and len(value) % 2 == 0:
        yield MetadataIndex(name, [0] * value.dim()), value


def _rows(index: MetadataIndex, target: torch.Tensor) -> ReadItem:
    """Return a plan's item that reads the first rows of a tensor into ``target``."""
    origin = torch.Size([0] * target.dim())
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, target.size())


class _Targets:
    """A load planner that resolves each item to the tensor of its index."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, item: Any) -> Any:
        return self._targets[item.dest_index]

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        pass


class Keeper(Holder):
    """A contender that saves and loads an object: "ours", "torch", or "file" (``torch.save`` to a FileWriter)."""

    def __init__(self, nbytes: int, how: str) -> None:
        super().__init__(nbytes)
        self.how = how

    def save(self, path: Path) -> dict[str, Any]:
        """Save to a new path."""
        touch_memory(2 * self.nbytes)
        with Stopwatch() as watch:
            if self.how == "ours":
                ours.save(self.state, path)
            elif self.how == "file":
                with ours.FileWriter(path) as file:
                    torch.save(self.state, file)
            else:
                with open(path, "wb") as plain:
                    torch.save(self.state, plain)
                    plain.flush()
                    os.fsync(plain.fileno())
        return watch.result(self.nbytes)

    def load(self, path: Path) -> dict[str, Any]:
        """Load the object, and compare it with the saved one. The growth of memory excludes the object itself."""
        touch_memory(2 * self.nbytes)
        with Stopwatch() as watch:
            ways = {"ours": ours.load}
            loaded = ways.get(self.how, torch.load)(path, weights_only=True)
        pairs = zip(tensors(loaded), tensors(self.state), strict=True)
        if not all(torch.equal(one, saved) for one, saved in pairs):
            raise MeasurementError("loaded other values than were saved")
        result = watch.result(self.nbytes)
        if result["peak_growth_nbytes"] is not None:
            result["peak_growth_nbytes"] = max(0, result["peak_growth_nbytes"] - self.nbytes)
        return result


# The scenarios

WRITER = "tensorferry.checkpoint.FileSystemWriter"
READER = "tensorferry.checkpoint.FileSystemReader"
READER_OFF = f"{READER} verify=off"
TORCH_READER = "torch FileSystemReader"
OBJECTS = "tensorferry.checkpoint.save/load"
TORCH_OBJECTS = "torch.save/load"
_PEAK_NBYTES_MAX = 64 * MIB
_LAZY_ROUNDS, _HALF_ROUNDS_MAX = 3, 3
_LOAD_FIOS = [*FEW, Config("io_uring", 4 * MIB, 32, registered=True)]
# Options of torch's writer. The comparison uses the best of them.
_TORCH_WRITERS: dict[str, dict[str, Any]] = {
    "torch FileSystemWriter, 1 thread": {"thread_count": 1},
    "torch FileSystemWriter, 2 threads": {"thread_count": 2},
    "torch FileSystemWriter, 4 threads": {"thread_count": 4},
    "torch FileSystemWriter, a file each, 4 threads": {
        "thread_count": 4,
        "single_file_per_rank": False,
    },
}


@scenario
def save(bench: Bench) -> None:
    """Compare ``dcp.save``, and measure a save of tensors that are made on demand.

    The latter shows the memory that a save needs in addition to the state.
    """
    nbytes = 2 * bench.nbytes
    saved = _compare_saves(bench, "checkpoint save", nbytes, 1 if bench.smoke else None)
    lazy = bench.compare(
        "checkpoint lazy save",
        "tensors of 8 MiB, made on demand",
        ours={WRITER: _saves(bench, LazySaver, nbytes // 4)},
        rounds=_LAZY_ROUNDS,
    )
    bench.over_fio("checkpoint save over fio", 0.90, saved, WRITER)
    best, least = saved.best("peer"), saved.least_cpu("peer")
    note = saved.describe(best, "torch's best")
    bench.at_least("checkpoint save over torch", 2.0, saved.over(WRITER, best), note)
    over_cpu = saved.cpu_over(WRITER, least)
    bench.at_most("checkpoint save, CPU seconds over torch's least", 0.5, over_cpu)
    for comparison, what in ((saved, "save"), (lazy, "lazy save")):
        title = f"checkpoint {what}, peak memory in addition to the state"
        bench.peak(title, _PEAK_NBYTES_MAX, comparison, WRITER)


def _compare_saves(bench: Bench, name: str, nbytes: int, of_torch: int | None) -> Comparison:
    theirs = list(_TORCH_WRITERS.items())[:of_torch]
    return bench.compare(
        name,
        "fresh directory, all of it synced",
        ours={WRITER: _saves(bench, Saver, nbytes, options=None)},
        peer={label: _saves(bench, Saver, nbytes, options=options) for label, options in theirs},
        more=bench.synced_fio(FEW, nbytes),
    )


def _saves(bench: Bench, peer: type, nbytes: int, **options: Any) -> Measure:
    worker, target = bench.worker(peer, nbytes=nbytes, **options), bench.directory / "checkpoint"
    return measured(worker, "save", remove, [target], clean=True, path=target)


@scenario
def load(bench: Bench) -> None:
    """Compare ``dcp.load`` into existing tensors, from a checkpoint of tensorferry's writer, which both readers read.

    For loads of half of the rows of each tensor, the kernel's count of bytes read from the drive is compared.
    """
    verified = {READER: "read", READER_OFF: "off", f"{READER} verify=before": "before"}
    loads = _Loads(bench, 2 * bench.nbytes, verified | {TORCH_READER: None})
    cold = loads.compare_cold("checkpoint cold load")
    warm = bench.compare("checkpoint warm load", "warm file", **loads.by("load", make_warm))
    half = bench.compare(
        "checkpoint half of the rows",
        "cold file",
        **loads.by("load_half", make_cold, (READER, TORCH_READER)),
        unit="of the bytes",
        rounds=bench.rounds_at_most(_HALF_ROUNDS_MAX),
    )
    bench.over_fio("checkpoint cold load over fio", 0.92, cold, READER)
    bench.at_least("checkpoint warm load over torch", 3.0, warm.over(READER, TORCH_READER))
    for name, comparison in (("cold", cold), ("warm", warm)):
        over = comparison.over(READER, READER_OFF)
        bench.at_least(f"checkpoint {name} load, verified over unverified", 0.95, over)
    bench.at_most("checkpoint half of the rows", 0.55, half.median(READER))
    title = "checkpoint load, peak memory in addition to the state"
    bench.peak(title, _PEAK_NBYTES_MAX, cold, READER)


class _Loads:
    """A checkpoint, and the workers that load it."""

    def __init__(self, bench: Bench, nbytes: int, verified: Mapping[str, str | None]) -> None:
        self.bench, self.path = bench, bench.directory / "checkpoint"
        self.workers = {
            label: bench.worker(Loader, nbytes=nbytes, verify=verify)
            for label, verify in verified.items()
        }
        self.workers[READER].call("save", path=self.path)
        (self.file,) = self.path.glob("*.distcp")

    def by(self, call: str, prepare: Any, labels: Iterable[str] = ()) -> dict[str, Any]:
        """Return the contenders with these labels, or all, by kind."""
        workers = {label: self.workers[label] for label in labels or self.workers}
        return _of_workers(workers, call, prepare, self.file, path=self.path)

    def compare_cold(self, name: str) -> Comparison:
        nbytes = self.file.stat().st_size
        by_fio = self.bench.fio(_LOAD_FIOS, self.file, "read", nbytes)
        return self.bench.compare(name, "cold file", **self.by("load", make_cold), more=by_fio)


@scenario
def loop(bench: Bench) -> None:
    """Save and load half as many bytes on a device that is as fast as memory (root only)."""
    nbytes = bench.nbytes
    with bench.on_drive(2 * nbytes + nbytes // 4 + 64 * MIB) as quick:
        saved = _compare_saves(quick, "checkpoint save, fast device", nbytes, 1)
    with bench.on_drive(nbytes + nbytes // 4 + 64 * MIB) as quick:
        loads = _Loads(quick, nbytes, {READER: "read", READER_OFF: "off"})
        cold = loads.compare_cold("checkpoint cold load, fast device")
    bench.over_fio("checkpoint save over fio, fast device", 0.85, saved, WRITER)
    bench.over_fio("checkpoint cold load over fio, fast device", 0.8, cold, READER)
    over = cold.over(READER, READER_OFF)
    bench.at_least("checkpoint cold load, verified over unverified, fast device", 0.97, over)


@scenario
def objects(bench: Bench) -> None:
    """Compare ``save`` and ``load`` of an object with ``torch.save`` and ``torch.load``; loads make new tensors."""
    ways = {OBJECTS: "ours", "torch.save to FileWriter": "file", TORCH_OBJECTS: "torch"}
    workers = {
        label: bench.worker(Keeper, nbytes=2 * bench.nbytes, how=how) for label, how in ways.items()
    }
    source, target = bench.directory / "source", bench.directory / "target"
    workers[TORCH_OBJECTS].call("save", path=source)  # all contenders load the same file
    saves = _of_workers(workers, "save", remove, target, clean=True, path=target)
    compared = [(bench.compare("object save", "fresh file, fsync at the end", **saves), 2.5)]
    loaders = {label: workers[label] for label in (OBJECTS, TORCH_OBJECTS)}
    for name, prepare in (("cold", make_cold), ("warm", make_warm)):
        loads = _of_workers(loaders, "load", prepare, source, path=source)
        found = bench.compare(f"object {name} load", f"{name} file, new tensors", **loads)
        compared.append((found, 1.5))
    for comparison, wanted in compared:
        what = f"{comparison.name} over torch.{comparison.name.split()[-1]}"
        bench.at_least(what, wanted, comparison.over(OBJECTS, TORCH_OBJECTS))
    for comparison, _ in compared[:2]:
        what = f"{comparison.name}, peak memory in addition to the object"
        bench.peak(what, _PEAK_NBYTES_MAX, comparison, OBJECTS)


@scenario
def asynchronous(bench: Bench) -> None:
    """Measure how long ``async_save`` blocks training, and how long it takes until the checkpoint is complete.

    The state is saved repeatedly with the same stager and writer, as in training, and each save ends before the next
    one begins. The first save, which allocates memory, does not count.
    """
    target = bench.directory / "checkpoint"

    def saves(writer: str, *, overlap: bool = False) -> Measure:
        worker = bench.worker(AsyncSaver, nbytes=2 * bench.nbytes, writer=writer, overlap=overlap)
        save = measured(worker, "save", remove, [target], path=target)

        def measure(number: int) -> Sample:
            if number == 0:
                save(number)
            return save(number)

        return measure

    blocked = bench.compare(
        "blocking time of async_save",
        "time in which the training thread waits",
        ours={WRITER: saves("ours"), "the same, Stager(overlap=True)": saves("ours", overlap=True)},
        peer={"torch's default": saves(""), "torch FileSystemWriter as stager": saves("torch")},
        unit="s",
    )
    rows = [
        dataclasses.replace(row, samples=[Sample(s.seconds, s.seconds) for s in row.samples])
        for row in blocked.rows
    ]
    total = Comparison("total time of async_save", "until the checkpoint is complete", "s", rows)
    bench.outcome.comparisons.append(total)
    for row in blocked.rows:
        if row.kind == "ours":
            over = blocked.over(row.label, "torch's default")
            bench.at_most(f"async_save, blocking over torch's default: {row.label}", 0.5, over)


def _of_workers(
    workers: Mapping[str, Any], call: str, prepare: Any, path: Path, /, **options: Any
) -> dict[str, Any]:
    """Return contenders by kind: those of torch are peers, the others ours."""
    found: dict[str, Any] = {"ours": {}, "peer": {}}
    for label, worker in workers.items():
        kind = "peer" if label in (TORCH_READER, TORCH_OBJECTS) else "ours"
        found[kind][label] = measured(worker, call, prepare, [path], **options)
    return found
