"""gds_handle: DeepNVMe's contract, whether cuFile bypasses host memory on this machine or cannot."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorferry
from tests.gpu.arrays import Amid
from tests.gpu.programs import assert_moves
from tests.gpu.test_files import BLOCK, in_turn, places, random_data, sizes
from tests.support.data import aligned
from tests.support.expect import assert_equal, contents, short_read, storage_error
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu

MakeGds = Callable[..., "tensorferry.gds_handle"]


@pytest.fixture(params=["as found", "by cuFile"])
def make_gds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGds]:
    """A function that makes handles, which cuFile serves if it is any use or, the second time, in any case."""
    if request.param == "by cuFile":
        monkeypatch.setenv("TENSORFERRY_GDS", "cufile")
    with contextlib.ExitStack() as handles:

        def make(**options: Any) -> tensorferry.gds_handle:
            try:
                return handles.enter_context(tensorferry.gds_handle(**options))
            except tensorferry.EngineUnavailableError as error:
                pytest.skip(f"no GPUDirect Storage: {error}")

        yield make


def test_signatures_are_those_of_deepnvme() -> None:
    def names(method: str) -> list[str]:
        return list(inspect.signature(getattr(tensorferry.gds_handle, method)).parameters)[1:]

    assert names("__init__")[:5] == [
        "block_size",
        "queue_depth",
        "single_submit",
        "overlap_events",
        "intra_op_parallelism",
    ]
    assert names("new_pinned_device_tensor")[:2] == ["num_elem", "example_tensor"]
    for method in ("free_pinned_device_tensor", "pin_device_tensor", "unpin_device_tensor"):
        assert names(method) == ["tensor"]
    for method in ("sync_pread", "sync_pwrite", "async_pread"):
        assert names(method) == ["buffer", "filename", "file_offset"]


def test_settings_are_reported_as_given(gpu: Gpu, make_gds: MakeGds) -> None:
    handle = make_gds(
        block_size=8192,
        queue_depth=3,
        single_submit=True,
        overlap_events=True,
        intra_op_parallelism=2,
    )
    assert (
        handle.get_block_size(),
        handle.get_queue_depth(),
        handle.get_single_submit(),
        handle.get_overlap_events(),
        handle.get_intra_op_parallelism(),
    ) == (8192, 3, True, True, 2)
    assert handle.get_alignment() % 512 == 0


def test_it_says_how_gpu_memory_is_moved(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path
) -> None:
    handle = make_gds()
    handle.sync_pwrite(gpu.array(8 << 20), directory / "file")
    stats = handle.stats()
    assert stats["engine"] == handle.engine
    assert stats["gpu_nbytes"] == 8 << 20
    assert stats["compat"] == ("compat" in handle.engine)
    if stats["compat"]:
        assert handle.engine_refusals["cufile"]
    if handle.engine == "cufile":
        assert stats["gds_nbytes"] == 8 << 20
    elif "cufile" not in handle.engine:
        assert stats["gds_nbytes"] == 0


@in_turn
@given(
    nbytes=sizes,
    offset=sizes,
    place=places,
    pinned=st.booleans(),
    block_size=st.sampled_from([4096, BLOCK, 1 << 20]),
    waits=st.booleans(),
)
def test_any_part_of_any_file_to_and_from_any_place(
    gpu: Gpu,
    make_gds: MakeGds,
    directory: pathlib.Path,
    nbytes: int,
    offset: int,
    place: int,
    pinned: bool,
    block_size: int,
    waits: bool,
) -> None:
    path = directory / "file"
    before = random_data(1, 6 * BLOCK)
    path.write_bytes(before)
    data = random_data(2, nbytes)
    source, found = Amid(gpu, data, place), Amid(gpu, nbytes, place // 2)
    with make_gds(block_size=block_size) as handle:
        if pinned:
            handle.pin_device_tensor(source.whole)
            handle.pin_device_tensor(found.whole)
        if waits:
            handle.sync_pwrite(source.array, path, offset)
            handle.sync_pread(found.array, path, offset)
        else:
            handle.async_pwrite(source.array, path, offset)
            handle.wait()
            handle.async_pread(found.array, path, offset)
            handle.wait()
    wanted = bytearray(before)
    if nbytes:
        wanted.extend(bytes(max(0, offset + nbytes - len(before))))
        wanted[offset : offset + nbytes] = data
    assert_equal(path.read_bytes(), wanted)
    assert_equal(source.contents(), data)
    assert_equal(found.contents(), data)


def test_every_call_moves_the_bytes(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_gds(intra_op_parallelism=2)
    data = random_bytes(30_000_017)
    source, found = gpu.array(data), gpu.array(data.size)
    path = directory / "file"
    assert handle.write(source, path, True) == 0
    assert handle.read(found, path, True) == 0
    assert_equal(gpu.bytes_of(found), data)
    assert handle.pwrite(source, path, True, False, 4096) == 1
    assert handle.pread(found, path, True, True, 4096) == 0
    assert handle.wait() == 1
    assert_equal(contents(path)[4096:], data)
    with open(directory / "descriptor", "wb") as file:
        assert handle.async_pwrite(source, fd=file.fileno(), file_offset=7) == 0
    assert handle.wait() == 1
    assert_equal(contents(directory / "descriptor")[7:], data)


def test_host_memory_moves_as_well(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_gds()
    data = random_bytes(5_000_003)
    handle.async_pwrite(data, directory / "host")
    handle.async_pwrite(gpu.array(data), directory / "gpu")
    assert handle.wait() == 2
    assert_equal(contents(directory / "host"), data)
    assert_equal(contents(directory / "gpu"), data)
    assert_moves(gpu, handle, directory)


def test_what_is_pinned_is_known(gpu: Gpu, make_gds: MakeGds) -> None:
    handle, other = make_gds(), make_gds()
    array = gpu.array(1 << 20)
    assert not handle.is_pinned(array)
    assert handle.unpin_device_tensor(array) is False
    assert handle.pin_device_tensor(array) is True
    for asked in (handle, other):
        assert asked.is_pinned(array)
        assert asked.is_pinned(gpu.part(array, 4096, 8192))
    with pytest.raises(ValueError, match="pinned already"):
        handle.pin_device_tensor(gpu.part(array, 4096, 8192))
    assert other.free_pinned_device_tensor(array) is True
    assert not handle.is_pinned(array)
    assert handle.free_pinned_device_tensor(array) is False
    with pytest.raises(ValueError, match="host"):
        handle.pin_device_tensor(bytearray(4096))
    with pytest.raises(ValueError, match="empty"):
        handle.pin_device_tensor(gpu.part(array, 0, 0))


def test_pins_keep_their_memory_until_they_are_undone_or_the_handle_is_closed(
    gpu: Gpu, make_gds: MakeGds
) -> None:
    gc.collect()
    before = gpu.live()
    handle = make_gds()
    array = gpu.array(1 << 20)
    handle.pin_device_tensor(array)
    del array
    gc.collect()
    assert gpu.live() == before + 1
    handle.close()
    gc.collect()
    assert gpu.live() == before


def test_a_pin_is_undone_only_after_transfers(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path
) -> None:
    handle = make_gds()
    array = gpu.array(5_000_000)
    handle.pin_device_tensor(array)
    with gpu.new_stream():
        gpu.fill_later(array, 7, 0.1)
        handle.async_pwrite(array, directory / "file")
        assert handle.unpin_device_tensor(array) is True
    assert handle.wait() == 1
    assert (contents(directory / "file") == 7).all()


@pytest.mark.parametrize("nbytes", [4096, 8 << 20, 20_000_003])
def test_transfers_come_after_kernels_queued_before_them(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes, nbytes: int
) -> None:
    handle = make_gds()
    data, before = random_bytes(nbytes), random_bytes(nbytes)
    array, copy, elsewhere = gpu.array(before), gpu.array(nbytes), gpu.array(64)
    data.tofile(directory / "data")
    with gpu.new_stream():
        gpu.fill_later(array, 7, 0.1)
        handle.async_pwrite(array, directory / "file")
        assert handle.wait() == 1
        assert (contents(directory / "file") == 7).all()
        gpu.fill_later(elsewhere, 1, 0.1)
        gpu.copy_later(array, copy)
        gpu.fill_later(array, 9, 0)
        handle.sync_pread(array, directory / "data")
        assert_equal(gpu.bytes_of(array), data)
        assert gpu.bytes_of(copy) == b"\7" * nbytes


def test_what_was_read_is_there_for_kernels_of_every_stream(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_gds()
    data = random_bytes(16_000_003)
    data.tofile(directory / "file")
    array, copy = gpu.array(data.size), gpu.array(data.size)
    handle.async_pread(array, directory / "file")
    assert handle.wait() == 1
    with gpu.new_stream():
        gpu.copy_later(array, copy)
    assert_equal(gpu.bytes_of(copy), data)


def test_arrays_dropped_at_once_are_written(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_gds()
    data = [random_bytes(3_000_003) for _ in range(8)]
    for index, bytes_ in enumerate(data):
        handle.async_pwrite(gpu.array(bytes_), directory / str(index))
    usurpers = [gpu.array(b"\xff" * 3_000_003) for _ in data]
    assert handle.wait() == len(data)
    for index, bytes_ in enumerate(data):
        assert_equal(contents(directory / str(index)), bytes_)
    assert len(usurpers) == len(data)


def test_errors(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_gds()
    for nbytes in (4096, 20_000_000):
        array = gpu.array(nbytes)
        missing, short = directory / "missing", directory / "short"
        random_bytes(nbytes).tofile(short)
        with storage_error(2, missing):
            handle.sync_pread(array, missing)
        with short_read(short, expected=nbytes):
            handle.sync_pread(array, short, 1)
        with short_read(short, expected=nbytes):
            handle.async_pread(array, short, 4096)
        assert handle.wait() == 0
    assert_moves(gpu, handle, directory)


def test_file_systems_without_direct_io_work(
    gpu: Gpu, make_gds: MakeGds, tmpfs_directory: pathlib.Path
) -> None:
    assert_moves(gpu, make_gds(), tmpfs_directory)


def test_threads_share_a_handle(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_gds(intra_op_parallelism=2)
    data = [random_bytes(1_000_000 + index) for index in range(4)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            device = index % gpu.count
            source, found = gpu.array(data[index], device), gpu.array(data[index].size, device)
            for turn in range(10):
                if turn == 5:
                    handle.pin_device_tensor(source)
                handle.async_pwrite(source, directory / str(index))
                handle.wait()
                handle.sync_pread(found, directory / str(index))
                assert_equal(gpu.bytes_of(found), data[index])
            handle.unpin_device_tensor(source)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_two_devices_at_once(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    if gpu.count < 2:
        pytest.skip("needs two GPUs")
    handle = make_gds()
    data = [random_bytes(10_000_003) for _ in range(2)]
    for device in range(2):
        handle.async_pwrite(gpu.array(data[device], device), directory / str(device))
    assert handle.wait() == 2
    found = [gpu.array(data[device].size, device) for device in range(2)]
    for device in range(2):
        handle.pin_device_tensor(found[device])
        handle.async_pread(found[device], directory / str(device))
    assert handle.wait() == 2
    for device in range(2):
        assert_equal(gpu.bytes_of(found[device]), data[device])


def test_hundreds_of_transfers_leak_nothing(
    gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path
) -> None:
    handle = make_gds(block_size=BLOCK)
    path = directory / "file"
    array = gpu.array(200_000)

    def transfer() -> None:
        handle.pin_device_tensor(array)
        handle.sync_pwrite(array, path)
        handle.async_pread(array, path)
        handle.unpin_device_tensor(array)
        handle.wait()

    for _ in range(100):
        transfer()
    live = gpu.live()
    with nothing_leaks(objects_slack=250):
        for _ in range(500):
            transfer()
    gc.collect()
    assert gpu.live() == live


def test_a_closed_handle_says_so(gpu: Gpu, make_gds: MakeGds, directory: pathlib.Path) -> None:
    array = gpu.array(1_000_000)
    with make_gds() as handle:
        handle.async_pwrite(array, directory / "file")
    assert (directory / "file").stat().st_size == 1_000_000
    for call in (
        lambda: handle.sync_pwrite(array, directory / "file"),
        lambda: handle.pin_device_tensor(array),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_host_memory_beside_a_gpus_is_none_of_cufiles(
    gpu: Gpu,
    make_gds: MakeGds,
    engine: str,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
) -> None:
    make_gds()  # opens cuFile
    data = random_bytes(3_000_000)
    data.tofile(directory / "file")
    targets = [gpu.array(4096), aligned((256 << 10) + 512), gpu.array(500_000), aligned(1 << 20)]
    with tensorferry.open(directory / "file", engine=engine, direct=True) as file:
        file.read(targets, 4096)
        assert file.stats()["gds_nbytes"] == 0
    found = [bytes(one) if isinstance(one, np.ndarray) else gpu.bytes_of(one) for one in targets]
    nbytes = sum(map(len, found))
    assert_equal(b"".join(found), data[4096 : 4096 + nbytes])
