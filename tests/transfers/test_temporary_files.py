"""The temporary files of atomic replacement: those of killed writers are removed, and nothing else."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import stat
import time
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tensorferry.transfer import publication, replacement
from tests.support import child, mounts
from tests.support.expect import storage_error
from tests.support.faultfs import Fault, FaultFS
from tests.support.interrupts import At

if TYPE_CHECKING:
    from collections.abc import Callable

OLD, NEW = b"old" * 30_000, b"new" * 40_000
SOURCES = (replacement.__file__, publication.__file__)


def replace_by_stream(path: pathlib.Path) -> None:
    with replacement.Replacement(path, sync=True) as new:
        new.file.write(NEW)


def replace_small(path: pathlib.Path) -> None:
    with publication.Temporary(path.parent) as new:
        new.write(NEW[:50_000], NEW[50_000:], sync=False)
        new.rename(path.name)


WAYS: dict[str, Callable[[pathlib.Path], None]] = {
    "write": lambda path: tensorferry.write(path, NEW, atomic=True),
    "stream": replace_by_stream,
    "small": replace_small,
}


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_fork(action: Callable[[], object]) -> int:
    """Call a function in a forked child, and return how that ended."""
    process = os.fork()
    if process == 0:
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def left_in(folder: pathlib.Path) -> set[pathlib.Path]:
    """Return the temporary files in a folder."""
    return {path for path in folder.iterdir() if publication.TEMPORARY_NAME.fullmatch(path.name)}


def abandon(folder: pathlib.Path) -> pathlib.Path:
    """Let a process be killed while it replaces a file in the folder; return what it leaves."""

    def write() -> None:
        new = replacement.Replacement(folder / "new", sync=False)
        new.file.write(NEW)
        kill_this_process()

    before = left_in(folder)
    assert in_fork(write) == -signal.SIGKILL
    [left] = left_in(folder) - before
    return left


def kill_at_each_moment(folder: str, way: str) -> list[int]:
    """Kill a replacement at each of its moments; return their number, and after how many of them a file was left."""
    path, lefts, moment, code = pathlib.Path(folder, "file"), 0, 0, -signal.SIGKILL

    def write() -> None:
        with At(moment, SOURCES, kill_this_process):
            WAYS[way](path)

    while code == -signal.SIGKILL:
        moment += 1
        path.write_bytes(OLD)
        code = in_fork(write)
        assert path.read_bytes() in ((OLD, NEW) if code else (NEW,))
        left = left_in(path.parent)
        assert len(left) <= 1, moment
        lefts += len(left)
        replace_small(path.with_name("other"))
        assert sorted(os.listdir(folder)) == ["file", "other"], moment  # noqa: PTH208
    assert code == 0
    return [moment, lefts]


@pytest.mark.parametrize("way", WAYS)
def test_the_next_replacement_removes_what_a_killed_one_left(
    directory: pathlib.Path, way: str
) -> None:
    program = f"{__name__}:kill_at_each_moment"
    moments, lefts = child.call(program, folder=directory, way=way).result
    assert moments > 20
    assert 5 < lefts < moments


def replace_beside(folder: str) -> list[str]:
    tensorferry.write_many([(f"{folder}/{index}", b"x") for index in range(40)], atomic=True)
    return sorted(path.name for path in left_in(pathlib.Path(folder)))


def test_a_running_writer_keeps_its_file(directory: pathlib.Path) -> None:
    with replacement.Replacement(directory / "new", sync=False) as new:
        new.file.write(NEW)
        new.finish()
        replace_beside(str(directory))
        left = child.call(f"{__name__}:replace_beside", folder=directory).result
        assert left == [path.name for path in left_in(directory)]
        assert len(left) == 1
    assert (directory / "new").read_bytes() == NEW
    assert not left_in(directory)


def leave_a_forked_child(folder: str) -> None:
    """Kill a writer that has forked a child, and replace a file while this child is still running."""
    ends, holds = os.pipe(), os.pipe()

    def write() -> None:
        new = replacement.Replacement(pathlib.Path(folder, "new"), sync=False)
        new.file.write(NEW)
        if os.fork() == 0:
            os.close(holds[1])
            os.write(ends[1], b"running")
            os.read(holds[0], 1)
            os._exit(0)
        os.read(ends[0], 7)
        kill_this_process()

    assert in_fork(write) == -signal.SIGKILL
    assert len(left_in(pathlib.Path(folder))) == 1
    assert replace_beside(folder) == []
    os.close(holds[1])


def test_a_forked_child_of_a_killed_writer_keeps_nothing(directory: pathlib.Path) -> None:
    child.call(f"{__name__}:leave_a_forked_child", folder=directory)


def test_a_forked_child_does_not_remove_the_file_of_its_parent(directory: pathlib.Path) -> None:
    with replacement.Replacement(directory / "new", sync=False) as new:
        assert in_fork(new.abort) == 0
        new.file.write(NEW)
    assert (directory / "new").read_bytes() == NEW


def test_names_like_ours_stay_and_what_a_name_of_ours_leads_to(directory: pathlib.Path) -> None:
    name = f".tensorferry-new-{'0' * 16}.tmp"
    target = directory / "target"
    target.write_bytes(OLD)
    others = [directory / other for other in (name[1:], f"{name}x", name.replace("0", "G", 1))]
    for other in others:
        other.write_bytes(OLD)
    special = [directory / name.replace("0", str(digit), 1) for digit in range(1, 5)]
    special[0].symlink_to(target)
    os.mkfifo(special[1])
    special[2].mkdir()
    os.link(target, special[3])  # only the name is removed, not the file's bytes
    tensorferry.write(directory / "file", b"x", atomic=True)
    assert {*directory.iterdir()} == {*others, *special[:3], target, directory / "file"}
    assert target.read_bytes() == OLD


def test_a_large_directory_is_listed_for_some_of_the_new_files(directory: pathlib.Path) -> None:
    for index in range(2500):
        (directory / str(index)).touch()
    tensorferry.write(directory / "file", b"x", atomic=True)
    left = abandon(directory)
    found = []
    for _ in range(3):
        tensorferry.write(directory / "file", b"x", atomic=True)
        found.append(left.exists())
    assert found == [True, True, False]


def test_where_locks_may_be_invisible_a_file_stays_for_a_day(faultfs: FaultFS) -> None:
    folder = faultfs.path
    lefts = [abandon(folder), abandon(folder)]
    with replacement.Replacement(folder / "new", sync=False) as new:
        new.file.write(NEW)
        lefts += left_in(folder) - {*lefts}
        for left in lefts[1:]:  # the last one still has a writer
            os.utime(left, (time.time() - 100_000,) * 2)
        tensorferry.write(folder / "file", b"x", atomic=True)
        assert left_in(folder) == {lefts[0], lefts[2]}
    assert (folder / "new").read_bytes() == NEW


def replace_as_another_user(folder: str) -> list[str]:
    os.seteuid(65534)
    return replace_beside(folder)


def test_another_users_file_in_a_sticky_directory_stays(open_directory: pathlib.Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    open_directory.chmod(0o777 | stat.S_ISVTX)
    left = abandon(open_directory)
    program = f"{__name__}:replace_as_another_user"
    assert child.call(program, folder=open_directory).result == [left.name]
    assert (open_directory / "39").stat().st_uid == 65534
    assert replace_beside(str(open_directory / ".")) == []


@pytest.mark.parametrize("kind", ["write", "fsync"])
@pytest.mark.parametrize("has_old", [False, True])
def test_the_error_of_a_replacement_is_not_that_of_closing_what_is_discarded(
    faultfs: FaultFS, kind: str, has_old: bool
) -> None:
    path = faultfs.path / "file"
    tensorferry.write(path, b"old", atomic=True)  # renames are tested there once
    tensorferry.write(path, b"old", atomic=True)
    if not has_old:
        path.unlink()
    faultfs.order(Fault(kind, error=errno.EIO), Fault("flush", error=errno.EINVAL))
    with storage_error(errno.EIO, path):
        tensorferry.write(path, b"new", atomic=True, sync=True)
    faultfs.clear()
    assert [entry.name for entry in faultfs.path.iterdir()] == ["file"] * has_old
    tensorferry.write(path, b"newer", atomic=True)
    assert path.read_bytes() == b"newer"


@pytest.mark.usefixtures("faultfs")  # skips the test where there is no FUSE
@pytest.mark.parametrize("way", WAYS)
def test_a_mount_is_not_taken_for_an_earlier_one_with_its_device_number(
    tmp_path: pathlib.Path, way: str
) -> None:
    """An open file can be renamed on the first one, and not on the second one."""
    with mounts.tmpfs(tmp_path / "tmpfs", 1 << 20) as root:
        WAYS[way](root / "file")
        number = root.stat().st_dev
    with FaultFS(tmp_path) as second:
        print(f"device {number}, then {second.path.stat().st_dev}")  # usually the same
        second.order(Fault("rename_open", error=errno.EBUSY))
        WAYS[way](second.path / "file")
        assert (second.path / "file").read_bytes() == NEW
        assert not left_in(second.path)
