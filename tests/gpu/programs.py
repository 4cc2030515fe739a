"""Functions that the GPU tests run in separate processes (see tests/support/child.py)."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import tensorferry
from tensorferry import _core
from tests.support import gpus
from tests.support.expect import assert_equal, assert_works, contents
from tests.support.forks import assert_exits_with_zero, in_child

if TYPE_CHECKING:
    from collections.abc import Callable

SIGNAL_DELAY_S = 0.3

kept: Any = None


class Unreachable:
    """An array that reports GPU memory, for processes without a GPU."""

    __cuda_array_interface__ = {  # noqa: RUF012
        "typestr": "|u1",
        "shape": (4096,),
        "data": (0x7F0000000000, False),
        "strides": None,
        "stream": 1,
        "version": 3,
    }


def the_gpu() -> gpus.Gpu:
    """Return the GPUs that the parent's tests use."""
    gpu = gpus.chosen()
    assert not isinstance(gpu, str), gpu
    return gpu


def refusals(directory: str) -> dict[str, Any]:
    """Return the refusal of GPU memory without a usable driver; host memory still works."""
    answers = {}
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: tensorferry.write(f"{directory}/file", Unreachable()),
        "read": lambda: tensorferry.read(f"{directory}/file", Unreachable()),
        "handle": lambda: tensorferry.aio_handle().async_pwrite(Unreachable(), f"{directory}/file"),
        "many": lambda: tensorferry.write_many([(f"{directory}/file", Unreachable())]),
    }
    for name, call in calls.items():
        try:
            call()
        except tensorferry.EngineUnavailableError as error:
            answers[name] = str(error)
    answers["files"] = [path.name for path in pathlib.Path(directory).iterdir()]
    assert_works(tensorferry.aio_handle(), pathlib.Path(directory))
    return {"answers": answers, "refusal": _core.cuda_refusal(), "in_use": _core.cuda_in_use()}


def leave_with_pending_writes(
    engine: str, directory: str, count: int, nbytes: int, slow_s: float
) -> bool:
    """Submit writes, some behind a kernel, and return: the interpreter ends while they are pending."""
    global kept
    gpu = the_gpu()
    handle = tensorferry.aio_handle(engine=engine)
    with gpu.new_stream():
        for index in range(count):
            array = gpu.array(nbytes)
            gpu.fill_later(array, index + 1, slow_s)
            handle.async_pwrite(array, f"{directory}/file{index}")
        array = gpu.array(bytes([99]) * nbytes)
        file = tensorferry.open(f"{directory}/future", "w", engine=engine)
        kept = (handle, file, file.write_from(array))
    return True


def leave_with_pending_reads(engine: str, directory: str, count: int, nbytes: int) -> bool:
    """Submit reads without waiting for them, and return."""
    global kept
    gpu = the_gpu()
    np.full(nbytes, 5, np.uint8).tofile(f"{directory}/file")
    handle = tensorferry.aio_handle(engine=engine)
    for _ in range(count):
        handle.async_pread(gpu.array(nbytes), f"{directory}/file")
    kept = handle
    return True


