"""Planners and subclasses may customize a writer, as with torch's: their changes are saved, or refused by name."""

from __future__ import annotations

import contextlib
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
from tensorferry.checkpoint.storage import hooks
from tensorferry.transfer import publication
from tests.checkpoint.states import (
    assert_same,
    digests,
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


def recording(kind: Any, name: str) -> Any:
    """Return a subclass of a class that overrides one method, and records and forwards its calls."""
    original = inspect.getattr_static(kind, name)
    calls: list[str] = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return inner(*arguments, **options)

    if isinstance(original, property):
        inner: Any = original.fget
        own: Any = property(call)
    elif isinstance(original, classmethod):
        inner, own = original.__func__, classmethod(call)
    else:
        inner, own = original, call
    return type(f"Own{kind.__name__}", (kind,), {name: own, "calls": calls})


PAIRS: dict[str, tuple[Any, Any]] = {
    "FileSystemWriter": (FileSystemWriter, filesystem.FileSystemWriter),
    "FileSystemReader": (FileSystemReader, filesystem.FileSystemReader),
}
HOOKS = {
    "FileSystemWriter": {"_get_metadata_path", "_write_data"},
    "FileSystemReader": {"_get_metadata_path", "_slice_file"},
}
ATTRIBUTES = {
    "FileSystemWriter": {
        # Used by torch's code. Ours uses them as well, or falls back to torch's code where they are changed.
        *("fs", "transforms", "path", "rank", "use_collectives", "overwrite", "save_id"),
        *("sync_files", "single_file_per_rank", "thread_count", "per_thread_copy_ahead"),
        "serialization_format",
        # Of torch's own stager, which ours replaces.
        *("cache_staged_state_dict", "state_dict_cache", "type_check"),
    },
    "FileSystemReader": {
        *("fs", "transforms", "path", "rank", "use_collectives", "load_id", "storage_data"),
    },
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
    HOOKS |= {
        "HuggingFaceStorageWriter": {"_get_metadata_path", "_metadata_exists", "_write_data"},
        "HuggingFaceStorageReader": {
            *(
                "_get_metadata_path",
                "_process_read_request",
                "_read_files_from_queue",
                "_slice_file",
            ),
        },
    }
    ATTRIBUTES |= {
        "HuggingFaceStorageWriter": ATTRIBUTES["FileSystemWriter"]
        | {
            *("fqn_to_index_mapping", "save_distributed", "enable_consolidation"),
            *("consolidated_output_path", "thread_count_consolidation"),
        },
        "HuggingFaceStorageReader": ATTRIBUTES["FileSystemReader"] | {"thread_count"},
    }


@pytest.mark.parametrize("name", PAIRS)
def test_all_that_torchs_classes_have_is_known_here(name: str) -> None:
    """If a later torch has more methods, decide how overrides of them take effect; then add them to the table."""
    ours, torchs = PAIRS[name]
    also_called = frozenset({"_metadata_exists"} if name == "FileSystemWriter" else ())
    assert hooks.hooks_of(ours, torchs, also_called).keys() == HOOKS[name]
    assert vars(torchs("/somewhere")).keys() == ATTRIBUTES[name]


METHODS = [
    (name, method)
    for name, (_, torchs) in PAIRS.items()
    for method in sorted(hooks.names_of(torchs))
    if method != "_synchronize_after_execute"  # a flag
]


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


@pytest.mark.filterwarnings("ignore:Own.* changes")
@pytest.mark.parametrize(("name", "method"), METHODS, ids=str)
def test_methods_of_a_subclass_are_called_wherever_torchs_class_calls_them(
    directory: pathlib.Path, name: str, method: str
) -> None:
    ours, torchs = (recording(kind, method) for kind in PAIRS[name])
    wanted = save_and_load(name, torchs, directory / "torch")
    assert_same(save_and_load(name, ours, directory / "ours"), wanted)
    assert set(ours.calls) >= set(torchs.calls)


class OtherFileSystem(filesystem.FileSystem):
    """A user's file system, which stores a different byte for each byte of a file."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Any:
        if "w" not in mode:
            yield io.BytesIO(bytes(byte ^ 255 for byte in path.read_bytes()))
            return

        class Stream(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    path.write_bytes(bytes(byte ^ 255 for byte in self.getvalue()))
                super().close()

        with Stream() as stream:
            yield stream


def with_file_system(kind: Any) -> Any:
    class Mine(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.fs = OtherFileSystem()

    return Mine


@pytest.mark.filterwarnings("ignore:os.fsync")
def test_a_file_system_of_ones_own_is_used(directory: pathlib.Path) -> None:
    writer, reader = with_file_system(FileSystemWriter), with_file_system(FileSystemReader)
    torchs_reader = with_file_system(filesystem.FileSystemReader)
    state = {"a": torch.arange(1000.0), "text": "x" * 1000}
    with pytest.warns(RuntimeWarning, match="Mine changes fs, which only torch's own code uses"):
        dcp.save(state, storage_writer=writer(directory / "one", sync_files=False), no_dist=True)
    assert files_of(directory / "one") == {"__0_0.distcp", ".metadata"}
    found = {"a": torch.zeros(1000), "text": ""}
    with pytest.warns(RuntimeWarning, match="nothing is verified"):
        dcp.load(found, storage_reader=reader(directory / "one"), no_dist=True)
    assert_same(found, state)
    assert_same(load_by(torchs_reader(directory / "one"), state), state)
    assert_same(load_by(reader(directory / "one", verify="off"), state), state)
    with pytest.raises(dcp.api.CheckpointException, match="verify: 'before' is not possible"):
        load_by(reader(directory / "one", verify="before"), state)


def load_by(reader: Any, like: dict[str, Any]) -> dict[str, Any]:
    state = empty_like(like)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.skipif(
    "HuggingFaceStorageWriter" not in PAIRS, reason="this torch has no Hugging Face storage"
)
@pytest.mark.filterwarnings("ignore:Mine changes")
@pytest.mark.parametrize("save_distributed", [False, True])
def test_a_file_system_of_ones_own_is_used_for_hugging_faces_format(
    directory: pathlib.Path, save_distributed: bool
) -> None:
    class Listing(filesystem.FileSystem):
        def ls(self, path: Any) -> list[str]:
            return [each for each in super().ls(path) if "hidden" not in each]

        def concat_path(self, path: Any, suffix: str) -> Any:
            return super().concat_path(path, suffix.replace("model-", "other-"))

    def with_listing(kind: Any) -> Any:
        class Mine(kind):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                self.fs = Listing()

        return Mine

    state, names = {"a": torch.arange(1000.0)}, {}
    for number in range(2):
        writer = with_listing(PAIRS["HuggingFaceStorageWriter"][number])
        reader = with_listing(PAIRS["HuggingFaceStorageReader"][number])
        place = directory / str(number)
        options = {"save_distributed": save_distributed}
        dcp.save(state, storage_writer=writer(str(place), **options), no_dist=True)
        names[number] = files_of(place)
        (place / "hidden.safetensors").write_bytes(b"not a file of safetensors")
        assert_same(load_by(reader(str(place)), state), state)
    assert names[0] == names[1]


def with_urls(kind: Any, directory: pathlib.Path) -> Any:
    """Return a class that is built as torch's fsspec classes: it can map its paths only after our constructor."""

    class Mapped(filesystem.FileSystem):
        def init_path(self, path: Any) -> Any:
            return directory / str(path).removeprefix("mine://")

    class Mine(kind):  # type: ignore[misc]
        def __init__(self, path: str, **options: Any) -> None:
            super().__init__(path, **options)
            self.fs = Mapped()
            self.path = self.fs.init_path(path)

    return Mine


@pytest.mark.filterwarnings("ignore:Mine changes", "ignore:os.fsync")
@pytest.mark.parametrize("format_name", ["FileSystem", "HuggingFaceStorage"])
def test_urls_are_what_a_file_system_of_ones_own_says(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, format_name: str
) -> None:
    monkeypatch.chdir(directory)
    if f"{format_name}Writer" not in PAIRS:
        pytest.skip("this torch has no Hugging Face storage")
    kinds = PAIRS[f"{format_name}Writer"][0], PAIRS[f"{format_name}Reader"][0]
    writer, reader = (with_urls(kind, directory) for kind in kinds)
    state = {"a": torch.arange(1000.0)}
    saving = writer("mine://one")
    dcp.save(state, storage_writer=saving, no_dist=True)
    dcp.save(state, storage_writer=saving, checkpoint_id="mine://two", no_dist=True)
    loading = reader("mine://two")
    assert_same(load_by(loading, state), state)
    found = empty_like(state)
    dcp.load(found, storage_reader=loading, checkpoint_id="mine://one", no_dist=True)
    assert_same(found, state)
    assert files_of(directory) == {"one", "two"}

    class Plain(kinds[0]):  # type: ignore[misc, valid-type]
        pass

    class PlainReader(kinds[1]):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(dcp.api.CheckpointException, match="got the URL"):
        dcp.save(state, storage_writer=Plain("mine://three"), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="got the URL"):
        load_by(PlainReader("mine://one"), state)
    assert files_of(directory) == {"one", "two"}


@pytest.mark.filterwarnings("ignore:Mine changes")
def test_slices_of_files_are_a_subclasss_own(directory: pathlib.Path) -> None:
    """A subclass that decodes the bytes that it reads: the decoded numbers are loaded, not those of the file."""
    state = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    save({key: -value for key, value in state.items()}, directory)

    def mine(kind: Any) -> Any:
        class Mine(kind):  # type: ignore[misc]
            def _slice_file(self, file: Any, sinfo: Any) -> Any:
                stored = torch.load(super()._slice_file(file, sinfo))
                torch.save(-stored, stream := io.BytesIO())
                stream.seek(0)
                return stream

        return Mine

    for kind in (filesystem.FileSystemReader, FileSystemReader):
        assert_same(load_by(mine(kind)(directory), state), state)
    reader: Any = FileSystemReader(directory)
    reader._slice_file = lambda file, info: mine(FileSystemReader)._slice_file(reader, file, info)
    assert hooks.overridden(reader, hooks.hooks_of(*PAIRS["FileSystemReader"])) == {"_slice_file"}


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


@pytest.mark.filterwarnings("ignore:Mine changes")
def test_transforms_of_ones_own_are_used(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.7")
    written = []

    class Watching(filesystem._StorageWriterTransforms):
        def transform_save_stream(self, write_item: Any, raw_stream: Any) -> Any:
            written.append(write_item.index.fqn)
            return super().transform_save_stream(write_item, raw_stream)

    class Reading(filesystem._StorageReaderTransforms):
        def transform_load_stream(self, read_item: Any, *arguments: Any) -> Any:
            written.remove(read_item.dest_index.fqn)
            return super().transform_load_stream(read_item, *arguments)

    state = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    writer = FileSystemWriter(directory)
    writer.transforms = Watching()
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert sorted(written) == ["a", "b"]
    assert verify(directory).sound
    reader = FileSystemReader(directory, verify="off")
    reader.transforms = Reading()
    assert_same(load_by(reader, state), state)
    assert not written


def test_metadata_elsewhere_is_a_subclasss_own(directory: pathlib.Path) -> None:
    def mine(kind: Any) -> Any:
        class Mine(kind):  # type: ignore[misc]
            def _get_metadata_path(self, rank: int | None = None) -> Any:
                return pathlib.Path(self.path) / f"index {rank}"

        return Mine

    state = {"a": torch.arange(1000.0)}
    with pytest.warns(RuntimeWarning, match="changes _get_metadata_path"):
        dcp.save(state, storage_writer=mine(FileSystemWriter)(directory), no_dist=True)
    assert "index None" in files_of(directory)
    for kind in (filesystem.FileSystemReader, FileSystemReader):
        options = {"verify": "off"} if kind is FileSystemReader else {}
        assert_same(load_by(mine(kind)(directory, **options), state), state)


@pytest.mark.filterwarnings("ignore:Mine changes")
def test_what_torchs_code_gives_a_planner_runs_no_code(directory: pathlib.Path) -> None:
    dcp.save({"a": Opened()}, storage_writer=filesystem.FileSystemWriter(directory), no_dist=True)

    class Mine(FileSystemReader):
        def _slice_file(self, file: Any, sinfo: Any) -> Any:
            return super()._slice_file(file, sinfo)

    Opened.count = 0
    with pytest.raises(dcp.api.CheckpointException, match="trust_pickle=True"):
        load_by(Mine(directory), {"a": 0})
    assert Opened.count == 0


class Opened:
    """Counts how often it is read."""

    count = 0

    def __setstate__(self, _state: Any) -> None:
        Opened.count += 1

    def __getstate__(self) -> Any:
        return {"a": 1}


@pytest.mark.skipif(
    "HuggingFaceStorageReader" not in PAIRS, reason="this torch has no Hugging Face storage"
)
@pytest.mark.parametrize("thread_count", [1, 2])
def test_a_reader_that_dequantizes_has_its_numbers_loaded(
    directory: pathlib.Path, thread_count: int
) -> None:
    from tensorferry.safetensors.torch import save_file

    def mine(kind: Any) -> Any:
        class Mine(kind):  # type: ignore[misc]
            def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
                found = f.get_tensor(req.storage_index.fqn) * f.get_tensor("scale")
                target = planner.resolve_tensor(req)
                planner.commit_tensor(req, target.copy_(found))

        return Mine

    scale = torch.tensor([3.0])
    save_file({"a": torch.ones(4), "scale": scale}, directory / "1.safetensors")
    for kind in PAIRS["HuggingFaceStorageReader"]:
        found = load_by(mine(kind)(str(directory), thread_count), {"a": torch.zeros(4)})
        assert found["a"].tolist() == [3.0] * 4, kind


@pytest.mark.skipif(
    "HuggingFaceStorageWriter" not in PAIRS, reason="this torch has no Hugging Face storage"
)
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
