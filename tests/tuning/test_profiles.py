"""Profiles: their storage, and their use by handles and files without explicit settings."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.base.mounts import mounts as list_mounts
from tensorferry.transfer import profiles, runtime
from tensorferry.transfer.profiles import FileSystem, Profile
from tensorferry.transfer.settings import Settings
from tensorferry.tuning import storing
from tests.support import child, mounts
from tests.support.expect import assert_equal
from tests.support.leaks import settled, steady, threads_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.data import RandomBytes

DISK = Settings(256 << 10, 7, False, True, 2, "threads")
MEMORY = Settings(512 << 10, 5, True, True, 1, "threads")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a file for profiles for this test only; the shared schedulers of the process are made again."""
    path = tmp_path / "config" / "profiles.json"
    monkeypatch.setenv("TENSORFERRY_PROFILES", str(path))
    monkeypatch.delenv("TENSORFERRY_ENGINE", raising=False)
    monkeypatch.setattr(runtime, "_default", None)
    yield path
    made, runtime._default = runtime._default, None
    if made is not None:
        runtime.close_scheduler(made)


def keep(
    store: Path,
    directory: Path,
    settings: Settings,
    directions: tuple[str, ...] = profiles.DIRECTIONS,
    memory: str = profiles.HOST,
) -> list[Profile]:
    """Store settings for some directions of a folder's file system."""
    system = profiles.file_system_of(directory)
    made = [Profile(system, settings, direction, memory) for direction in directions]
    storing.store(store, system, {profile.use: profile for profile in made})
    return made


@pytest.fixture
def tuned(store: Path, directory: Path) -> Path:
    """Return a folder on a file system with the stored settings DISK for all uses."""
    keep(store, directory, DISK)
    return directory


# Keeping


def test_profiles_are_found_again_as_they_were_stored(
    store: Path, tmp_path: Path, tmpfs_directory: Path
) -> None:
    disk = keep(store, tmp_path, DISK)
    memory = keep(store, tmpfs_directory, MEMORY)
    assert profiles.load(store) == disk + memory
    newer = keep(store, tmp_path, MEMORY, ("write",))
    assert profiles.load(store) == [disk[0], *memory, *newer]
    assert [path.name for path in store.parent.iterdir()] == [store.name], "left files behind"


def test_what_is_not_proven_is_dropped_for_what_was_measured_and_nothing_else(
    store: Path, tmp_path: Path, tmpfs_directory: Path
) -> None:
    reads, writes = keep(store, tmp_path, DISK)
    (gpus,) = keep(store, tmp_path, DISK, ("read",), "gpu0")
    memory = keep(store, tmpfs_directory, MEMORY)
    system = reads.file_system
    assert storing.store(store, system, {reads.use: None}) == [reads.use]
    assert profiles.load(store) == [writes, gpus, *memory]
    assert storing.store(store, system, {reads.use: None}) == []
    assert storing.store(store, system, {writes.use: None, gpus.use: None}) == [
        writes.use,
        gpus.use,
    ]
    assert profiles.load(store) == memory


def test_forgetting_removes_a_file_systems_profiles_or_all_and_the_file(
    store: Path, tmp_path: Path, tmpfs_directory: Path
) -> None:
    disk = keep(store, tmp_path, DISK)
    memory = keep(store, tmpfs_directory, MEMORY)
    assert storing.forget(store, disk[0].file_system) == disk
    assert profiles.load(store) == memory
    assert storing.forget(store) == memory
    assert not store.exists()
    assert storing.forget(store) == []


def test_storing_from_many_threads_loses_none(store: Path) -> None:
    def save(number: int) -> None:
        system = FileSystem("ext4", f"{number:032x}", None, "/dev/x", "/x")
        storing.store(store, system, {("read", "host"): Profile(system, DISK, "read")})

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(save, range(16)))
    assert len(profiles.load(store)) == 16


ENTRY = Profile(FileSystem("ext4", None, "1", "/dev/x", "/"), DISK, "read").as_dict()


def entered(**changes: Any) -> str:
    return json.dumps({"version": 2, "profiles": [ENTRY | changes]})


