"""Models in several files with an index, as transformers and huggingface_hub write them. A save is crash-safe.

All files are first written without names. Then each file is renamed to its final name, and the index, which defines
the files of the model, is written last.

Some files of the old model are in the way: files with names that the new model uses, too, and a single file, which
readers prefer to an index. Such a file is first renamed ("set aside"), and an interim index of the old model, which
refers to the file's new name, is written. So every index that exists at any time names the files of exactly one model.
If the new model is a single file, the interim index also lists that file, and readers use it as soon as it exists. The
files of the old model are removed last.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry.base.checks import absolute_path, decimal_nbytes
from tensorferry.base.file_locks import lock_directory
from tensorferry.base.processes import lock_descriptors, when_dropped
from tensorferry.errors import StorageError
from tensorferry.safetensors import index, sources
from tensorferry.safetensors.checksums import SUFFIX
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
from tensorferry.transfer.publication import make_directory, sync_directory
from tensorferry.transfer.replacement import Replacement
from tensorferry.transfer.runtime import descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tensorferry.base.checks import Path as AnyPath
    from tensorferry.safetensors.saving import TensorToSave
    from tensorferry.transfer.checksums import Checksums

# The errors of link(2) if the file does not exist, or cannot get another hard link in the directory: the file system
# does not support hard links, the file has too many, or a symbolic link leads to it from another file system.
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOENT)
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
        The file name of each tensor: "model.safetensors" if there is one file, else a name such as
        "model-00001-of-00004.safetensors".

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
    If the process ends at any time, for any reason, the index names either the files of the old model or those of the
    new one. A process that reads the old model during the save must have opened its files before the save began. Of two
    concurrent saves to one directory, the one that finishes last wins, and its model is complete. The saves are
    synchronized with flock() on the directory. On file systems without such locks, such as NFS, they are not.
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
        weight_map = {entry.name: name for name, entries in shards.items() for entry in entries}
        total_nbytes = sum(entry.nbytes for entries in shards.values() for entry in entries)
        model.commit(None if len(shards) == 1 else index_of(weight_map, total_nbytes))
    return weight_map


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


def index_of(weight_map: Mapping[str, str], total_nbytes: int) -> str:
    """Return the text of an index in transformers' form."""
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(weight_map)}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


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
        # An object that is dropped without commit() or abort() must release its descriptors and its space, too.
        when_dropped(self, _abort, self._files)
        make_directory(self._directory)

    @property
    def names(self) -> set[str]:
        """The names of the files that have not been renamed to their final names."""
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
        new = replacing(self._directory / name, sync=self._sync, nbytes=nbytes, sums=checksums)
        self._files[name] = new
        with new.naming_target():
            yield new.file
            new.finish()

    def place(self) -> None:
        """Rename all files to their final names, one after the other, and change nothing else."""
        own = self._directory.resolve()
        for name in list(self._files):
            new = self._files.pop(name)
            # One sync of the directory, below, covers all names in it. Only the target of a symbolic link, which may be
            # in another directory, needs a separate sync.
            new.commit(sync_names=Path(new.target).parent != own)
        self._sync_names()

    def commit(self, index: str | None, placed: Iterable[str] = ()) -> None:
        """Make the new files the model: rename them, write the index, and remove the files of the old model.

        Parameters
        ----------
        index : str or None
            The text of the index, or None if the new model is a single file.
        placed : iterable of str
            Files of the new model that other ranks have already renamed to their final names.

        Raises
        ------
        OSError
            A rename or the index failed. The index in the directory names the files of one model.
        """
        with _exclusive(self._directory):
            old = _find_old_model(self._directory)
            has_interim_index = self._set_aside(old, one_file=index is None)
            old.names.difference_update(self._files, placed)
            self.place()
            if index is not None:
                self._write_index(index)
            elif not has_interim_index:
                # No index of an old model may remain next to the new single file.
                (self._directory / INDEX_NAME).unlink(missing_ok=True)
            self._sync_names()
            # An old single file must be gone before the save ends: readers would prefer it to the index.
            self._remove(old.names)
            self._sync_names()  # so the removed files cannot come back after a power cut
            if index is None and not any((self._directory / name).exists() for name in old.names):
                # The interim index comes last: until the old files are gone, it tells readers which file to use.
                (self._directory / INDEX_NAME).unlink(missing_ok=True)
                self._sync_names()

    def abort(self) -> None:
        """Discard all files that have not been renamed to their final names."""
        _abort(self._files)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _set_aside(self, old: _OldModel, *, one_file: bool) -> bool:
        """Rename files of the old model that are in the way of the new one, and write an interim index.

        These are the files that new files will replace, and a single file, which readers would prefer to the new index.
        Return whether an interim index was needed.
        """
        model = set(old.weights.values())
        in_the_way = model & {*self._files, SINGLE_NAME}
        # A new single file that replaces an old one needs a single rename, which is atomic, and no interim index. If
        # other ranks have placed all files, not even this rename is left to do.
        if one_file:
            needed = bool(self._files) and (old.has_index or not model <= self._files.keys())
        else:
            needed = bool(in_the_way) or not old.has_index
        if not needed or not model:
            return False
        token = secrets.token_hex(4)
        aside: dict[str, str] = {}
        try:
            for name in sorted(in_the_way):
                other = f"{name.removesuffix('.safetensors')}.old-{token}.safetensors"
                try:
                    (self._directory / other).hardlink_to((self._directory / name).resolve())
                except OSError as error:
                    if error.errno not in _NO_LINK:
                        raise
                    if name not in self._files:
                        continue  # the old single file keeps its name until the new index exists
                # Where the link failed, the interim index names a file that does not exist. Readers then find no model,
                # which is better than a mixture of two.
                aside[name] = other
            self._sync_names()
            weights = {tensor: aside.get(name, name) for tensor, name in old.weights.items()}
            metadata = {**old.metadata, index.PENDING_FILES: sorted(self._files)}
            self._write_index(json.dumps({"metadata": metadata, "weight_map": weights}))
        except OSError:
            # If the interim index exists, it names these files, so they must remain. This is the case if only the step
            # that makes the index durable has failed. An index that cannot be read now may be the interim one, so the
            # files remain in this case, too.
            with contextlib.suppress(OSError):
                if _index_names(self._directory).isdisjoint(aside.values()):
                    self._remove(aside.values())
            raise
        old.names.update(aside.values())
        if SINGLE_NAME in aside and not one_file:
            (self._directory / SINGLE_NAME).unlink()
            self._sync_names()
        return True

    def _write_index(self, text: str) -> None:
        with Replacement(self._directory / INDEX_NAME, sync=self._sync) as new:
            new.file.write_bytes(text.encode())

    def _remove(self, names: Iterable[str]) -> None:
        # The save has succeeded even if an old file cannot be removed.
        for name in names:
            for each in (name + SUFFIX, name):
                with contextlib.suppress(OSError):
                    (self._directory / each).unlink()

    def _sync_names(self) -> None:
        if self._sync:
            sync_directory(self._directory)


