"""save() and load(): torch.save and torch.load, but faster and verified.

A file of torch.save is a zip archive; its payloads are the bytes of the tensors' storages.

`save` lets torch write the archive without its payloads (:mod:`tensorferry.checkpoint.zipformat.archive`) and inserts
them: the file is byte for byte the one that torch would have written to a file object. If the tensors are many and
small, the work per tensor counts more than that per byte, and torch writes the whole archive.

`load` lets torch unpickle a skeleton of the archive with a mark for each payload
(:mod:`tensorferry.checkpoint.objects.skeleton`). torch maps the skeleton, and calls this module to restore each storage
to its device (`torch.serialization.register_package`). The mark at the beginning of the storage identifies the payload.
Payloads are read ahead meanwhile (:mod:`tensorferry.checkpoint.objects.payloads`), and each payload is verified before
torch gets it. If payloads are many and small, all are verified first, and the skeleton has them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import threading
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

import tensorferry
from tensorferry.base.checks import is_url
from tensorferry.checkpoint.errors import CheckpointError, cause_of
from tensorferry.checkpoint.garbage import collection_paused
from tensorferry.checkpoint.objects.file_writer import FileWriter
from tensorferry.checkpoint.objects.payloads import ArchiveDirectory, Payloads, are_small
from tensorferry.checkpoint.objects.skeleton import Skeleton
from tensorferry.checkpoint.zipformat.archive import (
    Archive,
    UnknownArchiveError,
    archive_of,
    bytes_of,
)
from tensorferry.safetensors import header
from tensorferry.safetensors.errors import SNIFFED_NBYTES, wrong_download
from tensorferry.transfer.publication import OWN_FILES
from tensorferry.transfer.python_files import open_python_file
from tensorferry.transfer.remote import checked_text
from tensorferry.transfer.replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorferry.base.checks import Path, Readable
    from tensorferry.transfer.replacement import Target

_BUFFER_NBYTES = 1 << 20


def save(obj: object, path: Path, *, sync: bool = True) -> None:
    """Save an object as torch.save does, but faster, durably and atomically.

    Parameters
    ----------
    obj : object
        Any object that can be pickled, with tensors on any device.
    path : str, bytes or PathLike
        The file. An existing file is unchanged until the new one is complete, and is then replaced atomically. A
        symbolic link is followed.
    sync : bool
        Whether the file must survive a power cut once this returns.

    Raises
    ------
    ValueError
        The path exists, and is not a regular file.
    StorageError, OSError
        The file could not be written, for example because the disk is full. An existing file is unchanged.

    Notes
    -----
    torch.load can read the file. A save needs about 60 MiB of memory for any size of the object. Tensors on NVIDIA GPUs
    are copied through that memory; a storage on another device additionally needs its own size.
    """
    if isinstance(obj, (str, os.PathLike)) and not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(
            f"path: expected a path, got {type(path).__name__} (the object comes first, then the path)"
        )
    write_uncommitted(obj, path, sync=sync).commit()


def write_uncommitted(obj: object, path: Path, *, sync: bool, as_archive: bool = True) -> Target:
    """Write a file as :func:`save` does, and return it, complete and on the drive, for the caller to commit.

    Without ``as_archive`` it has the format of torch.save before torch 1.6.
    """
    if not as_archive or _has_small_tensors(obj):
        return _write_by_torch(obj, path, sync=sync, as_archive=as_archive)
    try:
        archive, storages = _archive_and_storages(obj)
    except (UnknownArchiveError, RuntimeError):
        # This torch, or this kind of object (quantized tensors), does not support an archive without payloads. If the
        # object itself cannot be saved, the error is raised here.
        return _write_by_torch(obj, path, sync=sync, as_archive=True)
    sums = tensorferry.Checksums(segments=True)
    new = Replacement(path, sync=sync, reserve_nbytes=archive.nbytes, checksums=sums)
    with _abort_on_failure(new), new.naming_target():
        segments: list[int] = []
        for index, piece in enumerate(archive.pieces):
            new.file.write_bytes(piece, archive.fields(index, segments))
            if index < len(storages):
                storage: Any = storages[index]
                kept = storage.device.type in ("cpu", "cuda")
                segments.append(new.file.segment_count)
                new.file.write(bytes_of(storage if kept else storage.cpu()), kept=kept)
        new.finish()
    return new


def _write_by_torch(obj: object, path: Path, *, sync: bool, as_archive: bool) -> Target:
    file = FileWriter(path, sync=sync)
    with _abort_on_failure(file):
        buffered: Any = io.BufferedWriter(file, _BUFFER_NBYTES)
        module: Any = _pickle_module() if as_archive else pickle
        try:
            torch.save(obj, buffered, module, _use_new_zipfile_serialization=as_archive)
            buffered.flush()
        except RuntimeError as error:
            raise cause_of(error) from None
        return file.finish()


def _has_small_tensors(obj: object) -> bool:
    """Return whether an object consists of many tensors that are small on average."""
    try:
        tensors = [each for each in tree_leaves(obj) if isinstance(each, torch.Tensor)]
    except RecursionError:
        return False
    return all(
        type(each) in (torch.Tensor, torch.nn.Parameter)
        and each.layout is torch.strided
        and each.device.type in ("cpu", "cuda")
        for each in tensors
    ) and are_small(len(tensors), sum(each.untyped_storage().nbytes() for each in tensors))


@contextlib.contextmanager
def _abort_on_failure(new: Target | FileWriter) -> Iterator[None]:
    try:
        yield
    except BaseException:
        new.abort()
        raise


def load(
    path: Readable,
    *,
    mmap: bool = False,
    weights_only: bool = True,
    map_location: Any = None,
) -> Any:
    """Load a file of :func:`save` or torch.save: faster than torch.load, and verified, which torch.load never does.

    Parameters
    ----------
    path : str, bytes or PathLike, or pair of store and key
        The file, or an object in a bucket; see :func:`tensorferry.open`.
    mmap : bool
        Map the file instead of reading it, as torch.load does; the bytes of tensors are read on first access, and are
        not verified.
    weights_only : bool
        Whether to refuse anything that could run code: only tensors, plain containers, and types that were declared
        safe are accepted. Set it to False only for files from a trusted source.
    map_location : None, str, torch.device, dict or callable
        The devices for tensors, as for torch.load.

    Returns
    -------
    object
        The saved object.

    Raises
    ------
    CheckpointError
        The file is empty, or damaged: its bytes differ from those that were saved.
    StorageError, OSError
        The file could not be read.
    pickle.UnpicklingError
        The file holds an object that ``weights_only`` refuses.

    Notes
    -----
    Files in torch's older formats, and TorchScript, are loaded by torch.load. A file without checksums (written with
    ``torch.utils.serialization.config.save.compute_crc32`` off) is loaded without verification.
    """
    text = checked_text(path)
    options: dict[str, Any] = {"weights_only": weights_only, "map_location": map_location}
    if mmap and is_url(text):
        raise ValueError(f"mmap: {text!r} is an object in a bucket, which cannot be mapped")
    with _name_in_errors(text), open_python_file(text, buffered=True) as file:
        torchs: Any = file if is_url(text) else text
        begin = file.read(SNIFFED_NBYTES)
        if not begin:
            raise CheckpointError("it is empty", text)
        if other := wrong_download(begin):
            raise CheckpointError(other, text)
        if header.begins(begin):
            raise CheckpointError(
                "it is a safetensors file (remedy: load it with tensorferry.safetensors.torch.load_file)",
                text,
            )
        if begin.startswith(b"PK\3\4"):
            directory = ArchiveDirectory(text, file)
            if directory.foreign:
                directory.check_all()
            if not (directory.foreign or mmap):
                return _load_by_skeleton(directory, options)
        file.seek(0)
        return torch.load(torchs, mmap=mmap, **options)


def _load_by_skeleton(directory: ArchiveDirectory, options: dict[str, Any]) -> Any:
    with contextlib.closing(_skeleton_of(directory)) as skeleton:
        if not directory.payloads:
            # Without weights_only, code of the user may run, for any time.
            paused = collection_paused() if options["weights_only"] else contextlib.nullcontext()
            with paused:
                return torch.load(skeleton.path, **options)
        with Payloads(directory) as payloads, _Loading(directory, payloads, skeleton) as loading:
            if callable(map_location := options["map_location"]):
                options["map_location"] = loading.map_location_with(map_location)
            return torch.load(skeleton.path, mmap=True, **options)


@contextlib.contextmanager
def _name_in_errors(path: str) -> Iterator[None]:
    """Add the path to errors of reading an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(f"{OWN_FILES}/"):
            error.filename = path
        if error.errno == errno.EISDIR and error.filename == path:
            error.strerror = (
                f"{error.strerror} (remedy: load a folder with a checkpoint with torch.distributed.checkpoint.load "
                "and tensorferry.checkpoint.FileSystemReader)"
            )
        raise


