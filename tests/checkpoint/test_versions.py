"""Checkpoints of other versions of torch are read bit for bit, and ours contain only names that those versions have.

Here the installed version of torch reads our checkpoints. To read them with another version, write them with `python -m
tests.checkpoint.test_versions DIRECTORY`, then run `tests/checkpoint/golden/make.py read DIRECTORY` with that version.
"""

from __future__ import annotations

import pathlib
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter, load, save, verify
from tests.checkpoint.golden.make import HERE, differences, emptied, golden_state, read

INSTALLED = torch.__version__.partition("+")[0]
OLDEST = "2.6.0"
VERSIONS = sorted({path.parent.name for path in HERE.glob("*/object.pt")} - {INSTALLED})


def test_there_are_checkpoints_of_the_oldest_torch_that_is_supported_and_of_newer_ones() -> None:
    assert len({OLDEST, INSTALLED, *VERSIONS}) >= 4
    assert (HERE / OLDEST / "object.pt").exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_another_torch_is_read(version: str) -> None:
    state = emptied(golden_state(version))
    reader = FileSystemReader(HERE / version / "checkpoint")
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert differences(state, golden_state(version)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_an_object_of_another_torch_is_read(version: str) -> None:
    assert differences(load(HERE / version / "object.pt"), golden_state(version)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_another_torch_can_be_verified(version: str) -> None:
    assert verify(HERE / version / "checkpoint").problems == []


def test_metadata_of_ours_names_nothing_that_the_oldest_torch_does_not(
    directory: pathlib.Path,
) -> None:
    write(directory)
    metadata = directory / "checkpoint" / ".metadata"
    assert metadata.read_bytes()[1] == 4  # the pickle protocol
    ours = named_in(metadata)
    assert "torch.distributed.checkpoint.metadata.Metadata" in ours
    assert ours <= named_in(HERE / OLDEST / "checkpoint" / ".metadata")


def named_in(path: pathlib.Path) -> set[str]:
    """The classes and functions that a pickle names."""
    named = set()

    class Naming(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add(f"{module}.{name}")
            return super().find_class(module, name)

    with path.open("rb") as stream:
        Naming(stream).load()
    return named


def test_this_torch_reads_ours(directory: pathlib.Path) -> None:
    write(directory)
    assert read(directory) == []


def test_files_are_this_torchs_byte_for_byte(directory: pathlib.Path) -> None:
    write(directory)
    with (directory / "torch.pt").open("wb") as file:
        torch.save(golden_state(), file)
    assert (directory / "object.pt").read_bytes() == (directory / "torch.pt").read_bytes()


def write(directory: pathlib.Path) -> None:
    """Save with ours."""
    writer = FileSystemWriter(directory / "checkpoint")
    dcp.save(golden_state(), storage_writer=writer, no_dist=True)
    save(golden_state(), directory / "object.pt")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
