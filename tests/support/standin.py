"""Builds the stand-in CUDA driver and cuFile (tests/support/standin/), and controls them.

A process uses them if TENSORFERRY_LIBCUDA and TENSORFERRY_LIBCUFILE name them (`environment`). The
core then opens the same libraries that `loaded` lets the tests control.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = pathlib.Path(__file__).with_name("standin")
BUILD = ROOT / "build" / "standin"
CUDA = "libtensorferry_standin_cuda.so"
CUFILE = "libtensorferry_standin_cufile.so"

# A library that its streams' threads still run in is never unloaded.
FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread", "-shared"]
FLAGS += ["-fvisibility=hidden", "-Wl,-z,nodelete"]
COMMANDS = [
    ["cuda.cpp", "state.cpp", f"-Wl,-soname,{CUDA}", "-o", CUDA],
    [
        "cufile.cpp",
        "-L.",
        f"-l:{CUDA}",
        "-Wl,-rpath,$ORIGIN",
        f"-Wl,-soname,{CUFILE}",
        "-o",
        CUFILE,
    ],
]

LEGACY_STREAM = 1
PER_THREAD_STREAM = 2
CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_OUT_OF_MEMORY = 2
CUDA_ERROR_NO_DEVICE = 100
CUDA_ERROR_ILLEGAL_ADDRESS = 700
CUDA_ERROR_UNKNOWN = 999

FOREVER = -1


@dataclass(frozen=True)
class Libraries:
    """The two libraries' files."""

    cuda: pathlib.Path
    cufile: pathlib.Path


