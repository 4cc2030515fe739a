"""torch's Hugging Face storage on our engine: torch and safetensors read our files, and ours reads theirs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import safetensors
from tensorferry.checkpoint import CheckpointError, FileSystemReader, FileSystemWriter
from tensorferry.checkpoint.storage.default import install, uninstall
from tensorferry.safetensors import safe_open
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.sharded import INDEX_NAME, save_sharded
from tensorferry.safetensors.torch import save_file
from tests.checkpoint.shards import distributed, whole
from tests.checkpoint.states import assert_same, done, empty_like
from tests.support import child
from tests.support.ranks import call_on_ranks, files_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.power_cuts import Cut

hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
huggingface = pytest.importorskip("tensorferry.checkpoint.storage.huggingface")
Writer, Reader = huggingface.HuggingFaceStorageWriter, huggingface.HuggingFaceStorageReader
TorchsWriter, TorchsReader = (
    hf_storage.HuggingFaceStorageWriter,
    hf_storage.HuggingFaceStorageReader,
)


MIB = 1 << 20


MAPPING = {"rows": 1, "columns": 2, "few": 2, "same": 1, "large": 3, "deep": 3}


def load(reader: Any) -> dict[str, torch.Tensor]:
    found = empty_like(whole())
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def contents(path: pathlib.Path) -> tuple[Any, dict[str, str], bytes]:
    """A file's header without metadata, these, and its data: metadata are written in any order."""
    data = path.read_bytes()
    nbytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + nbytes])
    return header, header.pop("__metadata__"), data[8 + nbytes :]


@pytest.mark.parametrize("mapping", [None, MAPPING], ids=["one file", "three files"])
def test_rank_0_writes_torchs_files(directory: pathlib.Path, mapping: Any) -> None:
    for name, kind in (("ours", Writer), ("theirs", TorchsWriter)):
        writer = kind(str(directory / name), fqn_to_index_mapping=mapping)
        dcp.save(whole(), storage_writer=writer, no_dist=True)
    ours, theirs = directory / "ours", directory / "theirs"
    assert files_of(ours) == files_of(theirs)
    assert (ours / INDEX_NAME).read_bytes() == (theirs / INDEX_NAME).read_bytes()
    for file in ours.glob("*.safetensors"):
        assert contents(file) == contents(theirs / file.name)
    for reader in (Reader, TorchsReader):
        for path in (ours, theirs):
            assert_same(load(reader(str(path))), whole())


def test_a_save_takes_the_place_of_the_one_before(directory: pathlib.Path) -> None:
    writer = Writer(directory, fqn_to_index_mapping=MAPPING)
    for seed in range(3):
        dcp.save(whole(seed), storage_writer=writer, no_dist=True)
        assert writer.last_save is not None
        assert writer.last_save.nbytes == sum(t.nbytes for t in whole().values())
    dcp.save(whole(3), storage_writer=Writer(directory), no_dist=True)
    # It replaces no file, not even one of the same number.
    [name] = files_of(directory) - {INDEX_NAME}
    assert re.fullmatch(r"model-tf[0-9a-f]{16}-00001-of-00001\.safetensors", name)
    assert_same(load(Reader(directory)), whole(3))


def test_progress_ends_with_all_files(directory: pathlib.Path) -> None:
    told: list[Any] = []
    writer = Writer(directory, fqn_to_index_mapping=MAPPING, progress=told.append)
    dcp.save(whole(), storage_writer=writer, no_dist=True)
    assert told[-1].nbytes == told[-1].total_nbytes == sum(t.nbytes for t in whole().values())
    assert told[-1].files == told[-1].total_files == len({*MAPPING.values()})


@pytest.mark.parametrize("kind", [Reader, TorchsReader])
def test_huggingfaces_own_models_are_loaded(directory: pathlib.Path, kind: Any) -> None:
    save_sharded(whole(), directory, "1MB")
    assert_same(load(kind(str(directory))), whole())


def test_tensors_are_converted_to_the_destinations_dtype(directory: pathlib.Path) -> None:
    save_sharded(whole(), directory)
    for kind in (Reader, TorchsReader):
        found = {"rows": torch.zeros(37, 50, dtype=torch.float64), "deep": torch.zeros(8, 6, 4)}
        dcp.load(found, storage_reader=kind(str(directory)), no_dist=True)
        assert torch.equal(found["rows"], whole()["rows"].double())
        assert torch.equal(found["deep"], whole()["deep"].float())


