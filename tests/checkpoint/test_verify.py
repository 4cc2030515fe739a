"""Detection of damage: by loads before it reaches a tensor, and by `verify` without a load."""

from __future__ import annotations

import io
import json
import pickle
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tensorferry.checkpoint import (
    CheckpointError,
    FileSystemReader,
    FileSystemWriter,
    progress,
    tools,
)
from tensorferry.checkpoint.progress import Progress
from tensorferry.checkpoint.storage.metadata import (
    CHUNK_NBYTES,
    payload_of,
    read_metadata,
    trailer_of,
)
from tensorferry.checkpoint.tools.audit import entries as list_checkpoint
from tensorferry.checkpoint.tools.audit import verify
from tensorferry.checkpoint.zipformat import blobs
from tests.checkpoint.damage import BITS_APART, flip, flipped, run
from tests.checkpoint.loads import LEVELS, WRITERS, fails, load, read_slices
from tests.checkpoint.states import assert_same, empty_like, metadata_of, mixed_state, save

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes


def state() -> dict[str, Any]:
    """Tensors small and large, and an object."""
    generator = torch.Generator().manual_seed(5)
    return {
        "first": torch.randn(100, 300, generator=generator),
        "large": torch.randn(1 << 20, generator=generator),
        "transposed": torch.randn(300, 200, generator=generator).t(),
        "object": {"text": "some text", "number": 3},
        "last": torch.randn(500, generator=generator),
    }


def data_file_of(path: pathlib.Path) -> pathlib.Path:
    (file,) = path.glob("*.distcp")
    return file


