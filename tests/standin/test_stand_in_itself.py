"""The stand-in driver behaves like CUDA as far as the tests rely on it; these tests do not use tensorferry."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import standin

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from tests.support.data import RandomBytes
    from tests.support.standin import DeviceArray, StandIn

NBYTES = 100_003


@pytest.fixture
def driver() -> Iterator[StandIn]:
    control = standin.StandIn(standin.build().cuda)
    control.reset()
    Cuda(control).call("cuInit", 0)
    yield control
    control.reset()


class Cuda:
    """Calls the driver's functions as the core does, one context a thread."""

    def __init__(self, driver: StandIn) -> None:
        self.library = driver.library

    def code(self, function: str, *arguments: object) -> int:
        return getattr(self.library, function)(*arguments)

    def call(self, function: str, *arguments: object) -> None:
        assert self.code(function, *arguments) == 0, function

    def made(self, function: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(function, ctypes.byref(handle), *arguments)
        return handle

    @contextlib.contextmanager
    def context(self, device: int = 0) -> Iterator[None]:
        self.call("cuCtxPushCurrent_v2", self.made("cuDevicePrimaryCtxRetain", device))
        yield
        self.call("cuCtxPopCurrent_v2", None)

    @contextlib.contextmanager
    def registered(self, nbytes: int = NBYTES) -> Iterator[ctypes.Array[ctypes.c_char]]:
        memory = ctypes.create_string_buffer(nbytes)
        self.call("cuMemHostRegister_v2", memory, ctypes.c_size_t(nbytes), 1)
        yield memory
        self.call("cuMemHostUnregister", memory)

    @contextlib.contextmanager
    def stream(self) -> Iterator[ctypes.c_void_p]:
        handle = self.made("cuStreamCreate", 1)
        yield handle
        self.call("cuStreamDestroy_v2", handle)

    @contextlib.contextmanager
    def event(self) -> Iterator[ctypes.c_void_p]:
        handle = self.made("cuEventCreate", 2)
        yield handle
        self.call("cuEventDestroy_v2", handle)

    def to_host(self, host: object, array: DeviceArray, stream: object, nbytes: int = -1) -> int:
        size = ctypes.c_size_t(array.nbytes if nbytes < 0 else nbytes)
        address = ctypes.c_uint64(array.address)
        return self.code("cuMemcpyDtoHAsync_v2", host, address, size, stream)

    def to_device(self, array: DeviceArray, host: object, stream: object) -> int:
        size = ctypes.c_size_t(array.nbytes)
        address = ctypes.c_uint64(array.address)
        return self.code("cuMemcpyHtoDAsync_v2", address, host, size, stream)


@pytest.fixture
def cuda(driver: StandIn) -> Cuda:
    return Cuda(driver)


def test_copies_and_events_wait_for_what_was_queued_before(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(NBYTES)
    with cuda.context(), cuda.registered() as host, cuda.event() as event:
        with driver.new_stream() as handle:
            stream = ctypes.c_void_p(handle)
            with driver.held(array, 7):
                assert cuda.to_host(host, array, stream) == 0
                cuda.call("cuEventRecord", event, stream)
                time.sleep(0.02)
                assert cuda.code("cuEventQuery", event) == 600
                assert host.raw == bytes(NBYTES)
            cuda.call("cuEventSynchronize", event)
        cuda.call("cuEventQuery", event)
        assert host.raw == b"\7" * NBYTES
    assert driver.count("dtoh_nbytes") == NBYTES
    assert driver.peak("registered_nbytes") == NBYTES
    assert driver.count("registered_nbytes") == 0
    assert driver.count("events") == driver.count("contexts_pushed") == 0


def test_host_memory_is_read_when_the_stream_comes_to_the_copy(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(4096)
    other = driver.array(1)
    with cuda.context(), cuda.registered(4096) as host, driver.new_stream() as handle:
        with driver.held(other, 1):
            assert cuda.to_device(array, host, ctypes.c_void_p(handle)) == 0
            ctypes.memset(host, 9, 4096)
        driver.synchronize()
    assert driver.peek(array.address, 4096) == b"\x09" * 4096


def test_streams_are_independent_and_a_destroyed_one_finishes(driver: StandIn, cuda: Cuda) -> None:
    slow, fast = driver.array(10), driver.array(10)
    with driver.new_stream():
        driver.kernel(slow, 1, seconds=0.1)
    with driver.new_stream():
        driver.kernel(fast, 2)
    deadline = time.monotonic() + 60
    while driver.peek(fast.address, 10) != b"\2" * 10:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    driver.synchronize()
    assert driver.peek(slow.address, 10) == b"\1" * 10


def test_an_event_that_is_destroyed_while_pending_harms_nobody(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(10)
    with cuda.context(), driver.held(array, 3), cuda.event() as event:
        cuda.call("cuEventRecord", event, None)
    driver.synchronize()
    assert driver.count("events") == 0


def test_per_thread_streams_are_those_of_the_calling_thread(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(10)

    def elsewhere() -> None:
        with cuda.context(), cuda.event() as event:
            cuda.call("cuEventRecord", event, ctypes.c_void_p(standin.PER_THREAD_STREAM))
            cuda.call("cuEventSynchronize", event)
            ended.append(True)

    ended: list[bool] = []
    with driver.stream(standin.PER_THREAD_STREAM), driver.held(array, 3):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(120)
    assert ended


def test_neither_code_nor_the_kernel_can_touch_device_memory(
    driver: StandIn, tmp_path: pathlib.Path
) -> None:
    array = driver.array(4096)
    libc = ctypes.CDLL(None, use_errno=True)
    with open(tmp_path / "file", "wb") as file:
        written = libc.write(file.fileno(), ctypes.c_void_p(array.address), ctypes.c_size_t(4096))
    assert (written, ctypes.get_errno()) == (-1, errno.EFAULT)
    program = "import ctypes; from tests.support import standin as s; "
    program += "ctypes.string_at(s.StandIn(s.build().cuda).array(9).address, 9)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=standin.ROOT)
    assert ended.returncode == -signal.SIGSEGV


def test_addresses_are_checked(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(4096)
    assert array.address % 4096 == 512
    device = ctypes.c_int()
    with cuda.context(), cuda.registered(8192) as host:
        assert cuda.to_host(host, array, None, nbytes=4097) == standin.CUDA_ERROR_INVALID_VALUE
        for address, code in [(array.address + 4095, 0), (array.address + 4096, 1), (4096, 1)]:
            arguments = (ctypes.byref(device), 9, ctypes.c_uint64(address))
            assert cuda.code("cuPointerGetAttribute", *arguments) == code
        assert device.value == 0


def test_a_copy_of_memory_that_is_freed_meanwhile_fails_at_the_event(
    driver: StandIn, cuda: Cuda
) -> None:
    array, other = driver.array(4096), driver.array(1)
    with cuda.context(), cuda.registered() as host, cuda.event() as event:
        with driver.held(other, 1):
            assert cuda.to_host(host, array, None) == 0
            cuda.call("cuEventRecord", event, None)
            del array
        assert cuda.code("cuEventSynchronize", event) == standin.CUDA_ERROR_ILLEGAL_ADDRESS


def test_host_memory_must_be_registered_unless_allowed(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(b"x" * 4096)
    with cuda.context():
        memory = ctypes.create_string_buffer(4096)
        assert cuda.to_host(memory, array, None) == standin.CUDA_ERROR_INVALID_VALUE
        driver.set(unregistered_allowed=1)
        assert cuda.to_host(memory, array, None) == 0
        driver.synchronize()
        assert memory.raw == b"x" * 4096
        assert cuda.code("cuMemHostUnregister", memory) == 713
        size = ctypes.c_size_t(4096)
        cuda.call("cuMemHostRegister_v2", memory, size, 1)
        assert cuda.code("cuMemHostRegister_v2", memory, size, 1) == 712
        cuda.call("cuMemHostUnregister", memory)


def test_what_needs_a_context_says_so_without_one(driver: StandIn, cuda: Cuda) -> None:
    handle = ctypes.c_void_p()
    assert cuda.code("cuStreamCreate", ctypes.byref(handle), 1) == 201
    assert cuda.code("cuEventCreate", ctypes.byref(handle), 2) == 201
    assert cuda.code("cuCtxPopCurrent_v2", None) == 201


def test_streams_and_events_of_another_device_are_refused(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(4096, device=1)
    with cuda.context(0), cuda.event() as event, cuda.registered() as host:
        assert cuda.to_host(host, array, None) == 400
        with cuda.context(1):
            assert cuda.code("cuEventRecord", event, None) == 400
            assert cuda.to_host(host, array, None) == 0
            driver.synchronize(1)


def test_functions_fail_when_ordered_and_only_then(driver: StandIn, cuda: Cuda) -> None:
    driver.fail("cuEventQuery", 999, after=1, times=2)
    with cuda.context(), cuda.event() as event:
        assert [cuda.code("cuEventQuery", event) for _ in range(5)] == [0, 999, 999, 0, 0]
    assert driver.count("cuEventQuery") == 5
    driver.fail("cuInit", standin.CUDA_ERROR_NO_DEVICE, times=standin.FOREVER)
    assert [cuda.code("cuInit", 0) for _ in range(3)] == [100] * 3
    driver.reset()
    assert cuda.code("cuInit", 0) == 0
    driver.set(device_count=0)
    assert cuda.code("cuInit", 0) == standin.CUDA_ERROR_NO_DEVICE


def test_a_copy_may_fail_later_for_one_event_or_for_good(driver: StandIn, cuda: Cuda) -> None:
    array = driver.array(4096)
    codes = []
    for poisoning in (0, 1):
        driver.set(poisoning=poisoning)
        driver.fail("cuMemcpyDtoHAsync_v2", 719, later=True)
        with cuda.context(), cuda.registered() as host, cuda.event() as event:
            assert cuda.to_host(host, array, None) == 0
            for _ in range(2):
                codes.append(cuda.code("cuEventRecord", event, None))
                codes.append(cuda.code("cuEventSynchronize", event))
            driver.set(poison=0)
    assert codes[:4] == [0, 719, 0, 0]
    assert codes[5:] == [719, 719, 719]


def test_a_captured_stream_says_so_and_takes_no_events(driver: StandIn, cuda: Cuda) -> None:
    status = ctypes.c_int(-1)
    with cuda.context(), cuda.stream() as stream, cuda.event() as event:
        assert stream.value is not None
        cuda.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == 0
        driver.set_capture(stream.value, 1)
        cuda.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == 1
        assert cuda.code("cuEventRecord", event, stream) == 900


def test_a_forked_child_may_not_use_what_its_parent_initialized(driver: StandIn) -> None:
    child = os.fork()
    if child == 0:
        os._exit(driver.library.cuInit(0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


class CuFile:
    """Calls the stand-in cuFile's functions; errors are pairs, as in CUfileError_t."""

    class Error(ctypes.Structure):
        _fields_ = [("cufile", ctypes.c_int), ("cuda", ctypes.c_int)]

    class Description(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_int),
            ("fd", ctypes.c_void_p),
            ("operations", ctypes.c_void_p),
        ]

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(standin.build().cufile), use_errno=True)
        for name in ("DriverOpen", "DriverGetProperties", "HandleRegister", "BufRegister"):
            getattr(self.library, f"cuFile{name}").restype = self.Error
        self.library.cuFileBufDeregister.restype = self.Error
        for name in ("cuFileRead", "cuFileWrite"):
            getattr(self.library, name).restype = ctypes.c_ssize_t

    def call(self, function: str, *arguments: object) -> tuple[int, int]:
        error = getattr(self.library, function)(*arguments)
        return error.cufile, error.cuda

    def register(self, descriptor: int) -> tuple[tuple[int, int], ctypes.c_void_p]:
        handle = ctypes.c_void_p()
        description = self.Description(1, descriptor, None)
        arguments = (ctypes.byref(handle), ctypes.byref(description))
        return self.call("cuFileHandleRegister", *arguments), handle

    def transfer(
        self, function: str, handle: object, array: DeviceArray, offset: int, at: int = 0
    ) -> int:
        return getattr(self.library, function)(
            handle,
            ctypes.c_void_p(array.address),
            ctypes.c_size_t(array.nbytes - at),
            ctypes.c_int64(offset),
            ctypes.c_int64(at),
        )


def test_cufile_moves_bytes_between_files_and_device_memory(
    driver: StandIn, cuda: Cuda, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    cufile = CuFile()
    data = random_bytes(3 << 20).tobytes()
    source, target = driver.array(data), driver.array(len(data))
    descriptor = os.open(directory / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    assert cufile.call("cuFileDriverOpen") == (0, 0)
    error, handle = cufile.register(descriptor)
    assert error == (0, 0)
    assert cufile.register(descriptor)[0] == (5028, 0)
    assert cufile.transfer("cuFileWrite", handle, source, 4096) == -5015  # no context
    with cuda.context():
        address, nbytes = ctypes.c_void_p(target.address), ctypes.c_size_t(target.nbytes)
        assert cufile.call("cuFileBufRegister", address, nbytes, 0) == (0, 0)
        assert cufile.call("cuFileBufRegister", address, nbytes, 0) == (5023, 0)
        assert cufile.transfer("cuFileWrite", handle, source, 4096) == len(data)
        assert (directory / "file").read_bytes() == bytes(4096) + data
        assert cufile.transfer("cuFileRead", handle, target, 4096) == len(data)
        assert driver.peek(target.address, len(data)) == data
        assert cufile.transfer("cuFileRead", handle, target, 8192) == len(data) - 4096  # the end
        driver.set(cufile_transfer_max=8192)
        assert cufile.transfer("cuFileRead", handle, target, 0) == 8192
        driver.fail("cuFileRead", 5011)
        assert cufile.transfer("cuFileRead", handle, target, 0) == -5011
        driver.fail("cuFileRead", errno.EIO)
        assert cufile.transfer("cuFileRead", handle, target, 0) == -1
        assert ctypes.get_errno() == errno.EIO
        assert cufile.call("cuFileBufDeregister", address) == (0, 0)
        assert cufile.call("cuFileBufDeregister", address) == (5024, 0)
    assert driver.count("cufile_unaligned") == driver.count("cufile_running") == 0
    assert driver.peak("cufile_running") == 1
    assert driver.count("cufile_files") == 1
    cufile.library.cuFileHandleDeregister(handle)
    os.close(descriptor)
    assert driver.count("cufile_files") == driver.count("cufile_closed_early") == 0
    assert cufile.transfer("cuFileRead", handle, target, 0) == -5027
    driver.fail("cuFileHandleRegister", 5008)
    assert cufile.register(0)[0] == (5008, 0)
