"""The fault tests' expectations of every error, and of a handle after an error."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support.leaks import settled
from tests.support.threads import InThread, threads_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.data import Bytes
    from tests.support.faultfs import FaultFS

PACKAGE = str(pathlib.Path(tensorferry.__file__).parent)


@contextlib.contextmanager
def storage_error(
    errors: int | tuple[int, ...],
    path: os.PathLike[str],
    *,
    expected: int | None = None,
    kind: type[tensorferry.StorageError] = tensorferry.StorageError,
) -> Iterator[pytest.ExceptionInfo[tensorferry.StorageError]]:
    """Expect a StorageError that is complete: errno, file, offset, expected, transferred."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    numbers = errors if isinstance(errors, tuple) else (errors,)
    assert error.errno in numbers, f"{error!r} has errno {error.errno}, not one of {numbers}"
    assert os.fsdecode(error.filename) == str(path)
    assert str(path) in str(error)
    assert os.strerror(error.errno) in str(error)
    assert isinstance(error.offset, int)
    assert error.offset >= 0
    if expected is not None:
        assert error.expected == expected
        assert 0 <= error.transferred < expected


def is_called() -> bool:
    """Return whether the main thread is in a call of ours."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return frame.f_code.co_filename.startswith(PACKAGE)


@contextlib.contextmanager
def interrupted(faultfs: FaultFS, called: Callable[[], bool] = is_called) -> Iterator[None]:
    """Send Ctrl-C when the block is in a call and requests are held; it leaves the block while they still are."""
    left = threading.Event()

    def send() -> None:
        assert settled(called)
        faultfs.await_held()
        os.kill(os.getpid(), signal.SIGINT)
        if not left.wait(120):
            faultfs.release()

    sender = InThread(send)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        assert faultfs.held() > 0, "Ctrl-C came when all was over"
    finally:
        left.set()
        sender.result("who sends Ctrl-C")


@contextlib.contextmanager
def interrupted_in(function: Any, faultfs: FaultFS) -> Iterator[None]:
    """Send Ctrl-C when a thread is in a function and requests are held, and let these go; it ends the block."""

    def send() -> None:
        faultfs.await_held()
        assert settled(lambda: threads_in(function) > 0)
        os.kill(os.getpid(), signal.SIGINT)
        faultfs.release()

    sender = InThread(send)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sender.result("who sends Ctrl-C")


@contextlib.contextmanager
def short_read(
    path: os.PathLike[str], *, expected: int, transferred: int | None = None
) -> Iterator[None]:
    """Expect a ShortReadError that names the file and the number of bytes read."""
    with pytest.raises(tensorferry.ShortReadError) as caught:
        yield
    error = caught.value
    assert os.fsdecode(error.filename) == str(path)
    assert str(path) in str(error)
    assert error.expected == expected
    assert 0 <= error.transferred < expected
    if transferred is not None:
        assert error.transferred == transferred


def assert_works(handle: tensorferry.aio_handle, directory: pathlib.Path) -> None:
    """Check that the handle has no pending operations, and that it writes and reads a file."""
    assert handle.wait() == 0
    path = directory / "still-works"
    written = np.arange(10007, dtype=np.uint32).view(np.uint8)
    read = np.zeros_like(written)
    assert handle.sync_pwrite(written, str(path)) == 1
    handle.async_pread(read, str(path))
    assert handle.wait() == 1
    assert_equal(read, written)
    assert_equal(contents(path), written)
    path.unlink()


def assert_equal(actual: Any, wanted: Any) -> None:
    """Compare bytes; report the position of the first difference instead of all bytes."""
    actual, wanted = (np.frombuffer(as_bytes(array), np.uint8) for array in (actual, wanted))
    assert actual.size == wanted.size, f"{actual.size} bytes instead of {wanted.size}"
    different = np.flatnonzero(actual != wanted)
    if different.size:
        raise AssertionError(f"{different.size} bytes differ, the first at {different[0]}")


def as_bytes(array: Any) -> Any:
    """Return the bytes of a torch tensor, NumPy array or buffer, in C order."""
    if hasattr(array, "detach"):  # a torch tensor
        import torch

        return array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if not isinstance(array, np.ndarray):
        return memoryview(array).cast("B")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def contents(path: pathlib.Path) -> Bytes:
    """Return the bytes of a file as the kernel gives them."""
    return np.fromfile(path, np.uint8)
