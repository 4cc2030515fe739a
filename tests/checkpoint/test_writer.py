"""FileSystemWriter in one process: torch's file format and options, and no files left by failures."""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItemType

from tensorferry.checkpoint import FileSystemWriter
from tensorferry.checkpoint.storage import commit
from tensorferry.checkpoint.storage.metadata import CHUNK_NBYTES
from tensorferry.checkpoint.zipformat import archive
from tests.checkpoint.damage import flip
from tests.checkpoint.loads import fails
from tests.checkpoint.states import (
    LAYOUTS,
    assert_same,
    digests,
    load,
    metadata_of,
    mixed_state,
    save,
)
from tests.support import child
from tests.support.ranks import files_of

if TYPE_CHECKING:
    import pathlib

    from tensorferry.checkpoint.progress import Progress


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_data_files_are_torchs_byte_for_byte(
    directory: pathlib.Path, layout: dict[str, Any]
) -> None:
    state = mixed_state()
    theirs = dcp.FileSystemWriter(directory / "torch", **layout)
    dcp.save(state, storage_writer=theirs, no_dist=True)
    save(state, directory / "ours", **layout)
    assert digests(directory / "ours") == digests(directory / "torch")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_torchs_reader_loads_what_was_saved(
    directory: pathlib.Path, layout: dict[str, Any]
) -> None:
    state = mixed_state()
    save(state, directory / "checkpoint", **layout)
    assert_same(load(directory / "checkpoint", state), state)


