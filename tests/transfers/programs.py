"""Functions that the fault tests run in separate processes (see tests/support/child.py)."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import errno
import gc
import os
import pathlib
import resource
import signal
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer import arrays, runtime
from tensorferry.transfer import requests as transfers
from tests.support import seccomp
from tests.support.expect import assert_equal, assert_works, contents, is_called
from tests.support.forks import assert_exits_with_zero, passes_in_child
from tests.support.leaks import count_descriptors, settled
from tests.support.threads import InThread

if TYPE_CHECKING:
    from collections.abc import Callable


def leave_with_pending_writes(engine: str, directory: str, count: int, nbytes: int) -> None:
    """Submit writes and return: the interpreter ends while they are pending."""
    global kept
    handle = tensorferry.aio_handle(engine=engine)
    for index in range(count):
        array = np.full(nbytes, index + 1, np.uint8)
        handle.async_pwrite(array, f"{directory}/file{index}")
    file = tensorferry.open(f"{directory}/future", "w", engine=engine)
    kept = (handle, file, file.write_from(np.full(nbytes, 99, np.uint8)))


def leave_with_hung_reads(
    engine: str, path: str, count: int, patience_seconds: float, over: str
) -> None:
    """Exit with hung reads pending, each on a separate handle; make the file `over` at the end of the exit."""
    global kept
    atexit.unregister(runtime.finish_at_exit)
    atexit.register(pathlib.Path(over).touch)  # FUSE lets go of no process before that
    atexit.register(runtime.finish_at_exit)
    runtime.CLOSE_PATIENCE_SECONDS = patience_seconds
    kept = [tensorferry.aio_handle(engine=engine) for _ in range(count)]
    for handle in kept:
        handle.async_pread(bytearray(1 << 20), path)


kept: Any = None  # objects that live until the end of the interpreter


def import_in_another_interpreter(engine: str, directory: str, first: bool) -> str:
    """Import the package in a sub-interpreter, before or after its use in the main one; return the outcome."""
    try:
        import _interpreters as interpreters  # type: ignore[import-not-found,unused-ignore]

        other = interpreters.create("legacy")
    except ImportError:
        import _xxsubinterpreters as interpreters  # type: ignore[import-not-found,no-redef,unused-ignore]

        other = interpreters.create(isolated=False)
    said = pathlib.Path(directory) / "said"
    if not first:
        assert_works(tensorferry.aio_handle(engine=engine), pathlib.Path(directory))
    program = f"""
import sys
sys.path[:] = {sys.path!r}
try:
    import tensorferry
    said = "imported"
except ImportError as error:
    said = str(error)
