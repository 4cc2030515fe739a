"""The contents of a mirror's bucket: checkpoints, and records of objects that are being uploaded or removed.

``step_00001000/`` corresponds to the local folder of that name. The data files, whose names no other save used, are
uploaded first, then ``.metadata``, which makes the folder a checkpoint. Records, in the folder
``.tensorferry-mirror/step_00001000/ID/``, list the objects that belong to the mirror. The ID of a save is derived from
its metadata:

========================  ==============================================================================
``rank-0.json``           the first rank uploads the listed objects; other ranks may upload theirs, too
``rank-N.json``           rank N uploads the listed objects; it rewrites the record periodically
``manifest.json``         all objects of the save
``removed.json``          the listed objects are about to be removed
``metadata``              the ``.metadata`` of a checkpoint that was set aside
========================  ==============================================================================

A record is written before the objects that it lists. A rank's record is deleted when the save has been committed (its
``.metadata`` is in the bucket), or when the objects that the record lists have been deleted. So a rank's record that is
not rewritten any more shows the leftovers of a dead process. Objects that are in no record are never removed
(:meth:`Bucket.tidy`). A checkpoint is set aside by the removal of its ``.metadata`` alone, so that readers do not find
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

import obstore

from tensorferry.checkpoint.steps import name_of, step_of
from tensorferry.checkpoint.storage.names import METADATA_NAME, OWN_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from obstore import ObjectMeta, PutMode, UpdateVersion
    from obstore.store import ObjectStore

MANIFEST, REMOVED, SET_ASIDE = "manifest.json", "removed.json", "metadata"
_RECORDS = ".tensorferry-mirror"
_RECORD = re.compile(
    _RECORDS.replace(".", r"\.")
    + r"/([^/]+)/([0-9a-f]{16})/(rank-\d+\.json|manifest\.json|removed\.json|metadata)"
)

FAILURES = (obstore.exceptions.BaseError, OSError, ValueError)
"""The exceptions that obstore raises."""
_SHOWN = 1000  # the number of characters of an error's message that are reported

Records = dict[int, dict[str, dict[str, Any]]]
"""By step and save: the names of the save's records, with the ETag and time of each record."""