def spoilt(**changes: Any) -> str:
    return entered(settings=ENTRY["settings"] | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2}',
        '{"version": 1, "profiles": []}',
        '{"version": 2, "profiles": [1]}',
        spoilt(block_size="1M"),
        spoilt(queue_depth=1 << 20),
        spoilt(queue_depth=True),
        spoilt(single_submit="false"),
        spoilt(engine="spdk"),
        spoilt(engine=[]),
        spoilt(colour="blue"),
        entered(file_system=ENTRY["file_system"] | {"mount_point": {}}),
        entered(file_system=ENTRY["file_system"] | {"uuid": 1}),
        entered(direction="both"),
        entered(memory=0),
        '{"version": 2, "profiles": ' + "[" * 200_000,
        " " * (2 << 20),
    ],
)
def test_a_spoilt_file_is_warned_of_and_defaults_are_used(
    store: Path, directory: Path, text: str
) -> None:
    store.parent.mkdir()
    store.write_text(text)
    with pytest.warns(RuntimeWarning, match="default settings"):
        handle = tensorferry.aio_handle()
    with handle:
        handle.sync_pwrite(np.arange(1000), directory / "file")
        assert handle.get_block_size() == 1 << 20
        assert "profiles" not in handle.stats()


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)],
    ids=["pipe", "folder", "circle"],
)
def test_what_is_no_regular_file_is_warned_of_and_left_alone(
    store: Path, directory: Path, make: Callable[[Path], None]
) -> None:
    store.parent.mkdir()
    make(store)
    before = store.lstat()
    if store.exists():  # a circle does not lead to anything
        with pytest.warns(RuntimeWarning, match="cannot use"):
            tensorferry.aio_handle().close()
    for change in (
        lambda: storing.check_writable(store),
        lambda: keep(store, directory, DISK),
        lambda: storing.forget(store),
        lambda: storing.forget(store, profiles.file_system_of(directory)),
    ):
        with pytest.raises(OSError, match=r"regular file|directory|symbolic links"):
            change()
    assert os.path.samestat(store.lstat(), before)
    assert [path.name for path in store.parent.iterdir()] == [store.name]


@pytest.mark.root
def test_a_device_is_not_forgotten(tmp_path: Path) -> None:
    device = tmp_path / "null"
    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    link = tmp_path / "profiles.json"
    link.symlink_to(device)
    for path in (device, link):
        with pytest.raises(OSError, match="not a regular file"):
            storing.forget(path)
    assert device.is_char_device()


@pytest.mark.parametrize("text", ["precious", "[" * 200_000], ids=["no JSON", "nested deeply"])
def test_saving_keeps_a_spoilt_file_under_another_name(
    store: Path, tmp_path: Path, text: str
) -> None:
    store.parent.mkdir()
    store.write_text(text)
    with pytest.warns(RuntimeWarning, match="unusable"):
        kept = keep(store, tmp_path, DISK)
    assert profiles.load(store) == kept
    assert store.with_suffix(".unusable").read_text() == text


def test_saving_keeps_every_spoilt_file(store: Path, tmp_path: Path) -> None:
    store.parent.mkdir()
    for text in ("first", "second"):
        store.write_text(text)
        with pytest.warns(RuntimeWarning, match="unusable"):
            keep(store, tmp_path, DISK)
    kept = {path.read_text() for path in store.parent.glob("*.unusable*")}
    assert kept == {"first", "second"}


def test_a_spoilt_file_has_its_name_again_if_no_other_can_be_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.parent.mkdir()
    store.write_text("precious")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(store))

    monkeypatch.setattr(storing, "_TextFile", fail)
    with pytest.raises(OSError, match="No space left"):
        keep(store, tmp_path, DISK)
    assert [path.read_text() for path in store.parent.iterdir()] == ["precious"]


def test_a_profile_that_no_handle_accepts_is_refused(store: Path, tmp_path: Path) -> None:
    keep(store, tmp_path, DISK._replace(block_size=1 << 30))
    assert len(profiles.read(store)) == 2
    keep(store, tmp_path, DISK._replace(block_size=(1 << 30) + 1))
    with pytest.raises(ValueError, match="block_size is not an integer between 1 and"):
        profiles.read(store)