open({str(said)!r}, "w").write(said)
"""
    interpreters.run_string(other, program)
    interpreters.destroy(other)
    handle = tensorferry.aio_handle(engine=engine)
    assert_works(handle, pathlib.Path(directory))
    handle.async_pwrite(bytes(3_000_001), f"{directory}/pending")  # the interpreter leaves with it
    return said.read_text()


def leave_by_exception(engine: str, directory: str, nbytes: int) -> None:
    """Arrange that the interpreter ends through an exception while writes are pending."""
    leave_with_pending_writes(engine, directory, 3, nbytes)

    def fail() -> None:
        raise RuntimeError("on the way out")

    atexit.register(fail)


def leave_with_unseen_failure(engine: str, path: str) -> None:
    """Leave with a write pending that will fail."""
    global kept
    kept = tensorferry.aio_handle(engine=engine)
    kept.async_pwrite(np.ones(4096, np.uint8), path)


def interrupt(engine: str, path: str, method: str, nbytes: int, raised: str) -> None:
    """Have Ctrl-C end a call that waits for a read, make the file `raised`, and wait for the read."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handle = tensorferry.aio_handle(engine=engine)
    file = tensorferry.open(path)
    wanted = np.full(nbytes, 5, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    schedulers = handle._scheduler, file._scheduler  # the file's is that of functions
    if method == "wait":
        handle.async_pread(target, path)
    if method == "result":
        future = file.read_into(target)

    def in_the_call() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        # A future's methods are the core's, and have no frame.
        called = is_called() or frame.f_code is calls[method].__code__
        return called and any(each.outstanding() for each in schedulers)

    def send() -> None:
        assert settled(in_the_call)
        os.kill(os.getpid(), signal.SIGINT)

    calls: dict[str, Any] = {
        "wait": lambda: handle.wait(),
        "result": lambda: future.result(),
        "sync_pread": lambda: handle.sync_pread(target, path),
        "file.read": lambda: file.read(target),
        "tensorferry.read": lambda: tensorferry.read(path, target),
    }
    sender = InThread(send)
    with pytest.raises(KeyboardInterrupt):
        calls[method]()
    sender.result()
    pathlib.Path(raised).touch()
    if method == "wait":  # it is still pending, and still counted
        assert handle.wait() == 1
        assert_equal(target, wanted)
    elif method == "result":
        assert_equal(future.result(), wanted)
    else:
        del target  # its memory must outlive the read in flight
        again = np.zeros(nbytes, np.uint8)
        handle.sync_pread(again, path)
        assert_equal(again, wanted)


def fork(engine: str, directory: str) -> None:
    """Fork with a handle, a file, and writes pending; check which operations work in the child."""
    data = np.arange(50_003, dtype=np.uint32).view(np.uint8)
    handle = tensorferry.aio_handle(engine=engine)
    path = pathlib.Path(directory)
    handle.sync_pwrite(data, path / "file")
    file = tensorferry.open(path / "file", engine=engine)
    for index in range(20):
        handle.async_pwrite(data, path / f"pending{index}")
    passes_in_child(lambda: _touch_what_the_parent_owns(handle, file, engine, path, data))
    assert handle.wait() == 20
    for index in range(20):
        assert_equal(contents(path / f"pending{index}"), data)
    target = np.zeros_like(data)
    file.read(target)
    assert_equal(target, data)
    assert_works(handle, path)


def fork_and_wait_for_the_parents_future(engine: str, path: str, asked: str) -> None:
    """Fork with a transfer that is held until we make the file `asked`; the child asks for its end in every way."""
    file = tensorferry.open(path, "w", engine=engine)
    future = file.write_from(np.ones(100_003, np.uint8))

    async def wait() -> None:
        await future

    async def run_as_a_task() -> None:
        await asyncio.create_task(future)

    def ask() -> None:
        _tell_of_the_fork(
            future.result,
            lambda: future.exception(1),
            lambda: future.add_done_callback(print),
            lambda: asyncio.run(wait()),
            lambda: asyncio.run(run_as_a_task()),
        )
        file.close()
        assert not future.done(), "the parent's transfer has ended here"

    passes_in_child(ask)
    assert not future.done()
    pathlib.Path(asked).touch()
    future.result(120)


def _tell_of_the_fork(*calls: Callable[[], object]) -> None:
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            if "fork" not in str(error):
                raise
        else:
            raise AssertionError(f"call {number} raised nothing in the child")


def _touch_what_the_parent_owns(
    handle: tensorferry.aio_handle,
    file: Any,
    engine: str,
    path: pathlib.Path,
    data: Any,
) -> None:
    target = np.zeros_like(data)
    _tell_of_the_fork(
        lambda: handle.sync_pread(target, path / "file"),
        lambda: handle.async_pwrite(data, path / "child"),
        lambda: handle.read(target, path / "file"),
        handle.wait,
        lambda: file.read(target),
        lambda: file.read_into(target),
    )
    assert not (path / "child").exists()
    assert not target.any()
    own = tensorferry.aio_handle(engine=engine)
    assert_works(own, path)
    tensorferry.read(path / "file", target)
    assert_equal(target, data)
    own.close()


def fork_and_leave_normally(engine: str, directory: str) -> None:
    """Fork with writes pending; the child leaves through the interpreter's own end."""
    handle = tensorferry.aio_handle(engine=engine)
    for index in range(5):
        handle.async_pwrite(np.full(4 << 20, 3, np.uint8), f"{directory}/file{index}")
    pid = os.fork()
    if pid == 0:
        handle = None  # dropped in the child: must neither hang nor finish the parent's writes
        sys.exit(0)
    assert_exits_with_zero(pid)
    assert handle.wait() == 5
    for index in range(5):
        assert (contents(pathlib.Path(f"{directory}/file{index}")) == 3).all()


def modules_imported_by_first_calls(engine: str, directory: str) -> list[str]:
    """Move bytes in the usual ways; return the modules that this imports."""
    data = np.full(70_001, 7, np.uint8)
    before = set(sys.modules)
    path = f"{directory}/file"
    tensorferry.write(path, data, sync=True)
    tensorferry.write_many([(path, data[:5], 0), (path, data[9:], 9)])
    tensorferry.read(path, data)
    tensorferry.read_many([(path, data[:5], 0), (path, data[9:], 9)])
    handle = tensorferry.aio_handle(engine=engine)
    handle.sync_pwrite(data, path)
    handle.async_pread(data, path)
    handle.wait()
    handle.close()
    with tensorferry.open(path, "r+", engine=engine) as file:
        file.write_from(data).result()
        file.read_into(data).result()
        with file.stream() as stream:
            stream.append(data)
    with contextlib.suppress(tensorferry.ShortReadError):
        tensorferry.read(path, data, 70_000)
    assert_equal(data, np.full(70_001, 7, np.uint8))
    return sorted(set(sys.modules) - before)


def fork_in_a_row(engine: str, directory: str) -> None:
    """Fork a child of a child; each process has its own handles."""
    path = pathlib.Path(directory)

    def work(generations: int) -> None:
        handle = tensorferry.aio_handle(engine=engine)
        assert_works(handle, path)
        if generations > 1:
            passes_in_child(lambda: work(generations - 1))
            assert_works(handle, path)

    work(3)


def work_in_pool(directory: str, engine: str, index: int) -> int:
    """Write and read a file in a worker of multiprocessing, with a new handle."""
    handle = tensorferry.aio_handle(engine=engine)
    data = np.full(100_003, index, np.uint8)
    target = np.zeros_like(data)
    path = f"{directory}/worker{index}"
    assert handle.sync_pwrite(data, path) == 1
    handle.async_pread(target, path)
    assert handle.wait() == 1
    assert_equal(target, data)
    tensorferry.read(path, target)
    return int(target[-1])


def multiprocess(engine: str, directory: str, method: str) -> list[int]:
    """Use multiprocessing while this process has handles that are busy."""
    import multiprocessing

    handle = tensorferry.aio_handle(engine=engine)
    for index in range(10):
        handle.async_pwrite(np.full(1 << 20, 1, np.uint8), f"{directory}/parent{index}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, from 3.12 on
        with multiprocessing.get_context(method).Pool(2) as pool:
            arguments = [(directory, engine, index) for index in range(1, 9)]
            results = pool.starmap(work_in_pool, arguments)
    assert handle.wait() == 10
    return results


def load_with_workers(engine: str, directory: str) -> list[float]:
    """Read samples through a handle that each DataLoader worker makes for itself."""
    import torch

    writer = tensorferry.aio_handle(engine=engine)
    for index in range(12):
        sample = torch.full((1001,), float(index))
        writer.async_pwrite(sample, f"{directory}/sample{index}")
    assert writer.wait() == 12

    class Samples(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            sample = torch.zeros(1001)
            if index % 2:
                tensorferry.aio_handle(engine=engine).sync_pread(
                    sample, f"{directory}/sample{index}"
                )
            else:
                tensorferry.read(f"{directory}/sample{index}", sample)
            return sample

    tensorferry.read(f"{directory}/sample0", torch.zeros(1001))
    loader = torch.utils.data.DataLoader(Samples(), batch_size=3, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        means = [float(mean) for batch in loader for mean in batch.mean(dim=1)]
    assert_works(writer, pathlib.Path(directory))
    return means


def few_descriptors(engine: str, directory: str, limit: int, count: int) -> None:
    """Write and read count files concurrently with a much lower limit of descriptors."""
    handle = tensorferry.aio_handle(engine=engine)
    assert_works(handle, pathlib.Path(directory))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    sources = [np.full(5_003, index % 251, np.uint8) for index in range(count)]
    paths = [pathlib.Path(f"{directory}/file{index}") for index in range(count)]
    for source, path in zip(sources, paths, strict=True):
        handle.async_pwrite(source, path)
    assert handle.wait() == count
    targets = [np.zeros(5_003, np.uint8) for _ in paths]
    for target, path in zip(targets, paths, strict=True):
        handle.async_pread(target, path)
    assert handle.wait() == count
    for source, target, path in zip(sources, targets, paths, strict=True):
        assert_equal(target, source)
        assert_equal(contents(path), source)
    tensorferry.write_many([(path, source) for path, source in zip(paths, targets, strict=True)])
    again = [np.zeros(5_003, np.uint8) for _ in paths]
    tensorferry.read_many([(path, target) for path, target in zip(paths, again, strict=True)])
    for source, target in zip(sources, again, strict=True):
        assert_equal(target, source)


def _all_descriptors() -> list[int]:
    """Open all remaining descriptors; return them."""
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    return taken


def two_names_and_few_descriptors(engine: str, directory: str, most: int) -> list[bool]:
    """Write a file by two of its names, with 0 to `most` free descriptors; return for each number whether that worked.

    What worked has all bytes, and what did not has changed nothing.
    """
    assert tensorferry.engines()[engine] is None
    runtime._NO_PROGRESS_SECONDS = 0.1
    tensorferry.write(f"{directory}/first", b"1")
    old, new = b"o" * 200_000, b"x" * 10 + b"o" * 99_990 + b"y" * 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    whole = []
    for free in range(most + 1):
        names = [pathlib.Path(f"{directory}/{name}{free}") for name in "ab"]
        names[0].write_bytes(old)
        names[1].hardlink_to(names[0])
        taken = _all_descriptors()
        for _ in range(free):
            os.close(taken.pop())
        items = [(names[0], b"x" * 10, 0), (names[1], b"y" * 10, 100_000)]
        try:
            tensorferry.write_many(items, truncate=True)
            whole.append(True)
        except tensorferry.StorageError as error:
            if error.errno != errno.EMFILE:
                raise
            whole.append(False)
        finally:
            for one in taken:
                os.close(one)
        assert names[0].read_bytes() == (new if whole[-1] else old)
    return whole


def descriptors_given_back_meanwhile(engine: str, directory: str) -> list[int]:
    """Run out of descriptors; all of them are freed before the number of outstanding transfers is read.

    Returns how many transfers were outstanding at each try to open a file.
    """
    handle = tensorferry.aio_handle(engine=engine)
    assert_works(handle, pathlib.Path(directory))
    outstanding: list[int] = []

    def open_one() -> list[int]:
        outstanding.append(handle._scheduler.outstanding())
        try:
            tensorferry._core.open_file(f"{directory}/one", False, True, True, False, False, "auto")
        except tensorferry.StorageError:
            while held:
                os.close(held.pop())
            handle.wait()
            raise
        return outstanding

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    handle.async_pwrite(np.zeros(64 << 20, np.uint8), f"{directory}/pending")
    held = _all_descriptors()
    return runtime.with_descriptors(handle._scheduler, open_one)


def stream_at_the_limit(engine: str, directory: str) -> int:
    """Begin a stream without free descriptors; a pending write will free some."""
    path = pathlib.Path(directory) / "file"
    file = tensorferry.open(path, "w", engine=engine)
    source = np.zeros(64 << 20, np.uint8)
    memory = arrays.memory_of(source, writable=False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    pending = transfers.start(
        file._scheduler, f"{directory}/pending", source, memory, 0, write=True
    )
    _all_descriptors()
    with file.stream() as stream:
        stream.append(b"12345")
    pending.result()
    file.close()
    return path.stat().st_size


def files_while_none_ends(engine: str, directory: str, counted: str, limit: int, count: int) -> int:
    """Write files, with all writes held until the descriptors are counted; return the number of descriptors in use."""
    handle = tensorferry.aio_handle(engine=engine)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    before = count_descriptors()
    taken = []
    wait_for_progress = tensorferry._core.Scheduler.wait_for_progress

    def note() -> None:
        taken.append(count_descriptors() - before)
        pathlib.Path(counted).touch()

    def note_and_wait(scheduler: Any, timeout_seconds: float) -> bool:
        note()
        return wait_for_progress(scheduler, timeout_seconds)

    tensorferry._core.Scheduler.wait_for_progress = note_and_wait  # type: ignore[method-assign]
    for index in range(count):
        handle.async_pwrite(bytes(5_003), f"{directory}/file{index}")
    note()
    assert handle.wait() == count
    return taken[0]


def files_already_open(engine: str, directory: str, held: str) -> int:
    """Read from open files, which have more than half of the descriptors, while a read by path is held.

    Returns how many reads have ended by then.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    path = pathlib.Path(directory) / "file"
    data = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    data.tofile(path)
    handle = tensorferry.aio_handle(engine=engine)
    handle.async_pread(bytearray(4 << 20), held)
    files = [tensorferry.open(path) for _ in range(120)]
    ended = 0
    for _ in range(10):
        futures = [file.read_into(np.zeros(2 << 20, np.uint8), 1 << 20) for file in files[:5]]
        for future in futures:
            assert_equal(future.result(), data[1 << 20 : 3 << 20])
            ended += 1
    other = np.zeros(4 << 20, np.uint8)  # by path, of which few are on their way
    handle.async_pread(other, path)
    assert handle._scheduler.outstanding() > 0, "the held one"
    pathlib.Path(f"{directory}/over").touch()
    assert handle.wait() == 2
    assert_equal(other, data)
    return ended


def descriptors_used_up_by_others(engine: str, directory: str, held: str, by_path: bool) -> int:
    """Read by path while the application has all descriptors, and another read is held; return the errno."""
    path = pathlib.Path(directory) / "file"
    path.write_bytes(bytes(100_003))
    handle = tensorferry.aio_handle(engine=engine)
    assert_works(handle, path.parent)
    with tensorferry.open(held, engine=engine) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        scheduler = handle._scheduler if by_path else file._scheduler
        if by_path:
            handle.async_pread(bytearray(4 << 20), held)
        else:
            held_read = file.read_into(bytearray(4 << 20))
        taken = _all_descriptors()
        try:
            tensorferry.transfer.requests.transfer(
                scheduler, str(path), arrays.memory_of(bytearray(10), writable=True), 0, write=False
            )
        except tensorferry.StorageError as error:
            number = error.errno
        for descriptor in taken:
            os.close(descriptor)
        assert scheduler.outstanding() > 0, "the held one"
        pathlib.Path(f"{directory}/over").touch()
        if by_path:
            assert handle.wait() == 1
        else:
            held_read.result()
    assert number is not None
    return number


def no_descriptors(engine: str, directory: str) -> dict[str, Any]:
    """Open a file without a free descriptor, and again with one."""
    path = pathlib.Path(directory) / "file"
    path.write_bytes(bytes(4096))
    handle = tensorferry.aio_handle(engine=engine)
    assert_works(handle, path.parent)
    tensorferry.read(path, np.zeros(4096, np.uint8))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = _all_descriptors()
    errors = []
    calls = [
        lambda: handle.sync_pread(np.zeros(4096, np.uint8), path),
        lambda: handle.async_pread(np.zeros(4096, np.uint8), path),
        lambda: handle.sync_pwrite(np.zeros(4096, np.uint8), path),
        lambda: tensorferry.read(path, np.zeros(4096, np.uint8)),
    ]
    for call in calls:
        for _ in range(100):
            try:
                call()
            except tensorferry.StorageError as error:
                errors.append([error.errno, str(error.filename)])
    refusals = []
    for attempt in (
        lambda: tensorferry.aio_handle(engine=engine),
        lambda: tensorferry.open(path, engine=engine),
    ):
        for _ in range(20):
            try:
                attempt()
            except (tensorferry.StorageError, tensorferry.EngineUnavailableError) as error:
                refusals.append(str(error))
    for descriptor in taken:
        os.close(descriptor)
    assert_works(handle, path.parent)
    before = count_descriptors()
    assert_works(tensorferry.aio_handle(engine=engine), path.parent)
    gc.collect()
    return {"errors": errors, "refusals": refusals, "grown": count_descriptors() - before}


def little_lockable_memory(engine: str, directory: str, limit: int) -> dict[str, Any]:
    """Transfer 16 MiB as an unprivileged user with a limit of locked memory."""
    import torch

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    except PermissionError as error:
        return {"skip": f"becoming another user needs root: {error}"}
    assert ctypes.CDLL(None).mlock(ctypes.create_string_buffer(2 * limit), 2 * limit) != 0
    path = pathlib.Path(directory) / "file"
    refusal = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            handle = tensorferry.aio_handle(engine=engine)
        except tensorferry.EngineUnavailableError as error:
            refusal = str(error)
            handle = tensorferry.aio_handle()
        plain = torch.arange(4 << 20, dtype=torch.int32)
        target = torch.zeros_like(plain)
        assert handle.sync_pwrite(plain, path) == 1
        assert handle.sync_pread(target, path) == 1
        assert torch.equal(target, plain)
        for _ in range(3):
            locked = handle.new_cpu_locked_tensor(plain.numel(), plain)
            locked.copy_(plain)
            assert handle.sync_pwrite(locked, path, 7) == 1
            locked.zero_()
            handle.async_pread(locked, path, 7)
            assert handle.wait() == 1
            assert torch.equal(locked, plain)
            handle.free_cpu_locked_tensor(locked)
        empty = tensorferry.empty((1 << 20,), torch.int32).fill_(3)
        assert handle.sync_pwrite(empty, path) == 1
        assert_works(handle, path.parent)
        automatic = [tensorferry.aio_handle() for _ in range(8)]
        for other in automatic:
            assert_works(other, path.parent)
    return {
        "engine": handle.engine,
        "refusal": refusal,
        "automatic": [[other.engine, other.engine_refusals] for other in automatic],
        "uid": os.getuid(),
        "warnings": [str(warning.message) for warning in caught],
    }


def no_threads_allowed(engine: str, directory: str) -> dict[str, Any]:
    """Open handles and files as an unprivileged user without the right to start threads, then with it."""
    os.environ["TENSORFERRY_ENGINE"] = engine
    path = pathlib.Path(directory) / "file"
    path.write_bytes(bytes(4096))
    path.chmod(0o666)
    if refused := _become_nobody():
        return {"skip": refused}
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    array = np.ones(4096, np.uint8)
    refusals = []
    for attempt in (
        lambda: tensorferry.aio_handle(engine=engine),
        lambda: tensorferry.open(path, engine=engine),
        lambda: tensorferry.write(path, array),
        lambda: tensorferry.read_many([(path, array)]),
    ):
        try:
            attempt()
        except tensorferry.EngineUnavailableError as error:
            refusals.append(str(error))
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    handle = tensorferry.aio_handle(engine=engine)
    assert_works(handle, path.parent)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    assert_works(handle, path.parent)  # a handle that has its threads needs no new ones
    return {"refusals": refusals}


def _become_nobody() -> str:
    """Become an unprivileged user, to whom limits of processes apply; or return the reason why that fails."""
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    except PermissionError as error:
        return f"becoming another user needs root: {error}"
    return ""


def no_further_threads(engine: str, directory: str, count: int) -> dict[str, Any]:
    """Move large and small arrays by existing handles and files, after the user has lost the right to start threads."""
    os.environ["TENSORFERRY_ENGINE"] = engine
    folder = pathlib.Path(directory)
    rng = np.random.default_rng(count)
    arrays = [
        rng.integers(0, 256, nbytes, np.uint8)
        for nbytes in (10, 4096, 5000, 100_003, 1 << 20, (8 << 20) + 17)
    ]
    handle = tensorferry.aio_handle(
        engine=engine, block_size=1 << 20, intra_op_parallelism=count, queue_depth=8
    )
    tensorferry.write(folder / "first", arrays[0])
    if refused := _become_nobody():
        return {"skip": refused}
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    for index, array in enumerate(arrays):
        path = folder / f"by-handle-{index}"
        assert handle.sync_pwrite(array, path) == 1
        found = np.zeros_like(array)
        assert handle.sync_pread(found, path) == 1
        assert_equal(found, array)
        path = folder / f"by-file-{index}"
        with tensorferry.open(path, "w+") as file:
            half = array.nbytes // 2
            for future in [
                file.write_from(array[:half]),
                file.write_from(array[half:], half, sync=True),
            ]:
                future.result()
            found = file.read_into(np.zeros_like(array)).result()
            assert_equal(found, array)
        tensorferry.write(folder / f"at-once-{index}", array, sync=True)
        with tensorferry.open(folder / f"stream-{index}", "w") as file, file.stream() as stream:
            stream.append([array, array])
    many = [(folder / f"many-{index}", array) for index, array in enumerate(arrays)]
    tensorferry.write_many(many, atomic=True)
    tensorferry.read_many([(path, found := np.zeros_like(array)) for path, array in many])
    assert_equal(found, arrays[-1])
    for index, array in enumerate(arrays):
        assert (folder / f"at-once-{index}").read_bytes() == array.tobytes()
        assert (folder / f"stream-{index}").read_bytes() == 2 * array.tobytes()
    with tensorferry.open(folder / "first") as file:

        def read_until_one_has_not_ended() -> None:  # callbacks of ended transfers need no thread
            while True:
                file.read_into(bytearray(10)).add_done_callback(lambda _: None)

        with pytest.raises(RuntimeError, match=r"callbacks.*thread.*--pids-limit"):
            read_until_one_has_not_ended()
    return {"names": [thread.name for thread in threading.enumerate()]}


def little_address_space(engine: str, directory: str) -> dict[str, Any]:
    """Ask for more than the limit of address space has room for: threads, a ring or context, memory."""
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (24 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    said = []
    for ask in (
        lambda: tensorferry.aio_handle(engine=engine, intra_op_parallelism=32, queue_depth=64),
        lambda: tensorferry.empty(64 << 20, np.uint8),
    ):
        try:
            ask()
        except (tensorferry.EngineUnavailableError, MemoryError) as error:
            said.append(str(error))
    return {"said": said, "limit": limit}


def without_proc(engine: str, directory: str) -> dict[str, Any]:
    """Write and read without a mounted /proc."""
    os.environ["TENSORFERRY_ENGINE"] = engine
    folder = pathlib.Path(directory)
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, detach = 0x20000, 0x44000, 2
    if (
        libc.unshare(new_mounts) != 0
        or libc.mount(b"none", b"/", None, private, None) != 0
        or libc.umount2(b"/proc", detach) != 0
    ):
        return {"skip": f"no namespace of mounts: {os.strerror(ctypes.get_errno())}"}
    assert not pathlib.Path("/proc/self").exists()
    array = np.random.default_rng(1).integers(0, 256, 3_000_017, np.uint8)
    os.chdir(folder)
    for atomic in (False, True):
        for name in ("relative", folder / "absolute"):
            for _ in range(2):
                tensorferry.write(name, array, atomic=atomic, sync=True)
                assert_equal(tensorferry.read(name, np.zeros_like(array)), array)
        tensorferry.write_many([(folder / f"{index}", array) for index in range(3)], atomic=atomic)
        assert_equal(tensorferry.read(folder / "2", np.zeros_like(array)), array)
    with tensorferry.open("file", "w+") as file:
        file.write(array, 5)
        os.chdir("/")
        (folder / "file").rename(folder / "renamed")
        file.write(array[:100], 5_000_001)
        assert_equal(file.read(np.zeros_like(array), 5), array)
    descriptor = os.open(folder / "absolute", os.O_RDWR)
    tensorferry.aio_handle(engine=engine).sync_pwrite(array[:1000], descriptor, 7)
    os.close(descriptor)
    assert (folder / "absolute").read_bytes()[7:1007] == array[:1000].tobytes()
    names = sorted(each.name for each in folder.iterdir())
    try:
        with tensorferry.open(folder / "direct", "w", direct=True) as file:
            file.write(array)
        refused = ""
    except tensorferry.StorageError as error:
        refused = str(error)
    return {"names": names, "refused": refused}


def exhaust_aio_contexts(directory: str) -> dict[str, Any]:
    """Allocate all Linux AIO contexts of the system, then open a handle without io_uring."""
    seccomp.block(["io_uring"])
    path = pathlib.Path(directory)
    handles = []
    refusal = ""
    for _ in range(3000):
        try:
            handles.append(tensorferry.aio_handle(engine="libaio", queue_depth=1024))
        except tensorferry.EngineUnavailableError as error:
            refusal = str(error)
            break
    for _ in range(3000):  # the contexts that are left for handles with default settings
        try:
            handles.append(tensorferry.aio_handle(engine="libaio", queue_depth=128))
        except tensorferry.EngineUnavailableError:
            break
    automatic = tensorferry.aio_handle()
    result = {
        "handles": len(handles),
        "refusal": refusal,
        "engine": automatic.engine,
        "refusals": automatic.engine_refusals,
    }
    assert_works(automatic, path)
    tensorferry.write(path / "file", np.ones(5000, np.uint8))
    if handles:
        assert_works(handles[0], path)
        assert_works(handles[-1], path)
    for handle in handles:
        handle.close()
    again = tensorferry.aio_handle(engine="libaio")
    assert_works(again, path)
    return result


def report_engine(directory: str) -> dict[str, Any]:
    """Return the engine of a handle, and the reasons against the others."""
    handle = tensorferry.aio_handle()
    assert_works(handle, pathlib.Path(directory))
    forced = {}
    for name in ("io_uring", "libaio", "threads"):
        try:
            tensorferry.aio_handle(engine=name)
        except tensorferry.EngineUnavailableError as error:
            forced[name] = str(error)
    return {
        "engine": handle.engine,
        "refusals": handle.engine_refusals,
        "engines": tensorferry.engines(),
        "forced": forced,
    }


def forbidden_while_running(engine: str, directory: str) -> list[int]:
    """Forbid the engine's system calls to a handle that works, and return how three writes fail."""
    handle = tensorferry.aio_handle(engine=engine)
    array = np.full(8 << 20, 7, np.uint8)
    handle.sync_pwrite(array, f"{directory}/before")
    seccomp.block([{"io_uring": "io_uring", "libaio": "aio"}[engine]])
    errors = []
    for index in range(3):
        handle.async_pwrite(array, f"{directory}/file{index}")
        try:
            handle.wait()
        except OSError as error:
            errors.append(error.errno or 0)
    handle.close()
    return errors
