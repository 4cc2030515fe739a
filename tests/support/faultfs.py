"""A FUSE file system that passes all requests to a directory, except for ordered faults.

A child process serves the mount. The test talks to it over a Unix socket instead of the mount, so a
held request cannot block the order to release it. Files are opened with FUSE's direct_io, because
the kernel's page cache would hide short reads from the caller; O_DIRECT opens work as well. Short
asynchronous writes are the exception: the kernel turns those that bypass the cache into EIO
(fuse_get_res_by_io). Files with the prefix "cached" therefore use the cache, where short writes,
unlike short reads, reach the caller. The class is a context manager: it detaches the mount and
kills the server at the end of every test.
"""

# The server makes one os call for each request of the kernel, so pathlib would not fit.
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH110, PTH119, PTH208

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

START_TIMEOUT_S = 120.0
# Longer than the timeouts of all tests: a test that waits for a held request must fail instead of ending late.
HOLD_MAX_S = 150.0
END_OF_FILE = 1 << 62
PR_SET_PDEATHSIG = 1
FUSE_CAP_ASYNC_DIO = 1 << 15  # libfuse's fuse_common.h
_OF_KERNEL = ("max_read", "max_background", "async_direct")


@dataclass
class Fault:
    """A fault for requests of one kind that touch bytes [start, end) of a file.

    The parts add up: a request waits for `delay_s`, then until `await_held` other requests are held, then (`hold`)
    for `FaultFS.release`, then fails with `error` or is cut to `short` bytes. `skip` requests are let through first,
    then `times` are hit (-1: all).
    """

    # read (past the page cache read_direct, too, else read_cached), write, flush (close), fsync, fsyncdir, open,
    # truncate, fallocate, chmod, rename; of a file that is open for writing, reopen and rename_open; over one that is
    # there, rename_over
    op: str
    start: int = 0
    end: int = END_OF_FILE
    error: int = 0
    short: int = -1
    delay_s: float = 0.0
    await_held: int = 0
    hold: bool = False
    times: int = -1
    skip: int = 0
    name: str = ""  # only the file of this name


@dataclass
class Request:
    """One request that reached the server."""

    op: str
    name: str
    offset: int
    size: int


@dataclass
class FaultFS:
    """The mount in the test's process. `path` is the mount, `backing` the directory below it."""

    base: pathlib.Path
    # Options that the server negotiates with the kernel: see fuse_init_out in linux/fuse.h. None: libfuse's default.
    max_read: int | None = None  # bytes of a request
    max_background: int | None = None  # concurrent background requests: without a waiting caller
    async_direct: bool = True  # whether one direct read may be several requests at once
    _server: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.path = self.base / "mount"
        self.backing = self.base / "backing"
        self._log = self.base / "server.log"
        # In /tmp, as the path of a Unix socket may have no more than 107 bytes.
        self._socket_directory = pathlib.Path(tempfile.mkdtemp(prefix="faultfs-"))

    def __enter__(self) -> FaultFS:
        self.path.mkdir(parents=True)
        self.backing.mkdir(parents=True)
        root = pathlib.Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.support.faultfs", str(self.path)]
        wanted = {name: getattr(self, name) for name in _OF_KERNEL}
        command += [str(self.backing), str(self._socket_path), json.dumps(wanted)]
        environment = os.environ | {"FUSE_LIBRARY_NAME": "fuse3"}
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                command, cwd=root, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self._await_mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.release()
        unmount(self.path)
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        with contextlib.suppress(OSError):
            self._socket_path.unlink()
        with contextlib.suppress(OSError):
            self._socket_directory.rmdir()

    def order(self, *faults: Fault) -> None:
        """Replace all faults, forget the requests seen so far, and release the held ones."""
        self._ask("order", faults=[asdict(fault) for fault in faults])

    def clear(self) -> None:
        """No faults from now on."""
        self.order()

    def release(self) -> None:
        """Release the requests that are held, and hold no later ones."""
        self._ask("release")

    def await_held(self, count: int = 1, timeout_s: float = 120.0) -> None:
        """Return when at least `count` requests are held."""
        held = self._ask("await_held", count=count, timeout_s=timeout_s)["held"]
        assert held >= count, f"{held} requests held after {timeout_s} s, not {count}"

    @contextlib.contextmanager
    def released_by(self, mark: pathlib.Path) -> Iterator[None]:
        """Release the held requests, within the block, as soon as another process has made the file `mark`."""
        left = threading.Event()

        def release() -> None:
            while not mark.exists() and not left.wait(0.01):
                pass
            self.release()

        thread = threading.Thread(target=release)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def held(self) -> int:
        """Return how many requests are held now."""
        held: int = self._ask("await_held", count=0, timeout_s=0)["held"]
        return held

    def hits(self) -> int:
        """Return how often the faults ordered last have struck."""
        hits: int = self._ask("hits")["hits"]
        return hits

    def requests(self, *ops: str) -> list[Request]:
        """Return the requests since the last order."""
        requests = [Request(*entry) for entry in self._ask("requests")["requests"]]
        return [request for request in requests if not ops or request.op in ops]

    @property
    def _socket_path(self) -> pathlib.Path:
        return self._socket_directory / "control"

    def _await_mount(self) -> None:
        assert self._server is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._server.poll() is not None:
                break
            if os.path.ismount(self.path):
                with contextlib.suppress(OSError):
                    self._ask("hits")
                    return
            time.sleep(0.02)
        raise FaultFSUnavailableError(f"the FUSE server did not start: {self._log.read_text()}")

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(HOLD_MAX_S)
            connection.connect(str(self._socket_path))
            with connection.makefile("rw") as stream:
                stream.write(json.dumps({"command": command, **arguments}) + "\n")
                stream.flush()
                answer: dict[str, Any] = json.loads(stream.readline())
        return answer


