"""Drives that fail, are slow or move less than asked while GPU memory is moved."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.gpu.arrays import Amid
from tests.gpu.programs import assert_moves
from tests.support.expect import assert_equal, contents, storage_error
from tests.support.faultfs import Fault, FaultFS

if TYPE_CHECKING:
    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu
    from tests.support.standin import StandIn

NBYTES = 3_000_003
BLOCK = 65536


@pytest.mark.in_turn
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("place", [0, 20 * BLOCK, NBYTES - 1])
@pytest.mark.parametrize("delay_us", [0, 2000])
def test_a_drive_that_fails_in_the_middle_of_the_pipeline(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    faultfs: FaultFS,
    random_bytes: RandomBytes,
    op: str,
    place: int,
    delay_us: int,
) -> None:
    handle = make_handle(block_size=BLOCK, queue_depth=4)
    path = faultfs.path / "file"
    before = random_bytes(2 * NBYTES)
    before.tofile(path)
    array = Amid(gpu, NBYTES, 3)
    driver.set(copy_delay_us=delay_us)
    faultfs.order(Fault(op, start=place, end=place + 1, error=errno.EIO))
    transfer = handle.async_pread if op == "read" else handle.async_pwrite
    for _ in range(3):
        transfer(array.array, path)
        with storage_error(errno.EIO, path, expected=NBYTES):
            handle.wait()
    faultfs.clear()
    array.contents()
    assert_equal(contents(path)[NBYTES:], before[NBYTES:])
    assert_moves(gpu, handle, faultfs.path)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_drive_that_moves_less_than_asked(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    faultfs: FaultFS,
    random_bytes: RandomBytes,
    op: str,
) -> None:
    handle = make_handle(block_size=BLOCK)
    path = faultfs.path / ("cached" if op == "write" else "file")  # see tests/support/faultfs.py
    data = random_bytes(1_000_003)
    source, found = gpu.array(data), Amid(gpu, data.size, 7)
    faultfs.order(Fault(op, short=777))
    handle.sync_pwrite(source, path, 5)
    handle.async_pread(found.array, path, 5)
    assert handle.wait() == 1
    faultfs.clear()
    assert_equal(found.contents(), data)
    assert_equal(contents(path)[5:], data)