def test_only_what_is_wanted_is_read(directory: pathlib.Path) -> None:
    save_sharded(whole(), directory)
    reader = Reader(directory)
    dcp.load({"deep": torch.zeros(8, 6, 4)}, storage_reader=reader, no_dist=True)
    assert reader.nbytes_read == 8 * 6 * 4 * 2
    assert reader.last_load.nbytes == reader.nbytes_read


def test_objects_are_refused(directory: pathlib.Path) -> None:
    dcp.save(whole(), storage_writer=Writer(directory), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match=r"'step'.*holds only tensors"):
        dcp.save({"rows": torch.ones(3), "step": 5}, storage_writer=Writer(directory), no_dist=True)
    assert_same(load(Reader(directory)), whole())


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Planners keep plans for all writers of a process."""
    yield
    for name, kept in vars(dcp.planner.SavePlanner).items():
        if name.startswith("_cached"):
            kept.clear()


KINDS: dict[str, Any] = {
    "DCP": FileSystemWriter,
    "plain": Writer,
    "mapped": lambda path: Writer(path, fqn_to_index_mapping=MAPPING),
    "distributed": lambda path: Writer(path, save_distributed=True),
    "consolidated": lambda path: Writer(
        path, save_distributed=True, enable_consolidation=True, fqn_to_index_mapping=MAPPING
    ),
}


@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(KINDS, 2)])
def test_a_plan_that_a_planner_has_kept_for_another_writer_changes_nothing(
    directory: pathlib.Path, first: str, second: str
) -> None:
    pytest.importorskip("torch", minversion="2.7")
    for turn, name in enumerate((first, second, first)):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        path = directory / f"{turn}"
        dcp.save(whole(turn), storage_writer=KINDS[name](path), planner=planner, no_dist=True)
        reader = FileSystemReader(path) if name == "DCP" else Reader(path)
        assert_same(load(reader), whole(turn))
        dcp.save(whole(turn), storage_writer=KINDS[name](directory / "exclusive"), no_dist=True)
        names = {_without_ids(each) for each in files_of(path)}
        assert names == {_without_ids(each) for each in files_of(directory / "exclusive")}
        shutil.rmtree(directory / "exclusive")


def _without_ids(name: str) -> str:
    return re.sub("_[0-9a-f]{16}_", "_", name)


@pytest.mark.usefixtures("no_plans")
def test_objects_of_a_plan_that_was_kept_are_refused_before_anything_is_written(
    directory: pathlib.Path,
) -> None:
    pytest.importorskip("torch", minversion="2.7")
    state = {"rows": torch.ones(3), "step": 5}

    def save(writer: Any) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)

    save(FileSystemWriter(directory / "dcp"))
    with pytest.raises(dcp.api.CheckpointException, match=r"'step'.*holds only tensors"):
        save(Writer(directory / "hf"))
    assert not files_of(directory / "hf")


class Losing(Writer):  # type: ignore[misc]
    """A writer that removes a written file."""

    def finish(self, metadata: Any, results: Any) -> None:
        for path in pathlib.Path(self.path).glob("*.safetensors"):
            path.unlink()
        super().finish(metadata, results)


class Forgetting(Writer):  # type: ignore[misc]
    """Leaves an item out."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        return super().write_data(dataclasses.replace(plan, items=plan.items[1:]), planner)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (Losing, {"save_distributed": True}, "file of this save is missing"),
        (Forgetting, {"save_distributed": True}, "have not been written"),
        (Forgetting, {}, "have not been written"),
    ],
)
def test_a_save_of_which_something_is_missing_fails(
    directory: pathlib.Path, kind: Any, options: dict[str, Any], match: str
) -> None:
    writer = kind(directory, **options)
    with pytest.raises(dcp.api.CheckpointException, match=match):
        dcp.save(whole(), storage_writer=writer, no_dist=True)
    assert INDEX_NAME not in files_of(directory)
    open_files = [os.path.realpath(each) for each in pathlib.Path("/proc/self/fd").iterdir()]
    assert not [path for path in open_files if path.startswith(str(directory))]


