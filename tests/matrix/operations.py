"""The public operations, each as an object that saves versions in a folder and loads them again.

A version is a number, and all values of a version's tensors are made from it, so what is found tells its version.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import safetensors
import tensorferry
import tensorferry.safetensors.torch
from tensorferry import checkpoint
from tensorferry.safetensors import load_files, safe_open, save_sharded
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable

# Names with their numbers of float32 values: less than a page, ragged, and several blocks.
SIZES = {"small": 3, "odd": 20_001, "large": 300_000}
Versions = set[Any]  # None: the values are of no version


def arrays(version: int) -> dict[str, Any]:
    return {
        name: np.arange(count, dtype=np.float32) + version * 1_000_000
        for name, count in SIZES.items()
    }


def state(version: int) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in arrays(version).items()}


def empty() -> dict[str, Any]:
    return {name: torch.full((count,), -1.0) for name, count in SIZES.items()}


def empty_arrays() -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in empty().items()}


def versions_in(found: dict[str, Any]) -> Versions:
    """Return the versions of the tensors or arrays; None for one that is of no version."""
    return {version_of(name, found.get(name)) for name in SIZES}


def version_of(name: str, found: Any) -> int | None:
    if found is None or found.shape != (SIZES[name],):
        return None
    values = np.asarray(found)
    version = round(float(values[0]) / 1_000_000)
    return version if np.array_equal(values, arrays(version)[name]) else None


def raise_first(futures: Iterable[Any]) -> None:
    """Wait for all of them, and raise the first failure."""
    for failure in [future.exception() for future in list(futures)]:
        if failure is not None:
            raise failure


class Operation:
    """A folder, and the object that saves there; ``save`` and ``load`` use the same object each time."""

    #: After a save that failed, each part is of the old or the new version.
    keeps_parts: ClassVar[bool] = True
    #: And all parts are of the same version.
    keeps_all: ClassVar[bool] = True
    #: Its file has to be opened again after a sync that failed.
    is_reopened: ClassVar[bool] = False

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.path = folder / "saved"

    def save(self, version: int) -> None:
        raise NotImplementedError

    def load(self) -> Versions:
        raise NotImplementedError

    def found(self) -> Versions:
        """Return the versions that another program finds, by other code than ours where there is some."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class Write(Operation):
    keeps_parts = keeps_all = False

    def save(self, version: int) -> None:
        tensorferry.write(self.path, list(arrays(version).values()), sync=True)

    def load(self) -> Versions:
        into = empty_arrays()
        tensorferry.read(self.path, list(into.values()))
        return versions_in(into)

    def found(self) -> Versions:
        parts = np.split(np.fromfile(self.path, np.float32), np.cumsum([*SIZES.values()]))
        assert len(parts.pop()) == 0, "the file has a tail"
        return versions_in(dict(zip(SIZES, parts, strict=True)))


class WriteAtomic(Write):
    keeps_parts = keeps_all = True

    def save(self, version: int) -> None:
        parts = list(arrays(version).values())
        tensorferry.write(self.path, parts, atomic=True, checksums=tensorferry.Checksums(4096))


class WriteMany(Operation):
    keeps_parts = keeps_all = False
    atomic = False

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.paths = {name: folder / name for name in SIZES}

    def save(self, version: int) -> None:
        items = [(self.paths[name], array) for name, array in arrays(version).items()]
        tensorferry.write_many(items, atomic=self.atomic, sync=True)

    def load(self) -> Versions:
        into = empty_arrays()
        tensorferry.read_many([(self.paths[name], array) for name, array in into.items()])
        return versions_in(into)

    def found(self) -> Versions:
        return versions_in(
            {name: np.fromfile(path, np.float32) for name, path in self.paths.items()}
        )


class WriteManyAtomic(WriteMany):
    keeps_parts = True
    atomic = True


class OpenFile(Write):
    """A file that stays open, and futures."""

    is_reopened = True

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.path.touch()
        self.file = tensorferry.open(self.path, "r+")

    def save(self, version: int) -> None:
        offsets = np.cumsum([0, *SIZES.values()]).tolist()
        parts = zip(arrays(version).values(), offsets[:-1], strict=True)
        raise_first(self.file.write_from(array, offset * 4) for array, offset in parts)
        self.file.sync()

    def load(self) -> Versions:
        into = empty_arrays()
        self.file.read(list(into.values()))
        return versions_in(into)

    def close(self) -> None:
        self.file.close()


class Stream(OpenFile):
    def save(self, version: int) -> None:
        with self.file.stream(checksums=tensorferry.Checksums(4096)) as stream:
            for array in arrays(version).values():
                stream.append(array)
            stream.finish(truncate=True, sync=True)


