"""CRC-32 checksums that are computed while a transfer moves its bytes.

A chunk is a range of the file with a checksum of its own; a segment is one of several arrays of a transfer.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from tensorferry import _core
from tensorferry.base.checks import integer
from tensorferry.base.reprs import safe_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The chunk size decides how exactly damage is located. Smaller chunks cost more time than that is worth. Larger chunks
# do not fit into the bounce pool: the buffers that hold a chunk until its checksum has been verified.
MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES = 4096, 4 << 20


class Checksums:
    """A request for the CRC-32 checksums of one transfer; it holds their values once the transfer has succeeded.

    Pass it as ``checksums=`` to one call. The checksums are those of :func:`zlib.crc32` and of zip archives. They are
    computed while the bytes are in the processor's cache.

    Parameters
    ----------
    chunk_nbytes : int, optional
        Compute one checksum for each chunk of this many bytes (4096 to 4 MiB), starting at the transfer's offset; the
        last chunk may be shorter.
    segments : bool
        Also compute one checksum for each segment (array).
    expected : iterable of int, optional
        For a read: the checksums that the chunks must have. If a chunk differs, none of its bytes reaches an array,
        and the read raises :class:`ChecksumError` with the chunk's byte range in the file.
    in_place : bool
        Compare the expected checksums after the bytes have reached the arrays, not before. Use it only for arrays that
        no other code reads until the call has succeeded: after a :class:`ChecksumError` they contain the damaged
        bytes. Where memory and file range are aligned it avoids a copy.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid.

    Examples
    --------
    >>> sums = tensorferry.Checksums(1 << 20)  # doctest: +SKIP
    >>> tensorferry.write(path, [a, b], checksums=sums)  # doctest: +SKIP
    >>> check = tensorferry.Checksums(1 << 20, expected=sums.chunks)  # doctest: +SKIP
    >>> tensorferry.read(path, [a, b], checksums=check)  # doctest: +SKIP
    """

    def __init__(
        self,
        chunk_nbytes: int | None = None,
        *,
        segments: bool = False,
        expected: Iterable[int] | None = None,
        in_place: bool = False,
    ) -> None:
        if chunk_nbytes is not None:
            chunk_nbytes = integer(chunk_nbytes, "chunk_nbytes", MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES)
        elif not segments:
            raise ValueError("chunk_nbytes, segments: at least one must be given")
        elif expected is not None:
            raise ValueError("expected: requires chunk_nbytes, because chunks are compared")
        if in_place and expected is None:
            raise ValueError("in_place: requires expected=, because nothing else is compared")
        self._chunk_nbytes = chunk_nbytes
        self._expected = None if expected is None else [operator.index(one) for one in expected]
        for index, one in enumerate(self._expected or ()):
            if not 0 <= one < 1 << 32:
                raise ValueError(f"expected[{index}]: not an unsigned 32-bit integer (got {one})")
        self._of_segments = bool(segments)
        self._core: _core.Checksums | _core.Stream = _core.Checksums(
            chunk_nbytes or 0, self._of_segments, self._expected or [], bool(in_place)
        )
        # A list with one element, which the first transfer that uses this object pops. list.pop() is atomic, so if two
        # threads pass the same Checksums, one gets the element and the other raises ValueError.
        self._unused = [self._core]
        # All bytes may have their CRC-32s although the transfer fails: in its writes, or in its sync at the end.
        self._has_succeeded: Callable[[], bool] = lambda: False

    @property
    def chunks(self) -> list[int]:
        """The CRC-32 of each chunk. Raises ValueError until the transfer has succeeded."""
        return self._complete(self._core.chunks)

    @property
    def segments(self) -> list[int]:
        """The CRC-32 of each segment, or of the single array. Raises ValueError until the transfer has succeeded."""
        return self._complete(self._core.segments)

    def _complete(self, sums: list[int] | None) -> list[int]:
        if sums is None or not self._has_succeeded():
            raise ValueError(
                "checksums: not complete, because no transfer with them has succeeded yet"
            )
        return sums

    @safe_repr
    def __repr__(self) -> str:
        settings = [] if self._chunk_nbytes is None else [f"chunk_nbytes={self._chunk_nbytes}"]
        settings += ["segments=True"] if self._of_segments else []
        settings += [] if self._expected is None else [f"{len(self._expected)} expected"]
        sums = self._core.segments if self._of_segments else self._core.chunks
        complete = sums is not None and self._has_succeeded()
        state = "unused" if self._unused else "complete" if complete else "not complete"
        return f"<tensorferry.Checksums {', '.join(settings)}: {state}>"

    def _claim(self, nbytes: int, *, write: bool) -> _core.Checksums:
        """Return the core's object for the checksums of one transfer of ``nbytes`` bytes; a second transfer raises."""
        if self._expected is not None:
            count = -(-nbytes // (self._chunk_nbytes or 1))
            if write:
                raise ValueError("checksums: expected= is only for reads")
            if count != len(self._expected):
                raise ValueError(
                    f"checksums: {nbytes} bytes have {count} chunks of {self._chunk_nbytes} bytes, but expected= has "
                    f"{len(self._expected)} checksums"
                )
        return self._pop_unused()

    def _release(self, core: _core.Checksums) -> None:
        """Undo :meth:`_claim`, so another transfer can use the checksums, unless the failed transfer has begun."""
        if not core.begun:
            self._unused.append(core)

    def _attach_stream(self, make: Callable[[int, bool], _core.Stream]) -> _core.Stream:
        """Create a core stream with ``make(chunk_nbytes, segments)``, and return it.

        From then on, :attr:`chunks` and :attr:`segments` are the stream's.
        """
        if self._expected is not None:
            raise ValueError("checksums: expected= is only for reads")
        unused = self._pop_unused()
        try:
            self._core = make(self._chunk_nbytes or 0, self._of_segments)
            self._has_succeeded = lambda: True  # the stream has no checksums until it has
        except BaseException:
            self._release(unused)
            raise
        return self._core

    def _pop_unused(self) -> _core.Checksums:
        try:
            return self._unused.pop()
        except IndexError:
            raise ValueError(
                "checksums: this object has been used by another transfer (remedy: pass a new Checksums to each call)"
            ) from None


def checked(checksums: Checksums) -> Checksums:
    """Return a call's argument ``checksums`` after checking its type."""
    if not isinstance(checksums, Checksums):
        raise TypeError(
            f"checksums: expected a tensorferry.Checksums, got {type(checksums).__name__}"
        )
    return checksums