def save_two_parts_by_a_plan_that_was_kept(rank: int, directory: str) -> str:
    def save(writer: Any) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(distributed(0), storage_writer=writer, planner=planner)

    save(FileSystemWriter(f"{directory}/parts"))
    try:
        save(Writer(f"{directory}/plain"))
    except dcp.api.CheckpointException as failure:
        return str(failure)
    return "saved"


def test_ranks_that_write_files_of_one_name_by_plans_that_were_kept_fail(
    directory: pathlib.Path,
) -> None:
    pytest.importorskip("torch", minversion="2.7")
    for answer in call_on_ranks(2, save_two_parts_by_a_plan_that_was_kept, str(directory)):
        assert "several ranks" in answer


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "mapping.*'b'|'b'.*mapping"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_files(
    directory: pathlib.Path, state: Any, match: str
) -> None:
    dcp.save(whole(), storage_writer=Writer(directory), no_dist=True)
    files = files_of(directory)
    writer = Writer(directory, fqn_to_index_mapping={"a": 1})
    with pytest.raises(dcp.api.CheckpointException, match=match):
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert files_of(directory) == files
    assert_same(load(Reader(directory)), whole())


def save_shards(rank: int, directory: str, kinds: str, seed: int, options: dict[str, Any]) -> None:
    for name in kinds.split():
        kind = Writer if name == "ours" else TorchsWriter
        writer = kind(f"{directory}/{name}", save_distributed=True, **options)
        dcp.save(distributed(seed), storage_writer=writer)


@pytest.mark.parametrize(("world_size", "mapping"), [(1, None), (3, MAPPING)])
def test_shards_of_all_ranks_are_torchs(
    directory: pathlib.Path, world_size: int, mapping: Any
) -> None:
    options = {"fqn_to_index_mapping": mapping}
    call_on_ranks(world_size, save_shards, str(directory), "ours theirs", 0, options)
    ours, theirs = directory / "ours", directory / "theirs"
    assert files_of(ours) == files_of(theirs)
    saves = set()
    for file in ours.iterdir():
        header, metadata, data = contents(file)
        saves.add(metadata.pop("tensorferry_save"))
        assert (header, metadata, data) == contents(theirs / file.name)
    assert len(saves) == 1
    for reader in (Reader, TorchsReader):
        for path in (ours, theirs):
            assert_same(load(reader(str(path))), whole())


def test_consolidated_files_are_those_of_the_whole(directory: pathlib.Path) -> None:
    options = {"fqn_to_index_mapping": MAPPING, "enable_consolidation": True}
    call_on_ranks(3, save_shards, str(directory), "ours theirs", 0, options)
    ours, theirs = directory / "ours", directory / "theirs"
    assert files_of(ours) == files_of(theirs)
    assert json.loads((ours / INDEX_NAME).read_text()) == json.loads(
        (theirs / INDEX_NAME).read_text()
    )
    found: dict[str, torch.Tensor] = {}
    for file in ours.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # as transformers demands
        expected = safetensors.torch.load_file(theirs / file.name)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
        found |= tensors
    assert_same(found, whole())
    call_on_ranks(2, save_shards, str(directory), "ours", 1, options)
    assert_same(load(Reader(ours)), whole(1))
    assert len(files_of(ours / "sharded")) == 2 * len(set(MAPPING.values()))


def test_shards_of_ranks_that_are_no_more_go(directory: pathlib.Path) -> None:
    call_on_ranks(3, save_shards, str(directory), "ours", 0, {})
    (directory / "ours" / "notes.txt").write_text("mine")
    call_on_ranks(2, save_shards, str(directory), "ours", 1, {})
    assert_same(load(Reader(directory / "ours")), whole(1))
    assert "notes.txt" in files_of(directory / "ours")


@pytest.mark.parametrize("cut", ["ext4"], indirect=True)
def test_shards_of_ranks_that_are_no_more_do_not_come_back_after_a_power_cut(cut: Cut) -> None:
    call_on_ranks(3, save_shards, str(cut.path), "ours", 0, {})
    call_on_ranks(2, save_shards, str(cut.path), "ours", 1, {})
    with cut.now() as after:
        assert_same(load(Reader(after / "ours")), whole(1))


