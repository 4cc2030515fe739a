"""NumPy's .npy and .npz files: headers are read when a file is opened, arrays and slices when they are asked for.

Headers are parsed by numpy.lib.format, directories of archives by zipfile. The data of a .npy file, and those of a
member that is stored as it is, lie in the file and are read by the core, only the bytes that an index needs. A member
that is compressed is read whole, by zipfile. Pickled objects are refused. Of a stored member that is read whole the
CRC-32 is compared, as zipfile does for one that is compressed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

import tensorferry
from tensorferry._core import crc32_combine
from tensorferry.base.ranges import read_plan, strides_of
from tensorferry.safetensors.slicing import select
from tensorferry.transfer.arrays import collect_runs
from tensorferry.transfer.plain import plain_of
from tensorferry.transfer.remote import source_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorferry.base.checks import Path

__all__ = ["Array", "FormatError", "NumpyFile"]

SUFFIX = ".npy"
# Of a member's local header, which its name and further fields follow.
_NAME_LENGTHS_AT, _LOCAL_HEADER_NBYTES = 26, 30


class FormatError(ValueError):
    """A file is damaged, is not NumPy's, or has what is not read: pickled objects, encrypted members.

    Attributes
    ----------
    reason : str
        What is wrong.
    path : str
        The file.
    name : str or None
        The array concerned, where there is one.
    """

    def __init__(self, reason: str, path: str, name: str | None = None) -> None:
        where = f"{path!r}: " if name is None else f"{path!r}: array {name!r}: "
        super().__init__(where + reason)
        self.reason, self.path, self.name = reason, path, name


class Place(NamedTuple):
    """An array in a file.

    Attributes
    ----------
    name : str
        A member's without its suffix; of a .npy file an empty one.
    dtype : dtype
        Of its elements.
    shape : tuple of int
        Of the array.
    is_fortran : bool
        Whether the first dimension is the one whose elements lie side by side.
    header_nbytes, nbytes : int
        Of its header, and of its elements, which follow it.
    begin : int or None
        Where in the file its header begins; None: the member is compressed.
    crc : int or None
        The CRC-32 of header and elements.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    header_nbytes: int
    nbytes: int
    begin: int | None
    crc: int | None = None


