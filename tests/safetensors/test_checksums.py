"""Files of checksums next to safetensors files: their contents, their use, and the handling of bad ones."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy

import tensorferry
from tensorferry.safetensors import checksums, header, index
from tensorferry.safetensors.errors import SafetensorError
from tests.support.data import crcs
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes
    from tests.support.faultfs import FaultFS

CHUNK = 4096


@pytest.fixture
def model(directory: pathlib.Path, random_bytes: RandomBytes) -> pathlib.Path:
    return saved(directory, random_bytes)


def saved(folder: pathlib.Path, random_bytes: RandomBytes) -> pathlib.Path:
    path = folder / "model.safetensors"
    tensors = {f"t{number}": random_bytes(10_000 + number) for number in range(7)}
    safetensors.numpy.save_file(tensors, path, {"format": "np"})
    return path


def kept(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".crc32")


# --- what they are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_nbytes", [4096, 5000, 256 << 10, 4 << 20])
def test_checksums_are_those_of_the_files_chunks(model: pathlib.Path, chunk_nbytes: int) -> None:
    assert checksums.write(model, chunk_nbytes=chunk_nbytes) == [str(kept(model))]
    found = checksums.read(model)
    data = model.read_bytes()
    assert found.chunk_nbytes == chunk_nbytes
    assert found.chunks == crcs(data, chunk_nbytes)
    assert found.nbytes == len(data)
    with tensorferry.open(model) as file:
        assert found.header_nbytes == header.read(file).nbytes
    assert found.header_crc32 == zlib.crc32(data[: found.header_nbytes])
    assert {each.name for each in model.parent.iterdir()} == {model.name, kept(model).name}


def test_checksums_of_a_file_that_is_replaced_meanwhile_do_not_stay(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checksums.keep

    def keep(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        safetensors.numpy.save_file({"new": np.zeros(9)}, model.with_name("new"))
        model.with_name("new").rename(model)

    monkeypatch.setattr(checksums, "keep", keep)
    with pytest.raises(SafetensorError, match="changed while"):
        checksums.write(model)
    assert not kept(model).exists()


def test_several_files_are_written_at_once_and_progress_is_told(model: pathlib.Path) -> None:
    other = model.with_name("empty.safetensors")
    safetensors.numpy.save_file({}, other)
    told: list[int] = []
    assert checksums.write([model, os.fsencode(other)], progress=told.append) == [
        str(kept(model)),
        str(kept(other)),
    ]
    assert sum(told) == model.stat().st_size + other.stat().st_size
    assert checksums.read(other).chunks == [zlib.crc32(other.read_bytes())]


def test_files_of_many_batches_are_read_in_order(directory: pathlib.Path) -> None:
    path = directory / "large.safetensors"
    array = np.arange(20 << 20, dtype=np.uint32)
    safetensors.numpy.save_file({"a": array}, path)
    checksums.write(path)
    assert checksums.read(path).chunks == crcs(path.read_bytes(), checksums.CHUNK_NBYTES)


def test_a_part_is_read_with_the_checksums_that_cover_it(model: pathlib.Path) -> None:
    checksums.write(model, chunk_nbytes=CHUNK)
    sums = checksums.read(model)
    with tensorferry.open(model) as file:
        for tensor in header.read(file).tensors.values():
            begin, end, expected = sums.covering(tensor.begin, tensor.end)
            assert begin <= tensor.begin
            assert tensor.end <= end
            array = np.zeros(tensor.nbytes, np.uint8)
            wanted = [tensor.begin - begin, array, end - tensor.end]
            check = tensorferry.Checksums(CHUNK, expected=expected)
            file.read(wanted, begin, checksums=check)
            assert array.tobytes() == model.read_bytes()[tensor.begin : tensor.end]
    assert sums.covering(0, 0) == (0, 0, [])
    assert sums.covering(0, sums.nbytes) == (0, sums.nbytes, sums.chunks)


def test_a_flipped_bit_reaches_no_array(model: pathlib.Path) -> None:
    checksums.write(model, chunk_nbytes=CHUNK)
    sums = checksums.read(model)
    with tensorferry.open(model) as file:
        tensor = header.read(file).tensors["t3"]
    flip(model, tensor.begin + 5000)
    begin, end, expected = sums.covering(tensor.begin, tensor.end)
    array = np.zeros(end - begin, np.uint8)
    check = tensorferry.Checksums(CHUNK, expected=expected)
    with pytest.raises(tensorferry.ChecksumError) as caught:
        tensorferry.read(model, array, begin, checksums=check)
    assert caught.value.offset == (tensor.begin + 5000) // CHUNK * CHUNK
    at = caught.value.offset - begin
    assert not array[at : at + CHUNK].any()


def flip(path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_saving_may_hand_its_own_checksums_over(model: pathlib.Path) -> None:
    with tensorferry.open(model) as file:
        taken = checksums.compute(file, chunk_nbytes=CHUNK)
    checksums.keep(model, taken, sync=False)
    assert checksums.read(os.fsencode(model)) == taken


# --- what goes wrong as they are taken ---------------------------------------------------------------------------


def test_a_file_that_changes_meanwhile_gets_none_and_old_ones_stay(model: pathlib.Path) -> None:
    checksums.write(model)
    before = kept(model).read_bytes()
    for change in (lambda: os.truncate(model, 100), lambda: os.utime(model, (1, 1))):
        with pytest.raises(SafetensorError, match="changed while"):
            checksums.write(model, progress=lambda _, change=change: change())  # type: ignore[misc]
        assert kept(model).read_bytes() == before
        if model.stat().st_size == 100:
            model.unlink()
            safetensors.numpy.save_file({"a": np.zeros(9, np.uint8)}, model)


def test_what_is_no_safetensors_file_gets_none(directory: pathlib.Path) -> None:
    path = directory / "x.safetensors"
    path.write_bytes(b"something else, without a header")
    with pytest.raises(SafetensorError, match=r"x\.safetensors"):
        checksums.write(path)
    assert not kept(path).exists()


@pytest.mark.parametrize("chunk_nbytes", [0, 1, 4095, (4 << 20) + 1])
def test_chunks_of_another_size_are_refused(model: pathlib.Path, chunk_nbytes: int) -> None:
    with pytest.raises(ValueError, match="chunk_nbytes"):
        checksums.write(model, chunk_nbytes=chunk_nbytes)
    assert not kept(model).exists()


def test_a_read_that_fails_is_raised_and_narrowed_down_for_those_who_ask(
    faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    saved(faultfs.backing, random_bytes)  # below the mount, so the mount has no cached pages of it
    model = faultfs.path / "model.safetensors"
    nbytes = model.stat().st_size
    faultfs.order(Fault("read", start=5 * CHUNK, end=5 * CHUNK + 1, error=errno.EIO))
    with pytest.raises(OSError) as caught:
        checksums.write(model, chunk_nbytes=CHUNK)
    assert caught.value.errno == errno.EIO
    assert not kept(model).exists()
    with tensorferry.open(model, direct=True) as file:
        found = list(checksums.chunk_crcs(file, nbytes, CHUNK))
    assert [(begin, end) for begin, end, each in found if isinstance(each, OSError)] == [
        (5 * CHUNK, 6 * CHUNK)
    ]
    assert [begin for begin, _, _ in found[1:]] == [end for _, end, _ in found[:-1]]


# --- bad ones ----------------------------------------------------------------------------------------------------


def test_none_is_file_not_found(model: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        checksums.read(model)
    assert caught.value.filename == str(kept(model))


def test_those_of_a_file_of_another_size_are_refused(model: pathlib.Path) -> None:
    checksums.write(model)
    os.truncate(model, model.stat().st_size - 1)
    with pytest.raises(SafetensorError, match="cut short or replaced"):
        checksums.read(model)


def test_any_flipped_bit_of_them_is_found(model: pathlib.Path) -> None:
    checksums.write(model)
    data = kept(model).read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        kept(model).write_bytes(changed)
        with pytest.raises(SafetensorError, match=r"model\.safetensors"):
            checksums.read(model)


def test_any_shortened_ones_are_found(model: pathlib.Path) -> None:
    checksums.write(model)
    data = kept(model).read_bytes()
    for nbytes in range(len(data) - 1):  # the last byte is the end of the line
        kept(model).write_bytes(data[:nbytes])
        with pytest.raises(SafetensorError):
            checksums.read(model)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("version", 2, "have version 2"),
        ("version", True, "have version True"),
        ("nbytes", -1, "nbytes: -1 is not"),
        ("nbytes", 1e5, "nbytes: 1"),
        ("nbytes", 10**400, "nbytes: 1000"),
        ("header_nbytes", 7, "header_nbytes: 7 is out of range"),
        ("header_nbytes", 1 << 40, "header_nbytes: .* is out of range"),
        ("chunk_nbytes", 0, "chunk_nbytes: 0 is out of range"),
        ("chunk_nbytes", 4095, "chunk_nbytes: 4095 is out of range"),
        ("chunk_nbytes", 1 << 62, "chunk_nbytes: 4611686018427387904 is out of range"),
        ("chunks_crc32", "", "are not"),
        ("chunks_crc32", "0" * 8 * 10_000, "are not|longer|more than"),
        ("chunks_crc32", None, "are not"),
        ("chunks_crc32", ["00000000"], "are not"),
        ("header_crc32", "0000 000", "not hexadecimal digits"),
        ("header_crc32", "0000000g", "not hexadecimal digits"),
        ("header_crc32", "\u0660" * 8, "not hexadecimal digits"),
    ],
)
def test_hostile_ones_are_refused(model: pathlib.Path, field: str, value: Any, reason: str) -> None:
    checksums.write(model)
    content = json.loads(kept(model).read_bytes())
    content[field] = value
    content["crc32"] = checksums._crc_of_fields(content)  # a hostile file has a correct CRC-32
    kept(model).write_text(json.dumps(content))
    with pytest.raises(SafetensorError, match=reason) as caught:
        checksums.read(model)
    assert caught.value.path == str(kept(model))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"null", b"{}", b"[" * 100_000, b"9" * 5000, b'{"a":1', b"\0" * 9000],
)
def test_what_are_no_checksums_are_none(model: pathlib.Path, content: bytes) -> None:
    kept(model).write_bytes(content)
    with pytest.raises(SafetensorError):
        checksums.read(model)


def test_more_than_there_can_be_is_not_read(model: pathlib.Path) -> None:
    kept(model).touch()
    os.truncate(kept(model), 1 << 40)
    with pytest.raises(SafetensorError, match="has 1099511627776 bytes, more than"):
        checksums.read(model)


def test_pipes_and_folders_are_not_waited_for(model: pathlib.Path) -> None:
    os.mkfifo(kept(model))
    with pytest.raises(OSError):
        checksums.read(model)
    kept(model).unlink()
    kept(model).mkdir()
    with pytest.raises(OSError):
        checksums.read(model)


# --- indexes -----------------------------------------------------------------------------------------------------


def test_an_index_says_which_file_has_which_tensor(directory: pathlib.Path) -> None:
    path = directory / "model.safetensors.index.json"
    path.write_text('{"metadata": {"total_size": 3}, "weight_map": {"a": "x.safetensors"}}')
    assert index.read(path) == {"a": "x.safetensors"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not an index"),
        ("[]", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ("[" * 100_000, "not an index"),
        ('{"weight_map": {"a": 1}}', "tensor 'a': its file is 1, which is not a file name"),
        ('{"weight_map": {"a": ""}}', "not a file name"),
        ('{"weight_map": {"a": ".."}}', "not a file name"),
        ('{"weight_map": {"a": "../x"}}', "not in the folder of the index"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not in the folder of the index"),
        ('{"weight_map": {"a": "x\\u0000"}}', "not in the folder of the index"),
    ],
)
def test_an_index_of_an_attacker_is_refused(
    directory: pathlib.Path, content: str, reason: str
) -> None:
    path = directory / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(SafetensorError, match=reason):
        index.read(path)


def test_deep_nesting_is_an_error_however_deep_python_may_go(directory: pathlib.Path) -> None:
    path = directory / "model.safetensors.index.json"
    path.write_bytes(b"[" * 20_000_000)
    program = (
        "import sys; sys.setrecursionlimit(10**9)\n"
        "from tensorferry.safetensors import errors, index\n"
        "try: index.read(sys.argv[1])\n"
        "except errors.SafetensorError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert "nested too deep" in run.stdout
