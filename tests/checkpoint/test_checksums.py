"""CRC-32s of pieces are those of the whole."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.checkpoint import checksums
from tests.checkpoint.programs import load_folder, save_both
from tests.checkpoint.states import assert_same, digests, flipped, mixed_state
from tests.support import child

if TYPE_CHECKING:
    import pathlib

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


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch")
def test_checkpoints_are_the_same_and_verified_where_isal_is_missing(
    directory: pathlib.Path,
) -> None:
    pytest.importorskip("isal")
    save_both(str(directory / "with"))
    child.call(
        "tests.checkpoint.programs:save_and_load_without_isal",
        imports=["torch.distributed.checkpoint"],
        directory=directory,
    )
    assert (directory / "with/file").read_bytes() == (directory / "without/file").read_bytes()
    assert digests(directory / "with/folder") == digests(directory / "without/folder")
    assert_same(load_folder(str(directory / "without/folder")), mixed_state())
    (data,) = (directory / "without/folder").glob("*.distcp")
    data.write_bytes(flipped(data.read_bytes(), 8 * 500_000))
    with pytest.raises(BaseException, match=r"bytes \d+ to \d+ of .*distcp"):
        load_folder(str(directory / "without/folder"))
