"""``Table``: reading and writing rows of a table on drives by row number.

The core plans all rows of a call together: it transfers their bytes in the order of the file, and each page only once.
This module converts row numbers to 64-bit integers, and arrays to addresses and sizes.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import math
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base.checks import checked_offset, one_of
from tensorferry.base.reprs import safe_repr
from tensorferry.errors import StorageError, memory_moved
from tensorferry.transfer.arrays import masked_type, memory_of
from tensorferry.transfer.calls import open as open_file
from tensorferry.transfer.files import in_background
from tensorferry.transfer.futures import Future
from tensorferry.transfer.requests import start_segments
from tensorferry.transfer.versioned import VersionedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tensorferry.base.checks import Direct, Path
    from tensorferry.transfer.arrays import Memory
    from tensorferry.transfer.files import File, Priority

_MODES = ("r", "r+", "rb", "rb+", "r+b")


class _Part(NamedTuple):
    """A part of a table: consecutive rows in one file."""

    file: File
    offset: int  # of the first row
    rows: int


class _Rows(NamedTuple):
    """The rows of one file that a call reads or writes.

    The segments are pieces of memory, and gaps for the bytes between rows; they follow each other in the file from
    ``offset`` on.
    """

    file: File
    segments: _core.Segments
    offset: int


class Table:
    """A table of consecutive rows in a file, which are read and written by row number.

    The file may be far larger than memory. A call reads each page that holds some of its rows once, with all reads
    outstanding together; pages that are in the page cache are copied from there. Any number of threads may use a table,
    with any number of outstanding calls; closing waits for them. Tables are context managers.

    Parameters
    ----------
    path : str, bytes or PathLike
        The file.
    shape : sequence of int
        The shape of the table: the number of rows, followed by the shape of a row, which may be empty.
    dtype : torch.dtype, numpy.dtype, or a name of one
        The dtype of an element. A name is a NumPy dtype, or a torch dtype that NumPy lacks, such as "bfloat16".
    offset : int
        The file offset of the first row in bytes.
    mode : "r" or "r+"
        "r" opens the table for reading, "r+" for reading and writing.
    direct, engine, block_size, queue_depth
        As for :func:`tensorferry.open`.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid, or the file is shorter than the table.
    StorageError
        The file cannot be opened.

    Examples
    --------
    >>> with tensorferry.Table("embeddings.bin", (1_000_000, 4096), torch.bfloat16) as table:  # doctest: +SKIP
    ...     rows = table.gather(torch.tensor([[3, 1], [3, -1]]))  # of shape (2, 2, 4096)
    """

    def __init__(
        self,
        path: Path,
        shape: Sequence[int],
        dtype: Any,
        offset: int = 0,
        *,
        mode: str = "r",
        direct: Direct = "auto",
        engine: str | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
    ) -> None:
        one_of(mode, "mode", _MODES)
        self._describe(shape, dtype)
        offset = checked_offset(offset, self._shape[0] * self._row_nbytes)
        file = open_file(
            path, mode, direct=direct, engine=engine, block_size=block_size, queue_depth=queue_depth
        )
        self._set_parts([_Part(file, offset, self._shape[0])])

    @classmethod
    def from_safetensors(
        cls,
        path: Path | Sequence[Path],
        name: str | Sequence[str],
        *,
        framework: str = "pt",
        mode: str = "r",
        direct: Direct = "auto",
    ) -> Table:
        """Open a tensor in a model's safetensors files as a table.

        Parameters
        ----------
        path : path or sequence of paths
            A file, several files, a folder, or the index of a sharded model.
        name : str or sequence of str
            The name of the tensor. The rows of several tensors, which may be in several files, are concatenated.
        framework : str
            The library of the arrays that :meth:`gather` returns, as for ``safe_open``: "pt" or "np".
        mode, direct
            As for :class:`Table`.

        Raises
        ------
        SafetensorError
            A header or the index is invalid, the tensor does not exist, or the library has no dtype for it.
        ValueError
            The tensor has no rows, or the rows of several tensors have different shapes or dtypes.
        StorageError
            A file cannot be read.
        """
        one_of(mode, "mode", _MODES)
        # Imported here by name: safetensors is a higher layer than this module, and most tables do not need it.
        tables = importlib.import_module("tensorferry.safetensors.tables")
        names = [name] if isinstance(name, str) else list(name)
        found, row_shape, dtype = tables.find(path, names, framework)
        table = cls.__new__(cls)
        table._describe((sum(rows for _, rows in found), *row_shape), dtype)
        opened: dict[str, File] = {}
        try:
            for stored, _ in found:
                if stored.path not in opened:
                    opened[stored.path] = stored.open(direct=direct, mode=mode)
        except BaseException:
            for file in opened.values():
                file.close()
            raise
        parts = [_Part(opened[stored.path], stored.tensor.begin, rows) for stored, rows in found]
        table._set_parts(parts)
        return table

    def _describe(self, shape: Sequence[int], dtype: Any) -> None:
        try:
            self._shape = tuple(map(operator.index, shape))
        except TypeError:
            raise TypeError(f"shape: {shape!r} is not a sequence of integers") from None
        if not self._shape or min(self._shape) < 0:
            raise ValueError(
                f"shape: expected the number of rows, followed by the shape of a row (got {shape!r})"
            )
        self._dtype = _Dtype(dtype)
        self._row_nbytes = math.prod(self._shape[1:]) * self._dtype.itemsize

    def _set_parts(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._files = list(dict.fromkeys(part.file for part in parts))
        self._ends = list(itertools.accumulate(part.rows for part in parts))
        try:
            self._check_extents(ValueError)
        except BaseException:
            self.close()
            raise

    def _check_extents(self, kind: Callable[..., Exception]) -> None:
        """Raise an exception of a kind if a file is shorter than its part of the table."""
        for part in self._parts:
            nbytes = part.offset + part.rows * self._row_nbytes
            if nbytes > part.file.size:
                raise kind(
                    f"shape: {part.rows} rows of {self._row_nbytes} bytes at offset {part.offset} end at {nbytes}, but "
                    f"{part.file.path!r} has {part.file.size} bytes"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The table's shape: the number of rows, followed by the shape of a row."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of an element: a torch dtype if :meth:`gather` returns torch tensors, else a NumPy dtype."""
        return self._dtype.given

    @property
    def row_nbytes(self) -> int:
        """The size of a row in bytes."""
        return self._row_nbytes

    @property
    def closed(self) -> bool:
        """Whether the table has been closed."""
        return all(file.closed for file in self._files)

    def __len__(self) -> int:
        return self._shape[0]

    def gather(self, ids: Any, out: Any = None, *, priority: Priority = "normal") -> Any:
        """Read rows, and return them when all have arrived.

        Parameters
        ----------
        ids : int, or torch.Tensor, numpy.ndarray or sequence of integers
            The row numbers, in any shape and order and with repetitions. Negative numbers count from the end.
        out : torch.Tensor or numpy.ndarray, optional
            A contiguous array with the table's dtype and the result's shape, which is filled and returned. A tensor on
            a GPU is filled by one copy from pinned memory on its current stream.
        priority : "normal" or "background"
            As for :func:`tensorferry.read`.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            The rows, with the shape of ``ids`` followed by the shape of a row, as for
            ``torch.nn.functional.embedding``. The result is a tensor if ``ids`` is a tensor or the table has a torch
            dtype, else a NumPy array.

        Raises
        ------
        IndexError
            A row number is out of range; nothing was read.
        TypeError, ValueError
            The row numbers are not integers, or ``out`` is invalid; nothing was read.
        StorageError
            Not all rows could be read. ``expected`` and ``transferred`` include the bytes between rows.
        """
        background = in_background(priority)
        out, target, parts = self._prepare_read(ids, out)
        if len(parts) == 1:
            file, segments, offset = parts[0]
            file._transfer(segments, offset, (False, False, background, None))
        elif parts:
            future = self._start(out, target, parts, background)
            try:
                future.result()
            except BaseException:
                # Also after KeyboardInterrupt: the core keeps the rows' memory until the blocks in flight are complete.
                future.cancel()
                raise
        _copy_to_result(out, target)
        return out

    def gather_async(
        self, ids: Any, out: Any = None, *, priority: Priority = "normal"
    ) -> Future[Any]:
        """Start to read rows; parameters and exceptions as for :meth:`gather`.

        Returns
        -------
        Future
            Its result is that of :meth:`gather`. Rows for a GPU are copied there when the program first learns that
            the future is done.
        """
        background = in_background(priority)
        out, target, parts = self._prepare_read(ids, out)
        future = self._start(out, target, parts, background)
        future._gives(out, lambda: _copy_to_result(out, target))
        offset, nbytes = (parts[0].offset, target.nbytes) if parts else (0, 0)
        future._is_about(False, f"rows of {self._path_text}", offset, nbytes)
        return future

    def scatter(self, ids: Any, rows: Any, *, sync: bool = False) -> None:
        """Write rows, and return when all are written.

        Parameters
        ----------
        ids
            As for :meth:`gather`. If a row number is repeated, its last row is written.
        rows : torch.Tensor or numpy.ndarray
            The rows, with the table's dtype and the shape of ``ids`` followed by the shape of a row.
        sync : bool
            Return only when the rows are durable.

        Raises
        ------
        IndexError
            A row number is out of range; nothing was written.
        TypeError, ValueError
            An argument is invalid, or the table was not opened with "r+"; nothing was written.
        StorageError
            Not all rows could be written. Each row may be old, new, or a mixture of both. Or the file has become
            shorter than the table; nothing was written.

        Notes
        -----
        If several calls of this process write the same rows at the same time, the rows of the call that started last
        remain, as with :meth:`File.write`. A concurrent :meth:`gather` may return a mixture of old and new bytes.
        """
        numbers = self._row_numbers(ids)
        self._check_array(rows, (*numbers.shape, *self._shape[1:]), "rows")
        memory = memory_of(rows, writable=False, name="rows", host=True)
        parts = self._parts_of(numbers, memory, write=True)
        # A write behind the end would turn the rows that the file has lost into zeros.
        self._check_extents(lambda reason: StorageError(errno.ESTALE, reason, self._files[0].path))
        for file, segments, offset in parts:
            file._write_segments(segments, offset, sync=sync)

    def close(self) -> None:
        """Wait for the outstanding calls, and close the table. Their futures keep results and errors."""
        with contextlib.ExitStack() as stack:  # closes all files, also if closing one fails
            for file in reversed(self._files):
                stack.callback(file.close)

    def __enter__(self) -> Table:
        for file in self._files:
            file.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Table:
        return self.__enter__()

    async def __aexit__(self, *args: object) -> None:
        try:
            for file in self._files:
                await file.__aexit__(*args)
        finally:
            self.close()

    @safe_repr
    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}tensorferry.Table {list(self._shape)} {self.dtype} of {self._path_text}>"

    @property
    def _path_text(self) -> str:
        return ", ".join(repr(file.path) for file in self._files)

    # The rows of a call

    def _prepare_read(self, ids: Any, out: Any) -> tuple[Any, Any, list[_Rows]]:
        """Return the result array, the host memory to read into, and the rows to read from each file."""
        numbers = self._row_numbers(ids)
        shape = (*numbers.shape, *self._shape[1:])
        if out is None:
            out = target = self._empty(shape, numbers.of_torch)
        else:
            self._check_array(out, shape, "out")
            target = out
            if getattr(out, "is_cuda", False):
                target = sys.modules["torch"].empty(shape, dtype=out.dtype, pin_memory=True)
        memory = memory_of(target, writable=True, name="out", host=True)
        return out, target, self._parts_of(numbers, memory, write=False)

    def _row_numbers(self, ids: Any) -> _Numbers:
        for file in self._files:
            file.__enter__()  # raises if the file is closed
        return _numbers_of(ids, self._shape[0])

    def _parts_of(self, numbers: _Numbers, memory: Memory, *, write: bool) -> list[_Rows]:
        address, nbytes, *_ = numbers.memory
        found = _core.rows_of_table(
            *(address, nbytes // 8, numbers.is_unsigned, self._ends, self._row_nbytes),
            *(self._row_nbytes, memory[0], memory[2], write),
        )
        if self._row_nbytes == 0:
            return []
        rows = []
        for at, first_row, segments in found:
            part = self._parts[at]
            row = first_row - (self._ends[at] - part.rows)
            rows.append(_Rows(part.file, segments, part.offset + row * self._row_nbytes))
        return rows

    def _empty(self, shape: tuple[int, ...], of_torch: bool) -> Any:
        known = self._dtype.of_torch() if of_torch or self._dtype.is_torchs else None
        if known is not None:
            return sys.modules["torch"].empty(shape, dtype=known)
        import numpy as np

        return np.empty(shape, self._dtype.of_numpy)

    def _check_array(self, array: Any, shape: tuple[int, ...], name: str) -> None:
        if _is_tensor(array):
            expected = self._dtype.of_torch()
        elif hasattr(array, "__array_interface__"):
            expected = self._dtype.of_numpy
        else:
            kind = type(array).__name__
            raise TypeError(f"{name}: expected a torch tensor or a NumPy array, got {kind}")
        if expected is None or array.dtype != expected:
            raise TypeError(f"{name}: expected the table's dtype {self.dtype}, got {array.dtype}")
        if tuple(array.shape) != shape:
            raise ValueError(f"{name}: expected the shape {list(shape)}, got {list(array.shape)}")

    # Several files

    def _start(self, out: Any, target: Any, parts: list[_Rows], background: bool) -> Future[Any]:
        """Start to read the rows of each file, in one request: all files of a table have the same scheduler."""
        future = Future(out, target)
        request = start_segments(
            self._files[0]._scheduler,
            [(file._open_file(reading=True), segments, at) for file, segments, at in parts],
            future,
            background=background,
        )
        future._start(request, lambda: _failure_of(target, parts))
        for file in self._files:
            file._pending.add(future)
        return future


class _Dtype:
    """A dtype of NumPy, or of torch.

    Attributes
    ----------
    given : torch.dtype or numpy.dtype
        The dtype.
    is_torchs : bool
        Whether it is torch's.
    of_numpy : numpy.dtype, or None
        NumPy's dtype; None if it has none, or is not installed.
    itemsize : int
        The size of an element in bytes.
    """

    def __init__(self, dtype: Any) -> None:
        torch: Any = sys.modules.get("torch")
        self.is_torchs = torch is not None and isinstance(dtype, torch.dtype)
        self.given, self.of_numpy = dtype, None  # type: Any, Any
        self._name = str(dtype).removeprefix("torch.")
        try:
            import numpy as np

            self.of_numpy = np.dtype(self._name if self.is_torchs else dtype)
        except (ModuleNotFoundError, TypeError) as error:
            if not self.is_torchs and isinstance(dtype, str):
                self.given = getattr(importlib.import_module("torch"), self._name, None)
                self.is_torchs = isinstance(self.given, sys.modules["torch"].dtype)
            if not self.is_torchs:
                raise TypeError(
                    f"dtype: expected a dtype of torch or NumPy, got {dtype!r}: {error}"
                ) from None
        if not self.is_torchs:
            self.given = found = self.of_numpy
            self._name = found.name if found.isnative else ""
            if dtype is None or found.hasobject or found.itemsize == 0:
                raise TypeError(
                    f"dtype: expected a dtype with elements of fixed size, got {dtype!r}"
                )
        self.itemsize: int = self.given.itemsize

    def of_torch(self) -> Any:
        """Return torch's dtype, or None if it has none; torch must have been imported."""
        torch = sys.modules["torch"]
        found = getattr(torch, self._name, None)
        return found if isinstance(found, torch.dtype) else None


class _Numbers(NamedTuple):
    """Row numbers as 64-bit integers in memory."""

    memory: Memory
    shape: tuple[int, ...]
    is_unsigned: bool
    of_torch: bool  # whether the caller passed the row numbers as a torch tensor


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _numbers_of(ids: Any, rows: int) -> _Numbers:
    is_tensor = _is_tensor(ids)
    if is_tensor:
        torch, dtype = sys.modules["torch"], ids.dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        is_integer = is_integer and not ids.is_quantized
        is_unsigned, shape = dtype is torch.uint64, tuple(ids.shape)
        numbers = ids.detach().cpu().contiguous()
        if is_integer:
            numbers = numbers.view(torch.int64) if is_unsigned else numbers.to(torch.int64)
    else:
        import numpy as np

        try:
            array = np.asarray(ids)
        except ValueError as error:
            raise TypeError(f"ids: expected an array of integers, got {ids!r}: {error}") from None
        if isinstance(ids, masked_type()):
            raise TypeError(
                "ids: a masked array has a mask, which would be ignored (remedy: pass .data or .compressed())"
            )
        given, dtype = hasattr(ids, "dtype"), array.dtype
        if array.dtype.kind == "O" and not given:
            for number in array.flat:
                if type(number) is int and not -rows <= number < rows:
                    raise IndexError(f"ids: {number} is outside of a table of {rows} rows")
        # NumPy makes an array of floats from an empty list.
        is_integer = dtype.kind in "iu" or (array.size == 0 and not given)
        is_unsigned, shape = dtype == np.uint64, array.shape
        if is_integer:
            numbers = np.ascontiguousarray(array, np.uint64 if is_unsigned else np.int64)
    if not is_integer:
        raise TypeError(f"ids: expected integers, got the dtype {dtype}")
    memory = memory_of(numbers, writable=False, name="ids", host=True)
    return _Numbers(memory, shape, is_unsigned, is_tensor)


def _failure_of(target: Any, parts: Iterable[_Rows]) -> Exception | None:
    """Return an error if the memory was released before the read of rows ended, or if a file was changed."""
    for file, segments, offset in parts:
        if segments.moved():
            return memory_moved(repr(file.path), offset, target.nbytes)
        if isinstance(file, VersionedFile) and (error := file.change()) is not None:
            return error
    return None


def _copy_to_result(out: Any, target: Any) -> None:
    """Copy the rows to the result array, unless they were read into it."""
    if target is not out:
        out.copy_(target)
