"""torch's own ways with CUDA memory: dtypes, views, streams, graphs, storages that change, pinned host memory."""

from __future__ import annotations

import errno
import gc
import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tensorferry import _core
from tests.gpu.programs import assert_moves
from tests.support.expect import assert_equal, contents

if TYPE_CHECKING:
    import pathlib

    from tests.conftest import MakeHandle
    from tests.support.data import RandomBytes
    from tests.support.gpus import Gpu

torch = pytest.importorskip("torch")

SLOW_S = 0.1
NEVER_S = 3.0  # longer than any operation that must not wait for it
NBYTES = 5_000_003

DTYPES = ["uint8", "float32", "float16", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int64"]
SHAPES = [(), (0,), (3,), (5, 7), (2, 3, 100_001)]


@pytest.fixture(autouse=True)
def _real(gpu: Gpu) -> None:
    if gpu.name != "torch":
        pytest.skip("needs torch's CUDA tensors; the stand-in driver has none")


def as_bytes(tensor: Any) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).cpu().numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(directory: pathlib.Path, dtype: str) -> None:
    path = directory / "tensor"
    for shape in SHAPES:
        count = torch.arange(torch.Size(shape).numel(), device="cuda")
        source = count.view(shape).remainder(5).to(getattr(torch, dtype))
        tensorferry.write(path, source, truncate=True)
        found = torch.empty(shape, dtype=source.dtype, device="cuda")
        assert tensorferry.read(path, found) is found
        assert path.stat().st_size == source.nbytes
        assert as_bytes(found) == as_bytes(source)
        assert path.read_bytes() == as_bytes(source)


