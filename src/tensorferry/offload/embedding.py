"""Embeddings with a weight that stays on the drive: the rows of each batch are read, if possible ahead of its use.

The weight is a :class:`~tensorferry.Table`; an id is the number of a row in it. Each batch of ids becomes a
:class:`_BatchRead`: rows that are in the cache are copied from it, and one read of the table gets all other rows. The
read begins either in ``prefetch`` or in ``forward``. A ``Pipeline`` holds the prefetched batches and limits their
memory. A forward pass uses a prefetched batch with the same ids without a copy. Otherwise it copies the rows that
prefetched batches have, and reads the rest.

A prefetch is a hint. If it fails, the forward pass reads its rows again, and raises if that fails.
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

# The most prefetched batches, however small: each forward pass compares its ids with all of them.
_MAX_PREFETCHES = 16

_NO_WEIGHT = (
    "the weight of this embedding stays in its file: it is not a parameter and cannot be trained (remedy: a "
    "torch.nn.Embedding or EmbeddingBag with the weight from safetensors.torch.load_file)"
)


class _BatchRead(Read):
    """A read of the rows of some ids, in the order of the ids."""

    def __init__(self, reading: _TableReader, ids: Ids) -> None:
        self.ids = ids
        self.nbytes = len(ids) * reading.table.row_nbytes
        self.rows = reading.new_rows(len(ids))
        self.due = 0  # the number of the forward pass that is expected to use it
        self.in_use = False  # whether a forward pass is copying from it
        self._cached = reading.cache_nbytes > 0
        self._reading: _TableReader | None = reading
        self._missing: Ids | None = None  # positions of ids that the cache does not have; None: all
        self._future: Future[torch.Tensor] | None = None
        # The distinct ids with their positions, and a mask of those that forward passes have used; made by find().
        self._distinct: tuple[Ids, Ids] | None = None
        self._used: Mask | None = None

    @property
    def memory_nbytes(self) -> int:
        """The memory for all rows. With a cache, the rows that are read need a tensor of their own in addition."""
        return 2 * self.nbytes if self._cached else self.nbytes

    def begin(self) -> None:
        # Drop the reference to the reader: it makes a reference cycle, because the reader's pipeline has this batch.
        reading, self._reading = self._reading, None
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

    def finish(self, reading: _TableReader) -> torch.Tensor:
        """Wait for the read, offer its rows to the cache, and return all rows.

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
        """Find ids in the batch, and mark their rows as used.

        Return a mask of the ids that the batch has, their positions in the batch, and whether all rows of the batch
        have been used.
        """
        if self._distinct is None:
            self._distinct = np.unique(self.ids, return_index=True)
            self._used = np.zeros(len(self._distinct[0]), np.bool_)
        distinct, places = self._distinct
        assert self._used is not None
        at = np.minimum(np.searchsorted(distinct, ids), len(distinct) - 1)
        here = distinct[at] == ids
        self._used[at[here]] = True
        return here, places[at[here]], bool(self._used.all())


