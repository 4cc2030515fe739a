"""The bytes around payloads are the same as those of torch.save, for every tensor."""

from __future__ import annotations

import io
import tempfile
import zipfile
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorferry
from tensorferry.checkpoint.zipformat.archive import (
    MAX_OVERHEAD_NBYTES,
    Archive,
    archive_of,
    plain_bytes,
    tensor_archive,
)
from tensorferry.transfer.new_file import NewFile
from tests.checkpoint.archives import filled, saved

pytestmark = pytest.mark.skipif(
    not hasattr(torch.serialization, "skip_data"), reason="this torch has no skip_data"
)

NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


@st.composite
def dense_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw tensors of all dtypes; their elements fill their memory, in any order of dimensions."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 5), max_size=5))
    order = draw(st.permutations(range(len(shape))))
    numel = torch.Size(shape).numel()
    content = draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().view(dtype)
    return flat.reshape([shape[k] for k in order]).permute(
        [order.index(k) for k in range(len(shape))]
    )


@given(dense_tensors())
def test_dense_tensors_are_saved_byte_for_byte(tensor: torch.Tensor) -> None:
    content = plain_bytes(tensor)
    assert content is not None
    assert content.numpy().tobytes() == stored_bytes(tensor)
    archive = tensor_archive(tensor.dtype, tensor.size(), tensor.stride())
    assert assembled(archive, [stored_bytes(tensor)]) == saved(tensor)
    assert archive.nbytes - tensor.nbytes <= MAX_OVERHEAD_NBYTES


@pytest.mark.parametrize(
    "obj",
    [
        {"a": torch.arange(5.0), "nested": [torch.eye(3), {"b": torch.arange(7)}], "c": 7},
        {"empty": torch.zeros(0), "full": torch.ones(3), "empty too": torch.zeros(0, 4)},
        torch.nn.Linear(3, 4).state_dict(),
        {str(k): torch.full((k,), k) for k in range(1, 30)},
        {"no tensor": "at all"},
    ],
    ids=["nested", "empty ones", "state_dict", "thirty", "none"],
)
def test_objects_of_many_tensors_are_saved_byte_for_byte(obj: Any) -> None:
    archive = archive_of(obj)
    with zipfile.ZipFile(io.BytesIO(saved(obj))) as reference:
        payloads = [
            reference.read(record)
            for record in reference.infolist()
            if "/data/" in record.filename and record.file_size
        ]
    assert archive.payload_nbytes == tuple(map(len, payloads))
    assert assembled(archive, payloads) == saved(obj)


def test_payloads_beyond_four_gigabytes_have_their_wider_fields() -> None:
    # Memory that is never written to is none: all pages are the kernel's page of zeros.
    huge = torch.zeros((4 << 30) + 100, dtype=torch.uint8)
    sink = HeadAndTail()
    torch.save(huge, sink)  # type: ignore[arg-type]
    archive = tensor_archive(huge.dtype, huge.size(), huge.stride())
    assert archive.pieces[0] == sink.head
    assert filled(archive.pieces[1], archive.fields(1, [0]), [sink.crc]) == sink.tail


def test_archives_are_whole_for_other_readers() -> None:
    tensor = torch.randn(100, 30)
    archive = tensor_archive(tensor.dtype, tensor.size(), tensor.stride())
    with zipfile.ZipFile(io.BytesIO(assembled(archive, [stored_bytes(tensor)]))) as reader:
        assert reader.testzip() is None


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_another_alignment_is_followed(alignment: int) -> None:
    config = pytest.importorskip("torch.utils.serialization.config")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch has one alignment")
    tensor = torch.randn(100)
    with config.patch("save.storage_alignment", alignment):
        archive = tensor_archive(tensor.dtype, tensor.size(), tensor.stride())
        assert assembled(archive, [stored_bytes(tensor)]) == saved(tensor)
        assert len(archive.pieces[0]) % alignment == 0


def test_checksums_are_written_even_where_torch_is_told_to_leave_them_out() -> None:
    config = pytest.importorskip("torch.utils.serialization.config")
    obj = {"a": torch.randn(2, 3, 5, 7), "b": torch.zeros(0)}
    complete = saved(obj)
    with config.patch("save.compute_crc32", False):
        assert saved(obj) != complete
        assert assembled(archive_of(obj), [stored_bytes(obj["a"])]) == complete


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(20)[::2],
        torch.ones(3).expand(4, 3),
        torch.zeros(0),
        torch.ones(3, requires_grad=True),
        torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj(),
        torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj().imag,
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.empty(3, device="meta"),
        torch.arange(6).as_strided((2, 2), (1, 1)),
    ],
    ids=[
        "step",
        "expanded",
        "empty",
        "grad",
        "conj",
        "neg",
        "sparse",
        "subclass",
        "meta",
        "overlap",
    ],
)
def test_what_is_no_plain_dense_tensor_is_left_to_torch(tensor: torch.Tensor) -> None:
    assert plain_bytes(tensor) is None


def assembled(archive: Archive, payloads: list[bytes]) -> bytes:
    """Return the archive that a stream writes, which equals the one that is written without a stream."""
    crcs = [zlib.crc32(payload) for payload in payloads]
    by_hand = archive.pieces[0]
    numbers: list[int] = []
    with tempfile.NamedTemporaryFile() as file:
        sums = tensorferry.Checksums(segments=True)
        new = NewFile(tensorferry.open(file.name, "r+"), checksums=sums)
        new.write_bytes(archive.pieces[0])
        for k, payload in enumerate(payloads):
            numbers.append(new.segment_count)
            new.write(payload)
            new.write_bytes(archive.pieces[k + 1], archive.fields(k + 1, numbers))
            by_hand += payload + filled(
                archive.pieces[k + 1], archive.fields(k + 1, range(k + 1)), crcs
            )
        new.finish(sync=False)
        written = file.read()
    assert written == by_hand
    return written


def stored_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())


class HeadAndTail(io.RawIOBase):
    """A file that keeps the bytes before and after the one large write, and the CRC-32 of that write."""

    def __init__(self) -> None:
        self.head, self.tail, self.crc = b"", b"", 0
        self._seen = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if view.nbytes > 1 << 20:
            self.crc, self._seen = zlib.crc32(view, self.crc), True
        elif self._seen:
            self.tail += bytes(view)
        else:
            self.head += bytes(view)
        return view.nbytes
