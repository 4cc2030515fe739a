"""Rows of DeepNVMe's fault table about files: missing, full, read-only, short, of odd kinds."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tests.support import mounts
from tests.support.engines import one_engine
from tests.support.expect import (
    assert_equal,
    assert_works,
    contents,
    short_read,
    storage_error,
)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes

Handle = tensorferry.aio_handle


@pytest.mark.covers("missing_file_sync")
def test_reading_a_missing_file_raises_enoent(handle: Handle, directory: pathlib.Path) -> None:
    path = directory / "missing"
    with storage_error(errno.ENOENT, path):
        handle.sync_pread(np.zeros(4096, np.uint8), str(path))
    assert not path.exists()
    assert_works(handle, directory)


@pytest.mark.covers("missing_file_async")
def test_submitting_a_read_of_a_missing_file_raises_enoent_and_leaves_nothing_pending(
    handle: Handle, directory: pathlib.Path
) -> None:
    path = directory / "missing"
    with storage_error(errno.ENOENT, path):
        handle.async_pread(np.zeros(4096, np.uint8), str(path))
    assert_works(handle, directory)


@pytest.mark.covers("missing_file_async")
def test_a_submission_that_fails_leaves_what_is_pending_alone(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    source = random_bytes(1 << 20)
    handle.async_pwrite(source, str(directory / "file"))
    with storage_error(errno.ENOENT, directory / "missing"):
        handle.async_pread(np.zeros(4096, np.uint8), str(directory / "missing"))
    assert handle.wait() == 1
    assert_equal(contents(directory / "file"), source)


@pytest.mark.covers("missing_dir_write")
def test_writing_into_a_missing_directory_raises_enoent(
    handle: Handle, directory: pathlib.Path
) -> None:
    path = directory / "missing" / "file"
    with storage_error(errno.ENOENT, path):
        handle.sync_pwrite(np.zeros(4096, np.uint8), str(path))
    with storage_error(errno.ENOENT, path):
        handle.async_pwrite(np.zeros(4096, np.uint8), str(path))
    assert_works(handle, directory)


@pytest.mark.covers("is_directory")
def test_reading_and_writing_a_directory_raise_eisdir(
    handle: Handle, directory: pathlib.Path
) -> None:
    with storage_error(errno.EISDIR, directory):
        handle.sync_pwrite(np.zeros(4096, np.uint8), str(directory))
    with storage_error(errno.EISDIR, directory):
        handle.sync_pread(np.zeros(4096, np.uint8), str(directory))
    assert_works(handle, directory)


@pytest.mark.covers("read_past_eof_buffer_larger")
@pytest.mark.parametrize("blocking", [True, False])
def test_a_buffer_larger_than_the_file_raises_short_read_and_is_not_touched(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, blocking: bool
) -> None:
    path = directory / "file"
    path.write_bytes(random_bytes(10_000))
    buffer = np.full(10_001, 7, np.uint8)
    with short_read(path, expected=10_001):
        if blocking:
            handle.sync_pread(buffer, str(path))
        else:
            handle.async_pread(buffer, str(path))
    assert (buffer == 7).all()
    assert_works(handle, directory)


@pytest.mark.covers("read_offset_past_eof")
@pytest.mark.parametrize("offset", [10_000, 10_001, 1 << 20, 1 << 40, (1 << 63) - 4096])
def test_an_offset_past_the_end_raises_short_read(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, offset: int
) -> None:
    path = directory / "file"
    path.write_bytes(random_bytes(10_000))
    buffer = np.full(100, 7, np.uint8)
    with short_read(path, expected=100, transferred=0):
        handle.sync_pread(buffer, str(path), offset)
    assert (buffer == 7).all()
    assert_works(handle, directory)


@pytest.mark.covers("read_shorter_than_file")
def test_a_buffer_smaller_than_the_file_is_filled(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(1 << 20)
    data.tofile(directory / "file")
    buffer = np.zeros(1 << 19, np.uint8)
    assert handle.sync_pread(buffer, str(directory / "file")) == 1
    assert_equal(buffer, data[: 1 << 19])


@pytest.mark.covers("enospc_ext4")
def test_a_write_past_a_full_ext4_raises_enospc_and_the_file_does_not_look_complete(
    handle: Handle, directory: pathlib.Path, small_ext4: pathlib.Path
) -> None:
    path = small_ext4 / "file"
    with storage_error(errno.ENOSPC, path, expected=64 << 20):
        handle.sync_pwrite(np.ones(64 << 20, np.uint8), str(path))
    if path.exists():
        assert path.stat().st_size < 64 << 20
        path.unlink()
    assert_works(handle, small_ext4)
    assert_works(handle, directory)


@pytest.mark.covers("enospc_ext4")
def test_a_write_past_a_full_ext4_keeps_the_bytes_that_were_there(
    handle: Handle, small_ext4: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = small_ext4 / "file"
    old = random_bytes((1 << 20) + 13)
    old.tofile(path)
    with storage_error(errno.ENOSPC, path, expected=64 << 20):
        handle.sync_pwrite(np.ones(64 << 20, np.uint8), str(path), old.size)
    assert_equal(contents(path)[: old.size], old)
    assert path.stat().st_size < old.size + (64 << 20)
    path.unlink()
    assert_works(handle, small_ext4)


@pytest.mark.covers("enospc_ext4_async_overlap_T4")
def test_an_async_overlapped_parallel_write_past_a_full_ext4_raises_enospc(
    make_handle: MakeHandle, small_ext4: pathlib.Path
) -> None:
    handle = make_handle(overlap_events=True, intra_op_parallelism=4)
    path = small_ext4 / "file"
    with storage_error(errno.ENOSPC, path, expected=64 << 20):
        handle.async_pwrite(np.ones(64 << 20, np.uint8), str(path))
        handle.wait()
    path.unlink(missing_ok=True)
    assert_works(handle, small_ext4)


@pytest.mark.covers("enospc_tmpfs")
def test_a_write_past_a_full_tmpfs_raises_enospc(handle: Handle, small_tmpfs: pathlib.Path) -> None:
    path = small_tmpfs / "file"
    with storage_error(errno.ENOSPC, path, expected=64 << 20):
        handle.sync_pwrite(np.ones(64 << 20, np.uint8), str(path))
    path.unlink(missing_ok=True)
    assert_works(handle, small_tmpfs)


@pytest.mark.covers("o_direct_unsupported_ramfs")
@pytest.mark.parametrize("offset", [0, 7])
def test_a_file_system_without_o_direct_is_written_and_read(
    handle: Handle, ramfs: pathlib.Path, random_bytes: RandomBytes, offset: int
) -> None:
    _assert_round_trip(handle, ramfs / "file", random_bytes, 3_000_017, offset)


@pytest.mark.covers("tmpfs_write_read")
@pytest.mark.parametrize("offset", [0, 7])
def test_tmpfs_is_written_and_read(
    handle: Handle, tmpfs_directory: pathlib.Path, random_bytes: RandomBytes, offset: int
) -> None:
    _assert_round_trip(handle, tmpfs_directory / "file", random_bytes, 3_000_017, offset)


def _assert_round_trip(
    handle: Handle, path: pathlib.Path, random_bytes: RandomBytes, nbytes: int, offset: int
) -> None:
    source, target = random_bytes(nbytes), np.zeros(nbytes, np.uint8)
    assert handle.sync_pwrite(source, str(path), offset) == 1
    assert path.stat().st_size == offset + nbytes
    assert handle.sync_pread(target, str(path), offset) == 1
    assert_equal(target, source)
    assert_equal(contents(path)[offset:], source)


@pytest.mark.covers("readonly_fs_write")
def test_writing_on_a_read_only_file_system_raises_erofs(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    source = directory / "source"
    source.mkdir()
    old = random_bytes(8192)
    old.tofile(source / "old")
    with mounts.read_only(source, directory / "read-only") as mount:
        for name in ("old", "new"):
            with storage_error(errno.EROFS, mount / name):
                handle.sync_pwrite(np.zeros(4096, np.uint8), str(mount / name))
        buffer = np.zeros(8192, np.uint8)
        assert handle.sync_pread(buffer, str(mount / "old")) == 1
        assert_equal(buffer, old)
    assert [entry.name for entry in source.iterdir()] == ["old"]
    assert_works(handle, directory)


@pytest.fixture
def immutable_file(directory: pathlib.Path, random_bytes: RandomBytes) -> Iterator[pathlib.Path]:
    """Return an immutable file of 8192 bytes."""
    path = directory / "immutable"
    path.write_bytes(random_bytes(8192))
    path.chmod(stat.S_IRUSR)
    if os.geteuid() == 0:
        if subprocess.run(["chattr", "+i", str(path)], capture_output=True).returncode != 0:
            pytest.skip("root may write every file here: chattr +i does not work")
        yield path
        subprocess.run(["chattr", "-i", str(path)], check=True)
    else:
        yield path


@pytest.mark.covers("readonly_file_write_immutable")
def test_writing_a_file_that_nobody_may_change_raises_a_permission_error(
    handle: Handle, directory: pathlib.Path, immutable_file: pathlib.Path
) -> None:
    old = contents(immutable_file)
    with storage_error((errno.EPERM, errno.EACCES), immutable_file):
        handle.sync_pwrite(np.zeros(4096, np.uint8), str(immutable_file))
    with storage_error((errno.EPERM, errno.EACCES), immutable_file):
        handle.async_pwrite(np.zeros(4096, np.uint8), str(immutable_file))
    assert_equal(contents(immutable_file), old)
    buffer = np.zeros(8192, np.uint8)
    assert handle.sync_pread(buffer, str(immutable_file)) == 1
    assert_equal(buffer, old)
    assert_works(handle, directory)


@one_engine
@pytest.mark.covers("fd_bad")
@pytest.mark.parametrize("descriptor", [987_654, -1])
def test_writing_to_a_descriptor_that_is_not_open_raises_at_submission(
    handle: Handle, directory: pathlib.Path, descriptor: int
) -> None:
    with pytest.raises(tensorferry.StorageError) as caught:
        handle.async_pwrite(np.ones(4096, np.uint8), descriptor)
    assert caught.value.errno == errno.EBADF
    assert_works(handle, directory)


@pytest.mark.covers("fd_buffered", "fd_not_closed")
@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
@pytest.mark.parametrize(("nbytes", "offset"), [(1 << 20, 0), (1_000_003, 7)])
def test_a_descriptor_is_written_at_the_offset_and_stays_open(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    flags: int,
    nbytes: int,
    offset: int,
) -> None:
    path = directory / "file"
    source = random_bytes(nbytes)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | flags, 0o644)
    try:
        assert handle.async_pwrite(source, descriptor, offset) == 0
        assert handle.wait() == 1
        assert os.fstat(descriptor).st_size == offset + nbytes
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    finally:
        os.close(descriptor)
    assert_equal(contents(path)[offset:], source)


@pytest.mark.covers("fd_not_closed")
def test_a_descriptor_that_its_owner_closes_while_writes_are_pending_still_gets_all_data(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path, other = directory / "file", directory / "other"
    source = random_bytes(16 << 20)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    handle.async_pwrite(source, descriptor)
    os.close(descriptor)
    with other.open("wb") as file:  # gets the number of the closed descriptor
        assert file.fileno() == descriptor
        assert handle.wait() == 1
    assert_equal(contents(path), source)
    assert other.stat().st_size == 0


@pytest.mark.covers("fd_readonly")
def test_writing_to_a_read_only_descriptor_raises_and_changes_nothing(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    old = random_bytes(8192)
    old.tofile(path)
    descriptor = os.open(path, os.O_RDONLY)

    def write() -> None:
        handle.async_pwrite(np.ones(4096, np.uint8), descriptor)
        handle.wait()

    try:
        with pytest.raises(tensorferry.StorageError) as caught:
            write()
        assert caught.value.errno == errno.EBADF
    finally:
        os.close(descriptor)
    assert_equal(contents(path), old)
    assert_works(handle, directory)


@pytest.mark.covers("fd_readonly")
def test_a_descriptor_in_append_mode_is_written_at_the_offset(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """With O_APPEND, Linux ignores the offset and appends (pwrite(2), BUGS): silent writes at the wrong offset."""
    path = directory / "file"
    old, new = random_bytes(8192), random_bytes(4096)
    old.tofile(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        handle.async_pwrite(new, descriptor, 0)
        assert handle.wait() == 1
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
    finally:
        os.close(descriptor)
    assert_equal(contents(path), np.concatenate([new, old[4096:]]))


@pytest.mark.covers("zero_size_write", "zero_size_write_overlap")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocking", [True, False])
def test_writing_nothing_creates_an_empty_file(
    make_handle: MakeHandle, directory: pathlib.Path, overlap: bool, blocking: bool
) -> None:
    handle = make_handle(overlap_events=overlap)
    path = directory / "file"
    if blocking:
        assert handle.sync_pwrite(np.zeros(0, np.uint8), str(path)) == 1
    else:
        assert handle.async_pwrite(np.zeros(0, np.uint8), str(path)) == 0
        assert handle.wait() == 1
    assert path.stat().st_size == 0
    assert_works(handle, directory)


@pytest.mark.covers("zero_size_write")
def test_writing_nothing_to_a_file_keeps_its_bytes(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    old = random_bytes(5000)
    old.tofile(path)
    assert handle.sync_pwrite(np.zeros(0, np.uint8), str(path), 100) == 1
    assert_equal(contents(path), old)


@pytest.mark.covers("zero_size_read")
def test_reading_nothing_counts_as_a_read(handle: Handle, directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(b"some bytes")
    assert handle.sync_pread(np.zeros(0, np.uint8), str(path)) == 1
    handle.async_pread(np.zeros(0, np.uint8), str(path), 10)
    assert handle.wait() == 1
    with storage_error(errno.ENOENT, directory / "missing"):
        handle.sync_pread(np.zeros(0, np.uint8), str(directory / "missing"))


@pytest.mark.covers("overwrite_shorter_no_truncate")
@pytest.mark.parametrize(("nbytes", "offset"), [(4096, 0), (1_003, 0), (1_003, 77)])
def test_a_shorter_write_keeps_the_rest_of_a_longer_file(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    nbytes: int,
    offset: int,
) -> None:
    path = directory / "file"
    old, new = random_bytes(8192), random_bytes(nbytes)
    old.tofile(path)
    assert handle.sync_pwrite(new, str(path), offset) == 1
    wanted = old.copy()
    wanted[offset : offset + nbytes] = new
    assert_equal(contents(path), wanted)


@one_engine
@pytest.mark.covers("negative_offset_read", "negative_offset_write")
@pytest.mark.parametrize("offset", [-1, -4096, -(1 << 62)])
def test_a_negative_offset_is_a_value_error_before_any_file_is_touched(
    handle: Handle, directory: pathlib.Path, offset: int
) -> None:
    path = directory / "file"
    buffer = np.full(4096, 7, np.uint8)
    for call in (handle.sync_pread, handle.async_pread, handle.sync_pwrite, handle.async_pwrite):
        with pytest.raises(ValueError, match="offset"):
            call(buffer, str(path), offset)
    for call in (handle.read, handle.write):
        with pytest.raises(ValueError, match="offset"):
            call(buffer, str(path), False, offset)
    assert not path.exists()
    assert (buffer == 7).all()
    assert_works(handle, directory)


@one_engine
@pytest.mark.covers("negative_offset_write")
@pytest.mark.parametrize("offset", [(1 << 63) - 100, 1 << 64])
def test_an_offset_that_no_file_can_have_is_refused_before_any_file_is_touched(
    handle: Handle, directory: pathlib.Path, offset: int
) -> None:
    with pytest.raises(ValueError, match="offset"):
        handle.sync_pwrite(np.zeros(4096, np.uint8), str(directory / "file"), offset)
    assert not list(directory.iterdir())
    assert_works(handle, directory)


@pytest.mark.covers("path_types")
def test_paths_may_be_str_bytes_or_path_like_but_nothing_else(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    source = random_bytes(1000)
    raw = os.fsencode(directory) + b"/not-utf-8-\xff\xfe"
    paths: list[str | bytes | pathlib.Path] = [str(directory / "é"), directory / "path", raw]
    for path in paths:
        target = np.zeros(1000, np.uint8)
        assert handle.sync_pwrite(source, path) == 1
        assert handle.sync_pread(target, path) == 1
        assert_equal(target, source)
        handle.async_pread(target, path)
        assert handle.wait() == 1
    assert os.stat(raw).st_size == 1000  # noqa: PTH116
    for wrong in (None, 3.5, ["file"], object()):
        with pytest.raises(TypeError):
            handle.sync_pwrite(source, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            handle.async_pwrite(source, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="null"):
        handle.sync_pwrite(source, str(directory / "a\0b"))
    assert_works(handle, directory)
