"""Hundreds of repetitions of each fault leave no descriptor, memory, lock or object behind."""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support.expect import assert_works
from tests.support.faultfs import Fault, FaultFS
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from tests.conftest import MakeHandle

REPETITIONS = 400
OBJECTS_SLACK = 200  # one of each second repetition
NBYTES = 12_003
BLOCK = 4096


@dataclass
class Stage:
    """The handle, the file and the mount of one test."""

    handle: tensorferry.aio_handle
    file: Any
    engine: str
    directory: pathlib.Path
    target: Any

    def raises(self, number: int, call: Callable[[], object]) -> None:
        try:
            call()
        except tensorferry.StorageError as error:
            if number not in (error.errno, 0):
                raise
        else:
            raise AssertionError("nothing was raised")


def _missing(stage: Stage) -> None:
    path = str(stage.directory / "missing")
    stage.raises(errno.ENOENT, lambda: stage.handle.sync_pread(stage.target, path))
    stage.raises(errno.ENOENT, lambda: stage.handle.async_pread(stage.target, path))
    stage.raises(errno.ENOENT, lambda: tensorferry.read(path, stage.target))
    stage.raises(errno.ENOENT, lambda: tensorferry.read_many([(path, stage.target)]))


def _past_the_end(stage: Stage) -> None:
    path = str(stage.directory / "short")
    stage.raises(0, lambda: stage.handle.sync_pread(stage.target, path))
    stage.raises(0, lambda: stage.handle.async_pread(stage.target, path))
    stage.raises(0, lambda: stage.file.read(stage.target))
    stage.raises(0, lambda: stage.file.read_into(stage.target, 1000))


def _wrong_arguments(stage: Stage) -> None:
    path = str(stage.directory / "short")
    for arguments in ((stage.target, path, -1), (None, path), (stage.target, None)):
        try:
            stage.handle.async_pwrite(*arguments)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
        raise AssertionError("nothing was raised")
    stage.raises(errno.EBADF, lambda: stage.handle.async_pwrite(stage.target, 987_654))


def _missing_opened(stage: Stage) -> None:
    path = str(stage.directory / "missing")
    stage.raises(errno.ENOENT, lambda: tensorferry.open(path, engine=stage.engine))
    with tensorferry.open(stage.directory / "short", engine=stage.engine) as file:
        stage.raises(0, lambda: file.read(stage.target))


def _abandoned(stage: Stage) -> None:
    handle = tensorferry.aio_handle(engine=stage.engine, queue_depth=4)
    handle.async_pwrite(np.ones(NBYTES, np.uint8), str(stage.directory / "abandoned"))


def _new_handle(stage: Stage) -> None:
    with tensorferry.aio_handle(engine=stage.engine, queue_depth=4) as handle:
        handle.sync_pread(bytearray(100), str(stage.directory / "short"))


def _transfers(stage: Stage) -> None:
    path = str(stage.directory / "transfers")
    stage.handle.sync_pwrite(stage.target, path, 3)
    stage.handle.async_pread(stage.target, path, 3)
    stage.handle.wait()
    stage.handle.async_pwrite(stage.target, path, 5)
    stage.handle.wait()
    future = stage.file.read_into(bytearray(999), 1)
    future.add_done_callback(lambda _: None)
    future.result()


@pytest.mark.parametrize(
    ("fault", "repetitions"),
    [
        (_missing, REPETITIONS),
        (_past_the_end, REPETITIONS),
        (_wrong_arguments, REPETITIONS),
        (_transfers, REPETITIONS),
        (_missing_opened, REPETITIONS // 10),
        (_abandoned, REPETITIONS // 10),
        (_new_handle, REPETITIONS // 10),
    ],
    ids=lambda parameter: getattr(parameter, "__name__", "").strip("_"),
)
def test_repetitions_leak_nothing(
    engine: str,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    fault: Callable[[Stage], None],
    repetitions: int,
) -> None:
    """Faults that start and end an engine are repeated less often: Linux AIO needs 30 ms to destroy a context."""
    (directory / "short").write_bytes(bytes(1000))
    with tensorferry.open(directory / "short", engine=engine) as file:
        target = np.zeros(NBYTES, np.uint8)
        stage = Stage(make_handle(), file, engine, directory, target)
        for _ in range(repetitions // 10):
            fault(stage)
        with nothing_leaks(objects_slack=OBJECTS_SLACK):
            for _ in range(repetitions):
                fault(stage)
        assert_works(stage.handle, directory)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize(
    ("fault", "number"),
    [
        (Fault("", start=BLOCK, error=errno.EIO), errno.EIO),
        (Fault("", start=2 * BLOCK, error=errno.ENOSPC), errno.ENOSPC),
        (Fault("", start=BLOCK, short=0), 0),
    ],
    ids=["EIO", "ENOSPC", "moves nothing"],
)
def test_hundreds_of_failures_of_the_drive_leak_nothing(
    make_handle: MakeHandle, faultfs: FaultFS, op: str, fault: Fault, number: int
) -> None:
    handle = make_handle(block_size=BLOCK)
    path = faultfs.path / "file"
    array = np.zeros(NBYTES, np.uint8)
    array.tofile(path)
    fault = replace(fault, op=op)
    # A write that moves no bytes is retried for a while, so there is time for a few repetitions only.
    repetitions = 5 if fault.short == 0 and op == "write" else REPETITIONS
    submit = handle.async_pread if op == "read" else handle.async_pwrite

    def provoke() -> None:
        submit(array, str(path))
        try:
            handle.wait()
        except tensorferry.StorageError as error:
            if number not in (error.errno, 0):
                raise
        else:
            raise AssertionError("nothing was raised")

    faultfs.order(fault)
    for _ in range(max(1, repetitions // 10)):
        provoke()
    with nothing_leaks(objects_slack=OBJECTS_SLACK):
        for _ in range(repetitions):
            provoke()
    faultfs.clear()
    assert_works(handle, faultfs.path)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_writes_to_a_full_file_system_leak_nothing(
    make_handle: MakeHandle, request: pytest.FixtureRequest, kind: str
) -> None:
    """Full, an ext4 waits for its journal each time in case that frees something: 100 must do."""
    handle = make_handle()
    directory: pathlib.Path = request.getfixturevalue(f"small_{kind}")
    repetitions = REPETITIONS if kind == "tmpfs" else REPETITIONS // 10
    array = np.zeros(1 << 20, np.uint8)
    path = directory / "file"
    filler = directory / "filler"
    _fill(filler, array.size)

    def provoke() -> None:
        try:
            handle.sync_pwrite(array, str(path))
        except tensorferry.StorageError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            raise AssertionError("nothing was raised")

    for _ in range(repetitions // 10):
        provoke()
    with nothing_leaks(objects_slack=OBJECTS_SLACK):
        for _ in range(repetitions):
            provoke()
    filler.unlink()
    path.unlink(missing_ok=True)
    assert_works(handle, directory)


def _fill(path: pathlib.Path, nbytes: int) -> None:
    """Write nbytes at a time into a new file until the file system is full."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(nbytes))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return
