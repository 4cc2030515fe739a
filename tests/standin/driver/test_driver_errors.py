"""Failures of each function of the driver: the error is exact, there are no hangs or leaks, and later calls work."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tests.gpu.programs import assert_moves
from tests.support import child, standin
from tests.support.expect import assert_equal, contents
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu
    from tests.support.standin import StandIn

PROGRAMS = "tests.standin.driver.programs"
ILLEGAL_ADDRESS = standin.CUDA_ERROR_ILLEGAL_ADDRESS
OUT_OF_MEMORY = standin.CUDA_ERROR_OUT_OF_MEMORY
# Objects that are made on demand and kept for later transfers: their number depends on chance, up to these limits.
POOLED = {"events": 64, "streams": 8}
EXACT = ("registered_ranges", "registered_nbytes", "contexts_pushed", "allocations")

# The driver's functions that every transfer calls, after the objects of the first use have been made.
CALLED = [
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
]
# A transfer may succeed although one of these fails, if it can still end: events are queried again.
MAY_SUCCEED = {
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuEventQuery",
}

NBYTES = 3_000_003
OFFSET = 4099


class Held:
    """The numbers of the driver's objects that our code holds."""

    def __init__(self, driver: StandIn) -> None:
        self._driver = driver
        self._before = {gauge: driver.count(gauge) for gauge in (*POOLED, *EXACT)}

    def check(self, but: str = "") -> None:
        """Fail if it is more now."""
        for gauge, before in self._before.items():
            if gauge in POOLED:
                assert self._driver.count(gauge) <= before + POOLED[gauge], gauge
            elif gauge != but:
                assert self._driver.count(gauge) == before, gauge


@dataclass
class Stage:
    """The objects of one transfer that is made to fail."""

    handle: tensorferry.aio_handle
    path: pathlib.Path
    small: Any
    large: Any


TRANSFERS: dict[str, Callable[[Stage], object]] = {
    "small write": lambda s: s.handle.sync_pwrite(s.small, s.path, OFFSET),
    "small read": lambda s: s.handle.sync_pread(s.small, s.path, OFFSET),
    "large write": lambda s: s.handle.sync_pwrite(s.large, s.path, OFFSET),
    "large read": lambda s: s.handle.sync_pread(s.large, s.path, OFFSET),
    "async write": lambda s: (s.handle.async_pwrite(s.large, s.path, OFFSET), s.handle.wait()),
    "async read": lambda s: (s.handle.async_pread(s.large, s.path, OFFSET), s.handle.wait()),
    "many": lambda s: tensorferry.read_many([(s.path, s.small, 1), (s.path, s.large, OFFSET)]),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("function", CALLED)
def test_a_call_that_fails_is_reported_and_nothing_else_happens(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    function: str,
    transfer: str,
) -> None:
    path = directory / "file"
    before = random_bytes(NBYTES + 2 * OFFSET)
    before.tofile(path)
    stage = Stage(make_handle(block_size=1 << 18), path, gpu.array(4096), gpu.array(NBYTES))
    for warm_up in TRANSFERS.values():  # makes the objects of the first use
        warm_up(stage)
    held = Held(driver)
    for after in (0, 1, 4):
        before.tofile(path)
        driver.reset()
        driver.fail(function, ILLEGAL_ADDRESS, after=after)
        error = failure_of(lambda: TRANSFERS[transfer](stage))
        if error is None:
            assert driver.count(function) <= after or function in MAY_SUCCEED
        else:
            assert driver.count(function) > after, error
            assert error.errno == errno.EIO
            assert function.removesuffix("_v2") in str(error)
            assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error)
            assert error.filename == str(path)
            assert 0 <= error.transferred < error.expected
        driver.reset()
        assert stage.handle.wait() == 0
        found = contents(path)
        assert found.size == before.size
        assert_equal(found[:OFFSET], before[:OFFSET])
        assert_equal(found[OFFSET + NBYTES :], before[OFFSET + NBYTES :])
    assert_moves(gpu, stage.handle, directory)
    held.check(but="contexts_pushed" if function == "cuCtxPopCurrent_v2" else "")


