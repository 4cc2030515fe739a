"""A drive that fails at chosen offsets: EIO, ENOSPC, short transfers, interruptions, delays."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tests.support.expect import (
    assert_equal,
    assert_works,
    contents,
    interrupted,
    short_read,
    storage_error,
)
from tests.support.faultfs import Fault, FaultFS
from tests.support.forks import passes_in_child
from tests.support.leaks import settled
from tests.support.threads import threads_in

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes

Handle = tensorferry.aio_handle

BLOCK = 64 << 10
NBYTES = 16 * BLOCK
FAULT_OFFSETS = [0, 3 * BLOCK + 100, NBYTES - 1]


@pytest.fixture
def blocks_handle(make_handle: MakeHandle) -> Handle:
    """Return a handle with small blocks."""
    return make_handle(block_size=BLOCK, queue_depth=8)


def block_start(offset: int) -> int:
    return offset // BLOCK * BLOCK


def transfer(handle: Handle, op: str, array: object, path: pathlib.Path, offset: int = 0) -> int:
    """Read or write asynchronously, and wait."""
    submit = handle.async_pread if op == "read" else handle.async_pwrite
    submit(array, str(path), offset)
    return handle.wait()


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("start", FAULT_OFFSETS)
def test_an_error_at_an_offset_is_raised_with_the_offset_of_its_block(
    blocks_handle: Handle,
    faultfs: FaultFS,
    random_bytes: RandomBytes,
    op: str,
    number: int,
    start: int,
) -> None:
    path = faultfs.path / "file"
    old = random_bytes(NBYTES + 2 * BLOCK)
    old.tofile(path)
    array = random_bytes(NBYTES)
    faultfs.order(Fault(op, start=start, end=start + 1, error=number))
    with storage_error(number, path, expected=NBYTES) as caught:
        transfer(blocks_handle, op, array, path)
    assert block_start(start) <= caught.value.offset <= start
    assert faultfs.hits() >= 1
    faultfs.clear()
    if op == "write":
        assert_equal(contents(path)[NBYTES:], old[NBYTES:])
        block = slice(block_start(start), block_start(start) + BLOCK)
        assert_equal(contents(path)[block], old[block])
    else:
        assert_equal(contents(path), old)
    assert_works(blocks_handle, faultfs.path)
    wanted = array if op == "write" else old[:NBYTES]
    assert transfer(blocks_handle, op, array, path) == 1
    assert_equal(contents(path)[:NBYTES], wanted)
    assert_equal(array, wanted)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize(("offset", "nbytes"), [(7, 5 * BLOCK + 13), (BLOCK + 1, 100)])
def test_an_error_of_a_transfer_at_an_odd_offset_lies_within_the_transfer(
    blocks_handle: Handle,
    faultfs: FaultFS,
    random_bytes: RandomBytes,
    op: str,
    offset: int,
    nbytes: int,
) -> None:
    path = faultfs.path / "file"
    old = random_bytes(8 * BLOCK)
    old.tofile(path)
    faultfs.order(Fault(op, start=offset + nbytes - 1, end=offset + nbytes, error=errno.EIO))
    with storage_error(errno.EIO, path, expected=nbytes) as caught:
        transfer(blocks_handle, op, random_bytes(nbytes), path, offset)
    assert offset <= caught.value.offset < offset + nbytes
    faultfs.clear()
    assert_equal(contents(path)[:offset], old[:offset])
    assert_equal(contents(path)[offset + nbytes :], old[offset + nbytes :])
    assert_works(blocks_handle, faultfs.path)


@pytest.mark.parametrize("op", ["read", "write"])
def test_after_an_error_no_further_block_begins(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    path = faultfs.path / "file"
    random_bytes(NBYTES).tofile(path)
    faultfs.order(Fault(op, error=errno.EIO))
    with storage_error(errno.EIO, path, expected=NBYTES):
        transfer(make_handle(block_size=BLOCK, queue_depth=1), op, random_bytes(NBYTES), path)
    assert len(faultfs.requests(op)) == 1


@pytest.mark.parametrize("op", ["read", "write"])
def test_of_several_blocks_that_fail_the_first_by_offset_is_reported(
    blocks_handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    path = faultfs.path / "file"
    random_bytes(NBYTES).tofile(path)
    first, second = 2 * BLOCK, 4 * BLOCK
    faultfs.order(
        Fault(op, start=first, end=first + 1, error=errno.EIO, delay_s=0.2),
        Fault(op, start=second, end=second + 1, error=errno.ENOSPC),
    )
    with storage_error(errno.EIO, path, expected=NBYTES) as caught:
        transfer(blocks_handle, op, random_bytes(NBYTES), path)
    assert caught.value.offset == first
    faultfs.clear()
    assert_works(blocks_handle, faultfs.path)


@pytest.mark.parametrize("op", ["read", "write"])
def test_of_several_transfers_that_fail_the_first_submitted_is_reported_with_their_number(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    handle = make_handle(queue_depth=8, intra_op_parallelism=2)
    for name in ("first", "good", "second"):
        random_bytes(4096).tofile(faultfs.path / name)
    faultfs.order(
        Fault(op, name="first", error=errno.EIO, delay_s=0.1),
        Fault(op, name="second", error=errno.ENOSPC),
    )
    submit = handle.async_pread if op == "read" else handle.async_pwrite
    for name in ("first", "good", "second"):
        submit(random_bytes(4096), str(faultfs.path / name))
    with storage_error(errno.EIO, faultfs.path / "first", expected=4096) as caught:
        handle.wait()
    (other,) = caught.value.others
    assert (other.errno, other.filename) == (errno.ENOSPC, str(faultfs.path / "second"))
    assert "1 more operations failed" in str(caught.value)
    assert handle.wait() == 0
    faultfs.clear()
    assert_works(handle, faultfs.path)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("short", [1000, 4096, 40_000])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, NBYTES), (7, 5 * BLOCK + 13)])
def test_short_transfers_are_resumed(
    engine: str,
    faultfs: FaultFS,
    random_bytes: RandomBytes,
    op: str,
    short: int,
    offset: int,
    nbytes: int,
) -> None:
    path = faultfs.path / ("file" if op == "read" else "cached")
    wanted = random_bytes(NBYTES + 100)
    wanted.tofile(path)
    array = random_bytes(nbytes)
    with tensorferry.open(path, "r+", direct=False, engine=engine, block_size=BLOCK) as file:
        faultfs.order(Fault(op, short=short, start=2 * BLOCK, end=4 * BLOCK))
        submit = file.read_into if op == "read" else file.write_from
        submit(array, offset).result()
        assert faultfs.hits() > 1
    if op == "write":
        wanted[offset : offset + nbytes] = array
    assert_equal(array, wanted[offset : offset + nbytes])
    assert_equal(contents(path), wanted)


@pytest.mark.parametrize("short", [1000, 4096, 40_000])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, NBYTES), (7, 5 * BLOCK + 13)])
def test_short_direct_reads_are_resumed(
    blocks_handle: Handle,
    faultfs: FaultFS,
    random_bytes: RandomBytes,
    short: int,
    offset: int,
    nbytes: int,
) -> None:
    path = faultfs.path / "file"
    wanted = random_bytes(NBYTES + 100)
    wanted.tofile(path)
    array = random_bytes(nbytes)
    faultfs.order(Fault("read", short=short, start=2 * BLOCK, end=4 * BLOCK))
    assert transfer(blocks_handle, "read", array, path, offset) == 1
    assert faultfs.hits() > 1
    assert_equal(array, wanted[offset : offset + nbytes])
    assert_works(blocks_handle, faultfs.path)


@pytest.mark.parametrize("short", [1000, 4096, 40_000])
def test_short_direct_writes_are_resumed_or_raised(
    blocks_handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes, short: int
) -> None:
    """FUSE makes EIO of a short write that is direct and asynchronous (fuse_get_res_by_io)."""
    path = faultfs.path / "file"
    array = random_bytes(NBYTES)
    faultfs.order(Fault("write", short=short, start=2 * BLOCK, end=4 * BLOCK))
    try:
        assert transfer(blocks_handle, "write", array, path) == 1
    except tensorferry.StorageError as error:
        if error.errno != errno.EIO or error.offset != 2 * BLOCK:
            raise
    else:
        assert_equal(contents(path), array)
    assert faultfs.hits() >= 1
    faultfs.clear()
    assert_works(blocks_handle, faultfs.path)


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_error_after_a_short_transfer_counts_what_had_moved(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    path = faultfs.path / ("file" if op == "read" else "cached")
    random_bytes(BLOCK).tofile(path)
    array = random_bytes(BLOCK)
    with tensorferry.open(path, "r+", direct=False, engine=engine) as file:
        faultfs.order(
            Fault(op, short=8192, times=1), Fault(op, start=8192, error=errno.EIO, skip=1)
        )
        submit = file.read_into if op == "read" else file.write_from
        with storage_error(errno.EIO, path, expected=BLOCK) as caught:
            submit(array).result()
    assert caught.value.offset == 8192
    assert caught.value.transferred == 8192


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN], ids=["EINTR", "EAGAIN"])
def test_interruptions_are_retried(
    blocks_handle: Handle,
    faultfs: FaultFS,
    random_bytes: RandomBytes,
    op: str,
    number: int,
) -> None:
    path = faultfs.path / "file"
    wanted = random_bytes(NBYTES)
    wanted.tofile(path)
    array = random_bytes(NBYTES)
    faultfs.order(Fault(op, start=BLOCK, end=3 * BLOCK, error=number, times=5))
    assert transfer(blocks_handle, op, array, path) == 1
    assert faultfs.hits() == 5
    assert_equal(contents(path), array)
    if op == "read":
        assert_equal(array, wanted)


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_eagain_that_does_not_end_is_raised(
    engine: str, blocks_handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    """With io_uring the kernel itself tries again and again, and mostly for longer than this lasts."""
    path = faultfs.path / "file"
    random_bytes(NBYTES).tofile(path)
    faultfs.order(Fault(op, start=BLOCK, end=2 * BLOCK, error=errno.EAGAIN, times=2000))
    try:
        transfer(blocks_handle, op, random_bytes(NBYTES), path)
    except tensorferry.StorageError as failure:
        found = (failure.errno, failure.filename, failure.offset, failure.expected)
        assert found == (errno.EAGAIN, str(path), BLOCK, NBYTES)
    else:
        assert engine == "io_uring"
        assert faultfs.hits() == 2000
    faultfs.clear()
    assert_works(blocks_handle, faultfs.path)


def test_a_write_that_moves_nothing_is_an_error_not_a_hang(
    blocks_handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    path = faultfs.path / "file"
    faultfs.order(Fault("write", start=BLOCK, end=2 * BLOCK, short=0))
    with pytest.raises(tensorferry.StorageError) as caught:
        transfer(blocks_handle, "write", random_bytes(NBYTES), path)
    assert caught.value.errno
    assert caught.value.expected == NBYTES
    faultfs.clear()
    assert_works(blocks_handle, faultfs.path)


@pytest.mark.covers("truncated_during")
def test_a_read_that_meets_the_end_before_the_size_promised_raises_short_read(
    blocks_handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    path = faultfs.path / "file"
    random_bytes(NBYTES).tofile(path)
    array = np.full(NBYTES, 7, np.uint8)
    faultfs.order(Fault("read", start=5 * BLOCK, short=0))
    with short_read(path, expected=NBYTES):
        transfer(blocks_handle, "read", array, path)
    faultfs.clear()
    assert_works(blocks_handle, faultfs.path)


@pytest.mark.covers("truncated_during")
@pytest.mark.parametrize("left", [0, 3 * BLOCK, 3 * BLOCK + 1234])
def test_a_file_truncated_while_it_is_read_raises_short_read(
    blocks_handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes, left: int
) -> None:
    path = faultfs.path / "file"
    random_bytes(NBYTES).tofile(path)
    array = np.full(NBYTES, 7, np.uint8)
    faultfs.order(Fault("read", hold=True))
    blocks_handle.async_pread(array, str(path))
    faultfs.await_held()
    os.truncate(faultfs.backing / "file", left)
    faultfs.release()
    with short_read(path, expected=NBYTES):
        blocks_handle.wait()
    assert_works(blocks_handle, faultfs.path)


@pytest.mark.covers("truncated_during")
def test_a_file_on_disk_truncated_while_it_is_read_gives_its_bytes_or_short_read(
    handle: Handle, directory: pathlib.Path
) -> None:
    """The file has no zeros: silent ones would be found."""
    path = directory / "file"
    data = np.full(16 << 20, 5, np.uint8)
    short_reads = 0
    for attempt in range(10):
        data.tofile(path)
        targets = [np.full(16 << 20, 7, np.uint8) for _ in range(3)]
        end = attempt * 1_000_001
        truncating = threading.Thread(target=os.truncate, args=(path, end))
        try:
            for target in targets:
                handle.async_pread(target, str(path))
            truncating.start()
            assert handle.wait() == 3
        except tensorferry.ShortReadError as error:
            short_reads += error.transferred < error.expected
            handle.wait()
        else:
            for target in targets:
                assert_equal(target, data)
        if truncating.ident is not None:
            truncating.join()
        # Behind the new end the kernel zeroes pages that a read may be copying.
        assert not any((target[:end] == 0).any() for target in targets)
    print(f"{short_reads} of 10 attempts met the new end")
    assert_works(handle, directory)


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("op", ["read", "write"])
def test_blocks_that_are_stuck_hold_up_their_transfer_and_nothing_else(
    faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    """Files without settings share their queue."""
    block = 1 << 20
    data = {name: random_bytes(4 * block) for name in ("stuck", "other")}
    arrays = {name: random_bytes(4 * block) for name in data}
    with contextlib.ExitStack() as files:
        submit = {}
        for name in data:
            data[name].tofile(faultfs.path / name)
            file = files.enter_context(tensorferry.open(faultfs.path / name, "r+"))
            submit[name] = file.read_into if op == "read" else file.write_from
        starts = [block, 2 * block]
        faultfs.order(*(Fault(op, at, at + 1, name="stuck", hold=True) for at in starts))
        stuck = submit["stuck"](arrays["stuck"])
        faultfs.await_held()
        for _ in range(20):
            submit["other"](arrays["other"]).result(120)
        assert faultfs.held()
        assert not stuck.done()
        faultfs.release()
        stuck.result(120)
    for name in data:
        wanted = data[name] if op == "read" else arrays[name]
        assert_equal(arrays[name], wanted)
        assert_equal(contents(faultfs.path / name), wanted)


@pytest.mark.usefixtures("default_engine")
def test_a_failed_fsync_is_raised_and_one_that_is_asked_for_is_made(
    faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    path = faultfs.path / "file"
    faultfs.order(Fault("fsync", error=errno.EIO))
    array = random_bytes(NBYTES)
    with storage_error(errno.EIO, path):
        tensorferry.write(path, array, sync=True)
    with tensorferry.open(path, "r+") as file, storage_error(errno.EIO, path):
        file.sync()
    faultfs.clear()
    tensorferry.write(path, array, sync=True)
    assert faultfs.requests("fsync")
    assert_equal(contents(path), array)


def test_a_sync_that_failed_is_not_forgotten_by_the_file(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    """The kernel reports the error once: the next fdatasync succeeds, although written data may be lost (fsync(2))."""
    path = faultfs.path / "file"
    array = random_bytes(NBYTES)
    with tensorferry.open(path, "w", engine=engine) as file:
        faultfs.order(Fault("fsync", error=errno.EIO, times=1))
        with storage_error(errno.EIO, path):
            file.write(array, sync=True)
        for call in (file.sync, lambda: file.write(array, sync=True)):
            with storage_error(errno.EIO, path) as caught:
                call()
            assert "write the data again" in str(caught.value)
        file.write(array)  # only syncs fail
        with tensorferry.open(path, "r+", engine=engine) as anew:
            anew.write(array, sync=True)
            anew.sync()
    assert_equal(contents(path), array)


def test_a_sync_whose_failure_nobody_heard_is_not_forgotten(
    faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    path = faultfs.path / "file"
    with tensorferry.open(path, "w") as file:
        faultfs.order(Fault("fsync", error=errno.EIO, hold=True, times=1))
        with interrupted(faultfs):
            file.write(random_bytes(2 * NBYTES), sync=True)  # more than this thread does itself
        faultfs.release()
        with storage_error(errno.EIO, path):
            file.sync()


def test_of_syncs_of_one_file_at_once_none_succeeds_beside_one_that_fails(
    faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    """The first sync consumes the error, which also concerns the data of the others."""
    path = faultfs.path / "file"
    array = random_bytes(NBYTES)
    with tensorferry.open(path, "w") as file, ThreadPoolExecutor() as pool:
        faultfs.order(Fault("fsync", error=errno.EIO, hold=True, times=1))
        futures = [file.write_from(array, at * NBYTES, sync=True) for at in range(6)]
        faultfs.await_held()
        syncs = [pool.submit(file.sync) for _ in range(3)]
        assert settled(lambda: threads_in(file.sync) == 3, 120)
        faultfs.release()
        for future in (*futures, *syncs):
            assert isinstance(future.exception(120), tensorferry.StorageError)


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_syncs_that_share_one_that_fails_fail(
    faultfs: FaultFS, random_bytes: RandomBytes, number: int
) -> None:
    with tensorferry.open(faultfs.path / "file", "w") as file, ThreadPoolExecutor(8) as pool:
        file.write(random_bytes(NBYTES))
        faultfs.order(
            Fault("fsync", hold=True, times=1), Fault("fsync", skip=1, error=number, times=1)
        )
        syncs = [pool.submit(file.sync)]
        faultfs.await_held()
        syncs += [pool.submit(file.sync) for _ in range(7)]
        assert settled(lambda: threads_in(file.sync) == 8, 120)
        faultfs.release()
        failed = [sync.exception(120) is not None for sync in syncs]
        assert failed.count(False) == 1


def test_a_forked_child_has_no_syncs(faultfs: FaultFS, random_bytes: RandomBytes) -> None:
    """A sync in the child would consume the error of the open file that it shares with its parent."""
    path = faultfs.path / "file"
    with tensorferry.open(path, "w") as file:
        file.write(random_bytes(NBYTES))
        faultfs.order(Fault("fsync", error=errno.EIO, times=1))

        def in_the_child() -> None:
            with pytest.raises(RuntimeError, match="before fork"):
                file.sync()

        passes_in_child(in_the_child)
        with storage_error(errno.EIO, path):
            file.sync()


def test_syncs_of_one_file_that_wait_for_another_share_the_next(
    faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    with tensorferry.open(faultfs.path / "file", "w") as file, ThreadPoolExecutor(8) as pool:
        file.write(random_bytes(NBYTES))
        faultfs.order(Fault("fsync", hold=True, times=1))
        syncs = [pool.submit(file.sync) for _ in range(8)]
        faultfs.await_held()
        assert settled(lambda: threads_in(file.sync) == 8, 120)
        faultfs.release()
        for sync in syncs:
            sync.result(120)
        assert 2 <= len(faultfs.requests("fsync")) < len(syncs)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENFILE, errno.EIO])
def test_an_open_that_fails_is_raised(
    faultfs: FaultFS, directory: pathlib.Path, number: int
) -> None:
    handle = tensorferry.aio_handle()
    path = faultfs.path / "file"
    path.write_bytes(bytes(4096))
    faultfs.order(Fault("open", error=number))
    for call in (handle.sync_pread, handle.sync_pwrite, handle.async_pread, handle.async_pwrite):
        with storage_error(number, path):
            call(np.zeros(4096, np.uint8), str(path))
    assert_works(handle, directory)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_fallocate_is_written(
    handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes, number: int
) -> None:
    path = faultfs.path / "file"
    array = random_bytes(NBYTES + 7)
    faultfs.order(Fault("fallocate", error=number))
    assert handle.sync_pwrite(array, str(path), 5) == 1
    assert_equal(contents(path)[5:], array)


def test_no_space_for_preallocation_is_raised(
    handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    """A file system that has no space for the whole file, or at least has none to promise."""
    path = faultfs.path / "file"
    array = random_bytes(NBYTES)
    faultfs.order(Fault("fallocate", error=errno.ENOSPC), Fault("write", error=errno.ENOSPC))
    with storage_error(errno.ENOSPC, path, expected=NBYTES):
        handle.async_pwrite(array, str(path))
        handle.wait()
    faultfs.clear()
    assert_works(handle, faultfs.path)


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_read_many_and_write_many_raise_and_leave_the_other_files_complete(
    faultfs: FaultFS, random_bytes: RandomBytes, number: int
) -> None:
    arrays = [random_bytes(10_007) for _ in range(20)]
    paths = [faultfs.path / f"file{index}" for index in range(20)]
    faultfs.order(Fault("write", name="file7", error=number))
    with storage_error(number, paths[7], expected=10_007):
        tensorferry.write_many(list(zip(paths, arrays, strict=True)))
    for index, (path, array) in enumerate(zip(paths, arrays, strict=True)):
        if index != 7:
            assert_equal(contents(path), array)
    faultfs.clear()
    tensorferry.write_many(list(zip(paths, arrays, strict=True)))
    targets = [np.zeros(10_007, np.uint8) for _ in range(20)]
    faultfs.order(Fault("read", name="file3", error=number))
    with storage_error(number, paths[3], expected=10_007):
        tensorferry.read_many(list(zip(paths, targets, strict=True)))
    for index, (target, array) in enumerate(zip(targets, arrays, strict=True)):
        if index != 3:
            assert_equal(target, array)


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("op", ["read", "write"])
def test_of_neighbours_that_are_moved_as_one_only_those_fail_that_cannot_be_moved(
    faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    path = faultfs.path / "file"
    old, new = random_bytes(400 * 4096), random_bytes(400 * 4096)
    old.tofile(path)
    order = np.random.default_rng(5).permutation(400)
    arrays = [np.zeros(4096, np.uint8) for _ in order]
    if op == "write":
        arrays = [new[at * 4096 : (at + 1) * 4096] for at in order]
    items = [(path, array, int(at) * 4096) for array, at in zip(arrays, order, strict=True)]
    bad = [int(order[100]), int(order[30]), int(order[399])]
    faultfs.order(
        *(Fault(op, start=at * 4096 + 9, end=at * 4096 + 10, error=errno.EIO) for at in bad)
    )
    with storage_error(errno.EIO, path, expected=4096) as caught:
        (tensorferry.read_many if op == "read" else tensorferry.write_many)(items)
    faultfs.clear()
    first = caught.value
    assert [first.offset, *(other.offset for other in first.others)] == [
        int(order[index]) * 4096 for index in (30, 100, 399)
    ]
    found = contents(path)
    for at, array in zip(order, arrays, strict=True):
        place = slice(int(at) * 4096, (int(at) + 1) * 4096)
        if op == "write":
            assert_equal(found[place], (old if at in bad else new)[place])
        else:
            assert_equal(array, np.zeros(4096, np.uint8) if at in bad else old[place])


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_future_raises_what_its_own_transfer_met(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    path = faultfs.path / "file"
    data = random_bytes(NBYTES)
    data.tofile(path)
    faultfs.order(Fault(op, start=NBYTES // 2, error=errno.EIO))
    with tensorferry.open(path, "r+", engine=engine, block_size=BLOCK) as file:
        submit = file.read_into if op == "read" else file.write_from
        lower, upper = data[: NBYTES // 2].copy(), data[NBYTES // 2 :].copy()
        good, bad = submit(lower, 0), submit(upper, NBYTES // 2)
        good.result()
        with storage_error(errno.EIO, path, expected=NBYTES // 2) as caught:
            bad.result()
        assert caught.value.offset >= NBYTES // 2
        assert isinstance(bad.exception(), tensorferry.StorageError)
        assert bad.done()
        faultfs.clear()
        target = np.zeros_like(data)
        file.read(target)
        assert_equal(target, data)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_transfer_that_moved_all_before_it_could_be_cancelled_is_a_success(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes, op: str
) -> None:
    path = faultfs.path / "file"
    data, array = random_bytes(4096), random_bytes(4096)
    data.tofile(path)
    faultfs.order(Fault(op, hold=True))
    with tensorferry.open(path, "r+", engine=engine) as file:
        future = (file.read_into if op == "read" else file.write_from)(array)
        faultfs.await_held()  # its only block is with the drive
        future.cancel()
        faultfs.release()
        assert future.result(120) is array
        assert not future.cancelled()
        assert future.exception() is None
    assert_equal(contents(path), array)
    assert_equal(array, data if op == "read" else array)


def test_a_future_times_out_and_completes_later(
    engine: str, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    path = faultfs.path / "file"
    data = random_bytes(10_000)
    data.tofile(path)
    faultfs.order(Fault("read", hold=True))
    with tensorferry.open(path, engine=engine) as file:
        target = np.zeros(10_000, np.uint8)
        future = file.read_into(target)
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0)
        assert not future.done()
        faultfs.release()
        future.result(timeout=300)
        assert future.exception() is None
    assert_equal(target, data)
