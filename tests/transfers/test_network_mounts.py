"""Reads of files on network mounts: through or past the page cache, and how many at a time; FUSE stands in for them."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
import tensorferry.safetensors.numpy
from tensorferry.safetensors import SafetensorError
from tests.support import required
from tests.support.expect import assert_equal
from tests.support.faultfs import Fault, FaultFS, FaultFSUnavailableError, why_unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.data import Bytes

MIB = 1 << 20
# The number of blocks that are tried in each way, and the minimum number of concurrent reads afterwards.
TRIED, AT_ONCE = 8, 32


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultFS]:
    """Yield a separate mount from which nothing has been read.

    Direct reads do not count as the kernel's reading ahead.
    """
    if reason := why_unavailable():
        required.missing("fuse", reason)
    try:
        with FaultFS(tmp_path, async_direct=False) as fs:
            yield fs
    except FaultFSUnavailableError as problem:
        required.missing("fuse", str(problem))


def laid(fs: FaultFS, name: str, nbytes: int) -> Bytes:
    data = np.arange(nbytes // 8, dtype=np.uint64).view(np.uint8)
    data.tofile(fs.backing / name)
    return data


def read(fs: FaultFS, name: str, nbytes: int, engine: str, **how: bool) -> Bytes:
    target = tensorferry.empty(nbytes, np.uint8)
    with tensorferry.open(fs.path / name, engine=engine, **how) as file:  # type: ignore[arg-type]
        return file.read(target)


def nbytes_of(fs: FaultFS, op: str) -> int:
    return sum(request.size for request in fs.requests(op))


def await_cached(fs: FaultFS, nbytes: int) -> None:
    """Wait until the kernel has requested so many bytes for the page cache, and some time longer."""
    deadline = time.monotonic() + 120
    while nbytes_of(fs, "read_cached") < nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)


def test_what_is_only_read_goes_past_the_page_cache(mount: FaultFS, engine: str) -> None:
    data = laid(mount, "cached", 4 * MIB)
    assert_equal(read(mount, "cached", 300 << 10, engine), data[: 300 << 10])
    assert nbytes_of(mount, "read_direct") == 300 << 10
    assert nbytes_of(mount, "read_cached") == 0


def test_the_callers_choice_counts(mount: FaultFS, engine: str) -> None:
    data = laid(mount, "cached", 32 * MIB)
    assert_equal(read(mount, "cached", data.nbytes, engine, direct=True), data)
    assert nbytes_of(mount, "read_cached") == 0
    mount.clear()
    assert_equal(read(mount, "cached", data.nbytes, engine, direct=False), data)
    assert nbytes_of(mount, "read_direct") == 0


def test_a_file_that_is_open_for_writing_goes_through_the_page_cache(
    mount: FaultFS, engine: str
) -> None:
    """Linux makes EIO of a short asynchronous direct write to FUSE."""
    data = laid(mount, "cached", MIB)
    with tensorferry.open(mount.path / "cached", "r+", engine=engine) as file:
        assert_equal(file.read(np.empty(MIB, np.uint8)), data)
        mount.order(Fault("write", short=4096, times=1))
        file.write(data[::-1].copy())
    assert_equal(np.fromfile(mount.path / "cached", np.uint8), data[::-1])
    assert nbytes_of(mount, "read_direct") == 0


def assert_held_at_once(
    mount: FaultFS, count: int, data: Bytes, target: Bytes, engine: str
) -> None:
    """Read a file, and see that so many requests are with the server before it answers one."""
    with tensorferry.open(mount.path / "cached", engine=engine, direct=True) as file:
        future = file.read_into(target)
        mount.await_held(count)
        mount.clear()
        assert_equal(future.result(), data)


def test_many_blocks_are_with_the_server_at_once(mount: FaultFS, engine: str) -> None:
    """Each block would block the thread that submits it."""
    data = laid(mount, "cached", 64 * MIB)
    mount.order(Fault("read", hold=True))
    target = tensorferry.empty(data.nbytes, np.uint8)
    assert_held_at_once(mount, AT_ONCE, data, target, engine)


def test_more_is_on_its_way_to_a_server_that_is_far_away(mount: FaultFS, engine: str) -> None:
    """Reads through bounce buffers: 24 MiB in place of 12."""
    data = laid(mount, "cached", 40 * MIB)
    mount.order(Fault("read", delay_s=0.03))
    read(mount, "cached", 4096, engine, direct=True)
    mount.order(Fault("read", hold=True))
    target = tensorferry.empty(data.nbytes + 8, np.uint8)[8:]
    assert_held_at_once(mount, 20, data, target, engine)


def test_reads_go_through_the_page_cache_where_that_has_been_much_faster(
    mount: FaultFS, engine: str
) -> None:
    data, other = laid(mount, "cached", 64 * MIB), laid(mount, "cached-too", 8 * MIB)
    target = tensorferry.empty(data.nbytes, np.uint8)
    mount.order(Fault("read_direct", hold=True))
    with tensorferry.open(mount.path / "cached", engine=engine) as file:
        future = file.read_into(target)
        await_cached(mount, TRIED * MIB)
        mount.clear()
        assert_equal(future.result(), data)
    mount.clear()
    assert_equal(read(mount, "cached-too", other.nbytes, engine), other)
    assert nbytes_of(mount, "read_direct") == 0
    assert_equal(read(mount, "cached-too", other.nbytes, engine, direct=True), other)
    assert nbytes_of(mount, "read_direct") == other.nbytes


def test_reads_go_past_the_page_cache_where_that_has_been_no_slower(
    mount: FaultFS, engine: str
) -> None:
    data, other = laid(mount, "cached", 64 * MIB), laid(mount, "cached-too", 32 * MIB)
    target = tensorferry.empty(data.nbytes, np.uint8)
    mount.order(Fault("read_cached", hold=True))
    with tensorferry.open(mount.path / "cached", engine=engine) as file:
        future = file.read_into(target)
        mount.await_held(TRIED)
        while nbytes_of(mount, "read_direct") < data.nbytes - TRIED * MIB:
            time.sleep(0.05)
        time.sleep(1)
        mount.clear()
        assert_equal(future.result(), data)
    mount.clear()
    assert_equal(read(mount, "cached-too", other.nbytes, engine), other)
    assert nbytes_of(mount, "read_direct") == other.nbytes
    assert nbytes_of(mount, "read_cached") == 0


def test_direct_reads_that_are_refused_go_through_the_page_cache(
    mount: FaultFS, engine: str
) -> None:
    data = laid(mount, "cached", 40 * MIB)
    mount.order(Fault("read_direct", error=errno.EINVAL, skip=5, times=5))
    assert_equal(read(mount, "cached", data.nbytes, engine), data)
    assert mount.hits() == 5


def test_short_direct_reads_are_completed(mount: FaultFS, engine: str) -> None:
    """Files that the server has opened with FOPEN_DIRECT_IO; in others the kernel takes a short read for the end.

    io_uring would otherwise continue at the first offset.
    """
    data = laid(mount, "file", 40 * MIB)
    mount.order(
        Fault("read_direct", short=12345, times=5),
        Fault("read_direct", short=8192, skip=10, times=5),
    )
    assert_equal(read(mount, "file", data.nbytes, engine), data)
    assert mount.hits() == 10


def test_short_direct_writes_are_completed(mount: FaultFS, engine: str) -> None:
    data = np.arange(8 * MIB // 8, dtype=np.uint64).view(np.uint8)
    mount.order(Fault("write", short=12288, times=5))
    with tensorferry.open(mount.path / "file", "w", engine=engine, direct=True) as file:
        file.write(data)
    assert mount.hits() == 5
    assert_equal(np.fromfile(mount.backing / "file", np.uint8), data)


def test_a_file_that_another_node_cuts_off_is_an_error(mount: FaultFS, engine: str) -> None:
    laid(mount, "cached", 40 * MIB)
    target = tensorferry.empty(40 * MIB, np.uint8)
    mount.order(Fault("read", hold=True))
    with tensorferry.open(mount.path / "cached", engine=engine) as file:
        future = file.read_into(target)
        mount.await_held(1)
        with open(mount.backing / "cached", "r+b") as behind:
            behind.truncate(20 * MIB + 1)
        mount.clear()
        with pytest.raises(tensorferry.ShortReadError, match="cached"):
            future.result()


def test_a_model_that_was_loaded_once_is_not_mapped_in_part(mount: FaultFS) -> None:
    tensors = {f"layer{index}": np.full(MIB, index, np.uint8) for index in range(40)}
    tensorferry.safetensors.numpy.save_file(tensors, mount.backing / "cached.safetensors")
    for _ in range(2):
        loaded = tensorferry.safetensors.numpy.load_file(mount.path / "cached.safetensors")
        for name, tensor in tensors.items():
            assert_equal(loaded[name], tensor)
    with open(mount.backing / "cached.safetensors", "r+b") as behind:
        behind.truncate(20 * MIB)
    with pytest.raises((SafetensorError, tensorferry.StorageError)):
        tensorferry.safetensors.numpy.load_file(mount.path / "cached.safetensors")
