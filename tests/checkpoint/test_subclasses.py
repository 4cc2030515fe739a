"""Planners and subclasses may customize a writer, as with torch's: their changes are saved, or refused by name."""

from __future__ import annotations

import inspect
import io
import json
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
from tensorferry.transfer import publication
from tests.checkpoint.states import (
    assert_same,
    done,
    empty_like,
    load,
    metadata_of,
    save,
)
from tests.support.ranks import files_of


class Refilling(dcp.DefaultSavePlanner):
    """A planner that fills one buffer for each item, and ignores the tensors of the state."""

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
    """A planner that looks tensors up in its own mapping."""

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


def recording(kind: Any, names: list[str]) -> Any:
    """Return a subclass of a class that overrides methods, and records and forwards their calls."""
    calls: set[str] = set()

    def override(name: str) -> Any:
        original = inspect.getattr_static(kind, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.add(name)
            return inner(*arguments, **options)

        if isinstance(original, property):
            inner: Any = original.fget
            return property(call)
        if isinstance(original, classmethod):
            inner = original.__func__
            return classmethod(call)
        inner = original
        return call

    members = {name: override(name) for name in names}
    return type(f"Own{kind.__name__}", (kind,), {**members, "calls": calls})


PAIRS: dict[str, tuple[Any, Any]] = {
    "FileSystemWriter": (FileSystemWriter, filesystem.FileSystemWriter),
    "FileSystemReader": (FileSystemReader, filesystem.FileSystemReader),
}
try:
    from torch.distributed.checkpoint import hf_storage

    from tensorferry.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
except ImportError:
    pass
else:
    PAIRS |= {
        "HuggingFaceStorageWriter": (HuggingFaceStorageWriter, hf_storage.HuggingFaceStorageWriter),
        "HuggingFaceStorageReader": (HuggingFaceStorageReader, hf_storage.HuggingFaceStorageReader),
    }
of_hugging_face = pytest.mark.skipif(
    "HuggingFaceStorageReader" not in PAIRS, reason="this torch has no Hugging Face storage"
)


def methods_of(torchs: Any) -> list[str]:
    return sorted(
        {
            method
            for base in torchs.__mro__
            for method in vars(base)
            if base.__module__.startswith("torch.")
            and not method.startswith(("__", "_abc", "_is_"))
            and method != "_synchronize_after_execute"  # a flag
        }
    )


REFUSED = {
    *("_get_metadata_path", "_metadata_exists", "_write_data", "_slice_file"),
    *("_process_read_request", "_read_files_from_queue"),
}


def save_and_load(name: str, kind: Any, directory: pathlib.Path) -> dict[str, Any]:
    """Use a writer or reader in all ways, with torch's own class for the other direction."""
    is_writer, of_hugging_face = "Writer" in name, "Hugging" in name
    prefix = "HuggingFaceStorage" if of_hugging_face else "FileSystem"
    writer = kind if is_writer else PAIRS[prefix + "Writer"][1]
    reader = PAIRS[prefix + "Reader"][1] if is_writer else kind
    state = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    made = writer(str(directory), {"a": 1, "b": 2}) if of_hugging_face else writer(directory)
    done(dcp.async_save(state, storage_writer=made, checkpoint_id=str(directory), no_dist=True))
    dcp.save(state, storage_writer=made, no_dist=True)
    found = empty_like(state)
    options = {"thread_count": 2} if of_hugging_face else {}
    made = reader(str(directory), **options)
    dcp.load(found, storage_reader=made, checkpoint_id=str(directory), no_dist=True)
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_methods_of_a_subclass_are_called_as_in_torchs_class_or_refused(
    directory: pathlib.Path, name: str
) -> None:
    ours, torchs = PAIRS[name]
    methods = methods_of(torchs)
    for refused in REFUSED.intersection(methods):
        with pytest.raises(TypeError, match=f"subclass {torchs.__module__}.{torchs.__name__}"):
            recording(ours, [refused])
    others = [method for method in methods if method not in REFUSED]
    mine, theirs = recording(ours, others), recording(torchs, others)
    wanted = save_and_load(name, theirs, directory / "torch")
    assert_same(save_and_load(name, mine, directory / "ours"), wanted)
    assert theirs.calls
    assert mine.calls >= theirs.calls


@pytest.mark.parametrize("name", PAIRS)
def test_what_only_torchs_code_uses_cannot_be_set(directory: pathlib.Path, name: str) -> None:
    class Other(filesystem.FileSystem):
        """A file system of a user's own."""

    ours, torchs = PAIRS[name]
    instance = ours(str(directory))
    instance.fs = filesystem.FileSystem()
    with pytest.raises(TypeError, match=f"changes fs, .* subclass {torchs.__module__}"):
        instance.fs = Other()
    if hasattr(instance, "transforms"):
        with pytest.raises(TypeError, match="changes transforms"):
            instance.transforms = object.__new__(type("Mine", (type(instance.transforms),), {}))


def test_arguments_that_only_torchs_classes_support_are_refused(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.8")
    form = filesystem.SerializationFormat.SAFETENSORS
    with pytest.raises(ValueError, match=r"^_extensions: only torch's own writer"):
        FileSystemWriter(directory, _extensions=[1])
    with pytest.raises(ValueError, match=r"^serialization_format: only torch's own writer"):
        FileSystemWriter(directory, serialization_format=form)
    with pytest.raises(ValueError, match=r"^_extension_registry: only torch's own reader"):
        FileSystemReader(directory, object())
    FileSystemWriter(
        directory, _extensions=None, serialization_format=filesystem.SerializationFormat.TORCH_SAVE
    )


def test_data_saved_through_extensions_are_refused(directory: pathlib.Path) -> None:
    extensions = pytest.importorskip("tests.checkpoint.extensions")
    theirs = filesystem.FileSystemWriter(directory, _extensions=[extensions.Inverting()])
    dcp.save({"a": torch.ones(3), "text": "x"}, storage_writer=theirs, no_dist=True)
    for name, value in (("a", torch.zeros(3)), ("text", "")):
        with pytest.raises(dcp.api.CheckpointException, match="only torch's own reader"):
            load_by(FileSystemReader(directory), {name: value})


def load_by(reader: Any, like: dict[str, Any]) -> dict[str, Any]:
    state = empty_like(like)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_places_that_a_subclass_gives_are_read(directory: pathlib.Path) -> None:
    """The subclass reads one tensor from the place of another."""
    save({"a": torch.zeros(4), "b": torch.ones(4)}, directory)

    class Mine(FileSystemReader):
        def set_up_storage_reader(self, metadata: Any, *arguments: Any, **options: Any) -> None:
            super().set_up_storage_reader(metadata, *arguments, **options)
            places = self.storage_data
            by_name = {index.fqn: index for index in places}
            self.storage_data = dict(places) | {by_name["a"]: places[by_name["b"]]}

    assert load_by(Mine(directory), {"a": torch.empty(4)})["a"].tolist() == [1.0] * 4


@of_hugging_face
def test_a_writer_of_hugging_faces_format_asks_a_subclass_what_goes_where(
    directory: pathlib.Path,
) -> None:
    class Mine(HuggingFaceStorageWriter):
        def _split_by_storage_plan(self, storage_plan: Any, items: Any) -> Any:
            assert storage_plan == {"a": 1, "b": 2}
            return {2: [item for item in items if item.index.fqn == "a"], 1: items[1:]}

    state = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    writer = Mine(directory, {"a": 1, "b": 2})
    dcp.save(state, storage_writer=writer, no_dist=True)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00002-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
    }


class OwnPath(type(pathlib.Path())):  # type: ignore[misc]
    """A user's class of paths, such as that of universal_pathlib."""


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
    dcp.save(state, storage_writer=writer, no_dist=True)  # as torch's, to the last save's folder
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
            # finish() calls this method, too; another save ends at this point.
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
    publication.sync_directory(pathlib.Path("/proc"))
