"""A directory with named files of stores: what is written beside the segments, and what may go.

The manifest of a store is in its first directory. In each further one a file ``tensorferry-RUN.part`` says which store
its segments are of, from before the manifest names them: so that nobody takes them for leftovers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.errors import StorageError
from tensorferry.store import manifest as manifests
from tensorferry.transfer import publication

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tensorferry.store.manifest import Manifest

_PART = re.compile(r"tensorferry-([0-9a-f]{16})\.part", re.ASCII)
_TEMPORARY = re.compile(r"\.tensorferry-[0-9a-f]{16}\.tmp", re.ASCII)
_MAX_PART_NBYTES = 1 << 16


def make_directory(path: str) -> list[str]:
    """Make a directory, and those above it, where missing; return in which ones that made names."""
    with _told("making a directory for", Path(path)):
        made_in = publication.make_directory(Path(path), sync=False)
        Path(path).mkdir(exist_ok=True)  # refused where a file has the name
    return [os.fspath(each) for each in made_in]


def write_file(directory: str, name: str, data: bytes, run: str, *, sync: bool) -> None:
    """Put a file in the place of one of the same name, at one stroke."""
    replace(write_temporary(directory, data, run, sync=sync), name)


def write_temporary(directory: str, data: bytes, run: str, *, sync: bool) -> Path:
    """Write a file that is to get its name by ``replace``; where this fails, nothing is there."""
    temporary = Path(directory, f".tensorferry-{run}.tmp")
    with _told("writing", temporary):
        publication.write_temporary(temporary, data, sync=sync)
    return temporary


def replace(temporary: Path, name: str) -> None:
    """Give a file its name, in place of another one."""
    named = temporary.with_name(name)
    with _told("writing", named), publication.removed_if_it_fails(temporary):
        publication.rename(temporary, named)


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    with _told("syncing the directory", Path(directory)):
        publication.sync_directory(Path(directory))


def mark_parts(directories: Sequence[str], run: str, *, sync: bool) -> None:
    """Say in all directories but the first one whose their segments are."""
    told = json.dumps({"run": run, "first": os.fspath(Path(directories[0]).resolve())}).encode()
    for directory in directories[1:]:
        write_file(directory, f"tensorferry-{run}.part", told, run, sync=sync)


def set_aside(directory: str) -> None:
    """Keep the manifest of the last commit as that of the one before."""
    with (
        _told("writing", Path(directory, manifests.PREVIOUS_NAME)),
        contextlib.suppress(FileNotFoundError),
    ):
        publication.rename(
            Path(directory, manifests.NAME), Path(directory, manifests.PREVIOUS_NAME)
        )


def remove(directory: str, name: str, *, sync: bool) -> None:
    """Remove a file, if it is there."""
    with _told("removing", Path(directory, name)):
        Path(directory, name).unlink(missing_ok=True)
    if sync:
        sync_directory(directory)


def bring_back(directory: str) -> None:
    """Make the commit before the last one again."""
    with _told("writing", Path(directory, manifests.NAME)):
        publication.rename(
            Path(directory, manifests.PREVIOUS_NAME), Path(directory, manifests.NAME)
        )


def previous_of(directory: str) -> list[Manifest]:
    """Return what the commit before has, if it is kept and can be used."""
    with contextlib.suppress(StorageError):
        return [manifests.read(os.fspath(Path(directory, manifests.PREVIOUS_NAME)))]
    return []


def check(directories: Sequence[str]) -> list[Manifest]:
    """Return what has been committed to directories: the last commit, and the one before if it is kept.

    StorageError where something that is in them would not be seen, or lost, by a store in these directories.
    """
    committed = [
        manifests.read(os.fspath(Path(directories[0], name)))
        for name in manifests.names_in(directories[0])[:1]
    ]
    if committed:
        committed += previous_of(directories[0])
    runs = {manifest.run for manifest in committed}
    for directory in directories[1:]:
        if manifests.names_in(directory):
            raise StorageError(
                None, "a store is committed in this directory: it must be the first one", directory
            )
    for directory in directories:
        for name in _names(directory):
            match = _PART.fullmatch(name)
            if match is None or match[1] in runs:
                continue
            first = _first_of(Path(directory, name))
            # Of a run that this first directory does not name: it was killed before it could be committed.
            if first is None or Path(first) != Path(directories[0]).resolve():
                raise StorageError(
                    None,
                    f"this directory has segments of a store whose first directory is {first!r}, and not this one's "
                    "(remedy: give the directories that it was made with, or remove tensorferry-* here)",
                    directory,
                )
    return committed


def remove_others(directories: Sequence[str], run: str, committed: Sequence[Manifest]) -> None:
    """Remove all files of stores but those of a run, and those that commits name. What fails is left."""
    named = {(one.directory, one.name) for manifest in committed for one in manifest.segments}
    parts = {run, *(manifest.run for manifest in committed)}
    for at, directory in enumerate(directories):
        for name in _names(directory):
            of = manifests.run_of(name)
            part = _PART.fullmatch(name)
            segment = of is not None and of != run and (at, name) not in named
            if segment or (part is not None and part[1] not in parts) or _TEMPORARY.fullmatch(name):
                with contextlib.suppress(OSError):
                    Path(directory, name).unlink()


def remove_own(directories: Sequence[str], run: str, kept: Collection[str | None]) -> None:
    """Remove the segments of a run but for some. What fails is left."""
    for directory in directories:
        with contextlib.suppress(OSError):
            for name in _names(directory):
                if manifests.run_of(name) == run and name not in kept:
                    Path(directory, name).unlink(missing_ok=True)


def _names(directory: str) -> list[str]:
    with _told("listing", Path(directory)):
        return os.listdir(directory)  # noqa: PTH208


def _first_of(path: Path) -> str | None:
    try:
        with manifests.opened(os.fspath(path)) as file:
            return str(json.loads(file.read(_MAX_PART_NBYTES))["first"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _told(what: str, path: Path) -> contextlib.AbstractContextManager[None]:
    return publication.storage_errors(path, f"{what} a store's files")
