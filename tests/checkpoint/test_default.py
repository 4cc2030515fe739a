"""torch.distributed.checkpoint with our writer and reader as its default."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter
from tensorferry.checkpoint.default import install, installed, uninstall

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")


@pytest.fixture
def by_default() -> Iterator[None]:
    install()
    try:
        yield
    finally:
        uninstall()


def is_ours(checkpoint: pathlib.Path) -> bool:
    return b"tensorferry crc32" in (checkpoint / ".metadata").read_bytes()


@pytest.mark.usefixtures("by_default")
def test_saves_and_loads_that_name_only_a_folder_are_ours(directory: pathlib.Path) -> None:
    state = {"weight": torch.arange(1000.0)}
    dcp.save(state, checkpoint_id=directory / "checkpoint")
    assert is_ours(directory / "checkpoint")
    (data,) = (directory / "checkpoint").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(dcp.api.CheckpointException, match="CRC-32"):
        dcp.load(state, checkpoint_id=directory / "checkpoint")


@pytest.mark.usefixtures("by_default")
def test_the_classes_are_found_by_torchs_names(directory: pathlib.Path) -> None:
    assert installed()
    assert dcp.FileSystemWriter is FileSystemWriter
    assert dcp.FileSystemReader is FileSystemReader
    install()  # once more does no harm
    state = {"weight": torch.arange(10.0)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory / "checkpoint"))
    found = {"weight": torch.zeros(10)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(directory / "checkpoint"))
    assert torch.equal(found["weight"], state["weight"])


def test_torchs_come_back(directory: pathlib.Path) -> None:
    install()
    uninstall()
    assert not installed()
    dcp.save({"weight": torch.zeros(3)}, checkpoint_id=directory / "checkpoint")
    assert not is_ours(directory / "checkpoint")


@pytest.mark.usefixtures("by_default")
def test_torchs_own_other_readers_are_what_they_were() -> None:
    try:
        module: Any = importlib.import_module("torch.distributed.checkpoint.hf_storage")
    except ImportError as error:
        pytest.skip(str(error))
    assert not issubclass(module.HuggingFaceStorageReader, FileSystemReader)
