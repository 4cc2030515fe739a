"""``Table``: rows of a table on drives, by number.

Which bytes are wanted is found in the core, for all rows of a call at once: sorted, each page once. Here numbers become
integers, and memory becomes arrays.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorferry import _core
from tensorferry.base.checks import checked_offset, one_of
from tensorferry.errors import StorageError, first_of, memory_moved
from tensorferry.transfer.arrays import memory_of
from tensorferry.transfer.calls import open as open_file
from tensorferry.transfer.files import File, in_background
from tensorferry.transfer.futures import Future
from tensorferry.transfer.striped import FileRequests

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tensorferry.base.checks import Direct, Path
    from tensorferry.transfer.arrays import Memory
    from tensorferry.transfer.files import Priority, Transferring

_MODES = ("r", "r+", "rb", "rb+", "r+b")


class _Part(NamedTuple):
    """Rows of a table that are in one file."""

    file: Transferring
    offset: int  # of the first one
    rows: int


class _Rows(NamedTuple):
    """Rows of one file that a call wants: memory and gaps, from an offset on."""

    file: Transferring
    segments: _core.Segments
    offset: int


class Table:
    """Rows that lie one behind the other in a file, to be read and written by number.

    The file may be far larger than memory. A call reads the pages that hold its rows, each once, with all reads on
    their way together; what the page cache holds comes from there. Any number of threads may use a table, and any
    number of calls may be on their way; closing waits for them. Tables are context managers.

    Parameters
    ----------
    path : str, bytes, PathLike, or a sequence of them
        The file; several are one file over several drives, as :func:`tensorferry.open` has them.
    shape : sequence of int
        Of the table: rows first, and then what a row is, which may be nothing.
    dtype : torch.dtype, numpy.dtype, or a name of one
        Of an element. A name is NumPy's dtype, or torch's where NumPy has none, as of "bfloat16".
    offset : int
        Where in the file the first row begins, in bytes.
    mode : "r" or "r+"
        Whether rows may be written, too.
    direct, stripe_nbytes, engine, block_size, queue_depth
        As for :func:`tensorferry.open`.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable, or the file is shorter than the table.
    StorageError
        The file cannot be opened.

    Examples
    --------
    >>> with tensorferry.Table("embeddings.bin", (1_000_000, 4096), torch.bfloat16) as table:  # doctest: +SKIP
    ...     rows = table.gather(torch.tensor([[3, 1], [3, -1]]))  # of shape (2, 2, 4096)
    """

    def __init__(
        self,
        path: Path | Sequence[Path],
        shape: Sequence[int],
        dtype: Any,
        offset: int = 0,
        *,
        mode: str = "r",
        direct: Direct = "auto",
        stripe_nbytes: int | None = None,
        engine: str | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
    ) -> None:
        one_of(mode, "mode", _MODES)
        self._describe(shape, dtype)
        offset = checked_offset(offset, self._shape[0] * self._row_nbytes)
        opened: Any = open_file  # of one path or several
        file = opened(
            path,
            mode,
            direct=direct,
            stripe_nbytes=stripe_nbytes,
            engine=engine,
            block_size=block_size,
            queue_depth=queue_depth,
        )
        self._hold([_Part(file, offset, self._shape[0])])

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
        """Open a tensor of a model's files as a table.

        Parameters
        ----------
        path : path or sequence of paths
            A file, several, a folder, or the index of a sharded model.
        name : str or sequence of str
            The tensor; of several, which may be in several files, the rows follow each other.
        framework : str
            Whose rows :meth:`gather` returns, as for ``safe_open``: "pt" or "np".
        mode, direct
            As for :class:`Table`.

        Raises
        ------
        SafetensorError
            A header or the index is wrong, there is no such tensor, or it has no dtype in that library.
        ValueError
            It has no rows, or several are not rows of one table.
        StorageError
            A file cannot be read.
        """
        one_of(mode, "mode", _MODES)
        # Above this room, and imported only here: who has no safetensors files needs none of it.
        found = importlib.import_module("tensorferry.safetensors.tables").find(
            path, [name] if isinstance(name, str) else list(name), framework
        )
        table = cls.__new__(cls)
        parts: list[_Part] = []
        opened: dict[str, File] = {}
        try:
            for stored, shape in found.tensors:
                if stored.path not in opened:
                    opened[stored.path] = open_file(stored.path, mode, direct=direct)
                    stored.check(opened[stored.path])
                parts.append(_Part(opened[stored.path], stored.tensor.begin, shape[0]))
            rows = sum(part.rows for part in parts)
            table._describe((rows, *found.tensors[0][1][1:]), found.dtype)
            table._hold(parts)
        except BaseException:
            for file in opened.values():
                file.close()
            raise
        return table

    def _describe(self, shape: Sequence[int], dtype: Any) -> None:
        try:
            self._shape = tuple(map(operator.index, shape))
        except TypeError:
            raise TypeError(f"shape: {shape!r} is no sequence of integers") from None
        if not self._shape or min(self._shape) < 0:
            raise ValueError(f"shape: {shape!r} is not that of a table: rows, and what a row is")
        self._numpy_dtype, self._torch_dtype, self._returns_torch = _dtypes(dtype)
        itemsize: int = (self._torch_dtype or self._numpy_dtype).itemsize
        self._row_nbytes = math.prod(self._shape[1:]) * itemsize

    def _hold(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._files = list(dict.fromkeys(part.file for part in parts))
        self._ends = []
        end = 0
        try:
            for part in parts:
                end += part.rows
                self._ends.append(end)
                nbytes = part.offset + part.rows * self._row_nbytes
                size: int = part.file.size  # type: ignore[attr-defined]
                if nbytes > size:
                    raise ValueError(
                        f"shape: {part.rows} rows of {self._row_nbytes} bytes from offset {part.offset} on end at "
                        f"{nbytes}, and {_name_of(part.file)} has {size} bytes"
                    )
        except BaseException:
            self.close()
            raise

    @property
    def shape(self) -> tuple[int, ...]:
        """The table's shape: rows, and what a row is."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of an element: torch's where :meth:`gather` returns torch's tensors, else NumPy's."""
        return self._torch_dtype if self._returns_torch else self._numpy_dtype

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self._row_nbytes

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return all(file.closed for file in self._files)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return self._shape[0]

    def gather(self, ids: Any, out: Any = None, *, priority: Priority = "normal") -> Any:
        """Read rows, and return them when all are there.

        Parameters
        ----------
        ids : int, or torch.Tensor, numpy.ndarray or sequence of integers
            The numbers of the rows, in any shape and order, some of them perhaps several times. Negative ones count
            from the end.
        out : torch.Tensor or numpy.ndarray, optional
            Filled and returned: contiguous, of the table's dtype and the result's shape. A tensor on a GPU gets its
            rows by one copy out of page-locked memory, on its current stream.
        priority : "normal" or "background"
            As for :func:`tensorferry.read`.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            Of the shape of ``ids`` followed by that of a row, as ``torch.nn.functional.embedding`` returns them: a
            tensor where ``ids`` is one or the table's dtype is torch's, else an array.

        Raises
        ------
        IndexError
            A number is that of no row; nothing was read.
        TypeError, ValueError
            The numbers are no integers, or ``out`` cannot be used; nothing was read.
        StorageError
            Not all rows could be read. What ``expected`` and ``transferred`` count includes what lies between rows.
        """
        background = in_background(priority)
        out, target, parts = self._wanted(ids, out)
        if len(parts) == 1:
            file, segments, offset = parts[0]
            file._transfer(segments, offset, priority, None, write=False)
        elif parts:
            requests = self._requests(target)
            try:
                self._begin(requests, parts, background, target)
                requests.wait()
            except BaseException:
                # Ctrl-C: the core keeps the rows' memory until what has begun is done.
                requests.cancel()
                raise
            if failure := requests.exception() or _failure_of_memory(target, parts):
                raise failure
        return _delivered(out, target)

    def gather_async(
        self, ids: Any, out: Any = None, *, priority: Priority = "normal"
    ) -> Future[Any]:
        """Begin to read rows, as :meth:`gather` does.

        Returns
        -------
        Future
            Its result is what :meth:`gather` returns. Rows for a GPU are copied there when the end is first seen.
        """
        background = in_background(priority)
        out, target, parts = self._wanted(ids, out)
        if len(parts) == 1:
            file, segments, offset = parts[0]
            future = file._start(segments, offset, priority, None, write=False)
            future._gives(out)
        else:
            future = Future(out, target)
            requests = self._requests(target)
            self._begin(requests, parts, background, future)
            future._start(requests, lambda: _failure_of_memory(target, parts))
            for file in self._files:
                file._pending.add(future)
        if target is not out:

            def deliver() -> None:
                _delivered(out, target)

            future._gives(out, deliver)
        what, nbytes = ", ".join(map(_name_of, self._files)), len(parts) and target.nbytes
        future._is_about(False, f"rows of {what}", parts[0].offset if parts else 0, nbytes)
        return future

    def scatter(self, ids: Any, rows: Any, *, sync: bool = False) -> None:
        """Write rows, and return when all are written.

        Parameters
        ----------
        ids
            As for :meth:`gather`. Of a row that comes several times the last one is written.
        rows : torch.Tensor or numpy.ndarray
            Of the table's dtype, and of the shape of ``ids`` followed by that of a row.
        sync : bool
            Return only when the rows would survive a power cut.

        Raises
        ------
        IndexError
            A number is that of no row; nothing was written.
        TypeError, ValueError
            An argument is not usable, or the table was not opened by "r+"; nothing was written.
        StorageError
            Not all rows could be written: any of them may be the old one, the new one, or a part of each.

        Notes
        -----
        Rows that several calls of this process write at the same time are those of the call that began last, as with
        :meth:`File.write`; :meth:`gather` meanwhile finds old and new bytes.
        """
        numbers = self._numbers(ids)
        self._check_array(rows, (*numbers.shape, *self._shape[1:]), "rows")
        memory = memory_of(rows, writable=False, name="rows", host=True)
        parts = self._parts_of(numbers, memory, write=True)
        for file, segments, offset in parts:
            file._write_apart(segments, offset, sync=sync)

    def close(self) -> None:
        """Wait for calls on their way, and close. Their futures keep results and failures."""
        failure: Exception | None = None
        for file in self._files:
            try:
                file.close()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __enter__(self) -> Table:
        for file in self._files:
            file.__enter__()  # type: ignore[attr-defined]
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

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        files = ", ".join(map(_name_of, self._files))
        return f"<{state}tensorferry.Table {list(self._shape)} {self.dtype} of {files}>"

    # What a call wants

    def _wanted(self, ids: Any, out: Any) -> tuple[Any, Any, list[_Rows]]:
        """Return the array of a result, what is read into, and what of which files."""
        numbers = self._numbers(ids)
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

    def _numbers(self, ids: Any) -> _Numbers:
        for file in self._files:
            file.__enter__()  # type: ignore[attr-defined]  # says if it is closed
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
        if self._torch_dtype is None and self._numpy_dtype is not None:
            self._torch_dtype = _torch_dtype_of(self._numpy_dtype) if of_torch else None
        if self._torch_dtype is not None and (of_torch or self._returns_torch):
            return sys.modules["torch"].empty(shape, dtype=self._torch_dtype)
        import numpy as np

        return np.empty(shape, self._numpy_dtype)

    def _check_array(self, array: Any, shape: tuple[int, ...], name: str) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(array, torch.Tensor):
            wanted = self._torch_dtype or _torch_dtype_of(self._numpy_dtype)
        elif hasattr(array, "__array_interface__"):
            wanted = self._numpy_dtype
        else:
            kind = type(array).__name__
            raise TypeError(f"{name}: {kind} is neither a torch tensor nor a NumPy array")
        if wanted is None or array.dtype != wanted:
            raise TypeError(f"{name}: its dtype is {array.dtype}, and the table's is {self.dtype}")
        if tuple(array.shape) != shape:
            raise ValueError(
                f"{name}: its shape is {list(array.shape)}, and that of the rows is {list(shape)}"
            )

    # Several files

    def _requests(self, target: Any) -> FileRequests:
        def failure(failed: list[tuple[int, StorageError]], *_: int) -> StorageError:
            return first_of([error for _, error in failed], "of its files")

        return FileRequests(failure, target.nbytes)

    def _begin(
        self, requests: FileRequests, parts: list[_Rows], background: bool, owner: object
    ) -> None:
        """Submit the rows of each file; either all of them, or an exception."""
        try:
            for at, (file, segments, offset) in enumerate(parts):
                assert isinstance(file, File)  # only one file can be over several drives
                core = file._open_file(reading=True)
                requests.submit(
                    *(at, file._scheduler, core, segments, offset, owner), background=background
                )
        except BaseException as error:
            requests.give_up(error)
            raise


class _Numbers(NamedTuple):
    """Numbers of rows: 64-bit integers in memory."""

    memory: Memory
    shape: tuple[int, ...]
    is_unsigned: bool
    of_torch: bool


def _numbers_of(ids: Any, rows: int) -> _Numbers:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(ids, torch.Tensor):
        dtype = ids.dtype
        if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or ids.is_quantized:
            raise TypeError(f"ids: {dtype} is no dtype of integers")
        is_unsigned = dtype is torch.uint64
        numbers = ids.detach().cpu().contiguous()
        numbers = numbers.view(torch.int64) if is_unsigned else numbers.to(torch.int64)
        return _Numbers(_memory_of_ids(numbers), tuple(ids.shape), is_unsigned, True)
    import numpy as np

    try:
        array = np.asarray(ids)
    except ValueError as error:
        raise TypeError(f"ids: {ids!r} is no array of integers: {error}") from None
    given = hasattr(ids, "dtype")
    if array.size == 0 and not given:  # NumPy takes an empty list for one of floats
        array = array.astype(np.int64)
    if array.dtype.kind == "O" and not given:
        for number in array.flat:
            if type(number) is int and not -rows <= number < rows:
                raise IndexError(f"ids: {number} is outside of a table of {rows} rows")
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids: {array.dtype} is no dtype of integers")
    is_unsigned = array.dtype == np.uint64
    numbers = np.ascontiguousarray(array, np.uint64 if is_unsigned else np.int64)
    return _Numbers(_memory_of_ids(numbers), array.shape, is_unsigned, False)


def _memory_of_ids(numbers: Any) -> Memory:
    return memory_of(numbers, writable=False, name="ids", host=True)


def _dtypes(dtype: Any) -> tuple[Any, Any, bool]:
    """Return NumPy's dtype and torch's, as far as they are known, and whether rows are tensors of torch."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return _numpy_dtype_of(dtype), dtype, True
    try:
        import numpy as np

        found = np.dtype(dtype)
    except (ModuleNotFoundError, TypeError) as error:
        if isinstance(dtype, str):
            torch = importlib.import_module("torch")
            named = getattr(torch, dtype.removeprefix("torch."), None)
            if isinstance(named, torch.dtype):
                return _numpy_dtype_of(named), named, True
        raise TypeError(f"dtype: {dtype!r} is neither torch's nor NumPy's: {error}") from None
    if dtype is None or found.hasobject or found.itemsize == 0:
        raise TypeError(f"dtype: {dtype!r} has no elements of some bytes")
    return found, None, False


def _numpy_dtype_of(dtype: Any) -> Any:
    """Return NumPy's dtype for one of torch's; None where there is none, or no NumPy."""
    try:
        import numpy as np

        return np.dtype(str(dtype).removeprefix("torch."))
    except (ModuleNotFoundError, TypeError):
        return None


def _torch_dtype_of(dtype: Any) -> Any:
    """Return torch's dtype for one of NumPy's, None where there is none; torch has been imported."""
    torch = sys.modules["torch"]
    found = getattr(torch, dtype.name, None) if dtype.isnative else None
    return found if isinstance(found, torch.dtype) else None


def _name_of(file: Transferring) -> str:
    return repr(file.path if isinstance(file, File) else list(file.paths))  # type: ignore[attr-defined]


def _failure_of_memory(target: Any, parts: Iterable[_Rows]) -> StorageError | None:
    for file, segments, offset in parts:
        if segments.moved():
            return memory_moved(_name_of(file), offset, target.nbytes)
    return None


def _delivered(out: Any, target: Any) -> Any:
    """Return the array of a result, with the rows in it."""
    if target is not out:
        out.copy_(target)
    return out
