"""CRC-32s equal zlib's, those of pieces combine to that of the whole, and a long one does not block other threads."""

from __future__ import annotations

import sys
import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry import _core

pieces = st.binary(max_size=2000)
crcs = st.integers(0, 2**32 - 1)


@given(pieces, pieces, crcs)
def test_crcs_continue_and_combine_to_those_of_both(first: bytes, second: bytes, crc: int) -> None:
    whole = zlib.crc32(first + second, crc)
    assert _core.crc32(second, _core.crc32(first, crc)) == whole
    begin = _core.crc32(first, crc)
    assert _core.crc32_combine(begin, _core.crc32(second), len(second)) == whole


@pytest.mark.parametrize("nbytes", [(16 << 10) - 1, 16 << 10, (1 << 20) + 3])
def test_any_buffer_is_taken(nbytes: int) -> None:
    content = bytes(range(251)) * (nbytes // 251 + 1)
    view = memoryview(content)[1:nbytes]
    for buffer in (view, bytes(view), bytearray(view)):
        assert _core.crc32(buffer) == zlib.crc32(view)
    assert _core.crc32(memoryview(bytes(4096)).cast("I", (32, 32))) == zlib.crc32(bytes(4096))


def test_what_is_no_string_of_bytes_or_length_is_refused() -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        _core.crc32("text")
    with pytest.raises(BufferError, match="contiguous"):
        _core.crc32(memoryview(b"abcd")[::2])
    for arguments in ((0, 0, -1), (0, 0, 1 << 64), (1 << 32, 0, 0)):
        with pytest.raises(TypeError):
            _core.crc32_combine(*arguments)


def test_a_buffer_is_let_go_of() -> None:
    for nbytes in (100, 1 << 20):
        buffer = bytearray(nbytes)
        _core.crc32(buffer)
        buffer.append(0)  # not while it is exported


def test_others_run_while_a_long_crc_is_taken() -> None:
    long = bytes(256 << 20)

    def others_ran() -> bool:
        begun, ended = threading.Event(), threading.Event()

        def take() -> None:
            begun.set()
            _core.crc32(long)
            ended.set()

        thread = threading.Thread(target=take)
        thread.start()
        begun.wait()
        ran = not ended.is_set()
        thread.join()
        return ran

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # Python does not ask a thread to release the GIL
    try:
        assert any(others_ran() for _ in range(20))
    finally:
        sys.setswitchinterval(interval)
