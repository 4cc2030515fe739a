"""Rows of DeepNVMe's fault table about tensors: dtypes, shapes, strides, kinds, locked memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tensorferry
from tests.support.engines import one_engine
from tests.support.expect import assert_equal, assert_works, contents
from tests.support.faultfs import Fault
from tests.support.leaks import Holdings

if TYPE_CHECKING:
    import pathlib

    from tests.support.data import RandomBytes
    from tests.support.faultfs import FaultFS

torch = pytest.importorskip("torch")
Handle = tensorferry.aio_handle

DTYPE_NAMES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32
complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
""".split()  # noqa: SIM905
DTYPES = [getattr(torch, name) for name in DTYPE_NAMES if hasattr(torch, name)]
COMMON_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def _random_tensor(random_bytes: RandomBytes, shape: tuple[int, ...], dtype: Any) -> Any:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = random_bytes(nbytes)
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype).reshape(shape)


@pytest.mark.covers("dtypes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_written_and_read(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, dtype: Any
) -> None:
    path = directory / "file"
    source = _random_tensor(random_bytes, (10_007,), dtype)
    target = torch.empty_like(source)
    assert handle.sync_pwrite(source, str(path)) == 1
    assert handle.sync_pread(target, str(path)) == 1
    assert_equal(contents(path), source)
    assert_equal(target, source)


@pytest.mark.covers("locked_dtypes")
@pytest.mark.parametrize("dtype", COMMON_DTYPES, ids=str)
def test_a_locked_tensor_has_the_examples_dtype_and_one_dimension(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, dtype: Any
) -> None:
    locked = handle.new_cpu_locked_tensor(1000, torch.empty((3, 5), dtype=dtype))
    assert locked.dtype == dtype
    assert locked.shape == (1000,)
    assert locked.is_contiguous()
    assert locked.data_ptr() % 4096 == 0
    assert handle.is_pinned(locked)
    assert handle.is_pinned(locked[10:20])
    assert not handle.is_pinned(torch.empty(1000, dtype=dtype))
    source = _random_tensor(random_bytes, (1000,), dtype)
    locked.copy_(source)
    assert handle.sync_pwrite(locked, str(directory / "file")) == 1
    assert_equal(contents(directory / "file"), source)
    assert handle.free_cpu_locked_tensor(locked) is True


@pytest.mark.covers("two_dim_unpinned_write", "two_dim_unpinned_read", "two_dim_locked")
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_tensor_of_two_dimensions_is_written_and_read(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    locked: bool,
    blocking: bool,
) -> None:
    path = directory / "file"
    source = _random_tensor(random_bytes, (1024, 1024), torch.float32)
    target = torch.zeros(1024, 1024)
    if locked:
        target = handle.new_cpu_locked_tensor(1 << 20, source).view(1024, 1024).zero_()
    if blocking:
        assert handle.sync_pwrite(source, str(path)) == 1
        assert handle.sync_pread(target, str(path)) == 1
    else:
        handle.async_pwrite(source, str(path))
        assert handle.wait() == 1
        handle.async_pread(target, str(path))
        assert handle.wait() == 1
    assert_equal(contents(path), source)
    assert_equal(target, source)
    assert_works(handle, directory)


@pytest.mark.covers(
    "noncontig_unpinned_1d_write", "noncontig_locked_write", "transposed_unpinned_write"
)
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("kind", ["strided", "transposed", "expanded", "negative"])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_source_that_is_not_contiguous_is_written_as_its_elements_in_order(
    handle: Handle,
    directory: pathlib.Path,
    random_bytes: RandomBytes,
    locked: bool,
    kind: str,
    blocking: bool,
) -> None:
    path = directory / "file"
    base = _random_tensor(random_bytes, (256, 128), torch.int32)
    if locked:
        base = handle.new_cpu_locked_tensor(base.numel(), base).view(256, 128).copy_(base)
    source = {
        "strided": lambda: base.view(-1)[::2],
        "transposed": lambda: base.t(),
        "expanded": lambda: base[:1].expand(64, 128),
        "negative": lambda: base.numpy()[::-1],
    }[kind]()
    wanted = np.ascontiguousarray(np.asarray(source)).copy()
    if blocking:
        assert handle.sync_pwrite(source, str(path)) == 1
    else:
        handle.async_pwrite(source, str(path))
        del source
        assert handle.wait() == 1
    assert_equal(contents(path), wanted)


