"""CUDA tensors to fresh files and back: tensorferry, whole-tensor copies and other libraries, with two limits.

Both limits are measured in the same rounds: the file system alone (the best of fio and of plain system calls from
several threads), and copies between the GPU and pinned memory. A transfer through host memory cannot be faster than the
lower limit.

Rules: every write uses a new file, and its time includes the fsync. A read ends when the GPU has the bytes. Before each
read the file is dropped from the page cache, except on tmpfs, which keeps its files there. Host memory that peers need
is allocated before the clock starts. The pattern is made and checked in host memory.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tensorferry
from benchmarks import memory
from benchmarks.bench import (
    GIB,
    MIB,
    Config,
    Figure,
    Outcome,
    Settings,
    contenders_of,
    measured,
    reads,
    scenario,
    writes,
)
from benchmarks.memory import Stopwatch, write_pattern
from benchmarks.peers import TransferPeer, async_io, byte_view, move, succeed
from tensorferry import _core
from tensorferry.transfer.publication import sync_file
from tensorferry.tuning import fio
from tensorferry.tuning.gpus import gpu_refusal
from tensorferry.tuning.rounds import Comparison, Contender, Kind, Row
from tensorferry.tuning.scratch import remove
from tensorferry.tuning.workers import UnavailableError, Worker

if TYPE_CHECKING:
    from benchmarks.bench import Bench

_COPY_NBYTES = 256 * MIB


def check_gpu() -> None:
    """Raise UnavailableError, with the reason, if CUDA tensors cannot be moved on this machine."""
    if reason := gpu_refusal():
        raise UnavailableError(f"no GPU: {reason}")


class Device:
    """The GPU's description, in a worker."""

    def __init__(self) -> None:
        check_gpu()

    def describe(self) -> dict[str, Any]:
        return {"name": torch.cuda.get_device_name(), "torch": torch.__version__}


class TensorPeer(TransferPeer):
    """A contender that writes and reads one CUDA tensor; subclasses define ``put`` and ``get``.

    ``device="cpu"`` is for the tests of this benchmark.
    """

    put: Any
    get: Any

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        if device == "cuda":
            check_gpu()
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pinned_nbytes(self) -> int:
        """Return the pinned host memory of this contender."""
        return 0

    def details(self) -> dict[str, Any]:
        return {}

    def save(self, path: Path) -> None:
        self.put(path)
        sync_file(path)

    def load(self, path: Path) -> None:
        self.get(path)
        _synchronize(self.tensor)

    def fill(self, seed: int) -> None:
        content = torch.empty(self.tensor.nbytes, dtype=torch.uint8)
        memory.fill(byte_view(content), seed)
        self.tensor.copy_(content)
        _synchronize(self.tensor)

    def holds(self, seed: int, offset: int) -> bool:
        return memory.matches(byte_view(self.tensor.cpu()), seed, offset)

    def clear(self) -> None:
        super().clear()
        _synchronize(self.tensor)

    def result(self, watch: Stopwatch) -> dict[str, Any]:
        pinned = self.pinned_nbytes()
        return watch.result(self.tensor.nbytes, locked_nbytes=pinned, **self.details())


class Handle(TensorPeer):
    """tensorferry's ``aio_handle``, or another of its handles by name."""

    def __init__(
        self,
        nbytes: int,
        name: str = "aio_handle",
        options: dict[str, Any] | None = None,
        device: str = "cuda",
    ) -> None:
        super().__init__(nbytes, device)
        try:
            self.handle = getattr(tensorferry, name)(**options or {})
        except tensorferry.EngineUnavailableError as error:
            raise UnavailableError(str(error)) from error
        if name == "gds_handle":
            self.handle.pin_device_tensor(self.tensor)

    def put(self, path: Path) -> None:
        self.handle.sync_pwrite(self.tensor, path)

    def get(self, path: Path) -> None:
        self.handle.sync_pread(self.tensor, path)

    def pinned_nbytes(self) -> int:
        return _core.pinned_pool_nbytes()

    def details(self) -> dict[str, Any]:
        stats = self.handle.stats()
        return {name: stats[name] for name in ("engine", "gpu_nbytes", "gds_nbytes")}


