"""Models in safetensors files: loads, loads by plan, and saves, by tensorferry, safetensors, torch's storage and fio.

Rules: one process loads to the CPU. The measured time includes a touch of every loaded page, because a memory map
postpones its reads until then. All bytes are compared afterwards. For a cold load the files are dropped from the page
cache, for a warm load they are read into the cache, and for "half" the first half of each file is. The bytes that a
cold load leaves in the cache are counted. Only a little more memory than needed is free, and all of it is touched
before the clock starts, for every contender. Saves write fresh files, and their time includes fsync.

By plan: eight tensor-parallel ranks load their parts of one cold model, one after the other, and share the page cache
as the ranks of a node do. The figure is the number of bytes that the kernel counts as read from storage. A second
figure is the growth of peak memory while a whole model is read in a budget without keeping the tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.faultfs import Fault, FaultFS, FaultFSUnavailableError, why_unavailable

import tensorferry.safetensors.torch
from benchmarks.bench import GIB, MIB, Config, measured, scenario
from benchmarks.memory import (
    Stopwatch,
    drive_nbytes,
    little_free_memory,
    touch_free_memory,
    touch_memory,
)
from benchmarks.scenarios.checkpoint import state_of, tensors
from tensorferry import _core, checkpoint
from tensorferry.safetensors.plans import load_files, tensor_parallel_plan
from tensorferry.safetensors.saving import save_file
from tensorferry.safetensors.sharded import save_sharded
from tensorferry.transfer.publication import sync_directory, sync_file
from tensorferry.tuning.rounds import MeasurementError, throughput
from tensorferry.tuning.scratch import make_cold, make_warm, remove
from tensorferry.tuning.workers import UnavailableError, Worker, call_all, closing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.bench import Bench, Measure
    from tensorferry.tuning.rounds import Comparison, Sample

_TENSOR_NBYTES = 32 * MIB

warnings.filterwarnings("ignore", module="torch")


class Loader:
    """A contender that loads files: with "ours" (load_file), "plans" (load_files), or safetensors' "map" or "pread"."""

    def __init__(self, way: str) -> None:
        theirs: Callable[..., dict[str, Any]] = safetensors.torch.load_file
        if way == "pread" and "backend" not in inspect.signature(theirs).parameters:
            raise UnavailableError("this version of safetensors has no backends")
        self._load: Callable[[Any], dict[str, Any]] = {
            "ours": tensorferry.safetensors.torch.load_file,
            "plans": lambda path: dict(load_files(path)),
            "map": theirs,
            "pread": partial(theirs, backend="pread"),
        }[way]

    def save(self, path: Path, nbytes: int, seed: int) -> int:
        """Write a file of a model's size, and return the checksum of its tensors."""
        generator = torch.Generator().manual_seed(seed)
        model = {}
        for at in range(max(1, nbytes // _TENSOR_NBYTES)):
            shape = (min(_TENSOR_NBYTES, nbytes) // 2048, 1024)
            weight = torch.empty(shape, dtype=torch.bfloat16).random_(generator=generator)
            model[f"layers.{at}.weight"] = weight
            model[f"layers.{at}.norm"] = torch.ones(1024, dtype=torch.bfloat16)
        safetensors.torch.save_file(model, path)
        sync_file(path)
        return _crc(model)

    def load(self, paths: list[Path], crcs: list[int], fresh: bool) -> dict[str, Any]:
        """Load all files, and touch every page; with ``fresh``, free memory is touched before."""
        if fresh:
            touch_free_memory()
        with Stopwatch() as watch:
            states = [self._load(path) for path in paths]
            for loaded in states:
                for tensor in loaded.values():
                    _bytes(tensor)[::4096].sum()
        if [_crc(loaded) for loaded in states] != crcs:
            raise MeasurementError("loaded other bytes than were saved")
        return watch.result(sum(tensor.nbytes for loaded in states for tensor in loaded.values()))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _crc(model: dict[str, torch.Tensor]) -> int:
    crc = 0
    for name in sorted(model):
        crc = _core.crc32(_bytes(model[name]).numpy(), crc)
    return crc


class Saver:
    """A contender that saves the weights of a model, and loads them."""

    def __init__(self, nbytes: int, ours: bool) -> None:
        found = tensors(state_of(2 * nbytes))  # half as many bytes in bfloat16
        self._state = {f"t{k}": tensor.to(torch.bfloat16) for k, tensor in enumerate(found)}
        self._nbytes = sum(tensor.nbytes for tensor in self._state.values())
        self._ours = ours
        self._storage: Any = checkpoint if ours else dcp

    def save(self, path: Path) -> dict[str, Any]:
        """Save to a file."""
        touch_memory(2 * self._nbytes)
        with Stopwatch() as watch:
            if self._ours:
                save_file(self._state, path, sync=True)
            else:
                safetensors.torch.save_file(self._state, path)
                sync_file(path)
                sync_directory(path.parent)
        return watch.result(self._nbytes)

    def save_by_storage(self, path: Path) -> dict[str, Any]:
        """Save to a directory with torch.distributed.checkpoint."""
        touch_memory(2 * self._nbytes)
        writer = self._storage.HuggingFaceStorageWriter
        with Stopwatch() as watch:
            dcp.save(self._state, storage_writer=writer(str(path)), no_dist=True)
        return watch.result(self._nbytes)

    def load_by_storage(self, path: Path) -> dict[str, Any]:
        """Load from a directory with torch.distributed.checkpoint."""
        reader = self._storage.HuggingFaceStorageReader
        with Stopwatch() as watch:
            dcp.load(self._state, storage_reader=reader(str(path)), no_dist=True)
        return watch.result(self._nbytes)


class Planner:
    """A contender that loads by plan."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def save(self, path: Path, nbytes: int) -> None:
        """Write a model with tensors that ranks divide by rows, by columns, or not at all."""
        width = 4096 if nbytes >= 256 * MIB else 512
        each = 4 * width * width  # two matrices of bfloat16
        model = {}
        for layer in range(max(1, nbytes // each)):
            for kind in ("rows", "columns"):
                matrix = torch.empty(width, width, dtype=torch.bfloat16).random_()
                model[f"layers.{layer}.{kind}"] = matrix
            model[f"layers.{layer}.norm"] = torch.ones(width, dtype=torch.bfloat16)
        safetensors.torch.save_file(model, path)

    def save_sharded(self, path: Path, nbytes: int) -> None:
        """Write a model in four files."""
        each = min(_TENSOR_NBYTES, nbytes // 8)
        model = {}
        for layer in range(nbytes // each):
            model[f"layers.{layer}.weight"] = torch.empty(each // 2, dtype=torch.bfloat16).random_()
            model[f"layers.{layer}.norm"] = torch.ones(1024)
        save_sharded(model, path, nbytes // 4)

    def load(self, path: Path, ranks: int) -> dict[str, Any]:
        """Load each rank's part, and measure the bytes read for all ranks over the bytes that they need."""
        needed, before = 0, drive_nbytes("read")
        with Stopwatch() as watch:
            for rank in range(ranks):
                plan = tensor_parallel_plan(path, {"*.rows": 0, "*.columns": 1}, rank, ranks)
                needed += sum(tensor.nbytes for _, tensor in load_files(path, plan))
        return watch.as_value((drive_nbytes("read") - before) / needed, needed)

    def pass_over(self, path: Path, budget_nbytes: int) -> dict[str, Any]:
        """Read all tensors in a memory budget, and drop each of them."""
        nbytes = 0
        with Stopwatch() as watch:
            for _, tensor in load_files(path, memory_budget=budget_nbytes):
                nbytes += tensor.nbytes
                del tensor
        return watch.result(nbytes)


class Sharer:
    """One of the ranks that load the same model."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        torch.set_num_threads(1)

    def meet(self, store: str, world: int) -> None:
        """Join the process group; all ranks call this at the same time."""
        met = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=met, rank=self._rank, world_size=world)

    def load(self, path: Path, by_reader: bool, broadcast: bool) -> dict[str, Any]:
        """Load the whole model, and count the bytes read; each tensor that ``load_files`` yields is dropped."""
        reader = checkpoint.HuggingFaceStorageReader(path, broadcast=broadcast)
        described = reader.read_metadata().state_dict_metadata if by_reader else {}
        state = {
            name: torch.zeros(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in described.items()
        }
        before, nbytes = drive_nbytes("read"), sum(tensor.nbytes for tensor in state.values())
        dist.barrier()
        with Stopwatch() as watch:
            if by_reader:
                dcp.load(state, storage_reader=reader)
                asked = reader.nbytes_read
            else:
                with load_files(path, broadcast=broadcast) as loaded:
                    nbytes = sum(tensor.nbytes for _, tensor in loaded)
                asked = loaded.nbytes_read
        # The kernel's count is zero on file systems that do not report their reads, such as network mounts.
        return watch.result(nbytes, read_nbytes=max(asked, drive_nbytes("read") - before))


# The scenarios

OURS = "tensorferry load_file"
MAP = "safetensors load_file"
PLANS = "tensorferry load_files"
PREAD = "safetensors load_file backend=pread"
SAVE_FILE = "tensorferry.safetensors save_file, sync=True"
THEIR_SAVE_FILE = "safetensors.torch.save_file, fsync"
STORAGE = "tensorferry HuggingFaceStorageWriter/Reader"
THEIR_STORAGE = "torch HuggingFaceStorageWriter/Reader"
RANKS = 8
_WAYS = {OURS: "ours", MAP: "map", PREAD: "pread"}
_BUDGET_NBYTES, _BUDGET_ALLOWANCE_NBYTES = 256 * MIB, 32 * MIB
_SHARERS = 2
# The server's delay of each read in milliseconds, the fraction of the bytes that safetensors' map loads within about a
# minute, and the promised speed over it. With 1 ms the processors are the limit, because the server is in Python.
_DELAYS = ((1, 1.0, 1.5), (10, 1.0, 5.0), (50, 0.25, 5.0))
_MOUNT_ROUNDS_MAX = 3
_ON_MOUNT = "cached.safetensors"  # the FUSE server lets the kernel cache a file of this name
_SAVE_ROUNDS_MAX = 3  # torch's storage needs 10 seconds for each save
_FIO_NBYTES = GIB  # enough for fio, which has its full speed from the first block on
# The best of those that `large` tries.
_FIOS = [
    Config("libaio", MIB, 128),
    Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]
_SAVE_FIOS = [Config("io_uring", MIB, 32), *_FIOS]


class _Model:
    """The files of a model in a bench's directory, and the workers that load them."""

    def __init__(self, bench: Bench, count: int, ways: tuple[str, ...] = (OURS, MAP)) -> None:
        self.bench = bench
        self.where = f"{count} files"
        self.workers = {way: bench.worker(Loader, way=_WAYS[way]) for way in ways}
        self.paths = [bench.directory / f"model-{at}-of-{count}.safetensors" for at in range(count)]
        nbytes = _nbytes(bench) // count
        self.crcs = [
            self.workers[OURS].call("save", path=path, nbytes=nbytes, seed=at)
            for at, path in enumerate(self.paths)
        ]

    def compare(self, state: str, prepare: Callable[[Path], None], with_fio: bool) -> Comparison:
        fresh = prepare is not make_warm and not self.bench.smoke
        how = {"paths": self.paths, "crcs": self.crcs, "fresh": fresh}
        ways = {
            way: measured(worker, "load", prepare, self.paths, **how)
            for way, worker in self.workers.items()
        }
        path = self.paths[0]
        nbytes = min(path.stat().st_size, _FIO_NBYTES)
        name = f"{state}, {self.where}"
        return self.bench.compare(
            f"safetensors {name}",
            f"{name} in a process",
            ours={OURS: ways.pop(OURS)},
            peer=ways,
            more=self.bench.fio(_FIOS, path, "read", nbytes) if with_fio else (),
        )

    def compare_cold(self, with_fio: bool) -> None:
        """Compare cold loads, and check how much of the files is in the page cache afterwards."""
        found = self.compare("cold", make_cold, with_fio)
        if with_fio:
            self.bench.over_fio(f"cold load over fio, {self.where}", 0.92, found, OURS)
        what = f"cold load over safetensors' best, {self.where}"
        self.bench.at_least(what, 1.0, found.over(OURS, MAP))
        for path in self.paths:
            make_cold(path)
        self.workers[OURS].call("load", paths=self.paths, crcs=self.crcs, fresh=False)
        what = f"fraction in the page cache after a cold load, {self.where}"
        self.bench.at_most(what, 0.0, _cached_share(self.paths))

    def compare_cached(self) -> None:
        """Compare loads while all or half of each file is in the page cache."""
        half = partial(make_warm, share=0.5)
        for state, prepare, target in (("warm", make_warm, 0.95), ("half", half, 1.0)):
            over = self.compare(state, prepare, with_fio=False).over(OURS, MAP)
            self.bench.at_least(f"{state} load over safetensors' map, {self.where}", target, over)


@scenario
def cold(bench: Bench) -> None:
    """Compare loads of one cold file."""
    with _little_memory(bench):
        _Model(bench, 1).compare_cold(with_fio=True)


@scenario
def cached(bench: Bench) -> None:
    """Compare loads of one file that is in the page cache, as a whole or half of it."""
    with _little_memory(bench):
        _Model(bench, 1).compare_cached()


@scenario
def four_files(bench: Bench) -> None:
    """Compare loads of four files, without fio, which is not faster with four files than with one."""
    with _little_memory(bench):
        model = _Model(bench, 4)
        model.compare_cold(with_fio=False)
        model.compare_cached()


@scenario
def loop(bench: Bench) -> None:
    """Compare loads of one cold file on a device that is as fast as memory (root only)."""
    nbytes = _nbytes(bench)
    with bench.on_drive(nbytes + nbytes // 8 + 64 * MIB) as fast, _little_memory(fast):
        model = _Model(fast, 1, tuple(_WAYS))
        model.where += " on a loop device"
        found = model.compare("cold", make_cold, with_fio=True)
        fast.leave_out(found, PREAD, "no backends")
        fast.over_fio(f"cold load over fio, {model.where}", 0.8, found, OURS)
        over = found.over(OURS, found.best("peer"))
        fast.at_least(f"cold load over safetensors' best, {model.where}", 1.5, over)
        if found.row(PREAD):
            what = f"CPU seconds for each GB of a cold load over safetensors' pread, {model.where}"
            fast.at_most(what, 0.5, found.cpu_over(OURS, PREAD))


@scenario
def mount(bench: Bench) -> None:
    """Compare loads of one cold file on a FUSE mount with a delay before each read, each load in a fresh process."""
    if reason := why_unavailable():
        raise UnavailableError(reason)
    try:
        with _little_memory(bench):
            for delay_ms, share, target in _DELAYS:
                _load_from_mount(bench, delay_ms, int(2 * bench.nbytes * share), target)
    except FaultFSUnavailableError as reason:
        raise UnavailableError(str(reason)) from None


def _load_from_mount(bench: Bench, delay_ms: int, nbytes: int, target: float) -> None:
    with FaultFS(bench.directory / f"mount-{delay_ms}") as fuse:
        crc = bench.worker(Loader, way="map").call(
            "save", path=fuse.backing / _ON_MOUNT, nbytes=nbytes, seed=delay_ms
        )
        path = fuse.path / _ON_MOUNT

        def measure(way: str) -> Measure:
            def load(_: int) -> Sample:
                make_cold(path)
                fuse.order(Fault("read", delay_s=delay_ms / 1000))
                with closing([Worker(f"{Loader.__module__}:Loader", way=way)]) as (fresh,):
                    return throughput(
                        **fresh.call("load", paths=[path], crcs=[crc], fresh=not bench.smoke)
                    )

            return load

        where = f"FUSE, {delay_ms} ms for each read"
        found = bench.compare(
            f"safetensors cold, {where}",
            f"{nbytes / GIB:.2g} GiB, a fresh process each",
            ours={OURS: measure("ours"), PLANS: measure("plans")},
            peer={MAP: measure("map")},
            rounds=bench.rounds_at_most(_MOUNT_ROUNDS_MAX),
        )
    for ours in (OURS, PLANS):
        bench.at_least(f"{ours} over safetensors' map, {where}", target, found.over(ours, MAP))


@scenario
def plans(bench: Bench) -> None:
    """Measure the bytes that ranks read, and the peak memory of loads in a budget."""
    path, worker = bench.directory / "model.safetensors", bench.worker(Planner)
    worker.call("save", path=path, nbytes=bench.nbytes)
    load = measured(worker, "load", make_cold, [path], path=path, ranks=RANKS)
    how = {"path": path, "budget_nbytes": _BUDGET_NBYTES}
    pass_over = measured(worker, "pass_over", make_cold, [path], **how)
    name = "tensor_parallel_plan"
    unit = "of the bytes needed"
    shares = bench.compare("safetensors plans, eight ranks", "cold", ours={name: load}, unit=unit)
    rules = f"{_BUDGET_NBYTES // MIB} MiB, cold"
    passed = bench.compare("safetensors plans, a budget", rules, ours={"load_files": pass_over})
    bench.at_most("bytes read by eight ranks over needed", 1.1, shares.median(name))
    most = _BUDGET_NBYTES + _BUDGET_ALLOWANCE_NBYTES
    bench.peak("memory of load_files", most, passed, "load_files")


@scenario
def ranks(bench: Bench) -> None:
    """Compare two ranks that load one model, separately and together."""
    path = bench.directory / "model"
    bench.worker(Planner).call("save_sharded", path=path, nbytes=bench.nbytes)
    files = sorted(path.glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        workers = [bench.worker(Sharer, rank=rank) for rank in range(_SHARERS)]
        call_all(workers, "meet", f"{folder}/store", _SHARERS)
        shares: dict[str, list[float]] = {}

        def measure(label: str, *way: bool) -> Measure:
            def load(_: int) -> Sample:
                for file in files:
                    make_cold(file)
                answers = call_all(workers, "load", path, *way)
                read = sum(answer.pop("read_nbytes") for answer in answers)
                slowest = max(answers, key=lambda answer: float(answer["seconds"]))
                shares.setdefault(label, []).append(read / slowest["nbytes"])
                return throughput(**slowest)

            return load

        ways = {
            f"{name}(broadcast={broadcast})": (by_reader, broadcast)
            for name, by_reader in (("load_files", False), ("HuggingFaceStorageReader", True))
            for broadcast in (False, True)
        }
        ours = {label: measure(label, *way) for label, way in ways.items()}
        bench.compare("safetensors, two ranks load one model", "cold, to each of them", ours=ours)
    for label, found in shares.items():
        most = 1.1 if ways[label][1] else 1.1 * _SHARERS
        bench.at_most(f"bytes that two ranks read over the model's, {label}", most, max(found))


@scenario
def save(bench: Bench) -> None:
    """Compare save_file with safetensors' own."""
    path, nbytes = bench.directory / "target", 5 * bench.nbytes // 2
    ways = {
        label: measured(
            *(bench.worker(Saver, nbytes=nbytes, ours=label == SAVE_FILE), "save", remove, [path]),
            clean=True,
            path=path,
        )
        for label in (SAVE_FILE, THEIR_SAVE_FILE)
    }
    saving = bench.compare(
        "safetensors save_file",
        "fresh file, synced",
        ours={SAVE_FILE: ways[SAVE_FILE]},
        peer={THEIR_SAVE_FILE: ways[THEIR_SAVE_FILE]},
        more=bench.synced_fio(_SAVE_FIOS, nbytes),
    )
    over_theirs = saving.over(SAVE_FILE, THEIR_SAVE_FILE)
    bench.at_least("save_file over safetensors", 2.0, over_theirs)
    bench.over_fio("save_file over fio", 0.92, saving, SAVE_FILE)


@scenario
def storage(bench: Bench) -> None:
    """Compare the Hugging Face storage classes with those of torch.distributed.checkpoint; one rank saves the state."""
    workers = [bench.worker(Saver, nbytes=bench.nbytes, ours=ours) for ours in (True, False)]
    saved, model = bench.directory / "saved", bench.directory / "model"
    workers[0].call("save_by_storage", path=model)
    (file,) = model.glob("*.safetensors")

    def both(call: str, *prepared: Any, **options: Any) -> dict[str, Any]:
        mine, other = (measured(w, call, *prepared, **options) for w in workers)
        return {"ours": {STORAGE: mine}, "peer": {THEIR_STORAGE: other}}

    everything = list(model.iterdir())
    saves = bench.compare(
        "Hugging Face storage save",
        "fresh directory, synced",
        **both("save_by_storage", remove, [saved], clean=True, path=saved),
        more=bench.synced_fio(_SAVE_FIOS, bench.nbytes),
        rounds=bench.rounds_at_most(_SAVE_ROUNDS_MAX),
    )
    cold_loads = bench.compare(
        "Hugging Face storage cold load",
        "cold files",
        **both("load_by_storage", make_cold, everything, path=model),
        more=bench.fio(_SAVE_FIOS, file, "read", file.stat().st_size),
    )
    warm_loads = bench.compare(
        "Hugging Face storage warm load",
        "cached files",
        **both("load_by_storage", make_warm, everything, path=model),
    )
    for name, comparison, target in (
        ("save", saves, 8.0),
        ("cold load", cold_loads, 2.5),
        ("warm load", warm_loads, 1.0),
    ):
        over = comparison.over(STORAGE, THEIR_STORAGE)
        bench.at_least(f"Hugging Face {name} over torch", target, over)
        if comparison is not warm_loads:
            bench.over_fio(f"Hugging Face {name} over fio", 0.9, comparison, STORAGE)


def _nbytes(bench: Bench) -> int:
    return 5 * bench.nbytes // 2


def _little_memory(bench: Bench) -> contextlib.AbstractContextManager[None]:
    if bench.smoke:
        return contextlib.nullcontext()
    return little_free_memory(2 * _nbytes(bench) + GIB)


def _cached_share(paths: list[Path]) -> float | None:
    """Return the fraction of the files that is in the page cache; None if the kernel does not report it."""
    cached = total = 0
    for path in paths:
        with tensorferry.open(path) as file:
            found = file._open_file().residency(0, file.size)
        if found is None:
            return None
        cached, total = cached + found[0], total + found[1]
    return cached / total
