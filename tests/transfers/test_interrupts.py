"""Ctrl-C in calls that wait for a hung drive: it is raised at once, and the I/O in flight does no harm."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.deepnvme import handles
from tests.support.expect import assert_equal, assert_works, contents, interrupted
from tests.support.faultfs import Fault
from tests.support.interrupts import At
from tests.support.leaks import settled
from tests.support.threads import InThread, threads_in

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.faultfs import FaultFS

pytestmark = pytest.mark.usefixtures("default_engine")

# Larger than one block: the calling thread does a transfer of one block itself, and a signal cannot interrupt a thread
# that FUSE holds.
NBYTES = 6 << 20
MARGIN = 100_003


@pytest.fixture
def file(faultfs: FaultFS, random_bytes: RandomBytes) -> tuple[pathlib.Path, Any]:
    """A file that transfers leave a margin of at both ends, and its bytes."""
    data = random_bytes(NBYTES + 2 * MARGIN)
    data.tofile(faultfs.backing / "file")
    return faultfs.path / "file", data


READS: dict[str, Any] = {
    "read_many": lambda path, array, _: tensorferry.read_many(
        [(path, array[:MARGIN], MARGIN), (path, array[MARGIN:], 2 * MARGIN)]
    ),
    "handle.read": lambda path, array, handle: handle.read(array, path, file_offset=MARGIN),
}
WRITES: dict[str, Any] = {
    "write": lambda path, array, _: tensorferry.write(path, array, MARGIN),
    "write_many": lambda path, array, _: tensorferry.write_many(
        [(path, array[MARGIN:], 2 * MARGIN), (path, array[:MARGIN], MARGIN)]
    ),
    "sync_pwrite": lambda path, array, handle: handle.sync_pwrite(array, path, MARGIN),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_left_by_ctrl_c_touches_no_memory_that_has_gone_to_others(
    handle: tensorferry.aio_handle, faultfs: FaultFS, file: tuple[pathlib.Path, Any], name: str
) -> None:
    path, data = file
    faultfs.order(Fault("read", hold=True))
    with interrupted(faultfs):
        READS[name](path, np.zeros(NBYTES, np.uint8), handle)
    gc.collect()
    others = [np.full(NBYTES, 9, np.uint8) for _ in range(4)]
    faultfs.clear()
    assert_works(handle, faultfs.path)
    READS[name](path, found := np.zeros(NBYTES, np.uint8), handle)
    assert_equal(found, data[MARGIN:-MARGIN])
    assert all((other == 9).all() for other in others)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_left_by_ctrl_c_changes_nothing_outside_its_range(
    handle: tensorferry.aio_handle, faultfs: FaultFS, file: tuple[pathlib.Path, Any], name: str
) -> None:
    path, data = file
    old = data[MARGIN:-MARGIN]
    faultfs.order(Fault("write", hold=True))
    with interrupted(faultfs):
        WRITES[name](path, ~old, handle)
    gc.collect()
    others = [np.full(NBYTES, 9, np.uint8) for _ in range(4)]
    faultfs.clear()
    # This write ends after the writes in flight, because it overlaps them.
    assert handle.sync_pwrite(~data[:1], path, MARGIN) == 1
    found = contents(path)
    assert_equal(found[:MARGIN], data[:MARGIN])
    assert_equal(found[-MARGIN:], data[-MARGIN:])
    middle = found[MARGIN + 1 : -MARGIN]
    assert ((middle == ~old[1:]) | (middle == old[1:])).all()
    WRITES[name](path, ~old, handle)
    assert_equal(contents(path)[MARGIN:-MARGIN], ~old)
    assert all((other == 9).all() for other in others)


@pytest.mark.parametrize("product", ["file", "handle"])
def test_a_close_left_by_ctrl_c_can_be_done_again_and_loses_nothing(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes, product: str
) -> None:
    data = random_bytes(NBYTES)
    path = faultfs.path / "new"
    opened: Any
    faultfs.order(Fault("write", hold=True))
    if product == "file":
        opened = tensorferry.open(path, "w")
        opened.write_from(data)
    else:
        opened = make_handle()
        opened.async_pwrite(data, path)
    with interrupted(faultfs):
        opened.close()
    faultfs.clear()
    opened.close()
    assert_equal(contents(path), data)
    assert_works(make_handle(), faultfs.path)


@pytest.mark.parametrize("waiting", ["in a call", "in wait"])
def test_a_close_waits_for_other_threads_calls_takes_nothing_new_and_is_left_by_ctrl_c(
    make_handle: MakeHandle, faultfs: FaultFS, random_bytes: RandomBytes, waiting: str
) -> None:
    data = random_bytes(NBYTES)
    path = faultfs.path / "new"
    handle = make_handle()
    faultfs.order(Fault("write", hold=True))
    if waiting == "in wait":
        handle.async_pwrite(data, path)
        call = InThread(handle.wait)
        assert settled(lambda: threads_in(handle.wait))
    else:
        call = InThread(lambda: handle.sync_pwrite(data, path))
    faultfs.await_held()
    with interrupted(faultfs, lambda: "closed" in repr(handle)):
        handle.close()
    with pytest.raises(ValueError, match="closed"):
        handle.sync_pwrite(data, faultfs.path / "another")
    faultfs.clear()
    handle.close()
    call.result()
    assert_equal(contents(path), data)
    assert not (faultfs.path / "another").exists()


def test_a_wait_left_at_any_moment_before_it_waits_leaves_all_pending(
    handle: tensorferry.aio_handle, faultfs: FaultFS, file: tuple[pathlib.Path, Any]
) -> None:
    path, data = file
    arrays = [np.zeros(MARGIN, np.uint8) for _ in range(3)]
    for moment in itertools.count(1):
        faultfs.order(Fault("read", hold=True))
        for array in arrays:
            handle.async_pread(array, path, MARGIN)
        faultfs.await_held()
        held, over = [], threading.Event()

        def interrupt(held: list[int] = held) -> None:
            held.append(faultfs.held())
            raise KeyboardInterrupt

        def let_go(over: threading.Event = over) -> None:
            def waits() -> (
                bool
            ):  # a future waits in the core, where it has no frame: so who asks it stays there
                return threads_in(handle._wait) > 0

            assert settled(lambda: over.is_set() or (waits() and not over.wait(0.1) and waits()))
            faultfs.release()

        letting_go = InThread(let_go)
        with At(moment, handles.__file__, interrupt), contextlib.suppress(KeyboardInterrupt):
            handle.wait()
        over.set()
        letting_go.result()
        if not held or not held[0]:  # it had waited
            break
        assert handle.wait() == 3, moment
        assert all(np.array_equal(array, data[MARGIN : 2 * MARGIN]) for array in arrays)
    assert moment > 5