class Handle(Write):
    """DeepNVMe's handle, asynchronously."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.handle = tensorferry.aio_handle(block_size=64 << 10)

    def save(self, version: int) -> None:
        offset = 0
        parts = list(arrays(version).values())
        try:
            for array in parts:
                self.handle.async_pwrite(array, self.path, offset)
                offset += array.nbytes
        finally:
            self.handle.wait()

    def load(self) -> Versions:
        into, offset = empty_arrays(), 0
        for array in into.values():
            self.handle.sync_pread(array, self.path, offset)
            offset += array.nbytes
        return versions_in(into)

    def close(self) -> None:
        self.handle.close()


class Rows(Operation):
    """Rows of a table, which stays open."""

    keeps_parts = keeps_all = False
    is_reopened = True

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        if not self.path.exists():
            arrays(0)["large"].tofile(self.path)
        self.table = tensorferry.Table(self.path, (3000, 100), "float32", mode="r+")
        self.ids = np.random.default_rng(3).permutation(3000)

    def save(self, version: int) -> None:
        rows = arrays(version)["large"].reshape(3000, 100)
        self.table.scatter(self.ids, rows[self.ids], sync=True)

    def load(self) -> Versions:
        rows = self.table.gather(np.arange(3000))
        return {version_of("large", np.asarray(rows).reshape(-1))}

    def found(self) -> Versions:
        return {version_of("large", np.fromfile(self.path, np.float32))}

    def close(self) -> None:
        self.table.close()


class SaveObject(Operation):
    def save(self, version: int) -> None:
        checkpoint.save(state(version), self.path)

    def load(self) -> Versions:
        return versions_in(checkpoint.load(self.path))

    def found(self) -> Versions:
        return versions_in(torch.load(self.path))


class ManySmall(SaveObject):
    """So many small tensors that torch writes and reads the whole archive."""

    def save(self, version: int) -> None:
        more = [torch.tensor(version) for _ in range(1001)]
        checkpoint.save({**state(version), "more": more}, self.path)

    def load(self) -> Versions:
        found = checkpoint.load(self.path)
        return versions_in(found) | {int(each) for each in found["more"]}


class WriteFile(SaveObject):
    """torch.save through our file object."""

    def save(self, version: int) -> None:
        with checkpoint.FileWriter(self.path) as file:
            torch.save(state(version), file)


class Distributed(Operation):
    """torch.distributed.checkpoint with one writer and one reader, over the same folder each time."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.writer = checkpoint.FileSystemWriter(self.path)
        self.reader = checkpoint.FileSystemReader(self.path)

    def save(self, version: int) -> None:
        dcp.save(state(version), storage_writer=self.writer, no_dist=True)

    def load(self) -> Versions:
        into = empty()
        dcp.load(into, storage_reader=self.reader, no_dist=True)
        return versions_in(into)

    def found(self) -> Versions:
        into = empty()
        dcp.load(into, storage_reader=dcp.FileSystemReader(self.path), no_dist=True)
        return versions_in(into)


class Asynchronous(Distributed):
    def save(self, version: int) -> None:
        dcp.async_save(state(version), storage_writer=self.writer, no_dist=True).result()


class HuggingFace(Distributed):
    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.writer: Any = checkpoint.HuggingFaceStorageWriter(self.path)
        self.reader: Any = checkpoint.HuggingFaceStorageReader(self.path)

    def found(self) -> Versions:
        return versions_in(of_a_model(self.path))


def of_a_model(folder: pathlib.Path) -> dict[str, Any]:
    """Return a model's tensors as transformers finds them: in one file, or in those that the index names."""
    alone, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if alone.exists():
        return safetensors.torch.load_file(alone)
    found = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        with safetensors.safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


class Manager(Operation):
    """Checkpoints, of which the newest counts."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.path.mkdir(exist_ok=True)
        self.saved = checkpoint.Checkpoints(self.path, keep_last=1)

    def save(self, version: int) -> None:
        self.saved.save(version, {"model": state(version)}, wait=True, overwrite=True)

    def load(self) -> Versions:
        into = {"model": empty()}
        step = self.saved.restore(into)
        assert step is not None
        return versions_in(into["model"]) | {step}

    def found(self) -> Versions:
        into = {"model": empty()}
        step = max(int(path.parent.name[5:]) for path in self.path.glob("step_*/.metadata"))
        reader = dcp.FileSystemReader(self.path / f"step_{step:08}")
        dcp.load(into, storage_reader=reader, no_dist=True)
        return versions_in(into["model"]) | {step}

    def close(self) -> None:
        self.saved.close()


class SaveFile(Operation):
    def save(self, version: int) -> None:
        tensorferry.safetensors.torch.save_file(state(version), self.path)

    def load(self) -> Versions:
        return versions_in(tensorferry.safetensors.torch.load_file(self.path))

    def found(self) -> Versions:
        return versions_in(safetensors.torch.load_file(self.path))


class SafeOpen(SaveFile):
    """One tensor after the other, past the page cache or not."""

    def load(self) -> Versions:
        with safe_open(self.path, "np", direct="always") as file:
            return versions_in({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


class Sharded(Operation):
    def save(self, version: int) -> None:
        limit = 200_000 if version % 2 else 5_000_000  # several files, and one file
        save_sharded(state(version), self.path, max_shard_nbytes=limit)

    def load(self) -> Versions:
        return versions_in(dict(load_files(self.path)))

    def found(self) -> Versions:
        return versions_in(of_a_model(self.path))


class Store(Operation):
    """A store that stays open. What another program finds was committed."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.store = TensorStore(self.path, temporary=False)
        self.closed = False

    @property
    def keeps_all(self) -> bool:  # type: ignore[override]
        return self.closed  # the open store has each tensor that was written

    def save(self, version: int) -> None:
        raise_first(self.store.write(name, array) for name, array in arrays(version).items())
        self.store.commit(sync=True)

    def load(self, store: TensorStore | None = None) -> Versions:
        into = empty_arrays()
        for name, array in into.items():
            (store or self.store).read(name, array).result()
        return versions_in(into)

    def found(self) -> Versions:
        if not self.closed:
            return self.load()
        with TensorStore.open(self.path) as store:
            return self.load(store)

    def close(self) -> None:
        self.closed = True
        self.store.close()


OPERATIONS: list[type[Operation]] = [
    Write,
    WriteAtomic,
    WriteMany,
    WriteManyAtomic,
    OpenFile,
    Stream,
    Handle,
    Rows,
    SaveObject,
    ManySmall,
    WriteFile,
    Distributed,
    Asynchronous,
    HuggingFace,
    Manager,
    SaveFile,
    SafeOpen,
    Sharded,
    Store,
]