class DeepSpeedHandle(TensorPeer):
    """DeepSpeed's ``aio_handle`` with a CUDA tensor."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.handle = async_io().aio_handle()

    def put(self, path: Path) -> None:
        succeed(self.handle.sync_pwrite(self.tensor, str(path), 0))

    def get(self, path: Path) -> None:
        succeed(self.handle.sync_pread(self.tensor, str(path), 0))


class CopyThen(TensorPeer):
    """DeepNVMe's method, improved: the whole tensor is copied through pinned memory of its size, which is reused.

    The pinned memory is moved by tensorferry's ``aio_handle``, or by so many threads with ``pwritev`` and ``preadv``
    and O_DIRECT.
    """

    def __init__(self, nbytes: int, threads: int = 0, device: str = "cuda") -> None:
        super().__init__(nbytes, device)
        self.host = host_memory(nbytes, pinned=device == "cuda")
        self.threads = threads
        self.handle = tensorferry.aio_handle()

    def put(self, path: Path) -> None:
        self.host.copy_(self.tensor, non_blocking=True)
        _synchronize(self.tensor)
        if self.threads:
            move(path, self.host, self.threads, write=True)
        else:
            self.handle.sync_pwrite(self.host, path)

    def get(self, path: Path) -> None:
        if self.threads:
            move(path, self.host, self.threads, write=False)
        else:
            self.handle.sync_pread(self.host, path)
        self.tensor.copy_(self.host, non_blocking=True)

    def pinned_nbytes(self) -> int:
        return self.host.nbytes


class StorageLimit:
    """The file system alone: ``pwritev`` and ``preadv`` from several threads, with arbitrary bytes.

    This limit is an addition to fio, which may be missing or slower.
    """

    def __init__(self, nbytes: int, threads: int) -> None:
        self.threads = threads
        self.memory = host_memory(nbytes, pinned=False)

    def write(self, path: Path, seed: int, check: bool) -> dict[str, Any]:
        with Stopwatch() as watch:
            direct = move(path, self.memory, self.threads, write=True)
            sync_file(path)
        return watch.result(self.memory.nbytes, direct=direct)

    def read(self, path: Path, seed: int) -> dict[str, Any]:
        with Stopwatch() as watch:
            direct = move(path, self.memory, self.threads, write=False)
        return watch.result(self.memory.nbytes, direct=direct)


class CopyLimit:
    """The copy alone: repeated copies between a GPU and 256 MiB of pinned memory."""

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        if device == "cuda":
            check_gpu()
        piece = min(nbytes, _COPY_NBYTES)
        self.times = nbytes // piece
        self.host = host_memory(piece, pinned=device == "cuda")
        self.tensor = torch.ones(piece, dtype=torch.uint8, device=device)

    def to_host(self) -> dict[str, Any]:
        return self._copy(self.host, self.tensor)

    def to_device(self) -> dict[str, Any]:
        return self._copy(self.tensor, self.host)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> dict[str, Any]:
        _synchronize(self.tensor)
        with Stopwatch() as watch:
            for _ in range(self.times):
                to.copy_(source, non_blocking=True)
            _synchronize(self.tensor)
        return watch.result(self.times * self.tensor.nbytes)


def host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """Return touched, page-aligned memory: pinned, or in transparent huge pages if the kernel has them."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


# The scenario

SEED = 17
OURS = "tensorferry aio_handle"
_PEERS = "benchmarks.scenarios.gpu"
_TMPFS = Path("/dev/shm")
_THREADS = (1, 4, 16)
_LOCKED_MIB_MAX = 128
_IN_MEMORY_FIOS = [Config("psync", MIB, 1, direct=False)]
_FIOS = [
    Config("io_uring", MIB, 32),
    Config("io_uring", MIB, 128),
    Config("libaio", MIB, 128),
    Config("io_uring", 4 * MIB, 32, registered=True, huge_pages=True),
]


@scenario
def run(bench: Bench) -> None:
    """Run the scenario on the file system of ``--directory``."""
    _run(bench, "gpu", memory_file_system=False)


def run_on_tmpfs(settings: Settings) -> Outcome:
    """Run the scenario on tmpfs, where the copies to the GPU or those of the kernel are the limit."""
    on_tmpfs = scenario(lambda bench: _run(bench, "gpu on tmpfs", memory_file_system=True))
    return on_tmpfs(replace(settings, directory=_TMPFS))


def _run(bench: Bench, name: str, *, memory_file_system: bool) -> None:
    device = bench.worker(f"{_PEERS}:Device").call("describe")
    bench.note(f"{device['name']}, torch {device['torch']}")
    for comparison, verb in _transfers(bench, name, memory_file_system):
        what = f"{name}: {bench.nbytes / GIB:.3g} GiB {verb}"
        bench.outcome.figures += figures(comparison, what)
    if not fio.installed():
        bench.note("fio is not installed: plain system calls give the file system's limit")