def _pickle_module(found: dict[str, Any] | None = None) -> Any:
    """Return a module like pickle for torch.save, which enters an object's storages in ``found`` by their names."""

    class Pickler(pickle.Pickler):
        # torch derives its pickler from this class, and overrides persistent_id(), which names the storages.
        def __init_subclass__(cls) -> None:
            name_of = cls.persistent_id

            def persistent_id(self: Any, item: Any) -> Any:
                # torch names storages only. It is asked about each of some 20 objects for a tensor, which takes longer.
                if not isinstance(item, (torch.TypedStorage, torch.UntypedStorage)):
                    return None
                name = name_of(self, item)
                if name is not None and found is not None:
                    found[name[2]] = item
                return name

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

        def dump(self, obj: Any) -> None:
            with collection_paused():
                super().dump(obj)

    return types.SimpleNamespace(__name__="pickle", Pickler=Pickler)


def _archive_and_storages(obj: object) -> tuple[Archive, list[torch.UntypedStorage]]:
    """Return the archive that torch.save would write, and the storages of its payloads in the order of the archive."""
    found: dict[str, Any] = {}
    archive = archive_of(obj, _pickle_module(found))
    storages = {
        key: item._untyped_storage if isinstance(item, torch.TypedStorage) else item
        for key, item in found.items()
    }
    nbytes = {key: storage.nbytes() for key, storage in storages.items() if storage.nbytes() > 0}
    # Match storages to payloads by name, because the order depends on torch's version.
    if dict(zip(archive.payload_keys, archive.payload_nbytes, strict=True)) != nbytes:
        raise UnknownArchiveError("payloads that do not match the storages")
    return archive, [storages[key] for key in archive.payload_keys]


