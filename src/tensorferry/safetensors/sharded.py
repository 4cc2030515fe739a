"""Models over several files, with an index: as transformers and huggingface_hub write them, and whole at every moment.

All files are written first, without names. Then they take their places, one rename after the other, and the index comes
last: it says which files are the model. Where a new file takes the place of one of the old model, or the old model is
one file that readers would prefer to the new index, the old file gets another name before, and an interim index that
says so: thus every index that is ever there names the files of one model. Where the new model is one file, the interim
index says that this file counts as soon as it is there. What belonged to the old model is removed last.
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

from tensorferry.base.checks import decimal_nbytes, kept_path
from tensorferry.base.file_locks import lock_directory
from tensorferry.base.processes import lock_descriptors, when_dropped
from tensorferry.errors import StorageError
from tensorferry.safetensors import index, sources
from tensorferry.safetensors.checksums import SUFFIX
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.saving import (
    checked_metadata,
    entries_of,
    laid_out,
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

SINGLE_NAME, INDEX_NAME = index.SINGLE_NAME, index.INDEX_NAME

# What os.link() says where there are no links, or there is no file.
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOENT)
_DESCRIPTORS = 2  # of each file that has no place yet
# A turn is waited for so long: it is some operations with names.
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
        Of torch's tensors that are the same memory one is saved, and metadata tell the others' names; those that are
        not contiguous are saved as if they were.
    directory : str, bytes or PathLike
        Where; it is made if it is missing. Other files in it are left alone.
    max_shard_nbytes : int or str
        The most that the tensors of one file have; "5GB" is 5 * 10**9. A larger tensor gets a file of its own.
    metadata : dict of str to str, optional
        For each file's header, beside ``format``.
    sync : bool
        Whether all has survived a power cut once this returns.

    Returns
    -------
    dict of str to str
        The name of each tensor's file: "model.safetensors" if there is one, else "model-00001-of-00004.safetensors".

    Raises
    ------
    ValueError
        No dict of tensors, or a size that is none.
    RuntimeError
        Tensors share memory, and none of them has all of it.
    SafetensorError, StorageError, OSError
        As for :func:`tensorferry.safetensors.saving.save_file`. The model that was there has stayed.

    Notes
    -----
    Whatever ends the process, the index names the files of the old model or the new one. Others that read the old model
    meanwhile must have opened its files before. Of two saves to one directory at the same time the one that ends last
    counts; each is whole. (On file systems without flock() on directories, such as NFS, they are not told apart.)
    """
    limit = decimal_nbytes(max_shard_nbytes, "max_shard_nbytes")
    checked_metadata(metadata)
    own = {"format": "pt" if _is_torchs(state) else "np", **(metadata or {})}
    if _is_torchs(state):
        state, own = without_duplicates(state, own)  # type: ignore[assignment]
    shards = split(entries_of(state, contiguous=False), limit)
    with Model(directory, sync=sync) as model:
        model.check_count(len(shards))
        for name, entries in shards.items():
            header, ordered, nbytes = laid_out(entries, own)
            with model.add(name, nbytes) as file:
                write_entries(file, header, ordered)
        weight_map = {entry.name: name for name, entries in shards.items() for entry in entries}
        total_nbytes = sum(entry.nbytes for entries in shards.values() for entry in entries)
        model.commit(None if len(shards) == 1 else index_of(weight_map, total_nbytes))
    return weight_map


def split(entries: Iterable[TensorToSave], limit: int) -> dict[str, list[TensorToSave]]:
    """Return the tensors of each file by its name, as huggingface_hub splits them: in their order."""
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
    """Return the text of an index, as transformers writes it."""
    index = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(weight_map)}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


