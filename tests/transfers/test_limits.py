"""Limits of the system reached: descriptors, locked memory, Linux AIO contexts."""

from __future__ import annotations

import errno
import pathlib
import re
import resource
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.store import TensorStore
from tests.support import child, mounts, required
from tests.support.expect import assert_equal, assert_works
from tests.support.faultfs import Fault, FaultFS
from tests.support.leaks import settled, threads_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes

PROGRAMS = "tests.transfers.programs"

# The limit that an engine reaches with very many handles.
LIMIT_OF = {"io_uring": "RLIMIT_MEMLOCK", "libaio": "aio-max-nr"}


@pytest.mark.covers("fd_exhaustion", "fd_leak_per_async")
def test_more_files_than_descriptors_are_written_and_read(
    engine: str, directory: pathlib.Path
) -> None:
    program = f"{PROGRAMS}:few_descriptors"
    child.call(program, engine=engine, directory=directory, limit=64, count=500)


@pytest.mark.covers("fd_exhaustion")
def test_a_file_with_two_names_is_written_whole_or_not_at_all_when_descriptors_are_short(
    engine: str, directory: pathlib.Path
) -> None:
    program = f"{PROGRAMS}:two_names_and_few_descriptors"
    arguments = {"directory": directory, "most": 6}
    whole = child.call(program, engine=engine, **arguments).result
    assert not whole[0]
    assert whole[-1]


@pytest.mark.covers("fd_exhaustion")
def test_half_of_the_descriptors_is_left_to_others(
    engine: str, faultfs: FaultFS, directory: pathlib.Path
) -> None:
    counted = directory / "counted"
    arguments = {"directory": faultfs.path, "counted": counted, "limit": 200, "count": 150}
    faultfs.order(Fault("write", hold=True))
    with faultfs.released_by(counted):
        most = child.call(f"{PROGRAMS}:files_while_none_ends", engine=engine, **arguments).result
    assert 64 < most <= 200 // 2 + 1


@pytest.mark.covers("fd_exhaustion")
def test_descriptors_that_come_back_while_a_file_cannot_be_opened_are_taken(
    engine: str, directory: pathlib.Path
) -> None:
    program = f"{PROGRAMS}:descriptors_given_back_meanwhile"
    tries = child.call(program, engine=engine, directory=directory).result
    assert tries == [1, 0]


@pytest.mark.covers("fd_exhaustion")
def test_files_that_are_open_already_wait_for_nobodys_descriptors(
    engine: str, faultfs: FaultFS, directory: pathlib.Path
) -> None:
    held = faultfs.path / "held"
    np.zeros(4 << 20, np.uint8).tofile(faultfs.backing / "held")
    faultfs.order(Fault("read", hold=True))
    program = f"{PROGRAMS}:files_already_open"
    with faultfs.released_by(directory / "over"):
        ended = child.call(program, timeout_s=60, engine=engine, directory=directory, held=held)
    assert ended.result == 50


@pytest.mark.covers("fd_exhaustion")
@pytest.mark.parametrize("by_path", [False, True], ids=["an open file", "by path"])
def test_descriptors_that_the_application_has_are_not_waited_for(
    engine: str, faultfs: FaultFS, directory: pathlib.Path, by_path: bool
) -> None:
    held = faultfs.path / "held"
    np.zeros(4 << 20, np.uint8).tofile(faultfs.backing / "held")
    faultfs.order(Fault("read", hold=True))
    program = f"{PROGRAMS}:descriptors_used_up_by_others"
    arguments = {"engine": engine, "directory": directory, "held": held, "by_path": by_path}
    with faultfs.released_by(directory / "over"):
        assert child.call(program, timeout_s=120, **arguments).result == errno.EMFILE


@pytest.mark.covers("fd_exhaustion")
def test_a_stream_waits_for_descriptors(engine: str, directory: pathlib.Path) -> None:
    program = f"{PROGRAMS}:stream_at_the_limit"
    assert child.call(program, engine=engine, directory=directory).result == 5