def test_saving_keeps_permissions_and_links(
    store: Path, tmp_path: Path, tmpfs_directory: Path
) -> None:
    shared = tmp_path / "shared.json"
    store.parent.mkdir()
    store.symlink_to(shared)
    umask = os.umask(0o022)
    try:
        disk = keep(store, tmp_path, DISK)
        assert shared.stat().st_mode & 0o777 == 0o644  # as any new file's
        shared.chmod(0o664)
        memory = keep(store, tmpfs_directory, MEMORY)
        assert storing.forget(store, memory[0].file_system) == memory
    finally:
        os.umask(umask)
    assert store.readlink() == shared
    assert shared.stat().st_mode & 0o777 == 0o664
    assert profiles.load(shared) == disk


@pytest.mark.root
def test_saving_keeps_the_owner(store: Path, tmp_path: Path) -> None:
    keep(store, tmp_path, DISK)
    os.chown(store, 1234, 2345)
    keep(store, tmp_path, MEMORY)
    assert (store.stat().st_uid, store.stat().st_gid) == (1234, 2345)


def test_file_is_in_the_configuration_folder_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TENSORFERRY_PROFILES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert runtime.profiles_path() == f"{tmp_path}/tensorferry/profiles.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime.profiles_path() == f"{tmp_path}/.config/tensorferry/profiles.json"
    monkeypatch.setenv("TENSORFERRY_PROFILES", "0")
    assert runtime.profiles_path() is None


# Which file system


def test_all_of_a_file_system_is_known_as_the_same_and_others_are_not(
    tmp_path: Path, tmpfs_directory: Path
) -> None:
    here = profiles.file_system_of(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "file").touch(mode=0o200)  # may not even be read
    assert profiles.file_system_of(tmp_path / "below").is_same(here)
    assert profiles.file_system_of(tmp_path / "file").is_same(here)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        assert profiles.file_system_of_open(file.fileno()) == here
    assert not here.is_same(profiles.file_system_of(tmpfs_directory))
    assert profiles.file_system_of(Path("/dev/null")).type
    with pytest.raises(FileNotFoundError):
        profiles.file_system_of(tmp_path / "missing")


@pytest.mark.root
def test_a_file_system_is_known_again_after_it_was_mounted_elsewhere(
    tmp_path: Path,
) -> None:
    with mounts.ext4(tmp_path, 16 << 20) as first:
        image = first.with_suffix(".img")
        before = profiles.file_system_of(first)
        with mounts.ext4(tmp_path, 16 << 20) as other:
            assert not before.is_same(profiles.file_system_of(other))
        with mounts.mounted(tmp_path / "bound", "--bind", str(first)) as bound:
            assert before.is_same(profiles.file_system_of(bound))
        copy = tmp_path / "copy.img"
        copy.write_bytes(image.read_bytes())
    with mounts.mounted(tmp_path / "again", "-o", "loop", str(copy)) as again:
        assert before.is_same(profiles.file_system_of(again))
    copy.unlink()


def test_mounts_are_listed_whatever_characters_their_names_have(tmp_path: Path) -> None:
    odd = "/a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\ri"
    lines = [f"31 23 0:{number} / {odd}{number} rw - tmpfs  rw,size=8k\n" for number in (1, 2)]
    (tmp_path / "mountinfo").write_bytes("".join(lines).encode())
    found = list_mounts(tmp_path)
    assert [mount["mount_point"] for mount in found] == [f"{odd}1", f"{odd}2"]
    assert {(each["type"], each["source"], each["options"]) for each in found} == {
        ("tmpfs", "", "rw,size=8k")
    }


