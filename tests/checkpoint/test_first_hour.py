"""The experience of a user's first saves and loads: common mistakes and their messages."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tensorferry.checkpoint import (
    CheckpointError,
    Checkpoints,
    FileSystemReader,
    FileSystemWriter,
    Stager,
    load,
    save,
)
from tensorferry.safetensors.torch import load_file, save_file

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


def test_representations_say_where_and_how_much(tmp_path: pathlib.Path) -> None:
    path, state = tmp_path / "one", {"a": torch.ones(1000)}
    writer, reader = FileSystemWriter(path), FileSystemReader(path)
    writing = f"<tensorferry.checkpoint.FileSystemWriter {str(path)!r}: last save "
    reading = f"<tensorferry.checkpoint.FileSystemReader {str(path)!r}, verify='read': last load "
    assert (repr(writer), repr(reader)) == (f"{writing}None>", f"{reading}None>")
    dcp.save(state, storage_writer=writer)
    dcp.load(state, storage_reader=reader)
    assert re.fullmatch(rf"{re.escape(writing)}\d+ bytes in \S+ s>", repr(writer))
    assert re.fullmatch(rf"{re.escape(reading)}4000 bytes in \S+ s>", repr(reader))

    stager = Stager()
    staging = "<tensorferry.checkpoint.Stager overlap=False: images of "
    assert repr(stager) == f"{staging}none>"
    staged = stager.stage(state)
    assert re.fullmatch(rf"{staging}\d+ bytes>", repr(stager))
    assert staged["a"].equal(state["a"])

    with Checkpoints(tmp_path, keep_last=3) as kept:
        told = (
            f"<tensorferry.checkpoint.Checkpoints {str(tmp_path)!r}, keep_last=3, keep_every=None"
        )
        assert repr(kept) == f"{told}>"
        kept.save(5, state)
        assert repr(kept) in (f"{told}: saving step 5>", f"{told}>")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("missing", "no file '.metadata'; it does not exist"),
        ("empty", "no file '.metadata'; it is empty"),
        ("run", "there are checkpoints in its folders 'step'"),
    ],
)
def test_a_load_from_a_folder_without_a_checkpoint_describes_the_folder(
    tmp_path: pathlib.Path, name: str, told: str
) -> None:
    (tmp_path / "empty").mkdir()
    dcp.save({"a": torch.zeros(3)}, storage_writer=FileSystemWriter(tmp_path / "run" / "step"))
    reader = FileSystemReader(tmp_path / name)
    with pytest.raises(CheckpointException, match=re.escape(told)):
        dcp.load({"a": torch.zeros(3)}, storage_reader=reader)
    with pytest.raises(FileNotFoundError, match=re.escape(told)):
        reader.read_metadata()


def test_swapped_arguments_are_named_without_their_values(tmp_path: pathlib.Path) -> None:
    state = {"a": torch.zeros(1000)}
    with (
        Checkpoints(tmp_path) as kept,
        pytest.raises(TypeError, match=r"step: .* got dict \(the step comes first"),
    ):
        kept.save(state, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"path: .* got dict \(the object comes first"):
        save(str(tmp_path / "a.pt"), state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path: expected a path, got Tensor"):
        save(state, state["a"])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_load_of_something_else_names_the_function_for_it(tmp_path: pathlib.Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"tensorferry\.safetensors\.torch\.load_file"):
        load(tmp_path / "a.safetensors")
    with pytest.raises(IsADirectoryError, match="FileSystemReader"):
        load(tmp_path)
    with pytest.raises(OSError, match=r"load_files.*distributed\.checkpoint\.load"):
        load_file(tmp_path)


def test_a_file_in_the_place_of_the_folder_of_checkpoints_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with Checkpoints(tmp_path / "file") as kept:
        for call in (kept.steps, lambda: kept.save(1, {}), lambda: kept.restore({})):
            with pytest.raises(NotADirectoryError, match="because this is a file"):
                call()