@pytest.mark.covers("fd_exhaustion")
def test_no_descriptor_left_raises_emfile_and_leaks_none(
    engine: str, directory: pathlib.Path
) -> None:
    ended = child.call(f"{PROGRAMS}:no_descriptors", engine=engine, directory=directory)
    path = str(directory / "file")
    assert ended.result["errors"] == [[errno.EMFILE, path]] * 400
    assert ended.result["grown"] == 0
    refusals = ended.result["refusals"]
    assert len(refusals) >= 20, "at least the file's"  # an engine without descriptors needs none
    assert all("Too many open files" in refusal for refusal in refusals)


def test_a_drive_that_hangs_takes_a_bounded_number_of_threads(
    make_handle: MakeHandle, faultfs: FaultFS
) -> None:
    def threads() -> set[pathlib.Path]:
        return threads_named("tensorferry.*")

    path, nbytes = faultfs.path / "file", 64 << 10
    path.write_bytes(bytes(100 * nbytes))
    faultfs.order(Fault("read", hold=True))
    handle, before = make_handle(queue_depth=128), threads()  # some of them may be ending
    for index in range(100):
        handle.async_pread(bytearray(nbytes), path, index * nbytes)
    faultfs.await_held(8)
    least = 0 if handle.engine == "io_uring" else 8  # the kernel keeps its reads, without a thread
    assert settled(lambda: len(threads() - before) >= least)
    most = 32 + 8 + 8  # the threads of an engine, and the helpers for calls that may block
    assert not settled(lambda: len(threads() - before) > most, 3.0)
    faultfs.release()
    assert handle.wait() == 100


@pytest.mark.alone  # limits count for all of a user's processes
@pytest.mark.covers("nonroot_unpinned_16MB", "nonroot_locked_16MB")
@pytest.mark.parametrize("limit", [64 << 10, 8 << 20])
def test_an_ordinary_user_with_little_lockable_memory_writes_and_reads(
    engine: str, open_directory: pathlib.Path, limit: int
) -> None:
    pytest.importorskip("torch")
    program = f"{PROGRAMS}:little_lockable_memory"
    ended = child.call(
        program, imports=["torch"], engine=engine, directory=open_directory, limit=limit
    )
    if "skip" in ended.result:
        pytest.skip(ended.result["skip"])
    if ended.result["refusal"]:  # from some kernel on, rings count as locked memory
        assert engine == "io_uring"
        assert limit < 1 << 20
        assert "RLIMIT_MEMLOCK" in ended.result["refusal"]
    else:
        assert ended.result["engine"] == engine
    for automatic, refusals in ended.result["automatic"]:
        if automatic != "io_uring" and not tensorferry.engines()["io_uring"]:
            assert "RLIMIT_MEMLOCK" in refusals["io_uring"]
    assert ended.result["uid"] == 65534
    assert len(ended.result["warnings"]) == 1, ended.result["warnings"]
    assert "lock" in ended.result["warnings"][0]


@pytest.mark.alone  # Linux AIO's contexts are the whole machine's
@pytest.mark.covers("many_handles_aio_max_nr", "default_handles_until_aio_max")
@pytest.mark.parametrize(
    "engine", ["libaio"], indirect=True
)  # the test itself checks the other engines
def test_when_linux_aio_has_no_context_left_libaio_is_refused_and_auto_goes_on(
    engine: str, directory: pathlib.Path
) -> None:
    required.module("pyseccomp")
    ended = child.call(f"{PROGRAMS}:exhaust_aio_contexts", directory=directory)
    assert "aio-max-nr" in ended.result["refusal"]
    assert ended.result["handles"] >= 1
    assert ended.result["engine"] == "threads"
    assert set(ended.result["refusals"]) == {"io_uring", "libaio"}
    assert "aio-max-nr" in ended.result["refusals"]["libaio"]
    assert "seccomp" in ended.result["refusals"]["io_uring"]


