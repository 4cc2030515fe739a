"""`verify` and `ls` of single files: damage is found or harmless, tensors are named, no code of a pickle runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorferry.checkpoint import CheckpointError, progress, save, verify
from tensorferry.checkpoint.errors import NotACheckpointError
from tensorferry.checkpoint.progress import Progress
from tensorferry.checkpoint.tools import archives, entries
from tensorferry.checkpoint.zipformat import blobs, zips
from tensorferry.checkpoint.zipformat.unpickling import MalformedError, RefusedError
from tensorferry.transfer import piece_checksums
from tests.checkpoint.archives import filled, pickle_in, places
from tests.checkpoint.canary import nothing_happens
from tests.checkpoint.damage import BITS_APART, flip, run
from tests.checkpoint.golden.make import HERE, golden_state
from tests.checkpoint.hostile import CODES, mutated, name_of
from tests.support import commands
from tests.support.effort import examples

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes

GOLDEN = sorted(HERE.glob("*/object.pt"))
WRITERS = {"save": save, "torch.save": torch.save}


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(300.0), "bias": torch.arange(7, dtype=torch.int16)},
        "steps": [torch.ones(3, dtype=torch.bfloat16), 17],
        "text": "some text",
    }


# --- verify() ---


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_sound_files_are_sound_and_all_records_are_verified(
    directory: pathlib.Path, write: Any
) -> None:
    path = directory / "state.pt"
    write(state(), path)
    calls: list[Progress] = []
    report = verify(path, progress=calls.append)
    assert report.sound
    assert report.unverified == []
    assert report.nbytes == sum(place.nbytes for place in places(path.read_bytes()).values())
    assert report.entries == len(places(path.read_bytes()))
    nbytes = path.stat().st_size
    assert calls[-1] == Progress(nbytes, nbytes, 1, 1)
    assert verify(os.fsencode(path)).sound  # type: ignore[arg-type]


@pytest.mark.parametrize("path", GOLDEN, ids=[path.parent.name for path in GOLDEN])
def test_files_of_other_versions_are_verified_and_listed(path: pathlib.Path) -> None:
    assert verify(path).sound
    assert verify(path).unverified == []
    wanted = golden_state(path.parent.name)
    wanted |= {f"nested.{name}": value for name, value in wanted.pop("nested").items()}
    found = {entry.name: (entry.dtype, entry.shape) for entry in entries(path)}
    assert found == {
        name: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in wanted.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_flips_are_found_or_harmless(
    directory: pathlib.Path, write: Any, random_bytes: RandomBytes
) -> None:
    path = directory / "state.pt"
    write(state(), path)
    data = path.read_bytes()
    first, found = int(random_bytes.generator.integers(BITS_APART)), 0
    for bit in range(first, 8 * len(data), BITS_APART):
        flip(path, bit)
        try:
            report = verify(path)
        except CheckpointError as error:
            pytest.fail(f"bit {bit}: {error}")
        if report.sound:
            assert torch.equal(torch.load(path)["model"]["weight"], state()["model"]["weight"])
        for problem in report.problems:
            assert isinstance(problem, CheckpointError)
            assert problem.path == str(path)
        found += not report.sound
        flip(path, bit)
    assert (
        found > 8 * sum(place.nbytes for place in places(path.read_bytes()).values()) // BITS_APART
    )
    assert verify(path).sound


@pytest.mark.parametrize("record", ["data/0", "data/1", "data/2"])
def test_damaged_records_are_all_named_with_tensor_and_bytes(
    directory: pathlib.Path, record: str
) -> None:
    path = directory / "state.pt"
    save(state(), path)
    names = {"data/0": "model.weight", "data/1": "model.bias", "data/2": "steps.0"}
    damaged = [
        place for name, place in places(path.read_bytes()).items() if name in ("version", record)
    ]
    for place in damaged:
        flip(path, 8 * place.begin + 3)
    problems = verify(path).problems
    assert [(each.begin, each.end) for each in problems] == sorted(  # type: ignore[union-attr]
        (place.begin, place.begin + place.nbytes) for place in damaged
    )
    shown = run("verify", path)
    assert shown.exit_code == 1
    assert f"'archive/{record}', '{names[record]}'" in shown.stdout
    assert "'archive/version'" in shown.stdout


def test_a_damaged_header_does_not_hide_other_damage(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    save(state(), path)
    found = places(path.read_bytes())
    flip(path, 0)
    flip(path, 8 * found["data/0"].begin)
    first, second = verify(path).problems
    assert first.names == ("archive/data.pkl",)  # type: ignore[union-attr]
    assert second.names == ("archive/data/0",)  # type: ignore[union-attr]


def test_large_records_are_read_in_pieces(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "state.pt"
    save(state(), path)
    monkeypatch.setattr(progress, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(archives, "_PIECE_NBYTES", 100)
    monkeypatch.setattr(piece_checksums, "_BATCH_NBYTES", 250)
    calls: list[Progress] = []
    assert verify(path, progress=calls.append).sound
    done = [(call.nbytes, call.files) for call in calls]
    assert done == sorted(done)
    assert len(done) > 5
    flip(path, 8 * (places(path.read_bytes())["data/0"].begin + 555))
    (problem,) = verify(path).problems
    assert "model.weight" in str(problem)


@given(cut=st.integers(1, 4000))
@settings(max_examples=examples(60))
def test_torn_files_are_said_to_be_cut_short(directory: pathlib.Path, cut: int) -> None:
    path = directory / "state.pt"
    save(state(), path)
    os.truncate(path, max(600, path.stat().st_size - cut))
    (problem,) = verify(path).problems
    assert "cut short" in str(problem)
    with pytest.raises(CheckpointError, match="cut short"):
        entries(path)


def test_what_cannot_be_read_is_named_and_the_rest_is_verified(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "state.pt"
    save(state(), path)
    found = places(path.read_bytes())
    cut = found["data/1"].begin + 3
    # All records are read together, after another process has truncated the file.
    pieces = archives._pieces

    def truncated_pieces(places: list[zips.Span]) -> Any:
        os.truncate(path, cut)
        return pieces(places)

    monkeypatch.setattr(archives, "_pieces", truncated_pieces)
    problems = verify(path).problems
    assert all("it cannot be read" in str(problem) for problem in problems)
    names = [problem.names for problem in problems]  # type: ignore[union-attr]
    assert names[0] == ("archive/data/1", "model.bias")
    assert len(names) == sum(place.begin + place.nbytes > cut for place in found.values())


def test_what_stands_behind_the_end_is_told(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    save(state(), path)
    with path.open("ab") as stream:
        stream.write(b"more")
    (problem,) = verify(path).problems
    assert "there are 4 bytes after its end" in str(problem)


def test_records_behind_the_directory_are_damage(directory: pathlib.Path) -> None:
    """Their sizes need no bytes in the file, and would be read in endless pieces."""
    body = zips.pack_header(b"a/data.pkl", 5, 0, 0)
    entry = zips.pack_entry(b"a/data.pkl", 1 << 60, 0, 0)
    far = zips.pack_entry(b"a/version", 1, 0, 0)
    wide = zips.ENTRY.unpack(far[: zips.ENTRY.size])
    extra = struct.pack("<2HQ", 1, 8, (1 << 60) + len(body))
    far = zips.ENTRY.pack(*wide[:11], len(extra), *wide[12:16], zips.MAX_32) + b"a/version" + extra
    body = body[:18] + b"\xff" * 8 + body[26:]
    directory_bytes = entry + far
    path = directory / "far.pt"
    path.write_bytes(body + directory_bytes + zips.pack_ends(2, len(body), len(directory_bytes)))
    assert not verify(path).sound
    with pytest.raises(CheckpointError):
        entries(path)


def test_files_without_checksums_are_said_to_have_none(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(path)
    assert report.sound
    assert report.nbytes == 0
    assert len(report.unverified) == report.entries
    assert "state/data/0 (model.weight)" in report.unverified
    assert "nothing could be verified" in run("verify", path).stdout


def test_records_of_more_than_4_gib_are_verified(directory: pathlib.Path) -> None:
    from tensorferry._core import crc32, crc32_combine
    from tensorferry.checkpoint.zipformat.archive import tensor_archive

    nbytes = (1 << 32) + 5
    archive = tensor_archive(torch.uint8, (nbytes,), (1,))
    crc, piece = crc32(bytes(5)), crc32(bytes(1 << 20))
    for _ in range(1 << 12):
        crc = crc32_combine(crc, piece, 1 << 20)
    path = directory / "large.pt"
    with path.open("wb") as stream:  # a hole
        stream.write(archive.pieces[0])
        stream.seek(nbytes, io.SEEK_CUR)
        stream.write(filled(archive.pieces[1], archive.fields(1, [0]), [crc]))
    report = verify(path)
    assert report.sound
    assert report.nbytes > nbytes
    assert entries(path)[0].nbytes == nbytes


# --- files of other formats ---


def of_the_old_format(path: pathlib.Path) -> None:
    torch.save(state(), path, _use_new_zipfile_serialization=False)


def of_an_archive(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text", b"text")


def of_torchscript(path: pathlib.Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


OTHERS = {
    "old": (of_the_old_format, "has no checksums"),
    "archive": (of_an_archive, "not one of torch.save"),
    "torchscript": (of_torchscript, "TorchScript"),
    "text": (
        lambda path: path.write_text("text"),
        "not a file of torch.save or safetensors",
    ),
    "empty": (lambda path: path.touch(), "it is empty"),
    "folder": (lambda path: path.mkdir(), "no checkpoint in the folder .* it is empty"),
    "pipe": (os.mkfifo, "neither a file nor a folder"),
    "nothing": (lambda path: None, "there is nothing at"),
    "dead link": (lambda path: path.symlink_to("nowhere"), "a broken symbolic link"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_what_is_something_else_is_told(directory: pathlib.Path, make: Any, message: str) -> None:
    path = directory / "it"
    make(path)
    for look in (verify, entries):
        with pytest.raises((FileNotFoundError, NotACheckpointError), match=message):
            look(path)
    for command in ("verify", "ls"):
        result = run(command, path)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_a_folder_says_what_may_have_been_meant(directory: pathlib.Path) -> None:
    (directory / "a.pt").touch()
    with pytest.raises(FileNotFoundError, match=r"pass one of its files instead: 'a.pt'"):
        verify(directory)
    (directory / "__0_0.distcp").touch()
    with pytest.raises(FileNotFoundError, match=r"but '__0_0.distcp' \(an unfinished save"):
        verify(directory)
    with pytest.raises(NotACheckpointError, match="pass the folder"):
        verify(directory / "__0_0.distcp")
    for number in range(5):
        (directory / f"step-{number}").mkdir()
        (directory / f"step-{number}" / ".metadata").touch()
    with pytest.raises(FileNotFoundError, match=r"'step-0', 'step-1', 'step-2' and 2 more"):
        verify(directory)


@pytest.mark.parametrize("command", ["verify", "ls"])
@pytest.mark.parametrize("kind", ["nothing", "folder", "text", "old"])
def test_a_wrong_path_is_told_before_torch_is_imported(
    directory: pathlib.Path, command: str, kind: str
) -> None:
    path = directory / "it"
    make, _ = OTHERS[kind]
    make(path)  # type: ignore[operator]
    assert "torch" not in modules_of(command, path, 2)


def test_a_sound_file_is_verified_without_torch(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    save(state(), path)
    assert "torch" not in modules_of("verify", path, 0)


def modules_of(command: str, path: pathlib.Path, code: int) -> list[str]:
    """Return the modules that a command imports."""
    program = (
        "import sys\nfrom tensorferry.cli.app import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    print(end.code, *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found, *modules = done.stdout.splitlines()[-1].split()
    assert int(found) == code, done.stderr
    return modules


def test_a_bar_is_for_terminals_alone(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    save(state(), path)
    command = [sys.executable, "-m", "tensorferry", "verify", str(path)]
    env = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.stderr == ""
    assert "verifying" not in done.stdout
    assert b"verifying" in commands.on_terminal(command, env=env, streams=["stderr"])


# --- ls ---


def test_tensors_are_listed_with_their_places(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    base = torch.arange(20.0)
    save(
        {"whole": base, "part": base[4:10], "steps": base[::3], "spread": base[:1].expand(9)}, path
    )
    found = {entry.name: entry for entry in entries(path)}
    begin = places(path.read_bytes())["data/0"].begin
    for name, first, last in (
        ("whole", 0, 20),
        ("part", 4, 10),
        ("steps", 0, 19),
        ("spread", 0, 1),
    ):
        (shard,) = found[name].shards
        assert (shard.file, shard.begin, shard.end) == (
            "state.pt",
            begin + 4 * first,
            begin + 4 * last,
        )
    assert found["spread"].nbytes == 36
    shown = json.loads(run("ls", path, "--json").stdout)
    assert [each["name"] for each in shown] == ["whole", "part", "steps", "spread"]


class Holder:
    """Of a class that a listing must not make."""

    def __init__(self) -> None:
        self.inner = torch.ones(2)


def test_tensors_within_modules_and_other_classes_are_listed(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    sparse = torch.eye(3).to_sparse()
    torch.save({"module": torch.nn.Linear(2, 3), "holder": Holder(), "sparse": sparse}, path)
    found = {entry.name: entry.shape for entry in entries(path)}
    assert found["module._parameters.weight"] == (3, 2)
    assert found["holder.inner"] == (2,)
    assert [shape for name, shape in found.items() if name.startswith("sparse")] == [(2, 3), (3,)]


def test_payloads_that_no_name_is_known_of_are_listed(directory: pathlib.Path) -> None:
    path = directory / "state.pt"
    torch.save({"storage": torch.ones(5).untyped_storage()}, path)
    (entry,) = entries(path)
    assert (entry.name, entry.dtype, entry.nbytes) == ("state/data/0", None, 20)


def archive_of(pickled: bytes, **records: bytes) -> bytes:
    """A file with a pickle, and payloads."""
    body, directory, count = bytearray(), bytearray(), 0
    for name, data in {"data.pkl": pickled, **records}.items():
        full, crc = f"archive/{name}".encode(), zlib.crc32(data)
        directory += zips.pack_entry(full, len(data), crc, len(body))
        body += zips.pack_header(full, len(data), crc, len(body)) + data
        count += 1
    return bytes(body + directory + zips.pack_ends(count, len(body), len(directory)))


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_hostile_pickles_do_nothing(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: bytes
) -> None:
    path = directory / "state.pt"
    (directory / "here").mkdir()
    monkeypatch.chdir(directory / "here")
    path.write_bytes(archive_of(b"\x80\2" + code + b"."))
    verify(path), entries(warm_file(directory))  # imports
    with nothing_happens():
        assert verify(path).sound
        with contextlib.suppress(CheckpointError):
            entries(path)


def warm_file(directory: pathlib.Path) -> pathlib.Path:
    save(state(), directory / "warm.pt")
    return directory / "warm.pt"


def names_in(pickled: bytes) -> list[str]:
    """Return the names of the tensors in a pickle."""
    root = blobs.Describer(pickled, archives._find_any).load()
    return [name for name, _ in archives._Tree("file", None).tensors(root)]


def test_names_in_a_pickle_take_no_more_memory_than_it_is_long() -> None:
    tensor = (
        name_of("torch._utils", "_rebuild_tensor_v2")
        + b"((X\x07\0\0\0storage"
        + name_of("torch", "FloatStorage")
        + b"X\1\0\0\0"
        + b"0X\3\0\0\0cpuK\1tQK\0))\x89}tRq\1"
    )
    key = b"X" + (1 << 20).to_bytes(4, "little") + b"k" * (1 << 20) + b"q\2"
    # Lists in lists, each twice, and a key of a MiB at each level.
    code = b"\x80\2" + tensor + b"0" + key + b"0h\1"
    level = b"q\3}(h\2h\3X\1\0\0\0bh\3u"
    found = names_in(code + 2 * level + b".")
    assert [*map(len, found)] == [256, 256, 256, len("b.b")]
    with pytest.raises(CheckpointError, match="more than a million"):
        names_in(code + 90 * level + b".")
    nested = b"\x80\2" + b"]" * 200_000 + b"a" * 199_999 + b"."
    assert names_in(nested) == []
    many = b"\x80\2" + tensor + b"q\1](" + b"h\1" * 1_000_001 + b"e."
    with pytest.raises(CheckpointError, match="more than a million"):
        names_in(many)


@pytest.mark.parametrize(
    ("offset", "sizes", "strides"),
    [
        ("K\5", "K\1\x85", "K\1\x85"),
        ("K\0", "K\6\x85", "K\1\x85"),
        ("K\0", "\x8a\x08" + "\xff" * 7 + "\x7f\x85", "K\0\x85"),
        ("K\0", "\x8a\x09" + "\xff" * 8 + "\0\x85", "K\0\x85"),
    ],
)
def test_tensors_beyond_their_storage_are_refused(
    directory: pathlib.Path, offset: str, sizes: str, strides: str
) -> None:
    code = name_of("torch._utils", "_rebuild_tensor_v2") + b"((X\x07\0\0\0storage"
    code += name_of("torch", "FloatStorage") + b"X\1\0\0\x000X\3\0\0\0cpuK\5tQ"
    code += (offset + sizes + strides).encode("latin-1") + b"\x89}tR."
    path = directory / "state.pt"
    path.write_bytes(archive_of(b"\x80\2" + code, **{"data/0": bytes(20)}))
    with pytest.raises(CheckpointError, match=r"beyond its storage|larger than"):
        entries(path)


def test_mutated_files_are_looked_at_without_a_traceback(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "state.pt"
    save(state(), path)
    data = path.read_bytes()
    for _ in range(200):
        path.write_bytes(mutated(data, random_bytes.generator))
        for look in (verify, entries):
            with contextlib.suppress(CheckpointError):
                look(path)
    for _ in range(200):
        pickled = mutated(pickle_in(data), random_bytes.generator)
        with contextlib.suppress(CheckpointError, MalformedError, RefusedError):
            names_in(pickled)
