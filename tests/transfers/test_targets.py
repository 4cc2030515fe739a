"""Targets that are not regular files, and descriptors of all kinds: they work, or are refused at once, by name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.base.file_locks import is_locked, set_lock
from tensorferry.transfer.files import File
from tests.support.engines import one_engine
from tests.support.expect import assert_equal, assert_works, contents, storage_error
from tests.support.leaks import Holdings, count_descriptors
from tests.support.threads import InThread

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes

NBYTES = 200_003


def fifo(directory: pathlib.Path) -> pathlib.Path:
    os.mkfifo(directory / "fifo")
    return directory / "fifo"


def unix_socket(directory: pathlib.Path) -> pathlib.Path:
    path = directory / "socket"
    before = os.getcwd()  # noqa: PTH109
    os.chdir(directory)  # the path of a socket may have no more than 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("socket")
    finally:
        os.chdir(before)
    return path


def null(_: pathlib.Path) -> str:
    return "/dev/null"


def zero(_: pathlib.Path) -> str:
    return "/dev/zero"


def terminal(_: pathlib.Path) -> str:
    return "/dev/ptmx"


def same(directory: pathlib.Path) -> pathlib.Path:
    return directory


def circle(directory: pathlib.Path) -> pathlib.Path:
    (directory / "circle").symlink_to(directory / "circle")
    return directory / "circle"


REFUSED: list[tuple[Callable[[pathlib.Path], Any], tuple[int, ...]]] = [
    (fifo, (errno.ESPIPE, errno.ENXIO)),
    (unix_socket, (errno.ENXIO,)),
    (null, (errno.ESPIPE,)),
    (zero, (errno.ESPIPE,)),
    (terminal, (errno.ESPIPE, errno.EIO)),
    (same, (errno.EISDIR,)),
    (circle, (errno.ELOOP,)),
]


@pytest.mark.parametrize(("make", "errors"), REFUSED, ids=[make.__name__ for make, _ in REFUSED])
def test_what_cannot_hold_a_tensor_is_refused_by_name_in_every_call(
    handle: tensorferry.aio_handle,
    directory: pathlib.Path,
    make: Callable[[pathlib.Path], Any],
    errors: tuple[int, ...],
) -> None:
    target, array = make(directory), np.zeros(NBYTES, np.uint8)
    good = directory / "good"
    assert_works(handle, directory)
    tensorferry.write_many([(good, array)], sync=True)
    calls: list[Callable[[], Any]] = [
        lambda: tensorferry.read(target, array),
        lambda: tensorferry.write(target, array, sync=True),
        lambda: tensorferry.write(target, array[:0]),
        lambda: tensorferry.read_many([(good, array), (target, array.copy())]),
        lambda: tensorferry.write_many([(good, array), (target, array)], truncate=True),
        lambda: handle.sync_pread(array, target),
        lambda: handle.sync_pwrite(array, target),
        lambda: handle.async_pread(array, target),
        lambda: handle.async_pwrite(array, target),
        *(lambda mode=mode: tensorferry.open(target, mode) for mode in ("r", "r+", "w", "w+")),  # type: ignore[misc]
    ]
    before = Holdings.now().descriptors  # now() also releases descriptors of earlier tests
    for call in calls:
        with storage_error(errors, target):
            call()
    assert handle.wait() == 0
    assert count_descriptors() <= before
    assert contents(good).size == NBYTES
    if make is not same:
        assert_works(handle, directory)


def test_a_fifo_that_somebody_has_open_is_refused_too(
    handle: tensorferry.aio_handle, directory: pathlib.Path
) -> None:
    path = fifo(directory)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    os.write(descriptor, b"x" * 4096)
    array = np.zeros(4096, np.uint8)
    for target in (path, descriptor):
        for call in (handle.sync_pread, handle.sync_pwrite, handle.async_pread):
            with storage_error(errno.ESPIPE, path):
                call(array, target)
    assert len(os.read(descriptor, 1 << 16)) == 4096
    os.close(descriptor)


CALLS = ["sync_pread", "async_pread", "read", "sync_pwrite", "async_pwrite", "write"]


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (os.O_RDONLY, "write"),
        (os.O_WRONLY, "read"),
        (os.O_RDWR, ""),
        (os.O_RDWR | os.O_APPEND, ""),
        (os.O_RDWR | os.O_DIRECT, ""),
        (os.O_RDWR | os.O_SYNC | os.O_NONBLOCK, ""),
        (os.O_PATH, "write"),
    ],
)
def test_a_descriptor_is_used_for_what_it_was_opened_for_and_stays_as_it_was(
    handle: tensorferry.aio_handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    flags: int,
    refused: str,
) -> None:
    path = directory / "file"
    data = random_bytes(NBYTES)
    data.tofile(path)
    descriptor = os.open(path, flags)
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        for name in CALLS:
            expected = contents(path)
            new = random_bytes(NBYTES - 10)
            arguments: tuple[Any, ...] = (False, 7) if name in ("read", "write") else (7,)
            if refused and refused in name:
                with storage_error(errno.EBADF, f"descriptor {descriptor}") as caught:  # type: ignore[arg-type]
                    getattr(handle, name)(new, descriptor, *arguments)
                assert "only" in str(caught.value)
            else:
                getattr(handle, name)(new, descriptor, *arguments)
                assert handle.wait() == name.startswith("async")
                if "write" in name:
                    expected[7:-3] = new
                assert_equal(new, expected[7:-3])
            assert_equal(contents(path), expected)
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) == before
        if flags != os.O_PATH:
            assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    finally:
        os.close(descriptor)


def test_direct_descriptors_that_cannot_be_opened_again_are_refused(
    directory: pathlib.Path,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give up the right to open a file")
    path = directory / "file"
    path.touch(0o600)
    descriptor = os.open(path, os.O_RDWR)
    array = tensorferry.empty(1 << 20)
    os.seteuid(65534)
    try:
        File._from_descriptor(descriptor).write(array)
        with storage_error(errno.EACCES, f"descriptor {descriptor}") as caught:  # type: ignore[arg-type]
            File._from_descriptor(descriptor, direct=True)
        assert "direct=True" in str(caught.value)
    finally:
        os.seteuid(0)
        os.close(descriptor)


def test_functions_take_paths_only_and_leave_a_descriptor_as_it_was(
    directory: pathlib.Path,
) -> None:
    path, array = directory / "file", np.zeros(3, np.uint8)
    path.write_bytes(b"x" * 100)
    with path.open("r+b") as file:
        descriptor: Any = file.fileno()
        for call in (
            lambda: tensorferry.write(descriptor, array),
            lambda: tensorferry.write(descriptor, array, 5),
            lambda: tensorferry.write(descriptor, array, atomic=True),
            lambda: tensorferry.write_many([(directory / "new", array), (descriptor, array)]),
            lambda: tensorferry.read(descriptor, array),
            lambda: tensorferry.read_many([(path, array), (descriptor, array.copy(), 5)]),
            lambda: tensorferry.open(descriptor),
        ):
            with pytest.raises(TypeError, match="expected a path, got int"):
                call()
    assert path.read_bytes() == b"x" * 100
    assert list(directory.iterdir()) == [path]


@pytest.mark.usefixtures("default_engine")
def test_a_new_file_that_is_refused_is_not_left(tmpfs_directory: pathlib.Path) -> None:
    """Files in memory have no direct I/O."""
    path, old = tmpfs_directory / "new", tmpfs_directory / "old"
    old.touch()
    for target in (path, old):
        for call in (
            lambda: tensorferry.open(target, "x", direct=True),  # noqa: B023
            lambda: tensorferry.open(target, "w+", direct=True),  # noqa: B023
            lambda: tensorferry.write(target, b"1", direct=True),  # noqa: B023
            lambda: tensorferry.write_many([(target, b"1")], direct=True),  # noqa: B023
            lambda: tensorferry.write(target, b"1", direct=True, atomic=True),  # noqa: B023
        ):
            with pytest.raises((tensorferry.StorageError, FileExistsError)):
                call()
            assert [*tmpfs_directory.iterdir()] == [old]
    tensorferry.open(path, "x").close()


def test_files_without_a_name_are_written_and_read_by_their_descriptors(
    handle: tensorferry.aio_handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    removed = os.open(directory / "removed", os.O_RDWR | os.O_CREAT)
    (directory / "removed").unlink()
    nameless = os.open(directory, os.O_RDWR | os.O_TMPFILE)
    in_memory = os.memfd_create("memory")
    for descriptor in (removed, nameless, in_memory):
        data = random_bytes(NBYTES)
        handle.async_pwrite(data, fd=descriptor, file_offset=5)
        assert handle.wait() == 1
        assert os.pread(descriptor, NBYTES + 100, 5) == data.tobytes()
        found = np.zeros_like(data)
        assert handle.sync_pread(found, descriptor, 5) == 1
        assert_equal(found, data)
        os.close(descriptor)
        with storage_error(errno.EBADF, f"descriptor {descriptor}"):  # type: ignore[arg-type]
            handle.async_pread(found, descriptor)
    assert handle.wait() == 0


def test_descriptors_that_lead_to_no_file_are_refused_by_name(
    handle: tensorferry.aio_handle, directory: pathlib.Path
) -> None:
    pipe, socks = os.pipe(), socket.socketpair()
    folder, event = os.open(directory, os.O_RDONLY), os.eventfd(0)
    array = np.zeros(NBYTES, np.uint8)
    for descriptor in (pipe[0], socks[0].fileno(), folder, event):
        named = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        with pytest.raises(tensorferry.StorageError) as caught:
            handle.async_pread(array, descriptor)
        assert caught.value.errno in (errno.ESPIPE, errno.EISDIR, errno.ENXIO)
        assert caught.value.filename in (named, f"descriptor {descriptor}")
    for descriptor in (*pipe, folder, event):
        os.close(descriptor)
    for one in socks:
        one.close()
    for wrong in (-1, 1 << 20):
        with storage_error(errno.EBADF, f"descriptor {wrong}"):  # type: ignore[arg-type]
            handle.sync_pread(array, wrong)
    for call in (tensorferry.open, lambda target: handle.sync_pread(array, target)):
        with pytest.raises(TypeError):
            call(True)  # type: ignore[operator]


# Leases, as Samba and NFS servers have them on files that their clients keep

HOLDER = """
import fcntl, os, signal, sys
kind, path = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
descriptor = os.open(path, os.O_RDONLY if kind == "read" else os.O_RDWR)
fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK if kind == "read" else fcntl.F_WRLCK)
print("leased", flush=True)
signal.sigwait({signal.SIGIO})
print("asked for", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def leased(kind: str, path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold a lease on a file until its stdin is closed; it reports requests to release it."""
    command = [sys.executable, "-c", HOLDER, kind, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdin
        if holder.stdout.readline() != "leased\n":
            pytest.skip(f"no leases here: {holder.communicate()[1]}")
        try:
            yield holder
        finally:
            holder.stdin.close()


def read_leased(path: pathlib.Path) -> None:
    tensorferry.read(path, np.zeros(10, np.uint8))


def write_leased(path: pathlib.Path) -> None:
    tensorferry.write(path, np.ones(10, np.uint8))


def open_leased(path: pathlib.Path) -> None:
    tensorferry.open(path, "w").close()


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("write", read_leased),
        ("write", write_leased),
        ("read", write_leased),
        ("write", open_leased),
        ("read", open_leased),
    ],
)
@one_engine
@pytest.mark.usefixtures("default_engine")
def test_a_lease_that_another_process_holds_is_waited_for(
    directory: pathlib.Path, kind: str, use: Callable[[pathlib.Path], None]
) -> None:
    path = directory / "file"
    path.write_bytes(bytes(100))
    with leased(kind, path) as holder:
        using = InThread(lambda: use(path))
        assert holder.stdout
        assert holder.stdin
        assert holder.stdout.readline() == "asked for\n"
        assert using.is_alive()
        holder.stdin.close()
        using.result()


@one_engine
@pytest.mark.usefixtures("default_engine")
def test_ctrl_c_ends_waiting_for_a_lease(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(100))
    with leased("write", path) as holder:

        def interrupt() -> None:
            assert holder.stdout
            assert holder.stdout.readline() == "asked for\n"
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = InThread(interrupt)
        with pytest.raises(KeyboardInterrupt):
            tensorferry.open(path)
        assert holder.poll() is None
        interrupting.result()


# Locks on a descriptor that is given


@one_engine
@pytest.mark.usefixtures("default_engine")
def test_locks_of_open_files_stay_where_a_descriptor_is_given(
    make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    """POSIX has a process's own locks (F_SETLK) end with any close of the file: see aio_handle."""
    path = directory / "file"
    path.write_bytes(bytes(100))
    handle = make_handle()
    with path.open("rb+") as file, path.open("rb+") as other:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert set_lock(file.fileno(), fcntl.F_WRLCK)
        handle.sync_pwrite(bytes(10), file.fileno())
        tensorferry.read(path, bytearray(10))
        assert is_locked(other.fileno())
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "F_SETLK" in (tensorferry.aio_handle.__doc__ or "")
