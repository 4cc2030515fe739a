"""Embeddings whose weight stays on the drive: rows are read for each batch, ahead of it where it is known.

A batch of ids becomes a :class:`_Batch`: rows that the cache has are copied, the others are one read of the table. It
is begun by ``prefetch``, and a pipeline of reads has it then, or by ``forward`` itself. A forward pass takes the batch
that has the same ids as it is, without a copy. Else it copies what batches on their way have of its ids, and reads the
rest.

A prefetch is a hint. One that fails is forgotten, and the forward pass that needs its rows reads them again, and raises
what goes wrong then.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tensorferry.base.checks import checked_nbytes, integer, one_of
from tensorferry.errors import StorageError
from tensorferry.offload.absent import outside_of_graphs, recorded
from tensorferry.offload.row_cache import RowCache
from tensorferry.table import Table
from tensorferry.transfer.pipeline import Pipeline, Read, read_ahead_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from tensorferry.base.checks import Path
    from tensorferry.offload.row_cache import Ids, Mask, Rows
    from tensorferry.transfer.futures import Future

# Prefetches that wait, however small they are: each pass looks at all of them.
_MAX_AHEAD = 16

_WEIGHT = (
    "the weight of this embedding stays in its file: it is no parameter, and cannot be trained (remedy: a "
    "torch.nn.Embedding or EmbeddingBag with the weight that safetensors.torch.load_file gives)"
)


class _Batch(Read):
    """Rows for ids, in their order."""

    def __init__(self, reading: _Reading, ids: Ids) -> None:
        self.ids = ids
        self.nbytes = len(ids) * reading.table.row_nbytes
        self.rows = reading.new_rows(len(ids))
        self.due = 0  # the number of the pass that is expected to want it
        self.lent = False  # somebody copies from it
        self._cached = reading.cache_nbytes > 0
        self._reading: _Reading | None = reading
        self._missing: Ids | None = None  # places of what the cache has not; None: all
        self._future: Future[torch.Tensor] | None = None
        self._distinct: tuple[Ids, Ids] | None = None
        self._used: Mask | None = None

    @property
    def memory_nbytes(self) -> int:
        """The rows, and with a cache those that are read beside them."""
        return 2 * self.nbytes if self._cached else self.nbytes

    def begin(self) -> None:
        reading, self._reading = self._reading, None  # whose pipeline has this
        assert reading is not None
        with reading.using_cache() as cache:
            missing = np.flatnonzero(~cache.look_up(self.ids, _bytes(self.rows)))
            reading.counts["cached_rows"] += len(self.ids) - len(missing)
        if len(missing) == len(self.ids):
            self._future = reading.table.gather_async(self.ids, out=self.rows)
        else:
            self._missing = missing
            read = reading.new_rows(len(missing))
            self._future = reading.table.gather_async(self.ids[missing], out=read)
        self.futures = [self._future]

    def finish(self, reading: _Reading) -> torch.Tensor:
        """Wait, offer the cache what has come, and return the rows.

        Raises
        ------
        StorageError
            The read failed.
        """
        if self._future is not None:
            read = self._future.result()
            ids = self.ids if self._missing is None else self.ids[self._missing]
            if self._missing is not None:
                _bytes(self.rows)[self._missing] = _bytes(read)
            with reading.using_cache() as cache:
                cache.offer(ids, _bytes(read))
            self._future, self.futures = None, ()
        return self.rows

    def find(self, ids: Ids) -> tuple[Mask, Ids, bool]:
        """Return which ids are among its own and where those are; and whether all of it has been found by now."""
        if self._distinct is None:
            self._distinct = np.unique(self.ids, return_index=True)
            self._used = np.zeros(len(self._distinct[0]), np.bool_)
        distinct, places = self._distinct
        assert self._used is not None
        at = np.minimum(np.searchsorted(distinct, ids), len(distinct) - 1)
        here = distinct[at] == ids
        self._used[at[here]] = True
        return here, places[at[here]], bool(self._used.all())


class _Reading:
    """What of a table is in memory or on its way to it, in one process; for any number of threads."""

    def __init__(self, table: Table, dtype: torch.dtype, cache_nbytes: int) -> None:
        self.table = table
        self.counts = {"rows": 0, "prefetched_rows": 0, "cached_rows": 0}
        self._dtype = dtype
        self.cache_nbytes = cache_nbytes
        self._cache = RowCache(cache_nbytes, table.row_nbytes)
        self._passes = 0
        self._pipeline: Pipeline[_Batch] = Pipeline(memory_nbytes=read_ahead_nbytes())

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, which has neither the table's workers nor, perhaps, the lock."""
        self._pipeline._check_process()

    def new_rows(self, count: int) -> torch.Tensor:
        """Return memory for rows, for a pass in whatever mode and with whatever default device."""
        with torch.inference_mode(False):
            return torch.empty(count, self.table.shape[1], dtype=self._dtype, device="cpu")

    @contextlib.contextmanager
    def using_cache(self) -> Iterator[RowCache]:
        """Have the cache alone; a new one where a use of it was interrupted, or is by a signal handler now."""
        with self._pipeline.lock:
            if self._cache.changing:
                self._cache = RowCache(self.cache_nbytes, self.table.row_nbytes)
            cache = self._cache
            cache.changing = True
            yield cache
            cache.changing = False

    def prefetch(self, ids: Ids) -> bool:
        """Begin to read a batch, if there is room for it; late ones go."""
        if not len(ids):
            return True
        with self._pipeline.lock:
            batch = _Batch(self, ids)
            while len(ahead := self._ahead()) == _MAX_AHEAD or not self._pipeline.has_room(batch):
                late = next((one for one in ahead if one.due <= self._passes), None)
                if late is None:
                    return False
                self._drop(late)
            batch.due = self._passes + len(ahead) + 1
            with contextlib.suppress(StorageError):  # the pass is told
                self._pipeline.begin(batch)
        return batch.begun

    def rows(self, ids: Ids) -> torch.Tensor:
        """Return the rows of a batch, in memory of the caller's."""
        with self._pipeline.lock:
            self._passes += 1
            self.counts["rows"] += len(ids)
            ahead = self._ahead()
            same = next(
                (one for one in ahead if not one.lent and np.array_equal(one.ids, ids)), None
            )
            if same is not None:
                self._pipeline.release(same)
        if same is not None:
            with contextlib.suppress(StorageError):  # read again below, which may raise it again
                rows = same.finish(self)
                same.rows = self.new_rows(0)  # the pipeline may have the batch for a while
                self.counts["prefetched_rows"] += len(ids)
                return rows
        batch = _Batch(self, ids)
        left = self._copied(ids, batch.rows, ahead) if len(ids) else np.arange(0)
        if len(left) == len(ids):
            batch.begin()
            return batch.finish(self)
        self.counts["prefetched_rows"] += len(ids) - len(left)
        rest = _Batch(self, ids[left])
        rest.begin()
        _bytes(batch.rows)[left] = _bytes(rest.finish(self))
        return batch.rows

    def _copied(self, ids: Ids, rows: torch.Tensor, ahead: Sequence[_Batch]) -> Ids:
        """Copy what batches on their way have of these ids; return the places of the others."""
        left = np.arange(len(ids))
        for batch in ahead:
            with self._pipeline.lock:
                here, places, whole = batch.find(ids[left])
                if batch.released or not len(places):
                    continue
                batch.lent = True
                try:
                    _bytes(rows)[left[here]] = _bytes(batch.finish(self))[places]
                    left = left[~here]
                except StorageError:
                    whole = True
                finally:
                    batch.lent = False
                if whole:
                    self._drop(batch)
        return left

    def _ahead(self) -> list[_Batch]:
        return [batch for batch in self._pipeline.held if not batch.released]

    def _drop(self, batch: _Batch) -> None:
        batch.cancel()
        self._pipeline.release(batch)

    def close(self) -> None:
        """Cancel what is on its way, and close the table."""
        self._pipeline.close()
        self.table.close()


