"""CRC-32 checksums of a transfer's bytes, taken on their way."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from tensorferry import _core
from tensorferry.base.checks import integer
from tensorferry.base.reprs import once_made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Smaller chunks cost more than they tell; larger ones do not fit the bounce pool.
MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES = 4096, 4 << 20


class Checksums:
    """Which checksums are wanted of a transfer; after it, what they are. Pass it as ``checksums=``, to one call.

    They are CRC-32s as :func:`zlib.crc32` and zip archives have them, taken while the bytes are in the processor's
    cache.

    Parameters
    ----------
    chunk_nbytes : int, optional
        Take one of each chunk of so many bytes (4096 to 4 MiB), from the transfer's offset on; the last one may be
        shorter.
    segments : bool
        Take one of each segment (array) as well.
    expected : iterable of int, optional
        What the chunks' should be: for a read. No byte of a chunk that differs reaches an array, and
        :class:`ChecksumError` says which bytes of the file it has.
    straight : bool
        Compare the expected ones with what has reached the arrays, rather than before it does: for arrays that nobody
        else looks at before the read has succeeded. No copy is made where memory and range are aligned. After a
        :class:`ChecksumError` the arrays have the damaged bytes.

    Raises
    ------
    ValueError, TypeError
        An argument is not usable.

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
        straight: bool = False,
    ) -> None:
        if chunk_nbytes is not None:
            chunk_nbytes = integer(chunk_nbytes, "chunk_nbytes", MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES)
        elif not segments:
            raise ValueError("chunk_nbytes, segments: neither asks for a checksum")
        elif expected is not None:
            raise ValueError("expected: chunks are compared, and there is no chunk_nbytes")
        if straight and expected is None:
            raise ValueError("straight: nothing is compared, since there is no expected=")
        self._chunk_nbytes = chunk_nbytes
        self._expected = None if expected is None else [operator.index(one) for one in expected]
        for index, one in enumerate(self._expected or ()):
            if not 0 <= one < 1 << 32:
                raise ValueError(f"expected[{index}]: {one} is no 32-bit number")
        self._of_segments = bool(segments)
        self._core: _core.Checksums | _core.Stream = _core.Checksums(
            chunk_nbytes or 0, self._of_segments, self._expected or [], bool(straight)
        )
        self._unused = [self._core]  # taken by the transfer that uses it, at one stroke

    @property
    def chunks(self) -> list[int]:
        """The CRC-32 of each chunk; ValueError before the transfer has succeeded."""
        return _complete(self._core.chunks)

    @property
    def segments(self) -> list[int]:
        """The CRC-32 of each segment, or of the one array; ValueError before the transfer has succeeded."""
        return _complete(self._core.segments)

    @once_made
    def __repr__(self) -> str:
        wanted = [] if self._chunk_nbytes is None else [f"chunk_nbytes={self._chunk_nbytes}"]
        wanted += ["segments=True"] if self._of_segments else []
        wanted += [] if self._expected is None else [f"{len(self._expected)} expected"]
        complete = self._core.segments if self._of_segments else self._core.chunks
        state = "unused" if self._unused else "not complete" if complete is None else "complete"
        return f"<tensorferry.Checksums {', '.join(wanted)}: {state}>"

    def _use(self, nbytes: int, *, write: bool) -> _core.Checksums:
        """Return the core's, for one transfer of so many bytes."""
        if self._expected is not None:
            count = -(-nbytes // (self._chunk_nbytes or 1))
            if write:
                raise ValueError("checksums: expected ones are for reading")
            if count != len(self._expected):
                raise ValueError(
                    f"checksums: {nbytes} bytes have {count} chunks of {self._chunk_nbytes}, and "
                    f"{len(self._expected)} are expected"
                )
        return self._take()

    def _give_back(self, core: _core.Checksums) -> None:
        """Be no transfer's again, unless that which was to have them has begun."""
        if not core.begun:
            self._unused.append(core)

    def _of_stream(self, make: Callable[[int, bool], _core.Stream]) -> _core.Stream:
        """Return a stream, made with the size of chunks and whether segments count, that these are of from now on."""
        if self._expected is not None:
            raise ValueError("checksums: expected ones are for reading")
        unused = self._take()
        try:
            self._core = make(self._chunk_nbytes or 0, self._of_segments)
        except BaseException:
            self._give_back(unused)
            raise
        return self._core

    def _take(self) -> _core.Checksums:
        try:
            return self._unused.pop()
        except IndexError:
            raise ValueError("checksums: these are another transfer's") from None


def _complete(sums: list[int] | None) -> list[int]:
    if sums is None:
        raise ValueError(
            "these checksums are not complete: no transfer that has them has succeeded"
        )
    return sums