class _TableReader:
    """The prefetched and cached rows of a table in one process, for any number of threads."""

    def __init__(self, table: Table, dtype: torch.dtype, cache_nbytes: int) -> None:
        self.table = table
        self.counts = {"rows": 0, "prefetched_rows": 0, "cached_rows": 0}
        self._dtype = dtype
        self.cache_nbytes = cache_nbytes
        self._cache = RowCache(cache_nbytes, table.row_nbytes)
        self._passes = 0
        self._pipeline: Pipeline[_BatchRead] = Pipeline(memory_nbytes=read_ahead_nbytes())

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child: it lacks the table's workers, and another thread may hold the lock."""
        self._pipeline._check_process()

    def new_rows(self, count: int) -> torch.Tensor:
        """Return memory for rows, independent of the default device and of inference mode."""
        with torch.inference_mode(False):
            return torch.empty(count, self.table.shape[1], dtype=self._dtype, device="cpu")

    @contextlib.contextmanager
    def using_cache(self) -> Iterator[RowCache]:
        """Lock the cache for the duration of a ``with`` block.

        If a signal interrupts the block, the cache may be half changed: ``changing`` stays True, and the next call
        replaces the cache with a new one.
        """
        with self._pipeline.lock:
            if self._cache.changing:
                self._cache = RowCache(self.cache_nbytes, self.table.row_nbytes)
            cache = self._cache
            cache.changing = True
            yield cache
            cache.changing = False

    def prefetch(self, ids: Ids) -> bool:
        """Begin to read a batch if there is room for it, and return whether the read has begun.

        To make room, drop batches that were expected to be used by forward passes which are over.
        """
        if not len(ids):
            return True
        with self._pipeline.lock:
            batch = _BatchRead(self, ids)
            while len(
                ahead := self._prefetched()
            ) == _MAX_PREFETCHES or not self._pipeline.may_start(batch):
                late = next((one for one in ahead if one.due <= self._passes), None)
                if late is None:
                    return False
                self._drop(late)
            batch.due = self._passes + len(ahead) + 1
            with contextlib.suppress(StorageError):  # the forward pass reads again, and raises
                self._pipeline.begin(batch)
        return batch.begun

    def rows(self, ids: Ids) -> torch.Tensor:
        """Return the rows of a batch, in memory that belongs to the caller."""
        with self._pipeline.lock:
            self._passes += 1
            self.counts["rows"] += len(ids)
            ahead = self._prefetched()
            same = next(
                (one for one in ahead if not one.in_use and np.array_equal(one.ids, ids)), None
            )
            if same is not None:
                self._pipeline.release(same)
        if same is not None:
            # If the prefetch has failed, the rows are read again below, which may raise.
            with contextlib.suppress(StorageError):
                rows = same.finish(self)
                # The caller owns the rows now. The pipeline may keep the batch for a while, which must not keep the
                # rows' memory alive.
                same.rows = self.new_rows(0)
                self.counts["prefetched_rows"] += len(ids)
                return rows
        batch = _BatchRead(self, ids)
        left = self._copy_prefetched(ids, batch.rows, ahead) if len(ids) else np.arange(0)
        if len(left) == len(ids):
            batch.begin()
            return batch.finish(self)
        self.counts["prefetched_rows"] += len(ids) - len(left)
        rest = _BatchRead(self, ids[left])
        rest.begin()
        _bytes(batch.rows)[left] = _bytes(rest.finish(self))
        return batch.rows

    def _copy_prefetched(self, ids: Ids, rows: torch.Tensor, ahead: Sequence[_BatchRead]) -> Ids:
        """Copy rows from prefetched batches; return the positions of the ids that none of them has."""
        left = np.arange(len(ids))
        for batch in ahead:
            with self._pipeline.lock:
                here, places, whole = batch.find(ids[left])
                if batch.released or not len(places):
                    continue
                batch.in_use = True
                try:
                    _bytes(rows)[left[here]] = _bytes(batch.finish(self))[places]
                    left = left[~here]
                except StorageError:
                    whole = True
                finally:
                    batch.in_use = False
                if whole:
                    self._drop(batch)
        return left

    def _prefetched(self) -> list[_BatchRead]:
        return [batch for batch in self._pipeline.held if not batch.released]

    def _drop(self, batch: _BatchRead) -> None:
        batch.cancel()
        self._pipeline.release(batch)

    def close(self) -> None:
        """Cancel reads in flight, and close the table."""
        self._pipeline.close()
        self.table.close()


