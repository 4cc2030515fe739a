"""NumPy's .npy and .npz files: opening a file reads its headers; arrays and slices are read on demand.

A .npz file is a zip archive, each member of which is a .npy file. numpy.lib.format parses the headers, and zipfile
parses the directories of archives. The core reads the data of a .npy file and of uncompressed members, and only those
bytes that an index needs. zipfile reads a compressed member as a whole. Pickled objects are refused. A member that
cannot be read is refused when it is requested, and the others can be read. If an uncompressed member is read as a
whole, its CRC-32 is verified; zipfile verifies that of a compressed member.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

import tensorferry
from tensorferry._core import crc32_combine
from tensorferry.base.reprs import safe_repr
from tensorferry.safetensors.frameworks import framework_of
from tensorferry.safetensors.parts import Files, Part, load
from tensorferry.safetensors.slicing import select
from tensorferry.transfer.python_files import open_zip, reopen_python_file
from tensorferry.transfer.remote import source_path
from tensorferry.transfer.versioned import VersionedFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.base.checks import Path
    from tensorferry.transfer.files import File

__all__ = ["Array", "FormatError", "NumpyFile"]

SUFFIX = ".npy"
# A member (a file in a zip archive) begins with a local header, which ends with the name and the extra field. The first
# number is the position of the lengths of these two, the second the header's size without them.
_NAME_LENGTHS_AT, _LOCAL_HEADER_NBYTES = 26, 30
_MAX_HEADER_NBYTES = 1 << 20


class FormatError(ValueError):
    """A file is damaged, was changed, or is not a NumPy file; or a member of it is, or has pickled objects.

    Attributes
    ----------
    reason : str
        The problem.
    path : str
        The path of the file.
    name : str or None
        The name of the array, if the problem concerns one.
    """

    def __init__(self, reason: str, path: str, name: str | None = None) -> None:
        where = f"{path!r}: " if name is None else f"{path!r}: array {name!r}: "
        super().__init__(where + reason)
        self.reason, self.path, self.name = reason, path, name


class StoredArray(NamedTuple):
    """The description of an array in a file.

    Attributes
    ----------
    name : str
        The name of the archive's member without its suffix; empty for a .npy file.
    dtype : dtype
        The dtype of its elements.
    shape : tuple of int
        The shape of the array.
    is_fortran : bool
        Whether the elements are in Fortran order (the first dimension varies fastest).
    header_nbytes, nbytes : int
        The sizes of the array's header and of its elements, which follow the header.
    begin : int or None
        The file offset of the array's header; None if the member is compressed.
    crc : int or None
        The CRC-32 of header and elements; None for a .npy file, which has no checksum.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    header_nbytes: int
    nbytes: int
    begin: int | None
    crc: int | None = None


