"""FileSystemWriter for ranks that save alone (use_collectives=False)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import CheckpointError, FileSystemWriter
from tests.checkpoint.states import assert_same, load, save
from tests.support.ranks import files_of

if TYPE_CHECKING:
    import pathlib

STATE = {"a": torch.arange(1000.0), "b": torch.ones(3, 4), "c": torch.zeros(1 << 18)}


def test_a_rank_that_saves_alone_has_metadata_of_its_own(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.9")
    checkpoint = directory / "checkpoint"
    for step in range(2):
        state = {"a": torch.full((1000,), float(step))}
        writer = FileSystemWriter(checkpoint)
        dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
        assert len(files_of(checkpoint)) == 2
        assert "__0.metadata" in files_of(checkpoint)
        assert_same(load(checkpoint, state), state)
    (checkpoint / "__7_0123456789abcdef_0.distcp").write_text("another rank's")
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert len(files_of(checkpoint)) == 3


def test_a_rank_alone_does_not_save_over_a_checkpoint_of_all(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.9")
    checkpoint = directory / "checkpoint"
    save(STATE, checkpoint)
    with pytest.raises(CheckpointError, match="use_collectives=False"):
        dcp.save(
            STATE, storage_writer=FileSystemWriter(checkpoint), no_dist=True, use_collectives=False
        )
    assert_same(load(checkpoint, STATE), STATE)


def test_a_checkpoint_of_all_replaces_those_of_single_ranks(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.9")
    checkpoint = directory / "checkpoint"
    dcp.save(
        {"a": torch.zeros(5)},
        storage_writer=FileSystemWriter(checkpoint),
        no_dist=True,
        use_collectives=False,
    )
    save(STATE, checkpoint)
    assert len(files_of(checkpoint)) == 2
    assert_same(load(checkpoint, STATE), STATE)