class TableEmbedding(nn.Module):
    """An embedding with its weight on the drive: returns bit for bit what ``torch.nn.Embedding`` returns.

    The rows of a batch are read in the forward pass, or ahead of it by :meth:`prefetch`. Frequently used rows stay in
    memory. The weight must not change while it is used. It gets no gradient: in training it is frozen.

    Any number of threads may call it. A copy (``copy.deepcopy``) shares the table and has its own cache. It cannot be
    pickled, or used in a forked child. ``state_dict()`` does not contain the weight, and ``load_state_dict()`` does not
    accept it. Conversions (``model.half()``) convert the returned rows, which are on the device of the ids.

    Parameters
    ----------
    table : Table
        The table; its rows are the rows of the weight.
    padding_idx : int, optional
        An attribute as in ``torch.nn.Embedding``, where it only stops the gradient.
    cache_nbytes : int or str
        Memory for frequently used rows: ``64 << 20``, or ``"64MiB"``. By default there is no cache, because
        a cache makes access to rows that are in the page cache slower.

    Raises
    ------
    ValueError, TypeError
        The table's rows are not vectors, torch does not have its dtype, or another argument is invalid.

    Examples
    --------
    >>> model.embed = TableEmbedding.from_safetensors("model/", "embed.weight")  # doctest: +SKIP
    >>> model.embed.prefetch(next_ids)  # doctest: +SKIP
    """

    stays_in_files = ("weight",)  # stream_weights() does not warn that the model lacks this tensor

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
            raise ValueError(
                f"table: expected two dimensions, [rows, elements] (got shape {list(table.shape)})"
            )
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
        self._dtype = dtype  # of the returned rows
        self._reading_arguments = table, dtype, cache_nbytes
        self._reading = _TableReader(*self._reading_arguments)

    @classmethod
    def from_safetensors(
        cls, path: Path | Sequence[Path], name: str | Sequence[str], **options: Any
    ) -> Self:
        """Make an embedding from a tensor in a model's files, which stay open until :meth:`close`.

        Parameters
        ----------
        path, name
            As for :meth:`tensorferry.Table.from_safetensors`: a file, several files, a directory or an index; and the
            name of the tensor, or of several tensors with consecutive rows.
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
            An id is negative or too large; nothing was read.
        StorageError
            A row could not be read.
        """
        return self._rows_of(ids).reshape(*ids.shape, self.embedding_dim)

    def prefetch(self, ids: torch.Tensor) -> bool:
        """Begin to read the rows of a later batch.

        A forward pass with the same ids uses these rows without a copy; one with only some of the ids, or with
        additional ones, copies the prefetched rows and reads the rest. At most 16 prefetches are held, with at most 64
        MiB in total (``TENSORFERRY_READ_AHEAD``) or a single larger one; with a cache each counts twice.

        Returns
        -------
        bool
            Whether the read has begun. If there is no room, or the read fails immediately, the forward pass reads.

        Raises
        ------
        IndexError
            As for the forward pass.
        """
        return bool(_untraced(self._prefetch)(ids))

    def stats(self) -> dict[str, int]:
        """Return statistics of lookups.

        Returns
        -------
        dict of str to int
            ``rows`` of all forward passes, those of them that had been prefetched (``prefetched_rows``), and the rows
            that the cache provided for forward passes or prefetches (``cached_rows``).
        """
        return dict(self._reading.counts)

    def close(self) -> None:
        """Cancel prefetches and close the table, which copies share."""
        self._reading.close()

    def extra_repr(self) -> str:
        """Return the arguments for ``repr()``."""
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        return text if self.padding_idx is None else f"{text}, padding_idx={self.padding_idx}"

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise if gradients are required: the weight cannot be trained."""
        if requires_grad:
            raise RuntimeError(_NO_WEIGHT)
        return super().requires_grad_(requires_grad)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(_NO_WEIGHT)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(_NO_WEIGHT)
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        # The copy has the same table, and a reader of its own.
        memo[id(self._reading_arguments)] = self._reading_arguments
        memo[id(self._reading)] = _TableReader(*self._reading_arguments)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: its weight stays in its file (remedy: save the state_dict(), "
            "and make the module again)"
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
                "a TableEmbedding cannot be traced or exported: the recording would contain its rows as constants"
            )
        # A copy: the caller may change the ids before the rows are read.
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
    """Bags of rows on the drive: returns bit for bit what ``torch.nn.EmbeddingBag`` returns.

    ``per_sample_weights`` get gradients if they require them. Otherwise as :class:`TableEmbedding`.

    Parameters
    ----------
    table, cache_nbytes
        As for :class:`TableEmbedding`.
    mode : "sum", "mean" or "max"
        How a bag is reduced.
    include_last_offset : bool
        Whether offsets include the end of the last bag.
    padding_idx : int, optional
        The row that is excluded from bags.
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
        """Return the reduced bags; raises like ``torch.nn.EmbeddingBag`` and :class:`TableEmbedding`."""
        rows = self._rows_of(ids)
        # torch's function gets the batch's rows as its weight, with one row per id in the order of the ids.
        places = torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device).reshape(ids.shape)
        padding = self.padding_idx
        if padding is not None:
            # Do this even if no id is the padding: with a padding_idx torch selects other kernels, and the results must
            # be the same bits.
            padding = len(rows)
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
        """Return the arguments for ``repr()``."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace. Outside of torch.compile, avoid its slow import."""
    return outside_of_graphs(function) if torch.compiler.is_compiling() else function


def _bytes(rows: torch.Tensor) -> Rows:
    """Return the bytes of contiguous rows."""
    return rows.view(torch.uint8).numpy()