@one_engine
@pytest.mark.covers("noncontig_unpinned_1d_read", "noncontig_locked_read")
@pytest.mark.parametrize("locked", [False, True])
def test_a_destination_that_is_not_contiguous_is_a_value_error_and_is_not_touched(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes, locked: bool
) -> None:
    path = directory / "file"
    path.write_bytes(random_bytes(1 << 16))
    base = torch.zeros(8192, dtype=torch.uint8)
    if locked:
        base = handle.new_cpu_locked_tensor(8192, base).zero_()
    for target in (base[::2], base.view(64, 128).t(), base.view(64, 128)[:, :64]):
        for call in (handle.sync_pread, handle.async_pread, handle.read):
            with pytest.raises(ValueError, match="contiguous"):
                call(target, str(path))
    assert not base.any()
    assert_works(handle, directory)


@pytest.mark.covers("scalar_tensor")
def test_a_scalar_is_written_and_read(handle: Handle, directory: pathlib.Path) -> None:
    path = directory / "file"
    target = torch.tensor(0.0)
    assert handle.sync_pwrite(torch.tensor(3.25), str(path)) == 1
    assert path.stat().st_size == 4
    assert handle.sync_pread(target, str(path)) == 1
    assert target.item() == 3.25


@pytest.mark.covers("requires_grad_read", "requires_grad_write")
@pytest.mark.parametrize("kind", ["leaf", "parameter", "computed"])
def test_tensors_that_require_grad_are_written_and_read(
    handle: Handle, directory: pathlib.Path, kind: str
) -> None:
    path = directory / "file"
    leaf = torch.arange(1024, dtype=torch.float32, requires_grad=True)
    source = {"leaf": leaf, "parameter": torch.nn.Parameter(leaf.detach()), "computed": leaf * 1}
    target = torch.zeros(1024, requires_grad=True)
    assert handle.sync_pwrite(source[kind], str(path)) == 1
    assert handle.sync_pread(target, str(path)) == 1
    assert_equal(target, leaf)
    handle.async_pread(target, str(path))
    assert handle.wait() == 1
    assert target.requires_grad
    assert_works(handle, directory)


@one_engine
@pytest.mark.covers("meta_tensor")
def test_tensors_without_memory_of_their_own_are_refused(
    handle: Handle, directory: pathlib.Path
) -> None:
    path = directory / "file"
    path.write_bytes(bytes(4096))
    sparse = torch.eye(16).to_sparse()
    meta = torch.empty(4096, dtype=torch.uint8, device="meta")
    for tensor, reason in ((meta, "got device meta"), (sparse, "got layout torch.sparse_coo")):
        for call in (handle.sync_pwrite, handle.sync_pread, handle.async_pwrite):
            with pytest.raises(ValueError, match=f"buffer: expected a .*tensor .*{reason}"):
                call(tensor, str(path))
    assert contents(path).size == 4096
    assert not contents(path).any()
    assert_works(handle, directory)


@pytest.mark.covers("wrong_buffer_type")
def test_arrays_and_buffers_of_all_kinds_are_taken_and_other_objects_are_type_errors(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    path = directory / "file"
    data = random_bytes(5000)
    for source in (data, bytearray(data), bytes(data), memoryview(data), torch.from_numpy(data)):
        path.unlink(missing_ok=True)
        assert handle.sync_pwrite(source, str(path)) == 1
        assert_equal(contents(path), data)
    for target in (np.zeros(5000, np.uint8), bytearray(5000), memoryview(bytearray(5000))):
        assert handle.sync_pread(target, str(path)) == 1
        assert_equal(np.frombuffer(target, np.uint8), data)
    for call in (handle.sync_pwrite, handle.sync_pread, handle.async_pread):
        for wrong in (None, "text", [1, 2, 3], 5, object()):
            with pytest.raises(
                TypeError, match=f"buffer: expected a torch tensor, .* got {type(wrong).__name__}"
            ):
                call(wrong, str(path))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="buffer: an array of Python objects"):
            call(np.array([object()]), str(path))
    read_only = np.zeros(5000, np.uint8)
    read_only.flags.writeable = False
    for wrong_target in (bytes(5000), read_only, memoryview(bytes(5000))):
        for call in (handle.sync_pread, handle.async_pread):
            with pytest.raises(ValueError, match="cannot read into a read-only"):
                call(wrong_target, str(path))
    assert not read_only.any()
    assert_equal(contents(path), data)
    assert_works(handle, directory)


@pytest.mark.covers("wrong_buffer_type")
def test_a_bytearray_cannot_be_resized_while_it_is_read_into(
    handle: Handle, faultfs: FaultFS, random_bytes: RandomBytes
) -> None:
    data = random_bytes(8 << 20)
    data.tofile(faultfs.backing / "file")
    target = bytearray(8 << 20)
    faultfs.order(Fault("read", hold=True))
    handle.async_pread(target, faultfs.path / "file")
    faultfs.await_held()
    with pytest.raises(BufferError):
        del target[100:]
    faultfs.release()
    assert handle.wait() == 1
    assert_equal(target, data)
    del target[10:]
    assert len(target) == 10


