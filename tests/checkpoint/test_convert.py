"""convert() and `tensorferry convert`: between checkpoints, safetensors and files of torch.save."""

from __future__ import annotations

import ctypes
import errno
import json
import pathlib
import subprocess
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import tensorferry
from tensorferry.checkpoint import CheckpointError, FileSystemReader, FileSystemWriter
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.saving import save_file
from tensorferry.safetensors.sharded import INDEX_NAME, save_sharded
from tests.checkpoint.damage import flip, run
from tests.checkpoint.shards import distributed, whole
from tests.checkpoint.states import assert_same
from tests.safetensors.files import loaded
from tests.support import child, mounts, warm
from tests.support.ranks import call_on_ranks, files_of

pytest.importorskip("torch.distributed.checkpoint.hf_storage")
from tensorferry.checkpoint.tools.convert import convert

MIB = 1 << 20

State = dict[str, torch.Tensor]


def state_of(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.0.weight": torch.randn(37, 50, generator=generator),
        "layer.0.bias": torch.randn(37, generator=generator).to(torch.bfloat16),
        "steps": torch.arange(7),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "flag": torch.tensor([True, False, True]),
        "nothing": torch.zeros(0, 3),
        # Larger than one read, with many rows and with one row.
        "large": torch.randint(0, 256, (3000, 6001), generator=generator, dtype=torch.uint8),
        "long": torch.randint(0, 256, (1, 9 * MIB + 1), generator=generator, dtype=torch.uint8),
        "deep": torch.randn(3, 5, 7, 2, generator=generator, dtype=torch.float16),
    }


def checkpoint(path: pathlib.Path, state: Any, kind: Any = FileSystemWriter) -> pathlib.Path:
    dcp.save(state, storage_writer=kind(path), no_dist=True)
    return path


def read_checkpoint(path: pathlib.Path, expected: State) -> State:
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for kind in (FileSystemReader, dcp.FileSystemReader):
        dcp.load(found, storage_reader=kind(path), no_dist=True)
    return found


@pytest.mark.parametrize("kind", [FileSystemWriter, dcp.FileSystemWriter])
def test_a_checkpoint_becomes_one_file(directory: pathlib.Path, kind: Any) -> None:
    source = checkpoint(directory / "checkpoint", state_of(), kind)
    told: list[Any] = []
    moved = convert(source, directory / "model.safetensors", progress=told.append)
    assert_same(safetensors.torch.load_file(directory / "model.safetensors"), state_of())
    assert moved.nbytes == sum(tensor.nbytes for tensor in state_of().values())
    assert (told[-1].nbytes, told[-1].files) == (moved.nbytes, 1)
    save_file(state_of(), directory / "saved", {"format": "pt"})
    assert (directory / "model.safetensors").read_bytes() == (directory / "saved").read_bytes()


def test_a_checkpoint_becomes_a_model_of_several_files(directory: pathlib.Path) -> None:
    source = checkpoint(directory / "checkpoint", state_of())
    for target in ("first", "first", "second"):
        convert(source, directory / target, max_shard_nbytes="10MB")
        assert_same(loaded(directory / target), state_of())
    assert INDEX_NAME in files_of(directory / "first")
    save_sharded(dict(state_of().items()), directory / "saved", "10MB")
    assert {*files_of(directory / "saved")} == files_of(directory / "second")


@pytest.mark.parametrize("limit", ["10MB", "1GB"])
def test_safetensors_become_a_checkpoint_and_come_back(directory: pathlib.Path, limit: str) -> None:
    save_sharded(state_of(), directory / "model", limit)
    convert(directory / "model", directory / "checkpoint")
    assert_same(read_checkpoint(directory / "checkpoint", state_of()), state_of())
    convert(directory / "checkpoint", directory / "back.safetensors")
    assert_same(safetensors.torch.load_file(directory / "back.safetensors"), state_of())
    metadata = FileSystemReader(directory / "checkpoint").read_metadata()
    for entry in metadata.state_dict_metadata.values():
        assert all(chunk.sizes.numel() <= 16 * MIB for chunk in entry.chunks)  # type: ignore[union-attr]


def save_shards(rank: int, directory: str) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(directory, save_distributed=True)
    dcp.save(distributed(), storage_writer=writer)


def test_shards_of_ranks_become_one_file(directory: pathlib.Path) -> None:
    call_on_ranks(3, save_shards, str(directory / "shards"))
    convert(directory / "shards", directory / "checkpoint")
    convert(directory / "checkpoint", directory / "model.safetensors")
    assert_same(safetensors.torch.load_file(directory / "model.safetensors"), whole())