def limits(comparison: Comparison) -> list[Row]:
    """Return the best rows of the file system and of the copies, the lower one first; [] if either is missing."""
    storage = [row for row in (comparison.best("fio"), comparison.best("limit", "storage")) if row]
    copy = comparison.best("limit", "copy")
    if not storage or not copy:
        return []
    best = max(storage, key=lambda row: row.median)
    return sorted([best, copy], key=lambda row: row.median)


def figures(comparison: Comparison, what: str) -> list[Figure]:
    """Return the promised figures of one comparison."""
    ours, found = comparison.row(OURS), limits(comparison)
    over = comparison.over(OURS, found[0]) if found else None
    note = "; ".join(comparison.describe(row, "a limit") for row in found)
    # Overlapping copies and I/O has a large effect only if the limits are within a factor of 2.
    comparable = found and found[1].median <= 2 * found[0].median
    whole = comparison.best("peer", "whole")
    least, over_whole = 1.5 if comparable else 1.0, comparison.over(OURS, whole)
    best = comparison.describe(whole, "best")
    locked = [sample.details["locked_nbytes"] / MIB for sample in ours.samples] if ours else []
    most, note = max(locked, default=None), note or "a limit was not measured"
    return [
        Figure(f"{what}, over the lower limit", ">=", 0.90, over, note=note),
        Figure(f"{what}, over whole copy, then I/O", ">=", least, over_whole, note=best),
        Figure(f"{what}, locked host memory", "<=", _LOCKED_MIB_MAX, most, "MiB"),
    ]


def _transfers(bench: Bench, name: str, memory_file_system: bool) -> list[tuple[Comparison, str]]:
    target, source = bench.directory / "target", bench.directory / "source"
    configs = _IN_MEMORY_FIOS if memory_file_system else _FIOS
    copies = bench.worker(f"{_PEERS}:CopyLimit", nbytes=bench.nbytes)
    movers = _movers(bench)

    def compared(action: Any, direction: str) -> list[Contender]:
        moves = [Contender(label, kind, action(w), tags) for label, kind, tags, w in movers]
        copy = {f"pinned copy {direction.replace('_', ' ')}": measured(copies, direction)}
        return moves + contenders_of("limit", copy, "copy")

    title = f"{name}: {bench.nbytes / GIB:.3g} GiB"
    ways = compared(writes(target, seed=SEED), "to_host") + bench.synced_fio(configs, bench.nbytes)
    rules = "CUDA tensor to a fresh file, synced"
    written = bench.compare(f"{title} write", rules, more=ways)
    remove(target)
    write_pattern(source, bench.nbytes, SEED)
    by_fio = bench.fio(configs, source, "read", bench.nbytes)
    ways = compared(reads(source, seed=SEED), "to_device") + by_fio
    rules = f"{'file in memory' if memory_file_system else 'cold file'} to CUDA tensor"
    was_read = bench.compare(f"{title} read", rules, more=ways)
    return [(written, "write"), (was_read, "read")]


def _movers(bench: Bench) -> list[tuple[str, Kind, tuple[str, ...], Worker]]:
    """Make all contenders except fio and the copies; return the label, kind, tags and worker of each."""
    made: list[tuple[str, Kind, tuple[str, ...], Worker]] = []

    def add(label: str, kind: Kind, tags: tuple[str, ...], peer: str, **options: Any) -> None:
        worker = bench.worker(f"{_PEERS}:{peer}", **{"nbytes": bench.nbytes} | options)
        made.append((label, kind, tags, worker))

    add(OURS, "ours", (), "Handle")
    add(f"{OURS}, 4 workers", "ours", (), "Handle", options={"intra_op_parallelism": 4})
    add("tensorferry gds_handle", "ours", (), "Handle", name="gds_handle")
    whole = "whole copy, then"
    add(f"{whole} plain system calls, 4 threads", "peer", ("whole",), "CopyThen", threads=4)
    add(f"{whole} tensorferry aio_handle", "peer", ("whole",), "CopyThen")
    if bench.settings.deepspeed:
        add("DeepSpeed aio_handle", "peer", ("whole",), "DeepSpeedHandle")
    for threads in _THREADS[: 1 if bench.smoke else None]:
        label = f"plain system calls, {threads} threads"
        nbytes = min(bench.nbytes, GIB)
        add(label, "limit", ("storage",), "StorageLimit", nbytes=nbytes, threads=threads)
    return made
