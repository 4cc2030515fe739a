"""What planners and subclasses may do with a writer, as with torch's: what they change is saved, or refused by name."""

from __future__ import annotations

import io
import os
import pathlib
import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import WriteItemType

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter, verify
from tensorferry.checkpoint.storage import commit
from tests.checkpoint.states import assert_same, digests, load, metadata_of, save
from tests.support.ranks import files_of


class Refilling(dcp.DefaultSavePlanner):
    """Fills one buffer again and again; of its state it gives nothing."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._buffer = torch.empty(numel)
        self._file = io.BytesIO()

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(data.getvalue())
            return self._file
        return self._buffer.copy_(data)


@pytest.mark.parametrize("numel", [100, 1 << 18, 3 << 20], ids=["small", "1 MiB", "12 MiB"])
def test_a_planner_that_fills_one_buffer_again_and_again_saves_each_tensor(
    directory: pathlib.Path, numel: int
) -> None:
    state: dict[str, Any] = {str(k): torch.full((numel,), float(k)) for k in range(8)}
    state |= {f"text {k}": f"{k}" * 100_000 * (k + 1) for k in range(3)}
    writer = FileSystemWriter(directory / "checkpoint")
    dcp.save(state, storage_writer=writer, planner=Refilling(numel), no_dist=True)
    assert_same(load(directory / "checkpoint", state), state)
    assert verify(directory / "checkpoint").sound


def test_a_state_that_makes_its_tensors_in_one_buffer_is_saved(directory: pathlib.Path) -> None:
    class Lazy(dict[str, Any]):
        buffer = torch.empty(1 << 18)

        def __getitem__(self, key: str) -> torch.Tensor:
            return self.buffer.fill_(float(key))

    state = {str(k): torch.zeros(1 << 18) for k in range(8)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = FileSystemWriter(directory / "checkpoint")
    dcp.save(state, storage_writer=writer, planner=LazyPlanner(Lazy(state), planner), no_dist=True)
    wanted = {key: torch.full((1 << 18,), float(key)) for key in state}
    assert_same(load(directory / "checkpoint", wanted), wanted)


class LazyPlanner(dcp.DefaultSavePlanner):
    """Looks tensors up in a mapping of its own."""

    def __init__(self, mapping: Any, _like: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._mapping = mapping

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.state_dict = self._mapping
        return plan


def test_a_planner_that_gives_the_states_own_tensors_has_them_copied_while_it_goes_on(
    directory: pathlib.Path,
) -> None:
    class Watching(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)

    state = {str(k): torch.full((1 << 18,), float(k)) for k in range(40)}
    state["view"] = torch.arange(100.0)[10:20]
    writer = FileSystemWriter(directory / "checkpoint")
    dcp.save(state, storage_writer=writer, planner=Watching(), no_dist=True)
    assert_same(load(directory / "checkpoint", state), state)


class OtherFileSystem(filesystem.FileSystem):
    """Somebody's own."""


def test_a_writer_with_a_file_system_of_its_own_is_refused_by_name(directory: pathlib.Path) -> None:
    class Mine(FileSystemWriter):
        def __init__(self, path: pathlib.Path) -> None:
            super().__init__(path)
            self.fs = OtherFileSystem()

    with pytest.raises(dcp.api.CheckpointException, match="Mine sets fs to a OtherFileSystem"):
        dcp.save({"a": torch.ones(3)}, storage_writer=Mine(directory / "checkpoint"), no_dist=True)


def test_a_reader_with_a_file_system_of_its_own_is_refused_by_name(directory: pathlib.Path) -> None:
    class Mine(FileSystemReader):
        def __init__(self, path: pathlib.Path) -> None:
            super().__init__(path)
            self.fs = OtherFileSystem()

    save({"a": torch.ones(3)}, directory / "checkpoint")
    state = {"a": torch.zeros(3)}
    with pytest.raises(dcp.api.CheckpointException, match="Mine sets fs to a OtherFileSystem"):
        dcp.load(state, storage_reader=Mine(directory / "checkpoint"), no_dist=True)
    with pytest.raises(TypeError, match="Mine sets fs to a OtherFileSystem"):
        Mine(directory / "checkpoint").read_metadata()


@pytest.mark.skipif(
    not hasattr(filesystem._FileSystemWriter, "_write_data"), reason="this torch has no _write_data"
)
def test_a_writer_that_overrides_torchs_write_data_has_it_called(directory: pathlib.Path) -> None:
    calls = []

    class Mine(FileSystemWriter):
        def _write_data(self, planner: Any, file_queue: Any) -> Any:
            calls.append(file_queue.qsize())
            return super()._write_data(planner, file_queue)

    state = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    dcp.save(state, storage_writer=Mine(directory / "mine", thread_count=2), no_dist=True)
    assert calls == [2]
    assert_same(load(directory / "mine", state), state)
    save(state, directory / "ours", thread_count=2)
    assert digests(directory / "mine") == digests(directory / "ours")


