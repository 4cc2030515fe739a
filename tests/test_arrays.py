"""What counts as an array, and what is refused before any I/O."""

from __future__ import annotations

import array
import mmap
from typing import TYPE_CHECKING

import numpy
import pytest
import torch

import tensorferry
from tensorferry.arrays import memory_of

if TYPE_CHECKING:
    import pathlib


class OnlyDlpack:
    """An array of another library: nothing but DLPack."""

    def __init__(self, inner: numpy.ndarray) -> None:
        self._inner = inner

    def __dlpack__(self, **keywords: object) -> object:
        return self._inner.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._inner.__dlpack_device__()


class OnAnAccelerator(OnlyDlpack):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


WRITABLE = [
    lambda: torch.zeros(6, dtype=torch.int16),
    lambda: torch.zeros(3, 4, dtype=torch.uint8),
    lambda: torch.nn.Parameter(torch.zeros(3)),
    lambda: numpy.zeros((2, 6), numpy.uint8),
    lambda: numpy.zeros(3, numpy.float32),
    lambda: bytearray(12),
    lambda: memoryview(bytearray(12)),
    lambda: array.array("i", [0, 0, 0]),
    lambda: mmap.mmap(-1, 12),
    lambda: OnlyDlpack(numpy.zeros(12, numpy.uint8)),
]


@pytest.mark.parametrize("make", WRITABLE)
def test_reads_fill_every_kind_of_array(directory: pathlib.Path, make: object) -> None:
    content = bytes(range(1, 13))
    tensorferry.write(directory / "file", content)
    destination = make()  # type: ignore[operator]
    assert tensorferry.read(directory / "file", destination) is destination
    tensorferry.write(directory / "copy", destination)
    assert (directory / "copy").read_bytes() == content


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"123456",
        lambda: memoryview(b"123456"),
        lambda: torch.zeros(4, 4).t()[1:],
        lambda: torch.zeros(8)[::2],
        lambda: numpy.zeros((4, 4)).T[1:],
        lambda: numpy.broadcast_to(numpy.zeros(1), (5,)),
        lambda: memoryview(bytearray(8))[::2],
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    ],
)
def test_what_is_readonly_or_not_contiguous_cannot_be_read_into(
    directory: pathlib.Path, make: object
) -> None:
    with pytest.raises(ValueError, match="array"):
        tensorferry.read(directory / "missing", make())  # type: ignore[operator]


def test_sources_that_are_not_contiguous_are_written_as_their_contiguous_copy(
    directory: pathlib.Path,
) -> None:
    matrix = torch.arange(12, dtype=torch.uint8).view(3, 4)
    for source in (matrix.t(), matrix.numpy().T, memoryview(matrix.t().numpy())):
        tensorferry.write(directory / "file", source)
        assert (directory / "file").read_bytes() == matrix.t().contiguous().numpy().tobytes()
    conjugate = torch.tensor([1 + 2j]).conj()
    tensorferry.write(directory / "file", conjugate, truncate=True)
    assert (directory / "file").read_bytes() == conjugate.resolve_conj().numpy().tobytes()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: None, TypeError),
        (lambda: 5, TypeError),
        (lambda: "text", TypeError),
        (lambda: [1, 2], TypeError),
        (lambda: torch.zeros(3, device="meta"), ValueError),
        (lambda: torch.zeros(3, 3).to_sparse(), ValueError),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), ValueError),
        (lambda: numpy.array([object()]), ValueError),
        (lambda: OnAnAccelerator(numpy.zeros(3)), ValueError),
    ],
)
def test_what_has_no_bytes_of_its_own_is_refused(
    directory: pathlib.Path, make: object, error: type
) -> None:
    path = directory / "never"
    with pytest.raises(error, match="array"):
        tensorferry.write(path, make())  # type: ignore[operator]
    assert not path.exists()


def test_a_tensor_whose_storage_was_freed_is_refused(directory: pathlib.Path) -> None:
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        tensorferry.write(directory / "never", tensor)


def test_fake_tensors_are_refused(directory: pathlib.Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(5)
    with pytest.raises(ValueError):
        tensorferry.write(directory / "never", fake)


def test_leaves_that_require_grad_are_read_into_and_stay_leaves(directory: pathlib.Path) -> None:
    leaf = torch.zeros(4, requires_grad=True)
    tensorferry.write(directory / "file", torch.arange(4.0))
    tensorferry.read(directory / "file", leaf)
    assert leaf.tolist() == [0, 1, 2, 3]
    assert leaf.is_leaf


def test_a_buffer_stays_exported_while_its_memory_is_in_use() -> None:
    buffer = bytearray(100)
    memory = memory_of(buffer, writable=True)
    with pytest.raises(BufferError):
        buffer.extend(b"more")  # would move the memory under the transfer
    del memory
    buffer.extend(b"more")
