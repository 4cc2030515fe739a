"""Profiles: settings that suit a file system, kept for those who ask for none.

``tensorferry tune`` writes them into one JSON file of the user's (``runtime.profiles_path()``), which is replaced as a
whole; handles and files without explicit settings look there. A file that cannot be used is warned of, not raised:
a profile saves time, and its loss must not end a training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.tuning.mounts import mount_of
from tensorferry.tuning.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

_VERSION = 1
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


@dataclass(frozen=True)
class Profile:
    """The settings for a file system, and how they were found."""

    file_system: FileSystem
    settings: Settings
    found: dict[str, Any] = field(default_factory=dict)


def file_system_of(path: Path) -> FileSystem:
    """Return the file system that holds a path.

    Raises
    ------
    OSError
        There is no such path, or the mount cannot be seen from here.
    """
    try:
        mount = mount_of(path)
    except LookupError as problem:
        raise OSError(errno.ENODEV, str(problem), str(path)) from None
    fsid = os.statvfs(path).f_fsid
    return FileSystem(
        type=mount["type"],
        uuid=_uuid(path if path.is_dir() else path.parent),
        fsid=f"{fsid:016x}" if fsid else None,
        source=mount["source"],
        mount_point=mount["mount_point"],
    )


def load(path: Path) -> list[Profile]:
    """Return the profiles of a file; none, with a warning, where it cannot be used."""
    try:
        return _load(path)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as problem:
        warnings.warn(
            f"cannot use the profiles in {path} ({problem}): default settings are used "
            "(remedy: tensorferry tune --forget)",
            RuntimeWarning,
            stacklevel=2,
        )
        return []


def profile_of(file_system: FileSystem, profiles: list[Profile]) -> Profile | None:
    """Return a file system's profile."""
    return next((each for each in profiles if each.file_system.is_same(file_system)), None)


def save(path: Path, profile: Profile) -> None:
    """Add a profile to a file, in place of the one of the same file system.

    A file that cannot be read is kept under another name.

    Raises
    ------
    OSError
        It cannot be written; the old one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            profiles = _load(path)
        except FileNotFoundError:
            profiles = []
        except ValueError as problem:
            kept = path.with_suffix(".unusable")
            path.replace(kept)
            warnings.warn(f"{path}: {problem}; kept as {kept}", RuntimeWarning, stacklevel=2)
            profiles = []
        others = [each for each in profiles if not each.file_system.is_same(profile.file_system)]
        _store(path, [*others, profile])


def forget(path: Path, file_system: FileSystem | None = None) -> list[Profile]:
    """Remove one file system's profile from a file, or all with the file itself; return what was removed."""
    if not path.exists():
        return []
    with _locked(path.parent):
        try:
            profiles = _load(path)
        except ValueError:
            if file_system is not None:
                raise
            profiles = []
        removed = [
            each
            for each in profiles
            if file_system is None or each.file_system.is_same(file_system)
        ]
        kept = [each for each in profiles if each not in removed]
        if kept:
            _store(path, kept)
        else:
            path.unlink()
    return removed


def _load(path: Path) -> list[Profile]:
    with path.open("rb") as file:
        text = file.read(_MAX_FILE_NBYTES + 1)
    if len(text) > _MAX_FILE_NBYTES:
        raise ValueError(f"it is longer than {_MAX_FILE_NBYTES} bytes")
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("profiles"), list):
        raise ValueError("it holds no list of profiles")
    if content.get("version") != _VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, not {_VERSION}")
    return [_parsed(entry) for entry in content["profiles"]]


def _parsed(entry: Any) -> Profile:
    try:
        file_system = FileSystem(**entry["file_system"])
        settings = Settings(**entry["settings"])
        found = dict(entry.get("found", {}))
    except (TypeError, KeyError, ValueError) as problem:
        raise ValueError(f"an entry is no profile: {problem}") from None
    numbers = (settings.block_size, settings.queue_depth, settings.intra_op_parallelism)
    limits = (1 << 31, 32768, 256)
    for number, limit in zip(numbers, limits, strict=True):
        if type(number) is not int or not 1 <= number <= limit:
            raise ValueError(f"an entry has {number!r} where a number from 1 to {limit} belongs")
    if type(settings.single_submit) is not bool or type(settings.overlap_events) is not bool:
        raise ValueError("an entry has a switch that is neither true nor false")
    if settings.engine is not None and settings.engine not in _core.engine_names():
        raise ValueError(f"an entry has the unknown engine {settings.engine!r}")
    return Profile(file_system, settings, found)


def _store(path: Path, profiles: list[Profile]) -> None:
    """Replace the file as a whole: who reads it sees the old one or the new one."""
    content = {
        "version": _VERSION,
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
    }
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".profiles-")
    try:
        with open(descriptor, "w") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep others from changing the file between reading and replacing it. The lock goes with the descriptor."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems lock no directories
            if error.errno not in (errno.EBADF, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
        yield
    finally:
        os.close(descriptor)


def _uuid(directory: Path) -> str | None:
    answer = bytearray(1 + _UUID_NBYTES)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.ioctl(descriptor, _GET_UUID, answer)
    except OSError:  # an older kernel, or a file system without one
        return None
    finally:
        os.close(descriptor)
    number = bytes(answer[1 : 1 + min(answer[0], _UUID_NBYTES)])
    return number.hex() if any(number) else None
