"""Errors of files while GPU memory is moved: the exact error, no hang, no other memory changed."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tests.gpu.arrays import Amid
from tests.gpu.programs import assert_moves
from tests.support import child, mounts
from tests.support.expect import contents, short_read, storage_error

if TYPE_CHECKING:
    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu

SIZES = [100, 5_000_003, 50_000_003]


@pytest.mark.parametrize("nbytes", SIZES)
def test_missing_files_and_directories(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, nbytes: int
) -> None:
    handle = make_handle()
    array = Amid(gpu, nbytes)
    missing, deeper = directory / "missing", directory / "no" / "file"
    with storage_error(errno.ENOENT, missing):
        handle.sync_pread(array.array, missing)
    with storage_error(errno.ENOENT, missing):
        handle.async_pread(array.array, missing)
    with storage_error(errno.ENOENT, missing):
        tensorferry.read(missing, array.array)
    with storage_error(errno.ENOENT, deeper):
        tensorferry.write(deeper, array.array)
    with storage_error(errno.EISDIR, directory):
        handle.async_pwrite(array.array, directory)
    assert handle.wait() == 0
    assert_moves(gpu, handle, directory)
    assert array.contents() == bytes(nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
def test_files_that_are_too_short(
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    nbytes: int,
) -> None:
    handle = make_handle()
    path = directory / "short"
    random_bytes(nbytes).tofile(path)
    array = Amid(gpu, nbytes, 3)
    with short_read(path, expected=nbytes):
        handle.sync_pread(array.array, path, 1)
    with short_read(path, expected=nbytes):
        handle.async_pread(array.array, path, nbytes // 2)
    with short_read(path, expected=nbytes, transferred=0):
        tensorferry.read(path, array.array, nbytes)
    with tensorferry.open(path, engine=handle.engine) as file:
        with short_read(path, expected=nbytes):
            file.read(array.array, 1)
        with short_read(path, expected=nbytes):
            file.read_into(array.array, 1).result()
    array.contents()
    assert handle.wait() == 0
    assert_moves(gpu, handle, directory)


@pytest.mark.parametrize("nbytes", [200_000, 50_000_003])
def test_a_file_that_is_cut_while_it_is_read(
    gpu: Gpu,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    nbytes: int,
) -> None:
    """A kernel delays the read until the file has been truncated."""
    handle = make_handle(block_size=65536)
    path = directory / "file"
    random_bytes(nbytes).tofile(path)
    array = Amid(gpu, nbytes, 5)
    with gpu.new_stream():
        gpu.fill_later(array.array, 1, 0.2)
        handle.async_pread(array.array, path)
    os.truncate(path, nbytes // 2 + 1)
    with short_read(path, expected=nbytes):
        handle.wait()
    array.contents()
    assert_moves(gpu, handle, directory)


def test_a_full_file_system(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle(block_size=65536)
    before = random_bytes(3_000_000)
    array = gpu.array(16 << 20)
    with mounts.tmpfs(directory / "tmpfs", 8 << 20) as full:
        before.tofile(full / "other")
        path = full / "file"
        with storage_error(errno.ENOSPC, path, expected=16 << 20):
            handle.sync_pwrite(array, path)
        handle.async_pwrite(array, path)
        with storage_error(errno.ENOSPC, path, expected=16 << 20):
            handle.wait()
        with storage_error(errno.ENOSPC, path, expected=16 << 20):
            tensorferry.write(path, array)
        assert contents(full / "other").tobytes() == before.tobytes()
        path.unlink()
        assert_moves(gpu, handle, full)


def test_writes_that_fail_in_the_middle_of_the_pipeline(
    gpu: Gpu, engine: str, directory: pathlib.Path
) -> None:
    limit, nbytes = 10 << 20, 40 << 20
    program = "tests.gpu.programs:limited_file_size"
    arguments = {"directory": directory, "nbytes": nbytes, "limit": limit}
    ended = child.call(program, engine=engine, **arguments)
    assert set(ended.result["answers"]) == {"sync", "async"}
    for number, expected, transferred, offset in ended.result["answers"].values():
        assert number == errno.EFBIG
        assert expected == nbytes
        assert transferred <= limit
        assert offset <= limit
    assert not ended.result["beyond"]


def test_failures_are_raised_in_order_and_the_handle_goes_on(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    path = directory / "file"
    path.write_bytes(bytes(1_000_000))
    arrays = [gpu.array(2_000_000) for _ in range(3)]
    good = gpu.array(1_000_000)
    with gpu.new_stream():
        gpu.fill_later(good, 1, 0.1)
        handle.async_pread(good, path)
    for array in arrays:
        with storage_error(errno.ENOENT, directory / "missing"):
            handle.async_pread(array, directory / "missing")
    assert handle.wait() == 1
    assert gpu.bytes_of(good) == bytes(1_000_000)
    assert_moves(gpu, handle, directory)


def test_bad_arguments_are_refused_before_any_io(gpu: Gpu, directory: pathlib.Path) -> None:
    path = directory / "never"
    array = gpu.array(100)
    for offset in (-1, 1 << 63, (1 << 63) - 2):
        with pytest.raises(ValueError, match="offset"):
            tensorferry.write(path, array, offset)
    with pytest.raises(ValueError, match="closed"):
        closed_file(directory).write(array)
    assert not path.exists()


def closed_file(directory: pathlib.Path) -> tensorferry.File:
    with tensorferry.open(directory / "closed", "w") as file:
        return file


@pytest.mark.parametrize(
    ("library", "reason"),
    [("nowhere.so", "nowhere.so"), ("text.so", "text.so"), (None, "cuInit")],
    ids=["missing", "no library", "a library without CUDA"],
)
def test_without_a_driver_that_works_gpu_memory_is_refused_with_a_reason(
    directory: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
    library: str | None,
    reason: str,
) -> None:
    """In a separate process, in which another file is taken for the driver; host memory still works."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "text.so").write_text("no library\n")
    path = folder / library if library else any_library()
    ended = child.call(
        "tests.gpu.programs:refusals",
        environment={"TENSORFERRY_LIBCUDA": str(path)},
        directory=directory,
    )
    answers = dict(ended.result["answers"])
    assert answers.pop("files") == []
    assert set(answers) == {"write", "read", "handle", "many"}
    for text in [*answers.values(), ended.result["refusal"]]:
        assert reason in text
    assert not ended.result["in_use"]


def any_library() -> pathlib.Path:
    """Return a shared library that has none of CUDA's functions."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split()[-1]
            if "/libc.so" in path or "/libc-" in path:
                return pathlib.Path(path)
    raise AssertionError("this process has no C library")
