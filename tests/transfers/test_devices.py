"""Block devices, also with sectors of 4,096 bytes, and drives that need a larger alignment than they report."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support import mounts, required
from tests.support.data import aligned
from tests.support.expect import assert_equal, storage_error

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes

pytestmark = pytest.mark.root

LOOP_SET_BLOCK_SIZE = 0x4C09
EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 12_288, 70_001, 1 << 20]


def write_and_read_anywhere(
    path: pathlib.Path, model: Any, random_bytes: RandomBytes, engine: str
) -> None:
    """Write and read at odd and even offsets, from memory at any address; compare also the bytes around the writes."""
    choices = random_bytes.generator
    with tensorferry.open(path, "r+", engine=engine, block_size=64 << 10) as file:
        data = random_bytes.at(1 << 16, 0)
        file.write(data, 0)
        model[: data.size] = data
        assert file.stats()["direct_nbytes"] > 0
        for _ in range(60):
            nbytes, offset = (int(choices.choice(EDGES) + choices.integers(2)) for _ in range(2))
            data = random_bytes.at(nbytes, int(choices.choice([0, 1, 511, 512, 4095])))
            file.write(data, offset)
            model[offset : offset + nbytes] = data
            begin = int(choices.choice(EDGES))
            found = aligned(min(nbytes + 513, model.size - begin), int(choices.choice([0, 8, 512])))
            assert_equal(file.read(found, begin), model[begin : begin + found.size])
        assert_equal(file.read(np.zeros_like(model)), model)


@pytest.mark.parametrize("what", ["device", "file system"])
def test_any_bytes_are_written_and_read_where_sectors_have_4096_bytes(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes, what: str
) -> None:
    model = np.zeros(3 << 20, np.uint8)
    with mounts.loop_device(directory, "--sector-size=4096", "--direct-io=on") as device:
        if what == "device":
            write_and_read_anywhere(device, model, random_bytes, engine)
            return
        with mounts.ext4_on(device, directory / "mount") as mount:
            model.tofile(mount / "file")
            write_and_read_anywhere(mount / "file", model, random_bytes, engine)


def test_a_direct_read_that_turns_out_to_be_refused_goes_through_the_page_cache(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """The device reports sectors of 512 bytes when it is opened, and later requires 4,096."""
    data = random_bytes(3 << 20)[:-1024]
    with mounts.loop_device(directory, "--sector-size=512", "--direct-io=on") as device:
        tensorferry.write(device, data, 512)
        with (
            tensorferry.open(device, engine=engine) as automatic,
            tensorferry.open(device, engine=engine, direct=True) as always,
        ):
            demand_sectors_of(device, 4096)
            assert_equal(automatic.read(aligned(data.size), 512), data)
            assert automatic.stats()["buffered_nbytes"] > 0
            with storage_error(errno.EINVAL, device, expected=data.size):
                always.read(aligned(data.size), 512)


def demand_sectors_of(device: pathlib.Path, nbytes: int) -> None:
    descriptor = os.open(device, os.O_RDWR)
    try:
        fcntl.ioctl(descriptor, LOOP_SET_BLOCK_SIZE, nbytes)
    except OSError as error:
        required.missing("mounts", f"sectors of a device in use do not change here: {error}")
    finally:
        os.close(descriptor)


def test_a_device_has_its_size_and_is_neither_extended_nor_cut(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(200_003)
    end = mounts.DEVICE_NBYTES
    with mounts.loop_device(directory) as device:
        handle = tensorferry.aio_handle(engine=engine)
        assert handle.sync_pwrite(data, device, end - data.size) == 1
        found = np.zeros_like(data)
        handle.async_pread(found, device, end - data.size)
        assert handle.wait() == 1
        assert_equal(found, data)
        with storage_error(errno.ENOSPC, device):
            tensorferry.write(device, data, end - 4096)
        with pytest.raises(tensorferry.ShortReadError, match=str(end)):
            tensorferry.read(device, found, end - 4096)
        tensorferry.write(device, data, sync=True)
        tensorferry.write(device, data, truncate=True)
        tensorferry.write_many([(device, data, 0), (device, data[:9], 4096)], truncate=True)
        with tensorferry.open(device, "r+") as file:
            with file.stream() as stream:
                stream.append(data)
                stream.finish(truncate=True)
            with storage_error(errno.EINVAL, device):
                file.truncate(4096)
            assert file.size == end


def test_two_nodes_of_one_device_are_one_file(engine: str, directory: pathlib.Path) -> None:
    with mounts.loop_device(directory) as device:
        other = directory / "node"
        os.mknod(other, stat.S_IFBLK | 0o600, device.stat().st_rdev)
        arrays = [np.full(3_000_003, value, np.uint8) for value in range(1, 9)]
        items = [((device, other)[at % 2], array, 4096) for at, array in enumerate(arrays)]
        tensorferry.write_many(items)
        found = np.zeros_like(arrays[0])
        assert_equal(tensorferry.read(device, found, 4096), arrays[-1])
        handle = tensorferry.aio_handle(engine=engine)
        for path, array, offset in reversed(items):
            handle.async_pwrite(array, path, offset)
        assert handle.wait() == len(items)
        assert_equal(tensorferry.read(other, found, 4096), arrays[0])
