"""Aligned, page-locked memory and the bounce pool."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

import numpy
import pytest

import tensorferry
from tensorferry import _core
from tensorferry.transfer import arrays, memory
from tests.support import commands
from tests.support.expect import assert_equal
from tests.support.optional import torch
from tests.support.pretended import CudaArray, pretend_driver

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes


@pytest.mark.parametrize(
    "kind", ["torch.float32", "torch.bfloat16", "torch.uint8", "f8", numpy.dtype("i2")]
)
@pytest.mark.parametrize("shape", [5, (0,), (3, 4), (), (1 << 20,)])
def test_empty_gives_aligned_arrays_of_the_kind_asked_for(shape: object, kind: object) -> None:
    name = str(kind).removeprefix("torch.")
    is_tensor = name != str(kind)
    dtype = getattr(torch, name) if is_tensor else kind
    array = tensorferry.empty(shape, dtype)  # type: ignore[arg-type]
    assert tuple(array.shape) == ((shape,) if isinstance(shape, int) else shape)
    assert array.dtype == dtype
    assert isinstance(array, torch.Tensor if is_tensor else numpy.ndarray)
    if array.nbytes:
        address = array.data_ptr() if is_tensor else array.ctypes.data
        assert address % 4096 == 0
        assert not array.any()
        array[...] = 1  # writable


def test_empty_gives_torchs_default_dtype() -> None:
    wanted = torch.get_default_dtype()
    assert tensorferry.empty(3).dtype == wanted


def test_empty_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="negative"):
        tensorferry.empty((2, -1), "f4")
    with pytest.raises(ValueError, match="objects"):
        tensorferry.empty(2, object)
    with pytest.raises(MemoryError):
        tensorferry.empty(1 << 55, "f8")


def locked_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmLck"))


def test_locked_memory_goes_with_its_last_array() -> None:
    gc.collect()
    before = locked_kib()
    array = tensorferry.empty(4 << 20, "u1")
    if locked_kib() == before:
        pytest.skip("RLIMIT_MEMLOCK allows no 4 MiB here")
    view = array[100:200]
    del array
    assert locked_kib() > before
    del view
    gc.collect()
    assert locked_kib() == before


def test_a_locked_tensor_of_a_handle_is_zeros_and_outlives_it() -> None:
    handle = tensorferry.aio_handle()
    tensor = handle.new_cpu_locked_tensor(10_000, torch.ones(3, dtype=torch.float16))
    assert not tensor.any()
    pinned = handle.is_pinned(tensor)
    handle.close()
    assert handle.is_pinned(tensor[5:]) == pinned
    tensor.fill_(1)
    with pytest.raises(TypeError, match="example_tensor"):
        handle.new_cpu_locked_tensor(1)


@pytest.mark.parametrize(
    ("initialized", "cuda_version", "last_gpu", "expected"),
    [
        (False, "13.0", -1, -1),
        (False, None, 2, 2),
        (True, "13.0", -1, 5),
        (True, "13.0", 2, 5),
        (True, None, -1, -1),  # a torch for ROCm
    ],
)
def test_locked_memory_is_registered_with_cuda_where_that_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
    initialized: bool,
    cuda_version: str | None,
    last_gpu: int,
    expected: int,
) -> None:
    asked = []
    allocate = _core.allocate

    def watch(nbytes: int, lock: bool, gpu: int) -> object:
        asked.append((lock, gpu))
        return allocate(nbytes, lock)

    monkeypatch.setattr(memory._core, "allocate", watch)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(arrays, "last_gpu", last_gpu)
    tensorferry.empty(100, torch.uint8)
    tensorferry.empty(100, "u1")
    tensorferry.aio_handle().new_cpu_locked_tensor(100, torch.zeros(1))
    assert asked == [(True, expected)] * 3


def test_gpu_memory_is_no_locked_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch)
    handle = tensorferry.aio_handle()
    array = CudaArray()
    assert not handle.is_pinned(array)
    assert not handle.free_cpu_locked_tensor(array)
    assert not memory.is_in_locked_tensor(array)


def test_bounce_pool_is_settable(directory: pathlib.Path, random_bytes: RandomBytes) -> None:
    assert tensorferry.bounce_pool_nbytes() == 32 << 20
    with pytest.raises(ValueError, match="nbytes"):
        tensorferry.set_bounce_pool_nbytes(1000)
    source = random_bytes(30_000_001)[1:]
    try:
        tensorferry.set_bounce_pool_nbytes(1 << 20)
        tensorferry.write(directory / "file", source)
        assert_equal(tensorferry.read(directory / "file", numpy.empty_like(source)), source)
    finally:
        tensorferry.set_bounce_pool_nbytes(32 << 20)


def test_unaligned_transfers_add_no_more_than_the_pool(directory: pathlib.Path) -> None:
    program = f"""
import numpy, tensorferry
from tensorferry.tuning.stopwatch import Stopwatch
memory = numpy.ones((256 << 20) + 64, numpy.uint8)
array = memory[-memory.ctypes.data % 4096 + 64:][:255 << 20]
with Stopwatch() as watch:
    tensorferry.write({str(directory / "file")!r}, array)
    tensorferry.read({str(directory / "file")!r}, array, direct=True)
print(watch.peak_growth_nbytes)
"""
    grown_nbytes = int(commands.run(sys.executable, "-c", program).stdout)
    assert grown_nbytes <= tensorferry.bounce_pool_nbytes() + (64 << 20)  # of 255 MiB


def test_pool_size_from_the_environment() -> None:
    program = "import tensorferry; print(tensorferry.bounce_pool_nbytes())"

    def printed(value: str) -> str:
        environment = os.environ | {"TENSORFERRY_BOUNCE_POOL_NBYTES": value}
        return commands.run(sys.executable, "-c", program, env=environment).stdout

    assert printed("8388608").strip() == "8388608"
    assert "TENSORFERRY_BOUNCE_POOL_NBYTES" in printed("much")
