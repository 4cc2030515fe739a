"""Writing the file of profiles. It is replaced atomically and keeps its permissions; symbolic links are followed.

A profile has the settings for one file system and one use. A use is a direction ("write" or "read") with a kind of
memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.transfer.profiles import VERSION, FileSystem, Profile, Use, read
from tensorferry.transfer.replacement import Target

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_writable(path: Path) -> None:
    """Check that profiles can be saved to a file, before minutes are spent on measurements.

    Raises
    ------
    OSError
        The profiles cannot be saved.
    """
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target.parent).close()
        if os.path.lexists(target) and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None


def store(path: Path, file_system: FileSystem, found: dict[Use, Profile | None]) -> list[Use]:
    """Store the profiles for some uses of a file system. For a use with None in ``found``, drop the stored profile.

    A file with invalid content is renamed, and a new one is written; if that fails, the invalid file gets its name
    back.

    Returns
    -------
    list
        The uses with a dropped profile.

    Raises
    ------
    OSError
        The file cannot be written. The old one remains.
    """
    path = _target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: Path | None = None
    with _locked(path.parent):
        try:
            profiles = read(path)
        except FileNotFoundError:
            profiles = []
        except ValueError as problem:
            kept = _unused_name(path)
            path.replace(kept)
            unusable = (
                f"{path}: the file of profiles is invalid ({problem}); it was renamed to {kept}"
            )
            profiles = []
        old = [p for p in profiles if p.file_system.is_same(file_system) and p.use in found]
        new = [profile for profile in found.values() if profile is not None]
        try:
            if old or new:
                _replace(path, [*(p for p in profiles if p not in old), *new])
        except BaseException:
            if kept is not None:
                kept.replace(path)
            raise
    if kept is not None:
        warnings.warn(unusable, RuntimeWarning, stacklevel=2)
    return [p.use for p in old if found[p.use] is None]


def forget(path: Path, file_system: FileSystem | None = None) -> list[Profile]:
    """Remove the profiles of a file system, or all profiles with the file itself. Return the removed profiles.

    Raises
    ------
    OSError
        The file cannot be changed, or is not a regular file.
    ValueError
        The file has invalid content, and a file system was given.
    """
    path = _target(path)
    if not os.path.lexists(path):
        return []
    with _locked(path.parent):
        try:
            profiles = read(path)
        except ValueError:
            if file_system is not None:
                raise
            profiles = []
        removed = [p for p in profiles if file_system is None or p.file_system.is_same(file_system)]
        kept = [each for each in profiles if each not in removed]
        if removed or not kept:
            _replace(path, kept)
    return removed


def _target(path: Path) -> Path:
    """Resolve symbolic links. Path.resolve() would raise RuntimeError for a loop of links."""
    return Path(os.path.realpath(path))


def _unused_name(path: Path) -> Path:
    """Return a name for a file with invalid content, which no file has."""
    names = (path.with_name(f"{path.stem[:40]}.unusable{n or ''}") for n in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def _replace(path: Path, profiles: list[Profile]) -> None:
    """Replace the file atomically, and keep its permissions. Remove it if there are no profiles."""
    if not profiles:
        path.unlink()
        return
    entries = [profile.as_dict() for profile in profiles]
    content = {"version": VERSION, "profiles": entries}
    _TextFile(path, json.dumps(content, indent=2) + "\n").commit()


class _TextFile(Target):
    """A file target that Python writes. A write by tensorferry would itself use the profiles that are replaced here."""

    def __init__(self, path: Path, text: str) -> None:
        self._text = text
        super().__init__(path, sync=True)

    def _open(self, descriptor: int) -> None:
        pass

    def _finish(self) -> None:
        self._new.write(self._text.encode(), sync=True)

    def _abort(self) -> None:
        pass


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory. This keeps other processes from replacing the file between reading and replacing it here."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems do not support locks on directories
            if error.errno not in (errno.EBADF, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
        yield
    finally:
        os.close(descriptor)