@pytest.mark.parametrize(
    ("names", "same"),
    [
        ({}, True),
        ({"mount_point": "/elsewhere"}, True),
        ({"fsid": "2"}, True),  # XFS: the device's number, which may change; the UUID decides
        ({"uuid": "b"}, False),
        ({"type": "xfs"}, False),
        ({"uuid": None}, True),
        ({"uuid": None, "fsid": "2"}, False),
        ({"uuid": None, "fsid": None}, True),
        ({"uuid": None, "fsid": None, "source": "other:/export"}, False),
    ],
)
def test_the_best_name_that_both_have_decides(names: dict[str, Any], same: bool) -> None:
    one = FileSystem("ext4", "a", "1", "/dev/x", "/x")
    assert one.is_same(dataclasses.replace(one, **names)) is same
    assert dataclasses.replace(one, **names).is_same(one) is same


# Use


def test_a_handle_without_settings_uses_the_profile_of_each_file(
    tuned: Path, tmpfs_directory: Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(3 << 20)
    with tensorferry.aio_handle() as handle:
        assert handle.get_block_size() == 1 << 20
        assert handle.stats()["profiles"] == {}
        assert handle.sync_pwrite(data, tuned / "file") == 1
        assert (handle.get_block_size(), handle.get_queue_depth()) == (256 << 10, 7)
        assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, True)
        assert handle.get_intra_op_parallelism() == handle.get_thread_count() == 2
        stats = handle.stats()
        each = DISK._asdict()
        assert list(stats["profiles"].values()) == [{"read host": each, "write host": each}]
        assert handle.engine == stats["engine"] == "threads"
        assert stats["engine_blocks"] == 12  # of 256 KiB each
        found = np.zeros_like(data)
        handle.async_pread(found, tuned / "file")
        assert handle.wait() == 1
        assert_equal(found, data)
        handle.sync_pwrite(data, tmpfs_directory / "file")  # a file system without a profile
        assert handle.get_block_size() == 1 << 20
        assert handle.stats()["requests"] == 3
    assert_equal(np.fromfile(tmpfs_directory / "file", np.uint8), data)


def test_each_direction_goes_by_its_own_profile(
    store: Path, directory: Path, random_bytes: RandomBytes
) -> None:
    keep(store, directory, DISK, ("read",))
    data = random_bytes(3 << 20)
    found = np.zeros_like(data)
    path = directory / "file"
    with tensorferry.aio_handle() as handle:
        handle.sync_pwrite(data, path)
        assert handle.get_queue_depth() == 128
        handle.sync_pread(found, path)
        assert handle.get_queue_depth() == 7
        ((use, _),) = next(iter(handle.stats()["profiles"].values())).items()
        assert use == "read host"
    assert_equal(found, data)
    keep(store, directory, MEMORY, ("write",))
    with tensorferry.open(path, "r+") as file:
        file.write(data[::-1].copy())
        file.read(found)
    assert_equal(found, data[::-1])
    tensorferry.write_many([(path, data)], truncate=True)
    tensorferry.read_many([(path, found)])
    assert_equal(found, data)
    scheduler = runtime.default_scheduler()
    reading, writing = (runtime.scheduler_of(scheduler, _opened(path), w) for w in (False, True))
    assert reading is not writing
    assert scheduler.plain not in (reading, writing)


def _opened(path: Path) -> Any:
    return tensorferry._core.open_file(str(path), True, False, False, False, False, "auto")


def test_memory_of_gpus_has_profiles_of_its_own(
    store: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, directory, DISK)
    keep(store, directory, MEMORY, ("write",), "gpu3")
    (directory / "file").touch()
    file = _opened(directory / "file")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # which its first one is of this process
    scheduler: Any = runtime.default_scheduler()
    depths = {
        location: scheduler.of(file, True, location) and scheduler.latest_settings()
        for location in (None, (0, 0), (1, 0))
    }
    assert depths == {None: DISK, (0, 0): MEMORY, (1, 0): None}
    assert scheduler.of(file, False, (0, 0)) is scheduler.plain
    assert [profiles.memory_name(n) for n in (None, 0, 1, 2)] == ["host", "gpu3", "gpu1", "gpu2"]


