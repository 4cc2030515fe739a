"""A state of a model and its optimizer in the benchmark: saved and loaded by our checkpoints, and by torch's."""

from __future__ import annotations

import ctypes
import inspect
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from benchmarks.harness import MIB, MeasurementError, UnavailableError
from benchmarks.measure import Stopwatch, drive_nbytes, touch_memory
from benchmarks.peers.state import state, state_nbytes, tensors
from tensorferry._core import crc32
from tensorferry.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    FileWriter,
    Stager,
    load,
    save,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

LAZY_NBYTES = 8 * MIB

warnings.filterwarnings("ignore", module="torch")


class Holder:
    """Has a state."""

    def __init__(self, nbytes: int) -> None:
        self.state = state(nbytes)
        self.nbytes = state_nbytes(self.state)


class Saver(Holder):
    """Saves to directories that are not there, by our writer or torch's with its options."""

    def __init__(self, nbytes: int, ours: bool, options: dict[str, Any]) -> None:
        super().__init__(nbytes)
        self.writer: Any = FileSystemWriter if ours else dcp.FileSystemWriter
        self.options = options
        self.planner: Any = None

    def save(self, path: str) -> dict[str, Any]:
        planner = self.planner() if self.planner else None
        touch_memory(2 * self.nbytes)
        with Stopwatch() as watch:
            writer = self.writer(path, **self.options)
            dcp.save(self.state, storage_writer=writer, planner=planner, no_dist=True)
        return watch.result(self.nbytes)


class LazySaver(Saver):
    """Saves by our writer a state whose tensors are made when they are asked for."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(0, True, {})
        # The C library is to give back at once what is freed (M_MMAP_THRESHOLD): its holes are not the save's.
        ctypes.CDLL(None).mallopt(-3, 1 << 20)
        # As many tensors as the planner will make, without their memory.
        count = max(1, nbytes // LAZY_NBYTES)
        self.state = {f"tensor{k}": torch.zeros(1).expand(LAZY_NBYTES // 4) for k in range(count)}
        self.nbytes = state_nbytes(self.state)
        self.planner = _LazyPlanner


class _LazyPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return torch.full((LAZY_NBYTES // 4,), 1.0)


class AsyncSaver(Holder):
    """Saves by ``async_save``, by the same writer and stager again and again."""

    def __init__(self, nbytes: int, writer: str, overlap: bool) -> None:
        super().__init__(nbytes)
        self.options: dict[str, Any] = {}
        if writer:
            kind = {"ours": FileSystemWriter, "torch": dcp.FileSystemWriter}[writer]
            self.options["storage_writer"] = kind("unused")
        if overlap:
            if "async_stager" not in inspect.signature(dcp.async_save).parameters:
                raise UnavailableError("this torch takes no stagers (2.9 and later do)")
            self.options["async_stager"] = Stager(overlap=True)

    def save(self, path: str) -> dict[str, Any]:
        """Save to a directory that is not there, and tell how long that blocked."""
        touch_memory(2 * self.nbytes)
        begin = time.perf_counter()
        answer: Any = dcp.async_save(self.state, checkpoint_id=path, **self.options)
        blocked = time.perf_counter() - begin
        getattr(answer, "upload_completion", answer).result()
        return {"value": blocked, "seconds": time.perf_counter() - begin}


class Loader(Holder):
    """Loads into tensors that are there, by our reader with a way to verify, or by torch's without."""

    def __init__(self, nbytes: int, verify: str | None) -> None:
        super().__init__(nbytes)
        self.verify = verify

    def save(self, path: str) -> None:
        """Make the checkpoint."""
        dcp.save(self.state, storage_writer=FileSystemWriter(path), no_dist=True)

    def load(self, path: str) -> dict[str, Any]:
        """Load all of it, into tensors whose values are others before."""
        with Restored(self.state), Stopwatch() as watch:
            dcp.load(self.state, storage_reader=self._reader(path), no_dist=True)
        return watch.result(self.nbytes)

    def load_half(self, path: str) -> dict[str, Any]:
        """Load the first half of the rows of each tensor, and return what part of its bytes the drive gave."""
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
        return {"value": nbytes_read / whole, "seconds": watch.seconds, "nbytes": nbytes_read}

    def _reader(self, path: str) -> Any:
        if self.verify is None:
            return dcp.FileSystemReader(path)
        return FileSystemReader(path, verify=self.verify)  # type: ignore[arg-type]


class Restored:
    """Context manager: has other values in the tensors of a state, and expects that theirs come back."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._crcs = self._crcs_now()
        for tensor in tensors(self._state):
            tensor.fill_(-1.0)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._crcs_now() != self._crcs:
            raise MeasurementError("loaded other values than were saved")

    def _crcs_now(self) -> list[int]:
        found = tensors(self._state)
        return [crc32(tensor.reshape(-1).numpy().data.cast("B")) for tensor in found]


def _with_rows(value: Any, name: str = "") -> Iterable[tuple[MetadataIndex, torch.Tensor]]:
    """The tensors of a state that have rows to be halved, by the checkpoint's index."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _with_rows(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, torch.Tensor) and value.dim() and len(value) % 2 == 0:
        yield MetadataIndex(name, [0] * value.dim()), value


def _rows(index: MetadataIndex, target: torch.Tensor) -> ReadItem:
    """The item of a plan that asks for the first rows of a tensor."""
    origin = torch.Size([0] * target.dim())
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, target.size())


class _Targets:
    """A planner that gives out tensors by index."""

    def __init__(self, targets: dict[MetadataIndex, torch.Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, item: Any) -> Any:
        return self._targets[item.dest_index]

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        pass


class Keeper(Holder):
    """Saves and loads an object: by our functions, by torch's, or by torch's to our file."""

    def __init__(self, nbytes: int, how: str) -> None:
        super().__init__(nbytes)
        self.how = how

    def save(self, path: str) -> dict[str, Any]:
        """Save to a path where nothing is."""
        touch_memory(2 * self.nbytes)
        with Stopwatch() as watch:
            if self.how == "ours":
                save(self.state, path)
            elif self.how == "file":
                with FileWriter(path) as file:
                    torch.save(self.state, file)
            else:
                with open(path, "wb") as plain:
                    torch.save(self.state, plain)
                    plain.flush()
                    os.fsync(plain.fileno())
        return watch.result(self.nbytes)

    def load(self, path: str) -> dict[str, Any]:
        """Load, and compare with what was saved. The object itself does not count as growth."""
        touch_memory(2 * self.nbytes)
        with Stopwatch() as watch:
            loaded = load(path) if self.how == "ours" else torch.load(path, weights_only=True)
        pairs = zip(tensors(loaded), tensors(self.state), strict=True)
        if not all(torch.equal(ours, saved) for ours, saved in pairs):
            raise MeasurementError("loaded other values than were saved")
        result = watch.result(self.nbytes)
        if result["peak_growth_nbytes"] is not None:
            result["peak_growth_nbytes"] = max(0, result["peak_growth_nbytes"] - self.nbytes)
        return result
