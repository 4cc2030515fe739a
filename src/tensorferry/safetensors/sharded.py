"""Models in several files with an index, as transformers and huggingface_hub write them. A save is crash-safe.

All files are first written without names. In a folder without a model they get the names that Hugging Face's libraries
use, and then the index is written. Elsewhere no file of the old model is replaced: each file gets a name with the token
of the save (``model-tf0123456789abcdef-00001-of-00002.safetensors``), and one rename replaces the index. At last the
files that the old index named are removed, and those with the tokens of saves that were killed.

Transformers prefers a ``model.safetensors`` to the index. So it remains the model until it is removed, after the index
was written; and where there is no index, a new model in one file replaces it by one rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.base.checks import absolute_path, decimal_nbytes
from tensorferry.base.file_locks import lock_directory
from tensorferry.base.processes import LockedFile, when_dropped
from tensorferry.errors import StorageError
from tensorferry.safetensors import index
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.index import INDEX_NAME, SINGLE_NAME
from tensorferry.safetensors.saving import (
    checked_metadata,
    entries_of,
    lay_out,
    replacing,
    without_duplicates,
    write_entries,
)
from tensorferry.transfer import sidecars
from tensorferry.transfer.publication import check_renames, make_directory, sync_directory
from tensorferry.transfer.replacement import Replacement
from tensorferry.transfer.runtime import descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tensorferry.base.checks import Path as AnyPath
    from tensorferry.safetensors.saving import TensorToSave
    from tensorferry.transfer.checksums import Checksums

# The descriptors of each file that has no name yet: the file and its directory stay open.
_DESCRIPTORS = 2
# How long a save waits for the commit of another save, which consists of a few renames and removals.
_MAX_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.005


def save_sharded(
    state: Mapping[str, Any],
    directory: AnyPath,
    max_shard_nbytes: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = False,
) -> dict[str, str]:
    """Save a model's tensors to files of limited size, with an index, as transformers' save_pretrained does.

    Parameters
    ----------
    state : dict of str to torch.Tensor or numpy.ndarray
        The tensors. Of several torch tensors in the same memory one is saved, and the metadata map the others' names to
        it. Tensors that are not contiguous are saved by way of a contiguous copy.
    directory : str, bytes or PathLike
        The directory, which is created if it does not exist. Other files in it are not touched.
    max_shard_nbytes : int or str
        The maximum size of the tensors in one file; "5GB" is 5 * 10**9. A larger tensor gets a separate file.
    metadata : dict of str to str, optional
        Metadata for each file's header, in addition to ``format``.
    sync : bool
        Whether all files survive a power cut once this returns.

    Returns
    -------
    dict of str to str
        The file name of each tensor: "model.safetensors" if there is one file, and a name such as
        "model-00001-of-00004.safetensors" if the directory had no model. Otherwise the name has a token that no other
        save has: "model-tf0123456789abcdef-00001-of-00004.safetensors".

    Raises
    ------
    ValueError
        The argument is not a dict of tensors, or the size is invalid.
    RuntimeError
        Tensors share memory, and none of them covers all of it; or they are different views of it, such as a matrix and
        its transpose.
    SafetensorError, StorageError, OSError
        As for :func:`tensorferry.safetensors.saving.save_file`. The old model remains.

    Notes
    -----
    If the process ends at any time, for any reason, the directory has either the old model or the new one, for
    :func:`tensorferry.safetensors.plans.load_files` and for transformers. Removed are the files of the old model, which
    are model.safetensors, the files that model.safetensors.index.json names and the files of ranks; and files with the
    tokens of other saves. Of two concurrent saves to one directory, the one that finishes last wins, and its model is
    complete. The saves are synchronized with flock() on the directory. On file systems without such locks, such as NFS,
    they are not.
    """
    limit = decimal_nbytes(max_shard_nbytes, "max_shard_nbytes")
    checked_metadata(metadata)
    own = {"format": "pt" if _is_torch_state(state) else "np", **(metadata or {})}
    if _is_torch_state(state):
        state, own = without_duplicates(state, own, equal=True)  # type: ignore[assignment]
    shards = split(entries_of(state, contiguous=False), limit)
    with Model(directory, sync=sync) as model:
        model.check_count(len(shards))
        for name, entries in shards.items():
            header, ordered, nbytes = lay_out(entries, own)
            with model.add(name, nbytes) as file:
                write_entries(file, header, ordered)
        weights = {entry.name: name for name, entries in shards.items() for entry in entries}
        total_nbytes = sum(entry.nbytes for entries in shards.values() for entry in entries)
        return model.commit(weights, total_nbytes)


def split(entries: Iterable[TensorToSave], limit: int) -> dict[str, list[TensorToSave]]:
    """Split tensors into files, in their order, as huggingface_hub does. Return each file's tensors by its name."""
    shards: list[list[TensorToSave]] = []
    current: list[TensorToSave] = []
    nbytes = 0
    for entry in entries:
        if entry.nbytes > limit:
            shards.append([entry])
            continue
        if nbytes + entry.nbytes > limit:
            shards.append(current)
            current, nbytes = [], 0
        current.append(entry)
        nbytes += entry.nbytes
    if current or not shards:
        shards.append(current)
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


