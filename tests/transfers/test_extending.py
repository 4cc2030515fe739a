"""Files that several writers extend, disks that become full during a write, blocks larger than a page."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tests.support import child, mounts, required
from tests.support.expect import assert_equal, contents, storage_error
from tests.support.faultfs import Fault, FaultFS
from tests.support.forks import passes_in_child
from tests.support.threads import InThread
from tests.transfers import meetings

if TYPE_CHECKING:
    import pathlib

    from tests.transfers.conftest import Run

MIB = 1 << 20


def preallocate(path: pathlib.Path, nbytes: int) -> None:
    with tensorferry.open(path, "r+") as file:
        file.preallocate(nbytes)


def test_a_refused_reservation_never_cuts_off_what_another_writer_appends_meanwhile(
    faultfs: FaultFS,
) -> None:
    path, below = faultfs.path / "file", faultfs.backing / "file"
    below.write_bytes(b"old" * 1000)
    faultfs.order(Fault("fallocate", error=errno.ENOSPC), Fault("truncate", hold=True, name="file"))
    extending = InThread(lambda: preallocate(path, MIB))
    while extending.is_alive() and not faultfs.held():  # held: on its way to shorten the file
        extending.thread.join(0.05)
    with below.open("ab") as other:
        other.write(b"appended by another")
    faultfs.release()
    with storage_error(errno.ENOSPC, path):
        extending.result()
    assert below.read_bytes() == b"old" * 1000 + b"appended by another"


def test_a_file_is_no_longer_than_before_where_space_is_refused_half_way(
    run: Run, directory: pathlib.Path
) -> None:
    found = run(meetings.space_refused_half_way, directory=directory)
    assert found == {"errno": errno.ENOSPC, "size": 1_000}


def test_a_write_that_ext4_has_no_room_for_reserves_nothing(small_ext4: pathlib.Path) -> None:
    before = mounts.free_nbytes(small_ext4)
    path = small_ext4 / "file"
    with pytest.raises(OSError) as raised:
        tensorferry.write(str(path), np.zeros(before + 4 * MIB, np.uint8), direct=True)
    assert raised.value.errno == errno.ENOSPC
    assert path.stat().st_size == 0
    assert path.stat().st_blocks == 0
    assert mounts.free_nbytes(small_ext4) == before


def test_pieces_that_do_not_fit_together_are_refused_before_one_is_written(
    small_ext4: pathlib.Path,
) -> None:
    path, piece = small_ext4 / "file", np.ones(64 << 10, np.uint8)
    count = mounts.free_nbytes(small_ext4) // piece.nbytes + 64
    items = [(path, piece, index * piece.nbytes) for index in range(count)]
    assert count > 256, "all would be submitted at once"
    with pytest.raises(tensorferry.StorageError) as raised:
        tensorferry.write_many(items, direct=True)
    assert raised.value.errno == errno.ENOSPC
    assert path.stat().st_size == 0


def test_a_reservation_that_fits_because_the_file_holds_blocks_already_is_made(
    small_ext4: pathlib.Path,
) -> None:
    nbytes = mounts.free_nbytes(small_ext4) // 2
    path = small_ext4 / "file"
    path.write_bytes(b"x")
    subprocess.run(["fallocate", "-n", "-l", str(nbytes), str(path)], check=True)
    preallocate(path, nbytes + nbytes // 2)
    assert path.stat().st_size == nbytes + nbytes // 2


def test_a_child_forked_while_its_parent_reserves_space_extends_the_same_file(
    faultfs: FaultFS, directory: pathlib.Path
) -> None:
    path = faultfs.path / "file"
    path.write_bytes(b"")
    faultfs.order(Fault("fallocate", hold=True, times=1))
    reserving = InThread(lambda: preallocate(path, MIB))
    faultfs.await_held()

    # Elsewhere, since the kernel itself locks the held file; in the parent the two shared one of 64 locks.
    def work() -> None:
        for index in range(128):
            with tensorferry.open(str(directory / f"file{index}"), "w") as file:
                file.preallocate(128 << 10)

    try:
        passes_in_child(work)
    finally:
        faultfs.release()
    reserving.result()


@pytest.mark.parametrize(
    "engine", ["io_uring", "libaio"], indirect=True
)  # the filter forbids their calls
def test_where_io_uring_is_forbidden_after_its_start_transfers_fail_and_close_returns(
    engine: str, directory: pathlib.Path
) -> None:
    required.module("pyseccomp")
    program = "tests.transfers.programs:forbidden_while_running"
    ended = child.call(program, engine=engine, directory=directory)
    assert ended.result == [errno.EPERM] * 3


@pytest.mark.parametrize("block_nbytes", [16 << 10, 64 << 10])
def test_ragged_neighbours_keep_their_bytes_where_blocks_are_larger_than_pages(
    block_nbytes: int, directory: pathlib.Path
) -> None:
    image = directory / "xfs.img"
    with image.open("wb") as file:
        file.truncate(320 * MIB)
    make = [required.command("mkfs.xfs"), "-q", "-b", f"size={block_nbytes}", str(image)]
    if (made := subprocess.run(make, capture_output=True, text=True)).returncode != 0:
        required.missing("mounts", f"mkfs.xfs: {made.stderr}")
    nbytes = 256 << 10
    random = np.random.default_rng(3)
    handle = tensorferry.aio_handle(block_size=64 << 10, queue_depth=64, intra_op_parallelism=2)
    with mounts.mounted(directory / "xfs", "-o", "loop", str(image)) as mount:
        path = mount / "file"
        path.write_bytes(random.bytes(nbytes))
        for _ in range(300):
            expected = random.integers(0, 256, nbytes, np.uint8)
            cuts = sorted({0, nbytes, *random.integers(0, nbytes, 30).tolist()})
            for begin, end in itertools.pairwise(cuts):
                handle.async_pwrite(expected[begin:end], str(path), begin)
            handle.wait()
            descriptor = os.open(path, os.O_RDWR)
            # EIO if the kernel has detected a collision of direct and buffered writes.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
            assert_equal(contents(path), expected)