class Bucket:
    """A mirror's place: an obstore store, and the prefix of all keys. Methods raise obstore's exceptions."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store = store
        self._prefix = f"{prefix}/" if prefix else ""

    def key(self, key: str) -> str:
        """Return an object's full key in the store."""
        return self._prefix + key

    def objects(self, folder: str) -> Iterator[tuple[str, ObjectMeta]]:
        """Yield the objects of a folder with their keys."""
        for page in obstore.list(self.store, self.key(folder)):
            for each in page:
                yield each["path"][len(self._prefix) :], each

    def read(self, key: str) -> tuple[bytes, UpdateVersion] | None:
        """Return an object's contents and version; None if it does not exist."""
        try:
            found = obstore.get(self.store, self.key(key))
        except FileNotFoundError:
            return None
        version: Any = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]}
        return bytes(found.bytes()), version

    def write(self, key: str, content: bytes, mode: PutMode = "overwrite") -> None:
        """Write a small object."""
        obstore.put(self.store, self.key(key), content, mode=mode, use_multipart=False)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, if they exist."""
        paths = [self.key(each) for each in keys]
        if not paths:
            return
        try:
            obstore.delete(self.store, paths)
        # Stores other than S3 raise an error for a missing object, and may not delete the objects after it.
        except FileNotFoundError:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self.store, path)

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, in order."""
        parts = (key.partition("/") for key, _ in self.objects(""))
        steps = (step_of(folder) for folder, _, name in parts if name == METADATA_NAME)
        return sorted(step for step in steps if step is not None)

    def records(self, folder: str = "") -> Records:
        """Return the names of the records of all steps, or of those in one folder of records."""
        found: Records = {}
        for key, meta in self.objects(_RECORDS + folder):
            match = _RECORD.fullmatch(key)
            if match and (step := step_of(match[1])) is not None:
                saves = found.setdefault(step, {})
                saves.setdefault(match[2], {})[match[3]] = (meta["e_tag"], meta["last_modified"])
        return found

    def records_of(self, step: int, save: str) -> dict[str, Any]:
        """Return the names of the records of one save."""
        return self.records(f"/{name_of(step)}/{save}").get(step, {}).get(save, {})

    def read_record(self, step: int, save: str, name: str) -> dict[str, Any]:
        """Return a record's contents; object names that are not those of data files are left out."""
        found = self.read(_record(step, save, name))
        try:
            contents = json.loads(found[0]) if found else {}
            listed = {
                str(each): int(nbytes) for each, nbytes in contents.get("objects", {}).items()
            }
        except (ValueError, AttributeError, TypeError):  # another program wrote it
            contents, listed = {}, {}
        ours = {
            name: each for name, each in listed.items() if re.fullmatch(OWN_NAME, name.encode())
        }
        return {**contents, "objects": ours}

    def write_record(self, step: int, save: str, name: str, **contents: Any) -> None:
        """Write a record."""
        self.write(_record(step, save, name), json.dumps(contents).encode())

    def manifests(self) -> Iterator[tuple[int, str, bool]]:
        """Yield the step and the save of each mirrored checkpoint, and whether it was set aside."""
        for step, saves in self.records().items():
            for save, names in saves.items():
                if MANIFEST in names:
                    yield step, save, SET_ASIDE in names

    def tidy(self, step: int, own: str = "", alive_since: datetime | None = None) -> bool:
        """Remove the objects in a step's records, except those of the step's checkpoint and of a checkpoint set aside.

        Parameters
        ----------
        step : int
            The step.
        own : str
            The save that is being uploaded, which is skipped.
        alive_since : datetime, optional
            Saves with a rank's record of this time or later may still be uploaded, and are skipped; None skips every
            save with a rank's record.

        Returns
        -------
        bool
            Whether no save was skipped because of ``alive_since``.
        """
        found, all_settled = self.read(metadata_key(step)), True
        for save, records in self.records(f"/{name_of(step)}").get(step, {}).items():
            going = set(records)
            signed = [at for name, (_, at) in records.items() if name.startswith("rank-")]
            if found and save == id_of(found[0]):
                going -= {MANIFEST}
            elif save == own or (SET_ASIDE in going and REMOVED not in going):
                continue
            elif signed and (alive_since is None or max(signed) >= alive_since):
                all_settled = False
                continue
            self.withdraw(step, save, sorted(going))
        return all_settled

    def abandon(self, step: int, save: str, rank: int) -> None:
        """Remove the objects that a rank has uploaded, unless the save has been committed."""
        found = self.read(metadata_key(step))
        committed = found is not None and id_of(found[0]) == save
        manifest = [MANIFEST] if rank == 0 and not committed else []
        self.withdraw(step, save, [rank_record(rank), *manifest])

    def withdraw(self, step: int, save: str, names: list[str]) -> None:
        """Remove the objects in a save's records, except those of the step's checkpoint, and the records themselves.

        The first rank's record is deleted last: its absence tells other ranks that the save is committed or abandoned.
        """
        found = self.read(metadata_key(step))
        listed = {
            each
            for name in names
            if name != SET_ASIDE
            for each in self.read_record(step, save, name)["objects"]
        }
        going = listed.difference(names_in(found[0]) if found else ())
        self.delete(object_key(step, name) for name in sorted(going))
        first = {rank_record(0)}
        for records in ({*names} - first, {*names} & first):
            self.delete(_record(step, save, name) for name in sorted(records))

    def set_aside(self, step: int, save: str) -> None:
        """Remove a checkpoint's ``.metadata``, and keep its other objects."""
        found = self.read(metadata_key(step))
        if found and id_of(found[0]) == save:
            self.write(_record(step, save, SET_ASIDE), found[0])
            self.delete([metadata_key(step)])

    def remove(self, step: int, save: str) -> None:
        """Remove a checkpoint: its ``.metadata`` first, then the other objects."""
        listed = self.read_record(step, save, MANIFEST)["objects"]
        self.write_record(step, save, REMOVED, objects=listed)
        found = self.read(metadata_key(step))
        if found and id_of(found[0]) == save:
            self.delete([metadata_key(step)])
        self.tidy(step)


def metadata_key(step: int) -> str:
    """Return the key of the object that makes a step's folder a checkpoint."""
    return object_key(step, METADATA_NAME)


def object_key(step: int, name: str) -> str:
    """Return the key of an object of a checkpoint."""
    return f"{name_of(step)}/{name}"


def id_of(metadata: bytes) -> str:
    """Return a save's ID in records; all ranks can compute it without communication."""
    return hashlib.md5(metadata, usedforsecurity=False).hexdigest()[:16]


def names_in(metadata: bytes) -> list[str]:
    """Return the names of the data files in metadata."""
    return sorted({name.decode() for name in re.findall(OWN_NAME, metadata)})


def rank_of(name: str) -> int:
    """Return the rank that wrote a data file."""
    return int(name[2:].partition("_")[0])


def rank_record(rank: int) -> str:
    """Return the name of a rank's record."""
    return f"rank-{rank}.json"


def describe_error(error: BaseException) -> str:
    """Return an exception's message in one line, without the debug output at the end of obstore's messages."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return f"{type(error).__name__}: {text[:_SHOWN]}"


def _record(step: int, save: str, name: str) -> str:
    return f"{_RECORDS}/{name_of(step)}/{save}/{name}"