class OwnPath(type(pathlib.Path())):  # type: ignore[misc]
    """Somebody's own class of paths, as universal_pathlib has."""


@pytest.mark.parametrize("given", ["to the writer", "to the save"])
def test_metadata_names_no_class_of_paths(directory: pathlib.Path, given: str) -> None:
    path = OwnPath(directory / "checkpoint")
    if given == "to the writer":
        dcp.save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(path), no_dist=True)
    else:
        writer = FileSystemWriter(directory / "other")
        dcp.save({"a": torch.ones(3)}, checkpoint_id=path, storage_writer=writer, no_dist=True)
    content = (directory / "checkpoint" / ".metadata").read_bytes()
    assert b"OwnPath" not in content
    assert b"pathlib" not in content
    state = {"a": torch.zeros(3)}
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    assert state["a"].tolist() == [1.0] * 3
    assert metadata_of(directory / "checkpoint").storage_meta.checkpoint_id == str(path)


def test_an_empty_checkpoint_id_is_none_as_for_torch(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    writer = FileSystemWriter(directory / "checkpoint")
    dcp.save({"a": torch.ones(3)}, checkpoint_id="", storage_writer=writer, no_dist=True)
    assert files_of(directory) == {"checkpoint"}
    assert (directory / "checkpoint" / ".metadata").exists()


def test_a_thread_does_not_remember_where_it_saved_before(directory: pathlib.Path) -> None:
    state = {"a": torch.ones(3)}
    writer = FileSystemWriter(directory / "zero")
    dcp.save(state, checkpoint_id=directory / "one", storage_writer=writer, no_dist=True)

    def save_elsewhere() -> None:
        dcp.save(state, checkpoint_id=directory / "two", storage_writer=writer, no_dist=True)

    thread = threading.Thread(target=save_elsewhere)
    thread.start()
    thread.join()
    (directory / "two" / ".metadata").unlink()
    dcp.save(state, storage_writer=writer, no_dist=True)  # torch's saves where the last one went
    assert (directory / "two" / ".metadata").exists()
    writer.path = directory / "three"
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert (directory / "three" / ".metadata").exists()


def test_overlapping_saves_with_cached_plans_name_their_own_files(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.7")

    class Cached(dcp.DefaultSavePlanner):
        def __init__(self) -> None:
            super().__init__(enable_plan_caching=True)

    def save_to(name: str, value: float, writer: Any) -> None:
        state = {"a": torch.full((100,), value)}
        dcp.save(state, storage_writer=writer, planner=Cached(), no_dist=True)

    for name in ("zero", "one"):  # from now on the plan and the metadata are cached
        save_to(name, 0.0, FileSystemWriter(directory / name))
    inner = FileSystemWriter(directory / "inner")

    class Outer(FileSystemWriter):
        def storage_meta(self) -> Any:
            # Called in the middle of finish() as well: there another save comes to its end.
            if (directory / "outer").exists() and not (directory / "inner").exists():
                thread = threading.Thread(target=save_to, args=("inner", 2.0, inner))
                thread.start()
                thread.join()
            return super().storage_meta()

    save_to("outer", 1.0, Outer(directory / "outer"))
    for name, value in (("outer", 1.0), ("inner", 2.0)):
        state = {"a": torch.full((100,), value)}
        assert_same(load(directory / name, state), state)


def test_shards_of_other_dtypes_are_loaded_as_what_they_are(directory: pathlib.Path) -> None:
    """A planner plans one tensor of two parts of different types, of one size."""
    parts = {(0,): torch.tensor([1.0, 2.0], dtype=torch.float16)}
    parts[2,] = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    writer = FileSystemWriter(directory / "checkpoint")
    dcp.save({"a": parts[0,]}, storage_writer=writer, planner=Mixed(parts), no_dist=True)
    for reader in (dcp.FileSystemReader, FileSystemReader):
        state = {"a": torch.zeros(4)}
        dcp.load(state, storage_reader=reader(directory / "checkpoint"), no_dist=True)
        assert state["a"].tolist() == [1.0, 2.0, 3.0, 4.0], reader


class Mixed(dcp.DefaultSavePlanner):
    """Saves parts of one tensor."""

    def __init__(self, parts: dict[tuple[int, ...], torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def create_local_plan(self) -> Any:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

        size = torch.Size([sum(len(part) for part in self._parts.values())])
        items = [
            WriteItem(
                index=MetadataIndex("a", offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=size,
                ),
            )
            for offset, part in self._parts.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: Any) -> Any:
        return self._parts[tuple(write_item.index.offset)]


def test_a_directory_that_cannot_be_synced_is_no_failure() -> None:
    """Some file systems have no fsync for directories; /proc is one."""
    descriptor = os.open("/proc", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    commit.sync_directory(pathlib.Path("/proc"))