@pytest.mark.parametrize(
    ("explicit", "environment"),
    [
        ({"queue_depth": 128}, {}),
        ({"overlap_events": False}, {}),
        ({"engine": "threads"}, {}),
        ({}, {"TENSORFERRY_PROFILES": "0"}),
        ({}, {"TENSORFERRY_ENGINE": "threads"}),
    ],
)
def test_a_setting_given_or_the_environment_switches_profiles_off(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, explicit: dict[str, Any], environment: Any
) -> None:
    """Even a setting that is the default."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with tensorferry.aio_handle(**explicit) as handle:
        handle.sync_pwrite(np.arange(100_000), tuned / "file")
        assert "profiles" not in handle.stats()
        assert handle.get_queue_depth() == 128


def test_the_signature_shows_deepnvmes_defaults() -> None:
    parameters = inspect.signature(tensorferry.aio_handle).parameters
    defaults = [str(parameter.default) for parameter in list(parameters.values())[:5]]
    assert defaults == ["1048576", "128", "False", "False", "1"]


def test_descriptors_and_files_without_a_name_have_their_file_systems_profile(tuned: Path) -> None:
    with tempfile.TemporaryFile(dir=tuned) as file, tensorferry.aio_handle() as handle:
        handle.async_pwrite(np.arange(1000), file.fileno())
        assert handle.wait() == 1
        assert handle.get_queue_depth() == 7
        path = f"/proc/self/fd/{file.fileno()}"
        with tensorferry.open(path) as opened, tensorferry.open(path, queue_depth=4) as explicit:
            opened.read(np.zeros(1000))
            assert opened.engine == "threads"
            assert opened.stats()["requests"] == 1
            assert explicit.stats()["requests"] == 0


def test_a_look_up_that_failed_is_not_made_again(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refuse(descriptor: int) -> FileSystem:
        calls.append(descriptor)
        raise OSError(errno.ENODEV, "mount 7 is not visible to this process")

    monkeypatch.setattr(profiles, "file_system_of_open", refuse)
    with tensorferry.aio_handle() as handle:
        for _ in range(3):
            handle.sync_pwrite(np.arange(1000), tuned / "file")
        assert handle.get_queue_depth() == 128
    assert len(calls) == 1


def test_a_profile_whose_workers_cannot_be_started_is_passed_over(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_scheduler = runtime.make_scheduler

    def refuse_others(settings: Settings) -> Any:
        if settings == Settings():
            return make_scheduler(settings)
        raise tensorferry.EngineUnavailableError("no engine works: too many threads")

    monkeypatch.setattr(runtime, "make_scheduler", refuse_others)
    with tensorferry.aio_handle() as handle:
        for _ in range(2):
            handle.sync_pwrite(np.arange(1000), tuned / "file")
        assert handle.get_queue_depth() == 128
    assert_equal(np.fromfile(tuned / "file", np.int64), np.arange(1000))


def test_many_arrays_on_several_file_systems_go_by_their_profiles(
    tuned: Path, tmpfs_directory: Path, random_bytes: RandomBytes
) -> None:
    arrays = [random_bytes(5000 + index) for index in range(600)]
    places = [tuned, tuned, tmpfs_directory]
    items = [(places[index % 3] / f"file{index}", array) for index, array in enumerate(arrays)]
    tensorferry.write_many(items)
    found = [np.zeros_like(array) for array in arrays]
    tensorferry.read_many([(path, array) for (path, _), array in zip(items, found, strict=True)])
    for one, other in zip(found, arrays, strict=True):
        assert_equal(one, other)
    with tensorferry.open(items[0][0]) as file:
        disk = file.stats()
    with tensorferry.open(items[2][0]) as file:
        memory = file.stats()
    on_disk = sum(array.nbytes for index, array in enumerate(arrays) if index % 3 < 2)
    assert disk["written_nbytes"] == disk["read_nbytes"] == on_disk
    assert memory["written_nbytes"] == sum(array.nbytes for array in arrays) - on_disk


def test_the_first_failure_in_the_list_is_raised_whatever_file_system_it_is_on(
    tuned: Path, tmpfs_directory: Path
) -> None:
    for place in (tuned, tmpfs_directory):
        (place / "good").write_bytes(bytes(100))
        (place / "short").write_bytes(bytes(10))
    items = [
        (place / name, np.zeros(100, np.uint8))
        for name in ("good", "short")
        for place in (tmpfs_directory, tuned)
    ]
    with pytest.raises(tensorferry.ShortReadError) as caught:
        tensorferry.read_many(items)
    assert caught.value.filename == str(tmpfs_directory / "short")


def test_file_systems_with_equal_settings_share_a_scheduler(
    store: Path, directory: Path, tmpfs_directory: Path
) -> None:
    keep(store, directory, DISK)
    keep(store, tmpfs_directory, DISK)

    def workers() -> set[Path]:
        return threads_named("tensorferry")

    before = steady(workers)
    with tensorferry.aio_handle() as handle:
        with_none = steady(workers)
        handle.sync_pwrite(np.arange(1 << 20), directory / "file")
        assert steady(workers) - with_none
        handle.sync_pwrite(np.arange(1 << 20), tmpfs_directory / "file")
        _, *tuned = handle._scheduler.all()
        assert len(tuned) == 1
        assert len(handle.stats()["profiles"]) == 2
    assert settled(lambda: workers() <= before)


def test_an_engine_that_cannot_be_had_here_is_replaced(store: Path, directory: Path) -> None:
    settings = DISK._replace(engine="io_uring")
    keep(store, directory, settings)
    ended = child.call(
        "tests.tuning.test_profiles:write_without_io_uring",
        path=directory / "file",
    )
    assert ended.result["engine"] != "io_uring"
    assert ended.result["queue_depth"] == 7


def write_without_io_uring(path: str) -> dict[str, Any]:
    from tests.support import seccomp

    seccomp.block(["io_uring"])
    with tensorferry.aio_handle() as handle:
        handle.sync_pwrite(np.arange(100_000), path)
        return {"engine": handle.engine, "queue_depth": handle.get_queue_depth()}


def test_a_forked_child_makes_schedulers_of_its_own(store: Path, directory: Path) -> None:
    keep(store, directory, DISK)
    ended = child.call(
        "tests.tuning.test_profiles:use_before_and_after_fork",
        path=directory / "file",
    )
    assert ended.result == {"status": 0}
    assert_equal(np.fromfile(directory / "file", np.int64), np.arange(1000)[::-1])


def use_before_and_after_fork(path: str) -> dict[str, int]:
    tensorferry.write(path, np.arange(1000))
    handle = tensorferry.aio_handle()
    handle.sync_pwrite(np.arange(1000), path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork with threads
        process = os.fork()
    if process == 0:
        try:
            handle.sync_pwrite(np.arange(1000), path)
        except RuntimeError:
            tensorferry.write(path, np.arange(1000)[::-1].copy())
            with tensorferry.open(path) as file:
                os._exit(0 if file.engine == "threads" else 2)
        os._exit(1)
    return {"status": os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}


def test_failures_and_closing_are_as_without_profiles(tuned: Path) -> None:
    handle = tensorferry.aio_handle()
    handle.sync_pwrite(np.arange(1000), tuned / "file")
    with pytest.raises(tensorferry.StorageError):
        handle.sync_pread(np.zeros(10), tuned / "missing")
    for _ in range(50):
        handle.async_pwrite(np.arange(100_000), tuned / "file")
    handle.close()
    with pytest.raises(ValueError, match="closed"):
        handle.sync_pwrite(np.arange(1000), tuned / "file")
    assert (tuned / "file").stat().st_size == 800_000


def test_without_profiles_nothing_of_them_nor_of_the_commands_is_imported(directory: Path) -> None:
    path = str(directory / "file")
    code = (
        "import sys, tensorferry\n"
        f"tensorferry.write({path!r}, bytes(5000))\n"
        f"tensorferry.aio_handle().sync_pwrite(bytes(5000), {path!r})\n"
        "print(*[name for name in sys.modules if name.startswith('tensorferry')])"
    )
    environment = os.environ | {"TENSORFERRY_PROFILES": str(directory / "none.json")}
    imported = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    heavy = re.compile(r"profiled|\.(tuning|cli)\b")
    assert "tensorferry" in imported
    assert not [name for name in imported.split() if heavy.search(name)]
