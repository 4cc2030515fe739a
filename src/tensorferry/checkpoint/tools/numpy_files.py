"""NumPy's .npy and .npz files: listed by their headers, verified by their lengths, and by CRC-32s in .npz files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry import npy
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.tools.findings import Audit, Entry, Report, Shard
from tensorferry.safetensors import dtypes
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.transfer.remote import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.checkpoint.progress import Listener
    from tensorferry.checkpoint.tools.formats import ConversionSource


def verify(path: str, *, progress: Listener | None = None, **_options: object) -> Report:
    """Verify a file: headers, lengths, and the CRC-32 of each member; a .npy file has none."""
    audit = Audit(path, progress)
    try:
        with _checkpoint_errors(path), npy.NumpyFile(path) as held:
            audit.meter.expect(sum(array.nbytes for array in held.values()), 1)
            audit.report.entries = len(held)
            for name, array in held.items():
                _check(audit, name, array)
    except (CheckpointError, OSError) as error:
        audit.problem(error)
    audit.meter.add(0, files=1)
    return audit.finish()


def _check(audit: Audit, name: str, array: npy.Array) -> None:
    place = array.place
    if place.crc is None:
        audit.report.unverified.append(name or Path(audit.report.path).name)
    try:
        with _checkpoint_errors(audit.report.path):
            array.check()
        audit.report.nbytes += array.nbytes if place.crc is not None else 0
    except (CheckpointError, OSError) as error:
        audit.problem(error)
    audit.meter.add(array.nbytes)


def entries(path: str, **_options: object) -> list[Entry]:
    """Return the arrays of a file in order; the byte range of a compressed member is empty."""
    with _checkpoint_errors(path), npy.NumpyFile(path) as held:
        return [_entry(path, array.place) for array in held.values()]


def _entry(path: str, place: npy.StoredArray) -> Entry:
    begin = 0 if place.begin is None else place.begin + place.header_nbytes
    end = 0 if place.begin is None else begin + place.nbytes
    origin = (0,) * len(place.shape)
    shard = Shard(origin, place.shape, Path(path).name, begin, end)
    name = place.name or Path(path).stem
    return Entry(name, str(place.dtype), place.shape, place.nbytes, (shard,))


def find_source(path: str, **_options: object) -> ConversionSource:
    """Return the arrays to convert; the array of a .npy file has the file's name."""
    from tensorferry.checkpoint.storage import huggingface
    from tensorferry.checkpoint.tools.formats import ConversionSource
    from tensorferry.checkpoint.zipformat.blobs import Payload

    identity = Version.at(path)
    verify(path).require_sound()
    found = {}
    with _checkpoint_errors(path), npy.NumpyFile(path) as held:
        places = [array.place for array in held.values()]
    for place in places:
        name, dims = place.name or Path(path).stem, tuple(range(len(place.shape)))
        try:
            if name in found:
                raise SafetensorError(
                    "there are two arrays of this name (one without a name gets the file's)"
                )
            if place.begin is None:
                raise SafetensorError(
                    "it is compressed, and cannot be read in parts (remedy: write it with numpy.savez)"
                )
            if not place.dtype.isnative:
                raise SafetensorError("its elements are big-endian, which torch does not support")
            dtype = dtypes.torch_dtype(dtypes.of_library(place.dtype))
        except SafetensorError as error:
            raise CheckpointError(error.reason, path, names=(name,)) from None
        begin = place.begin + place.header_nbytes
        order = dims[::-1] if place.is_fortran else dims
        found[name] = Payload(begin, place.nbytes, dtype, place.shape, order)
    return ConversionSource(*huggingface.from_payloads(path, found, identity), [])


@contextlib.contextmanager
def _checkpoint_errors(path: str) -> Iterator[None]:
    try:
        yield
    except npy.FormatError as error:
        names = () if not error.name else (error.name,)
        raise CheckpointError(error.reason, path, names=names) from None
