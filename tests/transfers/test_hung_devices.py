"""A hung device delays its own calls, and no call on another device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer.new_file import NewFile
from tests.support.expect import assert_equal, contents
from tests.support.faultfs import Fault, FaultFS
from tests.support.leaks import settled
from tests.support.threads import InThread

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

LARGE, SMALL = 6 << 20, 4096

# The system call that hangs, and a call that runs into it; the path has LARGE bytes.
HUNG: dict[str, tuple[str, Callable[[pathlib.Path], object]]] = {
    "reads": ("read", lambda path: tensorferry.read(path, np.empty(LARGE, np.uint8))),
    "reads past the cache": (
        "read",
        lambda path: tensorferry.read(path, np.empty(LARGE, np.uint8), direct=True),
    ),
    "writes": ("write", lambda path: tensorferry.write(path, np.ones(LARGE, np.uint8))),
    "writes past the cache": (
        "write",
        lambda path: tensorferry.write(path, np.ones(LARGE, np.uint8), direct=True),
    ),
    "syncs": ("fsync", lambda path: tensorferry.write(path, np.ones(SMALL, np.uint8), sync=True)),
    "many syncs": (
        "fsync",
        lambda path: tensorferry.write_many([(path, np.ones(SMALL, np.uint8))], sync=True),
    ),
    "closes": ("flush", lambda path: tensorferry.read_many([(path, np.empty(SMALL, np.uint8))])),
    "opens": ("open", lambda path: tensorferry.read(path, np.empty(SMALL, np.uint8))),
}


@contextlib.contextmanager
def hanging(faultfs: FaultFS, what: str, count: int) -> Iterator[list[InThread]]:
    """Have calls on `count` files of a device hang during the block, and see that all end after it."""
    operation, call = HUNG[what]
    paths = [faultfs.path / f"hung{index}" for index in range(count)]
    for path in paths:
        (faultfs.backing / path.name).write_bytes(bytes(LARGE))
    faultfs.order(Fault(operation, hold=True))
    calls = [InThread(lambda path=path: call(path)) for path in paths]
    try:
        faultfs.await_held()  # of the others some may wait in the kernel, or for a thread
        yield calls
    finally:
        faultfs.release()
    for ended in calls:
        ended.result()


def calls_on(directory: pathlib.Path) -> None:
    """Make calls of many kinds, and check their results."""
    data = np.random.default_rng(1).integers(0, 256, 40 << 20, np.uint8)
    small = data[:SMALL]
    new = NewFile(str(directory / "new"))
    new.write(data)
    new.finish(sync=True)
    assert_equal(contents(directory / "new"), data)
    paths = [directory / f"file{index}" for index in range(3)]
    tensorferry.write(paths[0], data, sync=True)
    assert_equal(tensorferry.read(paths[0], np.empty_like(data), direct=True), data)
    assert_equal(tensorferry.read(paths[0], np.empty_like(data), direct=False), data)
    tensorferry.write_many([(path, small) for path in paths], sync=True)
    found = [np.empty_like(small) for _ in paths]
    tensorferry.read_many(list(zip(paths, found, strict=True)))
    assert_equal(found[2], small)
    with tensorferry.open(paths[1], "w+") as file:
        writing = [file.write_from(small, index * SMALL) for index in range(100)]
        assert all(future.result() is not None for future in writing)
        file.sync()
        assert_equal(file.read_into(np.empty_like(small), 50 * SMALL).result(), small)
    assert_equal(contents(directory / "file2"), small)


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("what", HUNG)
def test_a_device_that_hangs_holds_up_no_call_on_another_one(
    faultfs: FaultFS, directory: pathlib.Path, what: str, count: int
) -> None:
    with hanging(faultfs, what, count) as hung:
        InThread(lambda: calls_on(directory)).result()
        assert faultfs.held()
        assert all(call.is_alive() for call in hung)


def test_a_hung_device_with_all_transfers_that_it_may_have_holds_up_no_call_on_another_one(
    faultfs: FaultFS, directory: pathlib.Path
) -> None:
    limit, more = 16_384, 100
    (faultfs.backing / "cached").write_bytes(b"x")
    found = np.empty(1, np.uint8)
    futures: list[tensorferry.Future] = []

    with tensorferry.open(faultfs.path / "cached") as file:
        faultfs.order(Fault("read", hold=True))
        submitting = InThread(
            lambda: [futures.append(file.read_into(found, 0)) for _ in range(limit + more)]
        )
        try:
            assert settled(lambda: file._scheduler.outstanding() >= limit)
            InThread(lambda: calls_on(directory)).result()
            assert submitting.is_alive()
            assert len(futures) <= limit
        finally:
            faultfs.release()
        submitting.result()
        for future in futures:
            future.result()
