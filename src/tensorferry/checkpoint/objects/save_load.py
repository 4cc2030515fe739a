"""save() and load(): what people do with torch.save and torch.load, at the drive's speed and verified.

`save` has torch make the archive without its payloads (:mod:`tensorferry.checkpoint.zipformat.archive`) and writes
them in: the file is the one that torch would have written to a file object, byte for byte.

`load` has torch unpickle a skeleton of the archive that has a mark for each payload
(:mod:`tensorferry.checkpoint.objects.skeleton`). torch maps that file, and when it asks for a storage to be put where
it belongs (`torch.serialization.register_package`), the mark tells which one it is. Payloads are read ahead meanwhile
(:mod:`tensorferry.checkpoint.objects.payloads`), and each is verified before torch gets it.
"""

from __future__ import annotations

import contextlib
import mmap as mmap_module
import pickle
import threading
import types
from typing import TYPE_CHECKING, Any

import torch

import tensorferry
from tensorferry.base.checks import is_url
from tensorferry.checkpoint.errors import CheckpointError, cause_of
from tensorferry.checkpoint.objects.file_writer import FileWriter
from tensorferry.checkpoint.objects.payloads import OWN_FILES, ArchiveDirectory, Payloads
from tensorferry.checkpoint.objects.skeleton import Skeleton
from tensorferry.checkpoint.zipformat.archive import (
    Archive,
    UnknownArchiveError,
    archive_of,
    bytes_of,
)
from tensorferry.checkpoint.zipformat.pickles import MalformedError, screen
from tensorferry.safetensors.errors import LOOKED_AT_NBYTES, something_else
from tensorferry.transfer.plain import open_plain
from tensorferry.transfer.remote import checked_text
from tensorferry.transfer.replacement import Replacement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from tensorferry.base.checks import Path, Readable
    from tensorferry.transfer.replacement import Target


def save(obj: object, path: Path, *, sync: bool = True) -> None:
    """Save an object as torch.save does: faster, durable, and whole or not at all.

    Parameters
    ----------
    obj : object
        Anything that can be pickled; tensors on any device.
    path : str, bytes or PathLike
        The file. What is there stays until the new one is complete, and is then replaced at one stroke. A symbolic
        link is followed.
    sync : bool
        Whether the file has survived a power cut once this returns.

    Raises
    ------
    ValueError
        What is at the path is no regular file.
    StorageError, OSError
        The file could not be written: there is no space for it, for example. What was there has stayed.

    Notes
    -----
    torch.load reads it. It needs about 60 MiB of memory, whatever the object's size; tensors on NVIDIA GPUs pass
    through that, and for one on another device its own bytes come on top.
    """
    written(obj, path, sync=sync).commit()


def written(obj: object, path: Path, *, sync: bool, as_archive: bool = True) -> Target:
    """Write a file as :func:`save` does, and return it: all is on the drive, and it has yet to take its place.

    Without ``as_archive`` it has the format before torch 1.6.
    """
    if not as_archive:
        return _written_by_torch(obj, path, sync=sync, as_archive=False)
    try:
        archive, storages = _archive_and_storages(obj)
    except (UnknownArchiveError, RuntimeError):
        # There is no way without payloads in this torch, or for this object (quantized tensors). What is wrong with
        # the object itself is raised here.
        return _written_by_torch(obj, path, sync=sync, as_archive=True)
    sums = tensorferry.Checksums(segments=True)
    new = Replacement(path, sync=sync, reserve_nbytes=archive.nbytes, checksums=sums)
    with _given_up_if_it_fails(new), new.named():
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


def _written_by_torch(obj: object, path: Path, *, sync: bool, as_archive: bool) -> Target:
    file = FileWriter(path, sync=sync)
    with _given_up_if_it_fails(file):
        try:
            torch.save(obj, file, _use_new_zipfile_serialization=as_archive)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise cause_of(error) from None
        return file.finish()


@contextlib.contextmanager
def _given_up_if_it_fails(new: Target | FileWriter) -> Iterator[None]:
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
    """Load what :func:`save` or torch.save has saved: faster, and verified, which torch.load never does.

    Parameters
    ----------
    path : str, bytes or PathLike, or pair of store and key
        The file, or an object of a bucket: see :func:`tensorferry.open`.
    mmap : bool
        Map the file instead of reading it, as torch.load does; tensors' bytes are read when they are used, and are
        not verified.
    weights_only : bool
        Whether to refuse what could run code: anything but tensors, plain containers, and types that were declared
        safe. Set it to False for files from a source you trust.
    map_location : None, str, torch.device, dict or callable
        Where tensors go, as for torch.load.

    Returns
    -------
    object
        What was saved.

    Raises
    ------
    CheckpointError
        The file is damaged: bytes differ from what was saved. Or it is empty.
    StorageError, OSError
        It could not be read.
    pickle.UnpicklingError
        It holds what ``weights_only`` refuses.

    Notes
    -----
    Files in torch's older formats, and TorchScript, are left to torch.load. So is a file that has no checksums
    (written with ``torch.utils.serialization.config.save.compute_crc32`` off) in what concerns verification.
    """
    text = checked_text(path)
    options: dict[str, Any] = {"weights_only": weights_only, "map_location": map_location}
    if mmap and is_url(text):
        raise ValueError(f"mmap: {text!r} is an object of a bucket, which cannot be mapped")
    with _named(text), open_plain(text, buffered=True) as file:
        torchs: Any = file if is_url(text) else text
        begin = file.read(LOOKED_AT_NBYTES)
        if not begin:
            raise CheckpointError("it is empty", text)
        if other := something_else(begin):
            raise CheckpointError(other, text)
        if not begin.startswith(b"PK\3\4"):
            if weights_only:
                _screen_old(text, file)
            file.seek(0)
            return torch.load(torchs, mmap=mmap, **options)
        directory = ArchiveDirectory(text, file)
        if directory.foreign:
            directory.check_all()
        if weights_only:
            _screen(text, directory, torchs if directory.foreign or mmap else None)
        if directory.foreign or mmap:
            file.seek(0)
            return torch.load(torchs, mmap=mmap, **options)
        with Payloads(directory) as payloads, _Loading(directory, payloads) as loading:
            if callable(map_location):
                options["map_location"] = loading.filling(map_location)
            return torch.load(loading.path, mmap=True, **options)


