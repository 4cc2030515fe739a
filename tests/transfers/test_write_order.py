"""Concurrent writes to one file: side by side, overlapping, failing, abandoned."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.transfer import requests as transfers
from tests.support.effort import examples
from tests.support.expect import assert_equal, assert_works, contents, interrupted, storage_error
from tests.support.faultfs import Fault, FaultFS
from tests.support.forks import assert_exits_with_zero, in_child
from tests.support.leaks import settled
from tests.support.threads import InThread, in_threads, threads_in

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


# One call, and files that go by several names

Item = tuple[int, int, int, int]  # which file, by which of its names, offset, bytes

items_of_files = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 3),
        st.sampled_from([0, 1, 100, 4096, 5000, 70_000]),
        st.sampled_from([0, 1, 50, 4096, 4097, 100_000]),
    ),
    max_size=14,
)


@contextlib.contextmanager
def _files_with_names(folder: Path) -> Any:
    """Two files, each with two hard links, a symbolic link and a descriptor."""
    with contextlib.ExitStack() as opened:
        files = []
        for at in range(2):
            path, link, symbolic = (folder / f"{name}{at}" for name in ("file", "link", "symbolic"))
            path.write_bytes(bytes([200 + at]) * 150_000)
            link.hardlink_to(path)
            symbolic.symlink_to(path)
            descriptor = opened.enter_context(path.open("rb+")).fileno()
            files.append([str(path), str(link), str(symbolic), f"/proc/self/fd/{descriptor}"])
        yield files


@settings(max_examples=examples(60))
@given(
    items=items_of_files,
    truncate=st.sampled_from([None, True, False]),
    chunk=st.sampled_from([1, 2, 3, 256]),
)
def test_of_items_that_overlap_the_later_one_wins_whatever_names_their_files_have(
    items: list[Item], truncate: bool | None, chunk: int
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        _files_with_names(Path(folder)) as files,
    ):
        patch.setattr(transfers, "_CHUNK", chunk)
        wanted = [bytearray([200 + at]) * 150_000 for at in range(2)]
        ends = [0, 0]
        given_items = []
        for value, (at, name, offset, nbytes) in enumerate(items):
            given_items.append((files[at][name], np.full(nbytes, value, np.uint8), offset))
            wanted[at][offset : offset + nbytes] = bytes([value]) * nbytes
            ends[at] = max(ends[at], offset + nbytes)
        transfers.transfer_many(given_items, True, "auto", truncate=truncate)
        for at in range(2):
            if truncate and any(item[0] == at for item in items):
                del wanted[at][ends[at] :]
            assert Path(files[at][0]).read_bytes() == wanted[at]


# Files that are truncated, or get another size, during writes


@pytest.mark.parametrize("how", ["open", "open a link", "truncate", "truncate to more"])
def test_what_was_submitted_before_a_file_is_cut_is_cut_off(
    handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes, how: str
) -> None:
    path = faultfs.path / "file"
    data, new = random_bytes(3_000_003), random_bytes(4_096)
    nbytes = {"truncate": 1_500_000, "truncate to more": 3_500_000}.get(how, 0)
    with tensorferry.open(path, "w", engine=handle.engine) as file:

        def cut() -> None:
            if how.startswith("open"):
                name = path
                if how == "open a link":
                    name = faultfs.base / "link"
                    name.unlink(missing_ok=True)
                    name.symlink_to(path)
                with tensorferry.open(name, "w") as again:
                    again.write(new)
            else:
                file.truncate(nbytes)

        faultfs.order(Fault("write", hold=True))
        future = file.write_from(data)
        faultfs.await_held()
        cutting = InThread(cut)
        waiting = (transfers.transfer, tensorferry.File._transfer)
        assert settled(lambda: not cutting.is_alive() or any(map(threads_in, waiting)))
        faultfs.release()
        cutting.result()
        future.result()
        wanted = new if how.startswith("open") else np.resize(np.pad(data, (0, 500_000)), nbytes)
        assert_equal(contents(faultfs.backing / "file"), wanted)


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("how", ["open", "truncate"])
def test_a_cut_that_ctrl_c_ends_while_it_waits_does_not_come_later(
    faultfs: FaultFS, random_bytes: RandomBytes, how: str
) -> None:
    path = faultfs.path / "file"
    data = random_bytes(3_000_003)
    with tensorferry.open(path, "w") as file:
        faultfs.order(Fault("write", hold=True))
        future = file.write_from(data)
        with interrupted(faultfs):
            _ = tensorferry.open(path, "w") if how == "open" else file.truncate(0)
        faultfs.clear()
        future.result()
    assert_equal(contents(faultfs.backing / "file"), data)
