"""The ops that builders load, without DeepSpeed: signatures, memory, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tensorferry.base import libraries
from tensorferry.deepnvme import ops
from tests.support.child import call
from tests.support.pretended import CudaArray, pretend_driver, pretend_no_driver

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes

torch = pytest.importorskip("torch")

EXAMPLE = torch.empty(0, dtype=torch.uint8)


def test_locked_tensors_are_known_to_every_kind_of_handle() -> None:
    pins, handle = ops.pin_handle(), ops.aio_handle()
    for maker, other in ((pins, handle), (handle, pins)):
        tensor = maker.new_cpu_locked_tensor(10_000, torch.empty(0))
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (10_000,))
        assert maker.is_pinned(tensor)
        assert other.is_pinned(tensor)
        assert other.is_pinned(tensor[100:200])
        assert other.free_cpu_locked_tensor(tensor)
        assert not maker.free_cpu_locked_tensor(tensor)
        assert not maker.is_pinned(tensor)
    assert not pins.is_pinned(torch.empty(10_000))


def test_locked_tensors_are_freed_by_their_address() -> None:
    pins = ops.pin_handle()
    tensor = pins.new_cpu_locked_tensor(num_elem=5000, example_tensor=EXAMPLE)
    address = tensor.data_ptr()
    assert not pins.free_cpu_locked_tensor_by_ptr(address + 8)
    assert not pins.free_cpu_locked_tensor_by_ptr(0)
    assert not pins.free_cpu_locked_tensor_by_ptr(1 << 70)
    assert pins.free_cpu_locked_tensor_by_ptr(address)
    assert not pins.free_cpu_locked_tensor_by_ptr(address)
    tensor.fill_(1)  # freed, and still safe
    with pytest.raises(TypeError, match="address"):
        pins.free_cpu_locked_tensor_by_ptr(tensor)


def unlockable() -> list[bool]:
    """is_pinned() of handles on machines that cannot lock memory."""
    pins, handle = ops.pin_handle(), ops.aio_handle()
    tensor = handle.new_cpu_locked_tensor(1 << 20, EXAMPLE)
    known = [tensorferry.aio_handle().is_pinned(tensor), handle.is_pinned(tensor[5:])]
    known.append(pins.is_pinned(tensor))
    handle.free_cpu_locked_tensor(tensor)
    return [*known, handle.is_pinned(tensor)]


def test_where_nothing_can_be_locked_deepspeeds_checks_still_hold(lock_nothing: list[str]) -> None:
    ended = call(f"{__name__}:unlockable", prefix=lock_nothing)
    assert ended.result == [False, True, True, False]
    assert "RLIMIT_MEMLOCK" in ended.output


def test_aio_write_and_aio_read_move_a_whole_tensor(
    directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = str(directory / "file")
    source = torch.from_numpy(random_bytes(3_000_007))
    assert ops.aio_write(source, path, 1 << 20, 8, False, True, True) == 0
    found = torch.zeros_like(source)
    assert ops.aio_read(found, path, 4096, 4, True, False, True) == 0
    assert torch.equal(found, source)
    with pytest.raises(tensorferry.ShortReadError):
        ops.aio_read(
            torch.empty(3_000_008, dtype=torch.uint8), path, 1 << 20, 8, False, True, False
        )
    with pytest.raises(ValueError, match="block_size"):
        ops.aio_read(found, path, 0, 8, False, True, False)


@pytest.mark.parametrize(
    ("dest", "src"),
    [
        (torch.zeros(5, 3), torch.arange(15.0).view(5, 3)),
        (torch.zeros(64, dtype=torch.bfloat16), torch.arange(64.0).bfloat16()),
        (torch.zeros(60, dtype=torch.uint8), torch.arange(15.0)),
        (torch.zeros(6), torch.arange(6.0).view(3, 2).t()),
        (torch.zeros(0), torch.zeros(0)),
    ],
)
def test_memcpy_copies_every_byte_and_no_more(dest: torch.Tensor, src: torch.Tensor) -> None:
    around = torch.full((dest.numel() + 20,), 7, dtype=dest.dtype)
    inner = around[10 : 10 + dest.numel()].view(dest.shape)
    assert ops.deepspeed_memcpy(inner, src) == 0
    assert (
        inner.numpy(force=True).tobytes() == src.contiguous().numpy().tobytes()
        if (dest.dtype is not torch.bfloat16)
        else torch.equal(inner, src)
    )
    assert (around[:10] == 7).all()
    assert (around[10 + dest.numel() :] == 7).all()


def test_memcpy_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="src: expected 12 bytes, the size of dest, got 8"):
        ops.deepspeed_memcpy(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="dest"):
        ops.deepspeed_memcpy(torch.zeros(3, 2).t(), torch.zeros(2, 3))
    with pytest.raises(TypeError, match="src: expected a torch tensor, got ndarray"):
        ops.deepspeed_memcpy(torch.zeros(3), np.zeros(3, np.float32))


DTYPES = [torch.float32, torch.half, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_cast_to_bytes_without_a_copy(dtype: torch.dtype) -> None:
    tensors = [torch.ones(shape).to(dtype) for shape in ((1024,), (3, 5), (), (1,), (0,))]
    tensors.append(torch.nn.Parameter(torch.ones(4)))
    tensors.append(torch.ones(9).to(dtype).as_strided((1, 1), (3, 3)))
    cast = ops.cast_to_byte_tensor(tensors)
    assert isinstance(cast, list)
    for tensor, found in zip(tensors, cast, strict=True):
        assert found.dtype == torch.uint8
        assert tuple(found.shape) == (tensor.nbytes,)
        assert found.data_ptr() == tensor.data_ptr()
        assert not found.requires_grad
    assert ops.cast_to_byte_tensor(src_tensor=tensors[0]).data_ptr() == tensors[0].data_ptr()
    with pytest.raises(ValueError, match="not contiguous"):
        ops.cast_to_byte_tensor(torch.zeros(4, 4).t())


@pytest.mark.parametrize("arguments", [(), (1 << 20, 128, False, False, 1)])
def test_gds_handles_are_refused_with_what_to_use(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(ops._core, "open_cufile", lambda *_: ("no libcufile", False, ""))
    with pytest.raises(tensorferry.EngineUnavailableError, match="no libcufile") as caught:
        ops.gds_handle(*arguments)
    assert "use_gds" in str(caught.value)


def test_gds_handles_are_ours_where_cufile_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch)
    monkeypatch.setattr(ops._core, "open_cufile", lambda *_: (None, False, "no nvidia-fs"))
    with ops.gds_handle(block_size=1 << 20, queue_depth=8, intra_op_parallelism=2) as handle:
        assert isinstance(handle, tensorferry.gds_handle)
        assert handle.engine.endswith("(compat)")
        locked, on_gpu = handle.new_cpu_locked_tensor(100, EXAMPLE), CudaArray()
        assert handle.is_pinned(locked)
        assert not handle.is_pinned(on_gpu)
        handle.pin_device_tensor(on_gpu)
        assert handle.is_pinned(on_gpu)
        assert handle.free_pinned_device_tensor(on_gpu)


def test_gds_is_refused_for_what_is_missing_without_opening_cufile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_cufile(*_: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(ops._core, "open_cufile", open_cufile)
    monkeypatch.setattr(libraries, "cufile_refusal", lambda: "no libcufile")
    pretend_no_driver(monkeypatch)
    assert "no driver" in str(ops.gds_refusal())
    pretend_driver(monkeypatch)
    assert "no libcufile" in str(ops.gds_refusal())
    assert "use_gds" in str(ops.gds_refusal())
    monkeypatch.setattr(libraries, "cufile_refusal", lambda: None)
    assert ops.gds_refusal() is None


def test_memcpy_takes_host_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch)
    with pytest.raises(ValueError, match=r"src: expected an array in host memory"):
        ops.deepspeed_memcpy(torch.zeros(12), CudaArray())
