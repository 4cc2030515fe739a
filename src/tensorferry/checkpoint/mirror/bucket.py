"""What a mirror has in its bucket: checkpoints, and records of what is on its way there, or about to go.

``step_00001000/`` is the local folder of that name: data files, whose names no other save used, then ``.metadata``,
from which on it counts. Which objects are the mirror's is said by records, ``.tensorferry-mirror/step_00001000/ID/``,
where the ID of a save is made of its metadata:

========================  ==============================================================================
``rank-0.json``           the first rank uploads what this lists; the others may upload their files, too
``rank-N.json``           rank N does; it signs that again and again while it lives
``manifest.json``         all objects of the save
``removed.json``          they are about to be removed
``metadata``              a checkpoint that was set aside: its ``.metadata``
========================  ==============================================================================

A record comes before what it lists. One of a rank goes when the save is committed, or its objects have gone: so what a
dead process left is found by what is listed, and nothing else is ever removed (:meth:`Bucket.tidy`).
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
"""What obstore raises."""
_SHOWN = 1000

Records = dict[int, dict[str, dict[str, Any]]]
"""Of each step, of each save: the names of its records, with ETag and time."""


class Bucket:
    """Where a mirror is: a store of obstore's, and the prefix of all its keys. Failures are obstore's own."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store = store
        self._prefix = f"{prefix}/" if prefix else ""

    def key(self, key: str) -> str:
        """Return what the store calls an object."""
        return self._prefix + key

    def objects(self, folder: str) -> Iterator[tuple[str, ObjectMeta]]:
        """Return the objects of a folder, with their keys."""
        for page in obstore.list(self.store, self.key(folder)):
            for each in page:
                yield each["path"][len(self._prefix) :], each

    def read(self, key: str) -> tuple[bytes, UpdateVersion] | None:
        """Return an object, and which version of it that is; None if there is none."""
        try:
            found = obstore.get(self.store, self.key(key))
        except FileNotFoundError:
            return None
        version: UpdateVersion = {}
        if found.meta["e_tag"]:
            version["e_tag"] = found.meta["e_tag"]
        if found.meta["version"]:
            version["version"] = found.meta["version"]
        return bytes(found.bytes()), version

    def write(self, key: str, content: bytes, mode: PutMode = "overwrite") -> None:
        """Write a small object."""
        obstore.put(self.store, self.key(key), content, mode=mode, use_multipart=False)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, if they are there."""
        paths = [self.key(each) for each in keys]
        if not paths:
            return
        try:
            obstore.delete(self.store, paths)
        except FileNotFoundError:  # other stores than S3 say so, and some may stay
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self.store, path)

    def steps(self) -> list[int]:
        """Return the steps of which there are checkpoints, in order."""
        parts = (key.partition("/") for key, _ in self.objects(""))
        steps = (step_of(folder) for folder, _, name in parts if name == METADATA_NAME)
        return sorted(step for step in steps if step is not None)

    def records(self, folder: str = "") -> Records:
        """Return which records there are, of all steps or of one folder."""
        found: Records = {}
        for key, meta in self.objects(_RECORDS + folder):
            match = _RECORD.fullmatch(key)
            if match and (step := step_of(match[1])) is not None:
                saves = found.setdefault(step, {})
                saves.setdefault(match[2], {})[match[3]] = (meta["e_tag"], meta["last_modified"])
        return found

    def records_of(self, step: int, save: str) -> dict[str, Any]:
        """Return which records there are of one save."""
        return self.records(f"/{name_of(step)}/{save}").get(step, {}).get(save, {})

    def read_record(self, step: int, save: str, name: str) -> dict[str, Any]:
        """Return what a record says. Of what it lists only names that data files have are believed."""
        found = self.read(_record(step, save, name))
        try:
            said = json.loads(found[0]) if found else {}
            listed = {str(each): int(nbytes) for each, nbytes in said.get("objects", {}).items()}
        except (ValueError, AttributeError, TypeError):  # it is nothing of ours
            said, listed = {}, {}
        ours = {
            name: each for name, each in listed.items() if re.fullmatch(OWN_NAME, name.encode())
        }
        return {**said, "objects": ours}

    def write_record(self, step: int, save: str, name: str, **said: Any) -> None:
        """Write a record."""
        self.write(_record(step, save, name), json.dumps(said).encode())

    def manifests(self) -> Iterator[tuple[int, str, bool]]:
        """Yield the step and the save of each checkpoint that mirrors made, and whether it was set aside."""
        for step, saves in self.records().items():
            for save, names in saves.items():
                if MANIFEST in names:
                    yield step, save, SET_ASIDE in names

    def tidy(self, step: int, own: str = "", alive_since: datetime | None = None) -> bool:
        """Remove the objects that a step's records list, but for those of its checkpoint, and for one set aside.

        Parameters
        ----------
        step : int
            The step.
        own : str
            The save that is on its way, which is left.
        alive_since : datetime, optional
            What ranks have signed since then may be on its way, and is left; None: all that ranks have signed.

        Returns
        -------
        bool
            Whether nothing was left for that.
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

    def give_up(self, step: int, save: str, rank: int) -> None:
        """Remove what a rank has uploaded, unless the save has been committed."""
        found = self.read(metadata_key(step))
        committed = found is not None and id_of(found[0]) == save
        manifest = [MANIFEST] if rank == 0 and not committed else []
        self.withdraw(step, save, [rank_record(rank), *manifest])

    def withdraw(self, step: int, save: str, names: list[str]) -> None:
        """Remove the objects that records of a save list, but for those of the step's checkpoint, and the records.

        That of the first rank goes when no other is left, since its absence says something to the others.
        """
        found = self.read(metadata_key(step))
        listed = {
            each
            for name in names
            if name != SET_ASIDE
            for each in self.read_record(step, save, name)["objects"]
        }
        going = listed.difference(names_in(found[0]) if found else ())
        self.delete(f"{name_of(step)}/{name}" for name in sorted(going))
        first = rank_record(0)
        self.delete(_record(step, save, name) for name in names if name != first)
        self.delete(_record(step, save, name) for name in names if name == first)

    def set_aside(self, step: int, save: str) -> None:
        """Let a checkpoint no longer count, and keep what belongs to it."""
        found = self.read(metadata_key(step))
        if found and id_of(found[0]) == save:
            self.write(_record(step, save, SET_ASIDE), found[0])
            self.delete([metadata_key(step)])

    def remove(self, step: int, save: str) -> None:
        """Remove a checkpoint: first that it counts, then its objects."""
        listed = self.read_record(step, save, MANIFEST)["objects"]
        self.write_record(step, save, REMOVED, objects=listed)
        found = self.read(metadata_key(step))
        if found and id_of(found[0]) == save:
            self.delete([metadata_key(step)])
        self.tidy(step)


def metadata_key(step: int) -> str:
    """Return the key whose object makes a step's checkpoint one."""
    return f"{name_of(step)}/{METADATA_NAME}"


def id_of(metadata: bytes) -> str:
    """Return what a save is called in records: all ranks know it without speaking with each other."""
    return hashlib.md5(metadata, usedforsecurity=False).hexdigest()[:16]


def names_in(metadata: bytes) -> list[str]:
    """Return the data files that metadata names."""
    return sorted({name.decode() for name in re.findall(OWN_NAME, metadata)})


def rank_of(name: str) -> int:
    """Return the rank that wrote a data file."""
    return int(name[2:].partition("_")[0])


def rank_record(rank: int) -> str:
    """Return what a rank's record is called."""
    return f"rank-{rank}.json"


def said(error: BaseException) -> str:
    """Return what an exception says in one line: obstore's name bucket, key and status, then what its makers want."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return f"{type(error).__name__}: {text[:_SHOWN]}"


def _record(step: int, save: str, name: str) -> str:
    return f"{_RECORDS}/{name_of(step)}/{save}/{name}"
