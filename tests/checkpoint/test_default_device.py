"""Internal memory is host memory, with every device given to torch.set_default_device()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tensorferry
from tensorferry.checkpoint import (
    Checkpoints,
    FileSystemReader,
    FileSystemWriter,
    Stager,
    load,
    save,
)
from tensorferry.safetensors import safe_open
from tensorferry.safetensors.torch import load_file, save_file
from tests.checkpoint.shards import distributed, whole
from tests.checkpoint.states import assert_same, done, empty_like, mixed_state
from tests.support.ranks import call_on_ranks

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """A default device other than the CPU: tensors that are made on it by mistake have no bytes."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    """A state, and one of the same form to load into."""
    with torch.device("cpu"):
        state = mixed_state() | {"object": [1, (torch.ones(3), torch.zeros(0, 2))]}
        found = empty_like(state) | {"object": [0, (torch.zeros(3), torch.ones(0, 2))]}
    return state, found


def same(found: dict[str, Any], state: dict[str, Any]) -> None:
    with torch.device("cpu"):
        for mine, theirs in zip(found.pop("object")[1], state.pop("object")[1], strict=True):
            assert mine.is_cpu
            assert torch.equal(mine, theirs)
        assert_same(found, state)


@pytest.mark.parametrize("verify", ["read", "before", "off"])
def test_checkpoints_are_saved_and_loaded(directory: pathlib.Path, verify: Any) -> None:
    state, found = states()
    dcp.save(state, storage_writer=FileSystemWriter(directory), no_dist=True)
    dcp.load(found, storage_reader=FileSystemReader(directory, verify=verify), no_dist=True)
    same(found, state)


def test_other_dtypes_layouts_and_sparse_tensors_are_loaded(directory: pathlib.Path) -> None:
    with torch.device("cpu"):
        state = {"a": torch.ones(64, 3), "b": torch.ones(4, 4), "sparse": torch.eye(3).to_sparse()}
        found = {"a": torch.zeros(64, 3), "b": torch.zeros(4, 4).t()}
        found["a"] = found["a"].double()
        found["sparse"] = (2 * torch.eye(3)).to_sparse()
    dcp.save(state, storage_writer=FileSystemWriter(directory), no_dist=True)
    dcp.load(found, storage_reader=FileSystemReader(directory), no_dist=True)
    assert found["a"].sum().item() == 192
    assert found["b"].sum().item() == 16
    assert found["sparse"].to_dense().sum().item() == 3


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_states_are_staged(options: dict[str, Any]) -> None:
    state, _ = states()
    staged = Stager(**options).stage(state)
    same(staged.result(300) if options.get("overlap") else staged, state)


def test_asynchronous_saves_and_steps(directory: pathlib.Path) -> None:
    state, found = states()
    writer = FileSystemWriter(directory / "a")
    done(dcp.async_save(state, storage_writer=writer, no_dist=True))
    dcp.load(found, storage_reader=FileSystemReader(directory / "a"), no_dist=True)
    same(found, states()[0])
    state, found = states()
    with Checkpoints(directory / "b") as checkpoints:
        checkpoints.save(1, state)
        assert checkpoints.restore(found) == 1
    same(found, state)


@pytest.mark.parametrize("mmap", [False, True])
def test_objects_are_saved_and_loaded(directory: pathlib.Path, mmap: bool) -> None:
    state, _ = states()
    save(state, directory / "object")
    same(load(directory / "object", mmap=mmap), state)


@pytest.mark.parametrize(
    "options",
    [{}, {"save_distributed": True}, {"save_distributed": True, "enable_consolidation": True}],
    ids=str,
)
def test_checkpoints_in_hugging_faces_format(
    directory: pathlib.Path, options: dict[str, bool]
) -> None:
    storage = pytest.importorskip("tensorferry.checkpoint.storage.huggingface")
    with torch.device("cpu"):
        state, found = whole(), empty_like(whole())
    writer = storage.HuggingFaceStorageWriter(directory, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    dcp.load(found, storage_reader=storage.HuggingFaceStorageReader(directory), no_dist=True)
    assert_same(found, state)


def test_safetensors_files(directory: pathlib.Path) -> None:
    with torch.device("cpu"):
        state = whole()
    save_file(state, directory / "file")
    assert_same(load_file(directory / "file"), state)
    with safe_open(directory / "file", "pt") as file:
        assert_same(dict(file.prefetch(None)), state)
        assert torch.equal(file.get_slice("rows")[3:5, ::2], state["rows"][3:5, ::2])


def test_memory_for_transfers_is_host_memory() -> None:
    assert tensorferry.empty(100).is_cpu
    assert tensorferry.empty(0).is_cpu


def load_shared(rank: int, directory: str) -> float:
    state = distributed(3)
    dcp.save(state, storage_writer=FileSystemWriter(directory))
    dist.barrier()
    found = {name: tensor * 0 for name, tensor in whole(3).items()}
    torch.set_default_device("meta")
    dcp.load(found, storage_reader=FileSystemReader(directory, broadcast=True))
    torch.set_default_device(None)
    assert_same(found, whole(3))
    return float(found["rows"].sum())


def test_reads_that_ranks_share(directory: pathlib.Path) -> None:
    torch.set_default_device(None)
    sums = call_on_ranks(2, load_shared, str(directory / "checkpoint"))
    assert sums[0] == sums[1]
