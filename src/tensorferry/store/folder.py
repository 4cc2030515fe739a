"""The directories of stores with named files: writing manifests and marker files, and removing leftovers.

The manifest of a store is in its first directory. Each further directory has a marker file ``tensorferry-RUN.part``
that names the first directory. RUN is the random identifier in the names of all files of one store object. The marker
is written before the manifest names any segment, so no other store treats the segments as leftovers.
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
    """Create a directory and its missing parents. Return the directories in which names were created."""
    with _error_context("making a directory for", Path(path)):
        made_in = publication.make_directory(Path(path), sync=False)
        Path(path).mkdir(exist_ok=True)  # raises if the path is a file
    return [os.fspath(each) for each in made_in]


def write_file(directory: str, name: str, data: bytes, run: str, *, sync: bool) -> None:
    """Write a file, which atomically replaces an existing one."""
    replace(write_temporary(directory, data, run, sync=sync), name)


def write_temporary(directory: str, data: bytes, run: str, *, sync: bool) -> Path:
    """Write a temporary file for :func:`replace`. On failure it is removed."""
    temporary = Path(directory, f".tensorferry-{run}.tmp")
    with _error_context("writing", temporary):
        publication.write_temporary(temporary, data, sync=sync)
    return temporary


def replace(temporary: Path, name: str) -> None:
    """Rename a temporary file to its final name, which replaces an existing file."""
    with publication.remove_on_error(temporary):
        rename(temporary, name)


def rename(path: Path, name: str, *, missing_ok: bool = False) -> None:
    """Rename a file within its directory, which replaces an existing file."""
    ignored = [FileNotFoundError] if missing_ok else []
    with _error_context("writing", path.with_name(name)), contextlib.suppress(*ignored):
        publication.rename(path, path.with_name(name))


def sync_directory(directory: str) -> None:
    """Make the names in a directory durable."""
    with _error_context("syncing the directory", Path(directory)):
        publication.sync_directory(Path(directory))


def mark_parts(directories: Sequence[str], run: str, *, sync: bool) -> None:
    """Write the marker file, which names the first directory, to all other directories."""
    data = json.dumps({"run": run, "first": os.fspath(Path(directories[0]).resolve())}).encode()
    for directory in directories[1:]:
        write_file(directory, f"tensorferry-{run}.part", data, run, sync=sync)


def remove(directory: str, name: str, *, sync: bool) -> None:
    """Remove a file, if it exists."""
    with _error_context("removing", Path(directory, name)):
        Path(directory, name).unlink(missing_ok=True)
    if sync:
        sync_directory(directory)


def read_previous(directory: str) -> list[Manifest]:
    """Return the manifest of the previous commit in a list, which is empty if it is missing or invalid.

    Raises
    ------
    StorageError
        The manifest cannot be read now, for example because too many files are open. It may be valid, so the segments
        that it may name must not be removed.
    """
    if manifests.PREVIOUS_NAME not in manifests.names_in(directory):
        return []
    try:
        return [manifests.read(os.fspath(Path(directory, manifests.PREVIOUS_NAME)))]
    except StorageError as error:
        if error.errno is not None:
            raise
        return []


def check(directories: Sequence[str]) -> list[Manifest]:
    """Return the manifests in directories: that of the last commit, and that of the previous commit if it is kept.

    Raises
    ------
    StorageError
        The directories have files of a store that a new store in them would ignore or remove.
    """
    committed = [
        manifests.read(os.fspath(Path(directories[0], name)))
        for name in manifests.names_in(directories[0])[:1]
    ]
    if committed:
        committed += read_previous(directories[0])
    runs = {manifest.run for manifest in committed}
    for directory in directories[1:]:
        if manifests.names_in(directory):
            raise StorageError(
                None,
                "this directory has a committed store, so it must be the first in the list of directories (remedy: "
                "give the directories in the order in which the store was created)",
                directory,
            )
    for directory in directories:
        for name in _names(directory):
            match = _PART.fullmatch(name)
            if match is None or match[1] in runs:
                continue
            first = _first_of(Path(directory, name))
            # If the marker names this first directory, the marker's store was killed before its first commit, and the
            # marker is a leftover.
            if first is None or Path(first) != Path(directories[0]).resolve():
                raise StorageError(
                    None,
                    f"this directory belongs to another store, whose first directory is {first!r} (remedy: give all "
                    "directories of that store in their order, or remove tensorferry-* here, which deletes its "
                    "tensors)",
                    directory,
                )
    return committed


def remove_others(directories: Sequence[str], run: str, committed: Sequence[Manifest]) -> None:
    """Remove all files of stores, except those of ``run`` and those that ``committed`` names. Errors are ignored."""
    named = {(one.directory, one.name) for manifest in committed for one in manifest.segments}
    parts = {run, *(manifest.run for manifest in committed)}
    for at, directory in enumerate(directories):
        for name in _names(directory):
            other_run = manifests.run_of(name)
            part = _PART.fullmatch(name)
            is_unused = other_run not in (None, run) and (at, name) not in named
            is_unused = is_unused or (part is not None and part[1] not in parts)
            if is_unused or _TEMPORARY.fullmatch(name):
                with contextlib.suppress(OSError):
                    Path(directory, name).unlink()


def remove_own(directories: Sequence[str], run: str, kept: Collection[str | None]) -> None:
    """Remove the segments of a run, except those with a name in ``kept``. Errors are ignored."""
    for directory in directories:
        with contextlib.suppress(OSError):
            for name in _names(directory):
                if manifests.run_of(name) == run and name not in kept:
                    Path(directory, name).unlink(missing_ok=True)


def _names(directory: str) -> list[str]:
    with _error_context("listing", Path(directory)):
        return os.listdir(directory)  # noqa: PTH208


def _first_of(path: Path) -> str | None:
    """Return the first directory of a store, which a marker file names. Return None if the marker is invalid."""
    with _error_context("reading", path):
        try:
            with manifests.open_untrusted(os.fspath(path)) as file:
                return str(json.loads(file.read(_MAX_PART_NBYTES))["first"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


def _error_context(action: str, path: Path) -> contextlib.AbstractContextManager[None]:
    return publication.storage_errors(path, f"{action} a store's files")
