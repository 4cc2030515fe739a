"""FileSystemWriter with files that torch's code writes (extensions, safetensors), and ranks that save alone."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import CheckpointError, FileSystemWriter
from tests.checkpoint.extensions import Breaking, Inverting, registry
from tests.checkpoint.loads import fails
from tests.checkpoint.states import assert_same, digests, empty_like, load, metadata_of, save
from tests.support.ranks import files_of

if TYPE_CHECKING:
    import pathlib

STATE = {"a": torch.arange(1000.0), "b": torch.ones(3, 4), "c": torch.zeros(1 << 18)}
SMALL = {"a": torch.arange(100.0), "b": torch.ones(3, 4)}


@pytest.mark.parametrize("thread_count", [1, 2])
def test_extensions_work_as_in_torch(directory: pathlib.Path, thread_count: int) -> None:
    options = {"_extensions": [Inverting()], "thread_count": thread_count}
    theirs = dcp.FileSystemWriter(directory / "torch", **options)
    dcp.save(SMALL, storage_writer=theirs, no_dist=True)
    save(SMALL, directory / "ours", **options)
    assert digests(directory / "ours") == digests(directory / "torch")

    state = empty_like(SMALL)
    reader = dcp.FileSystemReader(directory / "ours", _extension_registry=registry())
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(state, SMALL)
    save(SMALL, directory / "ours", **options)
    assert len(files_of(directory / "ours")) == 1 + thread_count


def test_safetensors_files_are_torchs(directory: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    options = {"serialization_format": SerializationFormat.SAFETENSORS}
    theirs = dcp.FileSystemWriter(directory / "torch", **options)
    dcp.save(SMALL, storage_writer=theirs, no_dist=True)
    save(SMALL, directory / "ours", **options)

    def content(folder: pathlib.Path) -> tuple[dict[str, str], dict[str, list[float]]]:
        (path,) = folder.glob("*.distcp")
        with safetensors.safe_open(path, "pt") as file:  # its entries are in any order
            return file.metadata(), {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118

    assert content(directory / "ours") == content(directory / "torch")
    assert set(content(directory / "ours")[1]) == set(SMALL)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread_count", [1, 3])
def test_failures_in_torchs_own_threads_fail_the_save(
    directory: pathlib.Path, thread_count: int
) -> None:
    checkpoint = directory / "checkpoint"
    state = {str(k): torch.full((1 << 16,), k) for k in range(3)}
    save(state, checkpoint)
    before = files_of(checkpoint)
    options = {"_extensions": [Breaking()], "thread_count": thread_count}
    with fails(OSError, errno=errno.EIO):
        save({key: t + 1 for key, t in state.items()}, checkpoint, **options)
    assert files_of(checkpoint) == before
    assert_same(load(checkpoint, state), state)


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


def test_files_written_by_torch_are_synced_and_listed(directory: pathlib.Path) -> None:
    save(SMALL, directory / "checkpoint", _extensions=[Inverting()])
    metadata = metadata_of(directory / "checkpoint")
    assert not hasattr(metadata, "tensorferry")  # torch wrote the bytes, so checksums are missing
    assert {info.relative_path for info in metadata.storage_data.values()} | {".metadata"} == (
        files_of(directory / "checkpoint")
    )
