"""FileWriter, and save(), which uses the same code: the file is either complete and new, or the old one."""

from __future__ import annotations

import errno
import pickle
import stat
from typing import TYPE_CHECKING

import pytest
import torch

from tensorferry.checkpoint import FileWriter, load, save
from tests.checkpoint.archives import saved
from tests.checkpoint.states import assert_same, mixed_state
from tests.support import child, mounts
from tests.support.expect import storage_error
from tests.support.faultfs import Fault, FaultFS
from tests.support.ranks import files_of

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes
    from tests.support.power_cuts import Cut

MIB = 1 << 20


def test_torch_saves_to_it_as_to_any_file(directory: pathlib.Path) -> None:
    with FileWriter(directory / "state.pt") as file:
        torch.save(mixed_state(), file)
    assert (directory / "state.pt").read_bytes() == saved(mixed_state())


@pytest.mark.parametrize("sync", [True, False])
def test_pieces_of_any_size_arrive_in_order(
    directory: pathlib.Path, random_bytes: RandomBytes, sync: bool
) -> None:
    sizes = [0, 1, 4095, 4096, 65535, 65536, 5 * MIB + 1, 3, 4 * MIB, 9 * MIB]
    pieces = [random_bytes(nbytes) for nbytes in sizes]
    with FileWriter(directory / "file", sync=sync) as file:
        for piece in pieces:
            data = bytearray(piece)
            assert file.write(data) == len(data)
            data[:] = bytes(len(data))  # the writer has a copy
        assert file.tell() == sum(sizes)
    assert (directory / "file").read_bytes() == b"".join(map(bytes, pieces))


def test_it_serves_what_else_writes_files(directory: pathlib.Path) -> None:
    with FileWriter(directory / "file") as file:
        pickle.dump({"a": 1}, file)
        file.writelines([b"x", memoryview(b"yz")])
        file.flush()
        assert (file.writable(), file.readable(), file.seekable()) == (True, False, False)
        assert file.name == str(directory / "file")
    assert (directory / "file").read_bytes() == pickle.dumps({"a": 1}) + b"xyz"


def test_what_is_there_stays_until_the_new_file_is_whole(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(b"old")
    with FileWriter(path) as file:
        file.write(bytes(5 * MIB))
        assert path.read_bytes() == b"old"
    assert files_of(directory) == {"file"}
    assert path.stat().st_size == 5 * MIB


def test_an_exception_gives_the_new_file_up(directory: pathlib.Path) -> None:
    path = directory / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with FileWriter(path) as file:
            file.write(bytes(5 * MIB))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert path.read_bytes() == b"old"
    assert files_of(directory) == {"file"}


def test_one_that_is_never_closed_is_given_up_with_a_warning(directory: pathlib.Path) -> None:
    file = FileWriter(directory / "file")
    file.write(b"data")
    with pytest.warns(ResourceWarning, match="never closed"):
        del file
    assert files_of(directory) == set()


def test_closing_again_does_nothing(directory: pathlib.Path) -> None:
    file = FileWriter(directory / "file")
    file.write(b"data")
    file.close()
    file.close()
    file.abort()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")
    assert (directory / "file").read_bytes() == b"data"


def test_permissions_and_links_stay(directory: pathlib.Path) -> None:
    path, link = directory / "file", directory / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to("file")
    save(torch.ones(10), link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert torch.equal(load(path), torch.ones(10))


def test_new_files_have_the_permissions_of_open(directory: pathlib.Path) -> None:
    (directory / "plain").write_bytes(b"")
    save(1, directory / "new")
    assert (directory / "new").stat().st_mode == (directory / "plain").stat().st_mode


def test_places_where_no_file_can_be_are_refused(directory: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="not a regular file"):
        FileWriter(directory)
    with pytest.raises(ValueError, match="not a regular file"):
        save(1, "/dev/null")
    with pytest.raises(FileNotFoundError):
        save(1, directory / "missing" / "file")


def test_a_disk_with_just_enough_space_is_enough(tmp_path: pathlib.Path) -> None:
    with mounts.ext4(tmp_path, 64 * MIB) as mount:
        count = mounts.free_nbytes(mount) // MIB - 1
        with FileWriter(mount / "file") as file:
            for _ in range(count):
                file.write(bytes(MIB))
        assert (mount / "file").stat().st_size == count * MIB


def test_a_size_limit_is_reported(directory: pathlib.Path) -> None:
    path = directory / "file"
    ended = child.call(
        "tests.checkpoint.programs:save_within",
        imports=["torch.distributed.checkpoint"],
        path=path,
        file_nbytes=MIB,
        layout=None,
    )
    assert ended.result == [errno.EFBIG, str(path)]
    assert files_of(directory) == set()


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_failing_drive_is_reported_and_leaves_the_old_file(
    faultfs: FaultFS, operation: str
) -> None:
    path = faultfs.path / "state.pt"
    save(mixed_state(), path)
    faultfs.order(Fault(operation, error=errno.EIO))
    with storage_error(errno.EIO, path):
        save(torch.ones(4 * MIB), path)
    faultfs.clear()
    assert files_of(faultfs.path) == {"state.pt"}
    assert_same(load(path), mixed_state())


def test_file_systems_without_nameless_files_get_a_temporary_name(faultfs: FaultFS) -> None:
    with FileWriter(faultfs.path / "file") as file:
        file.write(b"data")
        (name,) = files_of(faultfs.path)
        assert name.startswith(".tensorferry-")
    assert files_of(faultfs.path) == {"file"}


@pytest.mark.parametrize("before", ["nothing", "another file"])
def test_a_power_cut_after_a_save_loses_nothing(cut: Cut, before: str) -> None:
    if before == "another file":
        save(mixed_state(1), cut.path / "state.pt")
    save(mixed_state(2), cut.path / "state.pt")
    with cut.now() as after:
        assert_same(load(after / "state.pt"), mixed_state(2))


def test_memory_beyond_the_state_is_bounded(directory: pathlib.Path) -> None:
    ended = child.call(
        "tests.checkpoint.programs:peaks_of_save_and_load", path=directory / "s", nbytes=400 * MIB
    )
    saving, loading = ended.result
    assert saving <= 160 * MIB  # of 400
    assert loading <= 160 * MIB


def test_failures_are_told_by_close_and_leave_nothing(directory: pathlib.Path) -> None:
    file = FileWriter(directory / "file")
    file.write(b"data")
    (directory / "file").mkdir()  # prevents the rename of the new file
    with pytest.raises(IsADirectoryError):
        file.close()
    assert file.closed
    assert files_of(directory) == {"file"}