class Model:
    """A context manager: files that become a model in a directory together, or not at all if the block raises.

    Parameters
    ----------
    directory : str, bytes or PathLike
        Where; it is made if it is missing.
    sync : bool
        Whether it has survived a power cut when it has been committed.
    """

    def __init__(self, directory: AnyPath, *, sync: bool) -> None:
        self._directory = Path(kept_path(directory, "directory"))
        self._sync = sync
        self._files: dict[str, Replacement] = {}
        # One that nobody commits or aborts keeps no descriptors and no space.
        when_dropped(self, _abort, self._files)
        make_directory(self._directory)

    @property
    def names(self) -> set[str]:
        """The files that have no place yet."""
        return set(self._files)

    def check_count(self, count: int) -> None:
        """Refuse more files than can be open at a time.

        Raises
        ------
        ValueError
            They are too many.
        """
        most = descriptor_limit() // _DESCRIPTORS
        if count > most:
            raise ValueError(
                f"the model would be {count} files, and this process may have {most} in the making (remedies: larger "
                "files, or a higher limit of open files)"
            )

    @contextlib.contextmanager
    def add(self, name: str, nbytes: int, checksums: Checksums | None = None) -> Any:
        """Give a new file of so many bytes to the block, which is to be called so; it is complete behind it."""
        new = replacing(self._directory / name, sync=self._sync, nbytes=nbytes, sums=checksums)
        self._files[name] = new
        with new.named():
            yield new.file
            new.finish()

    def place(self) -> None:
        """Let all files take their places, one after the other, and leave all else as it is."""
        own = self._directory.resolve()
        for name in list(self._files):
            new = self._files.pop(name)
            # Behind a symbolic link its name is in another directory.
            new.commit(sync_names=Path(new.target).parent != own)
        self._sync_names()

    def commit(self, index: str | None, placed: Iterable[str] = ()) -> None:
        """Let all files take their places, and the index with this text; without one, a single file is all.

        Files that are ``placed`` already, by others, belong to the new model as well.

        Raises
        ------
        OSError
            Not all could be put in their places. The index that is there names the files of one model.
        """
        with _turn(self._directory):
            old = _old_model(self._directory)
            has_told = self._set_aside(old, one_file=index is None)
            old.names.difference_update(self._files, placed)
            self.place()
            if index is not None:
                self._write_index(index)
            elif not has_told:
                (self._directory / INDEX_NAME).unlink(missing_ok=True)
            self._sync_names()
            self._remove(old.names)
            self._sync_names()  # of an old single file, too, which readers would prefer to the index
            if index is None and not any((self._directory / name).exists() for name in old.names):
                # Until then it says which of the files counts.
                (self._directory / INDEX_NAME).unlink(missing_ok=True)
                self._sync_names()

    def abort(self) -> None:
        """Give all files up that have no place yet."""
        _abort(self._files)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _set_aside(self, old: _Old, *, one_file: bool) -> bool:
        """Give other names to files of the old model that new ones replace or that readers would prefer, and say so."""
        model = set(old.weights.values())
        in_the_way = model & {*self._files, SINGLE_NAME}
        if one_file:  # one rename is all, where nothing else is there; or none, where others have placed their files
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
                    _link((self._directory / name).resolve(), self._directory / other)
                except OSError as error:
                    if error.errno not in _NO_LINK:
                        raise
                    if name not in self._files:
                        continue  # it has its name until the new index is there
                # Where there is no such file, no model is better than a mixture of two.
                aside[name] = other
            self._sync_names()
            weights = {tensor: aside.get(name, name) for tensor, name in old.weights.items()}
            metadata = {**old.metadata, index.COMING: sorted(self._files)}
            self._write_index(json.dumps({"metadata": metadata, "weight_map": weights}))
        except OSError:
            if _index_names(self._directory).isdisjoint(aside.values()):
                self._remove(aside.values())
            raise  # else it has its place, and only its name may not be durable
        old.names.update(aside.values())
        if SINGLE_NAME in aside and not one_file:
            (self._directory / SINGLE_NAME).unlink()
            self._sync_names()
        return True

    def _write_index(self, text: str) -> None:
        with Replacement(self._directory / INDEX_NAME, sync=self._sync) as new:
            new.file.write_bytes(text.encode())

    def _remove(self, names: Iterable[str]) -> None:
        # A save has succeeded even if what it replaces cannot be removed.
        for name in names:
            for each in (name + SUFFIX, name):
                with contextlib.suppress(OSError):
                    (self._directory / each).unlink()

    def _sync_names(self) -> None:
        if self._sync:
            sync_directory(self._directory)


class _Old(NamedTuple):
    """The model that is there.

    Attributes
    ----------
    metadata, weights : dict
        What its index says.
    names : set of str
        Its files, and those that were to replace them.
    has_index : bool
        Whether there is one, of whatever kind.
    """

    metadata: dict[str, Any]
    weights: dict[str, str]
    names: set[str]
    has_index: bool


def _old_model(directory: Path) -> _Old:
    files, _ = index.names_in(directory)
    # Ones set aside by a save that was killed before it could remove them are nobody's, whatever the index says.
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
    except (SafetensorError, OSError):
        pass
    coming = metadata.pop(index.COMING, [])
    named = [*weights.values(), *(coming if isinstance(coming, list) else [])]
    names |= {name for name in named if _is_ones_own(name)}
    # Else there is no model that readers agree on.
    with contextlib.suppress(SafetensorError, OSError):
        weights = _model_of(directory)
    return _Old(metadata, weights, names, has_index)


def _model_of(directory: Path) -> dict[str, str]:
    """Return which file of a directory has each tensor of its model, if that is in files of a model's names."""
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
    """Return the files that the index names, none if there is no index."""
    try:
        return set(index.read(directory / INDEX_NAME)[0].values())
    except (SafetensorError, OSError):
        return set()


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Wait until nobody else is in such a block for a directory; where it cannot be locked, do not.

    Raises
    ------
    StorageError
        Somebody stays there for long.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    lock_descriptors.add(descriptor)
    try:
        deadline = time.monotonic() + _MAX_WAIT_SECONDS
        while lock_directory(descriptor) is False:
            if time.monotonic() > deadline:
                raise StorageError(
                    errno.ETIMEDOUT,
                    f"another save has been about to give its files their names for {_MAX_WAIT_SECONDS:.0f} seconds "
                    "(is it stopped, or its drive stuck?)",
                    str(directory),
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        lock_descriptors.unlock(descriptor, lambda: fcntl.flock(descriptor, fcntl.LOCK_UN))


def _abort(files: dict[str, Replacement]) -> None:
    with contextlib.ExitStack() as whatever_happens:
        while files:
            whatever_happens.callback(files.popitem()[1].abort)


def _link(path: Path, name: Path) -> None:
    name.hardlink_to(path)


def _is_ones_own(name: Any) -> bool:
    """Return whether an index may have a file of this name removed: one of the format, beside it."""
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _is_torchs(state: Any) -> bool:
    first = next(iter(state.values()), None) if hasattr(state, "values") else None
    return type(first).__module__.partition(".")[0] != "numpy"
