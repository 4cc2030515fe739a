"""One file over several paths: the position of its bytes, and the error after a failure of one drive."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorferry
from tensorferry.transfer.striped import FileRequests
from tests.support import forks
from tests.support.data import aligned
from tests.support.effort import examples
from tests.support.expect import assert_equal, interrupted
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from tests.support.data import Bytes, RandomBytes
    from tests.support.faultfs import FaultFS

STRIPE = 8192

sizes = st.one_of(
    st.sampled_from([0, 1, 4095, 4096, STRIPE, STRIPE + 1, 3 * STRIPE, 40 * STRIPE]),
    st.integers(0, 30 * STRIPE),
)
pieces = st.lists(st.tuples(sizes, st.sampled_from([0, 1, 64])), max_size=5)


def paths_in(directory: pathlib.Path, count: int = 2) -> list[pathlib.Path]:
    return [directory / f"part{index}" for index in range(count)]


def _result_of(begin: Callable[..., tensorferry.Future]) -> Callable[..., Any]:
    return lambda *arguments: begin(*arguments).result()


def assembled(paths: list[pathlib.Path], stripe_nbytes: int) -> bytes:
    """The whole file by its documented layout, in plain Python."""
    parts = [path.read_bytes() for path in paths]
    stripes = max(-(-len(part) // stripe_nbytes) for part in parts)
    places = [(row, part) for row in range(stripes) for part in parts]
    return b"".join(part[row * stripe_nbytes : (row + 1) * stripe_nbytes] for row, part in places)


@settings(max_examples=examples(60))
@given(
    given_pieces=pieces,
    gaps=st.lists(st.booleans(), min_size=5, max_size=5),
    offset=sizes,
    before_nbytes=sizes,
    count=st.integers(1, 4),
    stripe_nbytes=st.sampled_from([4096, STRIPE, 3 * 4096, 1 << 20]),
    direct=st.sampled_from(["auto", True, False]),
    waits=st.booleans(),
    sync=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_segments_lie_where_the_layout_says_and_come_back(
    engine: str,
    directory: pathlib.Path,
    given_pieces: list[tuple[int, int]],
    gaps: list[bool],
    offset: int,
    before_nbytes: int,
    count: int,
    stripe_nbytes: int,
    direct: Any,
    waits: bool,
    sync: bool,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    sources = [aligned(nbytes, at) for nbytes, at in given_pieces]
    for source in sources:
        source[:] = generator.integers(0, 256, source.nbytes, np.uint8)
    data = b"".join(source.tobytes() for source in sources)
    before = generator.bytes(before_nbytes)
    wanted = before
    if data:
        wanted = before[:offset].ljust(offset, b"\0") + data + before[offset + len(data) :]
    paths = paths_in(directory, count)
    with tensorferry.open(
        paths, "w+", stripe_nbytes=stripe_nbytes, engine=engine, block_size=65536, direct=direct
    ) as file:
        file.write(before)
        assert file.size == len(before)
        if waits:
            assert file.write_from(sources, offset, sync=sync).result() is sources
        else:
            file.write(sources, offset, sync=sync)
        assert file.size == len(wanted)
        assert assembled(paths, stripe_nbytes) == wanted
        if offset + len(data) > len(wanted):
            return
        targets: list[Any] = [
            source.nbytes if gap else aligned(source.nbytes, 64)
            for source, gap in zip(sources, gaps, strict=False)
        ]
        targets.append(aligned(0))
        found = file.read_into(targets, offset).result() if waits else file.read(targets, offset)
        assert found is targets
    for source, target in zip(sources, targets, strict=False):
        if not isinstance(target, int):
            assert_equal(target, source)


def test_each_path_has_its_share_and_its_own_workers(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes.at(8 << 20, 0)
    paths = paths_in(directory, 4)
    with tensorferry.open(paths, "w+", engine=engine) as file:
        assert (file.paths, file.stripe_nbytes) == (tuple(map(str, paths)), 1 << 20)
        assert file.engine == engine
        file.write(data)
        file.read(data)
        counted = file.stats()
    assert [one["written_nbytes"] for one in counted["files"]] == [2 << 20] * 4
    assert [one["read_nbytes"] for one in counted["files"]] == [2 << 20] * 4
    assert counted["written_nbytes"] == 8 << 20
    for index, path in enumerate(paths):
        share = data.reshape(2, 4, 1 << 20)[:, index]
        assert_equal(np.fromfile(path, np.uint8), share.ravel())


def test_what_is_no_file_over_several_paths_is_refused_before_anything_is_touched(
    directory: pathlib.Path,
) -> None:
    first, second = paths_in(directory)
    first.write_bytes(b"kept")
    with pytest.raises(ValueError, match="at least"):
        tensorferry.open([], "w")
    with pytest.raises(ValueError, match="two paths name the same file"):
        tensorferry.open([first, directory / "." / first.name], "w")
    os.link(first, second)
    with pytest.raises(ValueError, match="two paths name the same file"):
        tensorferry.open([first, second], "w")
    second.unlink()
    for stripe_nbytes in (0, -4096, 4095, 5000, 1 << 31):
        with pytest.raises(ValueError, match="stripe_nbytes"):
            tensorferry.open([first, second], "w", stripe_nbytes=stripe_nbytes)
    with pytest.raises(TypeError, match="stripe_nbytes"):
        tensorferry.open([first, second], "w", stripe_nbytes=True)
    with pytest.raises(TypeError, match=r"path\[1\]: expected a path, got int"):
        tensorferry.open([first, 5], "w")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a list"):
        tensorferry.open(first, "w", stripe_nbytes=4096)  # type: ignore[call-overload]
    with pytest.raises(tensorferry.StorageError, match="missing"):
        tensorferry.open([first, directory / "missing" / "part"], "w")
    assert first.read_bytes() == b"kept"
    assert not second.exists()


def test_exclusive_creation_leaves_nothing_where_one_exists(directory: pathlib.Path) -> None:
    paths = paths_in(directory, 3)
    paths[2].write_bytes(b"kept")
    with pytest.raises(tensorferry.StorageError) as raised:
        tensorferry.open(paths, "x")
    assert (raised.value.errno, raised.value.filename) == (errno.EEXIST, str(paths[2]))
    assert [path.name for path in directory.iterdir()] == ["part2"]
    assert paths[2].read_bytes() == b"kept"
    paths[2].unlink()
    tensorferry.open(paths, "x+").close()
    with pytest.raises(tensorferry.StorageError):
        tensorferry.open([*paths[:2], directory / "other"], "r")


def test_checksums_are_refused_with_a_remedy(directory: pathlib.Path) -> None:
    sums = tensorferry.Checksums(4096)
    with (
        tensorferry.open(paths_in(directory), "w+") as file,
        pytest.raises(ValueError, match="remedy"),
    ):
        file.write(b"1", checksums=sums)


def test_reading_past_the_end_says_where_the_whole_ends(
    engine: str, directory: pathlib.Path
) -> None:
    paths = paths_in(directory, 3)
    with tensorferry.open(paths, "w+", stripe_nbytes=STRIPE, engine=engine) as file:
        file.write(bytes(4 * STRIPE + 5))
        for offset, nbytes in ((0, 10 * STRIPE), (4 * STRIPE, 6), (7 * STRIPE, 1)):
            target = np.full(nbytes, 7, np.uint8)
            for read in (file.read, _result_of(file.read_into)):
                with pytest.raises(tensorferry.ShortReadError) as raised:
                    read(target, offset)
                error = raised.value
                assert error.offset == max(4 * STRIPE + 5, offset)
                assert (error.expected, error.transferred, error.errno) == (nbytes, 0, None)
                assert error.filename == str(paths[error.offset // STRIPE % 3])
            assert (target == 7).all()


def test_a_part_that_is_short_is_named_and_can_be_cut_to_fit(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(10 * STRIPE)
    paths = paths_in(directory)
    with tensorferry.open(paths, "w+", stripe_nbytes=STRIPE) as file:
        file.write(data)
        os.truncate(paths[1], 2 * STRIPE + 100)
        with pytest.raises(tensorferry.StorageError, match="at least 32768") as raised:
            assert file.size
        assert raised.value.filename == str(paths[1])
        assert raised.value.offset == 5 * STRIPE + 100
        with pytest.raises(tensorferry.ShortReadError) as short:
            file.read(bytearray(data.nbytes))
        assert (short.value.filename, short.value.offset) == (str(paths[1]), 5 * STRIPE + 100)
        before = bytearray(5 * STRIPE)
        file.read(before)  # the existing bytes are readable
        assert before == data[: 5 * STRIPE].tobytes()
        file.truncate(5 * STRIPE + 100)
        assert file.size == 5 * STRIPE + 100
    assert assembled(paths, STRIPE) == data[: 5 * STRIPE + 100].tobytes()


def test_parts_in_another_order_are_noticed_where_they_cannot_be_right(
    directory: pathlib.Path,
) -> None:
    paths = paths_in(directory)
    with tensorferry.open(paths, "w", stripe_nbytes=STRIPE) as file:
        file.write(bytes(3 * STRIPE))
    with (
        tensorferry.open(paths[::-1], stripe_nbytes=STRIPE) as file,
        pytest.raises(tensorferry.StorageError, match="another order"),
    ):
        assert file.size


def test_a_full_drive_refuses_before_any_part_has_grown(
    engine: str,
    directory: pathlib.Path,
    small_ext4: pathlib.Path,
    random_bytes: RandomBytes,
) -> None:
    paths = [directory / "large", small_ext4 / "small"]
    old = random_bytes(100_000)
    data = np.zeros(80 << 20, np.uint8)
    with tensorferry.open(paths, "w+", engine=engine) as file:
        file.write(old)

        def extend() -> list[Any]:
            return [
                lambda: file.write(data, 100_000),
                lambda: file.write_from(data, 100_000),
                lambda: file.preallocate(data.nbytes),
            ]

        for call in extend():
            with pytest.raises(tensorferry.StorageError) as raised:
                call()
            error = raised.value
            assert (error.errno, error.filename) == (errno.ENOSPC, str(paths[1]))
            assert (error.expected, error.transferred) == (data.nbytes, 0)
            assert f"offset {error.offset}" in str(error)
            assert file.size == old.nbytes
        found = np.zeros_like(old)
        file.read(found)
        assert_equal(found, old)


def test_preallocate_and_truncate_are_of_the_whole(directory: pathlib.Path) -> None:
    paths = paths_in(directory, 3)
    with tensorferry.open(paths, "w+", stripe_nbytes=STRIPE) as file:
        file.preallocate(4 * STRIPE + 7)
        assert file.size == 4 * STRIPE + 7
        file.preallocate(1, 9 * STRIPE)  # beyond the end, in one of the files
        assert file.size == 9 * STRIPE + 1
        file.preallocate(1)
        assert file.size == 9 * STRIPE + 1
        file.truncate(2 * STRIPE)
        assert [path.stat().st_size for path in paths] == [STRIPE, STRIPE, 0]
        file.truncate(1 << 40)
        assert file.size == 1 << 40
        target = bytearray(b"old")
        file.read([1 << 39, target, (1 << 39) - 1000])  # gaps of any length are skipped
        assert target == bytes(3)


def test_a_write_beyond_the_end_needs_a_file_system_that_reserves(ramfs: pathlib.Path) -> None:
    paths = paths_in(ramfs)
    with tensorferry.open(paths, "w+", stripe_nbytes=STRIPE) as file:
        with pytest.raises(tensorferry.StorageError, match="remedy: first truncate") as raised:
            file.write(b"data", STRIPE)
        assert raised.value.errno == errno.EOPNOTSUPP
        assert file.size == 0
        file.truncate(STRIPE)
        file.write(b"data", STRIPE)
        assert file.size == STRIPE + 4


def test_a_fault_of_one_drive_is_told_with_the_offset_in_the_whole(
    engine: str, directory: pathlib.Path, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    paths = [directory / "sound", faultfs.path / "failing"]
    data = random_bytes(16 << 20)
    for operation in ("write", "read"):
        with tensorferry.open(paths, "w+", engine=engine) as file:
            file.write(data)
            faultfs.order(Fault(operation, start=3 << 20, end=4 << 20, error=errno.EIO))
            for blocking in (True, False):
                begin = file.write_from if operation == "write" else file.read_into
                call = getattr(file, operation) if blocking else _result_of(begin)
                with pytest.raises(tensorferry.StorageError) as raised:
                    call(data)
                error = raised.value
                assert (error.errno, error.filename) == (errno.EIO, str(paths[1]))
                assert error.offset == 7 << 20  # stripe 7 is the second file's fourth
                assert error.expected == data.nbytes
                assert 8 << 20 <= error.transferred < data.nbytes
            faultfs.clear()


def test_the_first_of_two_faults_knows_the_other(
    faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    paths = paths_in(faultfs.path)
    with tensorferry.open(paths, "w") as file:
        faultfs.order(
            Fault("write", start=2 << 20, error=errno.EIO, name="part0"),
            Fault("write", start=1 << 20, error=errno.ENOSPC, name="part1"),
        )
        with pytest.raises(tensorferry.StorageError, match="1 more of its files") as raised:
            file.write(random_bytes(8 << 20))
        faultfs.clear()
    error = raised.value
    assert (error.errno, error.offset) == (errno.ENOSPC, 3 << 20)
    assert [(other.errno, other.offset) for other in error.others] == [(errno.EIO, 4 << 20)]


def test_a_future_of_several_parts_is_awaited_called_back_and_cancelled(
    engine: str, directory: pathlib.Path, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(12 << 20)
    for names in ([directory, faultfs.path], [faultfs.path, directory]):
        paths = [folder / "part" for folder in names]
        with tensorferry.open(paths, "w+", engine=engine, queue_depth=2) as file:
            faultfs.order(Fault("write", hold=True))
            future = file.write_from(data)
            called = threading.Event()
            future.add_done_callback(lambda _, called=called: called.set())
            faultfs.await_held()
            assert not future.done()
            assert not called.wait(0.2)
            with pytest.raises(TimeoutError):
                future.result(0.01)
            faultfs.clear()
            assert future.result() is data
            assert called.wait(120)

            async def main() -> None:
                target = np.zeros_like(data)
                assert await file.read_into(target) is target
                assert_equal(target, data)

            asyncio.run(main())
            faultfs.order(Fault("write", hold=True))
            future = file.write_from(data)
            faultfs.await_held()
            assert future.cancel()
            assert not future.done()  # the write in flight still uses the memory
            faultfs.clear()
            with pytest.raises(concurrent.futures.CancelledError):
                future.result(120)
            assert future.cancelled()


def test_closing_waits_for_all_parts_and_closes_all(
    engine: str, directory: pathlib.Path, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(8 << 20)
    paths = [directory / "part", faultfs.path / "part"]
    file = tensorferry.open(paths, "w+", engine=engine)
    faultfs.order(Fault("write", hold=True))
    future = file.write_from(data)
    faultfs.await_held()
    closing = threading.Thread(target=file.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    faultfs.clear()
    closing.join(120)
    assert file.closed
    assert future.result(0) is data
    for call in (
        lambda: file.read(data),
        lambda: file.write_from(data),
        lambda: file.size,
        file.sync,
        file.__enter__,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    file.close()
    faultfs.order(Fault("flush", error=errno.EIO))
    file = tensorferry.open(paths[::-1], "r+", engine=engine)
    with pytest.raises(tensorferry.StorageError):
        file.close()
    assert file.closed
    faultfs.clear()


def test_a_write_that_meets_a_close_is_whole_or_refused(
    engine: str,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = random_bytes(1 << 20)
    submit = FileRequests.submit

    def slowly(self: FileRequests, *arguments: Any, **options: Any) -> Any:
        submitted = submit(self, *arguments, **options)
        time.sleep(0.002)  # in which the file is closed
        return submitted

    monkeypatch.setattr(FileRequests, "submit", slowly)
    for number in range(20):
        paths = [directory / f"{number}.{index}" for index in range(3)]
        file = tensorferry.open(paths, "w", stripe_nbytes=65536, engine=engine)
        done: list[int] = []

        def write(
            file: tensorferry.StripedFile = file, done: list[int] = done, data: Bytes = data
        ) -> None:
            try:
                while True:
                    file.write(data, len(done) * data.nbytes)
                    done.append(1)
            except ValueError as error:
                assert "closed" in str(error)  # noqa: PT017

        writer = threading.Thread(target=write)
        writer.start()
        while len(done) < 2:
            pass
        time.sleep(
            0.001 * (number % 8)
        )  # a write takes about as long: it is met at all of its steps
        file.close()
        writer.join()
        assert sum(path.stat().st_size for path in paths) == len(done) * data.nbytes
        assert assembled(paths, 65536) == data.tobytes() * len(done)


def test_a_forked_child_cannot_use_it_and_its_parent_can(
    engine: str, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(4 << 20)
    with tensorferry.open(paths_in(directory), "w+", engine=engine) as file:
        file.write(data)

        def use() -> None:
            for call in (file.read, file.read_into, file.write, file.write_from):
                with pytest.raises(RuntimeError, match="fork"):
                    call(data)
            file.close()
            with tensorferry.open(file.paths, engine=engine) as own:
                assert_equal(own.read(np.zeros_like(data)), data)

        forks.passes_in_child(use)
        assert_equal(file.read(np.zeros_like(data)), data)


def test_ctrl_c_leaves_what_is_in_flight_its_memory_and_the_file_usable(
    engine: str, directory: pathlib.Path, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(8 << 20)
    with tensorferry.open([directory / "a", faultfs.path / "b"], "w+", engine=engine) as file:
        file.write(data)
        faultfs.order(Fault("read", hold=True))
        with interrupted(faultfs):
            file.read(np.zeros_like(data))
        gc.collect()
        others = [np.full(data.nbytes, 9, np.uint8) for _ in range(3)]
        faultfs.clear()
        assert_equal(file.read(np.zeros_like(data)), data)
        faultfs.order(Fault("write", hold=True))
        file.write_from(data)
        with interrupted(faultfs):
            file.close()
        faultfs.clear()
    assert file.closed
    assert all((other == 9).all() for other in others)


def test_memory_that_went_back_is_told(directory: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    with tensorferry.open(paths_in(directory), "w", stripe_nbytes=4096) as file:
        for given_array in (lambda one: one, lambda one: [one]):
            # A small tensor: free() keeps its pages, while a read of unmapped pages would crash.
            tensor = torch.zeros(64 << 10, dtype=torch.uint8)
            future = file.write_from(given_array(tensor))
            tensor.resize_(64 << 20)
            with pytest.raises(tensorferry.StorageError, match="memory was released"):
                future.result()
