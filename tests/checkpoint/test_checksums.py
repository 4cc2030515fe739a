"""CRC-32s of pieces are those of the whole."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.checkpoint import checksums

pieces = st.binary(max_size=2000)


@given(pieces, pieces)
def test_combined_crcs_are_the_crc_of_both(first: bytes, second: bytes) -> None:
    whole = zlib.crc32(first + second)
    crcs = zlib.crc32(first), zlib.crc32(second)
    assert checksums.crc32_combine(*crcs, len(second)) == whole
    # what serves where isal is missing
    assert checksums._combine_by_polynomials(*crcs, len(second)) == whole


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 32) + 5, 1 << 40])
def test_both_ways_of_combining_agree_on_large_lengths(nbytes: int) -> None:
    library = pytest.importorskip("isal.isal_zlib")
    combined = library.crc32_combine(0x12345678, 0x9ABCDEF0, nbytes)
    assert checksums._combine_by_polynomials(0x12345678, 0x9ABCDEF0, nbytes) == combined


def test_crc32_continues_from_a_value() -> None:
    assert checksums.crc32(b"behind", checksums.crc32(b"before ")) == zlib.crc32(b"before behind")


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="nbytes2: -1"):
        checksums.crc32_combine(0, 0, -1)


@pytest.mark.parametrize(
    ("nbytes", "count"),
    [(0, 0), (1, 1), (256 * 1024, 1), (256 * 1024 + 1, 2)],
)
def test_last_chunk_may_be_short(nbytes: int, count: int) -> None:
    assert checksums.chunk_count(nbytes) == count