def _screen(path: str, directory: ArchiveDirectory, torchs: Any) -> None:
    """Refuse what would crash torch.load(weights_only=True)."""
    found = [data for name, _, data in directory.contents if name.endswith("/data.pkl")]
    try:
        if torchs is not None:  # who may see other records
            found = [torch._C.PyTorchFileReader(torchs).get_record("data.pkl")]
        for pickled in found:
            screen(pickled)
    except MalformedError as error:
        raise CheckpointError(f"its pickle is damaged ({error})", path) from None
    except RuntimeError:  # torch says it in its own words
        return


def _screen_old(path: str, file: BinaryIO) -> None:
    """Do the same with the formats before torch 1.6: five pickles, then payloads."""
    with contextlib.ExitStack() as stack:
        if is_url(path):
            file.seek(0)
            data: Any = file.read()
        else:
            mapped = mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_READ)
            data = stack.enter_context(mapped)
        try:
            screen(data, 5)
        except MalformedError as error:
            raise CheckpointError(f"its pickle is damaged ({error})", path) from None


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Let failures to read a file that is open name its path."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(OWN_FILES):
            error.filename = path
        raise


def _archive_and_storages(obj: object) -> tuple[Archive, list[torch.UntypedStorage]]:
    """Return the archive that torch.save would write, and whose bytes its payloads are."""
    found: dict[str, Any] = {}

    class Pickler(pickle.Pickler):
        # torch derives its own from this one, with a persistent_id() that names the storages.
        def __init_subclass__(cls) -> None:
            name_of = cls.persistent_id

            def persistent_id(self: Any, item: Any) -> Any:
                name = name_of(self, item)
                if name is not None:
                    found[name[2]] = item
                return name

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    module = types.SimpleNamespace(__name__="pickle", Pickler=Pickler)
    archive = archive_of(obj, module)
    storages = {
        key: item._untyped_storage if isinstance(item, torch.TypedStorage) else item
        for key, item in found.items()
    }
    nbytes = {key: storage.nbytes() for key, storage in storages.items() if storage.nbytes() > 0}
    # By their names, in whatever order torch writes them.
    if dict(zip(archive.payload_keys, archive.payload_nbytes, strict=True)) != nbytes:
        raise UnknownArchiveError("payloads that are not the storages")
    return archive, [storages[key] for key in archive.payload_keys]


class _Loading:
    """A context manager: what puts payloads where torch has storages of a skeleton, in this thread."""

    def __init__(self, directory: ArchiveDirectory, payloads: Payloads) -> None:
        self._directory = directory
        self._payloads = payloads
        self._records = directory.payloads
        self._last: tuple[int, torch.UntypedStorage] | None = None
        marks = [(record.name, record.nbytes, k) for k, record in enumerate(self._records)]
        # Without a version of the format torch looks where records are; else it may compute that.
        contents = [one for one in directory.contents if not one[0].endswith("/.format_version")]
        self._skeleton = Skeleton([*contents, *marks])
        self.path = self._skeleton.path

    def filled(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return the payload for a storage of the skeleton, None for any other storage."""
        index = self._skeleton.mark_of(storage)
        if index is None:
            return None
        if self._last is None or self._last[0] != index:
            self._last = index, self._payloads.take(self._records[index])
        payload = self._last[1]
        if payload.nbytes() != storage.nbytes():
            record = self._records[index]
            raise self._directory.damaged(
                record, f"the pickle says it has not {record.nbytes} bytes"
            )
        return payload

    def filling(self, function: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        """Return a map_location that calls another with what has been filled."""

        def map_location(storage: torch.UntypedStorage, location: str) -> Any:
            payload = self.filled(storage)
            return function(storage if payload is None else payload, location)

        return map_location

    def __enter__(self) -> _Loading:
        self._outer = getattr(_thread, "loading", None)  # of an object that loads others
        _thread.loading = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.loading = self._outer
        self._skeleton.close()


_thread = threading.local()


def _restore(storage: Any, location: str) -> Any:
    """Put a storage where it belongs, for torch.load: None if it is not one that this module knows."""
    loading: _Loading | None = getattr(_thread, "loading", None)
    payload = loading.filled(storage) if loading is not None else None
    if payload is None:
        return None
    return torch.serialization.default_restore_location(payload, location)  # type: ignore[no-untyped-call]


# Before torch's own, which leave CPU storages as they are.
torch.serialization.register_package(0, lambda storage: None, _restore)  # noqa: ARG005