class TableEmbedding(nn.Module):
    """An embedding whose weight stays on the drive: what ``torch.nn.Embedding`` gives, bit for bit.

    The rows of a batch are read when it comes, or ahead of it by :meth:`prefetch`, and those that are wanted often stay
    in memory. The weight is taken for one that does not change. There is no gradient to it: for training it is frozen.

    Any number of threads may call it. A copy (``copy.deepcopy``) has the same table and a cache of its own. Pickling is
    refused, and so is use in a forked child. ``state_dict()`` has nothing of it, and ``load_state_dict()`` no place for
    a weight. Conversions (``model.half()``) convert what it returns, which is on the device of the ids.

    Parameters
    ----------
    table : Table
        Its rows are the weight's.
    padding_idx : int, optional
        An attribute as ``torch.nn.Embedding`` has it, where it stops the gradient only.
    cache_nbytes : int or str
        Memory for rows that are wanted often: ``64 << 20``, or ``"64MiB"``. None by default: what the
        page cache serves gets slower by it.

    Raises
    ------
    ValueError, TypeError
        The table is not one of rows that are vectors, torch has no such dtype, or another argument is not usable.

    Examples
    --------
    >>> model.embed = TableEmbedding.from_safetensors("model/", "embed.weight")  # doctest: +SKIP
    >>> model.embed.prefetch(next_ids)  # doctest: +SKIP
    """

    stays_in_files = ("weight",)  # stream_weights() does not miss a place for it

    def __init__(
        self,
        table: Table,
        *,
        padding_idx: int | None = None,
        cache_nbytes: int | str = 0,
    ) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise TypeError(f"table: {type(table).__name__} is not a tensorferry.Table")
        if len(table.shape) != 2:
            raise ValueError(f"table: its shape is {list(table.shape)}, not [rows, elements]")
        count = table.shape[0]
        if padding_idx is not None:
            padding_idx = integer(padding_idx, "padding_idx", -count, count - 1) % count
        if cache_nbytes != 0:
            cache_nbytes = checked_nbytes(cache_nbytes, "cache_nbytes")
        dtype = table.dtype
        if not isinstance(dtype, torch.dtype):
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        self.num_embeddings, self.embedding_dim = table.shape
        self.padding_idx = padding_idx
        self._dtype = dtype  # of what it returns
        self._how = table, dtype, cache_nbytes
        self._reading = _Reading(*self._how)

    @classmethod
    def from_safetensors(
        cls, path: Path | Sequence[Path], name: str | Sequence[str], **options: Any
    ) -> Self:
        """Make one of a tensor in a model's files, which are opened until :meth:`close`.

        Parameters
        ----------
        path, name
            As for :meth:`tensorferry.Table.from_safetensors`: a file, several, a folder or an index, and the name of
            the tensor or of several whose rows follow each other.
        **options
            As for the class.
        """
        table = Table.from_safetensors(path, name)
        try:
            return cls(table, **options)
        except BaseException:
            table.close()
            raise

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids.

        Raises
        ------
        IndexError
            An id is negative, or not below the number of rows; nothing was read.
        StorageError
            Not all rows could be read.
        """
        return self._rows_of(ids).reshape(*ids.shape, self.embedding_dim)

    def prefetch(self, ids: torch.Tensor) -> bool:
        """Begin to read the rows of a batch that comes later.

        A forward pass with the same ids finds its rows without a copy; one with some of them, or with others besides,
        copies what is here and reads the rest. There are 16 at most, which hold 64 MiB (``TENSORFERRY_READ_AHEAD``), or
        one that is larger; with a cache each counts twice.

        Returns
        -------
        bool
            Whether it has begun. If there is no room, or the read fails at once, the forward pass will read.

        Raises
        ------
        IndexError
            As for the forward pass.
        """
        return bool(_untraced(self._prefetch)(ids))

    def stats(self) -> dict[str, int]:
        """Return what has been looked up so far.

        Returns
        -------
        dict of str to int
            ``rows`` of all forward passes, and how many of them had been prefetched (``prefetched_rows``); and how many
            rows the cache had, for forward passes or prefetches (``cached_rows``).
        """
        return dict(self._reading.counts)

    def close(self) -> None:
        """Cancel prefetches and close the table, also for copies."""
        self._reading.close()

    def extra_repr(self) -> str:
        """Return what ``repr()`` shows."""
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        return text if self.padding_idx is None else f"{text}, padding_idx={self.padding_idx}"

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuse to be trained."""
        if requires_grad:
            raise RuntimeError(_WEIGHT)
        return super().requires_grad_(requires_grad)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(_WEIGHT)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(_WEIGHT)
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with_own = {
            name: value for name, value in vars(self).items() if name not in ("_how", "_reading")
        }
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(with_own, memo))
        vars(made).update(_how=self._how, _reading=_Reading(*self._how))
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: its weight stays in its file (remedy: save the state_dict(), "
            "and make it again)"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device="cpu")).dtype
        applied: Any = super()._apply
        return applied(fn, recurse)  # type: ignore[no-any-return]

    def _checked(self, ids: torch.Tensor) -> Ids:
        self._reading.check_process()
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            given = getattr(ids, "dtype", type(ids).__name__)
            raise TypeError(f"ids: {given} is not a tensor of torch.int64 or torch.int32")
        if recorded():
            raise RuntimeError(
                "a TableEmbedding cannot be traced or exported: its rows would be constants of what is recorded"
            )
        # A copy: the caller may write other ids into the same memory.
        numbers: Ids = np.array(ids.detach().cpu().reshape(-1).numpy(), np.int64)
        outside = (numbers < 0) | (numbers >= self.num_embeddings)
        if outside.any():
            raise IndexError(
                f"ids: {numbers[outside.argmax()]} is outside of a table of {self.num_embeddings} rows"
            )
        return numbers

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        return _untraced(self._look_up)(ids)  # type: ignore[no-any-return]

    def _prefetch(self, ids: torch.Tensor) -> bool:
        return self._reading.prefetch(self._checked(ids))

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._reading.rows(self._checked(ids))
        return rows.to(device=ids.device, dtype=self._dtype)


