"""torch.distributed.checkpoint: a state of 2 GiB loaded by our reader and torch's, and what fio makes of the same file.

Rules: one process; the checkpoint is one that our writer made, which both readers take; it is loaded into tensors that
are there. Cold: the file is dropped from the page cache before each load. Warm: it is brought there. What has been
loaded is compared with what was saved. The last comparison loads one half of the rows of each tensor, and counts what
the kernel has read from the drive for it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files, fio
from benchmarks.harness import (
    MIB,
    Comparison,
    Contender,
    Figure,
    MeasurementError,
    Outcome,
    Sample,
    Settings,
    compare,
    peak_figure,
    ratio,
)
from benchmarks.measure import Stopwatch
from benchmarks.worker import Worker, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

OURS = "tensorferry.checkpoint.FileSystemReader"
BEFORE = f"{OURS} verify=before"
OFF = f"{OURS} verify=off"
TORCH = "torch FileSystemReader"
_PEAK_NBYTES_MAX = 64 * MIB

_FIOS = [
    fio.Config("io_uring", "1M", 32),
    fio.Config("io_uring", "1M", 128),
    fio.Config("io_uring", "4M", 32, registered=True),
    fio.Config("libaio", "1M", 128),
    fio.Config("libaio", "1M", 32, huge=True),
    fio.Config("io_uring", "4M", 32, registered=True, huge=True),
]


class Loader:
    """Loads a state again and again, in a worker."""

    def __init__(self, nbytes: int, verify: str | None) -> None:
        import torch.distributed.checkpoint as dcp

        from benchmarks.scenarios.checkpoint_state import state, state_nbytes, tensors

        warnings.filterwarnings("ignore", module="torch")
        self._dcp = dcp
        self._verify = verify
        self._tensors = tensors
        self._state = state(nbytes)
        self._nbytes = state_nbytes(self._state)

    def save(self, path: str) -> dict[str, Any]:
        """Make the checkpoint."""
        from tensorferry.checkpoint import FileSystemWriter

        self._dcp.save(self._state, storage_writer=FileSystemWriter(path), no_dist=True)
        return {}

    def load(self, path: str) -> dict[str, Any]:
        """Load all of it, into tensors whose values are others before."""
        tensors = self._tensors(self._state)
        crcs = _crcs(tensors)
        for tensor in tensors:
            tensor.fill_(-1.0)
        with Stopwatch() as watch:
            self._dcp.load(self._state, storage_reader=self._reader(path), no_dist=True)
        if _crcs(self._tensors(self._state)) != crcs:
            raise MeasurementError("loaded other values than were saved")
        return watch.result(self._nbytes)

    def load_half(self, path: str) -> dict[str, Any]:
        """Load the first half of the rows of each tensor, and return what part of its bytes the drive gave."""
        from torch.distributed.checkpoint.planner import LoadPlan

        targets = {
            index: tensor[: len(tensor) // 2].clone()
            for index, tensor in self._stored(path).items()
        }
        wanted = _crcs(targets.values())
        for target in targets.values():
            target.fill_(-1.0)
        reader = self._reader(path)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plan = LoadPlan([_rows(index, target) for index, target in targets.items()])
        before = _read_from_drives_nbytes()
        with Stopwatch() as watch:
            reader.read_data(plan, _Targets(targets)).wait()
        nbytes_read = _read_from_drives_nbytes() - before
        if _crcs(targets.values()) != wanted:
            raise MeasurementError("loaded other values than were saved")
        whole = sum(2 * target.nbytes for target in targets.values())
        return {"value": nbytes_read / whole, "seconds": watch.seconds, "nbytes": nbytes_read}

    def _reader(self, path: str) -> Any:
        from tensorferry.checkpoint import FileSystemReader

        if self._verify is None:
            return self._dcp.FileSystemReader(path)
        return FileSystemReader(path, verify=self._verify)  # type: ignore[arg-type]

    def _stored(self, path: str) -> dict[Any, Any]:
        """The tensors that have rows, by the checkpoint's index."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        flat: dict[Any, Any] = {}

        def collect(name: str, value: Any) -> None:
            if isinstance(value, dict):
                for key, inner in value.items():
                    collect(f"{name}.{key}" if name else key, inner)
            elif hasattr(value, "dim") and value.dim() and len(value) % 2 == 0:
                flat[MetadataIndex(name, [0] * value.dim())] = value

        collect("", self._state)
        return flat


