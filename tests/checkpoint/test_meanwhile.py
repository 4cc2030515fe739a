"""Concurrent events: loads while another process replaces the checkpoint, and forks during saves."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import tensorferry
from tensorferry.checkpoint import FileSystemReader, FileSystemWriter, FileWriter
from tests.checkpoint.loads import fails
from tests.checkpoint.states import empty_like, metadata_of, steps_in, telling
from tests.support.forks import assert_exits_with_zero
from tests.support.ranks import call_on_ranks, files_of


def save_step(step: int, path: pathlib.Path) -> None:
    dcp.save(telling(step), storage_writer=FileSystemWriter(path), no_dist=True)


def load(path: pathlib.Path) -> dict[str, Any]:
    state = empty_like(telling(0))
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


def test_a_load_whose_files_a_save_has_removed_says_that_the_checkpoint_was_replaced(
    directory: pathlib.Path,
) -> None:
    class Late(FileSystemReader):
        def read_metadata(self, *arguments: Any, **options: Any) -> Any:
            metadata = super().read_metadata(*arguments, **options)
            save_step(2, directory)
            return metadata

    save_step(1, directory)
    (directory / "notes.metadata").write_bytes(b"a user's file")
    state = empty_like(telling(0))
    told = "another save has replaced the checkpoint"
    with fails(tensorferry.StorageError, told, errno=errno.ENOENT):
        dcp.load(state, storage_reader=Late(directory), no_dist=True)
    assert steps_in(load(directory)) == {2.0}


def test_a_load_whose_checkpoint_is_replaced_before_it_reads_data_fails(
    directory: pathlib.Path,
) -> None:
    class Late(FileSystemReader):
        def read_data(self, *arguments: Any) -> Any:
            save_step(2, directory)
            return super().read_data(*arguments)

    save_step(1, directory)
    state = empty_like(telling(0))
    with pytest.raises(dcp.api.CheckpointException, match="another save has replaced"):
        dcp.load(state, storage_reader=Late(directory), no_dist=True)
    assert steps_in(load(directory)) == {2.0}
    places = metadata_of(directory).storage_data.values()
    assert {path.name for path in directory.glob("*.distcp")} == {p.relative_path for p in places}


def fork_with_an_open_writer(_rank: int, directory: str, deed: str) -> str:
    """Fork between two writes of a file; further writes in the child must fail, and it may drop the writer."""
    path = pathlib.Path(directory) / "file"
    halves = b"1" * 9_000_001, b"2" * 5_000_003
    writer = FileWriter(path)
    writer.write(halves[0])
    reader, told = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if deed == "drop":
                del writer
            elif deed == "write":
                writer.write(halves[1])
            elif deed == "write a little":
                writer.write(halves[1][:1000])
            else:
                getattr(writer, deed)()
        except RuntimeError as error:
            os.write(told, str(error).encode())
        os._exit(0)
    assert_exits_with_zero(pid)
    os.close(told)
    writer.write(halves[1])
    writer.close()
    assert path.read_bytes() == b"".join(halves)
    assert files_of(pathlib.Path(directory)) == {"file"}
    return os.read(reader, 1000).decode()


@pytest.mark.parametrize("deed", ["drop", "abort", "close", "write", "write a little"])
def test_a_forked_child_cannot_harm_the_file_that_its_parent_writes(
    directory: pathlib.Path, deed: str
) -> None:
    (told,) = call_on_ranks(1, fork_with_an_open_writer, str(directory), deed)
    assert ("before fork()" in told) == (deed not in ("drop", "abort")), told


class Forking(dcp.DefaultSavePlanner):
    """A planner that forks during a save, and fails in the child."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "1":
            if (pid := os.fork()) == 0:
                raise ValueError("in the child")
            assert_exits_with_zero(pid)
        return super().resolve_data(write_item)


def fail_in_a_child(_rank: int, directory: str) -> list[float]:
    """Save, and fail to save in a child that is forked during the save; return the steps in the checkpoint."""
    path, parent = pathlib.Path(directory), os.getpid()
    save_step(1, path)
    try:
        writer = FileSystemWriter(path)
        dcp.save(telling(2), storage_writer=writer, planner=Forking(), no_dist=True)
    except dcp.api.CheckpointException:
        os._exit(int(os.getpid() == parent))
    return sorted(steps_in(load(path)))


def test_a_save_that_fails_in_a_forked_child_takes_nothing_from_its_parents(
    directory: pathlib.Path,
) -> None:
    assert call_on_ranks(1, fail_in_a_child, str(directory)) == [[2]]
