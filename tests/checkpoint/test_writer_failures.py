"""Failures of FileSystemWriter: the error is exact, and the previous checkpoint does not change."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import CheckpointError, FileSystemWriter
from tests.checkpoint.loads import fails
from tests.checkpoint.states import LAYOUTS, assert_same, load, mixed_state, save
from tests.support import child
from tests.support.ranks import files_of

if TYPE_CHECKING:
    import pathlib


def test_planner_that_fails_leaves_the_checkpoint_before(directory: pathlib.Path) -> None:
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "slice":
                raise ZeroDivisionError("no data")
            return super().resolve_data(write_item)

    checkpoint = directory / "checkpoint"
    save(mixed_state(1), checkpoint)
    before = files_of(checkpoint)
    writer = FileSystemWriter(checkpoint)
    with fails(ZeroDivisionError):
        dcp.save(mixed_state(2), storage_writer=writer, planner=Failing(), no_dist=True)
    assert files_of(checkpoint) == before
    assert_same(load(checkpoint, mixed_state(1)), mixed_state(1))


def test_metadata_of_what_was_not_written_is_refused(directory: pathlib.Path) -> None:
    class Forgetting(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [results[0][:-1]])

    checkpoint = directory / "checkpoint"
    save(mixed_state(1), checkpoint)
    with fails(CheckpointError, "1 of the planned parts"):
        dcp.save(mixed_state(2), storage_writer=Forgetting(checkpoint), no_dist=True)
    assert_same(load(checkpoint, mixed_state(1)), mixed_state(1))


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_file_size_limit_fails_the_save(directory: pathlib.Path, layout: dict[str, Any]) -> None:
    checkpoint = directory / "checkpoint"
    save(mixed_state(), checkpoint)
    before = files_of(checkpoint)
    ended = child.call(
        "tests.checkpoint.programs:save_within",
        imports=["torch.distributed.checkpoint"],
        path=checkpoint,
        file_nbytes=1 << 20,
        layout=layout,
    )
    number, name = ended.result
    assert number == errno.EFBIG
    assert name.startswith(f"{checkpoint}/__0_")
    assert_same(load(checkpoint, mixed_state()), mixed_state())
    assert files_of(checkpoint) == before


def test_directory_that_cannot_be_written_is_reported(directory: pathlib.Path) -> None:
    (directory / "file").write_text("")
    with fails(OSError, errno=errno.ENOTDIR) as reasons:
        save(mixed_state(), directory / "file" / "checkpoint")
    assert str(reasons[0].filename).startswith(str(directory / "file"))


def test_a_file_for_each_item_needs_few_descriptors(directory: pathlib.Path) -> None:
    child.call(
        "tests.checkpoint.programs:save_many_files",
        imports=["torch.distributed.checkpoint"],
        path=directory / "checkpoint",
        count=200,
        descriptors=64,
    )
    state = {str(k): torch.full((1 << 12,), k) for k in range(200)}
    assert_same(load(directory / "checkpoint", state), state)