def interrupt(engine: str, directory: str, method: str, nbytes: int) -> bool:
    """Have Ctrl-C end a call that waits for a kernel; return whether that ran on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gpu = the_gpu()
    path = pathlib.Path(directory) / "file"
    handle = tensorferry.aio_handle(engine=engine)
    array, other = gpu.array(nbytes), gpu.array(16)
    handle.sync_pwrite(array, path)

    def send() -> None:
        time.sleep(SIGNAL_DELAY_S)
        os.kill(os.getpid(), signal.SIGINT)

    with gpu.new_stream():
        gpu.fill_later(other, 1, 2.0)
        gpu.fill_later(array, 7, 0)
        running = threading.Thread(target=gpu.synchronize)
        running.start()
        threading.Thread(target=send).start()
        try:
            if method == "wait":
                handle.async_pwrite(array, path)
                handle.wait()
            elif method == "sync_pwrite":
                handle.sync_pwrite(array, path)
            elif method == "sync_pread":
                handle.sync_pread(array, path)
            elif method == "function":
                os.environ["TENSORFERRY_ENGINE"] = engine
                tensorferry.write(path, array)
        except KeyboardInterrupt:
            ran_on = running.is_alive()
        else:
            raise AssertionError(f"{method} was not interrupted")
    if method == "wait":  # it is still pending, and still counted
        assert handle.wait() == 1
        assert (contents(path) == 7).all()
    gpu.synchronize()
    assert_moves(gpu, handle, path.parent)
    return ran_on


def assert_moves(gpu: gpus.Gpu, handle: tensorferry.aio_handle, directory: pathlib.Path) -> None:
    """Check that handle writes and reads GPU memory, and host memory."""
    data = np.arange(300_007, dtype=np.uint32).view(np.uint8)
    found = gpu.array(data.size)
    path = directory / "still-moves"
    assert handle.sync_pwrite(gpu.array(data), path) == 1
    assert_equal(contents(path), data)
    handle.async_pread(found, path)
    assert handle.wait() == 1
    assert_equal(gpu.bytes_of(found), data)
    path.unlink()
    assert_works(handle, directory)


def fork(engine: str, directory: str) -> list[str]:
    """Fork after a transfer of GPU memory; return the errors of transfers in the child."""
    gpu = the_gpu()
    path = pathlib.Path(directory)
    handle = tensorferry.aio_handle(engine=engine)
    array = gpu.array(bytes(range(256)) * 1000)
    handle.sync_pwrite(array, path / "file")
    for index in range(10):
        handle.async_pwrite(array, path / f"pending{index}")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        in_child(lambda: _write_answers(writer, gpu, engine, array, path))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answers = pipe.read().splitlines()
    assert_exits_with_zero(child)
    assert handle.wait() == 10
    for index in range(10):
        assert_equal(contents(path / f"pending{index}"), bytes(range(256)) * 1000)
    assert_moves(gpu, handle, path)
    return answers


def _write_answers(writer: int, gpu: gpus.Gpu, engine: str, array: Any, path: pathlib.Path) -> None:
    own = tensorferry.aio_handle(engine=engine)
    calls: list[Callable[[], object]] = [
        lambda: own.sync_pwrite(array, path / "child"),
        lambda: own.async_pread(array, path / "file"),
        lambda: tensorferry.write(path / "child", array),
        lambda: tensorferry.read_many([(path / "file", array)]),
    ]
    with os.fdopen(writer, "w") as pipe:
        for call in calls:
            try:
                call()
            except Exception as error:
                text = str(error).replace("\n", " ")
                pipe.write(f"{type(error).__name__}: {text}\n")
            else:
                pipe.write("nothing was raised\n")
    assert not (path / "child").exists()
    assert_works(own, path)
    own.close()


def limited_file_size(engine: str, directory: str, nbytes: int, limit: int) -> dict[str, Any]:
    """Write past the size that files may have: the pipeline's writes fail when many have been done."""
    gpu = the_gpu()
    path = pathlib.Path(directory) / "file"
    handle = tensorferry.aio_handle(engine=engine, block_size=65536, queue_depth=4)
    path.write_bytes(bytes(nbytes))  # its space is then allocated, and a write does not reserve it
    array = gpu.array(b"\7" * nbytes)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    answers = {}
    for name in ("sync", "async"):
        try:
            if name == "sync":
                handle.sync_pwrite(array, path)
            else:
                handle.async_pwrite(array, path)
                handle.wait()
        except tensorferry.StorageError as error:
            answers[name] = [error.errno, error.expected, error.transferred, error.offset]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    beyond = bool(contents(path)[limit:].any())
    assert_moves(gpu, handle, path.parent)
    return {"answers": answers, "beyond": beyond}