def test_sources_that_are_not_contiguous_are_copied_after_their_kernels(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    handle = make_handle()
    base = torch.zeros(1000, 1001, device="cuda")
    views = [base.t(), base[:, ::2], base[::3, 5:], base[0].expand(50, 1001)]
    with gpu.new_stream():
        for index, view in enumerate(views):
            gpu.fill_later(base, index + 1, SLOW_S / 4)
            handle.async_pwrite(view, directory / str(index))
    assert handle.wait() == len(views)
    for index, view in enumerate(views):
        wanted = torch.full(view.shape, float(index + 1))
        assert (directory / str(index)).read_bytes() == as_bytes(wanted)


def test_destinations_that_are_not_contiguous_are_refused(directory: pathlib.Path) -> None:
    (directory / "file").write_bytes(bytes(10_000))
    base = torch.ones(10, 20, device="cuda")
    for view in (base.t(), base[:, ::2], base[0].expand(5, 20)):
        with pytest.raises(ValueError, match="contiguous"):
            tensorferry.read(directory / "file", view)
    assert bool((base == 1).all())


def test_lazy_conjugates_and_negatives(directory: pathlib.Path) -> None:
    base = torch.arange(1001, device="cuda") * (1 + 2j)
    for view in (base.conj(), base.conj().imag):
        tensorferry.write(directory / "file", view, truncate=True)
        assert (directory / "file").read_bytes() == as_bytes(view)
    with pytest.raises(ValueError, match="conjugated"):
        tensorferry.read(directory / "file", base.conj())


def test_views_at_every_offset_share_their_tensors_memory(directory: pathlib.Path) -> None:
    base = torch.zeros(40_000, dtype=torch.uint8, device="cuda")
    wanted = bytearray(40_000)
    (directory / "file").write_bytes(b"\1" * 100)
    for offset in (0, 1, 2, 3, 255, 256, 4095, 4097, 39_900):
        tensorferry.read(directory / "file", base[offset : offset + 100])
        wanted[offset : offset + 100] = b"\1" * 100
    assert as_bytes(base) == bytes(wanted)


def test_tensors_that_require_grad(make_handle: MakeHandle, directory: pathlib.Path) -> None:
    handle = make_handle()
    parameter = torch.nn.Parameter(torch.arange(3003.0, device="cuda").view(1001, 3))
    wanted = as_bytes(parameter)
    handle.sync_pwrite(parameter, directory / "file")
    assert (directory / "file").read_bytes() == wanted
    with torch.no_grad():
        parameter.zero_()
    handle.async_pread(parameter, directory / "file")
    assert handle.wait() == 1
    assert as_bytes(parameter) == wanted
    assert parameter.requires_grad
    (parameter * 2).sum().backward()
    tensorferry.write_many([(directory / "grad", parameter.grad)])
    assert (directory / "grad").read_bytes() == as_bytes(parameter.grad)


def test_tensors_of_inference_mode(directory: pathlib.Path) -> None:
    with torch.inference_mode():
        tensor = torch.full((1001,), 3.0, device="cuda")
        tensorferry.write(directory / "file", tensor)
        tensorferry.read(directory / "file", tensor)
    assert (directory / "file").read_bytes() == as_bytes(torch.full((1001,), 3.0))


@pytest.mark.parametrize("how", ["data", "set_", "del"])
def test_a_tensor_may_get_other_memory_while_it_is_written(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, how: str
) -> None:
    handle = make_handle()
    with gpu.new_stream():
        tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        gpu.fill_later(tensor, 7, SLOW_S)
        handle.async_pwrite(tensor, directory / "file")
        other = torch.full((NBYTES,), 9, dtype=torch.uint8, device="cuda")
        if how == "data":
            tensor.data = other
        elif how == "set_":
            tensor.set_(other)
        else:
            del tensor
        gc.collect()
        usurpers = [torch.full_like(other, 255) for _ in range(4)]
    assert handle.wait() == 1
    assert (contents(directory / "file") == 7).all()
    assert len(usurpers) == 4


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("how", ["resize_", "storage"])
def test_memory_that_is_given_back_while_it_is_moved_is_noticed(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, how: str, write: bool
) -> None:
    handle = make_handle()
    path = directory / "file"
    path.write_bytes(bytes(NBYTES))
    with gpu.new_stream():
        tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        gpu.fill_later(tensor, 7, SLOW_S)
        (handle.async_pwrite if write else handle.async_pread)(tensor, path)
        if how == "resize_":
            tensor.resize_(20 * NBYTES)
        else:
            tensor.untyped_storage().resize_(0)
    with pytest.raises(tensorferry.StorageError) as caught:
        handle.wait()
    assert caught.value.errno == errno.EFAULT
    assert caught.value.filename == str(path)
    assert_moves(gpu, handle, directory)


@pytest.mark.parametrize("nbytes", [4096, NBYTES, 100_000_000])
def test_an_asynchronous_write_returns_before_the_kernel_has_ended(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, nbytes: int
) -> None:
    handle = make_handle()
    tensor = gpu.array(nbytes)
    handle.sync_pwrite(tensor, directory / "first")  # the first use makes objects, which is slow
    ended = torch.cuda.Event()
    with gpu.new_stream():
        gpu.fill_later(tensor, 7, NEVER_S)
        ended.record()
        assert handle.async_pwrite(tensor, directory / "file") == 0
        assert not ended.query()
        assert not handle._pending[0].future.done()
        assert handle.wait() == 1
        assert ended.query()
    assert (contents(directory / "file") == 7).all()


def test_a_slow_kernel_holds_up_no_other_transfer(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle(queue_depth=2)
    data = random_bytes(NBYTES)
    stuck = [gpu.array(NBYTES) for _ in range(20)]
    found, source = gpu.array(NBYTES), gpu.array(data)
    handle.sync_pwrite(source, directory / "first")
    ended = torch.cuda.Event()
    with gpu.new_stream():
        gpu.fill_later(stuck[0], 7, NEVER_S)
        ended.record()
        for index, tensor in enumerate(stuck):
            handle.async_pwrite(tensor, directory / f"stuck{index}")
    with gpu.new_stream(), tensorferry.open(directory / "file", "w+", engine=handle.engine) as file:
        for _ in range(3):
            file.write_from(source).result()
            file.read_into(found).result()
            handle.write(source, directory / "other")
    assert not ended.query()
    assert handle.wait() == len(stuck)
    assert_equal(gpu.bytes_of(found), data)
    assert_equal(contents(directory / "other"), data)


def test_streams_that_wait_for_one_another(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    """torch's idiom: work on the default stream, a side stream that waits for it, and back."""
    handle = make_handle()
    tensor = gpu.array(NBYTES)
    side = torch.cuda.Stream()
    for value in range(1, 6):
        gpu.fill_later(tensor, value, SLOW_S / 4)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.add_(1)
            handle.async_pwrite(tensor, directory / str(value))
        assert handle.wait() == 1
        assert (contents(directory / str(value)) == value + 1).all()
        handle.async_pread(tensor, directory / str(value))
        assert handle.wait() == 1
        tensor.mul_(2)
        torch.cuda.current_stream().synchronize()
        assert gpu.bytes_of(tensor) == bytes([2 * value + 2]) * NBYTES


def test_many_streams_at_once(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle(intra_op_parallelism=2)
    data = [random_bytes(500_000 + index) for index in range(16)]
    for index, bytes_ in enumerate(data):
        bytes_.tofile(directory / str(index))
    streams = [torch.cuda.Stream() for _ in data]
    tensors = [gpu.array(bytes_.size) for bytes_ in data]
    for turn in range(3):
        for index, (stream, tensor) in enumerate(zip(streams, tensors, strict=True)):
            with torch.cuda.stream(stream):
                tensor.fill_(turn)
                handle.async_pread(tensor, directory / str(index))
        assert handle.wait() == len(data)
        for index, (stream, tensor) in enumerate(zip(streams, tensors, strict=True)):
            with torch.cuda.stream(stream):
                tensor.bitwise_xor_(turn + 1)
                handle.async_pwrite(tensor, directory / f"out{index}")
        assert handle.wait() == len(data)
        for index, bytes_ in enumerate(data):
            assert_equal(contents(directory / f"out{index}"), bytes_ ^ (turn + 1))


def test_a_stream_that_is_captured_into_a_graph_is_refused_and_the_graph_stays_valid(
    directory: pathlib.Path,
) -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    tensorferry.write(directory / "file", tensor)
    graph = torch.cuda.CUDAGraph()
    raised: list[ValueError] = []
    with torch.cuda.graph(graph):
        tensor.add_(1)
        for call in (tensorferry.write, tensorferry.read):
            try:
                call(directory / "file", tensor)
            except ValueError as error:
                raised.append(error)
        tensor.add_(2)
    assert len(raised) == 2
    assert all("captured" in str(error) for error in raised)
    graph.replay()
    tensorferry.write(directory / "file", tensor)
    assert (contents(directory / "file") == 3).all()


def test_transfers_go_on_while_another_stream_is_captured_into_a_graph(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(100_000_003)
    source, found, counter = gpu.array(data), gpu.array(data.size), gpu.array(16)
    handle.sync_pwrite(source, directory / "file")
    graph = torch.cuda.CUDAGraph()
    handle.async_pwrite(source, directory / "other")
    handle.async_pread(found, directory / "file")
    with torch.cuda.graph(graph):
        for _ in range(100):
            counter.add_(1)
    assert handle.wait() == 2
    graph.replay()
    assert gpu.bytes_of(counter) == bytes([100]) * 16
    assert_equal(gpu.bytes_of(found), data)
    assert_equal(contents(directory / "other"), data)


def test_pinned_memory_is_known(make_handle: MakeHandle) -> None:
    handle = make_handle()
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert handle.is_pinned(pinned)
    assert handle.is_pinned(pinned[5:100])
    assert not handle.is_pinned(torch.empty(1 << 20, dtype=torch.uint8))
    assert not handle.is_pinned(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    locked = handle.new_cpu_locked_tensor(1 << 20, pinned)
    assert handle.is_pinned(locked)
    assert locked.is_pinned()  # torch reports it, too
    assert tensorferry.empty(1 << 20, torch.uint8).is_pinned()
    assert handle.free_cpu_locked_tensor(locked)
    assert not handle.is_pinned(locked)


@pytest.mark.parametrize("make", ["new_cpu_locked_tensor", "empty"])
def test_copies_between_a_gpu_and_locked_memory_are_asynchronous(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes, make: str
) -> None:
    handle = make_handle()
    example = torch.empty(0, dtype=torch.uint8)
    host = (
        handle.new_cpu_locked_tensor(NBYTES, example)
        if make == "new_cpu_locked_tensor"
        else tensorferry.empty(NBYTES, torch.uint8)
    )
    data = random_bytes(NBYTES)
    data.tofile(directory / "file")
    handle.sync_pread(host, directory / "file")
    tensor, elsewhere = gpu.array(NBYTES), gpu.array(16)
    ended = torch.cuda.Event()
    with gpu.new_stream():
        gpu.fill_later(elsewhere, 1, NEVER_S)
        ended.record()
        tensor.copy_(host, non_blocking=True)
        assert not ended.query()
        torch.cuda.current_stream().synchronize()
        assert_equal(gpu.bytes_of(tensor), data)
        gpu.fill_later(tensor, 9, NEVER_S)
        ended.record()
        host.copy_(tensor, non_blocking=True)
        assert not ended.query()
        torch.cuda.current_stream().synchronize()
    assert bool((host == 9).all())


def test_pinned_memory_of_torch_moves_without_a_copy(
    make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(8 << 20)
    pinned = torch.from_numpy(data).pin_memory()
    handle.sync_pwrite(pinned, directory / "file")
    assert handle.stats()["bounced_nbytes"] == 0
    pinned.zero_()
    handle.sync_pread(pinned, directory / "file")
    assert_equal(pinned, data)


def test_pinned_device_tensors(directory: pathlib.Path, random_bytes: RandomBytes) -> None:
    try:
        handle = tensorferry.gds_handle()
    except tensorferry.EngineUnavailableError as error:
        pytest.skip(f"no GPUDirect Storage: {error}")
    with handle:
        data = random_bytes(8 << 20)
        tensor = handle.new_pinned_device_tensor(2 << 20, torch.empty(0, device="cuda"))
        assert (tensor.dtype, tensor.device.type, tensor.numel()) == (
            torch.float32,
            "cuda",
            2 << 20,
        )
        assert handle.is_pinned(tensor)
        assert handle.is_pinned(tensor[100:200])
        data.tofile(directory / "file")
        handle.sync_pread(tensor, directory / "file")
        handle.async_pwrite(tensor[1024:], directory / "other")
        assert handle.wait() == 1
        assert_equal(contents(directory / "other"), data[4096:])
        assert handle.free_pinned_device_tensor(tensor) is True
        assert handle.free_pinned_device_tensor(tensor) is False
        assert not handle.is_pinned(tensor)
        cpu_example = torch.empty(0, dtype=torch.bfloat16)
        assert handle.new_pinned_device_tensor(10, cpu_example).dtype == torch.bfloat16
        assert handle.new_pinned_device_tensor(num_elem=0, example_tenosr=cpu_example).numel() == 0


class OnlyDlpack:
    """A tensor that supports only DLPack."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def test_arrays_by_dlpack(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    handle = make_handle()
    data = random_bytes(NBYTES)
    source, found = gpu.array(data), gpu.array(NBYTES)
    handle.sync_pwrite(OnlyDlpack(source), directory / "file")
    handle.async_pread(OnlyDlpack(found), directory / "file")
    assert handle.wait() == 1
    assert_equal(gpu.bytes_of(found), data)
    gpu.fill_later(source, 7, SLOW_S)
    handle.sync_pwrite(OnlyDlpack(source), directory / "file")
    assert (contents(directory / "file") == 7).all()


def test_arrays_of_cupy_where_it_is_installed(
    make_handle: MakeHandle, directory: pathlib.Path, random_bytes: RandomBytes
) -> None:
    if importlib.util.find_spec("cupy") is None:
        return  # the other tests use torch's tensors
    import cupy

    handle = make_handle()
    data = random_bytes(1_000_000)
    source = cupy.asarray(data.view("f4"))
    found = cupy.zeros_like(source)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        source *= 1
        handle.async_pwrite(source, directory / "file")
        handle.wait()
        handle.sync_pread(found, directory / "file")
        stream.synchronize()
    assert_equal(cupy.asnumpy(found).view("u1"), cupy.asnumpy(source).view("u1"))
    with pytest.raises(ValueError, match="contiguous"):
        tensorferry.read(directory / "file", found[::2])


def test_the_process_knows_that_it_uses_the_gpu(directory: pathlib.Path) -> None:
    tensorferry.write(directory / "file", torch.zeros(100, device="cuda"))
    assert _core.cuda_in_use()
    assert _core.cuda_refusal() is None
    assert 0 < _core.pinned_pool_nbytes() <= 128 << 20


def test_a_tensor_of_another_device_than_the_current_one(
    gpu: Gpu, make_handle: MakeHandle, directory: pathlib.Path
) -> None:
    if gpu.count < 2:
        pytest.skip("needs two GPUs")
    handle = make_handle()
    with torch.cuda.device(0):
        tensor = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:1")
        gpu.fill_later(tensor, 7, SLOW_S)
        handle.async_pwrite(tensor, directory / "file")
        assert handle.wait() == 1
        assert torch.cuda.current_device() == 0
    assert (contents(directory / "file") == 7).all()