@one_engine
@pytest.mark.covers("locked_leak_on_del")
def test_locked_memory_is_unlocked_when_its_tensor_goes(handle: Handle) -> None:
    example = torch.empty(0, dtype=torch.uint8)
    nbytes = 1 << 20
    before = Holdings.now()
    kept = handle.new_cpu_locked_tensor(nbytes, example)
    assert Holdings.now().locked_nbytes - before.locked_nbytes >= nbytes
    for _ in range(20):
        handle.new_cpu_locked_tensor(nbytes, example).fill_(1)
    assert Holdings.now().locked_nbytes - before.locked_nbytes < 2 * nbytes
    del kept
    assert Holdings.now().locked_nbytes <= before.locked_nbytes


@one_engine
@pytest.mark.covers("free_semantics")
def test_free_takes_locked_tensors_once_and_nothing_else(handle: Handle) -> None:
    example = torch.empty(0, dtype=torch.float32)
    locked = handle.new_cpu_locked_tensor(1000, example)
    assert handle.free_cpu_locked_tensor(locked[10:]) is False
    assert handle.free_cpu_locked_tensor(torch.empty(1000)) is False
    assert handle.is_pinned(locked)
    assert handle.free_cpu_locked_tensor(locked[:10]) is True
    assert not handle.is_pinned(locked)
    assert handle.free_cpu_locked_tensor(locked) is False


@pytest.mark.covers("use_after_free")
def test_a_tensor_may_be_used_after_it_was_freed(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(16 << 20)
    locked = handle.new_cpu_locked_tensor(data.size, torch.empty(0, dtype=torch.uint8))
    locked.copy_(torch.from_numpy(data))
    view = locked[4096:]
    assert handle.free_cpu_locked_tensor(locked) is True
    assert_equal(locked, data)
    locked.fill_(9)
    assert handle.sync_pwrite(locked, str(directory / "file")) == 1
    assert (contents(directory / "file") == 9).all()
    del locked
    assert bool((view == 9).all())


@pytest.mark.covers("locked_tensor_multi_dim_kw")
def test_old_and_new_spellings_of_keywords_are_taken() -> None:
    handle = tensorferry.aio_handle(num_threads=4)
    assert handle.get_thread_count() == handle.get_intra_op_parallelism() == 4
    example = torch.empty((2, 3), dtype=torch.float32)
    for spelling in ("example_tenosr", "example_tensor"):
        locked = handle.new_cpu_locked_tensor(num_elem=100, **{spelling: example})
        assert locked.shape == (100,)
        assert locked.dtype == torch.float32
        assert handle.free_cpu_locked_tensor(locked) is True


@pytest.mark.covers("locked_zero_elems")
def test_a_locked_tensor_may_be_empty(handle: Handle, directory: pathlib.Path) -> None:
    locked = handle.new_cpu_locked_tensor(0, torch.empty(0))
    assert locked.shape == (0,)
    assert handle.sync_pwrite(locked, str(directory / "file")) == 1
    assert handle.free_cpu_locked_tensor(locked) is False
    assert_works(handle, directory)


@one_engine
@pytest.mark.covers("locked_huge")
@pytest.mark.parametrize("count", [1 << 45, 1 << 60, (1 << 62) + 1, (1 << 63) - 1])
def test_more_locked_memory_than_there_is_raises(
    handle: Handle, directory: pathlib.Path, count: int
) -> None:
    with pytest.raises(MemoryError, match=f"cannot allocate {4 * count} bytes"):
        handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.float32))
    assert_works(handle, directory)


@one_engine
@pytest.mark.covers("locked_huge")
def test_a_negative_number_of_elements_is_a_value_error(handle: Handle) -> None:
    with pytest.raises(ValueError, match="num_elem: -1 is negative"):
        handle.new_cpu_locked_tensor(-1, torch.empty(0))


@pytest.mark.covers("memcpy_semantics")
def test_only_the_bytes_of_the_destination_change(
    handle: Handle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    """Their memcpy took byte counts for element counts; a read into a part is our copy."""
    path = directory / "file"
    for dtype, shape in ((torch.float32, (3, 5)), (torch.bfloat16, (16,)), (torch.uint8, (32,))):
        source = _random_tensor(random_bytes, shape, dtype)
        base = torch.zeros(8 * source.numel(), dtype=dtype)
        count = source.numel()
        target = base[count : 2 * count].view(shape)
        assert handle.sync_pwrite(source, str(path)) == 1
        assert handle.sync_pread(target, str(path)) == 1
        assert_equal(target, source)
        assert not as_integers(base[:count]).any()
        assert not as_integers(base[2 * count :]).any()


def as_integers(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8)
