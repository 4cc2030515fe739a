"""cuFile that refuses, fails, moves less than it was asked to, or cannot bypass host memory."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tests.gpu.programs import assert_moves
from tests.support import child, page_cache, standin
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu
    from tests.support.standin import StandIn

PROGRAMS = "tests.standin.driver.programs"
NBYTES = 12_000_003


@pytest.fixture
def gds(driver: StandIn) -> Iterator[tensorferry.gds_handle]:
    """Return a handle that uses the stand-in's cuFile."""
    with tensorferry.gds_handle() as handle:
        assert handle.engine == "cufile"
        yield handle


def test_aligned_bodies_go_by_cufile_and_ragged_edges_do_not(
    driver: StandIn,
    gpu: Gpu,
    gds: tensorferry.gds_handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
) -> None:
    data = random_bytes(NBYTES)
    array, found = gpu.array(data), gpu.array(NBYTES)
    gds.sync_pwrite(array, directory / "file", 5)
    gds.sync_pread(found, directory / "file", 5)
    assert_equal(gpu.bytes_of(found), data)
    assert_equal(contents(directory / "file")[5:], data)
    assert driver.count("cufile_unaligned") == 0
    moved = driver.count("cufile_written_nbytes") + driver.count("cufile_read_nbytes")
    assert gds.stats()["gds_nbytes"] == moved
    assert 2 * (NBYTES - 2 * 4096) <= moved <= 2 * NBYTES
    assert driver.count("dtoh_nbytes") <= 2 * 4096
    assert driver.count("cufile_closed_early") == 0
    assert driver.count("cufile_files") == 0


def test_a_file_is_registered_once_for_as_long_as_it_is_open(
    driver: StandIn, gpu: Gpu, gds: tensorferry.gds_handle, directory: pathlib.Path
) -> None:
    array = gpu.array(8 << 20)
    for turn in range(3):
        gds.sync_pwrite(array, directory / "file")
        assert driver.count("cuFileHandleRegister") == turn + 1
        assert driver.count("cufile_files") == 0
    assert driver.count("cuFileWrite") > 3


def test_pinned_memory_is_registered_once_and_found_by_its_parts(
    driver: StandIn, gpu: Gpu, gds: tensorferry.gds_handle, directory: pathlib.Path
) -> None:
    array = gpu.array(8 << 20)
    gds.pin_device_tensor(array)
    assert driver.count("cufile_buffers") == 1
    gds.sync_pwrite(gpu.part(array, 1 << 20, 8 << 20), directory / "file")
    assert driver.count("cufile_registered") == driver.count("cuFileWrite") > 0
    gds.unpin_device_tensor(array)
    assert driver.count("cufile_buffers") == 0
    gds.sync_pwrite(array, directory / "file")
    assert driver.count("cufile_registered") < driver.count("cuFileWrite")


@pytest.mark.parametrize("limit", [4096, 65536, 98_304])
def test_transfers_that_move_less_than_asked_go_on(
    driver: StandIn,
    gpu: Gpu,
    gds: tensorferry.gds_handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    limit: int,
) -> None:
    data = random_bytes(1_000_003)
    found = gpu.array(data.size)
    driver.set(cufile_transfer_max=limit)
    gds.sync_pwrite(gpu.array(data), directory / "file")
    gds.sync_pread(found, directory / "file")
    assert_equal(gpu.bytes_of(found), data)
    assert_equal(contents(directory / "file"), data)
    assert driver.count("cufile_unaligned") == 0


@pytest.mark.parametrize("code", [5012, 5030])
@pytest.mark.parametrize("after", [0, 2])
def test_an_error_of_cufile_is_reported_with_its_text(
    driver: StandIn,
    gpu: Gpu,
    gds: tensorferry.gds_handle,
    directory: pathlib.Path,
    code: int,
    after: int,
) -> None:
    path = directory / "file"
    path.write_bytes(bytes(NBYTES))
    array = gpu.array(NBYTES)
    for function, call in (
        ("cuFileRead", lambda: gds.sync_pread(array, path)),
        ("cuFileWrite", lambda: gds.sync_pwrite(array, path)),
        ("cuFileRead", lambda: (gds.async_pread(array, path), gds.wait())),
    ):
        page_cache.make_cold(path)  # cached bytes would be read from the page cache
        driver.fail(function, code, after=after)
        with pytest.raises(tensorferry.StorageError, match=f"cuFile error {code}") as caught:
            call()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(path)
        driver.reset()
        assert_moves(gpu, gds, directory)
    assert driver.count("cufile_files") == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_the_system_is_reported_as_such(
    driver: StandIn, gpu: Gpu, gds: tensorferry.gds_handle, directory: pathlib.Path, number: int
) -> None:
    path = directory / "file"
    array = gpu.array(NBYTES)
    driver.fail("cuFileWrite", number, after=1)
    with pytest.raises(tensorferry.StorageError) as caught:
        gds.sync_pwrite(array, path)
    assert caught.value.errno == number
    driver.reset()
    assert_moves(gpu, gds, directory)


