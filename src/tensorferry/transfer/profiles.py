"""Profiles: settings that suit a file system, kept for those who ask for none.

Each is for one direction and one kind of memory, since what makes reads faster may halve the speed of writes.

``tensorferry tune`` writes them into one JSON file of the user's (``runtime.profiles_path()``; ``tuning.storing``);
handles and files without explicit settings look there. A file that cannot be used is warned of, not raised: a profile
saves time, and its loss must not end a training.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.base.mounts import mount_of_open
from tensorferry.transfer.defaults import MAX_PARALLELISM, MAX_QUEUE_DEPTH
from tensorferry.transfer.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 2
DIRECTIONS = ("read", "write")
HOST = "host"  # memory; that of GPUs is called by their numbers, see memory_name()
_MAX_FILE_NBYTES = 1 << 20

# linux/fs.h: FS_IOC_GETFSUUID (Linux 6.9) fills a length and 16 bytes.
_GET_UUID = 0x80111500
_UUID_NBYTES = 16


@dataclass(frozen=True)
class FileSystem:
    """Which file system: by what stays the same over reboots, mounts and containers, as far as the kernel tells.

    ``uuid`` is the best name; ``fsid`` is statvfs's, which ext4 and btrfs make from the UUID, others from the
    device's number; ``source`` is what was mounted. ``mount_point`` is for people.
    """

    type: str
    uuid: str | None
    fsid: str | None
    source: str
    mount_point: str

    def is_same(self, other: FileSystem) -> bool:
        """Return whether both mean one file system: the best name that both have decides."""
        if self.type != other.type:
            return False
        for mine, theirs in ((self.uuid, other.uuid), (self.fsid, other.fsid)):
            if mine and theirs:
                return mine == theirs
        return self.source == other.source


Use = tuple[str, str]  # "read" or "write", and the kind of memory


@dataclass(frozen=True)
class Profile:
    """The settings for one direction of a file system and one kind of memory, and how they were found."""

    file_system: FileSystem
    settings: Settings
    direction: str
    memory: str = HOST
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def use(self) -> Use:
        """Which transfers it is for."""
        return self.direction, self.memory


def memory_name(device: int | None) -> str:
    """Return what profiles call the host's memory (None), or that of a GPU by its number in this process."""
    if device is None:
        return HOST
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    known = device < len(visible) and visible[device].strip()
    return f"gpu{known or device}"


def file_system_of(path: Path) -> FileSystem:
    """Return the file system that holds a path.

    Raises
    ------
    OSError
        There is no such path, or the mount cannot be seen from here.
    """
    # Devices are not opened, and what may not be read need not be: its mount is known without.
    harmless = path.is_dir() or path.is_file()
    try:
        descriptor = os.open(path, (os.O_RDONLY if harmless else os.O_PATH) | os.O_CLOEXEC)
    except PermissionError:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return file_system_of_open(descriptor)
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def file_system_of_open(descriptor: int) -> FileSystem:
    """Return the file system that holds an open file, which needs no name, as :func:`file_system_of` does."""
    try:
        mount = mount_of_open(descriptor)
    except LookupError as problem:
        raise OSError(errno.ENODEV, str(problem)) from None
    fsid = os.statvfs(descriptor).f_fsid
    return FileSystem(
        type=mount["type"],
        uuid=_uuid(descriptor),
        fsid=f"{fsid:016x}" if fsid else None,
        source=mount["source"],
        mount_point=mount["mount_point"],
    )


def load(path: Path) -> list[Profile]:
    """Return the profiles of a file; none, with a warning, where it cannot be used."""
    try:
        return read(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as problem:
        warnings.warn(
            f"cannot use the profiles in {path} ({problem}): default settings are used "
            "(remedy: tensorferry tune --forget, and tune again)",
            RuntimeWarning,
            stacklevel=2,
        )
        return []


def profiles_of(file_system: FileSystem, profiles: list[Profile]) -> list[Profile]:
    """Return a file system's profiles."""
    return [each for each in profiles if each.file_system.is_same(file_system)]


def read(path: Path) -> list[Profile]:
    """Return the profiles of a file.

    Raises
    ------
    OSError
        It cannot be read, or is no regular file.
    ValueError
        It holds no profiles.
    """
    with open(path, "rb", opener=_opened_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        text = file.read(_MAX_FILE_NBYTES + 1)
    if len(text) > _MAX_FILE_NBYTES:
        raise ValueError(f"it is longer than {_MAX_FILE_NBYTES} bytes")
    try:
        return _profiles_of(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _opened_at_once(path: str, flags: int) -> int:
    # A FIFO without a writer must not hold up a transfer.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _profiles_of(content: Any) -> list[Profile]:
    if not isinstance(content, dict) or not isinstance(content.get("profiles"), list):
        raise ValueError("it holds no list of profiles")
    version = content.get("version")
    if version == 1:
        raise ValueError(
            "an earlier tensorferry wrote it, whose profiles were for reads and writes alike"
        )
    if version != VERSION:
        raise ValueError(f"its version is {version!r}, not {VERSION}")
    return [_parsed(entry) for entry in content["profiles"]]


def _parsed(entry: Any) -> Profile:
    try:
        file_system = FileSystem(**entry["file_system"])
        settings = Settings(**entry["settings"])
        direction, memory = entry["direction"], entry["memory"]
        found = dict(entry.get("found", {}))
    except (TypeError, KeyError, ValueError) as problem:
        raise ValueError(f"an entry is no profile: {problem}") from None
    if direction not in DIRECTIONS:
        raise ValueError(
            f"an entry has the direction {direction!r}, which is neither read nor write"
        )
    texts = [memory, file_system.type, file_system.source, file_system.mount_point]
    texts += [name for name in (file_system.uuid, file_system.fsid) if name is not None]
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("an entry names its file system or memory by what is not a text")
    numbers = (settings.block_size, settings.queue_depth, settings.intra_op_parallelism)
    limits = (1 << 31, MAX_QUEUE_DEPTH, MAX_PARALLELISM)
    for number, limit in zip(numbers, limits, strict=True):
        if type(number) is not int or not 1 <= number <= limit:
            raise ValueError(f"an entry has {number!r} where a number from 1 to {limit} belongs")
    if type(settings.single_submit) is not bool or type(settings.overlap_events) is not bool:
        raise ValueError("an entry has a switch that is neither true nor false")
    if settings.engine is not None and settings.engine not in _core.engine_names():
        raise ValueError(f"an entry has the unknown engine {settings.engine!r}")
    return Profile(file_system, settings, direction, memory, found)


def _uuid(descriptor: int) -> str | None:
    answer = bytearray(1 + _UUID_NBYTES)
    try:
        fcntl.ioctl(descriptor, _GET_UUID, answer)
    except OSError:  # an older kernel, or a file system without one
        return None
    number = bytes(answer[1 : 1 + min(answer[0], _UUID_NBYTES)])
    return number.hex() if any(number) else None