def test_torch_without_a_way_to_leave_payloads_out_writes_the_same(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(mixed_state(), directory / "with")
    monkeypatch.delattr(torch.serialization, "skip_data")  # torch 2.4
    archive._tensor_archive.cache_clear()
    save(mixed_state(), directory / "without")
    monkeypatch.undo()
    assert digests(directory / "without") == digests(directory / "with")


def test_many_small_tensors_and_one_larger_than_all_buffers(directory: pathlib.Path) -> None:
    state = {str(k): torch.full((k % 50,), k) for k in range(2000)}
    state["large"] = torch.arange(12 << 20)
    save(state, directory / "checkpoint")
    assert_same(load(directory / "checkpoint", state), state)


def test_saving_again_replaces_the_files_of_before(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    save(mixed_state(1), checkpoint, thread_count=4)
    before = files_of(checkpoint)
    save(mixed_state(2), checkpoint)
    assert_same(load(checkpoint, mixed_state(2)), mixed_state(2))
    assert len(files_of(checkpoint)) == 2
    assert files_of(checkpoint) & before == {".metadata"}


def test_saving_over_torchs_checkpoint_replaces_it(directory: pathlib.Path) -> None:
    writer = dcp.FileSystemWriter(directory / "checkpoint", thread_count=3)
    dcp.save(mixed_state(1), storage_writer=writer, no_dist=True)
    save(mixed_state(2), directory / "checkpoint")
    assert_same(load(directory / "checkpoint", mixed_state(2)), mixed_state(2))
    assert len(files_of(directory / "checkpoint")) == 2


def test_files_of_others_stay(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    save(mixed_state(), checkpoint)
    for name in ("notes.txt", "model.distcp", "__0_0.distcp.backup", "x__0_0.distcp"):
        (checkpoint / name).write_text("mine")
    (checkpoint / "__0_0.distcp").mkdir()  # a directory with the name of a data file is left alone
    save(mixed_state(), checkpoint)
    assert len(files_of(checkpoint)) == 7


def test_leftovers_of_a_killed_save_make_room_before_the_next_one(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    save(mixed_state(), checkpoint)
    committed = files_of(checkpoint)
    leftover = checkpoint / "__3_0123456789abcdef_0.distcp"
    leftover.write_bytes(b"half")

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            assert files_of(checkpoint) >= committed
            assert not leftover.exists()
            return super().resolve_data(item)

    writer = FileSystemWriter(checkpoint)
    dcp.save(mixed_state(), storage_writer=writer, planner=Planner(), no_dist=True)


def test_leftovers_stay_where_the_metadata_is_damaged(directory: pathlib.Path) -> None:
    save(mixed_state(), directory / "checkpoint")
    metadata = directory / "checkpoint" / ".metadata"
    flip(metadata, 800)
    before = files_of(directory / "checkpoint")
    commit.remove_leftovers(directory / "checkpoint")
    assert files_of(directory / "checkpoint") == before


def test_checksums_of_all_chunks_are_kept(directory: pathlib.Path) -> None:
    save(mixed_state(), directory / "checkpoint", thread_count=2)
    extras = metadata_of(directory / "checkpoint").tensorferry
    assert extras["version"] == 1
    assert extras["chunk_nbytes"] == CHUNK_NBYTES
    assert set(extras["files"]) | {".metadata"} == files_of(directory / "checkpoint")
    for name, (nbytes, crcs) in extras["files"].items():
        content = (directory / "checkpoint" / name).read_bytes()
        assert nbytes == len(content)
        chunks = [content[at : at + CHUNK_NBYTES] for at in range(0, nbytes, CHUNK_NBYTES)]
        assert list(struct.unpack(f"<{len(chunks)}I", crcs)) == [zlib.crc32(c) for c in chunks]


def test_places_of_payloads_are_kept_for_what_is_in_c_order(directory: pathlib.Path) -> None:
    state = mixed_state()
    save(state, directory / "checkpoint")
    storage = metadata_of(directory / "checkpoint").storage_data
    found = set()
    for index, info in storage.items():
        if hasattr(info, "tensorferry"):
            offset, nbytes = info.tensorferry
            with open(directory / "checkpoint" / info.relative_path, "rb") as file:
                file.seek(info.offset + offset)
                content = file.read(nbytes)
            wanted = state[index.fqn] if index.fqn in state else state["nested"]["step"]
            assert content == bytes(
                wanted.detach().contiguous().flatten().view(torch.uint8).numpy()
            )
            found.add(index.fqn)
    not_found = {"transposed", "channels_last", "empty", "conjugate"}
    assert not found & not_found
    assert {"weight", "large", "slice", "steps", "expanded", "scalar", "nested.step"} <= found


def test_planner_that_casts_gets_no_places(directory: pathlib.Path) -> None:
    class Halving(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return data.half() if write_item.type != WriteItemType.BYTE_IO else data

    writer = FileSystemWriter(directory / "checkpoint")
    dcp.save({"a": torch.ones(9)}, storage_writer=writer, planner=Halving(), no_dist=True)
    (info,) = metadata_of(directory / "checkpoint").storage_data.values()
    assert not hasattr(info, "tensorferry")
    state = {"a": torch.zeros(9)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory / "checkpoint"), no_dist=True)
    assert state["a"].tolist() == [1.0] * 9


def test_metadata_ends_with_its_own_checksum(directory: pathlib.Path) -> None:
    save(mixed_state(), directory / "checkpoint")
    content = (directory / "checkpoint" / ".metadata").read_bytes()
    pickled, _, trailer = content.rpartition(b"tensorferry crc32 ")
    assert trailer == b"%08x\n" % zlib.crc32(pickled)


def test_metadata_is_what_torch_before_2_15_can_read(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*before(self)[:5], (1,)))
    save({"a": torch.ones(3)}, directory / "checkpoint")
    monkeypatch.undo()
    properties = metadata_of(directory / "checkpoint").state_dict_metadata["a"].properties
    assert properties.dtype == torch.float32


def test_overwrite_can_be_refused(directory: pathlib.Path) -> None:
    save(mixed_state(1), directory / "checkpoint")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(mixed_state(2), directory / "checkpoint", overwrite=False)
    assert "already exists" in str(caught.value)
    assert_same(load(directory / "checkpoint", mixed_state(1)), mixed_state(1))


def test_missing_directories_are_made(directory: pathlib.Path) -> None:
    deep = directory / "a" / "b" / "c"
    save(mixed_state(), deep)
    assert_same(load(deep, mixed_state()), mixed_state())


def test_one_writer_serves_many_saves(directory: pathlib.Path) -> None:
    writer = FileSystemWriter(directory / "first")
    for name in ("first", "second", "first"):
        dcp.save(mixed_state(), checkpoint_id=directory / name, storage_writer=writer, no_dist=True)
        assert len(files_of(directory / name)) == 2
    assert_same(load(directory / "second", mixed_state()), mixed_state())


def test_cached_plans_do_not_fix_the_names_of_files(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.7")
    checkpoint = directory / "checkpoint"
    names = []
    for step in range(3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = FileSystemWriter(checkpoint)
        dcp.save(mixed_state(step), storage_writer=writer, planner=planner, no_dist=True)
        assert_same(load(checkpoint, mixed_state(step)), mixed_state(step))
        names.append(files_of(checkpoint) - {".metadata"})
    assert not names[0] & names[1]
    assert not names[1] & names[2]


def test_writer_is_a_torch_writer_and_pickles(directory: pathlib.Path) -> None:
    writer = FileSystemWriter(directory / "checkpoint", thread_count=2)
    assert isinstance(writer, dcp.FileSystemWriter)
    dcp.save(mixed_state(), storage_writer=writer, no_dist=True)
    again = pickle.loads(pickle.dumps(writer))
    assert again.thread_count == 2
    dcp.save(mixed_state(3), storage_writer=again, no_dist=True)
    assert_same(load(directory / "checkpoint", mixed_state(3)), mixed_state(3))


def test_save_after_the_main_thread_has_ended_still_works(directory: pathlib.Path) -> None:
    child.call(
        "tests.checkpoint.programs:save_in_a_thread_at_exit",
        imports=["torch.distributed.checkpoint"],
        path=directory / "c",
    )
    state = {"a": torch.zeros(1 << 20)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory / "c"), no_dist=True)
    assert state["a"].eq(7).all()


def test_state_made_on_demand_is_never_in_memory_as_a_whole(directory: pathlib.Path) -> None:
    ended = child.call(
        "tests.checkpoint.programs:peak_of_lazy_save",
        imports=["torch.distributed.checkpoint"],
        path=str(directory / "checkpoint"),
        count=16,
    )
    assert ended.result <= 128 << 20  # of 256 MiB


def test_a_save_tells_how_far_it_has_come(directory: pathlib.Path) -> None:
    told: list[Progress] = []
    state = {"a": torch.ones(1000), "b": torch.ones(3, 5), "c": "text"}
    writer = FileSystemWriter(directory / "c", single_file_per_rank=False, progress=told.append)
    assert writer.last_save is None
    dcp.save(state, storage_writer=writer)
    last = told[-1]
    assert (last.files, last.total_files) == (3, 3)
    assert last.nbytes == last.total_nbytes >= 4000 + 60
    assert writer.last_save is not None
    assert writer.last_save.nbytes == last.nbytes
    assert writer.last_save.gb_per_second > 0


def test_what_the_listener_raises_ends_the_save(directory: pathlib.Path) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError

    state = {"a": torch.ones(1000)}
    dcp.save(state, storage_writer=FileSystemWriter(directory / "c"))
    before = files_of(directory / "c")
    with fails(ZeroDivisionError):
        dcp.save(state, storage_writer=FileSystemWriter(directory / "c", progress=fail))
    assert files_of(directory / "c") == before


def test_a_save_that_a_warning_ends_was_not_the_last_save(directory: pathlib.Path) -> None:
    writer = FileSystemWriter(directory)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*will refuse to load")
        with pytest.raises(dcp.api.CheckpointException, match="will refuse to load"):
            dcp.save({"a": re.compile("a")}, storage_writer=writer, no_dist=True)
    assert writer.last_save is None


def test_a_listener_that_cannot_be_called_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="progress"):
        FileSystemWriter(directory / "c", progress=5)  # type: ignore[arg-type]
