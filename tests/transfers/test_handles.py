"""aio_handle: DeepNVMe's contract, on every engine. Its faults are in tests/transfers."""

from __future__ import annotations

import errno
import inspect
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes


def test_signatures_are_those_of_deepnvme() -> None:
    def names(method: str) -> list[str]:
        return list(inspect.signature(getattr(tensorferry.aio_handle, method)).parameters)[1:]

    assert names("__init__")[:5] == [
        "block_size",
        "queue_depth",
        "single_submit",
        "overlap_events",
        "intra_op_parallelism",
    ]
    for method in ("read", "write"):
        assert names(method) == ["buffer", "filename", "validate", "file_offset"]
    for method in ("sync_pread", "sync_pwrite", "async_pread"):
        assert names(method) == ["buffer", "filename", "file_offset"]
    assert names("async_pwrite") == ["buffer", "filename", "file_offset", "fd"]
    for method in ("pread", "pwrite"):
        assert names(method)[:3] == ["buffer", "filename", "validate"]


def test_settings_are_reported_as_given(make_handle: MakeHandle) -> None:
    given = {"block_size": 1000, "queue_depth": 3, "single_submit": True, "num_threads": 4}
    given["overlap_events"] = True
    for options, settings in (
        ({}, (1 << 20, 128, False, False, 1, 1)),
        (given, (1000, 3, True, True, 4, 4)),
    ):
        handle = make_handle(**options)
        assert settings == (
            handle.get_block_size(),
            handle.get_queue_depth(),
            handle.get_single_submit(),
            handle.get_overlap_events(),
            handle.get_intra_op_parallelism(),
            handle.get_thread_count(),
        )
        assert handle.get_alignment() % 512 == 0
    assert tensorferry.aio_handle(4096, 2, True, True, 3).get_intra_op_parallelism() == 3


@pytest.mark.parametrize(
    "options",
    [
        {"queue_depth": 1 << 20},
        {"intra_op_parallelism": 2, "num_threads": 3},
        {"engine": "nonesuch"},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=list(options)[-1]):
        tensorferry.aio_handle(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="block_size"):
        tensorferry.aio_handle(block_size=1.5)  # type: ignore[arg-type]


def test_return_values(
    handle: tensorferry.aio_handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = str(directory / "file")
    source = random_bytes(100_003)
    found = np.zeros_like(source)
    assert handle.wait() == 0
    assert handle.sync_pwrite(source, path) == 1
    assert handle.sync_pread(found, path) == 1
    assert_equal(found, source)
    assert handle.write(source, path, False) == 0
    assert handle.read(found, path, True) == 0
    assert handle.pwrite(source, path, True, False) == 1
    assert handle.pread(found, path, False, True) == 0
    assert handle.pread(found, path, validate=True, **{"async": True}) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    handle.async_pwrite(source, path)
    handle.async_pwrite(source, path + "2", 5)
    assert handle.sync_pread(found, path) == 3  # this call and the two pending ones
    assert handle.wait() == 0
    with pytest.raises(TypeError, match="async"):
        handle.pread(found, path, False)
    with pytest.raises(TypeError, match="nonsense"):
        handle.pread(found, path, False, nonsense=True)


def test_a_descriptor_may_be_given_by_deepnvmes_keyword(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    source = random_bytes(5000)
    handle = tensorferry.aio_handle()
    with open(directory / "file", "wb") as file:
        assert handle.async_pwrite(buffer=source, fd=file.fileno(), file_offset=100) == 0
        assert handle.wait() == 1
        with pytest.raises(TypeError, match="filename, fd"):
            handle.async_pwrite(source, directory / "file", fd=file.fileno())
    with pytest.raises(TypeError, match="filename, fd"):
        handle.async_pwrite(source)
    assert_equal(contents(directory / "file"), bytes(100) + source.tobytes())


def test_validation_finds_a_difference(
    handle: tensorferry.aio_handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    source = random_bytes(100_000)
    handle.sync_pwrite(source, path)
    found = np.empty_like(source)
    handle.pread(found, path, True, True)
    while not handle._pending[0].future.done():
        pass
    found[12_345] ^= 1  # between the read and its validation
    with pytest.raises(tensorferry.StorageError, match="12345") as caught:
        handle.wait()
    assert caught.value.offset == 12_345


def test_validation_finds_the_file_after_its_descriptor_is_closed(
    handle: tensorferry.aio_handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    source, other = random_bytes(100_000), random_bytes(100_000)
    handle.sync_pwrite(other, directory / "other")
    descriptor = os.open(directory / "file", os.O_RDWR | os.O_CREAT, 0o600)
    handle.pwrite(source, descriptor, True, True)
    opened = os.open(directory / "other", os.O_RDONLY)
    try:
        os.dup2(opened, descriptor)  # closes the file, and gives its number to another one
        assert handle.wait() == 1
    finally:
        os.close(opened)
        os.close(descriptor)


def test_a_call_with_a_file_that_validation_could_not_find_is_refused_at_once(
    handle: tensorferry.aio_handle,
    directory: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    random_bytes: RandomBytes,
) -> None:
    (directory / "deleted").mkdir()
    monkeypatch.chdir(directory / "deleted")
    (directory / "deleted").rmdir()
    with pytest.raises(tensorferry.StorageError, match="No such file or directory"):
        handle.pwrite(random_bytes(4096), "../file", True, True)
    with pytest.raises(tensorferry.StorageError, match="Bad file descriptor"):
        handle.pwrite(random_bytes(4096), 1 << 30, True, True)
    assert not (directory / "file").exists()
    assert handle.wait() == 0


def test_counters(handle: tensorferry.aio_handle, directory: pathlib.Path) -> None:
    handle.sync_pwrite(tensorferry.empty(8 << 20, "u1"), directory / "file")
    stats = handle.stats()
    assert stats["engine"] == handle.engine
    assert stats["requests"] == 1
    assert stats["written_nbytes"] == 8 << 20
    assert stats["direct_nbytes"] + stats["buffered_nbytes"] == 8 << 20
    assert stats["bounced_nbytes"] == 0
    assert stats["engine_blocks"] == 8
    assert (
        0 < stats["block_latency_microseconds"]["p50"] <= stats["block_latency_microseconds"]["p99"]
    )


def test_wait_raises_the_first_failure_which_knows_the_others(
    make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle(block_size=4096, queue_depth=1)
    data = random_bytes(1_000_000)
    for name in ("gone", "kept", "cut"):
        handle.pwrite(data, directory / name, True, True)
    for operation in handle._pending:
        operation.future.result()
    (directory / "gone").unlink()  # the validation of this one cannot even begin
    os.truncate(directory / "cut", 5)
    with pytest.raises(tensorferry.StorageError, match="1 more operations failed") as caught:
        handle.wait()
    assert caught.value.filename == str(directory / "gone")
    assert caught.value.errno == errno.ENOENT
    (other,) = caught.value.others
    assert other.filename == str(directory / "cut")
    assert handle.wait() == 0
