"""The contents of a mirror's bucket: a folder of objects for each step, as on the drive.

``step_00001000/`` has the data files of a checkpoint, whose names no other save used, and ``.metadata``, which is
uploaded last and makes the folder a checkpoint. A checkpoint is set aside by giving its ``.metadata`` another name, so
that readers do not find it.

Nothing is recorded besides. Metadata say which data files belong together, and their trailer shows that our writer made
them. The names of our data files have a token. So an object is removed only as a part of a checkpoint of ours, or if it
has such a name and no metadata of its folder name it.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import obstore

from tensorferry._core import crc32
from tensorferry.checkpoint.steps import name_of, step_of
from tensorferry.checkpoint.storage.names import METADATA_NAME, OWN_NAME, TRAILER, TRAILER_NBYTES
from tensorferry.checkpoint.zipformat.unpickling import Unpickler, inert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from obstore import PutMode, UpdateVersion
    from obstore.store import ObjectStore

FAILURES = (obstore.exceptions.BaseError, OSError, ValueError)
"""The exceptions that obstore raises."""
_SHOWN = 1000  # the number of characters of an error's message that are reported
_SET_ASIDE = re.compile(r"\.tensorferry-abandoned\.[0-9a-f]{8}")
_OWN = re.compile(OWN_NAME.decode())


class StoredFile(NamedTuple):
    """A data file, as metadata describe it: its size, and the CRC-32s of its chunks as 32-bit numbers."""

    nbytes: int
    chunk_nbytes: int
    crcs: memoryview


def files_in(metadata: bytes) -> dict[str, StoredFile]:
    """Return the data files that metadata of our writer name.

    Raises
    ------
    ValueError
        The metadata are not those of our writer, or are damaged.
    """
    if not is_ours(metadata):
        raise ValueError("the metadata are damaged, or tensorferry has not written them")
    root = Unpickler(metadata, inert).load()
    (attributes,) = [each for each in root.parts if isinstance(each, dict)]
    extras = attributes["tensorferry"]
    return {
        name: StoredFile(nbytes, extras["chunk_nbytes"], memoryview(crcs).cast("I"))
        for name, (nbytes, crcs) in extras["files"].items()
    }


def is_ours(metadata: bytes) -> bool:
    """Return whether metadata are those that our writer has written."""
    trailer = TRAILER.fullmatch(metadata[-TRAILER_NBYTES:])
    return trailer is not None and crc32(metadata[:-TRAILER_NBYTES]) == int(trailer[1], 16)


def names_in(metadata: bytes) -> set[str]:
    """Return the names of our data files in metadata, which have them verbatim."""
    return {name.decode() for name in re.findall(OWN_NAME, metadata)}


class Bucket:
    """A mirror's place: an obstore store, and the prefix of all keys. Methods raise obstore's exceptions."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store = store
        self._prefix = f"{prefix}/" if prefix else ""
        # By version of the metadata, whether they are ours.
        self._ours: dict[tuple[int, Any], bool] = {}

    def key(self, step: int, name: str = METADATA_NAME) -> str:
        """Return the key of an object of a step's folder."""
        return f"{self._prefix}{name_of(step)}/{name}"

    def folders(self) -> dict[int, dict[str, Any]]:
        """Return the objects of each step's folder: the properties by name."""
        found: dict[int, dict[str, Any]] = {}
        for page in obstore.list(self.store, self._prefix or None):
            for each in page:
                folder, _, name = each["path"][len(self._prefix) :].partition("/")
                if (step := step_of(folder)) is not None:
                    found.setdefault(step, {})[name] = each
        return found

    def folder(self, step: int) -> dict[str, Any]:
        """Return the objects of a step's folder: the properties by name."""
        prefix = self.key(step, "")
        return {
            each["path"][len(prefix) :]: each
            for page in obstore.list(self.store, prefix)
            for each in page
        }

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, in order."""
        return sorted(step for step, names in self.folders().items() if METADATA_NAME in names)

    def read(self, step: int, name: str = METADATA_NAME) -> tuple[bytes, UpdateVersion] | None:
        """Return an object's contents and version; None if it does not exist."""
        try:
            found = obstore.get(self.store, self.key(step, name))
        except FileNotFoundError:
            return None
        version: Any = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]}
        return bytes(found.bytes()), version

    def write(self, step: int, name: str, content: bytes, mode: PutMode = "overwrite") -> None:
        """Write a small object."""
        obstore.put(self.store, self.key(step, name), content, mode=mode, use_multipart=False)

    def delete(self, step: int, names: Iterable[str]) -> None:
        """Delete objects of a step's folder, if they exist."""
        paths = [self.key(step, name) for name in names]
        if not paths:
            return
        try:
            obstore.delete(self.store, paths)
        # Stores other than S3 raise an error for a missing object, and may not delete the objects after it.
        except FileNotFoundError:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self.store, path)

    def set_aside(self, step: int) -> bool:
        """Set a checkpoint aside; return False if it is not ours."""
        found = self.read(step)
        if found is None:
            return True
        content, _ = found
        if not is_ours(content):
            return False
        name = f".tensorferry-abandoned.{crc32(content[:-TRAILER_NBYTES]):08x}"
        self.write(step, name, content)
        self.delete(step, [METADATA_NAME])
        return True

    def remove_superfluous(
        self,
        choose: Callable[[list[int]], Iterable[int]],
        stays_aside: Callable[[int], bool],
    ) -> None:
        """Remove checkpoints of ours.

        Parameters
        ----------
        choose : function of a list of steps
            Gets the steps that have checkpoints of ours, and returns those that are removed.
        stays_aside : function of a step
            Returns whether checkpoints of the step that were set aside stay.
        """
        folders = self.folders()
        for step in choose(
            [step for step, names in folders.items() if self._has_ours(step, names)]
        ):
            self._remove(step, METADATA_NAME)
        for step, names in folders.items():
            for name in filter(_SET_ASIDE.fullmatch, () if stays_aside(step) else names):
                self._remove(step, name)

    def _has_ours(self, step: int, names: dict[str, Any]) -> bool:
        if METADATA_NAME not in names:
            return False
        version = step, names[METADATA_NAME]["e_tag"]
        if version not in self._ours:
            found = self.read(step)
            self._ours[version] = found is not None and is_ours(found[0])
        return self._ours[version]

    def _remove(self, step: int, name: str) -> None:
        """Remove a checkpoint, if it is ours: its metadata first, then what no other metadata of the folder name."""
        found = self.read(step, name)
        if found is not None and is_ours(found[0]):
            self.delete(step, [name])
            self.remove_unnamed(step)

    def remove_unnamed(self, step: int, before: datetime | None = None) -> None:
        """Remove data files of ours that no metadata in their folder name, if they are older than a time."""
        names = self.folder(step)
        named: set[str] = set()
        for name in names:
            if name == METADATA_NAME or _SET_ASIDE.fullmatch(name):
                found = self.read(step, name)
                named |= names_in(found[0]) if found else set()
        gone = (
            name
            for name in names.keys() - named
            if _OWN.fullmatch(name) and (before is None or names[name]["last_modified"] < before)
        )
        self.delete(step, sorted(gone))

    def remove_leftovers(self, before: datetime, busy: int) -> None:
        """Remove what uploads and removals have left that ended early, from folders without a checkpoint.

        Leftovers beside a checkpoint go when its step is mirrored again or removed. The step ``busy`` is skipped.
        """
        for step, names in self.folders().items():
            if step != busy and METADATA_NAME not in names:
                self.remove_unnamed(step, before)


def describe_error(error: BaseException) -> str:
    """Return an exception's message in one line, without the debug output at the end of obstore's messages."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return f"{type(error).__name__}: {text[:_SHOWN]}"
