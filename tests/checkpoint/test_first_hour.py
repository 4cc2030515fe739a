"""What meets who saves and loads for the first time, and for the second."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tensorferry.checkpoint import CheckpointError, FileSystemReader, FileSystemWriter, load

if TYPE_CHECKING:
    import pathlib


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_an_empty_file_is_called_empty(
    tmp_path: pathlib.Path, mmap: bool, weights_only: bool
) -> None:
    path = tmp_path / "empty.pt"
    path.touch()
    with pytest.raises(CheckpointError, match=r"empty\.pt.*it is empty"):
        load(path, mmap=mmap, weights_only=weights_only)


def test_a_save_over_a_checkpoint_warns_of_nothing(tmp_path: pathlib.Path) -> None:
    for value in (1.0, 2.0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer = FileSystemWriter(tmp_path, overwrite=True)
            dcp.save({"a": torch.full((3,), value)}, storage_writer=writer)
        assert not [each for each in caught if "existing checkpoint" in str(each.message)]
    found = {"a": torch.zeros(3)}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path))
    assert found["a"].tolist() == [2.0] * 3
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save(found, storage_writer=FileSystemWriter(tmp_path, overwrite=False))
