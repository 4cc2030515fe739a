"""`verify` and `ls` of safetensors files, of models of several files, and of folders with either."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemWriter, verify
from tensorferry.checkpoint.errors import CheckpointError, NotACheckpointError
from tensorferry.checkpoint.tools import entries
from tensorferry.safetensors import checksums
from tests.checkpoint.damage import flip, run

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from tests.support.data import RandomBytes

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(directory: pathlib.Path, random_bytes: RandomBytes) -> pathlib.Path:
    """A folder with a model of two files, and an index."""
    folder = directory / "model"
    folder.mkdir()
    weights = {}
    for number, name in enumerate(SHARDS):
        tensors = {f"layers.{number}.{each}": random_bytes(300_000) for each in "abc"}
        weights |= dict.fromkeys(tensors, name)
        safetensors.numpy.save_file(tensors, folder / name)
    index = {"metadata": {"total_size": 1_800_000}, "weight_map": weights}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_a_model_is_verified_by_the_checksums_that_were_kept(model: pathlib.Path) -> None:
    for path in (model, model / INDEX, model / SHARDS[0]):
        report = verify(path)
        assert report.sound
        assert report.unverified == (list(SHARDS) if path != model / SHARDS[0] else [SHARDS[0]])
        assert report.nbytes == 0
    report = verify(model, write_checksums=True)
    assert report.written == [str(model / f"{name}.crc32") for name in SHARDS]
    assert not report.unverified
    seen = []
    report = verify(model, progress=seen.append)
    assert report.sound
    assert report.entries == 6
    assert report.nbytes == sum((model / name).stat().st_size for name in SHARDS)
    assert not report.unverified
    assert not report.written
    assert (seen[-1].nbytes, seen[-1].files) == (seen[-1].total_nbytes, 2)
    assert verify(model / INDEX).nbytes == report.nbytes


def test_damage_names_tensors_file_and_bytes(model: pathlib.Path) -> None:
    verify(model, write_checksums=True)
    size = (model / SHARDS[1]).stat().st_size
    begin = size - 900_000
    flip(model / SHARDS[1], 8 * (begin + 10))
    flip(model / SHARDS[1], 8 * (begin + 310_000))
    flip(model / SHARDS[1], 8 * (size - 1))
    report = verify(model)
    chunk = checksums.CHUNK_NBYTES
    found = [(each.begin, each.end, each.names) for each in report.problems]  # type: ignore[union-attr]
    assert found == [
        (0, 2 * chunk, ("layers.1.a", "layers.1.b")),
        (3 * chunk, size, ("layers.1.c",)),
    ]
    assert {each.path for each in report.problems} == {str(model / SHARDS[1])}  # type: ignore[union-attr]
    assert report.nbytes == (model / SHARDS[0]).stat().st_size + chunk


def test_checksums_once_kept_are_never_written_over(model: pathlib.Path) -> None:
    verify(model, write_checksums=True)
    flip(model / SHARDS[0], 8 * 500_000)
    for write in (True, False):
        report = verify(model, write_checksums=write)
        assert not report.sound
        assert not report.written


def test_a_replaced_file_is_told_from_a_damaged_one(model: pathlib.Path) -> None:
    verify(model, write_checksums=True)
    size = (model / SHARDS[0]).stat().st_size
    tensors = {f"layers.0.{each}": np.zeros(300_000, np.int8) for each in "abc"}
    safetensors.numpy.save_file(tensors, model / SHARDS[0])
    assert (model / SHARDS[0]).stat().st_size == size
    assert "replaced since" in str(verify(model).problems[0])
    safetensors.numpy.save_file({"layers.0.a": np.zeros(2)}, model / SHARDS[0])
    assert "cut short or replaced" in str(verify(model).problems[0])


@pytest.mark.parametrize("kept", [False, True])
def test_a_broken_header_names_its_tensor(model: pathlib.Path, kept: bool) -> None:
    if kept:
        verify(model, write_checksums=True)
    path = model / SHARDS[0]
    data = path.read_bytes()
    path.write_bytes(data.replace(b"[300000,600000]", b"[300000,600001]"))
    report = verify(model)
    first = report.problems[0]
    assert isinstance(first, CheckpointError)
    assert (first.names, first.path) == (("layers.0.b",), str(path))
    assert "has 300000 bytes" in first.reason
    assert len(report.problems) == (3 if kept else 1)  # the header's checksum, and its chunk's
    with pytest.raises(CheckpointError, match="has 300000 bytes"):
        entries(model)


def test_any_flipped_bit_of_a_small_file_is_found(directory: pathlib.Path) -> None:
    path = directory / "small.safetensors"
    safetensors.numpy.save_file({"a": np.arange(5, dtype=np.int16)}, path, {"k": "v"})
    verify(path, write_checksums=True)
    for at in range(path.stat().st_size):
        flip(path, 8 * at)
        assert not verify(path).sound, at
        flip(path, 8 * at)
    assert verify(path).sound


def test_missing_files_and_tensors_are_found(model: pathlib.Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["elsewhere"] = SHARDS[0]
    index["weight_map"]["nowhere"] = "lost.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    for path in (model, model / INDEX):
        problems = [str(each) for each in verify(path).problems]
        assert len(problems) == 2
        assert "lost.safetensors" in problems[0]
        assert "'elsewhere'): the file does not contain it" in problems[1]
    with pytest.raises(OSError, match=r"lost\.safetensors"):
        entries(model)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_an_index_that_is_none_is_a_problem(model: pathlib.Path, text: str) -> None:
    (model / INDEX).write_text(text)
    [problem] = verify(model).problems
    assert problem.path == str(model / INDEX)  # type: ignore[union-attr]
    assert run("verify", model).exit_code == 1
    assert run("ls", model).exit_code == 1


def test_damaged_checksums_are_not_taken_for_a_damaged_file(model: pathlib.Path) -> None:
    verify(model, write_checksums=True)
    place = model / f"{SHARDS[0]}.crc32"
    place.write_bytes(place.read_bytes().replace(b'"nbytes"', b'"nbYtes"', 1))
    [problem] = verify(model).problems
    assert problem.path == str(place)  # type: ignore[union-attr]


def test_listing_has_dtypes_shapes_and_places(directory: pathlib.Path) -> None:
    path = directory / "all.safetensors"
    state = {
        "a": torch.zeros(2, 3, dtype=torch.bfloat16),
        "b": torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "c": torch.zeros(()),
        "d": torch.zeros(0, 3, dtype=torch.float8_e4m3fn),
    }
    safetensors.torch.save_file(state, path)
    found = {each.name: each for each in entries(path)}
    kinds = {name: (each.dtype, each.shape, each.nbytes) for name, each in found.items()}
    assert kinds == {
        "a": ("bfloat16", (2, 3), 12),
        "b": ("F4", (4, 8), 16),
        "c": ("float32", (), 4),
        "d": ("float8_e4m3fn", (0, 3), 0),
    }
    for name, tensor in state.items():
        [shard] = found[name].shards
        assert shard.file == path.name
        data = path.read_bytes()[shard.begin : shard.end]
        assert data == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_commands_of_a_model(model: pathlib.Path) -> None:
    result = run("ls", model, "--shards")
    assert result.exit_code == 0
    assert "layers.1.c" in result.output
    assert "[300000]" in result.output
    assert f"{SHARDS[1]}, bytes" in result.output
    assert "6 entries, 1.8 MB" in result.output
    assert len(json.loads(run("ls", model, "--json").output)) == 6
    result = run("verify", model)
    assert result.exit_code == 0
    assert f"because they have no checksum: '{SHARDS[0]}', '{SHARDS[1]}'" in result.output
    assert "--write stores checksums" in result.output
    result = run("verify", "--write", model)
    assert result.exit_code == 0
    assert result.output.count("checksums written: ") == 2
    found = json.loads(run("verify", model, "--json").output)
    assert found["sound"]
    assert found["entries"] == 6
    flip(model / SHARDS[0], 8 * 500_000)
    result = run("verify", model)
    assert result.exit_code == 1
    assert "bytes 262144 to 524288 of" in result.output
    assert "'layers.0.a', 'layers.0.b'" in result.output


def test_a_file_of_the_format_is_known_by_any_name(model: pathlib.Path) -> None:
    shutil.copy(model / SHARDS[0], model / "pytorch_model.bin")
    assert len(entries(model / "pytorch_model.bin")) == 3
    assert verify(model / "pytorch_model.bin", write_checksums=True).written


@pytest.mark.parametrize("name", ["x.safetensors", INDEX])
@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: path.touch(), 1),
        (lambda path: path.write_bytes(b"\xff" * 100), 1),
        (lambda path: path.symlink_to("nowhere"), 2),
        (os.mkfifo, 2),
        (lambda path: path.mkdir(), 2),
    ],
)
def test_what_only_has_the_name_is_told(
    directory: pathlib.Path, name: str, make: Callable[[Any], object], code: int
) -> None:
    make(directory / name)
    for command in ("verify", "ls"):
        result = run(command, directory / name)
        assert result.exit_code == code
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_checksums_themselves_are_no_file_to_look_at(model: pathlib.Path) -> None:
    verify(model, write_checksums=True)
    with pytest.raises(NotACheckpointError, match="pass the file"):
        verify(model / f"{SHARDS[0]}.crc32")


def test_a_checkpoint_beside_safetensors_files_is_what_is_looked_at(model: pathlib.Path) -> None:
    dcp.save({"mine": torch.zeros(3)}, storage_writer=FileSystemWriter(model))
    assert [each.name for each in entries(model)] == ["mine"]
    with pytest.raises(NotACheckpointError, match="have their own checksums"):
        verify(model, write_checksums=True)
    assert run("verify", "--write", model).exit_code == 2


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_neither_command_needs_torch(model: pathlib.Path, command: str) -> None:
    program = (
        "import sys\n"
        "from tensorferry.cli.app import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'safetensors', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, command, str(model)], check=True)
