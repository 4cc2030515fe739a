"""Writing without an offset: the file then holds only the array; replacement is atomic if requested."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import pathlib
import stat
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tensorferry
from tensorferry.transfer import publication, replacement
from tests.support import child, required
from tests.support.data import aligned
from tests.support.expect import assert_equal, contents, storage_error
from tests.support.interrupts import At
from tests.support.leaks import descriptors
from tests.support.threads import in_threads

if TYPE_CHECKING:
    from tests.support.data import RandomBytes

SIZES = [0, 1, 5_003, 3_000_001]


def open_in(directory: pathlib.Path) -> list[str]:
    """Return the open files of this process in a directory; files of earlier tests may still be open elsewhere."""
    return [path for path in descriptors() if pathlib.Path(path).is_relative_to(directory)]


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("others", [0, 300])
def test_of_one_call_each_file_with_a_whole_piece_is_ended_and_the_others_are_not(
    directory: pathlib.Path, random_bytes: RandomBytes, others: int
) -> None:
    old, data = random_bytes(2_000_003), random_bytes(1_000_003)
    names = ["whole", "pieces", "both", "linked"]
    whole, pieces, both, linked = (directory / name for name in names)
    for path in (whole, pieces, both, linked):
        old.tofile(path)
    link = directory / "link"
    link.hardlink_to(linked)
    small = [(directory / f"other{index}", b"small") for index in range(others)]
    tensorferry.write_many(
        [
            (both, data[7:], 7),
            (linked, data[:500_000]),
            (pieces, data, 5),
            *small,
            (whole, data),
            (both, data[:7]),
            (link, data[500_000:], 500_000),
        ]
    )
    assert_equal(contents(whole), data)
    assert_equal(contents(both), data)
    assert_equal(contents(linked)[:500_000], data[:500_000])
    assert_equal(contents(linked)[500_000 : data.size], data[500_000:])
    assert_equal(contents(pieces)[5 : 5 + data.size], data)
    assert_equal(contents(pieces)[5 + data.size :], old[5 + data.size :])


def test_two_whole_pieces_of_one_file_are_refused_before_any_io(directory: pathlib.Path) -> None:
    path = directory / "file"
    for atomic in (False, True):
        with pytest.raises(ValueError, match=r"items\[1\]: .*file"):
            tensorferry.write_many([(path, b"1"), (str(path), b"2")], atomic=atomic)
    assert not path.exists()
    tensorferry.write_many([(path, b"12"), (path, b"3")], truncate=True)  # the later one wins
    assert path.read_bytes() == b"32"


def test_items_may_come_from_a_generator_and_what_gives_none_is_refused(
    directory: pathlib.Path,
) -> None:
    paths = [directory / str(index) for index in range(5)]
    tensorferry.write_many((path, path.name.encode()) for path in paths)
    found = [bytearray(1) for _ in paths]
    tensorferry.read_many(zip(paths, found, strict=True))
    assert b"".join(found) == b"01234"
    for call in (tensorferry.read_many, tensorferry.write_many):
        with pytest.raises(TypeError, match=r"items: expected an iterable of .* got int"):
            call(5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("nbytes", [(10, 1_000), (10, 3_000_001), (2_000_003, 5_000_003)])
def test_of_two_whole_writes_at_the_same_time_one_is_all_that_the_file_holds(
    directory: pathlib.Path, nbytes: tuple[int, int]
) -> None:
    path = directory / "file"
    arrays = [np.full(size, value, np.uint8) for value, size in enumerate(nbytes)]
    for _ in range(20):
        in_threads(2, lambda index: tensorferry.write(path, arrays[index]))
        assert contents(path).tobytes() in [array.tobytes() for array in arrays]


def refused(directory: str, atomic: bool) -> list[int]:
    """Write beyond this process's limit of file sizes; return the file's sizes then and later, and a count of files."""
    import resource

    path = pathlib.Path(directory) / "file"
    path.write_bytes(b"old" * 1_000_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_500_000, 3_500_000))
    for call in (
        lambda: tensorferry.write(path, bytes(4_000_000), atomic=atomic),
        lambda: tensorferry.write_many([(path, bytes(4_000_000))], atomic=atomic),
    ):
        with storage_error(errno.EFBIG, path):
            call()
    found = path.read_bytes()
    return [len(found), found.count(b"old"), len(list(path.parent.iterdir()))]


@pytest.mark.parametrize("atomic", [False, True])
def test_a_write_that_is_refused_shortens_no_file_and_an_atomic_one_leaves_it_as_it_was(
    directory: pathlib.Path, atomic: bool
) -> None:
    nbytes, left, files = child.call(
        f"{__name__}:refused", directory=directory, atomic=atomic
    ).result
    assert nbytes >= 3_000_000
    assert left == 1_000_000 or not atomic
    assert files == 1


# atomic=True


def test_an_atomic_write_goes_to_another_file_and_keeps_mode_and_link(
    directory: pathlib.Path,
) -> None:
    path, link, other = (directory / name for name in ("file", "link", "hard"))
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    other.hardlink_to(path)
    with path.open("rb") as reader:
        tensorferry.write(link, [b"n", b"ew"], atomic=True, sync=True)
        assert reader.read() == b"old"
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert other.read_bytes() == b"old"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.usefixtures("default_engine")
def test_an_atomic_write_takes_any_array_and_checksums(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = aligned(3_000_001)
    data[:] = random_bytes(data.size)
    for direct in ("auto", False):
        sums = tensorferry.Checksums(1 << 20)
        tensorferry.write(
            directory / "file",
            data,
            atomic=True,
            checksums=sums,
            direct=direct,
            priority="background",
        )
        check = tensorferry.Checksums(1 << 20, expected=sums.chunks)
        found = tensorferry.read(directory / "file", np.zeros_like(data), checksums=check)
        assert_equal(found, data)


def test_what_no_atomic_write_can_do_is_refused_before_any_io(directory: pathlib.Path) -> None:
    path, folder = directory / "file", directory / "folder"
    path.write_bytes(b"old")
    folder.mkdir()
    for call, kind, message in [
        (lambda: tensorferry.write(path, b"1", 0, atomic=True), ValueError, "offset: .*got 0"),
        (
            lambda: tensorferry.write(path, b"1", truncate=False, atomic=True),
            ValueError,
            "truncate",
        ),
        (lambda: tensorferry.write(path, 1, atomic=True), TypeError, "array: .* got int"),
        (lambda: tensorferry.write(folder, b"1", atomic=True), ValueError, "not a regular file"),
        (
            lambda: tensorferry.write_many([(path, b"1"), (folder, b"1")], atomic=True),
            ValueError,
            "not a regular file",
        ),
        (
            lambda: tensorferry.write_many([(path, b"1"), (folder, b"1", 0)], atomic=True),
            TypeError,
            r"items\[1\]: an atomic write expects \(path, array\)",
        ),
    ]:
        with pytest.raises(kind, match=message):
            call()
    assert path.read_bytes() == b"old"


def rights(path: pathlib.Path) -> tuple[int, int, int, bytes | None]:
    """Return user, group, mode and POSIX ACL of a file."""
    status = path.stat()
    acl = os.getxattr(path, ACL) if ACL in os.listxattr(path) else None
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode), acl


ACL = "system.posix_acl_access"


def acl_of(user: int, *, mask: int) -> bytes:
    """Return an ACL that lets a user read and write, limited by the mask, and the group and others do nothing."""
    entries = [(1, 6, -1), (2, 6, user), (4, 0, -1), (16, mask, -1), (32, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries)


def owned_file(path: pathlib.Path, user: int, group: int, mode: int) -> None:
    path.write_bytes(b"old")
    try:
        os.chown(path, user, group)
    except PermissionError as error:
        pytest.skip(f"giving files away needs root: {error}")
    path.chmod(mode)


def with_acl(path: pathlib.Path, acl: bytes, name: str = ACL) -> None:
    try:
        os.setxattr(path, name, acl)
    except OSError as error:
        pytest.skip(f"no ACLs here: {error}")


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o4755, 0o2770])
def test_an_atomic_write_keeps_owner_and_group(directory: pathlib.Path, mode: int) -> None:
    path = directory / "file"
    owned_file(path, 1000, 1001, mode)
    tensorferry.write(path, b"new", atomic=True)
    assert path.read_bytes() == b"new"
    assert rights(path) == (1000, 1001, mode, None)


def test_an_atomic_write_keeps_the_acl_and_takes_none_from_the_directory(
    directory: pathlib.Path,
) -> None:
    path, plain = directory / "file", directory / "plain"
    path.write_bytes(b"old")
    plain.write_bytes(b"old")
    plain.chmod(0o660)
    with_acl(path, acl_of(1234, mask=6))
    with_acl(directory, acl_of(4321, mask=6), "system.posix_acl_default")
    before = rights(path), rights(plain)
    tensorferry.write_many([(path, b"new"), (plain, b"new")], atomic=True)
    assert (rights(path), rights(plain)) == before


def forbid(*calls: str) -> None:
    """Make system calls fail; for openat(), only calls that make a new file (O_EXCL)."""
    import pyseccomp

    filter_ = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    filter_.set_attr(pyseccomp.Attr.CTL_TSYNC, True)
    for call in calls:
        which = [pyseccomp.Arg(2, pyseccomp.MASKED_EQ, os.O_EXCL, os.O_EXCL)]
        filter_.add_rule(pyseccomp.ERRNO(errno.EPERM), call, *which * (call == "openat"))
    filter_.load()


def write_where_forbidden(call: str, **paths: str) -> None:
    """Write files atomically while a system call fails."""
    forbid(call)
    tensorferry.write_many([(path, b"new") for path in paths.values()], atomic=True)


def test_where_owner_or_acl_cannot_be_kept_nobody_gets_a_right_that_he_had_not(
    directory: pathlib.Path,
) -> None:
    required.module("pyseccomp")
    program = f"{__name__}:write_where_forbidden"
    paths = [directory / name for name in ("setuid", "group", "acl")]
    owned_file(paths[0], 1000, 1001, 0o6755)
    owned_file(paths[1], 1000, 1001, 0o664)
    child.call(program, call="fchown", one=paths[0], other=paths[1])
    assert [rights(path)[0::2] for path in paths[:2]] == [
        (os.geteuid(), 0o755),
        (os.geteuid(), 0o644),
    ]
    paths[2].write_bytes(b"old")
    with_acl(paths[2], acl_of(1234, mask=6))
    child.call(program, call="fsetxattr", one=paths[2])
    assert rights(paths[2])[2:] == (0o600, None)
    assert {path.read_bytes() for path in paths} == {b"new"}


def test_where_a_file_has_no_name_an_atomic_write_makes_none(directory: pathlib.Path) -> None:
    path = directory / "file"
    with path.open("w+b") as file:
        link = f"/proc/self/fd/{file.fileno()}"
        tensorferry.write(link, b"new", atomic=True)
        assert path.read_bytes() == b"new"
        for other in (None, directory / "file (deleted)"):  # as the kernel calls the old one
            if other is not None:
                other.write_bytes(b"other")
            for call in (
                lambda: tensorferry.write(link, b"1", atomic=True),
                lambda: tensorferry.write_many([(path, b"1"), (link, b"1")], atomic=True),
            ):
                with pytest.raises(
                    ValueError, match="refers to has been deleted, or has another path than"
                ):
                    call()
    assert {each.read_bytes() for each in directory.iterdir()} == {b"new", b"other"}


@pytest.mark.parametrize("many", [False, True])
def test_an_atomic_write_refuses_the_paths_that_the_plain_one_does_and_names_them(
    directory: pathlib.Path, many: bool
) -> None:
    file, loop, good = directory / "file", directory / "loop", directory / "good"
    file.write_bytes(b"old")
    loop.symlink_to(loop)
    for path, number in [
        (f"{file}/", errno.EISDIR),
        (f"{directory}/new/", errno.EISDIR),
        (f"{directory}/.", errno.EISDIR),
        (f"{file}/below", errno.ENOTDIR),
        (f"{directory}/none/file", errno.ENOENT),
        (f"{directory}/none/../file", errno.ENOENT),
        (f"{directory}/{'x' * 300}", errno.ENAMETOOLONG),
        (str(loop), errno.ELOOP),
    ]:
        for atomic in (False, True):
            items = [(path, b"1"), (good, b"new")]
            call = functools.partial(tensorferry.write, *items[0])
            if many:
                call = functools.partial(tensorferry.write_many, items)
            with pytest.raises(tensorferry.StorageError) as caught:
                call(atomic=atomic)
            assert (caught.value.errno, caught.value.filename) == (number, path)
            assert good.exists() == many
            good.unlink(missing_ok=True)
    assert sorted(directory.iterdir()) == [file, loop]
    assert file.read_bytes() == b"old"


def write_where_refused(path: str) -> list[str]:
    """Write atomically while renames, and then new files, are forbidden; return the messages."""
    messages = []
    for calls in (["renameat", "renameat2", "rename"], ["openat"]):
        tensorferry.write(path, b"old")
        forbid(*calls)
        sums = tensorferry.Checksums(4096)
        with pytest.raises(tensorferry.StorageError) as caught:
            tensorferry.write(path, b"new", atomic=True, checksums=sums)
        with pytest.raises(ValueError, match="not complete"):
            assert sums.chunks
        messages.append(str(caught.value))
    return messages


def test_a_new_file_that_cannot_be_made_or_placed_is_called_as_it_was_to_be(
    directory: pathlib.Path,
) -> None:
    required.module("pyseccomp")
    path = directory / "file"
    messages = child.call(f"{__name__}:write_where_refused", path=path).result
    assert messages == [f"[Errno 1] Operation not permitted: {str(path)!r}"] * 2
    assert path.read_bytes() == b"old"
    assert list(directory.iterdir()) == [path]


def with_few_descriptors(directory: str) -> None:
    """Write many files atomically while only a few can be open at a time."""
    import resource

    tensorferry.write(f"{directory}/first", b"", atomic=True)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for more in (4, 7, 11, 20):
        limit = max(map(int, os.listdir("/proc/self/fd"))) + more  # noqa: PTH208
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        items = [(f"{directory}/{index}", bytes([more]) * 20_000) for index in range(40)]
        tensorferry.write_many(items, atomic=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert all(pathlib.Path(path).read_bytes() == data for path, data in items)


def test_more_files_than_descriptors_are_written_atomically(directory: pathlib.Path) -> None:
    child.call(f"{__name__}:with_few_descriptors", directory=directory)


def test_of_many_atomic_writes_those_that_did_not_fail_have_taken_their_places(
    directory: pathlib.Path,
) -> None:
    paths = [directory / str(index) for index in range(40)]
    items = [(path, path.name.encode()) for path in paths]
    bad = [(directory / "none" / name, b"") for name in ("a", "b")]
    with pytest.raises(tensorferry.StorageError) as caught:
        tensorferry.write_many([*items[:20], bad[0], *items[20:], bad[1]], atomic=True)
    assert caught.value.errno == errno.ENOENT
    assert len(caught.value.others) == 1
    assert all(path.read_bytes() == path.name.encode() for path in paths)
    assert len(list(directory.iterdir())) == len(paths)


def test_ctrl_c_anywhere_in_an_atomic_write_leaves_the_old_file_or_the_new(
    directory: pathlib.Path,
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    path = directory / "file"
    old, new = b"old" * 5_000, b"new" * 7_000
    tensorferry.write(path, old, atomic=True)  # opens the descriptors that stay open
    source = (replacement.__file__, publication.__file__)
    number, seen = 0, set()
    while True:
        number += 1
        path.write_bytes(old)
        with At(number, source, interrupt) as moment, contextlib.suppress(KeyboardInterrupt):
            tensorferry.write(path, new, atomic=True)
        where = f"moment {number}: {moment.happened_in}"
        found = path.read_bytes()
        assert found in (old, new), where
        seen.add(found)
        assert os.listdir(directory) == ["file"], where  # noqa: PTH208
        if moment.happened_in is None:
            break
    assert number > 20
    assert seen == {old, new}
    gc.collect()
    # An interrupt between the return of open() and the assignment of its result leaks the descriptor.
    assert len(open_in(directory)) <= 10


def test_a_place_that_is_dropped_closes_and_leaves_nothing(directory: pathlib.Path) -> None:
    place = replacement.Replacement(directory / "file", sync=False)
    place.file.write(b"new")
    assert open_in(directory)
    del place  # removes the file at once, without the garbage collector
    assert not open_in(directory)
    assert list(directory.iterdir()) == []