def test_a_file_of_torch_save_becomes_safetensors(directory: pathlib.Path) -> None:
    whole = torch.randn(40, 50)
    state = {
        "model": state_of(),
        "tied": [whole, whole],
        "part": whole[3:7],
        "transposed": torch.randn(300, 500).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    torch.save(state, directory / "state.pt")
    convert(directory / "state.pt", directory / "model.safetensors")
    expected = {f"model.{name}": tensor for name, tensor in state_of().items()}
    expected |= {"tied.0": whole, "tied.1": whole, "part": whole[3:7]}
    expected |= {
        name: state[name].detach() for name in ("transposed", "channels last", "parameter")
    }  # type: ignore[attr-defined]
    assert_same(safetensors.torch.load_file(directory / "model.safetensors"), expected)


class Kept(torch.nn.Module):
    """A module that torch.save pickles by its class."""


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        ({"w": torch.ones(3), "epoch": 3, "note": {"text": "x"}}, ["epoch", "note.text"]),
        ({"w": torch.ones(3), "list": [torch.ones(1), None]}, ["list.1"]),
        ({"w": torch.ones(3), "module": Kept()}, ["module"]),
    ],
    ids=["numbers", "none", "module"],
)
def test_what_is_no_tensor_is_refused_unless_it_is_to_be_left_out(
    directory: pathlib.Path, state: Any, lost: list[str]
) -> None:
    torch.save(state, directory / "state.pt")
    sources = [directory / "state.pt"]
    if "module" not in state:
        sources.append(checkpoint(directory / "checkpoint", state))
    for number, source in enumerate(sources):
        target = directory / f"{number}.safetensors"
        with pytest.raises(CheckpointError, match="not tensors, and would be lost") as failure:
            convert(source, target)
        if source.is_file():
            assert set(failure.value.names) >= set(lost)
        assert not target.exists()
        convert(source, target, tensors_only=True)
        assert torch.equal(safetensors.torch.load_file(target)["w"], torch.ones(3))


def test_containers_deeper_than_is_looked_into_are_not_lost_silently(
    directory: pathlib.Path,
) -> None:
    state: Any = torch.ones(3)
    for _ in range(150):
        state = [state]
    torch.save({"w": torch.ones(2), "deep": state}, directory / "state.pt")
    with pytest.raises(CheckpointError, match="would be lost"):
        convert(directory / "state.pt", directory / "model.safetensors")


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ({"z": torch.ones(3, dtype=torch.complex128)}, SafetensorError, "'z'.*complex128"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, CheckpointError, "'a.b'.*two tensors"),
        ({"columns": torch.ones(4, 4)[:, :2]}, CheckpointError, "'columns'.*gaps"),
        ({"one": torch.ones(1).expand(5)}, CheckpointError, "'one'.*gaps"),
        ({(1, 2): torch.ones(1)}, CheckpointError, "not text"),
        ({"n" * 300: torch.ones(1)}, CheckpointError, "too long"),
        ({"__metadata__": torch.ones(1)}, SafetensorError, "metadata"),
    ],
)  # fmt: skip
def test_what_safetensors_cannot_hold_is_named(
    directory: pathlib.Path, state: Any, error: Any, match: str
) -> None:
    torch.save(state, directory / "state.pt")
    for target in ("model.safetensors", "model"):
        with pytest.raises(error, match=match):
            convert(directory / "state.pt", directory / target)
    assert not (directory / "model.safetensors").exists()
    assert not any((directory / "model").glob("*.safetensors"))