def failure_of(call: Callable[[], object]) -> tensorferry.StorageError | None:
    try:
        call()
    except tensorferry.StorageError as error:
        return error
    return None


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_copy_that_fails_while_it_runs_is_reported(
    driver: StandIn,
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    function: str,
    after: int,
) -> None:
    handle = make_handle(block_size=1 << 18)
    path = directory / "file"
    path.write_bytes(bytes(NBYTES))
    array = gpu.array(NBYTES)
    transfers: list[Callable[[], object]] = (
        [
            lambda: handle.sync_pread(array, path),
            lambda: (handle.async_pread(array, path), handle.wait()),
        ]
        if "HtoD" in function
        else [
            lambda: handle.sync_pwrite(array, path),
            lambda: (handle.async_pwrite(array, path), handle.wait()),
        ]
    )
    for transfer in transfers:
        driver.fail(function, ILLEGAL_ADDRESS, after=after, later=True)
        with pytest.raises(tensorferry.StorageError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
            transfer()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(path)
        driver.reset()
        assert_moves(gpu, handle, directory)


def test_a_small_copy_that_fails_while_it_runs_is_reported(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    path = directory / "file"
    path.write_bytes(bytes(100))
    array = gpu.array(100)
    driver.fail("cuMemcpyHtoDAsync_v2", ILLEGAL_ADDRESS, later=True)
    with pytest.raises(tensorferry.StorageError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        handle.sync_pread(array, path)
    driver.fail("cuMemcpyDtoHAsync_v2", ILLEGAL_ADDRESS, later=True)
    with pytest.raises(tensorferry.StorageError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        handle.sync_pwrite(array, path)
    assert path.read_bytes() == bytes(100)
    assert_moves(gpu, handle, directory)


def test_of_many_transfers_only_the_one_that_fails_fails(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle(block_size=1 << 20)
    arrays = [gpu.array(bytes([index]) * 3_000_000) for index in range(10)]
    driver.fail("cuMemcpyDtoHAsync_v2", ILLEGAL_ADDRESS, after=7)
    with tensorferry.open(directory / "file", "w", engine=handle.engine) as file:
        futures = [file.write_from(array, index * 3_000_000) for index, array in enumerate(arrays)]
        failed = [index for index, future in enumerate(futures) if future.exception() is not None]
    assert len(failed) == 1
    found = contents(directory / "file")
    for index in set(range(10)) - set(failed):
        assert (found[index * 3_000_000 : (index + 1) * 3_000_000] == index).all()


def test_memory_that_runs_out_is_enomem(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    array = gpu.array(100)
    handle.sync_pwrite(array, directory / "file")
    driver.fail("cuEventRecord", OUT_OF_MEMORY)
    with pytest.raises(tensorferry.StorageError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        handle.sync_pwrite(array, directory / "file")
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.in_turn
def test_hundreds_of_failures_leak_nothing(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle(block_size=65536)
    path = directory / "file"
    array = gpu.array(400_000)
    handle.sync_pwrite(array, path)

    def write() -> None:
        handle.sync_pwrite(array, path)

    def read() -> None:
        handle.async_pread(array, path)
        handle.wait()

    def fail(turn: int) -> None:
        function = ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord")[turn % 3]
        driver.fail(function, ILLEGAL_ADDRESS, after=turn % 2, later=turn % 4 > 1 and turn % 3 < 2)
        transfer = write if turn % 3 == 0 else read
        with pytest.raises(tensorferry.StorageError):
            transfer()
        driver.reset()

    for turn in range(100):
        fail(turn)
    held = Held(driver)
    with nothing_leaks(objects_slack=250):
        for turn in range(500):
            fail(turn)
    held.check()
    assert_moves(gpu, handle, directory)


@pytest.mark.parametrize("status", [1, 2], ids=["active", "invalidated"])
def test_a_stream_that_is_captured_into_a_graph_is_refused_before_any_io(
    driver: StandIn, gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, status: int
) -> None:
    handle = make_handle()
    path = directory / "never"
    array = gpu.array(5_000_000)
    (directory / "file").write_bytes(bytes(5_000_000))
    with gpu.new_stream() as stream:
        driver.set_capture(stream, status)
        for call in (
            lambda: handle.sync_pwrite(array, path),
            lambda: handle.async_pwrite(array, path),
            lambda: handle.async_pread(array, directory / "file"),
            lambda: tensorferry.write(path, gpu.part(array, 0, 100)),
            lambda: tensorferry.write_many([(path, array)]),
        ):
            with pytest.raises(ValueError, match="captured"):
                call()
        driver.set_capture(stream, 0)
        assert driver.count("dtoh_nbytes") == 0
        assert handle.wait() == 0
        assert_moves(gpu, handle, directory)


@pytest.mark.parametrize(
    ("function", "code", "kind", "number", "text"),
    [
        ("cuInit", 999, "EngineUnavailableError", None, "CUDA_ERROR_UNKNOWN"),
        ("cuInit", 100, "EngineUnavailableError", None, "CUDA_ERROR_NO_DEVICE"),
        ("cuDriverGetVersion", 999, "EngineUnavailableError", None, "CUDA_ERROR_UNKNOWN"),
        ("cuDeviceGet", 101, "StorageError", errno.EIO, "CUDA_ERROR_INVALID_DEVICE"),
        ("cuDevicePrimaryCtxRetain", 2, "StorageError", errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemHostRegister_v2", 2, "StorageError", errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuStreamCreate", 2, "StorageError", errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuEventCreate", 2, "StorageError", errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_first_use_that_fails_says_why_and_the_next_one_works(
    driver: StandIn,
    directory: pathlib.Path,
    function: str,
    code: int,
    kind: str,
    number: int | None,
    text: str,
) -> None:
    arguments = {"function": function, "code": code, "options": {}}
    ended = child.call(f"{PROGRAMS}:first_use", directory=directory, **arguments)
    assert set(ended.result) == {"small", "large", "async", "read"}
    for name, (raised, error_number, message) in ended.result.items():
        assert (raised, error_number) == (kind, number), (name, message)
        assert function.removesuffix("_v2") in message
        assert text in message


@pytest.mark.parametrize(
    ("options", "text"),
    [({"driver_version": 10020}, "10.2"), ({"device_count": 0}, "CUDA_ERROR_NO_DEVICE")],
)
def test_a_driver_that_is_too_old_or_has_no_gpu_is_refused_with_the_reason(
    driver: StandIn, directory: pathlib.Path, options: dict[str, int], text: str
) -> None:
    arguments = {"function": "", "code": 0, "options": options}
    ended = child.call(f"{PROGRAMS}:first_use", directory=directory, **arguments)
    assert ended.result
    for raised, _, message in ended.result.values():
        assert raised == "EngineUnavailableError"
        assert text in message


def test_after_an_error_that_stays_every_call_says_so_and_the_process_ends(
    driver: StandIn, directory: pathlib.Path
) -> None:
    ended = child.call(f"{PROGRAMS}:poisoned", directory=directory)
    assert len(ended.result) > 1
    for name, (raised, number, message) in ended.result.items():
        assert raised == "StorageError", name
        assert number == errno.EIO
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in message


def test_locked_memory_is_registered_with_cuda_once_that_is_in_use_but_need_not_be(
    driver: StandIn,
) -> None:
    ended = child.call(f"{PROGRAMS}:locked_memory_that_cuda_refuses")
    assert ended.result["grown"] >= 1 << 20
    assert ended.result["shrunk"] == 0
    assert ended.result["usable"]