class TableEmbeddingBag(TableEmbedding):
    """Bags of rows that stay on the drive: what ``torch.nn.EmbeddingBag`` gives, bit for bit.

    Gradients go to ``per_sample_weights`` where these require them. All else is as for :class:`TableEmbedding`.

    Parameters
    ----------
    table, cache_nbytes
        As for :class:`TableEmbedding`.
    mode : "sum", "mean" or "max"
        What becomes of a bag.
    include_last_offset : bool
        Whether offsets have the end of the last bag, too.
    padding_idx : int, optional
        The row that counts for nothing.
    """

    def __init__(
        self,
        table: Table,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        cache_nbytes: int | str = 0,
    ) -> None:
        super().__init__(table, padding_idx=padding_idx, cache_nbytes=cache_nbytes)
        one_of(mode, "mode", ("sum", "mean", "max"))
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what becomes of each bag; errors are those of ``torch.nn.EmbeddingBag`` and of the base."""
        rows = self._rows_of(ids)
        # torch is given a weight with a row for each id, in the order of the ids.
        places = torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device).reshape(ids.shape)
        padding = self.padding_idx
        if padding is not None:
            padding = len(rows)  # also if it does not come: torch has other kernels then
            places[ids == self.padding_idx] = padding
            rows = functional.pad(rows, (0, 0, 0, 1))
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        """Return what ``repr()`` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not look into; what does that takes long to import."""
    return outside_of_graphs(function) if torch.compiler.is_compiling() else function


def _bytes(rows: torch.Tensor) -> Rows:
    """Return the bytes of rows, which are contiguous."""
    return rows.view(torch.uint8).numpy()