def _skeleton_of(directory: ArchiveDirectory) -> Skeleton:
    marks = [(record.name, record.nbytes, k) for k, record in enumerate(directory.payloads)]
    # Leave out the record with the format version: if it exists, torch may compute the offsets of records rather than
    # look them up. The computed offsets would be wrong, because payloads are not complete in the skeleton.
    contents = [one for one in directory.contents if not one[0].endswith("/.format_version")]
    return Skeleton([*contents, *marks])


class _Loading:
    """A context manager that replaces the storages of a skeleton with payloads, for loads of the current thread."""

    def __init__(self, directory: ArchiveDirectory, payloads: Payloads, skeleton: Skeleton) -> None:
        self._directory = directory
        self._payloads = payloads
        self._skeleton = skeleton
        self._last: tuple[int, torch.UntypedStorage] | None = None

    def payload_for(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return the payload for a storage of the skeleton; None for any other storage."""
        index = self._skeleton.mark_of(storage)
        if index is None:
            return None
        if self._last is None or self._last[0] != index:
            self._last = index, self._payloads.take(index)
        payload = self._last[1]
        if payload.nbytes() != storage.nbytes():
            record = self._directory.payloads[index]
            raise self._directory.damage_error(
                record, f"its size of {record.nbytes} bytes is not the one in the pickle"
            )
        return payload

    def map_location_with(self, function: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        """Return a map_location that calls ``function`` with the payload."""

        def map_location(storage: torch.UntypedStorage, location: str) -> Any:
            payload = self.payload_for(storage)
            return function(storage if payload is None else payload, location)

        return map_location

    def __enter__(self) -> _Loading:
        # A load may run inside another one, when an object is unpickled.
        self._outer = getattr(_thread, "loading", None)
        _thread.loading = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.loading = self._outer


_thread = threading.local()


def _restore(storage: Any, location: str) -> Any:
    """Restore a storage for torch.load; return None for a storage that is not in a skeleton."""
    loading: _Loading | None = getattr(_thread, "loading", None)
    payload = loading.payload_for(storage) if loading is not None else None
    if payload is None or location == "cpu":
        return payload
    return torch.serialization.default_restore_location(payload, location)  # type: ignore[no-untyped-call]


# Priority 0 comes before torch's own restore functions, which return CPU storages unchanged.
torch.serialization.register_package(0, lambda storage: None, _restore)  # noqa: ARG005
