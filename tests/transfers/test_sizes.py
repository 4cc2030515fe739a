"""Rows of DeepNVMe's fault table about sizes, offsets, alignment, and the division of a transfer into blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tests.support.data import RandomBytes, aligned
from tests.support.expect import assert_equal, assert_works, contents, short_read
from tests.support.optional import torch

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle

Handle = tensorferry.aio_handle


@pytest.mark.covers("unaligned_size_write_locked_1000003", "unaligned_size_read_1000003")
def test_a_locked_tensor_of_an_odd_size_is_written_and_read(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    locked = handle.new_cpu_locked_tensor(1_000_003, torch.empty(0, dtype=torch.uint8))
    source = random_bytes(1_000_003)
    locked.copy_(torch.from_numpy(source))
    assert handle.sync_pwrite(locked, str(path)) == 1
    assert_equal(contents(path), source)
    locked.zero_()
    assert handle.sync_pread(locked, str(path)) == 1
    assert_equal(locked, source)
    handle.free_cpu_locked_tensor(locked)


@pytest.mark.covers(
    "unaligned_size_write_unpinned_1000003",
    "unaligned_size_write_3MB_plus7",
    "unaligned_size_read_1000003",
)
@pytest.mark.parametrize("nbytes", [1, 511, 4097, 1_000_003, (3 << 20) + 7])
@pytest.mark.parametrize("blocking", [True, False])
def test_any_size_is_written_and_read(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    nbytes: int,
    blocking: bool,
) -> None:
    path = directory / "file"
    source, target = random_bytes(nbytes), np.zeros(nbytes, np.uint8)
    if blocking:
        assert handle.sync_pwrite(source, str(path)) == 1
        assert handle.sync_pread(target, str(path)) == 1
    else:
        handle.async_pwrite(source, str(path))
        assert handle.wait() == 1
        handle.async_pread(target, str(path))
        assert handle.wait() == 1
    assert path.stat().st_size == nbytes
    assert_equal(contents(path), source)
    assert_equal(target, source)


@pytest.mark.covers("unaligned_size_read_of_bigger_file")
def test_an_odd_number_of_bytes_of_a_bigger_file_is_read(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(2_000_000)
    data.tofile(directory / "file")
    target = np.full(1_000_003 + 64, 7, np.uint8)
    assert handle.sync_pread(target[:1_000_003], str(directory / "file")) == 1
    assert_equal(target[:1_000_003], data[:1_000_003])
    assert (target[1_000_003:] == 7).all()


@pytest.mark.covers("unaligned_offset7_read", "offset512_on_512_sector")
@pytest.mark.parametrize("offset", [1, 7, 511, 512, 513, 4095, 65_537])
@pytest.mark.parametrize("nbytes", [1, 4096, 300_001])
def test_any_offset_is_read(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    offset: int,
    nbytes: int,
) -> None:
    data = random_bytes(500_000)
    data.tofile(directory / "file")
    target = np.full(nbytes + 2, 7, np.uint8)
    assert handle.sync_pread(target[1:-1], str(directory / "file"), offset) == 1
    assert_equal(target[1:-1], data[offset : offset + nbytes])
    assert target[0] == target[-1] == 7


@pytest.mark.covers("unaligned_offset7_write", "offset512_on_512_sector")
@pytest.mark.parametrize("offset", [1, 7, 511, 512, 513, 4095, 65_537])
@pytest.mark.parametrize("nbytes", [1, 4096, 300_001])
def test_any_offset_is_written_and_the_neighbours_stay(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    offset: int,
    nbytes: int,
) -> None:
    path = directory / "file"
    wanted = random_bytes(500_000)
    wanted.tofile(path)
    source = random_bytes(nbytes)
    assert handle.sync_pwrite(source, str(path), offset) == 1
    wanted[offset : offset + nbytes] = source
    assert_equal(contents(path), wanted)


@pytest.mark.covers("unaligned_offset7_write")
def test_a_new_file_written_at_an_offset_begins_with_zeros(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    source = random_bytes(100_003)
    assert handle.sync_pwrite(source, str(path), 70_007) == 1
    assert_equal(contents(path), np.concatenate([np.zeros(70_007, np.uint8), source]))


@pytest.mark.covers("unaligned_buffer_pointer", "read_alignment_luck")
@pytest.mark.parametrize("misalignment", [0, 1, 4, 64, 256, 511, 512, 4095])
def test_memory_of_any_alignment_is_read_into_and_written_from(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, misalignment: int
) -> None:
    path = directory / "file"
    source = random_bytes.at(2_000_003, misalignment)
    guarded = aligned(source.size + 128, misalignment - 64)
    guarded[:] = 7
    assert handle.sync_pwrite(source, str(path)) == 1
    assert_equal(contents(path), source)
    assert handle.sync_pread(guarded[64:-64], str(path)) == 1
    assert_equal(guarded[64:-64], source)
    assert (guarded[:64] == 7).all()
    assert (guarded[-64:] == 7).all()


@pytest.mark.covers("unaligned_buffer_pointer")
def test_a_view_into_a_locked_tensor_is_read_into(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4096)
    data.tofile(directory / "file")
    locked = handle.new_cpu_locked_tensor(8192, torch.empty(0, dtype=torch.uint8))
    locked.fill_(7)
    view = locked[4:4100]
    assert handle.sync_pread(view, str(directory / "file")) == 1
    assert_equal(view, data)
    assert int(locked[:4].sum()) == 28
    assert int(locked[4100:].sum()) == 7 * 4092
    handle.free_cpu_locked_tensor(locked)


@pytest.mark.covers("read_alignment_luck")
def test_the_read_method_fills_ordinary_tensors_wherever_they_lie(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4096)
    data.tofile(directory / "file")
    keep = []
    for index in range(50):
        target = torch.zeros(4096, dtype=torch.uint8)
        assert handle.read(target, str(directory / "file")) == 0
        assert_equal(target, data)
        keep += [target, torch.zeros(index + 1)]


@pytest.mark.covers(
    "not_divisible_by_parallelism",
    "divisible_but_slice_unaligned",
    "divisible_but_slice_unaligned_1000000_T8",
)
@pytest.mark.parametrize(
    ("nbytes", "parallelism"),
    [(1_000_003, 4), (4608, 4), (4608, 2), (1_000_000, 8), (3, 8), (8 << 20, 3)],
)
def test_the_parallelism_need_not_divide_the_size(
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    nbytes: int,
    parallelism: int,
) -> None:
    handle = make_handle(intra_op_parallelism=parallelism)
    path = directory / "file"
    source, target = random_bytes(nbytes), np.zeros(nbytes, np.uint8)
    assert handle.sync_pwrite(source, str(path)) == 1
    assert_equal(contents(path), source)
    assert handle.sync_pread(target, str(path)) == 1
    assert_equal(target, source)


@pytest.mark.covers("overflow_block_x_qd")
@pytest.mark.parametrize("queue_depth", [1, 4, 32])
def test_a_read_never_writes_past_the_end_of_its_view(
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    queue_depth: int,
) -> None:
    handle = make_handle(block_size=8 << 20, queue_depth=queue_depth)
    path = directory / "file"
    data = random_bytes(32 << 20)
    data.tofile(path)
    buffer = aligned(40 << 20)
    buffer[:] = 7
    view = buffer[: 24 << 20]
    assert handle.sync_pread(view, str(path)) == 1
    assert_equal(view, data[: 24 << 20])
    assert (buffer[24 << 20 :] == 7).all()
    assert handle.sync_pwrite(view, str(directory / "view")) == 1
    assert_equal(contents(directory / "view"), view)


@pytest.mark.covers("parallelism_zero", "parallelism_negative", "block_size_zero")
@pytest.mark.covers("queue_depth_zero", "queue_depth_zero_overlap")
@pytest.mark.parametrize(
    "name", ["intra_op_parallelism", "num_threads", "block_size", "queue_depth"]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_limit_below_one_is_a_value_error(name: str, overlap: bool) -> None:
    told = "intra_op_parallelism" if name == "num_threads" else name
    for value in (0, -1, -(1 << 40)):
        with pytest.raises(ValueError, match=f"{told}: {value} is not between 1 and"):
            tensorferry.aio_handle(overlap_events=overlap, **{name: value})  # type: ignore[arg-type]


@pytest.mark.covers("block_size_unaligned_1000")
@pytest.mark.parametrize("block_size", [1, 1000, 4095, 1_048_577])
def test_any_block_size_works(
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    block_size: int,
) -> None:
    handle = make_handle(block_size=block_size)
    path = directory / "file"
    source, target = random_bytes(200_003), np.zeros(200_003, np.uint8)
    assert handle.sync_pwrite(source, str(path), 5) == 1
    assert_equal(contents(path)[5:], source)
    assert handle.sync_pread(target, str(path), 5) == 1
    assert_equal(target, source)


@pytest.mark.covers("validate_true")
@pytest.mark.parametrize("nbytes", [4096, 1_000_003])
def test_validation_passes_on_a_sound_drive(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, nbytes: int
) -> None:
    path = directory / "file"
    source, target = random_bytes(nbytes), np.zeros(nbytes, np.uint8)
    assert handle.pwrite(source, str(path), True, False) == 1
    assert handle.pread(target, str(path), True, False) == 1
    assert_equal(target, source)
    assert handle.write(source, str(path), True) == 0
    assert handle.read(target, str(path), True) == 0
    assert handle.pwrite(source, str(path), True, **{"async": True}) == 0
    assert handle.wait() == 1


@pytest.mark.covers("read_method")
def test_the_read_and_write_methods_return_zero(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    source, target = random_bytes(1 << 20), np.zeros(1 << 20, np.uint8)
    assert handle.write(source, str(path)) == 0
    assert handle.read(target, str(path)) == 0
    assert_equal(target, source)


@pytest.mark.covers("read_method_offset")
def test_the_read_method_reads_at_an_offset_and_never_pads_with_zeros(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    data = random_bytes(16_384)
    data.tofile(path)
    target = np.full(12_288, 7, np.uint8)
    assert handle.read(target, str(path), False, 4096) == 0
    assert_equal(target, data[4096:])
    whole = np.full(16_384, 7, np.uint8)
    with short_read(path, expected=16_384):
        handle.read(whole, str(path), file_offset=4096)
    assert_works(handle, directory)


@pytest.mark.covers("read_method_unaligned_pageable", "read_method_smaller_buffer")
@pytest.mark.covers("aio_read_smaller_buffer", "aio_rw")
@pytest.mark.parametrize("misalignment", [0, 64, 100])
@pytest.mark.parametrize("nbytes", [1000, 4096, 1_000_003])
def test_the_read_method_fills_a_buffer_smaller_than_the_file(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    misalignment: int,
    nbytes: int,
) -> None:
    path = directory / "file"
    data = random_bytes(1_000_003)
    assert handle.write(data, str(path)) == 0
    target = aligned(nbytes, misalignment)
    assert handle.read(target, str(path)) == 0
    assert_equal(target, data[:nbytes])
