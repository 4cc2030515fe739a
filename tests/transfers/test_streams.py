"""Streams: arrays that are appended one by one form a range of a file, on every engine."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import importlib.util
import sys
import threading
import warnings
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.transfer import runtime
from tensorferry.transfer.streams import MAX_UNCOPIED_NBYTES, Field, Stream
from tests.support import mounts
from tests.support.data import crcs
from tests.support.effort import examples
from tests.support.expect import interrupted, interrupted_in, storage_error
from tests.support.faultfs import Fault
from tests.support.forks import passes_in_child
from tests.support.leaks import nothing_leaks, settled
from tests.support.optional import torch
from tests.transfers import meetings

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from tests.support.data import RandomBytes
    from tests.support.faultfs import FaultFS
    from tests.transfers.conftest import Run

BUFFER_NBYTES = 4 << 20

sizes = st.one_of(
    st.sampled_from([0, 1, 4095, 4096, BUFFER_NBYTES - 1, BUFFER_NBYTES, BUFFER_NBYTES + 1]),
    st.integers(0, 100_000),
    st.integers(0, 3 * BUFFER_NBYTES),
)
ways = ["array", "list", "made", *(["tensors"] if importlib.util.find_spec("torch") else [])]


@settings(max_examples=examples(25))
@given(
    pieces=st.lists(st.tuples(sizes, st.sampled_from(ways)), max_size=8),
    offset=sizes,
    chunk_nbytes=st.sampled_from([4096, 5000, 256 << 10]),
    direct=st.sampled_from(["auto", True, False]),
    reserved=st.sampled_from([0, 1, 100_000, 16 << 20]),
)
def test_what_is_appended_is_in_the_file(
    engine: str,
    directory: pathlib.Path,
    pieces: list[tuple[int, str]],
    offset: int,
    chunk_nbytes: int,
    direct: Any,
    reserved: int,
) -> None:
    path = directory / "file"
    generator = np.random.default_rng(len(pieces) + offset)
    arrays = [
        np.frombuffer(generator.bytes(nbytes), np.uint8).copy()[: nbytes or None]
        for nbytes, _ in pieces
    ]
    data = b"".join(map(bytes, arrays))
    before = generator.bytes(offset + len(data) + 5000)
    path.write_bytes(before)
    sums = tensorferry.Checksums(chunk_nbytes, segments=True)
    with (
        tensorferry.open(path, "r+", engine=engine, direct=direct) as file,
        file.stream(offset, nbytes_reserved=reserved, checksums=sums) as stream,
    ):
        for array, (_, way) in zip(arrays, pieces, strict=True):
            match way:
                case "made":
                    stream.append_with_fields(bytes(array))
                case "array":
                    stream.append(array)
                case "list":
                    stream.append([array])
                case "tensors":
                    stream.append([torch.from_numpy(array)])
        assert stream.segment_count == len(pieces)
        assert stream.finish() == len(data)
    reached = max(len(before), offset + reserved)
    expected = before[:offset] + data + before[offset + len(data) :]
    assert path.read_bytes() == expected + bytes(reached - len(expected))
    assert sums.chunks == crcs(data, chunk_nbytes)
    assert sums.segments == [zlib.crc32(array) for array in arrays]


def test_arrays_of_a_generator_are_let_go_of_as_it_goes(
    engine: str, directory: pathlib.Path
) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    def made() -> Iterator[Any]:
        nonlocal most
        for number in range(60):
            tensor = torch.full((BUFFER_NBYTES,), number, dtype=torch.uint8)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield tensor
            del tensor

    path = directory / "file"
    with tensorferry.open(path, "w", engine=engine) as file, file.stream() as stream:
        stream.append(made())
        stream.wait_until_copied()
        gc.collect()
        assert not any(reference() is not None for reference in alive)
    assert most <= MAX_UNCOPIED_NBYTES // BUFFER_NBYTES + 2
    found = np.fromfile(path, np.uint8).reshape(60, -1)
    assert (found == np.arange(60, dtype=np.uint8)[:, None]).all()


def test_what_was_appended_may_change_once_it_is_copied(
    engine: str, directory: pathlib.Path
) -> None:
    path = directory / "file"
    data = bytearray(b"a" * (BUFFER_NBYTES + 100))
    with tensorferry.open(path, "w", engine=engine) as file, file.stream() as stream:
        stream.append(data)
        stream.wait_until_copied()
        data[:] = b"b" * len(data)
        stream.append(data[:50])
    assert path.read_bytes() == b"a" * (BUFFER_NBYTES + 100) + b"b" * 50


def test_made_bytes_have_checksums_of_what_is_before_them(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    expected = b""
    sums = tensorferry.Checksums(segments=True)
    with tensorferry.open(path, "w") as file, file.stream(checksums=sums) as stream:
        for number, nbytes in enumerate((10, 9 * BUFFER_NBYTES + 5, BUFFER_NBYTES - 9, 1)):
            payload = random_bytes(nbytes)
            stream.append(payload)
            stream.append_with_fields(b"....head", [Field("segment", 0, segment=2 * number)])
            expected += payload.tobytes() + zlib.crc32(payload).to_bytes(4, "little") + b"head"
    assert path.read_bytes() == expected


@pytest.mark.parametrize(
    "field",
    [
        Field("segment", 0, segment=1),
        Field("segment", 7, segment=0),
        Field("own", 0, begin=3, nbytes=8),
        Field("torch_id", 0),
        Field("torch_id", 0, crcs=[~1]),
        Field("another", 0),
    ],
)
def test_fields_that_do_not_fit_are_refused(directory: pathlib.Path, field: Field) -> None:
    sums = tensorferry.Checksums(segments=True)
    with tensorferry.open(directory / "file", "w") as file, file.stream(checksums=sums) as stream:
        stream.append(b"payload")
        with pytest.raises(ValueError, match=r"field|kind"):
            stream.append_with_fields(bytes(10), [field])
        stream.append(b"more")
    assert (directory / "file").read_bytes() == b"payloadmore"


def test_checksums_of_segments_must_be_asked_for(directory: pathlib.Path) -> None:
    with tensorferry.open(directory / "file", "w") as file, file.stream() as stream:
        stream.append(b"payload")
        with pytest.raises(ValueError, match="field"):
            stream.append_with_fields(bytes(10), [Field("segment", 0, segment=0)])


def test_a_full_disk_is_raised_and_ends_the_stream(engine: str, tmp_path: pathlib.Path) -> None:
    with mounts.ext4(tmp_path, 32 << 20) as small:
        file = tensorferry.open(small / "file", "w", engine=engine)
        stream = file.stream()
        with pytest.raises(tensorferry.StorageError) as caught:
            stream.append(np.ones(1 << 20, np.uint8) for _ in range(100))
        assert caught.value.errno == 28
        assert caught.value.filename == str(small / "file")
        with pytest.raises(ValueError, match="has ended"):
            stream.append(b"more")
        stream.abort()
        file.close()


def test_an_exception_in_the_block_gives_the_stream_up(directory: pathlib.Path) -> None:
    def fail() -> None:
        with stream:
            stream.append(np.ones(10 << 20, np.uint8))
            raise ZeroDivisionError

    with tensorferry.open(directory / "file", "w") as file:
        stream = file.stream()
        with pytest.raises(ZeroDivisionError):
            fail()
    with pytest.raises(ValueError, match="has ended"):
        stream.append(b"more")


def test_streams_that_are_dropped_leave_nothing(engine: str, directory: pathlib.Path) -> None:
    def drop() -> None:
        file = tensorferry.open(directory / "file", "w", engine=engine)
        stream = file.stream()
        data = np.ones(20 << 20, np.uint8)
        stream.append(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del stream
        file.close()

    drop()
    # The process keeps as many buffers as it has used at a time.
    with nothing_leaks(resident_slack_nbytes=44 << 20):
        for _ in range(10):
            drop()


def test_a_stream_in_a_cycle_with_its_array_is_collected(directory: pathlib.Path) -> None:
    class Array(np.ndarray[Any, Any]):
        stream: Any

    with tensorferry.open(directory / "file", "w") as file:
        array = np.ones(100, np.uint8).view(Array)
        array.stream = file.stream()
        array.stream.append(array)
        gone = weakref.ref(array)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del array
            gc.collect()
        assert gone() is None


def test_a_file_closed_beside_its_stream_is_an_error(engine: str, directory: pathlib.Path) -> None:
    file = tensorferry.open(directory / "file", "w", engine=engine)
    stream = file.stream()
    stream.append(np.ones(9 << 20, np.uint8))
    file.close()
    with pytest.raises((tensorferry.StorageError, ValueError), match="closed"):
        stream.finish()
    stream.abort()


def test_closing_meets_a_thread_that_appends(engine: str, directory: pathlib.Path) -> None:
    """Either the file has all appended bytes, or the appending thread gets an exception."""
    for round_number in range(10):
        file = tensorferry.open(directory / "file", "w", engine=engine)
        stream = file.stream()
        told: list[BaseException] = []

        def append(stream: Any = stream, told: list[BaseException] = told) -> None:
            try:
                for _ in range(200):
                    stream.append(np.ones(1 << 20, np.uint8))
                stream.finish()
            except (tensorferry.StorageError, ValueError) as error:
                told.append(error)
                stream.abort()

        thread = threading.Thread(target=append)
        thread.start()
        threading.Event().wait(0.003 * round_number)
        file.close()
        thread.join()
        assert told or (directory / "file").stat().st_size == 200 << 20


def test_an_append_that_races_the_end_is_written_or_refused(directory: pathlib.Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            with tensorferry.open(directory / "file", "w") as file:
                stream = file.stream()
                appended = [0]

                def append(stream: Any = stream, appended: list[int] = appended) -> None:
                    with contextlib.suppress(ValueError):
                        while True:
                            stream.append(b"one")
                            appended[0] += 3

                thread = threading.Thread(target=append)
                thread.start()
                while not appended[0]:
                    pass
                stream.begin_finish(truncate=True)
                thread.join()
                assert stream.wait() == appended[0]
            assert (directory / "file").read_bytes() == b"one" * (appended[0] // 3)
    finally:
        sys.setswitchinterval(interval)


def test_memory_that_goes_back_to_torch_is_told(directory: pathlib.Path) -> None:
    file = tensorferry.open(directory / "file", "w")
    stream = file.stream()
    tensor = torch.ones(100, dtype=torch.uint8)
    stream.append(tensor)  # a few bytes wait for more
    tensor.resize_(1 << 20)
    with pytest.raises(tensorferry.StorageError, match="was released to torch"):
        stream.finish()
    file.close()


def test_a_forked_child_cannot_use_its_parents_stream(engine: str, directory: pathlib.Path) -> None:
    file = tensorferry.open(directory / "file", "w", engine=engine)
    stream = file.stream()
    stream.append(np.ones(6 << 20, np.uint8))

    def in_the_child() -> None:
        for use in (
            lambda: stream.append(b"more"),
            lambda: stream.append_with_fields(b"more"),
            stream.wait_until_copied,
            stream.finish,
        ):
            with pytest.raises(RuntimeError, match="before fork"):
                use()

    passes_in_child(in_the_child)
    stream.append(np.ones(6 << 20, np.uint8))
    assert stream.finish() == 12 << 20
    file.close()


def test_waiting_for_an_end_that_was_not_begun_is_an_error(directory: pathlib.Path) -> None:
    with tensorferry.open(directory / "file", "w") as file, file.stream() as stream:
        with pytest.raises(ValueError, match="has not been called"):
            stream.wait()
        stream.append(b"fine")
        assert stream.finish() == 4


def test_leaving_the_block_waits_for_an_end_that_was_begun(directory: pathlib.Path) -> None:
    path = directory / "file"
    for _ in range(5):
        path.unlink(missing_ok=True)
        with tensorferry.open(path, "w") as file, file.stream() as stream:
            stream.append(np.ones(12 << 20, np.uint8))
            stream.begin_finish(sync=True)
        assert path.stat().st_size == 12 << 20


def test_an_end_that_was_begun_and_failed_is_raised(faultfs: FaultFS) -> None:
    with tensorferry.open(faultfs.path / "file", "w") as file:
        faultfs.order(Fault("write", error=errno.EIO))
        with storage_error(errno.EIO, faultfs.path / "file"), file.stream() as stream:
            stream.append(np.ones(12 << 20, np.uint8))
            stream.begin_finish()


def test_an_end_that_nobody_waits_for_is_warned_of(directory: pathlib.Path) -> None:
    with tensorferry.open(directory / "file", "w") as file:
        stream = file.stream()
        stream.append(b"some")
        stream.begin_finish()
        with pytest.warns(ResourceWarning, match="never finished"):
            del stream


def test_a_stream_that_was_given_up_has_no_end(directory: pathlib.Path) -> None:
    with tensorferry.open(directory / "file", "w") as file:
        stream = file.stream()
        stream.append(np.ones(12 << 20, np.uint8), kept=True)
        stream.begin_finish()
        stream.abort()
        for _ in range(2):
            with pytest.raises(ValueError, match="was aborted"):
                stream.wait()


def test_an_end_that_is_interrupted_gives_the_stream_up(faultfs: FaultFS) -> None:
    array = np.ones(16 << 20, np.uint8)
    gone = weakref.ref(array)
    with tensorferry.open(faultfs.path / "file", "w") as file:
        faultfs.order(Fault("write", hold=True))
        stream = file.stream()
        stream.append(array)
        del array
        with interrupted_in(Stream.wait, faultfs), stream:
            pass
        assert gone() is None
        with pytest.raises(ValueError, match="has ended"):
            stream.append(b"more")


@pytest.mark.parametrize("bad", [5, "text", {"a": 1}, [b"fine", 5], [[b"nested"]]])
def test_what_is_no_array_is_refused(directory: pathlib.Path, bad: Any) -> None:
    with tensorferry.open(directory / "file", "w") as file, file.stream() as stream:
        with pytest.raises(TypeError, match="array"):
            stream.append(bad)
        stream.append(b"good")
        stream.finish()
    assert (directory / "file").read_bytes() == b"good"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"offset": -1}, "offset"),
        ({"nbytes_reserved": -1}, "nbytes_reserved"),
        ({"priority": "high"}, "priority"),
        ({"checksums": tensorferry.Checksums(4096, expected=[])}, "expected"),
    ],
)
def test_arguments_are_looked_at(
    directory: pathlib.Path, arguments: dict[str, Any], match: str
) -> None:
    with tensorferry.open(directory / "file", "w") as file:
        with pytest.raises(ValueError, match=match):
            file.stream(**({"nbytes_reserved": 1 << 20} | arguments))
        assert file.size == 0
    with tensorferry.open(directory / "file") as file, pytest.raises(ValueError, match="writing"):
        file.stream()


# Given up, while something hangs


@pytest.mark.parametrize("way", ["abort", "drop", "collect"])
def test_a_stream_is_given_up_though_every_thread_for_streams_is_held(
    run: Run, directory: pathlib.Path, way: str
) -> None:
    run(meetings.stream_given_up_beside_held_ones, directory=directory, way=way)


@pytest.mark.usefixtures("default_engine")
def test_memory_that_hangs_is_kept_where_its_stream_is_left_by_ctrl_c_and_dropped(
    faultfs: FaultFS, directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (faultfs.backing / "cached").write_bytes(b"x" * BUFFER_NBYTES)
    array: Any = np.memmap(faultfs.path / "cached", np.uint8, "r")
    kept = weakref.ref(array)
    with tensorferry.open(directory / "file", "w") as file:
        stream = file.stream()
        faultfs.order(Fault("read", hold=True))
        stream.append(array, kept=True)
        faultfs.await_held()  # otherwise abort() may run before the copy begins, and not wait for it
        with interrupted(faultfs):
            stream.abort()
        monkeypatch.setattr(runtime, "CLOSE_PATIENCE_SECONDS", 0.2)
        with pytest.warns(RuntimeWarning, match="abandoned"):
            stream.abort()
        del array, stream
        gc.collect()
        assert faultfs.held() > 0
        assert kept() is not None
        faultfs.clear()

        def given_back() -> bool:
            file._scheduler.reap()
            gc.collect()
            return kept() is None

        assert settled(given_back)


@pytest.mark.usefixtures("default_engine")
def test_a_stream_whose_writes_hang_is_given_up_with_a_warning(
    faultfs: FaultFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tensorferry.open(faultfs.path / "file", "w") as file:
        stream = file.stream()
        faultfs.order(Fault("write", hold=True))
        stream.append(np.ones(BUFFER_NBYTES, np.uint8))
        faultfs.await_held()
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "CLOSE_PATIENCE_SECONDS", 0.2)
            with pytest.warns(RuntimeWarning, match="abandoned"):
                stream.abort()
        faultfs.clear()