def _crcs(tensors: Iterable[Any]) -> list[int]:
    from tensorferry.checkpoint.checksums import crc32

    return [crc32(tensor.reshape(-1).numpy().data.cast("B")) for tensor in tensors]


def _rows(index: Any, target: Any) -> Any:
    """The item of a plan that asks for the first rows of a tensor."""
    import torch
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

    origin = torch.Size([0] * target.dim())
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, target.size())


class _Targets:
    """A planner that gives out tensors by index."""

    def __init__(self, targets: dict[Any, Any]) -> None:
        self._targets = targets

    def resolve_tensor(self, item: Any) -> Any:
        return self._targets[item.dest_index]

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        pass


def _read_from_drives_nbytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise MeasurementError("the kernel does not count what processes read")


def run(settings: Settings) -> Outcome:
    with files.scratch_directory(settings.directory) as directory, workers() as make:
        nbytes = 2 * settings.nbytes
        peer = "benchmarks.scenarios.checkpoint_load:Loader"
        checkpoint = directory / "checkpoint"
        ours = make(peer, nbytes=nbytes, verify="read")
        peers = {
            OURS: ours,
            OFF: make(peer, nbytes=nbytes, verify="off"),
            BEFORE: make(peer, nbytes=nbytes, verify="before"),
            TORCH: make(peer, nbytes=nbytes, verify=None),
        }
        ours.call("save", path=str(checkpoint))
        (file,) = checkpoint.glob("*.distcp")
        comparisons = [
            _load(settings, "cold", peers, file, files.make_cold, _FIOS),
            _load(settings, "warm", peers, file, files.make_warm, []),
            _half(settings, {OURS: ours, TORCH: peers[TORCH]}, file),
        ]
    return Outcome(comparisons, _figures(*comparisons))


def _load(
    settings: Settings,
    name: str,
    peers: dict[str, Worker],
    file: Path,
    prepare: Callable[[Path], None],
    configs: list[fio.Config],
) -> Comparison:
    def load(worker: Worker) -> Callable[[int], Sample]:
        def measure(number: int) -> Sample:
            prepare(file)
            return worker.sample("load", path=str(file.parent))

        return measure

    contenders = [
        Contender(label, "peer" if label == TORCH else "ours", load(worker))
        for label, worker in peers.items()
    ]
    usable = fio.usable(configs, settings)
    contenders += fio.contenders(usable, file, "read", file.stat().st_size, prepare)
    return compare(settings, Comparison(f"checkpoint {name} load", f"{name} file"), contenders)


def _half(settings: Settings, peers: dict[str, Worker], file: Path) -> Comparison:
    def load(worker: Worker) -> Callable[[int], Sample]:
        def measure(number: int) -> Sample:
            files.make_cold(file)
            return Sample(**worker.call("load_half", path=str(file.parent)))

        return measure

    contenders = [
        Contender(label, "peer" if label == TORCH else "ours", load(worker))
        for label, worker in peers.items()
    ]
    comparison = Comparison(
        "checkpoint half of the rows", "cold file", unit="of the bytes", higher_is_better=False
    )
    return compare(settings, comparison, contenders, rounds=min(3, settings.rounds))


def _figures(cold: Comparison, warm: Comparison, half: Comparison) -> list[Figure]:
    ours = cold.row(OURS)
    part = half.row(OURS)
    return [
        Figure("checkpoint cold load over fio", ">=", 0.92, ratio(ours, cold.best("fio"))),
        Figure(
            "checkpoint warm load over torch", ">=", 3.0, ratio(warm.row(OURS), warm.row(TORCH))
        ),
        Figure("checkpoint cold load, verified over not", ">=", 0.95, ratio(ours, cold.row(OFF))),
        Figure(
            "checkpoint warm load, verified over not",
            ">=",
            0.95,
            ratio(warm.row(OURS), warm.row(OFF)),
        ),
        Figure("checkpoint half of the rows", "<=", 0.55, part.median if part else None),
        peak_figure("checkpoint load, peak memory beside the state", ours, _PEAK_NBYTES_MAX),
    ]