def test_ranks_files_of_two_saves_are_no_checkpoint(directory: pathlib.Path) -> None:
    # The state after a kill of all ranks, when one rank has renamed its file and the other has not.
    call_on_ranks(2, save_shards, str(directory), "ours", 0, {})
    old = directory / "ours" / "shard-00002-model-00001-of-00001.safetensors"
    kept = old.read_bytes()
    call_on_ranks(2, save_shards, str(directory), "ours", 1, {})
    assert_same(load(Reader(directory / "ours")), whole(1))
    old.write_bytes(kept)
    with pytest.raises(SafetensorError, match="belongs to another save"):
        Reader(directory / "ours").read_metadata()


def save_on_rank_1(rank: int, directory: str) -> None:
    for value in (1.0, 2.0):
        state = {"a": torch.full((3,), value)} if rank == 1 else {}
        dcp.save(state, storage_writer=Writer(directory))


def test_what_another_rank_has_put_in_its_place_stays(directory: pathlib.Path) -> None:
    call_on_ranks(2, save_on_rank_1, str(directory))
    found = {"a": torch.zeros(3)}
    dcp.load(found, storage_reader=Reader(directory), no_dist=True)
    assert torch.equal(found["a"], torch.full((3,), 2.0))


def test_the_index_decides_on_what_is_in_several_files(directory: pathlib.Path) -> None:
    # The state after a kill of a save that has not yet removed the old files.
    first, last = (f"model-0000{k}-of-00003.safetensors" for k in (1, 3))
    new = "model-00001-of-00001.safetensors"
    for name, state in (
        (first, {"a": torch.ones(2, 2), "b": torch.ones(5)}),
        (new, {"a": torch.full((3,), 2.0), "b": torch.full((5,), 2.0)}),
        (last, {"a": torch.ones(3), "b": torch.ones(9), "c": torch.ones(1)}),
    ):
        safetensors.torch.save_file(state, directory / name)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": new, "b": new}}))
    found = {"a": torch.zeros(3), "b": torch.zeros(5)}
    dcp.load(found, storage_reader=Reader(directory), no_dist=True)
    assert [float(tensor.unique()) for tensor in found.values()] == [2, 2]
    assert Reader(directory).read_metadata().state_dict_metadata.keys() == {"a", "b"}