class FaultFSUnavailableError(RuntimeError):
    """The machine cannot mount FUSE file systems."""


def why_unavailable() -> str | None:
    """Return why this machine cannot mount FUSE file systems, or None."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse does not exist"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    return None


def unmount(path: pathlib.Path) -> None:
    """Detach the mount at path, if there is one."""
    commands = [["umount", "-l", str(path)], ["fusermount3", "-uz", str(path)]]
    for command in commands:
        if not is_mounted(path):
            return
        with contextlib.suppress(OSError):
            subprocess.run(command, capture_output=True, check=False)


def is_mounted(path: pathlib.Path) -> bool:
    """Return whether path is a mount point, also when its server is dead."""
    name = str(path).replace("\\", "\\134").replace(" ", "\\040")
    return any(line.split()[4] == name for line in open("/proc/self/mountinfo"))


class Orders:
    """The server's side: the faults in force and the requests that came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._requests: list[Request] = []
        self._epoch = 0
        self._held = 0
        self._hits = 0

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            match question["command"]:
                case "order":
                    self._faults = [Fault(**fault) for fault in question["faults"]]
                    self._requests = []
                    self._hits = 0
                    self._release()
                case "release":
                    for fault in self._faults:
                        fault.hold = False
                    self._release()
                case "await_held":
                    count = question["count"]
                    self._changed.wait_for(lambda: self._held >= count, question["timeout_s"])
                    return {"held": self._held}
                case "hits":
                    return {"hits": self._hits}
                case "requests":
                    entries = [[r.op, r.name, r.offset, r.size] for r in self._requests]
                    return {"requests": entries}
        return {}

    def meet(self, op: str, path: str | None, offset: int = 0, size: int = END_OF_FILE) -> int:
        """Suffer the faults that a request meets; return the size that is left of it.

        A file that was removed while it is open has no path.
        """
        name = os.path.basename(path or "")
        with self._changed:
            self._requests.append(Request(op, name, offset, size))
            met = [f for f in self._faults if self._meets(f, op, name, offset, size)]
            self._hits += len(met)
            epoch = self._epoch
        for fault in met:
            time.sleep(fault.delay_s)
            if fault.await_held:
                self._await_held(fault.await_held)
            if fault.hold:
                self._hold(epoch)
            if fault.error:
                raise OSError(fault.error, os.strerror(fault.error))
            if fault.short >= 0:
                size = min(size, fault.short)
        return size

    def _meets(self, fault: Fault, op: str, name: str, offset: int, size: int) -> bool:
        if fault.op != op or fault.name not in ("", name):
            return False
        if offset >= fault.end or offset + size <= fault.start or fault.times == 0:
            return False
        if fault.skip > 0:
            fault.skip -= 1
            return False
        fault.times -= 1
        return True

    def _await_held(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._held >= count, HOLD_MAX_S):
                raise OSError(errno.ETIMEDOUT, f"{self._held} requests held, not {count}")

    def _hold(self, epoch: int) -> None:
        with self._changed:
            self._held += 1
            self._changed.notify_all()
            released = self._changed.wait_for(lambda: self._epoch != epoch, HOLD_MAX_S)
            self._held -= 1
        if not released:
            raise OSError(errno.ETIMEDOUT, "held for too long")

    def _release(self) -> None:
        self._epoch += 1
        self._changed.notify_all()


def serve_orders(orders: Orders, socket_path: str) -> None:
    """Answer the test's questions, one for each connection, until the process ends."""

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as stream:
            reply = orders.answer(json.loads(stream.readline()))
            stream.write(json.dumps(reply) + "\n")
            stream.flush()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(socket_path)
    listener.listen(16)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def is_cached(path: str) -> bool:
    """Return whether a file uses the page cache."""
    return os.path.basename(path).startswith("cached")


