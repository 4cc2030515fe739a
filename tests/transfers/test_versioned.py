"""Files that are read as one version: a change in place is an error of each later read, a replacement is not seen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tensorferry import StorageError
from tensorferry.transfer.remote import Version
from tensorferry.transfer.versioned import VersionedFile
from tests.support.faultfs import Fault
from tests.support.forks import passes_in_child
from tests.support.page_cache import make_cold

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from tests.support.faultfs import FaultFS


@pytest.fixture
def path(directory: pathlib.Path) -> pathlib.Path:
    path = directory / "file"
    path.write_bytes(b"1" * 100_000)
    return path


def write_in_place(path: pathlib.Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


CHANGES: dict[str, Callable[[pathlib.Path], object]] = {
    "a byte": lambda path: write_in_place(path, b"2"),
    "the same bytes": lambda path: write_in_place(path, b"1"),
    "all bytes": lambda path: path.write_bytes(b"2" * 100_000),
    "longer": lambda path: os.truncate(path, 100_001),
    "shorter, and the old length again": lambda path: (
        os.truncate(path, 10),
        os.truncate(path, 100_000),
    ),
}
READS: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda file, array: file.read(array, 1000),
    "read_into": lambda file, array: file.read_into(array, 1000).result(),
    "several": lambda file, array: file.read([array[:100], 77, array[177:]], 1000),
    "an iterator": lambda file, array: list(file.read_into(iter([array]), 1000).result()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", READS)
def test_every_read_of_a_changed_file_is_an_error(
    default_engine: str, path: pathlib.Path, change: str, read: str
) -> None:
    array = np.zeros(5000, np.uint8)
    with VersionedFile(path) as file:
        READS[read](file, array)
        assert (array[:100] == ord("1")).all()
        CHANGES[change](path)
        for _ in range(2):
            with pytest.raises(StorageError, match="changed since its header was read") as caught:
                READS[read](file, array)
            assert caught.value.filename == str(path)
        with pytest.raises(StorageError):
            file.check()


def test_a_change_right_after_a_change_is_noticed(path: pathlib.Path) -> None:
    """Time stamps have ticks: a change in the same tick would have the same time."""
    for number in range(50):
        path.write_bytes(b"%05d" % number)
        with VersionedFile(path) as file:
            write_in_place(path, b"other")
            with pytest.raises(StorageError):
                file.read(np.zeros(5, np.uint8))


def test_a_read_in_flight_during_the_change_is_an_error(path: pathlib.Path) -> None:
    with VersionedFile(path) as file:
        futures = [file.read_into(np.zeros(50_000, np.uint8)) for _ in range(20)]
        write_in_place(path, b"2")
        futures.append(file.read_into(np.zeros(5, np.uint8)))
        # The first reads may have ended, and been compared, before the change.
        assert [str(future.exception())[:3] for future in futures][-1] == "[Er"
        assert all(future.done() for future in futures)


def test_a_file_that_is_replaced_stays_readable(path: pathlib.Path) -> None:
    with VersionedFile(path) as file:
        (path.parent / "new").write_bytes(b"2" * 5)
        (path.parent / "new").replace(path)
        array = file.read(np.zeros(100_000, np.uint8))
        assert (array == ord("1")).all()

        def child() -> None:
            with file._reopen() as own:
                assert (own.read(np.zeros(9, np.uint8)) == ord("1")).all()
                assert own.path == str(path)

        passes_in_child(child)


def test_an_expected_version_is_compared_when_the_file_is_opened(path: pathlib.Path) -> None:
    version = Version.at(str(path))
    VersionedFile(path, version=version).close()
    write_in_place(path, b"2")
    with pytest.raises(KeyError, match="file"):
        VersionedFile(path, version=version, changed=KeyError)


def test_a_result_that_is_asked_for_after_the_file_was_closed_is_as_before(
    path: pathlib.Path,
) -> None:
    with VersionedFile(path) as file:
        future = file.read_into(np.zeros(5, np.uint8))
    write_in_place(path, b"2")
    assert future.result().tobytes() == b"11111"


def test_reads_in_flight_are_compared_when_the_file_is_closed(
    faultfs: FaultFS,
) -> None:
    path = faultfs.path / "file"
    path.write_bytes(b"1" * 100_000)
    make_cold(path)
    faultfs.order(Fault("read", delay_s=0.1))
    with VersionedFile(path) as file:
        futures = [file.read_into(np.zeros(50_000, np.uint8)) for _ in range(3)]
    assert all(future.result()[-1] == ord("1") for future in futures)
