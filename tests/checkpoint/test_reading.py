"""Progress reports of loads, their failures, and their memory."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorferry
from tensorferry.checkpoint import FileSystemReader
from tensorferry.checkpoint import progress as progress_module
from tensorferry.checkpoint.progress import Progress, Throughput
from tensorferry.checkpoint.storage import reading
from tests.checkpoint.loads import LEVELS, WRITERS, fails, load
from tests.checkpoint.states import assert_same, empty_like, mixed_state, save
from tests.support.faultfs import Fault
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    import pathlib

    from tests.support.faultfs import FaultFS


def state_of_48_mib() -> dict[str, torch.Tensor]:
    return {f"t{k}": torch.full((1 << 19,), float(k)) for k in range(24)}


@pytest.fixture
def told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_PAUSE_SECONDS", 0.0)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_progress_grows_up_to_all(
    directory: pathlib.Path, told_each_time: None, writer: Any
) -> None:
    state = mixed_state(1) | state_of_48_mib()
    dcp.save(state, storage_writer=writer(directory, single_file_per_rank=False), no_dist=True)
    told: list[Progress] = []
    threads = set()

    def listen(progress: Progress) -> None:
        told.append(progress)
        threads.add(threading.get_ident())

    loaded = empty_like(state)
    reader = load(loaded, directory, progress=listen)
    assert_same(loaded, state)
    assert threads == {threading.get_ident()}
    for before, after in itertools.pairwise(told):
        assert before.nbytes <= after.nbytes
        assert before.files <= after.files
    first, last = told[0], told[-1]
    assert first.nbytes < last.nbytes / 2
    assert last.nbytes == last.total_nbytes > 24 << 21
    # The empty tensor is not requested.
    assert last.files == last.total_files == len(list(directory.glob("*.distcp"))) - 1
    assert {each.total_nbytes for each in told} == {last.nbytes}
    assert reader.last_load is not None
    assert reader.last_load.nbytes == last.nbytes
    assert reader.last_load.seconds > 0


def test_progress_is_told_once_of_a_short_load(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_PAUSE_SECONDS", math.inf)  # independent of the speed
    save({"a": torch.ones(10)}, directory)
    told: list[Progress] = []
    load({"a": torch.zeros(10)}, directory, progress=told.append)
    assert told == [Progress(40, 40, 1, 1)]


@pytest.mark.parametrize("calls", [1, 5])
def test_what_progress_raises_ends_the_load(
    directory: pathlib.Path, told_each_time: None, unlogged: None, calls: int
) -> None:
    state = state_of_48_mib()
    save(state, directory)
    left = calls

    def listen(progress: Progress) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise ZeroDivisionError("enough")

    def attempt() -> None:
        nonlocal left
        left = calls
        with fails(ZeroDivisionError, "enough"):
            load(empty_like(state), directory, progress=listen)

    attempt()
    with nothing_leaks(resident_slack_nbytes=64 << 20):
        attempt()
    loaded = empty_like(state)
    load(loaded, directory)
    assert_same(loaded, state)


def test_a_progress_that_cannot_be_called_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="progress: 5 is not callable"):
        FileSystemReader(directory, progress=5)  # type: ignore[arg-type]


def test_throughput_has_its_speed() -> None:
    assert Throughput(3_000_000_000, 2.0).gb_per_second == 1.5
    assert Throughput(0, 0.0).gb_per_second == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        Throughput(1, 1.0).nbytes = 2  # type: ignore[misc]


def test_a_load_that_failed_has_no_throughput(faultfs: FaultFS) -> None:
    state = state_of_48_mib()
    save(state, faultfs.path)
    reader = FileSystemReader(faultfs.path)
    dcp.load(empty_like(state), storage_reader=reader, no_dist=True)
    assert reader.last_load is not None
    faultfs.order(Fault("read", start=20 << 20, end=21 << 20, error=errno.EIO))
    with fails(tensorferry.StorageError):
        dcp.load(empty_like(state), storage_reader=reader, no_dist=True)
    assert reader.last_load is None


@pytest.mark.parametrize("level", LEVELS)
def test_a_load_that_failed_touches_no_tensor_any_more(
    faultfs: FaultFS, unlogged: None, level: str
) -> None:
    """The first transfer fails while another is held on its way: that one is waited for."""
    state = state_of_48_mib()
    save(state, faultfs.path)
    (file,) = faultfs.path.glob("*.distcp")
    faultfs.order(
        Fault("read", start=1 << 20, end=2 << 20, error=errno.EIO, await_held=1, name=file.name),
        Fault("read", start=9 << 20, end=40 << 20, hold=True, name=file.name),
    )
    released = threading.Event()

    def release() -> None:
        faultfs.await_held()
        released.wait(0.5)  # a load that does not wait would end in this time
        released.set()
        faultfs.clear()

    releasing = threading.Thread(target=release)
    releasing.start()
    loaded = empty_like(state)
    with fails(tensorferry.StorageError, "bytes moved"):
        load(loaded, faultfs.path, verify=level)
    assert released.is_set()
    releasing.join()


def test_many_files_are_not_open_at_once(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{k}": torch.full((k,), float(k)) for k in range(300)}
    save(state, directory, single_file_per_rank=False)
    monkeypatch.setattr(reading, "_MAX_FILES", 4)
    most_open = 0
    real = reading.DataFile

    class Counting(real):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal most_open
            super().__init__(*arguments, **options)
            files.append(self.file)
            most_open = max(most_open, sum(not file.closed for file in files))

    files: list[tensorferry.File] = []
    monkeypatch.setattr("tensorferry.checkpoint.storage.contents.DataFile", Counting)
    loaded = empty_like(state)
    load(loaded, directory)
    assert_same(loaded, state)
    assert len(files) >= 299
    assert 1 < most_open <= 6
    assert all(file.closed for file in files)
