"""Read-ahead: in order, within its limits, and complete, with interrupts, releases, closes and forks at any moment."""

from __future__ import annotations

import errno
import itertools
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorferry
from tensorferry.transfer import pipeline
from tensorferry.transfer.pipeline import Pipeline, Read, read_ahead_nbytes
from tests.support import interrupts
from tests.support.faultfs import Fault
from tests.support.forks import held_by_another_thread, passes_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.faultfs import FaultFS

KIB = 1 << 10
CONTENT = np.random.default_rng(5).integers(0, 256, 1 << 20, np.uint8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tensorferry.File]:
    path = tmp_path_factory.mktemp("pipeline") / "file"
    tensorferry.write(path, CONTENT)
    with tensorferry.open(path) as opened:
        yield opened


class Range(Read):
    """A read of some bytes of the file, by two transfers if it is large."""

    def __init__(self, file: tensorferry.File, begin: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.first = begin
        self.data = np.zeros(0, np.uint8)
        self._file = file

    def begin(self) -> None:
        self.data = np.zeros(self.nbytes, np.uint8)
        half = self.nbytes // 2
        parts = [(0, self.nbytes)] if half < 8 * KIB else [(0, half), (half, self.nbytes)]
        self.futures = [
            self._file.read_into(self.data[at:end], self.first + at) for at, end in parts
        ]

    @property
    def is_right(self) -> bool:
        return bool((self.data == CONTENT[self.first : self.first + self.nbytes]).all())


def ranges(file: tensorferry.File, sizes: list[int]) -> list[Range]:
    begins = itertools.accumulate(sizes, initial=0)
    return [
        Range(file, begin % (1 << 19), size) for begin, size in zip(begins, sizes, strict=False)
    ]


@given(
    sizes=st.lists(st.integers(0, 64 * KIB), max_size=30),
    memory_nbytes=st.none() | st.integers(1, 200 * KIB),
    automatic=st.booleans(),
    lazily=st.booleans(),
)
def test_all_come_in_order_and_memory_is_bounded(
    file: tensorferry.File,
    sizes: list[int],
    memory_nbytes: int | None,
    automatic: bool,
    lazily: bool,
) -> None:
    reads = ranges(file, sizes)
    given_reads = (read for read in reads) if lazily else reads
    found = []
    with Pipeline(given_reads, memory_nbytes=memory_nbytes, automatic=automatic) as ahead:
        for read in ahead:
            held = sum(one.nbytes for one in ahead.held)
            if memory_nbytes is not None:
                assert held <= max(memory_nbytes, read.nbytes)
            assert read.is_right
            found.append(read)
    assert found == reads
    assert ahead.nbytes_read == sum(sizes)


@given(data=st.data())
def test_reads_may_be_added_begun_taken_and_dropped_in_any_order(
    file: tensorferry.File, data: st.DataObject
) -> None:
    """Each read that is not cancelled returns its bytes; the pipeline holds no memory at the end."""
    with Pipeline[Range](memory_nbytes=100 * KIB) as ahead:
        left: list[Range] = []
        for _ in range(data.draw(st.integers(0, 25))):
            deed = data.draw(st.sampled_from(["add", "begin", "take", "drop", "advance"]))
            if deed in ("add", "begin"):
                [read] = ranges(file, [data.draw(st.integers(1, 60 * KIB))])
                left.append(read)
                ahead.begin(read) if deed == "begin" else ahead.add(read)
            elif deed == "advance":
                ahead.advance()
            elif left:
                read = left.pop(data.draw(st.integers(0, len(left) - 1)))
                if not read.begun:
                    ahead.begin(read)
                if deed == "take":
                    read.wait()
                    assert read.is_right
                else:
                    read.cancel(wait=True)
                ahead.release(read)
        for read in left:
            if not read.begun:
                ahead.begin(read)
            read.wait()
            assert read.is_right
            ahead.release(read)
        assert ahead.first() is None
        assert ahead.held == ()


def take_all(ahead: Pipeline[Range], found: list[Range]) -> None:
    while (read := ahead.first()) is not None:
        read.wait()
        if not found or found[-1] is not read:
            found.append(read)
        ahead.release(read)


def test_interrupted_at_any_moment_it_goes_on(file: tensorferry.File) -> None:
    sizes = [3 * KIB, 20 * KIB, 0, 40 * KIB, KIB, 16 * KIB]

    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in itertools.count(1):
        reads = ranges(file, sizes)
        found: list[Range] = []
        with Pipeline(reads, memory_nbytes=48 * KIB) as ahead:
            with (
                interrupts.At(number, pipeline.__file__, interrupt) as at,
                suppress(KeyboardInterrupt),
            ):
                take_all(ahead, found)
            take_all(ahead, found)
        assert found == reads, at.happened_in
        assert all(read.is_right for read in found), at.happened_in
        if at.happened_in is None:
            break
    assert number > 50


def test_what_is_on_its_way_is_bounded_by_the_variable(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    (faultfs.backing / "file").write_bytes(bytes(1 << 20))
    faultfs.order(Fault("read", hold=True))
    with tensorferry.open(faultfs.path / "file", direct=False) as held:
        for nbytes, begun in (("1", 2), ("256KiB", 4), ("1GiB", 10)):
            monkeypatch.setenv("TENSORFERRY_READ_AHEAD", nbytes)
            ahead = Pipeline(Range(held, 0, 64 * KIB) for _ in range(10))
            ahead.advance()
            reads = ahead.held
            assert len(reads) == begun
            closing = threading.Thread(target=ahead.close)
            closing.start()
            faultfs.release()
            closing.join()
            assert all(future.done() for read in reads for future in read.futures)
            faultfs.order(Fault("read", hold=True))
        faultfs.clear()


@pytest.mark.parametrize("wrong", ["much", "-1", "0", "1.5MiB"])
def test_a_variable_that_is_not_a_size_is_refused(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_READ_AHEAD", wrong)
    with pytest.raises(ValueError, match=r"TENSORFERRY_READ_AHEAD: .*" + wrong.strip("-")):
        read_ahead_nbytes()


def test_a_read_that_cannot_begin_is_told_and_waits(file: tensorferry.File) -> None:
    class Fails(Range):
        fails = True

        def begin(self) -> None:
            if self.fails:
                raise OSError("no")
            super().begin()

    first, second = Range(file, 0, KIB), Fails(file, KIB, KIB)
    with Pipeline[Any]([first, second]) as ahead:
        with pytest.raises(OSError, match="no"):
            ahead.first()
        assert ahead.held == (first,)
        second.fails = False
        assert [read.is_right for read in ahead] == [True, True]


def test_what_is_released_before_it_has_begun_is_passed_over(file: tensorferry.File) -> None:
    reads = ranges(file, [KIB] * 3)
    with Pipeline(reads) as ahead:
        ahead.release(reads[1])
        assert list(ahead) == [reads[0], reads[2]]
    assert not reads[1].begun


def test_two_that_release_at_once_drop_no_other_read(file: tensorferry.File) -> None:
    class Entered(Range):
        """A read with a moment, in the middle of a release, at which another thread releases it, too."""

        entered = False

        @property  # type: ignore[override]
        def released(self) -> bool:
            if self._released and not self.entered:
                self.entered = True
                reads.release(self)
            return self._released

        @released.setter
        def released(self, value: bool) -> None:
            self._released = value

        _released = False

    first, second = Entered(file, 0, KIB), Range(file, KIB, KIB)
    with Pipeline([first, second]) as reads:
        assert reads.first() is first
        first.wait()
        reads.release(first)
        assert reads.held == (second,)
        assert reads.first() is second
        assert [one.is_right for one in reads] == [True]


def test_closing_cancels_all_before_it_waits_for_any_and_leaves_what_was_released() -> None:
    told: list[tuple[str, bool]] = []

    class Endless(Read):
        nbytes = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self) -> None: ...

        def done(self) -> bool:
            return False

        def cancel(self, *, wait: bool = False) -> None:
            told.append((self.name, wait))

    first, second, third = reads = [Endless(name) for name in "abc"]
    ahead = Pipeline[Endless]()
    for read in reads:
        ahead.begin(read)
    ahead.release(second)
    ahead.close()
    assert sorted(told[:2]) == [("a", False), ("c", False)]
    assert sorted(told[2:]) == [("a", True), ("c", True)]
    assert first.begun
    assert third.begun


def test_a_failed_read_is_told_in_its_turn_and_files_are_closed(faultfs: FaultFS) -> None:
    (faultfs.backing / "file").write_bytes(bytes(1 << 20))
    faultfs.order(Fault("read", start=64 * KIB, end=128 * KIB, error=5))
    opened = tensorferry.open(faultfs.path / "file", direct=False)
    found: list[Range] = []
    with Pipeline[Range]() as ahead:
        ahead.files["it"] = opened
        for at in range(0, 256 * KIB, 64 * KIB):
            ahead.add(Range(opened, at, 64 * KIB))
        with pytest.raises(tensorferry.StorageError) as told:
            take_all(ahead, found)
    assert told.value.errno == 5
    assert [read.first for read in found] == [0]
    assert opened.closed


def test_a_failure_is_told_to_who_waits_after_the_release(faultfs: FaultFS) -> None:
    """Also if the read has ended before the release."""
    tensorferry.write(faultfs.path / "file", CONTENT)
    faultfs.order(Fault("read", start=0, end=1, error=errno.EIO))
    with (
        tensorferry.open(faultfs.path / "file", direct=True) as file,
        Pipeline([Range(file, 0, 4 * KIB)]) as reads,
    ):
        read = reads.first()
        assert read is not None
        assert isinstance(read.futures[0].exception(), tensorferry.StorageError)
        reads.release(read)
        with pytest.raises(tensorferry.StorageError):
            read.wait()


def test_a_forked_child_leaves_everything_to_the_parent(file: tensorferry.File) -> None:
    ahead = Pipeline(ranges(file, [KIB] * 4))
    ahead.advance()

    def work() -> None:
        with pytest.raises(RuntimeError, match=r"before fork\(\)"):
            ahead._check_process()
        ahead.close()  # no lock, no wait

    with held_by_another_thread(ahead.lock):
        passes_in_child(work)
    assert [read.is_right for read in ahead] == [True] * 4


def test_threads_share_one(file: tensorferry.File) -> None:
    reads = ranges(file, [4 * KIB] * 200)
    ahead = Pipeline(reads, memory_nbytes=64 * KIB)
    taken: list[Range] = []

    def take() -> None:
        while True:
            with ahead.lock:
                read = ahead.first()
                if read is None:
                    return
                ahead.release(read)
            read.wait()
            assert read.is_right
            taken.append(read)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(map(id, taken))) == 200
    ahead.close()
    assert ahead.first() is None