@pytest.mark.alone  # Linux AIO's contexts are the whole machine's
@pytest.mark.covers("many_handles_aio_max_nr", "default_handles_until_aio_max")
@pytest.mark.parametrize(("count", "options"), [(400, {"queue_depth": 512}), (200, {})])
def test_hundreds_of_handles_exist_where_an_engine_is_refused_it_says_why_and_auto_goes_on(
    engine: str,
    make_handle: MakeHandle,
    directory: pathlib.Path,
    count: int,
    options: dict[str, int],
) -> None:
    handles = []
    for _ in range(count):
        try:
            handles.append(make_handle(**options))
        except tensorferry.EngineUnavailableError as error:
            if LIMIT_OF.get(engine, "none") not in str(error):
                raise
            handles.append(make_handle(engine=None, **options))
    assert_works(handles[0], directory)
    assert_works(handles[-1], directory)


def test_submitters_beyond_16384_outstanding_transfers_wait_and_all_is_done(
    faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    count, nbytes, limit = 4_200, 64, 16_384
    data = random_bytes(4 * count * nbytes)
    data.tofile(faultfs.backing / "cached")
    found = np.zeros_like(data)
    futures: list[tensorferry.Future] = []
    with tensorferry.open(faultfs.path / "cached") as file:
        faultfs.order(Fault("read", hold=True))

        def submit(begin: int) -> None:
            for at in range(begin, begin + count * nbytes, nbytes):
                futures.append(file.read_into(found[at : at + nbytes], at))

        threads = [
            threading.Thread(target=submit, args=(k * count * nbytes,), daemon=True)
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        reached = settled(lambda: file._scheduler.outstanding() == limit)
        exceeded = settled(lambda: file._scheduler.outstanding() > limit, 1.0)
        submitted = len(futures)
        faultfs.clear()
        for thread in threads:
            thread.join()
        for future in futures:
            future.result()
    assert reached
    assert not exceeded
    assert submitted <= limit < len(futures) == 4 * count
    assert_equal(found, data)


@pytest.mark.alone  # limits count for all of a user's processes
@pytest.mark.root
def test_an_ordinary_user_who_may_start_no_thread_is_told_and_works_when_he_may_again(
    engine: str, open_directory: pathlib.Path
) -> None:
    program = f"{PROGRAMS}:no_threads_allowed"
    found = child.call(program, engine=engine, directory=open_directory).result
    if "skip" in found:
        pytest.skip(found["skip"])
    assert len(found["refusals"]) == 4
    for refusal in found["refusals"]:
        assert "cannot start a thread" in refusal
        assert "ulimit -u is 1" in refusal
        assert "--pids-limit" in refusal


@pytest.mark.alone
@pytest.mark.root
@pytest.mark.parametrize("count", [1, 4])
def test_who_may_start_no_further_thread_moves_data_all_the_same(
    engine: str, open_directory: pathlib.Path, count: int
) -> None:
    """Threads of the engine, of the kernel's own for io_uring, and helpers are missing."""
    program = f"{PROGRAMS}:no_further_threads"
    arguments = {"engine": engine, "directory": open_directory, "count": count}
    found = child.call(program, timeout_s=300, **arguments).result
    if "skip" in found:
        pytest.skip(found["skip"])
    assert found["names"] == ["MainThread"]


def test_a_limit_of_address_space_is_named(engine: str, directory: pathlib.Path) -> None:
    found = child.call(
        f"{PROGRAMS}:little_address_space", engine=engine, directory=directory
    ).result
    assert len(found["said"]) == 2
    for said in found["said"]:
        assert f"(ulimit -v) is {found['limit']} bytes" in said
        for other in ("MEMLOCK", "ulimit -u", "seccomp", "kernel"):
            assert other not in said


@pytest.mark.root
def test_files_are_written_and_replaced_without_proc(engine: str, directory: pathlib.Path) -> None:
    found = child.call(f"{PROGRAMS}:without_proc", engine=engine, directory=directory).result
    if "skip" in found:
        required.missing("mounts", found["skip"])
    assert found["names"] == ["0", "1", "2", "absolute", "relative", "renamed"]
    assert found["refused"] == "" or "/proc is not mounted" in found["refused"]


def too_large(directory: str) -> list[list[Any]]:
    """Write beyond the limit of file sizes, in each way; return the errors' messages and facts about the files."""
    limit = 3_500_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    array = np.ones(9_000_000, np.uint8)

    def in_a_stream(path: pathlib.Path) -> None:
        with tensorferry.open(path, "w") as file, file.stream(nbytes_reserved=array.nbytes):
            pass

    def reserved(path: pathlib.Path) -> None:
        with tensorferry.open(path, "w") as file:
            file.preallocate(array.nbytes)

    ways = (
        lambda path: tensorferry.write(path, array),
        lambda path: tensorferry.write(path, array, direct=False),
        lambda path: tensorferry.write(path, array, atomic=True),
        lambda path: tensorferry.write_many([(path, array), (path, array[:5], 20_000_000)]),
        lambda path: tensorferry.open(path, "w").write_from(array).result(),
        lambda path: tensorferry.write(path, array[:100], offset=limit - 50),
        in_a_stream,
        reserved,
    )
    found = []
    for index, way in enumerate(ways):
        path = pathlib.Path(directory) / f"{index}"
        try:
            way(path)
        except tensorferry.StorageError as error:
            status = path.stat() if path.exists() else None
            blocks = 0 if status is None else status.st_blocks
            found.append([error.errno, error.transferred, blocks, str(error)])
    tensorferry.write(pathlib.Path(directory) / "fits", array[:100], offset=limit - 100)
    return found


def test_a_limit_of_file_sizes_is_seen_before_anything_is_written(directory: pathlib.Path) -> None:
    found = child.call(f"{__name__}:too_large", directory=directory).result
    assert len(found) == 8
    for number, transferred, blocks, said in found:
        assert (number, transferred, blocks) == (errno.EFBIG, 0, 0)
        assert "(reserve space at offset " in said
        assert "the file size limit (ulimit -f) is 3500000 bytes" in said
    assert (directory / "fits").stat().st_size == 3_500_000


def test_a_full_drive_is_told_with_numbers_and_the_same_words(small_ext4: pathlib.Path) -> None:
    """At the reservation of space by a file or a store, at the write of a block, and without free inodes."""
    free = mounts.free_nbytes(small_ext4)
    full = r"^\[Errno 28\] No space left on device \(%s at offset \d+: \d+ of %s bytes moved; (\d+) bytes are free\)"
    array = np.zeros(free + (4 << 20), np.uint8)

    def told(call: Callable[[], object], operation: str, nbytes: int | str) -> int:
        with pytest.raises(tensorferry.StorageError, match=full % (operation, nbytes)) as caught:
            call()
        return int(re.search(full % (operation, nbytes), str(caught.value)).group(1))  # type: ignore[union-attr]

    path = small_ext4 / "file"
    reserving = "reserve space"
    assert (
        told(lambda: tensorferry.write(path, array, direct=True), reserving, array.nbytes) >= free
    )
    with tensorferry.open(path, "w") as file:
        assert told(lambda: file.preallocate(array.nbytes), reserving, array.nbytes) >= free
    (small_ext4 / "store").mkdir()
    with TensorStore(small_ext4 / "store") as store:
        assert told(lambda: store.reserve(array.nbytes), reserving, r"\d+") <= 2 * free
    left = told(lambda: tensorferry.write(path, array, direct=False), "write", array.nbytes)
    assert left < 4 << 20


def test_a_drive_without_inodes_is_told_so(tmp_path: pathlib.Path) -> None:
    options = ["-t", "tmpfs", "-o", "size=1M,nr_inodes=4", "tmpfs"]
    with mounts.mounted(tmp_path / "mount", *options) as mount:

        def write() -> None:
            for index in range(4):
                tensorferry.write(mount / f"{index}", np.ones(10, np.uint8))

        with pytest.raises(tensorferry.StorageError, match="all 4 inodes of the file system"):
            write()
