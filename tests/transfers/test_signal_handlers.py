"""Signal handlers and finalizers that run between two lines of tensorferry, and what checks of arguments refuse."""

from __future__ import annotations

import itertools
import pathlib
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.base import checks, mounts, processes
from tensorferry.base.processes import Interrupts
from tensorferry.deepnvme import gds, handles
from tensorferry.transfer import futures, runtime
from tests.support.interrupts import At

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("default_engine")


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The SIGUSR1 that a Python handler has received, in a process that also has one for SIGUSR2."""
    found: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda number, _: found.append(number)) for number in numbers]
    yield found
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interruption_at_any_moment_leaves_deferred_signals_to_their_handlers(
    received: list[int],
) -> None:
    interrupts = Interrupts()
    for moment in itertools.count(1):
        try:
            with At(moment, processes.__file__, interrupt) as at, interrupts.deferred():
                pass
        except KeyboardInterrupt:
            pass
        if at.happened_in is None:
            break
        received.clear()
        signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGUSR1], at.happened_in
        with interrupts.deferred():
            signal.raise_signal(signal.SIGUSR2)
            assert received == [signal.SIGUSR1], at.happened_in
        assert received == [signal.SIGUSR1, signal.SIGUSR2], at.happened_in
    assert moment > 50


def at_all_moments(path: str, call: Callable[[], Any], again: Callable[[], Any]) -> None:
    """Make a call, again and again, and the call of a signal handler at each moment of it in one file."""
    for moment in itertools.count(1):
        with At(moment, path, again) as at:
            call()
        if at.happened_in is None:
            break
    assert moment > 5


@pytest.mark.timeout(120)
def test_a_handler_may_make_the_first_transfer_while_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first() -> None:
        runtime._default = None
        runtime.default_scheduler()

    monkeypatch.setattr(runtime, "_default", None)
    at_all_moments(runtime.__file__, first, runtime.default_scheduler)


@pytest.mark.timeout(120)
def test_a_handler_may_add_a_callback_while_one_is_added(directory: pathlib.Path) -> None:
    data = np.arange(1000)
    called: list[Any] = []
    added = itertools.count(1)

    def add() -> None:
        with tensorferry.open(directory / "file", "w") as file:
            future = file.write_from(data)
            # In place of add_done_callback(), which would call the callback at once if the transfer has ended.
            next(added)
            futures._callback_thread().add(future._request, lambda: called.append(None))
            future.result()

    at_all_moments(futures.__file__, add, add)
    futures._callback_thread().stop()
    futures._callbacks = None
    assert len(called) == next(added) - 1


@pytest.mark.timeout(120)
def test_a_handler_may_wait_while_its_thread_waits(directory: pathlib.Path) -> None:
    data = np.arange(1000)
    with tensorferry.aio_handle() as handle:
        done = []

        def write_and_wait() -> None:
            handle.async_pwrite(data, directory / "file")
            done.append(handle.wait())

        at_all_moments(handles.__file__, write_and_wait, write_and_wait)
        assert sum(done) == len(done)


@pytest.mark.timeout(120)
def test_a_handle_may_be_dropped_while_gpu_memory_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinner, other = object(), object()
    monkeypatch.setattr(gds, "_pins", {})
    monkeypatch.setattr(gds, "has_moved", lambda _: True)

    def pin_over_a_moved_one() -> None:
        gds._pins.clear()
        gds._pins[4096] = gds._Pin((4096, 4096, None, (0, 1)), other, False)
        gds._pin((4096, 8192, None, (0, 1)), pinner, False)
        assert gds._pins[4096].pinner is pinner

    at_all_moments(gds.__file__, pin_over_a_moved_one, lambda: gds._unpin_all_of(other))


def test_a_kernel_that_tells_no_mount_is_no_error(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pathlib.Path, "read_text", lambda *_: "pos:\t0\nflags:\t0100000\n")
    assert mounts.mount_or_none(directory) is None
    with pytest.raises(LookupError, match="which mount"):
        mounts.mount_of(directory)


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        ({"maximum": 7}, "depth: 8 is above 7"),
        ({"minimum": 9}, "depth: 8 is below 9"),
        ({"minimum": 1, "maximum": 7}, "depth: 8 is not between 1 and 7"),
        ({"multiple_of": 3}, "depth: 8 is not a multiple of 3"),
    ],
)
def test_each_limit_of_an_integer_counts_alone(limits: dict[str, int], refusal: str) -> None:
    assert checks.integer(8, "depth") == 8
    with pytest.raises(ValueError, match=refusal):
        checks.integer(8, "depth", **limits)