def serve(mount: str, backing: str, socket_path: str, asked_of_kernel: str) -> None:
    """Serve the file system in this process until it is unmounted."""
    import mfusepy  # Only the server needs it: other machines may have no libfuse.

    orders = Orders()
    wanted = json.loads(asked_of_kernel)
    max_read = wanted["max_read"]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # libfuse unmounts at SIGTERM.

    writers: dict[int, str] = {}  # the paths of files that are open for writing, by descriptor
    moving = threading.Lock()  # held while paths and writers change

    def forget(path: str) -> None:
        for file in [file for file, other in writers.items() if other == path]:
            del writers[file]

    class Passthrough(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init_with_config(self, connection: Any, config: Any) -> None:
            if max_read is not None:
                connection.max_read = max_read  # and as an option of the mount, below
            if wanted["max_background"] is not None:
                connection.max_background = wanted["max_background"]
            if not wanted["async_direct"]:
                connection.want &= ~FUSE_CAP_ASYNC_DIO
            arguments = (orders, socket_path)
            threading.Thread(target=serve_orders, args=arguments, daemon=True).start()

        def getattr(self, path: str, fi: Any = None) -> dict[str, Any]:
            status = os.fstat(fi.fh) if fi is not None else os.lstat(backing + path)
            names = ["st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks"]
            attributes = {name: getattr(status, name) for name in names}
            for name in ("st_atime", "st_mtime", "st_ctime"):
                attributes[name] = getattr(status, name + "_ns")
            return attributes

        def open(self, path: str, fi: Any) -> int:
            orders.meet("open", path)
            if path in tuple(writers.values()):
                orders.meet("reopen", path)
            with moving:
                fi.fh = os.open(backing + path, fi.flags & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL))
                if fi.flags & os.O_ACCMODE != os.O_RDONLY:
                    writers[fi.fh] = path
            fi.direct_io = int(not is_cached(path))
            return 0

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            orders.meet("open", path)
            with moving:
                fi.fh = os.open(backing + path, (fi.flags & ~os.O_DIRECT) | os.O_CREAT, mode)
                writers[fi.fh] = path
            fi.direct_io = int(not is_cached(path))
            return 0

        def read(self, path: str | None, size: int, offset: int, fi: Any) -> bytes:
            # Past the page cache, or to fill it.
            way = "read_direct" if fi.flags & os.O_DIRECT else "read_cached"
            size = orders.meet(way, path, offset, size)
            return os.pread(fi.fh, orders.meet("read", path, offset, size), offset)

        def write(self, path: str | None, data: bytes, offset: int, fi: Any) -> int:
            size = orders.meet("write", path, offset, len(data))
            return os.pwrite(fi.fh, data[:size], offset) if size else 0

        def release(self, path: str | None, fi: Any) -> int:
            with moving:
                writers.pop(fi.fh, None)
                os.close(fi.fh)
            return 0

        def fsync(self, path: str | None, datasync: int, fi: Any) -> int:
            orders.meet("fsync", path)
            return 0

        def flush(self, path: str | None, fi: Any) -> int:
            orders.meet("flush", path)
            return 0

        def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
            orders.meet("fsyncdir", path)
            return 0

        def fallocate(self, path: str | None, mode: int, offset: int, size: int, fi: Any) -> int:
            orders.meet("fallocate", path, offset, size)
            arguments = [ctypes.c_int(mode), ctypes.c_long(offset), ctypes.c_long(size)]
            failed = libc.fallocate(ctypes.c_int(fi.fh), *arguments)
            return -ctypes.get_errno() if failed else 0

        def truncate(self, path: str | None, length: int, fi: Any = None) -> int:
            orders.meet("truncate", path)
            os.truncate(fi.fh if path is None else backing + path, length)
            return 0

        def unlink(self, path: str) -> int:
            with moving:
                os.unlink(backing + path)
                forget(path)
            return 0

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(backing + path, mode)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(backing + path)
            return 0

        def rename(self, old: str, new: str) -> int:
            orders.meet("rename", old)
            if old in tuple(writers.values()):
                orders.meet("rename_open", old)
            if os.path.exists(backing + new):
                orders.meet("rename_over", old)
            with moving:
                os.rename(backing + old, backing + new)
                forget(new)
                writers.update({file: new for file, path in writers.items() if path == old})
            return 0

        def chmod(self, path: str, mode: int) -> int:
            orders.meet("chmod", path)
            os.chmod(backing + path, mode)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(backing + path, ns=times)
            return 0

        def readdir(self, path: str, fi: Any) -> Iterator[str]:
            yield from (".", "..", *os.listdir(backing + path))

        def statfs(self, path: str) -> dict[str, int]:
            status = os.statvfs(backing + path)
            names = [name for name in dir(status) if name.startswith("f_")]
            return {name: getattr(status, name) for name in names if name != "f_fsid"}

    mfusepy.FUSE(
        Passthrough(),
        mount,
        raw_fi=True,
        foreground=True,
        max_threads=64,
        **({} if max_read is None else {"max_read": max_read}),
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        hard_remove=True,
    )


if __name__ == "__main__":
    serve(*sys.argv[1:5])