@pytest.mark.parametrize("code", [5018, 5020, 5034])
def test_files_that_cufile_refuses_go_through_host_memory(
    driver: StandIn,
    gpu: Gpu,
    gds: tensorferry.gds_handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    code: int,
) -> None:
    data = random_bytes(NBYTES)
    found = gpu.array(NBYTES)
    driver.fail("cuFileHandleRegister", code, times=standin.FOREVER)
    gds.sync_pwrite(gpu.array(data), directory / "file")
    gds.async_pread(found, directory / "file")
    assert gds.wait() == 1
    assert_equal(gpu.bytes_of(found), data)
    assert gds.stats()["gds_nbytes"] == 0
    assert gds.stats()["gpu_nbytes"] == 2 * NBYTES
    assert driver.count("dtoh_nbytes") == driver.count("htod_nbytes") == NBYTES


def test_memory_that_cufile_cannot_pin_is_refused_with_the_reason(
    driver: StandIn, gpu: Gpu, gds: tensorferry.gds_handle, directory: pathlib.Path
) -> None:
    array = gpu.array(1 << 20)
    driver.fail("cuFileBufRegister", 5016)
    with pytest.raises(tensorferry.StorageError, match="5016"):
        gds.pin_device_tensor(array)
    assert not gds.is_pinned(array)
    assert gds.unpin_device_tensor(array) is False
    assert gds.pin_device_tensor(array) is True
    assert_moves(gpu, gds, directory)


@pytest.mark.parametrize(
    ("options", "native"),
    [
        ({"cufile_nvfs": 1}, True),
        ({"cufile_nvfs": 0, "cufile_p2p": 1}, True),
        ({"cufile_nvfs": 0, "cufile_p2p": 0}, False),
    ],
)
def test_a_machine_without_gpudirect_storage_is_served_and_told_so(
    driver: StandIn, directory: pathlib.Path, options: dict[str, int], native: bool
) -> None:
    ended = child.call(f"{PROGRAMS}:compat", directory=directory, options=options)
    found = ended.result
    assert found["compat"] == (not native)
    assert (found["engine"] == "cufile") == native
    assert (found["gds_nbytes"] > 0) == native
    assert (found["by_cufile"] > 0) == native
    assert found["registered"] == int(native)
    if not native:
        assert found["engine"].endswith("(compat)")
        assert "nvidia-fs" in found["refusals"]["cufile"]


def test_a_machine_without_gpudirect_storage_may_still_have_cufile_do_it(
    driver: StandIn, directory: pathlib.Path
) -> None:
    ended = child.call(
        f"{PROGRAMS}:compat",
        environment={"TENSORFERRY_GDS": "cufile"},
        directory=directory,
        options={"cufile_nvfs": 0},
    )
    assert ended.result["compat"]
    assert ended.result["by_cufile"] > 0
    assert ended.result["gds_nbytes"] > 0


@pytest.mark.parametrize(
    ("function", "code", "text"),
    [
        ("cuFileDriverOpen", 5001, "5001"),
        ("cuFileDriverOpen", 999, "CUDA_ERROR_UNKNOWN"),
        ("cuInit", 999, "cuInit"),
    ],
)
def test_without_cufile_a_handle_is_refused_with_the_reason_and_may_be_had_later(
    driver: StandIn, function: str, code: int, text: str
) -> None:
    ended = child.call(f"{PROGRAMS}:no_gds", function=function, code=code)
    kind, _, message = ended.result
    assert kind == "EngineUnavailableError"
    assert text in message