def test_integers_are_consolidated_too(directory: pathlib.Path) -> None:
    # torch's consolidation raises TypeError: finfo() of an integer.
    state = {"steps": torch.arange(10), "flag": torch.tensor(True), "none": torch.zeros(0, 3)}
    writer = Writer(directory, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = safetensors.torch.load_file(directory / "model-00001-of-00001.safetensors")
    assert all(torch.equal(found[name], state[name]) for name in state)


def save_full_on_each_rank(rank: int, directory: str) -> str:
    try:
        state = {f"of rank {rank}": torch.ones(3)}
        dcp.save(state, storage_writer=Writer(directory))
    except dcp.api.CheckpointException as error:
        return str(error)
    return ""


def test_ranks_whose_files_would_have_one_name_are_refused(directory: pathlib.Path) -> None:
    for message in call_on_ranks(2, save_full_on_each_rank, str(directory)):
        assert "save_distributed=True" in message


def part_of(directory: pathlib.Path, name: str, parts: Any, **tensors: torch.Tensor) -> None:
    metadata = {"DCP_SHARDING_INFO": parts if isinstance(parts, str) else json.dumps(parts)}
    safetensors.torch.save_file(tensors, directory / name, metadata)


@pytest.mark.parametrize(
    "parts",
    ["{", "[]", {}, {"a": 1}, {"a": {"saved_offsets": 1}}, {"a": {"saved_offsets": [0, 0]}},
     {"a": {"saved_offsets": [-1]}}, {"a": {"saved_offsets": [1 << 63]}}, {"a": {"saved_offsets": [True]}}],
    ids=str,
)  # fmt: skip
def test_headers_that_say_nonsense_of_parts_are_refused(
    directory: pathlib.Path, parts: Any
) -> None:
    part_of(directory, "x.safetensors", parts, a=torch.ones(3))
    with pytest.raises(SafetensorError, match="DCP_SHARDING_INFO"):
        Reader(directory).read_metadata()


def test_parts_that_do_not_go_together_are_refused(directory: pathlib.Path) -> None:
    part_of(directory, "x.safetensors", {"a": {"saved_offsets": [0]}}, a=torch.ones(3))
    part_of(directory, "y.safetensors", {"a": {"saved_offsets": [3]}}, a=torch.ones(3).half())
    with pytest.raises(SafetensorError, match=r"'a'.*float16"):
        Reader(directory).read_metadata()


def test_a_missing_part_fails_the_consolidation(directory: pathlib.Path) -> None:
    part_of(directory, "x.safetensors", {"a": {"saved_offsets": [0]}}, a=torch.ones(3))
    part_of(directory, "y.safetensors", {"a": {"saved_offsets": [5]}}, a=torch.ones(3))
    from tensorferry.checkpoint.tools.convert import convert

    paths = sorted(directory.glob("*.safetensors"))
    for read in (Reader(directory).read_metadata, lambda: convert(directory, directory / "whole")):
        with pytest.raises(SafetensorError, match=r"'a'.*parts of it are missing"):
            read()
    with pytest.raises(SafetensorError, match="parts of it are missing"):
        huggingface.consolidate(paths, directory / "whole", {"a": 1})
    part_of(directory, "y.safetensors", {"a": {"saved_offsets": [3]}}, a=torch.ones(3))
    with pytest.raises(
        CheckpointError, match="saved tensors are not those of fqn_to_index_mapping"
    ):
        huggingface.consolidate(paths, directory / "whole", {"a": 1, "b": 1})
    assert not (directory / "whole").exists()


def test_a_file_that_was_replaced_meanwhile_is_not_read(directory: pathlib.Path) -> None:
    save_sharded(whole(), directory)
    reader = Reader(directory)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(empty_like(whole()), metadata, is_coordinator=True)  # type: ignore[arg-type]
    plan = planner.create_local_plan()
    save_sharded(whole(1), directory)
    with pytest.raises(CheckpointError, match="load again"):
        reader.read_data(plan, planner)


def test_damaged_and_missing_files_are_named(directory: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        Reader(directory).read_metadata()
    save_sharded(whole(), directory)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SafetensorError, match="cut short"):
        Reader(directory).read_metadata()


def test_a_killed_save_is_read_by_what_the_index_names(directory: pathlib.Path) -> None:
    # The state after a kill while new files got their names.
    old = "model-00001-of-00002.safetensors"
    new = "model-tf0123456789abcdef-00001-of-00002.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, directory / old)
    safetensors.torch.save_file({"a": torch.zeros(3)}, directory / new)
    found = {"a": torch.full((3,), 2.0)}
    with pytest.raises(SafetensorError, match=r"no index, and of the 2 files .* number 2"):
        Reader(directory).read_metadata()
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": old}}))
    dcp.load(found, storage_reader=Reader(directory), no_dist=True)
    assert torch.equal(found["a"], torch.ones(3))


def test_torchs_names_lead_to_ours_once_installed(directory: pathlib.Path) -> None:
    install()
    try:
        assert dcp.HuggingFaceStorageWriter is Writer  # type: ignore[comparison-overlap]
        assert hf_storage.HuggingFaceStorageReader is Reader
        dcp.save(whole(), storage_writer=dcp.HuggingFaceStorageWriter(str(directory)), no_dist=True)
        assert_same(load(dcp.HuggingFaceStorageReader(str(directory))), whole())
    finally:
        uninstall()
    assert dcp.HuggingFaceStorageWriter is TorchsWriter
    assert hf_storage.HuggingFaceStorageReader is TorchsReader


@pytest.mark.parametrize("files", [1, 2])
def test_metadata_that_torchs_reader_has_read_loads(directory: pathlib.Path, files: int) -> None:
    dcp.save(
        whole(), storage_writer=Writer(directory, None if files == 1 else MAPPING), no_dist=True
    )

    class Mine(Reader):  # type: ignore[misc, valid-type]
        def read_metadata(self) -> Any:
            return TorchsReader(str(directory)).read_metadata()

    assert_same(load(Mine(directory)), whole())


def test_parts_of_ranks_load_by_torchs_metadata(directory: pathlib.Path) -> None:
    for name, offset in (("1", 0), ("2", 2)):
        part = torch.arange(2.0) + offset
        part_of(directory, f"{name}.safetensors", {"a": {"saved_offsets": [offset]}}, a=part)
    metadata = TorchsReader(str(directory)).read_metadata()
    state = {"a": torch.zeros(4)}

    class Mine(Reader):  # type: ignore[misc, valid-type]
        def read_metadata(self) -> Any:
            return metadata

    dcp.load(state, storage_reader=Mine(directory), no_dist=True)
    assert state["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    part_of(directory, "2.safetensors", {"a": {"saved_offsets": [2]}}, a=torch.arange(3.0))
    with pytest.raises(dcp.api.CheckpointException, match=r"in the file, but .* in the metadata"):
        dcp.load(state, storage_reader=Mine(directory), no_dist=True)


def test_asynchronous_saves_work(directory: pathlib.Path) -> None:
    writer = Writer(directory, MAPPING)
    state = whole()
    done(dcp.async_save(state, storage_writer=writer, no_dist=True))
    assert_same(load(Reader(directory)), whole())


class Interrupting(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Calls a function before the first tensor is written."""

    interruption: Any = None

    def resolve_data(self, write_item: Any) -> Any:
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            interruption()
        return super().resolve_data(write_item)


@pytest.mark.parametrize("consolidates", [False, True])
def test_overlapping_saves_of_one_writer_keep_their_directories(
    directory: pathlib.Path, consolidates: bool
) -> None:
    writer = Writer(directory, save_distributed=True, enable_consolidation=consolidates)

    def save(name: str, value: float, planner: Any = None) -> None:
        place: Any = directory / name
        state = {"x": torch.full((4,), value)}
        dcp.save(state, checkpoint_id=place, storage_writer=writer, planner=planner, no_dist=True)

    def save_another() -> None:
        thread = threading.Thread(target=save, args=("b", 2.0))
        thread.start()
        thread.join()

    planner = Interrupting()
    planner.interruption = save_another
    save("a", 1.0, planner)
    for name, value in (("a", 1.0), ("b", 2.0)):
        found = {"x": torch.zeros(4)}
        dcp.load(found, storage_reader=Reader(directory / name), no_dist=True)
        assert found["x"].tolist() == [value] * 4


def peak_of_consolidation(path: str, nbytes: int) -> int:
    """Put two halves of a tensor together, and return how much memory that took at most."""
    import ctypes

    from tensorferry.tuning.stopwatch import Stopwatch

    # Make the C library unmap freed memory at once (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    peak = None
    for size in (64, nbytes // 2):  # the first call makes objects that do not count
        folder = pathlib.Path(path, str(size))
        folder.mkdir()
        tensor = torch.ones(size, dtype=torch.uint8)
        for k in range(2):
            part_of(folder, f"{k}.safetensors", {"a": {"saved_offsets": [k * size]}}, a=tensor)
        del tensor
        with Stopwatch() as watch:
            huggingface.consolidate(sorted(folder.iterdir()), folder / "whole", {"a": 1})
        peak = watch.peak_growth_nbytes
    assert peak is not None
    return peak


def test_consolidation_takes_bounded_memory(directory: pathlib.Path) -> None:
    function = "tests.checkpoint.test_huggingface:peak_of_consolidation"
    ended = child.call(
        function, path=directory, nbytes=400 * MIB, imports=["torch.distributed.checkpoint"]
    )
    assert ended.result <= 160 * MIB  # of 400


def test_a_pair_of_four_bits_without_a_dimension_is_refused_by_both_ways_of_saving(
    directory: pathlib.Path,
) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no such dtype")
    pair = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for saves in (
        lambda state: save_file(state, directory / "one.safetensors"),
        lambda state: dcp.save(
            state,
            storage_writer=huggingface.HuggingFaceStorageWriter(directory / "it"),
            no_dist=True,
        ),
    ):
        saves({"a": pair})
        with pytest.raises(
            (SafetensorError, dcp.api.CheckpointException),
            match="a tensor of F4 must have at least one dim",
        ):
            saves({"a": pair.reshape(())})
    for path in (directory / "one.safetensors", directory / "it/model-00001-of-00001.safetensors"):
        assert safe_open(path, "pt").get_tensor_meta("a").shape == [2]