class NumpyFile(Mapping[str, "Array"]):
    """A .npy or .npz file, open to take arrays from by name; that of a .npy file is the empty name.

    A context manager. Any number of threads may use it.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file.

    Raises
    ------
    FormatError
        It is damaged, cut short, or has something else than arrays of numbers, text and times.
    StorageError
        It cannot be read.

    Examples
    --------
    >>> with NumpyFile("rows.npz") as file:  # doctest: +SKIP
    ...     some = file["embedding"][1000:1010]
    """

    def __init__(self, path: Path) -> None:
        self.path = source_path(path)
        self._file = tensorferry.open(self.path)
        self._arrays: dict[str, Array] = {}
        with self._stream() as stream, _told(self.path):
            for place in _places(stream, self._file.size):
                if place.name in self._arrays:
                    raise FormatError("there are two of this name", self.path, place.name)
                self._arrays[place.name] = Array(self, place)

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __enter__(self) -> NumpyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; arrays that were read stay."""
        self._file.close()

    def __repr__(self) -> str:
        return f"<NumpyFile {self.path!r}: {len(self)} arrays>"

    def _stream(self) -> IO[bytes]:
        """Return the same file, whatever has its name now, as Python has files."""
        return plain_of(self._file, buffered=True)


class Array:
    """An array in a file; indexing it reads what the index needs, :meth:`read` all of it.

    Attributes
    ----------
    dtype, shape, nbytes
        As NumPy has them.
    place : Place
        Where it lies.
    """

    def __init__(self, held: NumpyFile, place: Place) -> None:
        self._held = held
        self.place = place
        self.dtype, self.shape, self.nbytes = place.dtype, place.shape, place.nbytes

    def read(self, out: Any = None) -> Any:
        """Return all of the array; its CRC-32 is compared, where it has one.

        Parameters
        ----------
        out : array, optional
            Memory for it, of any library, on a GPU as well, of as many bytes: for arrays in C order, little-endian.

        Raises
        ------
        FormatError
            It is damaged, or cannot be read into ``out``.
        StorageError
            It cannot be read.
        """
        place = self.place
        is_plain = place.begin is not None and not place.is_fortran and self.dtype.isnative
        if out is not None and (not is_plain or out.nbytes != self.nbytes):
            reason = f"out=, of {out.nbytes} bytes, cannot have it: {place}"
            raise FormatError(reason, self._held.path, place.name)
        if place.begin is None:
            return self._decompressed()
        data = np.empty(place.nbytes, np.uint8) if out is None else out
        sums = tensorferry.Checksums(segments=True)
        self._held._file.read([place.header_nbytes, data], place.begin, checksums=sums)
        header_crc, crc = sums.segments
        self._compare(crc32_combine(header_crc, crc, place.nbytes))
        if out is not None:
            return out
        shape = self.shape[::-1] if place.is_fortran else self.shape
        array = np.ndarray(shape, self.dtype, data)
        return array.T if place.is_fortran else array

    def check(self) -> None:
        """Read the array, and raise FormatError where its CRC-32 is not what the archive says."""
        place = self.place
        if place.begin is None:
            self._decompressed()
        elif place.crc is not None:
            sums = tensorferry.Checksums(segments=True)
            wanted: list[Any] = [place.header_nbytes + place.nbytes, bytearray()]
            self._held._file.read(wanted, place.begin, checksums=sums)
            self._compare(sums.segments[0])

    def __getitem__(self, index: Any) -> Any:
        """Return what an index chooses, by NumPy's rules.

        Of integers, slices that go forward, or one list of positions only the bytes that they need are read, and no
        CRC-32 can be compared; for other indices, and compressed members, all of the array.
        """
        parts = index if isinstance(index, tuple) else (index,)
        is_sliced = all(map(_is_slice, parts)) or (type(index) is list and self.shape != ())
        chosen = select(index, self.shape, self._held.path, self.place.name) if is_sliced else None
        if chosen is None or self.place.begin is None or 0 in (self.nbytes, *chosen.shape):
            return self.read()[index]
        if self.place.is_fortran:
            array = self._chosen(chosen.positions[::-1], self.shape[::-1]).T
        else:
            array = self._chosen(chosen.positions, self.shape)
        array = array[chosen.basic]
        array = array[chosen.lists] if chosen.lists else array
        # NumPy gives a scalar where integers choose it, and an array of no dimensions where there is an ellipsis.
        return array if array.shape or Ellipsis in parts else array[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("copy: an array of a file is read, which makes a copy")
        return np.asarray(self.read(), dtype)

    def __repr__(self) -> str:
        return f"<Array {self.place.name!r}: {self.dtype} {list(self.shape)}>"

    def _compare(self, crc: int) -> None:
        if self.place.crc not in (None, crc):
            reason = f"its CRC-32 is {crc:08x} instead of {self.place.crc:08x}"
            raise FormatError(reason, self._held.path, self.place.name)

    def _decompressed(self) -> np.ndarray[Any, Any]:
        name = self.place.name
        with (
            _told(self._held.path, name),
            self._held._stream() as stream,
            zipfile.ZipFile(stream) as archive,
            archive.open(name + SUFFIX) as member,
        ):
            array: np.ndarray[Any, Any] = npy_format.read_array(member, allow_pickle=False)
            member.read()  # at the end zipfile compares the CRC-32
        return array

    def _chosen(
        self, positions: tuple[Sequence[int], ...], shape: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        """Return an array of just these positions of each dimension, all of them as they lie in the file."""
        assert self.place.begin is not None
        begin, file = self.place.begin + self.place.header_nbytes, self._held._file
        plan = read_plan(positions, shape, self.dtype.itemsize)
        sizes = tuple(map(len, positions))
        data = np.empty(math.prod(sizes) * self.dtype.itemsize, np.uint8)
        result: np.ndarray[Any, Any] = np.ndarray(sizes, self.dtype, data)
        if plan.exact:
            windows = [*plan.windows]
            segments, first = collect_runs(
                (window.begin for window in windows), windows[0].nbytes, self.nbytes, data
            )
            file.read(segments, begin + first)  # type: ignore[call-overload]
            return result
        split, strides = plan.split, strides_of(shape)
        rows = result.reshape(-1, *sizes[split:])
        for window in plan.windows:
            slab = file.read(np.empty(window.nbytes, np.uint8), begin + window.begin)
            wanted = [positions[split][window.first : window.stop], *positions[split + 1 :]]
            steps = zip(wanted, strides[split:], strict=True)
            at_each = [(np.asarray(each) - each[0]) * step for each, step in steps]
            elements = slab.view(self.dtype)[functools.reduce(np.add.outer, at_each)]
            rows[window.row, window.first : window.stop] = elements
        return result


def _is_slice(part: Any) -> bool:
    """Return whether a part of an index is one of which only the bytes are read that it needs."""
    if isinstance(part, slice):
        return part.step is None or part.step > 0
    return part is None or part is Ellipsis or type(part) is int


def _places(stream: IO[bytes], file_nbytes: int) -> Iterator[Place]:
    """Yield where the arrays of a file lie, checked."""
    magic = stream.read(len(npy_format.MAGIC_PREFIX))
    stream.seek(0)
    if magic == npy_format.MAGIC_PREFIX:
        yield _place("", stream, file_nbytes, begin=0)
        return
    if not magic.startswith(b"PK"):
        raise ValueError("it is neither a .npy nor a .npz file, or its beginning is damaged")
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(SUFFIX)
            if name == info.filename:
                raise ValueError(f"its member {name!r} is not a .npy file")
            begin = None
            if not 0 <= info.header_offset <= file_nbytes - _LOCAL_HEADER_NBYTES:
                raise ValueError(f"its member {name!r} is not all there")
            if info.compress_type == zipfile.ZIP_STORED:
                stream.seek(info.header_offset + _NAME_LENGTHS_AT)
                begin = info.header_offset + _LOCAL_HEADER_NBYTES
                begin += sum(struct.unpack("<2H", stream.read(4)))
                if begin + info.file_size > file_nbytes:
                    raise ValueError(f"its member {name!r} is not all there")
            with archive.open(
                info
            ) as member:  # raises where it is encrypted, which adds to its size
                if begin is not None and info.compress_size != info.file_size:
                    raise ValueError(f"its member {name!r} has two sizes, and is not compressed")
                yield _place(name, member, info.file_size, begin=begin, crc=info.CRC)


def _place(
    name: str, stream: IO[bytes], whole_nbytes: int, *, begin: int | None, crc: int | None = None
) -> Place:
    """Read a header, and check that its elements are there and nothing else is."""
    version = npy_format.read_magic(stream)
    read_header = {
        (1, 0): npy_format.read_array_header_1_0,
        (2, 0): npy_format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"the version {version} of the format is not read (array {name!r})")
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError(
            f"array {name!r} has pickled objects, which may run any code when they are loaded: they are not read"
        )
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"array {name!r} has the shape {shape}")
    if (
        dtype.subdtype is not None
    ):  # elements would be further dimensions, of which the shape knows nothing
        raise ValueError(f"array {name!r} has arrays as elements: {dtype}")
    header_nbytes, nbytes = stream.tell(), math.prod(shape) * dtype.itemsize
    behind = whole_nbytes - header_nbytes - nbytes
    if behind:
        told = f"{-behind} bytes are missing" if behind < 0 else f"{behind} bytes stand behind it"
        raise ValueError(f"array {name!r} of the shape {shape} has {nbytes} bytes, and {told}")
    # All its elements in one place: raises where NumPy has no such array.
    np.ndarray(shape, dtype, bytes(dtype.itemsize if nbytes else 0), strides=(0,) * len(shape))
    is_fortran = is_fortran and len(shape) > 1
    return Place(name, dtype, shape, is_fortran, header_nbytes, nbytes, begin, crc)


@contextlib.contextmanager
def _told(path: str, name: str | None = None) -> Iterator[None]:
    """Make FormatErrors of what NumPy and zipfile say of a damaged file."""
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except (ValueError, zipfile.BadZipFile, RuntimeError) as error:
        # A RuntimeError where a password is needed, or a way of compressing is not known.
        raise FormatError(str(error), path, name) from None
    except Exception as error:
        # Whatever Python's parser, which NumPy has for headers, and decompressors say; bz2 an OSError without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise FormatError(f"it is damaged or cut short ({error})", path, name) from None
