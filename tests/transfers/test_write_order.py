"""Writes to one file at the same time: beside each other, over each other, failing, abandoned."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tests.support.expect import assert_equal, assert_works, contents, storage_error
from tests.support.faultfs import Fault, FaultFS
from tests.support.forks import assert_exits_with_zero, in_child
from tests.support.threads import in_threads

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes

Handle = tensorferry.aio_handle

ROUNDS = 12
PIECES = 40


@pytest.mark.parametrize("unit", [1, 512, 4096])
@pytest.mark.parametrize("exists", [False, True])
def test_pieces_that_lie_side_by_side_never_touch_each_other(
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    unit: int,
    exists: bool,
) -> None:
    handle = make_handle(block_size=64 << 10, intra_op_parallelism=2)
    random = random_bytes.generator
    path = directory / "file"
    for _ in range(ROUNDS):
        path.unlink(missing_ok=True)
        wanted = random_bytes(int(random.integers(PIECES * unit, 1 << 20)))
        if exists:
            random_bytes(wanted.size).tofile(path)
        cuts = random.integers(0, wanted.size // unit + 1, PIECES) * unit
        cuts = np.unique(np.concatenate([[0, wanted.size], cuts.clip(max=wanted.size)]))
        pieces = list(itertools.pairwise(cuts.tolist()))
        random.shuffle(pieces)
        for begin, end in pieces:
            handle.async_pwrite(wanted[begin:end], str(path), begin)
        assert handle.wait() == len(pieces)
        assert_equal(contents(path), wanted)


def test_pieces_that_two_threads_write_side_by_side_never_touch_each_other(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    wanted = random_bytes(1_000_007)
    path = directory / "file"
    cuts = np.linspace(0, wanted.size, 102, dtype=np.int64)

    def work(thread: int) -> None:
        for index in range(thread, 101, 2):
            begin, end = int(cuts[index]), int(cuts[index + 1])
            handle.sync_pwrite(wanted[begin:end], str(path), begin)

    for _ in range(5):
        path.unlink(missing_ok=True)
        in_threads(2, work)
        assert_equal(contents(path), wanted)


@pytest.mark.parametrize("unit", [1, 512])
def test_writes_over_each_other_end_as_if_they_were_done_in_order(
    make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes, unit: int
) -> None:
    """Through two handles, two names of the file, and a descriptor."""
    handles = [make_handle(block_size=64 << 10, intra_op_parallelism=n) for n in (1, 2)]
    random = random_bytes.generator
    path, link = directory / "file", directory / "link"
    path.touch()
    link.hardlink_to(path)
    descriptor = os.open(path, os.O_WRONLY)
    wanted = np.zeros(0, np.uint8)
    try:
        for _ in range(ROUNDS):
            for _ in range(PIECES):
                begin = int(random.integers(0, (600_000) // unit)) * unit
                piece = random_bytes(int(random.integers(1, 300_000)))
                if wanted.size < begin + piece.size:
                    wanted = np.pad(wanted, (0, begin + piece.size - wanted.size))
                wanted[begin : begin + piece.size] = piece
                file = [str(path), link, descriptor][random.integers(3)]
                handles[random.integers(2)].async_pwrite(piece, file, begin)
            assert sum(handle.wait() for handle in handles) == PIECES
            assert_equal(contents(path), wanted)
    finally:
        os.close(descriptor)


def test_a_write_that_fails_lets_the_one_that_waits_for_it_go_on(
    handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    path = faultfs.path / "file"
    first, second, third = (random_bytes(100_003) for _ in range(3))
    faultfs.order(Fault("write", error=errno.EIO, times=1, delay_s=0.1))
    with tensorferry.open(path, "w", engine=handle.engine) as file:
        futures = [file.write_from(array) for array in (first, second, third)]
        with storage_error(errno.EIO, path, expected=100_003):
            futures[0].result(timeout=300)
        futures[1].result(timeout=300)
        futures[2].result(timeout=300)
    assert_equal(contents(path), third)


def test_a_handle_that_closes_lets_anothers_overlapping_writes_go_on(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    path = faultfs.path / "file"
    first, second = make_handle(), make_handle()
    arrays = [random_bytes(200_003) for _ in range(4)]
    faultfs.order(Fault("write", hold=True))
    for handle, array in zip((first, second, first, second), arrays, strict=True):
        handle.async_pwrite(array, str(path))
    faultfs.await_held()
    closing = threading.Thread(target=first.close, daemon=True)
    closing.start()
    faultfs.release()
    assert second.wait() == 2
    closing.join(120)
    assert not closing.is_alive()
    assert_equal(contents(path), arrays[-1])


def test_dropping_a_handle_completes_overlapping_writes_in_order(
    engine: str, directory: pathlib.Path
) -> None:
    handle = tensorferry.aio_handle(engine=engine)
    for value in range(1, 21):
        handle.async_pwrite(np.full(2_000_003, value, np.uint8), str(directory / "file"))
    del handle
    assert_equal(contents(directory / "file"), np.full(2_000_003, 20, np.uint8))


def test_a_forked_child_does_not_wait_for_the_writes_of_its_parent(
    handle: Handle, faultfs: FaultFS
) -> None:
    path = faultfs.path / "file"

    def write_as_well() -> None:
        own = tensorferry.aio_handle(engine=handle.engine)
        for value in (100, 101):
            own.async_pwrite(np.full(1_000_003, value, np.uint8), path, 3)
        assert own.wait() == 2
        assert own.sync_pwrite(np.full(5_003, 102, np.uint8), path) == 1

    faultfs.order(Fault("write", hold=True, times=1))
    for value in range(10):
        handle.async_pwrite(np.full(4_000_003, value, np.uint8), path)
    faultfs.await_held()
    child = os.fork()
    if child == 0:
        in_child(write_as_well)
    faultfs.release()
    assert_exits_with_zero(child)
    assert handle.wait() == 10
    left = contents(path)
    assert left.size == 4_000_003
    assert (left[1 << 20 :] == 9).all()


def test_a_thousand_overlapping_writes_stay_in_order(
    handle: Handle, directory: pathlib.Path
) -> None:
    for value in range(1000):
        handle.async_pwrite(np.full(1000 + value, value % 251, np.uint8), str(directory / "file"))
    assert handle.wait() == 1000
    assert_equal(contents(directory / "file"), np.full(1999, 999 % 251, np.uint8))
    assert_works(handle, directory)


def test_a_small_bounce_pool_serves_many_odd_writes_of_which_some_fail(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    before = tensorferry.bounce_pool_nbytes()
    tensorferry.set_bounce_pool_nbytes(1 << 20)
    try:
        handles = [make_handle(block_size=64 << 10) for _ in range(4)]
        arrays = [random_bytes.at(1_000_003, 1) for _ in range(24)]
        faultfs.order(Fault("write", name="file5", error=errno.EIO))
        for index, array in enumerate(arrays):
            handles[index % 4].async_pwrite(array, str(faultfs.path / f"file{index}"), 4096)
        assert handles[0].wait() == 6
        with storage_error(errno.EIO, faultfs.path / "file5", expected=1_000_003):
            handles[1].wait()
        assert handles[2].wait() == handles[3].wait() == 6
        for index, array in enumerate(arrays):
            if index != 5:
                assert_equal(contents(faultfs.path / f"file{index}")[4096:], array)
    finally:
        tensorferry.set_bounce_pool_nbytes(before)