def regions(path: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Return the offset in the data file of each part of the blob of "large"."""
    metadata = read_metadata(path / ".metadata")
    ((_, info),) = [each for each in metadata.storage_data.items() if each[0].fqn == "large"]
    offset, nbytes = payload_of(info) or (0, 0)
    begin, end = info.offset + offset, info.offset + offset + nbytes
    data = data_file_of(path).read_bytes()
    directory = data.index(b"PK\1\2", end)
    return {
        "pickle": (data.index(b"data.pkl", info.offset) + 40, info.offset + 300),
        "header": (info.offset, info.offset + 4),
        "padding": (begin - 8, begin),
        "payload": (begin, end),
        "descriptor": (end + 4, end + 8),
        "directory": (directory, directory + 40),
        "end": (info.offset + info.length - 22, info.offset + info.length),
        "object": (0, 100),
    }


REGIONS = ["pickle", "header", "padding", "payload", "descriptor", "directory", "end", "object"]


@pytest.mark.parametrize("region", REGIONS)
def test_flipped_bits_are_found_wherever_they_are(
    directory: pathlib.Path, region: str, random_bytes: RandomBytes
) -> None:
    save(state(), directory)
    file = data_file_of(directory)
    begin, end = regions(directory)[region]
    for bit in random_bytes.generator.integers(8 * begin, 8 * end, size=6):
        flip(file, int(bit))
        report = verify(directory)
        (problem,) = report.problems
        assert isinstance(problem, CheckpointError)
        assert problem.begin <= bit // 8 < problem.end  # type: ignore[operator]
        assert problem.end - problem.begin <= CHUNK_NBYTES  # type: ignore[operator]
        assert problem.path == str(file)
        assert ("object.text" if region == "object" else "large") in problem.names
        for level in ("read", "before"):
            with fails(CheckpointError, file.name):
                load(empty_like(state()), directory, verify=level)
        flip(file, int(bit))
    assert verify(directory).sound


def test_any_flipped_bit_is_found(directory: pathlib.Path, random_bytes: RandomBytes) -> None:
    save(state(), directory)
    file = data_file_of(directory)
    for bit in random_bytes.generator.integers(8 * file.stat().st_size, size=60):
        flip(file, int(bit))
        assert not verify(directory).sound
        flip(file, int(bit))


def test_bits_of_other_tensors_do_not_matter_to_a_load(directory: pathlib.Path) -> None:
    save(state(), directory)
    begin, end = regions(directory)["payload"]
    flip(data_file_of(directory), 4 * (begin + end))
    loaded = {"last": torch.zeros(500)}
    load(loaded, directory)
    assert_same(loaded, {"last": state()["last"]})


def test_nothing_damaged_gets_into_a_tensor(directory: pathlib.Path) -> None:
    save(state(), directory)
    begin, end = regions(directory)["payload"]
    place = (begin + end) // 2
    flip(data_file_of(directory), 8 * place)
    loaded = empty_like(state())
    with fails(CheckpointError, "large"):
        load(loaded, directory, verify="read")
    wanted, found = (
        tensor.numpy().view(np.uint8) for tensor in (state()["large"], loaded["large"])
    )
    assert np.flatnonzero((found != wanted) & (found != 0)).size == 0
    chunk = place // CHUNK_NBYTES * CHUNK_NBYTES
    assert not found[max(chunk, begin) - begin : chunk + CHUNK_NBYTES - begin].any()


def test_damage_is_found_before_any_tensor_is_touched(directory: pathlib.Path) -> None:
    save(state(), directory)
    begin, end = regions(directory)["payload"]
    flip(data_file_of(directory), 4 * (begin + end))
    loaded = empty_like(state())
    with fails(CheckpointError, "large"):
        load(loaded, directory, verify="before")
    assert_same(loaded, empty_like(state()))


def test_without_verification_damage_is_loaded(directory: pathlib.Path) -> None:
    save(state(), directory)
    begin, end = regions(directory)["payload"]
    flip(data_file_of(directory), 4 * (begin + end))
    loaded = empty_like(state())
    load(loaded, directory, verify="off")
    assert int((loaded["large"] != state()["large"]).sum()) == 1


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
@pytest.mark.parametrize("cut", [1, 100, 5000, 1 << 20])
@pytest.mark.parametrize("level", LEVELS)
def test_cut_short_files_are_found(
    directory: pathlib.Path, writer: Any, cut: int, level: str
) -> None:
    dcp.save(state(), storage_writer=writer(directory), no_dist=True)
    file = data_file_of(directory)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - cut)
    loaded = empty_like(state())
    with fails(CheckpointError, "cut short"):
        load(loaded, directory, verify=level)
    problems = verify(directory).problems
    assert problems
    assert all("cut short" in str(problem) for problem in problems)
    assert "last" in problems[-1].names  # type: ignore[union-attr]


# --- torch's checkpoints ---


def save_by_torch(path: pathlib.Path) -> pathlib.Path:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return data_file_of(path)


@pytest.mark.parametrize("level", ["read", "before"])
def test_flipped_bit_in_a_payload_of_torchs_is_found(directory: pathlib.Path, level: str) -> None:
    file = save_by_torch(directory)
    data = file.read_bytes()
    for name in ("first", "large", "transposed", "last"):
        place = (
            data.index(state()[name].t().contiguous().numpy().tobytes()[:64])
            if (name == "transposed")
            else data.index(state()[name].numpy().tobytes()[:64])
        )
        flip(file, 8 * place + 5)
        loaded = empty_like(state())
        with fails(CheckpointError, repr(name)):
            load(loaded, directory, verify=level)
        if level == "before":
            assert_same(loaded, empty_like(state()))
        (problem,) = verify(directory).problems
        assert problem.names == (name,)  # type: ignore[union-attr]
        flip(file, 8 * place + 5)
    assert verify(directory).sound


def test_flipped_bit_in_an_object_of_torchs_is_found(directory: pathlib.Path) -> None:
    file = save_by_torch(directory)
    place = file.read_bytes().index(b"some text")
    flip(file, 8 * place)
    with fails(CheckpointError, "'object.text'"):
        load(empty_like(state()), directory)
    assert not verify(directory).sound


def test_part_of_a_torch_tensor_is_verified_before_only(directory: pathlib.Path) -> None:
    file = save_by_torch(directory)
    wanted = state()["large"]
    flip(file, 8 * file.read_bytes().index(wanted.numpy().tobytes()[:64]))
    target = torch.zeros(1000)
    read_slices(directory, [("large", (5000,), (1000,), target)], "read")
    assert torch.equal(target, wanted[5000:6000])
    with pytest.raises(CheckpointError, match="'large'"):
        read_slices(directory, [("large", (5000,), (1000,), target)], "before")


def test_torchs_checkpoint_without_checksums_is_said_to_have_none(directory: pathlib.Path) -> None:
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always computes them")
    torch.serialization.set_crc32_options(False)
    try:
        save_by_torch(directory)
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(directory)
    assert report.sound
    assert {"first", "large"} <= set(report.unverified)
    for level in LEVELS:
        loaded = empty_like(state())
        load(loaded, directory, verify=level)
        assert_same(loaded, state())


def test_flips_after_which_torch_fails_are_found(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    small = {"a": torch.arange(5.0), "b": {"c": "text"}}
    dcp.save(small, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    file = data_file_of(directory)
    data = file.read_bytes()
    for info in read_metadata(directory / ".metadata").storage_data.values():
        blob = data[info.offset : info.offset + info.length]
        first, found = int(random_bytes.generator.integers(BITS_APART)), 0
        for bit in range(first, 8 * len(blob), BITS_APART):
            damaged = flipped(blob, bit)
            problem, verified = blobs.examine(io.BytesIO(damaged))
            if problem is None and verified:
                torch.load(io.BytesIO(damaged), weights_only=False)
            found += problem is not None
        assert blobs.examine(io.BytesIO(blob)) == (None, True)
        assert found > 8 * len(blob) // BITS_APART // 2


def test_flips_in_torchs_files_are_reported_and_never_a_traceback(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    small = {"a": torch.arange(5.0), "b": {"c": "text"}}
    dcp.save(small, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    # Python's pickle, with which torch reads metadata, may allocate all memory because of a single wrong number.
    readers = {
        data_file_of(directory): dcp.FileSystemReader,
        directory / ".metadata": FileSystemReader,
    }
    for file, reader in readers.items():
        for bit in random_bytes.generator.integers(8 * file.stat().st_size, size=60):
            flip(file, int(bit))
            report = verify(directory)
            loaded = empty_like(small)
            try:
                dcp.load(loaded, storage_reader=reader(directory), no_dist=True)
            except dcp.api.CheckpointException:
                assert report.problems or file.name in report.unverified
            flip(file, int(bit))
    assert run("verify", directory).exit_code == 0


def test_what_cannot_be_verified_is_named(directory: pathlib.Path) -> None:
    file = save_by_torch(directory)
    with file.open("ab") as stream:
        stream.write(b"more")
    nbytes = file.stat().st_size
    report = verify(directory)
    assert report.sound
    assert report.unverified == [".metadata", f"bytes {nbytes - 4} to {nbytes} of {file.name}"]
    result = run("verify", directory)
    assert "could not be verified, because they have no checksum: '.metadata'" in result.stdout
    assert "no problem found in the verified part" in result.stdout


def test_sizes_that_contradict_the_metadata_are_found(directory: pathlib.Path) -> None:
    save_by_torch(directory)
    metadata = metadata_of(directory)
    last = metadata.state_dict_metadata["last"]
    last.size = last.chunks[0].sizes = torch.Size([501])
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (problem,) = verify(directory).problems
    assert problem.names == ("last",)  # type: ignore[union-attr]
    assert "[500], but the metadata says [501]" in str(problem)


# --- verify() and the commands ---


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_sound_checkpoints_are_sound(
    directory: pathlib.Path, writer: Any, options: dict[str, Any]
) -> None:
    dcp.save(mixed_state(), storage_writer=writer(directory, **options), no_dist=True)
    calls: list[Progress] = []
    report = verify(directory, progress=calls.append)
    assert report.sound
    assert report.unverified == ([".metadata"] if writer is dcp.FileSystemWriter else [])
    sizes = [file.stat().st_size for file in directory.glob("*.distcp")]
    assert report.nbytes == sum(sizes)
    done = [(call.nbytes, call.files) for call in calls]
    assert done == sorted(done)
    assert calls[-1] == Progress(sum(sizes), sum(sizes), len(sizes), len(sizes))


@pytest.mark.parametrize("error", [RuntimeError("stop"), OSError(5, "stop")])
@pytest.mark.parametrize("name", ["ours", "torchs", "a.safetensors", "a.pt"])
def test_an_error_of_the_listener_is_raised_and_is_not_damage(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    dcp.save(mixed_state(), storage_writer=FileSystemWriter(directory / "ours"), no_dist=True)
    dcp.save(mixed_state(), storage_writer=dcp.FileSystemWriter(directory / "torchs"), no_dist=True)
    save_file({"a": torch.ones(9)}, directory / "a.safetensors")
    torch.save(torch.ones(9), directory / "a.pt")
    monkeypatch.setattr(progress, "_PAUSE_SECONDS", 0.0)
    errors = [error]

    def stop_once(_: Progress) -> None:
        if errors:
            raise errors.pop()

    with pytest.raises(type(error), match="stop"):
        tools.verify(directory / name, progress=stop_once)


def test_all_damage_is_reported(directory: pathlib.Path) -> None:
    save(state(), directory)
    begin, end = regions(directory)["payload"]
    for place in (begin, (begin + end) // 2, end - 1):
        flip(data_file_of(directory), 8 * place)
    assert len(verify(directory).problems) == 3


def test_missing_files_and_parts_are_reported(directory: pathlib.Path) -> None:
    save(state(), directory, single_file_per_rank=False)
    metadata = read_metadata(directory / ".metadata")
    ((_, info),) = [each for each in metadata.storage_data.items() if each[0].fqn == "large"]
    (directory / info.relative_path).unlink()
    (problem,) = verify(directory).problems
    assert isinstance(problem, OSError)
    assert info.relative_path in str(problem)
    metadata.storage_data = {
        index: info for index, info in metadata.storage_data.items() if index.fqn != "large"
    }
    pickled = pickle.dumps(metadata)
    (directory / ".metadata").write_bytes(pickled + trailer_of(pickled))
    nowhere, gone = verify(directory).problems
    assert isinstance(nowhere, CheckpointError)
    assert "'large'" in str(nowhere)
    assert isinstance(gone, OSError)  # its checksums are still there


def test_verify_command_of_a_sound_checkpoint(directory: pathlib.Path) -> None:
    save(state(), directory)
    result = run("verify", directory)
    assert result.exit_code == 0
    assert "no problem found" in result.stdout
    assert json.loads(run("verify", directory, "--json").stdout)["sound"] is True


def test_verify_command_names_tensor_file_and_bytes(directory: pathlib.Path) -> None:
    save(state(), directory)
    begin, end = regions(directory)["payload"]
    flip(data_file_of(directory), 4 * (begin + end))
    result = run("verify", directory)
    assert result.exit_code == 1
    line = re.search(r"damaged: bytes (\d+) to (\d+) of '(.*)' \('large'\)", result.stdout)
    assert line is not None
    assert int(line[1]) <= (begin + end) // 2 < int(line[2])
    assert line[3] == str(data_file_of(directory))
    found = json.loads(run("verify", directory, "--json").stdout)
    assert found["problems"][0]["names"] == ["large"]
    assert found["problems"][0]["begin"] == int(line[1])


@pytest.mark.parametrize("command", ["verify", "ls"])
def test_commands_fail_on_damaged_metadata(directory: pathlib.Path, command: str) -> None:
    save(state(), directory)
    flip(directory / ".metadata", 999)
    result = run(command, directory)
    assert result.exit_code == 1
    assert ".metadata" in (result.stderr if command == "ls" else result.stdout)


def test_ls_command_lists_what_there_is(directory: pathlib.Path) -> None:
    save(state(), directory)
    result = run("ls", directory, "--shards")
    assert result.exit_code == 0
    for text in ("large", "float32", "[100, 300]", "object.text", "4.2 MB", "6 entries"):
        assert text in result.stdout
    assert data_file_of(directory).name in result.stdout
    entries = json.loads(run("ls", directory, "--json").stdout)
    (large,) = [entry for entry in entries if entry["name"] == "large"]
    assert large["shape"] == [1 << 20]
    assert large["shards"][0]["sizes"] == [1 << 20]


def test_listing_has_the_shards_of_each_tensor(directory: pathlib.Path) -> None:
    save(state(), directory)
    entries = {entry.name: entry for entry in list_checkpoint(directory)}
    assert list(entries) == sorted(entries)
    first = entries["first"]
    assert (first.dtype, first.shape, first.nbytes) == ("float32", (100, 300), 120_000)
    (shard,) = first.shards
    assert shard.file == data_file_of(directory).name
    assert entries["object.text"].dtype is None


def test_random_data_files_are_no_checkpoint_that_loads(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    file = save_by_torch(directory)
    np.asarray(random_bytes(file.stat().st_size)).tofile(file)
    with fails(CheckpointError, file.name):
        load(empty_like(state()), directory)