@functools.cache
def build() -> Libraries:
    """Compile the libraries unless the same sources have been compiled; processes may do so at the same time."""
    digest = hashlib.sha256(repr((_compiler(), FLAGS, COMMANDS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as unfinished:
            _compile(pathlib.Path(unfinished))
            with contextlib.suppress(OSError):  # another process was faster
                pathlib.Path(unfinished).rename(folder)
                pathlib.Path(unfinished).mkdir()  # for TemporaryDirectory to remove
    return Libraries(folder / CUDA, folder / CUFILE)


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _compile(folder: pathlib.Path) -> None:
    for path in SOURCES.iterdir():
        shutil.copy(path, folder)
    for arguments in COMMANDS:
        ended = subprocess.run(
            [*_compiler().split(), *FLAGS, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert ended.returncode == 0, f"the stand-in driver does not compile:\n{ended.stdout}"


def environment() -> dict[str, str]:
    """Return the environment variables that make another process use the stand-in."""
    libraries = build()
    return {
        "TENSORFERRY_LIBCUDA": str(libraries.cuda),
        "TENSORFERRY_LIBCUFILE": str(libraries.cufile),
    }


def chosen() -> bool:
    """Return whether this process uses the stand-in driver."""
    return pathlib.Path(os.environ.get("TENSORFERRY_LIBCUDA", "")).name == CUDA


@functools.cache
def loaded() -> StandIn:
    """Return the control of the stand-in that TENSORFERRY_LIBCUDA names."""
    return StandIn(pathlib.Path(os.environ["TENSORFERRY_LIBCUDA"]))


class DeviceArray:
    """A one-dimensional array of uint8 in the stand-in's device memory, as libraries exchange them.

    It owns its memory, or is a part of another array and shares its memory.
    """

    def __init__(
        self, owner: StandIn | DeviceArray, address: int, nbytes: int, device: int
    ) -> None:
        self.owner = owner
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self._free = owner.library.standin_free if isinstance(owner, StandIn) and address else None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self.address, False),
            "strides": None,
            "stream": self.driver.current_stream(self.device),
            "version": 3,
        }

    @property
    def driver(self) -> StandIn:
        """The stand-in that owns the memory."""
        return self.owner.driver if isinstance(self.owner, DeviceArray) else self.owner

    def part(self, begin: int, end: int) -> DeviceArray:
        """Return bytes begin to end of this array; the part shares the memory and keeps it alive."""
        assert 0 <= begin <= end <= self.nbytes
        return DeviceArray(self, self.address + begin, end - begin, self.device)

    def __len__(self) -> int:
        return self.nbytes

    def __del__(self) -> None:
        if self._free:
            self._free(self.address)


class StandIn:
    """Control of the stand-in driver and cuFile; the names are defined in tests/support/standin/."""

    def __init__(self, path: pathlib.Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.current = threading.local()
        self.latches = 0
        for name, result, *arguments in _SIGNATURES:
            function = getattr(self.library, f"standin_{name}")
            function.restype, function.argtypes = result, arguments

    def reset(self) -> None:
        """Clear options, failures and counts, release latches, and wait for all queued work."""
        self.library.standin_reset()

    def set(self, **options: int) -> None:
        """Set options of the stand-in; state.h lists them."""
        for name, value in options.items():
            assert self.library.standin_set(name.encode(), value) == 0, f"no option {name}"

    def count(self, counter: str) -> int:
        """Return a counter's value now, or since the last reset; state.h lists the counters.

        The name of an exported function counts its calls.
        """
        return self._counted("count", counter)

    def peak(self, counter: str) -> int:
        """Return a counter's largest value since the last reset."""
        return self._counted("peak", counter)

    def _counted(self, what: str, counter: str) -> int:
        value = getattr(self.library, f"standin_{what}")(counter.encode())
        assert value >= 0, f"no counter {counter}"
        return value

    def fail(
        self, function: str, code: int, *, after: int = 0, times: int = 1, later: bool = False
    ) -> None:
        """Make the next `times` calls of function (or FOREVER) return code, after `after` calls that succeed.

        With `later` the calls succeed, and the copies that they queue fail when the stream runs them.
        For cuFileRead and cuFileWrite a code below 5000 is an errno; for other functions of cuFile it
        is an error of CUDA.
        """
        assert hasattr(self.library, function) or function.startswith("cuFile"), function
        self.library.standin_fail(function.encode(), after, times, code, later)

    def array(self, data: Any, device: int = 0) -> DeviceArray:
        """Return a new array with a copy of data, or with that many zeros."""
        source = None if isinstance(data, int) else bytes(data)
        nbytes = data if source is None else len(source)
        if not nbytes:
            return DeviceArray(self, 0, 0, device)
        address = self.library.standin_allocate(device, nbytes)
        assert address, f"no {nbytes} bytes of memory on device {device}"
        if source is not None:
            self.poke(address, source)
        return DeviceArray(self, address, nbytes, device)

    def peek(self, address: int, nbytes: int) -> bytes:
        """Return bytes of device memory as they are now, whatever is queued."""
        target = ctypes.create_string_buffer(nbytes)
        if nbytes:
            _check(self.library.standin_peek(address, target, nbytes))
        return target.raw

    def poke(self, address: int, data: bytes) -> None:
        """Set bytes of device memory now, whatever is queued."""
        _check(self.library.standin_poke(address, data, len(data)))

    def current_stream(self, device: int = 0) -> int:
        """Return the handle of the stream that is current on device in this thread."""
        return getattr(self.current, str(device), LEGACY_STREAM)

    @contextlib.contextmanager
    def stream(self, handle: int, device: int = 0) -> Iterator[int]:
        """Make a stream current on device in this thread: one's own, LEGACY_ or PER_THREAD_STREAM."""
        before = self.current_stream(device)
        setattr(self.current, str(device), handle)
        try:
            yield handle
        finally:
            setattr(self.current, str(device), before)

    @contextlib.contextmanager
    def new_stream(self, device: int = 0) -> Iterator[int]:
        """Make a new stream current; destroy it at the end, after which its queued work still runs."""
        handle = self.library.standin_stream_create(device)
        try:
            with self.stream(handle, device):
                yield handle
        finally:
            _check(self.library.standin_stream_destroy(handle))

    def kernel(
        self, array: DeviceArray, value: int, *, seconds: float = 0, latch: str | None = None
    ) -> None:
        """Queue an operation that takes `seconds`, waits for the latch's release, then fills array."""
        _check(
            self.library.standin_kernel(
                array.device,
                self.current_stream(array.device),
                round(seconds * 1e6),
                latch.encode() if latch else None,
                array.address,
                array.nbytes,
                value,
            )
        )

    @contextlib.contextmanager
    def held(self, array: DeviceArray, value: int) -> Iterator[None]:
        """Queue a fill of array that runs after the end of the block."""
        self.latches += 1
        latch = f"{threading.get_ident()}-{self.latches}"
        self.kernel(array, value, latch=latch)
        try:
            yield
        finally:
            self.release(latch)

    def release(self, latch: str) -> None:
        """Let every kernel go on that waits for the latch, now and later."""
        self.library.standin_release(latch.encode())

    def copy(self, source: DeviceArray, destination: DeviceArray) -> None:
        """Queue a copy between arrays of one device and size."""
        assert (source.device, source.nbytes) == (destination.device, destination.nbytes)
        if not source.nbytes:
            return
        _check(
            self.library.standin_copy(
                source.device,
                self.current_stream(source.device),
                destination.address,
                source.address,
                source.nbytes,
            )
        )

    def synchronize(self, device: int = 0) -> None:
        """Wait for all work that is queued on device."""
        _check(self.library.standin_synchronize(device))

    def set_capture(self, handle: int, status: int, device: int = 0) -> None:
        """Make a stream report that it is being captured (1), invalidated (2) or neither (0)."""
        _check(self.library.standin_set_capture(device, handle, status))


def _check(code: int) -> None:
    assert code == 0, f"the stand-in driver gave CUDA error {code}"


_POINTER, _ADDRESS, _NAME = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
_INT, _COUNT, _SIZE = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t

_SIGNATURES: list[tuple[Any, ...]] = [
    ("reset", None),
    ("set", _INT, _NAME, _COUNT),
    ("count", _COUNT, _NAME),
    ("peak", _COUNT, _NAME),
    ("fail", None, _NAME, _COUNT, _COUNT, _INT, _INT),
    ("allocate", _ADDRESS, _INT, _SIZE),
    ("free", _INT, _ADDRESS),
    ("peek", _INT, _ADDRESS, _POINTER, _SIZE),
    ("poke", _INT, _ADDRESS, _POINTER, _SIZE),
    ("stream_create", _POINTER, _INT),
    ("stream_destroy", _INT, _POINTER),
    ("set_capture", _INT, _INT, _POINTER, _INT),
    ("kernel", _INT, _INT, _POINTER, _COUNT, _NAME, _ADDRESS, _SIZE, _INT),
    ("release", None, _NAME),
    ("copy", _INT, _INT, _POINTER, _ADDRESS, _ADDRESS, _SIZE),
    ("synchronize", _INT, _INT),
]
