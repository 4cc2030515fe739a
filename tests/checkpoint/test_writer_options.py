"""FileSystemWriter where torch's own code writes the files: extensions, safetensors. And ranks that save alone."""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import CheckpointError, FileSystemWriter
from tests.checkpoint.ranks import files_of
from tests.checkpoint.states import assert_same, digests, empty_like, load, metadata_of, save

if TYPE_CHECKING:
    import pathlib

extension = pytest.importorskip(
    "torch.distributed.checkpoint._extension", reason="extensions came with torch 2.7"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:UserWarning:torch", "ignore:Detected an existing"
)

STATE = {"a": torch.arange(1000.0), "b": torch.ones(3, 4), "c": torch.zeros(1 << 18)}


class Inverting(extension.StreamTransformExtension):  # type: ignore[misc]
    """Inverts every bit on its way to the file, and back."""

    @staticmethod
    def registry_name() -> str:
        return "stream.inverting"

    @staticmethod
    def from_descriptor(version: str) -> Inverting:
        return Inverting()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        return _Inverted(output)

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        return io.BytesIO(bytes(byte ^ 255 for byte in input.read()))


class _Inverted(io.RawIOBase):
    def __init__(self, output: Any) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(bytes(byte ^ 255 for byte in memoryview(data).cast("B")))
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._output.close()


SMALL = {"a": torch.arange(100.0), "b": torch.ones(3, 4)}


@pytest.mark.parametrize("thread_count", [1, 2])
def test_extensions_work_as_in_torch(directory: pathlib.Path, thread_count: int) -> None:
    registry = extension.ExtensionRegistry()
    registry.register(Inverting)
    options = {"_extensions": [Inverting()], "thread_count": thread_count}
    theirs = dcp.FileSystemWriter(directory / "torch", **options)
    dcp.save(SMALL, storage_writer=theirs, no_dist=True)
    save(SMALL, directory / "ours", **options)
    assert digests(directory / "ours") == digests(directory / "torch")

    state = empty_like(SMALL)
    reader = dcp.FileSystemReader(directory / "ours", _extension_registry=registry)
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
        with safetensors.safe_open(path, "pt") as file:  # its entries come in any order
            return file.metadata(), {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118

    assert content(directory / "ours") == content(directory / "torch")
    assert set(content(directory / "ours")[1]) == set(SMALL)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_failures_in_torchs_own_threads_fail_the_save(
    directory: pathlib.Path, thread_count: int
) -> None:
    checkpoint = directory / "checkpoint"
    state = {str(k): torch.full((1 << 16,), k) for k in range(3)}
    save(state, checkpoint)
    before = files_of(checkpoint)
    options = {"_extensions": [Failing()], "thread_count": thread_count}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save({key: t + 1 for key, t in state.items()}, checkpoint, **options)
    failure = caught.value.failures[0][0]
    assert isinstance(failure, OSError)
    assert failure.errno == errno.EIO
    assert files_of(checkpoint) == before
    assert_same(load(checkpoint, state), state)


class Failing(Inverting):
    """Cannot write much."""

    def transform_to(self, output: Any) -> Any:
        return _Failing(output)


class _Failing(_Inverted):
    def write(self, data: Any) -> int:
        if memoryview(data).nbytes > 1 << 16:
            raise OSError(errno.EIO, "the cable is out")
        return super().write(data)


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
    assert not hasattr(metadata, "tensorferry")  # nothing is known of bytes that torch wrote
    assert {info.relative_path for info in metadata.storage_data.values()} | {".metadata"} == (
        files_of(directory / "checkpoint")
    )