class _OldModel(NamedTuple):
    """The model in the directory before a commit.

    Attributes
    ----------
    metadata : dict
        The metadata of its index.
    weights : dict
        The file name of each tensor.
    names : set of str
        The files to remove after the commit: the model's own, and those of an earlier save that did not finish.
    has_index : bool
        Whether a file with the name of an index exists, even an unreadable one.
    """

    metadata: dict[str, Any]
    weights: dict[str, str]
    names: set[str]
    has_index: bool


def _find_old_model(directory: Path) -> _OldModel:
    files, _ = index.names_in(directory)
    # Files that a killed save had set aside are removed in any case, as are the files of ranks.
    names = {name for name in files if index.is_aside(name) or index.RANKS_FILE.fullmatch(name)}
    if (directory / SINGLE_NAME).is_file():
        names.add(SINGLE_NAME)
    has_index = True
    weights: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    try:
        weights, metadata = index.read(directory / INDEX_NAME)
    except FileNotFoundError:
        has_index = False
    except SafetensorError:
        pass
    pending = metadata.pop(index.PENDING_FILES, [])
    named = [*weights.values(), *(pending if isinstance(pending, list) else [])]
    names |= {name for name in named if _is_removable(name)}
    # A SafetensorError, or a file that does not exist, means that the directory has no usable model: none at all, a
    # damaged one, or an ambiguous one. So there is no model to preserve until the new one is complete. Any other error,
    # for example too many open files, may hide a usable model. It ends the save before this process renames a file.
    try:
        weights = _files_by_tensor(directory)
    except SafetensorError:
        pass
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
    return _OldModel(metadata, weights, names, has_index)


def _files_by_tensor(directory: Path) -> dict[str, str]:
    """Return the file name of each tensor of a directory's model. Without an index, only the usual file names count."""
    paths, owners = sources.files_of(directory)
    if owners is None:
        known = [
            path
            for path in paths
            if (name := Path(path).name) == SINGLE_NAME
            or (index.ONE_OF_SEVERAL.fullmatch(name) and not index.RANKS_FILE.fullmatch(name))
        ]
        owners = {name: path for path in known for name in sources.look(path)[0].tensors}
    return {name: Path(path).name for name, path in owners.items()}


def _index_names(directory: Path) -> set[str]:
    """Return the files that the index names, or an empty set if no valid index exists."""
    try:
        return set(index.read(directory / INDEX_NAME)[0].values())
    except (SafetensorError, FileNotFoundError):
        return set()


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory during the block, if its file system supports locks on directories.

    Raises
    ------
    StorageError
        Another process holds the lock for too long.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock_descriptors.add(descriptor)
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
        lock_descriptors.unlock(descriptor, lambda: fcntl.flock(descriptor, fcntl.LOCK_UN))


def _abort(files: dict[str, Replacement]) -> None:
    # The stack calls every abort(), even if one of them raises.
    with contextlib.ExitStack() as stack:
        while files:
            stack.callback(files.popitem()[1].abort)


def _is_removable(name: Any) -> bool:
    """Return whether a save may remove a file that an index names: only safetensors files in the index's folder."""
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _is_torch_state(state: Any) -> bool:
    first = next(iter(state.values()), None) if hasattr(state, "values") else None
    return type(first).__module__.partition(".")[0] != "numpy"