def test_damage_is_found_before_anything_is_written(directory: pathlib.Path) -> None:
    torch.save(state_of(), directory / "state.pt")
    for kind in (FileSystemWriter, dcp.FileSystemWriter):
        source = checkpoint(directory / kind.__module__, state_of(), kind)
        (data,) = source.glob("*.distcp")
        flip(data, data.stat().st_size // 2)
        with pytest.raises(CheckpointError):
            convert(source, directory / "model.safetensors")
    data = directory / "state.pt"
    flip(data, data.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="CRC-32"):
        convert(data, directory / "model.safetensors")
    save_file({"a": torch.ones(3)}, directory / "cut.safetensors")
    data = directory / "cut.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(SafetensorError, match="cut short"):
        convert(data, directory / "checkpoint")
    assert not (directory / "model.safetensors").exists()
    assert not (directory / "checkpoint" / ".metadata").exists()


@pytest.mark.parametrize("to", ["checkpoint", "safetensors"])
def test_a_full_disk_leaves_what_was_there(tmp_path: pathlib.Path, to: str) -> None:
    small = {"w": torch.ones(100)}
    for name, state in (("large", {"w": torch.ones(12 * MIB)}), ("small", small)):
        if to == "checkpoint":
            save_file(state, tmp_path / name)
        else:
            checkpoint(tmp_path / name, state)
    with mounts.ext4(tmp_path, 32 * MIB) as mount:
        target = mount / "target"
        convert(tmp_path / "small", target)
        files = files_of(target)
        with pytest.raises(tensorferry.StorageError) as failure:
            convert(tmp_path / "large", target)
        assert failure.value.errno == errno.ENOSPC
        assert files_of(target) == files
        found = loaded(target) if to == "safetensors" else read_checkpoint(target, small)
        assert_same(found, small)


def test_bad_places_and_arguments_are_refused(directory: pathlib.Path) -> None:
    save_file({"w": torch.ones(3)}, directory / "model.safetensors")
    with pytest.raises(FileNotFoundError):
        convert(directory / "missing", directory / "x")
    with pytest.raises(FileNotFoundError):
        convert(directory / "missing.safetensors", directory / "x")
    (directory / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        convert(directory / "model.safetensors", directory / "file")
    with pytest.raises(ValueError, match="a checkpoint, which is a folder"):
        convert(directory / "model.safetensors", directory / "y.safetensors")
    with pytest.raises(ValueError, match="max_shard_nbytes"):
        convert(directory / "model.safetensors", directory / "x", max_shard_nbytes="x")
    (directory / "d.safetensors").mkdir()
    (directory / "d.safetensors" / "file").write_text("")
    checkpoint(directory / "checkpoint", {"w": torch.ones(3)})
    with pytest.raises(IsADirectoryError):
        convert(directory / "checkpoint", directory / "d.safetensors")


def test_the_command_converts_both_ways_and_says_so(directory: pathlib.Path) -> None:
    source = checkpoint(directory / "checkpoint", state_of())
    result = run("convert", source, directory / "m.safetensors")
    assert result.exit_code == 0, result.output
    assert "bytes of tensors" in result.output
    assert_same(safetensors.torch.load_file(directory / "m.safetensors"), state_of())
    arguments = [str(directory / "m.safetensors"), str(directory / "back")]
    result = run("convert", *arguments, "--json")
    assert result.exit_code == 0
    told = json.loads(result.output)
    assert told["target"] == arguments[1]
    assert told["nbytes"] >= sum(tensor.nbytes for tensor in state_of().values())
    assert told["seconds"] > 0
    assert_same(read_checkpoint(directory / "back", state_of()), state_of())
    command = [warm.python(), "-m", "tensorferry", "convert", *arguments[1:]]
    ended = subprocess.run(
        [*command, directory / "again", "--max-shard", "10MB"], check=True, capture_output=True
    )
    assert not ended.stderr
    assert_same(loaded(directory / "again"), state_of())


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (["missing", "x"], 2, "nothing at"),
        (["objects.pt", "x"], 1, "--tensors-only"),
        (["cut.safetensors", "x"], 1, "cut short"),
        (["notes.txt", "x"], 2, "not a file of torch.save"),
        (["good.safetensors", "x", "--max-shard", "?"], 2, "--max-shard: "),
        (["good.safetensors", "notes.txt"], 1, "TARGET: It is a file"),
        (["good.safetensors", "x.pt"], 2, "TARGET: 'x.pt' has the suffix of a file"),
        (["good.safetensors", "x.NPZ"], 2, "TARGET: 'x.NPZ' has the suffix of a file"),
        (["good.safetensors", "objects.pt"], 2, "TARGET: 'objects.pt' has the suffix of a file"),
        (["good.safetensors", "no/x.safetensors"], 2, "TARGET: 'no/x.safetensors' is a file name"),
        (["good.pt", "no/x.safetensors"], 1, "/no' does not exist): 'no/x.safetensors'"),
        (["objects.pt", "x", "--tensors-only"], 0, ""),
    ],
)
def test_the_command_ends_with_what_went_wrong(
    directory: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    match: str,
) -> None:
    monkeypatch.chdir(directory)
    torch.save({"w": torch.ones(3), "epoch": 1}, "objects.pt")
    torch.save({"w": torch.ones(3)}, "good.pt")
    save_file({"w": torch.ones(3)}, "good.safetensors")
    pathlib.Path("cut.safetensors").write_bytes(pathlib.Path("good.safetensors").read_bytes()[:-1])
    pathlib.Path("notes.txt").write_text("mine")
    result = run("convert", *arguments)
    assert result.exit_code == code, result.output
    assert match in result.output
    assert "Traceback" not in result.output
    assert pathlib.Path("notes.txt").read_text() == "mine"


def peaks_of_conversions(path: str, nbytes: int) -> list[int]:
    """Convert one large tensor between formats, and return how much memory each took at most."""
    from tensorferry.tuning.stopwatch import Stopwatch

    # Make the C library unmap freed memory at once (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    folder = pathlib.Path(path)
    peaks = []
    for size in (64, nbytes):  # the first call makes objects that do not count
        here = folder / str(size)
        here.mkdir()
        torch.save({"w": torch.ones(size, dtype=torch.uint8)}, here / "a.pt")
        peaks = []
        for source, target in (("a.pt", "b.safetensors"), ("b.safetensors", "c"), ("c", "d")):
            with Stopwatch() as watch:
                convert(here / source, here / target)
            assert watch.peak_growth_nbytes is not None
            peaks.append(watch.peak_growth_nbytes)
    return peaks


def test_it_takes_bounded_memory(directory: pathlib.Path) -> None:
    ended = child.call(
        "tests.checkpoint.test_convert:peaks_of_conversions",
        path=directory,
        nbytes=300 * MIB,
        imports=["torch.distributed.checkpoint"],
    )
    assert max(ended.result) <= 160 * MIB, ended.result  # of 300