class Model:
    """The new files of a model, which are committed together. As a context manager, it aborts if the block raises.

    Parameters
    ----------
    directory : str, bytes or PathLike
        The directory of the model, which is created if it does not exist.
    sync : bool
        Whether the model survives a power cut once it has been committed.
    """

    def __init__(self, directory: AnyPath, *, sync: bool) -> None:
        self._directory = Path(absolute_path(directory, "directory"))
        self._sync = sync
        self._files: dict[str, Replacement] = {}
        self._token = secrets.token_hex(8)
        # An object that is dropped without commit() or abort() must release its descriptors and its space, too.
        when_dropped(self, _abort, self._files)
        make_directory(self._directory)
        # The model's files may get new names; the index is then replaced after they have been written.
        if (self._directory / INDEX_NAME).exists():
            check_renames(self._directory, replaced=True)

    @property
    def names(self) -> set[str]:
        """The names, as given to :meth:`add`, of the files that have not been renamed to their final names."""
        return set(self._files)

    def check_count(self, count: int) -> None:
        """Check that a model of ``count`` files can be written. All of them are open at the same time.

        Raises
        ------
        ValueError
            The limit of open files is too low.
        """
        most = descriptor_limit() // _DESCRIPTORS
        if count > most:
            raise ValueError(
                f"the model would have {count} files, and this process may write {most} at the same time (remedies: "
                "larger files, or a higher limit of open files)"
            )

    @contextlib.contextmanager
    def add(self, name: str, nbytes: int, checksums: Checksums | None = None) -> Any:
        """Add a file. As a context manager, yield the new file for writing, and finish it at the end of the block."""
        path = self._directory / self._first_name(name)
        new = replacing(path, sync=self._sync, nbytes=nbytes, sums=checksums)
        self._files[name] = new
        with new.naming_target():
            yield new.file
            new.finish()

    def place(self) -> None:
        """Rename all files to the names given to :meth:`add`, one after the other, and change nothing else."""
        self._place({name: name for name in self._files})

    def commit(
        self, weights: Mapping[str, str] | None, total_nbytes: int = 0, placed: Iterable[str] = ()
    ) -> dict[str, str]:
        """Make the new files the model: rename them, write the index, and remove the files of the old model.

        Parameters
        ----------
        weights : dict of str to str, or None
            The file of each tensor, by the name given to :meth:`add`. Without it no index is written, and none remains.
        total_nbytes : int
            The size of all tensors, for the index.
        placed : iterable of str
            Files of the new model that other ranks have already renamed to their final names.

        Returns
        -------
        dict of str to str
            The name of each tensor's file in the directory.

        Raises
        ------
        OSError
            A rename or the index failed, or an old model.safetensors could not be removed. The old model remains.
        """
        with _exclusive(self._directory):
            old = self._named_by(INDEX_NAME)
            files, indexes = index.names_in(self._directory)
            new, one_file = set(placed) - self.names, self.names == {SINGLE_NAME}
            usual = set(filter(index.is_usual, files)) - new
            is_free = INDEX_NAME not in indexes and usual <= ({SINGLE_NAME} if one_file else set())
            names = {name: name for name in self._files}
            if not is_free and weights and self._are_in_directory():
                names = {name: index.own_name(name, self._token) for name in names}
            weights = {tensor: names.get(name, name) for tensor, name in (weights or {}).items()}
            new.update(names.values())
            if not weights or new == {SINGLE_NAME}:
                self._place(names)
                self._unlink(INDEX_NAME)
            else:
                self._place_with_index(names, weights, total_nbytes)
            self._sync_names()
            if SINGLE_NAME not in new:
                self._unlink(SINGLE_NAME)  # until now transformers' readers have preferred it
                self._sync_names()
            others = (self._named_by(name) for name in indexes if name != INDEX_NAME)
            abandoned = set(filter(index.is_own, files)).difference(*others)
            ranks = filter(index.RANKS_FILE.fullmatch, files)
            self._remove(old.union(abandoned, ranks, {SINGLE_NAME}) - new)
            if one_file and SINGLE_NAME not in new:
                weights = self._without_index(weights)
            self._sync_names()  # so the removed files cannot come back after a power cut
            return weights

    def abort(self) -> None:
        """Discard all files that have not been renamed to their final names."""
        _abort(self._files)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _first_name(self, name: str) -> str:
        """Return the name for which a file is written. Only that of model.safetensors may be a symbolic link."""
        is_numbered = name.startswith("model-") and index.is_usual(name)
        return index.own_name(name, self._token) if is_numbered else name

    def _are_in_directory(self) -> bool:
        """Return whether each new file can get any name in the directory."""
        own = self._directory.resolve()
        return all(Path(new.target).parent == own for new in self._files.values())

    def _place(self, names: Mapping[str, str]) -> None:
        """Rename files, given by the names that :meth:`add` got, to their final names."""
        own = self._directory.resolve()
        for name, final in names.items():
            new = self._files[name]
            if final != self._first_name(name):
                new.retarget(final)
            # One sync of the directory, below, covers all names in it. Only the target of a symbolic link, which may be
            # in another directory, needs a separate sync.
            new.commit(sync_names=Path(new.target).parent != own)
            del self._files[name]
        self._sync_names()

    def _place_with_index(
        self, names: Mapping[str, str], weights: Mapping[str, str], total_nbytes: int
    ) -> None:
        """Rename files to their final names, which no file has, and replace the index; on failure undo that."""
        content = {"metadata": {"total_size": total_nbytes}, "weight_map": weights}
        new = Replacement(self._directory / INDEX_NAME, sync=self._sync)
        try:
            new.file.write_bytes(json.dumps(content, indent=2).encode())
            new.finish()
            self._place(names)
            new.commit(sync_names=False)
        except BaseException:
            new.abort()
            # Some network file systems rename a file and report a failure.
            with contextlib.suppress(OSError):
                if self._named_by(INDEX_NAME).isdisjoint(names.values()):
                    self._remove(names.values())
            raise

    def _without_index(self, weights: dict[str, str]) -> dict[str, str]:
        """Name the only file of the new model model.safetensors, if there are no other files of models.

        Return the name of each tensor's file.
        """
        if any(map(index.is_usual, index.names_in(self._directory)[0])):
            return weights
        [own] = set(weights.values())
        try:
            (self._directory / SINGLE_NAME).hardlink_to(self._directory / own)
        except OSError:  # the file system does not support hard links, for example
            return weights
        with contextlib.suppress(OSError):
            for name in (INDEX_NAME, own):
                self._sync_names()
                self._unlink(name)
        return dict.fromkeys(weights, SINGLE_NAME)

    def _named_by(self, name: str) -> set[str]:
        """Return the safetensors files that an index names; it may be missing or damaged, and then names none."""
        try:
            named = set(index.read(self._directory / name).values())
        except (SafetensorError, FileNotFoundError):
            return set()
        return {each for each in named if each.endswith(index.FILE_SUFFIX)}

    def _remove(self, names: Iterable[str]) -> None:
        # The save has succeeded even if an old file cannot be removed.
        for name in names:
            for each in (name, name + sidecars.SUFFIX):
                with contextlib.suppress(OSError):
                    self._unlink(each)

    def _unlink(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def _sync_names(self) -> None:
        if self._sync:
            sync_directory(self._directory)


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory during the block, if its file system supports locks on directories.

    Raises
    ------
    StorageError
        Another process holds the lock for too long.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held = LockedFile(descriptor, lambda: fcntl.flock(descriptor, fcntl.LOCK_UN))
    try:
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while lock_directory(descriptor) is False:
            if time.monotonic() > deadline:
                raise StorageError(
                    errno.ETIMEDOUT,
                    f"another save has held the lock of the directory for {_MAX_WAIT_SECONDS:.0f} seconds (is its "
                    "process stopped, or its drive stuck?)",
                    str(directory),
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        held.close()


def _abort(files: dict[str, Replacement]) -> None:
    # The stack calls every abort(), even if one of them raises.
    with contextlib.ExitStack() as stack:
        while files:
            stack.callback(files.popitem()[1].abort)


def _is_torch_state(state: Any) -> bool:
    first = next(iter(state.values()), None) if hasattr(state, "values") else None
    return type(first).__module__.partition(".")[0] != "numpy"
