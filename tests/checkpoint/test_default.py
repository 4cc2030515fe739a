"""torch.distributed.checkpoint with our writer and reader as its default."""

from __future__ import annotations

import enum
import importlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter, Stager
from tensorferry.checkpoint.storage.default import install, installed, uninstall
from tests.checkpoint.damage import flip
from tests.checkpoint.states import done, saves_in_processes, takes_stagers
from tests.support import warm

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


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
    flip(data, 4 * data.stat().st_size)
    with pytest.raises(dcp.api.CheckpointException, match="CRC-32"):
        dcp.load(state, checkpoint_id=directory / "checkpoint")


@pytest.mark.usefixtures("by_default")
def test_the_classes_are_found_by_torchs_names(directory: pathlib.Path) -> None:
    assert installed()
    assert dcp.FileSystemWriter is FileSystemWriter
    assert dcp.FileSystemReader is FileSystemReader
    install()  # a second call has no effect
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


@saves_in_processes
def test_asynchronous_saves_that_name_only_a_folder_are_staged_and_written_by_ours(
    directory: pathlib.Path,
) -> None:
    ended = warm.call(
        "tests.checkpoint.programs:save_in_a_process_by_default",
        path=directory,
    )
    for name in ("thread", "again", "process"):
        assert is_ours(directory / name), name
        found = {"weight": torch.zeros(1 << 20, dtype=torch.int64)}
        dcp.load(found, storage_reader=dcp.FileSystemReader(directory / name), no_dist=True)
        assert torch.equal(found["weight"], torch.arange(1 << 20))
    assert len(ended.result) == 3
    assert ended.result[0] == ended.result[1], "the memory of the copy is not used again"


@pytest.mark.usefixtures("by_default")
def test_writers_that_are_given_are_used(directory: pathlib.Path) -> None:
    writer = importlib.import_module("torch.distributed.checkpoint.filesystem").FileSystemWriter
    state = {"weight": torch.arange(10.0)}
    answer: Any = dcp.async_save(
        state, checkpoint_id=directory / "c", storage_writer=writer(directory / "c")
    )
    done(answer)
    assert not is_ours(directory / "c")


@takes_stagers
@pytest.mark.usefixtures("by_default")
def test_stagers_that_are_given_are_used(directory: pathlib.Path) -> None:
    staged = []

    class Watched(Stager):
        def stage(self, state: Any, **options: Any) -> Any:
            staged.append(state)
            return super().stage(state, **options)

    state = {"weight": torch.arange(10.0)}
    done(dcp.async_save(state, checkpoint_id=directory / "c", async_stager=Watched()))
    assert staged == [state]
    assert is_ours(directory / "c")


@pytest.mark.usefixtures("by_default")
def test_torchs_own_other_readers_are_what_they_were() -> None:
    try:
        module: Any = importlib.import_module("torch.distributed.checkpoint.hf_storage")
    except ImportError as error:
        pytest.skip(str(error))
    assert not issubclass(module.HuggingFaceStorageReader, FileSystemReader)


class Phase(enum.Enum):
    COOLDOWN = 1


def test_readers_of_others_can_be_told_to_trust(directory: pathlib.Path) -> None:
    install()
    try:
        with pytest.warns(RuntimeWarning, match="'phase'.*trust_pickle=True"):
            dcp.save({"phase": Phase.COOLDOWN}, checkpoint_id=directory / "c", no_dist=True)
        state = {"phase": None}
        with pytest.raises(dcp.api.CheckpointException, match="trust_pickle=True"):
            dcp.load(state, checkpoint_id=directory / "c", no_dist=True)
        seen: list[Any] = []
        install(trust_pickle=True, verify="before", progress=seen.append)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            dcp.save({"phase": Phase.COOLDOWN}, checkpoint_id=directory / "c", no_dist=True)
        dcp.load(state, checkpoint_id=directory / "c", no_dist=True)
        assert state["phase"] is Phase.COOLDOWN
        assert seen
        assert "verify='before'" in repr(dcp.FileSystemReader(directory))
        with pytest.raises(TypeError, match="trusting"):
            install(trusting=True)
        with pytest.raises(ValueError, match="verify"):
            install(verify="never")
    finally:
        uninstall()
    assert "verify='read'" in repr(FileSystemReader(directory))
    with pytest.raises(dcp.api.CheckpointException, match="trust_pickle=True"):
        dcp.load(state, storage_reader=FileSystemReader(directory / "c"), no_dist=True)
