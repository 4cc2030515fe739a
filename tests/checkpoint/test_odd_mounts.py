"""File systems of object stores, which refuse some operations: all writers work there if torch.save does."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorferry
from tensorferry.checkpoint import Checkpoints, FileSystemWriter, FileWriter, load, save
from tensorferry.safetensors.saving import save_file
from tensorferry.safetensors.sharded import save_sharded
from tensorferry.transfer import publication
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from tests.support.faultfs import FaultFS

# Larger than a write-back cache, so writes are in flight before the end.
STATE = {"w": torch.arange(300_000.0)}


def save_by_writer(path: pathlib.Path) -> None:
    dcp.save(STATE, storage_writer=FileSystemWriter(path, overwrite=True), no_dist=True)


def save_as_a_step(path: pathlib.Path) -> None:
    with Checkpoints(path) as checkpoints:
        checkpoints.save(1, STATE, overwrite=True)


def save_as_a_file(path: pathlib.Path) -> None:
    with FileWriter(path) as file:
        torch.save(STATE, file)  # type: ignore[arg-type]


def save_for_hugging_face(path: pathlib.Path) -> None:
    storage = pytest.importorskip("tensorferry.checkpoint.storage.huggingface")
    dcp.save(STATE, storage_writer=storage.HuggingFaceStorageWriter(path), no_dist=True)


WAYS: dict[str, Callable[[Any], object]] = {
    "save": lambda path: save(STATE, path),
    "FileWriter": save_as_a_file,
    "write": lambda path: tensorferry.write(path, STATE["w"], atomic=True),
    "write_many": lambda path: tensorferry.write_many([(path, STATE["w"])], atomic=True),
    "save_file": lambda path: save_file(STATE, path),
    "save_sharded": lambda path: save_sharded(STATE, path),
    "FileSystemWriter": save_by_writer,
    "Checkpoints": save_as_a_step,
    "HuggingFaceStorageWriter": save_for_hugging_face,
}


@pytest.fixture(autouse=True)
def nothing_tried() -> Iterator[None]:
    publication._renames_checked.clear()
    yield
    publication._renames_checked.clear()


@pytest.mark.parametrize("refused", ["chmod", "rename_open", "reopen"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_needed_may_be_refused(faultfs: FaultFS, way: str, refused: str) -> None:
    code = errno.EBUSY if refused == "rename_open" else errno.EPERM
    faultfs.order(Fault(refused, error=code))
    path = faultfs.path / "saved"
    for _ in range(2):
        WAYS[way](path)
    if way == "save":
        assert torch.equal(load(path)["w"], STATE["w"])
    assert not [*faultfs.path.glob(".tensorferry-*")]


@pytest.mark.parametrize("refused", ["rename", "rename_over"])
@pytest.mark.parametrize("way", WAYS)
def test_where_files_cannot_be_replaced_that_is_said_before_data_are_written(
    faultfs: FaultFS, way: str, refused: str
) -> None:
    path = faultfs.path / "saved"
    if refused == "rename_over":
        WAYS[way](path)
        publication._renames_checked.clear()
    faultfs.order(Fault(refused, error=errno.EINVAL))
    with pytest.raises((OSError, dcp.api.CheckpointException), match="this file system cannot"):
        WAYS[way](path)
    assert not faultfs.requests("write")
