"""Profiles: measured settings for a file system, used by handles and files that are opened without settings.

Each profile is for one direction (read or write) and one kind of memory (that of the host or of a GPU), because
settings that make reads faster may halve the speed of writes.

``tensorferry tune`` stores profiles in one JSON file of the user. ``runtime.profiles_path()`` is the file's path, and
the module ``tuning.storing`` writes it. If the file cannot be used, a warning is emitted and no exception is raised: a
profile only saves time, and a missing one must not end a training run.
"""

from __future__ import annotations

import dataclasses
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
from tensorferry.transfer.defaults import MAX_BLOCK_NBYTES, MAX_PARALLELISM, MAX_QUEUE_DEPTH
from tensorferry.transfer.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 2
DIRECTIONS = ("read", "write")
HOST = "host"  # the name of host memory; see memory_name() for the names of GPUs' memory
_MAX_FILE_NBYTES = 1 << 20

# linux/fs.h: FS_IOC_GETFSUUID (Linux 6.9) fills a length and 16 bytes.
_GET_UUID = 0x80111500
_UUID_NBYTES = 16


@dataclass(frozen=True)
class FileSystem:
    """The identity of a file system, by properties that survive reboots, mounts and containers if possible.

    ``uuid`` is the most reliable. ``fsid`` is that of statvfs(), which ext4 and btrfs derive from the UUID and other
    file systems from the device number. ``source`` is the mounted device or server. ``mount_point`` is only for
    display.
    """

    type: str
    uuid: str | None
    fsid: str | None
    source: str
    mount_point: str

    def is_same(self, other: FileSystem) -> bool:
        """Return whether both are the same file system: the most reliable property that both have decides."""
        if self.type != other.type:
            return False
        for mine, theirs in ((self.uuid, other.uuid), (self.fsid, other.fsid)):
            if mine and theirs:
                return mine == theirs
        return self.source == other.source


Use = tuple[str, str]  # "read" or "write", and the kind of memory


@dataclass(frozen=True)
class Profile:
    """The settings for one direction of a file system and one kind of memory; ``found`` has what was measured."""

    file_system: FileSystem
    settings: Settings
    direction: str
    memory: str = HOST
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def use(self) -> Use:
        """The transfers that the profile is for: (direction, memory)."""
        return self.direction, self.memory

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as it is stored."""
        return dataclasses.asdict(self) | {"settings": self.settings._asdict()}


def memory_name(device: int | None) -> str:
    """Return the name that profiles have for host memory (``device`` is None) or for the memory of a GPU.

    ``device`` is the GPU's number in this process. If CUDA_VISIBLE_DEVICES is set, the name has the GPU's entry there.
    """
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
        The path does not exist, or its mount is not visible to this process.
    """
    # A file or folder is opened for reading if possible, because the ioctl() in _uuid() needs that. O_PATH suffices to
    # find the mount; it does not open a device, and does not need the right to read the file.
    is_file_or_folder = path.is_dir() or path.is_file()
    try:
        descriptor = os.open(path, (os.O_RDONLY if is_file_or_folder else os.O_PATH) | os.O_CLOEXEC)
    except PermissionError:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return file_system_of_open(descriptor)
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def file_system_of_open(descriptor: int) -> FileSystem:
    """Return the file system that holds an open file, which may have no name; see :func:`file_system_of`."""
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
    """Return the profiles in a file. If the file cannot be used, emit a warning and return an empty list."""
    try:
        return read(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as problem:
        warnings.warn(
            f"cannot use the profiles in {path}: {problem}; using default settings "
            "(remedy: tensorferry tune --forget, and tune again)",
            RuntimeWarning,
            stacklevel=2,
        )
        return []


def profiles_of(file_system: FileSystem, profiles: list[Profile]) -> list[Profile]:
    """Return the profiles of one file system."""
    return [each for each in profiles if each.file_system.is_same(file_system)]


def read(path: Path) -> list[Profile]:
    """Return the profiles in a file.

    Raises
    ------
    OSError
        The file cannot be read, or is not a regular file.
    ValueError
        The file does not contain profiles.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        text = file.read(_MAX_FILE_NBYTES + 1)
    if len(text) > _MAX_FILE_NBYTES:
        raise ValueError(f"the file is longer than {_MAX_FILE_NBYTES} bytes")
    try:
        return _profiles_of(json.loads(text))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _open_nonblocking(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a FIFO without a writer would otherwise block a transfer.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _profiles_of(content: Any) -> list[Profile]:
    if not isinstance(content, dict) or not isinstance(content.get("profiles"), list):
        raise ValueError("the file has no list of profiles")
    version = content.get("version")
    if version == 1:
        raise ValueError(
            "the file has version 1, which does not distinguish profiles for reads and writes"
        )
    if version != VERSION:
        raise ValueError(f"the file's version is {version!r}, not {VERSION}")
    return [_parse(entry) for entry in content["profiles"]]


def _parse(entry: Any) -> Profile:
    try:
        file_system = FileSystem(**entry["file_system"])
        settings = Settings(**entry["settings"])
        direction, memory = entry["direction"], entry["memory"]
        found = dict(entry.get("found", {}))
    except (TypeError, KeyError, ValueError) as problem:
        raise ValueError(f"an entry is not a profile: {problem}") from None
    if direction not in DIRECTIONS:
        raise ValueError(f"an entry's direction is neither read nor write (got {direction!r})")
    texts = [memory, file_system.type, file_system.source, file_system.mount_point]
    texts += [name for name in (file_system.uuid, file_system.fsid) if name is not None]
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("an entry's file system or memory has a name that is not a string")
    limits = {
        "block_size": MAX_BLOCK_NBYTES,
        "queue_depth": MAX_QUEUE_DEPTH,
        "intra_op_parallelism": MAX_PARALLELISM,
    }
    for name, limit in limits.items():
        number = getattr(settings, name)
        if type(number) is not int or not 1 <= number <= limit:
            raise ValueError(
                f"an entry's {name} is not an integer between 1 and {limit} (got {number!r})"
            )
    if type(settings.single_submit) is not bool or type(settings.overlap_events) is not bool:
        raise ValueError("an entry has a flag that is neither true nor false")
    if settings.engine is not None and settings.engine not in _core.engine_names():
        raise ValueError(f"an entry has the unknown engine {settings.engine!r}")
    return Profile(file_system, settings, direction, memory, found)


def _uuid(descriptor: int) -> str | None:
    answer = bytearray(1 + _UUID_NBYTES)
    try:
        fcntl.ioctl(descriptor, _GET_UUID, answer)
    except OSError:  # a kernel before 6.9, or a file system without a UUID
        return None
    number = bytes(answer[1 : 1 + min(answer[0], _UUID_NBYTES)])
    return number.hex() if any(number) else None
