"""The commits in the directories of a store: their manifests, and which files belong to them.

Commits are numbered. A commit writes a new manifest with the next number, and then removes those of the commits that
are not kept. Which commit is the previous one is a field of the last manifest, and does not depend on what other
manifests exist: a kill may leave some, or a power cut may bring them back. Files are removed only if they have a name
that only stores give, no kept manifest names them, and the directory belongs to this store.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from tensorferry.errors import StorageError
from tensorferry.store import manifest as manifests
from tensorferry.store.manifest import Manifest, StoredTensor
from tensorferry.store.tensors import TensorInfo, text_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tensorferry.store.folder import Folder
    from tensorferry.store.segments import Segment
    from tensorferry.store.transfers import KeptTensor


def filled_manifest(
    empty: Manifest,
    record: bytes,
    tensors: Mapping[str, KeptTensor],
    places: Mapping[Segment, tuple[int, str]],
) -> Manifest:
    """Return a manifest of tensors. ``places`` has the number of the directory and the name of each segment."""
    at = {segment: number for number, segment in enumerate(places)}
    stored = {
        name: StoredTensor(
            TensorInfo(text_of(info.dtype), *info[1:]), at[piece.segment], piece.offset, chunks
        )
        for name, (info, piece, chunks) in tensors.items()
    }
    return empty._replace(record=record, segments=tuple(places.values()), tensors=stored)


class Commits:
    """The commits of a store that owns its directories. The caller releases the folders.

    Raises
    ------
    StorageError
        Another store writes into a directory, or it has files that this store would ignore or remove.
    """

    def __init__(self, folders: Sequence[Folder]) -> None:
        self.run, self.store = os.urandom(8).hex(), os.urandom(8).hex()
        self.has_committed = False  # if False, the last commit is of another run
        self._synced = True  # whether the last commit is durable
        # All manifests that may exist, by their numbers: the names of their files, and the tensors if they are of this
        # run, which keeps their pieces. After a failed commit it is unknown whether its manifest exists.
        self._kept: dict[int, tuple[Collection[str], Mapping[str, KeptTensor]]] = {}
        self._folders = folders
        for folder in folders:
            folder.lock(self.run)
        existing = manifests.numbers_in(folders[0].names(), folders[0].path)
        self._next = max(existing, default=0) + 1
        self.last = None  # the number of the last commit
        if (found := manifests.find(folders[0])) is not None:
            self.last, self.store = found[0], found[1].store
            self._keep(found)
            try:
                self._keep(manifests.find(folders[0], previous=True))
            except StorageError as error:
                if error.errno is not None:  # it may be intact, but cannot be read now
                    raise
        self.empty = Manifest(self.store, self.run, len(folders))
        for number, folder in enumerate(folders):
            self._check_owner(folder, number)
        for number in existing:
            if number not in self._kept:
                folders[0].unlink(manifests.name_of(number))
        self.remove_leftovers(self.run)

    def _keep(self, found: tuple[int, Manifest] | None) -> None:
        if found is not None:
            self._kept[found[0]] = [name for _, name in found[1].segments], {}

    def _check_owner(self, folder: Folder, number: int) -> None:
        """Raise StorageError if a directory belongs to another store, or has another place in this one."""
        found = manifests.find(folder)
        if found and (found[1].store, found[1].directory) != (self.store, number):
            raise StorageError(
                None,
                "this directory belongs to another store, or the directories are in another order (remedy: give all "
                "directories of a store in the order in which it was created; or remove tensorferry-store-* here, "
                "which deletes the tensors)",
                folder.path,
            )

    def publish(
        self, manifest: Manifest, tensors: Mapping[str, KeptTensor], sync: bool, keep_previous: bool
    ) -> None:
        """Write the manifest of a new commit, and remove those of all commits that are not kept.

        Raises
        ------
        StorageError
            The manifest cannot be written. The last commit is this one, or still the one before.
        """
        number, previous = self._next, self.last if keep_previous else None
        data = manifests.to_bytes(manifest._replace(previous=previous))
        # Until a later commit succeeds, the pieces of this one and of the last one must be kept.
        self._kept[number] = [name for _, name in manifest.segments], tensors
        self._next += 1
        try:
            self._folders[0].write(manifests.name_of(number), data, sync=sync)
        except StorageError:
            with contextlib.suppress(StorageError):
                self.drop(self._kept.keys() - {number}, durably=True)
            raise
        # The other folders get theirs when the first commit exists. Until then they have no files that must be kept.
        for at, folder in enumerate(self._folders):
            if at > 0 and not self.has_committed and manifests.find(folder) is None:
                data = manifests.to_bytes(self.empty._replace(directory=at))
                folder.write(manifests.name_of(1), data, sync=sync)
        self.last, self._synced, self.has_committed = number, sync, True
        with contextlib.suppress(StorageError):  # the next commit tries again
            self.drop({number, previous})

    def drop(self, kept: Collection[int | None], *, durably: bool = False) -> None:
        """Remove the manifests of all commits except ``kept``, and files of other runs that only these name."""
        dropped = [number for number in self._kept if number not in kept]
        for number in dropped:
            self._folders[0].unlink(manifests.name_of(number))
        if dropped and durably and self._synced:
            self._folders[0].sync()
        for number in dropped:
            del self._kept[number]
        if dropped:
            self.remove_leftovers(self.run)

    def go_back(self) -> None:
        """Make the previous commit the last one again.

        Raises
        ------
        StorageError
            It was not kept, or a file is missing.
        """
        found = manifests.find(self._folders[0], previous=True)
        if found is None:
            raise not_found(self._folders[0])
        for folder in self._folders:
            folder.check_names(
                {name for at, name in found[1].segments if self._folders[at] is folder}
            )
        self.last = found[0]
        self.drop({found[0]}, durably=True)

    def remove_leftovers(self, run: str | None) -> None:
        """Remove the files that belong to no commit, except those of a run. The next store removes what is left."""
        kept = {name for names, _ in self._kept.values() for name in names}
        for folder in self._folders:
            with contextlib.suppress(StorageError):
                for name in folder.names() - kept:
                    if manifests.run_of(name) not in (None, run):
                        folder.unlink(name)


def not_found(folder: Folder) -> StorageError:
    """Return the exception for a commit that does not exist."""
    message = f"{os.strerror(errno.ENOENT)} (the commit of a store was not made, or not kept)"
    return StorageError(errno.ENOENT, message, folder.join(manifests.name_of(1)))