class NumpyFile(Mapping[str, "Array"], Files):
    """An open .npy or .npz file: a mapping from names to arrays. The array in a .npy file has the empty name.

    A context manager. Any number of threads may use it.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file.

    Raises
    ------
    FormatError
        The file is damaged or truncated. This is also raised for an array that is damaged or has contents other than
        numbers, text and times, when it is requested; and by reads, if the file was changed meanwhile.
    StorageError
        The file cannot be read.

    Examples
    --------
    >>> with NumpyFile("rows.npz") as file:  # doctest: +SKIP
    ...     some = file["embedding"][1000:1010]
    """

    def __init__(self, path: Path) -> None:
        self.path = source_path(path)
        self._file = VersionedFile(self.path, changed=_changed)
        self._arrays: dict[
            str, Array | str
        ] = {}  # a text is the reason why an array cannot be read
        try:
            with self._stream() as stream, _format_errors(self.path):
                for name, found in _stored_arrays(stream, self._file.size):
                    if name in self._arrays:
                        raise FormatError("two arrays have this name", self.path, name)
                    self._arrays[name] = found if isinstance(found, str) else Array(self, found)
            if isinstance(problem := self._arrays.get(""), str) and len(self._arrays) == 1:
                raise FormatError(problem, self.path)
            self._file.check()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Array:
        found = self._arrays[name]
        if isinstance(found, str):
            raise FormatError(found, self.path, name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __enter__(self) -> NumpyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; arrays that were read remain valid."""
        self._file.close()

    @safe_repr
    def __repr__(self) -> str:
        return f"<NumpyFile {self.path!r}: {len(self)} arrays>"

    def open(self, *_: Any, **__: Any) -> File:
        """Return the open file."""
        return self._file

    def _stream(self) -> IO[bytes]:
        """Return a Python file object for the same file, even if its path now names another file."""
        return reopen_python_file(self._file, buffered=True)


class Array:
    """An array in a file; indexing reads the bytes that the index needs, :meth:`read` reads the whole array.

    Attributes
    ----------
    dtype, shape, nbytes
        As for a NumPy array.
    place : StoredArray
        Its description, with its position in the file.
    """

    def __init__(self, owner: NumpyFile, place: StoredArray) -> None:
        self._owner = owner
        self.place = place
        self.dtype, self.shape, self.nbytes = place.dtype, place.shape, place.nbytes

    def read(self, out: Any = None) -> Any:
        """Read and return the whole array; verify its CRC-32 if it has one.

        Parameters
        ----------
        out : array, optional
            An array of any library, in host memory or on a GPU, with the same number of bytes, which is filled and
            returned. Only for arrays in C order with native (little-endian) bytes that are not compressed.

        Raises
        ------
        FormatError
            The array is damaged, or cannot be read into ``out``.
        StorageError
            The array cannot be read.
        """
        place = self.place
        is_plain = place.begin is not None and not place.is_fortran and self.dtype.isnative
        if out is not None and (not is_plain or out.nbytes != self.nbytes):
            reason = f"cannot be read into out= of {out.nbytes} bytes: {place}"
            raise FormatError(reason, self._owner.path, place.name)
        if place.begin is None:
            return self._decompress()
        data = np.empty(place.nbytes, np.uint8) if out is None else out
        sums = tensorferry.Checksums(segments=True)
        self._owner._file.read([place.header_nbytes, data], place.begin, checksums=sums)
        header_crc, crc = sums.segments
        self._compare(crc32_combine(header_crc, crc, place.nbytes))
        if out is not None:
            return out
        shape = self.shape[::-1] if place.is_fortran else self.shape
        array = np.ndarray(shape, self.dtype, data)
        return array.T if place.is_fortran else array

    def check(self) -> None:
        """Read the array, and raise FormatError if its CRC-32 differs from that in the archive."""
        place = self.place
        if place.begin is None:
            self._decompress()
        elif place.crc is not None:
            sums = tensorferry.Checksums(segments=True)
            segments: list[Any] = [place.header_nbytes + place.nbytes, bytearray()]
            self._owner._file.read(segments, place.begin, checksums=sums)
            self._compare(sums.segments[0])

    def __getitem__(self, index: Any) -> Any:
        """Return the elements that an index selects, by NumPy's rules.

        For integers, slices with a positive step, or one list of positions, only the selected bytes are read, without
        a CRC-32 check. For all other indices, and for compressed members, the whole array is read.
        """
        parts = index if isinstance(index, tuple) else (index,)
        is_sliced = all(map(_is_slice, parts)) or (type(index) is list and self.shape != ())
        chosen = select(index, self.shape, self._owner.path, self.place.name) if is_sliced else None
        if chosen is None or self.place.begin is None or 0 in (self.nbytes, *chosen.shape):
            return self.read()[index]
        order = slice(None, None, -1 if self.place.is_fortran else 1)
        begin = self.place.begin + self.place.header_nbytes
        positions, shape = chosen.positions[order], self.shape[order]
        part = Part(begin, shape, self.dtype.itemsize, framework_of("np", None), positions)
        load(part, self._owner)
        array = part.elements().view(self.dtype)
        array = array.T if self.place.is_fortran else array
        array = array[chosen.basic]
        array = array[chosen.lists] if chosen.lists else array
        # Like NumPy, return a scalar if integers select one element, but a 0-dimensional array if there is an ellipsis.
        return array if array.shape or Ellipsis in parts else array[()]

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the first dimension, which reads one element of it at a time."""
        if not self.shape:
            raise TypeError("iteration over a 0-dimensional array")
        return map(self.__getitem__, range(self.shape[0]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("copy: reading an array from a file always makes a copy (got False)")
        return np.asarray(self.read(), dtype)

    def __repr__(self) -> str:
        return f"<Array {self.place.name!r}: {self.dtype} {list(self.shape)}>"

    def _compare(self, crc: int) -> None:
        if self.place.crc not in (None, crc):
            reason = f"its CRC-32 is {crc:08x}, expected {self.place.crc:08x}"
            raise FormatError(reason, self._owner.path, self.place.name)

    def _decompress(self) -> np.ndarray[Any, Any]:
        name = self.place.name
        with (
            _format_errors(self._owner.path, name),
            self._owner._stream() as stream,
            open_zip(stream) as archive,
            archive.open(name + SUFFIX) as member,
        ):
            array: np.ndarray[Any, Any] = npy_format.read_array(member, allow_pickle=False)
            member.read()  # zipfile verifies the CRC-32 when it reaches the end of the member
        self._owner._file.check()
        return array


def _is_slice(part: Any) -> bool:
    """Return whether a part of an index lets __getitem__() read only the selected bytes."""
    if isinstance(part, slice):
        return part.step is None or part.step > 0
    return part is None or part is Ellipsis or type(part) is int


def _changed(path: str) -> FormatError:
    return FormatError("it was changed after its header was read (remedy: open it again)", path)


def _stored_arrays(stream: IO[bytes], file_nbytes: int) -> Iterator[tuple[str, StoredArray | str]]:
    """Yield the names of a file's arrays, each with its description, or the reason why it cannot be read."""
    magic = stream.read(len(npy_format.MAGIC_PREFIX))
    stream.seek(0)
    if magic == npy_format.MAGIC_PREFIX:
        yield "", _stored_array("", stream, file_nbytes, begin=0)
        return
    if not magic.startswith(b"PK"):
        raise ValueError("not a .npy or .npz file, or its beginning is damaged")
    with open_zip(stream) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(SUFFIX)
            try:
                with _format_errors("", name):
                    yield name, _stored_member(archive, info, stream, file_nbytes)
            except FormatError as error:
                yield name, error.reason


def _stored_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, stream: IO[bytes], file_nbytes: int
) -> StoredArray:
    if not info.filename.endswith(SUFFIX):
        raise ValueError("this member is not a .npy file")
    begin = None
    if not 0 <= info.header_offset <= file_nbytes - _LOCAL_HEADER_NBYTES:
        raise ValueError("it is truncated")
    if info.compress_type == zipfile.ZIP_STORED:
        stream.seek(info.header_offset + _NAME_LENGTHS_AT)
        begin = info.header_offset + _LOCAL_HEADER_NBYTES
        begin += sum(struct.unpack("<2H", stream.read(4)))
        if begin + info.file_size > file_nbytes:
            raise ValueError("it is truncated")
    # The sizes of an encrypted member differ even if it is not compressed. open() raises an error for such a member, so
    # only the sizes of members that are not encrypted are compared.
    with archive.open(info) as member:
        if begin is not None and info.compress_size != info.file_size:
            raise ValueError("it is not compressed but has two different sizes")
        name = info.filename.removesuffix(SUFFIX)
        return _stored_array(name, member, info.file_size, begin=begin, crc=info.CRC)


def _header_3_0(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read a header of version 3.0, which differs from 2.0 in its encoding: UTF-8 instead of Latin-1."""
    nbytes = int.from_bytes(stream.read(4), "little")
    # Only names in quotes have other characters than ASCII, and there escapes stand for the same characters.
    text = stream.read(min(nbytes, _MAX_HEADER_NBYTES)).decode().encode("ascii", "backslashreplace")
    as_2_0 = io.BytesIO(len(text).to_bytes(4, "little") + text)
    return npy_format.read_array_header_2_0(as_2_0, max_header_size=len(text))


_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
    (3, 0): _header_3_0,
}


def _stored_array(
    name: str, stream: IO[bytes], whole_nbytes: int, *, begin: int | None, crc: int | None = None
) -> StoredArray:
    """Read the header of an array, and check that exactly the array's elements follow the header."""
    version = npy_format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"it has version {version} of the format, which is not supported")
    shape, is_fortran, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise ValueError(
            "it has pickled objects, which may run any code when they are loaded: not supported"
        )
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"it has the invalid shape {shape}")
    if dtype.subdtype is not None:  # such elements add dimensions that the shape does not include
        raise ValueError(f"it has arrays as elements (dtype {dtype}), which is not supported")
    header_nbytes, nbytes = stream.tell(), math.prod(shape) * dtype.itemsize
    behind = whole_nbytes - header_nbytes - nbytes
    if behind:
        problem = f"{-behind} bytes are missing" if behind < 0 else f"{behind} more bytes follow it"
        raise ValueError(f"its shape {shape} has {nbytes} bytes, but {problem}")
    # The constructor raises an error if NumPy does not support such an array. With strides of 0 the array needs memory
    # for one element only.
    np.ndarray(shape, dtype, bytes(dtype.itemsize if nbytes else 0), strides=(0,) * len(shape))
    is_fortran = is_fortran and len(shape) > 1
    return StoredArray(name, dtype, shape, is_fortran, header_nbytes, nbytes, begin, crc)


@contextlib.contextmanager
def _format_errors(path: str, name: str | None = None) -> Iterator[None]:
    """Raise the exceptions of NumPy and zipfile for a damaged file as FormatError."""
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except (ValueError, zipfile.BadZipFile, RuntimeError) as error:
        # zipfile raises RuntimeError if a password is needed or the compression method is not supported.
        raise FormatError(str(error), path, name) from None
    except Exception as error:
        # NumPy parses headers with Python's parser, which raises various exceptions, and so do decompressors: bz2
        # raises an OSError without an errno. An OSError with an errno is a real I/O error.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FormatError(f"damaged or truncated: {error}", path, name) from None
