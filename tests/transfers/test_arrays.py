"""The objects that are accepted as arrays, and those that are refused before any I/O."""

from __future__ import annotations

import array
import ctypes
import errno
import mmap
import pathlib
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy
import pytest

import tensorferry
from tensorferry.base.checks import checked_nbytes
from tensorferry.transfer import arrays
from tensorferry.transfer import requests as transfers
from tensorferry.transfer.arrays import memory_of
from tests.support import commands
from tests.support.optional import torch
from tests.support.pretended import ADDRESS, GPU, CudaArray, pretend_driver, pretend_no_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class OnlyDlpack:
    """An array of another library that supports only DLPack."""

    def __init__(self, inner: numpy.ndarray) -> None:
        self._inner = inner

    def __dlpack__(self, **keywords: object) -> object:
        return self._inner.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._inner.__dlpack_device__()


class OnAnAccelerator(OnlyDlpack):
    """An array that reports a device: 2 is CUDA, 8 is Metal."""

    def __init__(self, inner: numpy.ndarray, kind: int = 2, index: int = 0) -> None:
        super().__init__(inner)
        self._device = (kind, index)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class PretendedCudaTensor:
    """A torch tensor on the second GPU, as far as arrays.py looks."""

    def __init__(self, inner: torch.Tensor) -> None:
        self._inner = inner
        self.device = torch.device("cuda", 1)

    def __getattr__(self, name: str) -> object:
        value = getattr(self._inner, name)
        if name not in ("detach", "contiguous"):
            return value
        return lambda: PretendedCudaTensor(value())

    def untyped_storage(self) -> types.SimpleNamespace:
        inner = self._inner.untyped_storage()
        return types.SimpleNamespace(
            device=self.device, data_ptr=inner.data_ptr, nbytes=inner.nbytes
        )


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
        (lambda: torch.eye(3).to_sparse_csr(), ValueError),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ValueError),
        (lambda: numpy.ma.masked_array([1, 2], [True, False]), ValueError),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), ValueError),
        (lambda: numpy.array([object()]), ValueError),
        (lambda: OnAnAccelerator(numpy.zeros(3), kind=8), ValueError),
    ],
)
def test_what_has_no_bytes_of_its_own_is_refused(
    directory: pathlib.Path, make: object, error: type
) -> None:
    path = directory / "never"
    array = make()  # type: ignore[operator]
    with pytest.raises(error, match="array"):
        tensorferry.write(path, array)
    assert not path.exists()
    with tensorferry.open(directory / "empty", "w+") as file:
        for use in (file.write, file.read, lambda array: file.write_from([array, array], 0)):
            with pytest.raises(error, match="array"):
                use(array)
        assert file.size == 0


def test_a_tensor_whose_storage_was_freed_is_refused(directory: pathlib.Path) -> None:
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        tensorferry.write(directory / "never", tensor)


# Ways to move one array to and from a file of 4096 bytes.
WAYS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "File": (lambda file, array: file.write(array), lambda file, array: file.read(array)),
    "File, several": (
        lambda file, array: file.write([array]),
        lambda file, array: file.read([array]),
    ),
    "File, checksums": (
        lambda file, array: file.write(array, checksums=tensorferry.Checksums(segments=True)),
        lambda file, array: file.read(array, checksums=tensorferry.Checksums(segments=True)),
    ),
    "File, future": (
        lambda file, array: file.write_from(array).result(),
        lambda file, array: file.read_into(array).result(),
    ),
    "path": (
        lambda file, array: tensorferry.write(file.path, array, 0),
        lambda file, array: tensorferry.read(file.path, array),
    ),
    "many": (
        lambda file, array: tensorferry.write_many([(file.path, array)]),
        lambda file, array: tensorferry.read_many([(file.path, array)]),
    ),
}


@pytest.fixture
def file(directory: pathlib.Path) -> Iterator[tensorferry.File]:
    (directory / "file").write_bytes(bytes(4096))
    with tensorferry.open(directory / "file", "r+") as opened:
        yield opened


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_is_larger_than_its_storage_is_refused(
    file: tensorferry.File, way: str
) -> None:
    tensor = torch.ones(1024)
    tensor.untyped_storage().resize_(1024)
    for move in WAYS[way]:
        with pytest.raises(ValueError, match="the tensor's storage has 1024 bytes"):
            move(file, tensor)
    assert pathlib.Path(file.path).read_bytes() == bytes(4096)


class AlarmError(Exception):
    """An exception that a signal handler raises."""


@pytest.mark.parametrize("dtype", ["uint8", "complex32"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_signal_handler_raises_while_a_tensor_is_looked_at_is_not_lost(
    file: tensorferry.File, way: str, dtype: str
) -> None:
    class Alarmed(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Torch runs Python code for each call of a tensor's; the last of so many meets a signal."""

        left = 0

        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            self.left -= 1
            if self.left == 0:
                raise AlarmError
            return function(*arguments, **(keywords or {}))

    tensor = torch.zeros(4096, dtype=torch.uint8).view(getattr(torch, dtype))
    for move in WAYS[way]:
        for count in range(1, 100):
            mode = Alarmed()
            mode.left = count
            try:
                with mode:
                    move(file, tensor)
            except AlarmError:
                continue
            assert mode.left > 0, "an exception was lost"
            break
        assert 1 < count < 99


_MOCKED = """
import contextlib, sys, types, unittest.mock
import tensorferry
from tensorferry.transfer import arrays

file = tensorferry.open(sys.argv[1])
for fake in (unittest.mock.MagicMock(), types.SimpleNamespace(Tensor=type("Tensor", (), {}))):
    with unittest.mock.patch.dict(sys.modules, {"torch": fake}), contextlib.suppress(TypeError):
        file.read(bytearray(4))
import torch
tensor = torch.zeros(1000)
memory = arrays.memory_of(tensor, writable=True)
assert not arrays.has_moved(memory)
tensor.untyped_storage().resize_(0)
assert arrays.has_moved(memory)
"""


def test_a_library_that_was_another_one_for_a_while_is_looked_at_again(
    file: tensorferry.File,
) -> None:
    pytest.importorskip("torch")
    done = commands.run(sys.executable, "-c", _MOCKED, file.path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["torch", "numpy"])
@pytest.mark.parametrize("way", WAYS)
def test_a_library_that_is_being_imported_by_another_thread_does_no_harm(
    file: tensorferry.File, way: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = types.ModuleType(name)
    begun.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    write, read = WAYS[way]
    target = bytearray(4096)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, name, begun)
        write(file, b"\1" * 4096)
        read(file, target)
    assert target == b"\1" * 4096


def test_none_is_refused_like_all_that_is_no_array(file: tensorferry.File) -> None:
    for move in (file.read, file.write, file.read_into, file.write_from):
        with pytest.raises(TypeError, match=r"expected a torch tensor, .* got NoneType"):
            move(None)
        for given in (bytearray(4), torch.zeros(1)):
            with pytest.raises(TypeError, match="offset: None is not an integer"):
                move(given, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_is_not_taken_for_an_offset(file: tensorferry.File, flag: bool) -> None:
    path, data = file.path, bytearray(b"\1" * 4)
    file.write(bytes(8))
    for move in (file.read, file.write, file.read_into, file.write_from):
        with pytest.raises(TypeError, match=f"^offset: {flag} is not an integer"):
            move(data, flag)
    with pytest.raises(TypeError, match=f"^nbytes: {flag} is not an integer"):
        file.truncate(flag)
    for call in (tensorferry.read, tensorferry.write):
        with pytest.raises(TypeError, match=f"^offset: {flag} is not an integer"):
            call(path, data, flag)
    for call_many in (tensorferry.read_many, tensorferry.write_many):
        with pytest.raises(TypeError, match=rf"^items\[0\]: {flag} is not an integer"):
            call_many([(path, data, flag)])
    # DeepNVMe's read() has the flag `validate` where sync_pread() has the offset.
    with tensorferry.aio_handle() as handle:
        for method in (handle.sync_pread, handle.sync_pwrite, handle.async_pread):
            with pytest.raises(TypeError, match=f"^file_offset: {flag} is not an integer"):
                method(data, path, flag)
    assert pathlib.Path(path).read_bytes() == bytes(4096)


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_is_not_taken_for_a_size(flag: bool) -> None:
    with pytest.raises(TypeError, match=f"^memory: {flag} is not a size"):
        checked_nbytes(flag, "memory")


def test_fake_tensors_are_refused(directory: pathlib.Path) -> None:
    with pytest.importorskip("torch._subclasses.fake_tensor").FakeTensorMode():
        fake = torch.zeros(5)
    with pytest.raises(ValueError, match="FakeTensor has no memory of its own"):
        tensorferry.write(directory / "never", fake)
    assert not (directory / "never").exists()


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


# Checks of GPU memory that need no GPU. Its transfers are tested in tests/gpu.


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_driver(monkeypatch)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("interface", "nbytes", "stream"),
    [
        ({}, 48, 1),
        ({"version": 2, "strides": None}, 48, 1),
        ({"stream": None}, 48, 1),
        ({"stream": 2}, 48, 2),
        ({"stream": 0x5555}, 48, 0x5555),
        ({"strides": (16, 4)}, 48, 1),
        ({"shape": (1, 3, 1), "strides": (999, 4, 0)}, 12, 1),
        ({"shape": (), "typestr": "|V7"}, 7, 1),
    ],
)
def test_cuda_arrays_are_bytes_on_their_gpu_after_their_stream(
    interface: dict[str, object], nbytes: int, stream: int
) -> None:
    array = CudaArray(**interface)
    assert memory_of(array, writable=True) == (ADDRESS, nbytes, array, (GPU, stream))
    assert arrays.last_gpu == GPU


@pytest.mark.usefixtures("driver")
def test_an_empty_cuda_array_waits_for_no_stream() -> None:
    array = CudaArray(shape=(0, 4), strides=(5, 3), data=(0, False), stream=7)
    assert memory_of(array, writable=True) == (0, 0, array, None)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ({"strides": (4, 12)}, "buffer: expected a C-contiguous array"),
        ({"strides": (32, 4)}, "buffer: expected a C-contiguous array"),
        ({"data": (ADDRESS, True)}, "buffer: .*read-only CudaArray"),
        ({"typestr": "|O8"}, "buffer: .*O8"),
        ({"typestr": "<U5"}, "buffer: .*U5"),
        ({"mask": object()}, "buffer: .*mask"),
        ({"stream": 0}, "buffer: .*stream"),
        (
            {"data": (0x9000, False)},
            "buffer: a CudaArray: address 0x9000 is not in the memory of a GPU",
        ),
    ],
)
def test_cuda_arrays_that_cannot_be_moved_are_refused_with_the_reason(
    interface: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        memory_of(CudaArray(**interface), writable=True, name="buffer")


@pytest.mark.usefixtures("driver")
def test_readonly_cuda_arrays_can_be_written_to_files() -> None:
    assert memory_of(CudaArray(data=(ADDRESS, True)), writable=False)[3] == (GPU, 1)


@pytest.mark.usefixtures("driver")
def test_dlpack_on_a_gpu_is_believed_only_where_the_driver_agrees() -> None:
    array = OnAnAccelerator(numpy.zeros(3, numpy.int16))
    with pytest.raises(
        ValueError, match=r"array: a OnAnAccelerator: address .* is not in the memory of a GPU"
    ):
        memory_of(array, writable=True)
    managed = OnAnAccelerator(numpy.zeros(3, numpy.int16), kind=13, index=2)
    address, nbytes, owner, location = memory_of(managed, writable=True)
    assert (nbytes, location) == (6, (2, 1))
    assert owner is not managed  # the owner is the exported object
    assert address == managed._inner.ctypes.data


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("make", [CudaArray, lambda: OnAnAccelerator(numpy.zeros(3))])
def test_who_looks_at_the_bytes_gets_no_gpu_memory(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"it: expected an array in host memory"):
        memory_of(make(), writable=False, name="it", host=True)


@pytest.mark.parametrize("make", [CudaArray, lambda: OnAnAccelerator(numpy.zeros(3))])
def test_without_a_driver_gpu_memory_is_refused_before_any_io(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]
) -> None:
    pretend_no_driver(monkeypatch)
    path = directory / "never"
    with pytest.raises(tensorferry.EngineUnavailableError, match="no driver; remedy: a GPU"):
        tensorferry.write(path, make())
    with pytest.raises(tensorferry.EngineUnavailableError, match="no driver"):
        tensorferry.write_many([(directory / "neither", b"host"), (path, make())])
    assert list(directory.iterdir()) == []


def of_cuda_tensor(tensor: torch.Tensor, *, writable: bool, host: bool = False) -> arrays.Memory:
    return arrays._of_tensor(torch, PretendedCudaTensor(tensor), writable, "array", host)


@pytest.mark.usefixtures("driver")
def test_cuda_tensors_are_bytes_on_their_device_after_its_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        cuda_stream = 0x1234

    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or Stream)
    tensor = torch.zeros(10, dtype=torch.int32)[2:]
    address, nbytes, owner, location = of_cuda_tensor(tensor, writable=True)
    assert (address, nbytes, location) == (tensor.data_ptr(), 32, (1, 0x1234))
    assert asked == [torch.device("cuda", 1)]
    assert owner.device.type == "cuda"  # the storage, not the tensor
    assert not arrays.has_moved((address, nbytes, owner, location))
    copied = of_cuda_tensor(torch.zeros(4, 4).t(), writable=False)
    assert copied[1] == 64
    with pytest.raises(ValueError, match="not contiguous"):
        of_cuda_tensor(torch.zeros(4, 4).t(), writable=True)
    with pytest.raises(ValueError, match=r"expected a tensor in host memory .got device cuda:1"):
        of_cuda_tensor(tensor, writable=True, host=True)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(ValueError, match="AMD"):
        of_cuda_tensor(tensor, writable=True)


def test_a_tensor_that_got_other_storage_has_kept_the_transfers() -> None:
    tensor = torch.arange(1000)
    memory = memory_of(tensor, writable=True)
    tensor.set_(torch.ones(5).untyped_storage(), 0, (5,))
    tensor.data = torch.ones(3)
    del tensor
    assert not arrays.has_moved(memory)
    kept = (ctypes.c_int64 * 1000).from_address(memory[0])
    assert list(kept) == list(range(1000))


@pytest.mark.parametrize(
    "give_back",
    [
        lambda tensor: tensor.resize_(100_000),
        lambda tensor: tensor.untyped_storage().resize_(0),
        lambda tensor: tensor.share_memory_(),
    ],
)
def test_a_tensor_that_gave_its_memory_back_is_found_out(
    give_back: Callable[[torch.Tensor], object],
) -> None:
    tensor = torch.zeros(1000)
    part = tensor[10:20]
    memories = [memory_of(tensor, writable=True), memory_of(part, writable=True)]
    on_a_gpu = (*memories[0][:3], (0, 1))
    assert not any(arrays.has_moved(memory) for memory in [*memories, on_a_gpu])
    give_back(tensor)
    assert all(arrays.has_moved(memory) for memory in [*memories, on_a_gpu])


def test_a_numpy_array_that_was_resized_by_force_is_found_out() -> None:
    for dtype in ("u1", "M8[s]"):  # the buffer protocol has no word for the second
        kept = []
        for _ in range(10):
            array = numpy.zeros(1000, dtype)
            memory = memory_of(array, writable=True)
            with pytest.raises(ValueError, match="resize"):
                array.resize(1_000_000)  # NumPy sees that it is held
            assert not arrays.has_moved(memory)
            address = array.ctypes.data
            array.resize(1_000_000, refcheck=False)
            kept.append((array, memory))  # it may have grown in place
            if array.ctypes.data != address:
                break
        assert arrays.has_moved(memory)
    assert not arrays.has_moved((ADDRESS, 4000, object(), None))  # another library's


class MadeForTheExport:
    """A DLPack exporter that makes new memory for each export."""

    def __dlpack__(self, **_: object) -> object:
        return numpy.full(300_000, 7, numpy.uint8).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_fields_may_have_any_names(directory: pathlib.Path) -> None:
    class Odd(ctypes.Structure):
        _fields_ = (("O", ctypes.c_int32),)

    for odd in (Odd(7), memoryview(numpy.full(1, 7, [("O", "<i4")]))):
        tensorferry.write(directory / "file", odd)
        assert (directory / "file").read_bytes() == (7).to_bytes(4, sys.byteorder)


def test_what_a_dlpack_exporter_made_for_the_export_is_kept(directory: pathlib.Path) -> None:
    exporter = MadeForTheExport()
    address, nbytes, owner, _ = memory_of(exporter, writable=False)
    usurpers = [numpy.full(300_000, 9, numpy.uint8) for _ in range(8)]
    assert bytes((ctypes.c_ubyte * nbytes).from_address(address)) == b"\7" * nbytes
    with tensorferry.open(directory / "file", "w") as file:
        future = file.write_from(exporter)
        usurpers += [numpy.full(300_000, 9, numpy.uint8) for _ in range(8)]
        future.result()
    assert (directory / "file").read_bytes() == b"\7" * nbytes
    del owner, future


def test_a_dlpack_exporter_that_copies_cannot_be_read_into(directory: pathlib.Path) -> None:
    (directory / "file").write_bytes(bytes(300_000))
    with pytest.raises(ValueError, match="read-only"):
        tensorferry.read(directory / "file", MadeForTheExport())


class EndedAtOnce:
    """A scheduler and the requests it gives, all of which have ended well."""

    def check_usable(self) -> None: ...

    def outstanding(self) -> int:
        return 0

    def of(self, *_: object) -> EndedAtOnce:
        return self

    def new_request(self, *_: object) -> EndedAtOnce:
        return self

    def submit(self, *_: object, **__: object) -> tuple[()]:
        return ()

    def run(self, *_: object) -> None: ...

    def wait(self, timeout: float | None) -> bool:
        return True

    def done(self) -> bool:
        return True

    def exception(self) -> None: ...


def test_a_transfer_whose_tensor_was_resized_meanwhile_fails(directory: pathlib.Path) -> None:
    def begin(tensor: torch.Tensor) -> tensorferry.Future:
        memory = memory_of(tensor, writable=False)
        return transfers.start(
            EndedAtOnce(),  # type: ignore[arg-type]
            directory / "file",
            tensor,
            memory,
            4096,
            write=True,
        )

    resized = torch.zeros(1000)
    future = begin(resized)
    resized.untyped_storage().resize_(0)
    with pytest.raises(tensorferry.StorageError, match="was released to torch") as caught:
        future.result()
    failure = caught.value
    assert (failure.errno, failure.filename) == (errno.EFAULT, str(directory / "file"))
    assert (failure.offset, failure.expected, failure.transferred) == (4096, 4000, 0)
    assert future.exception() is failure

    seen = torch.zeros(1000)
    future = begin(seen)
    assert future.done()
    seen.untyped_storage().resize_(0)  # the caller's again
    assert future.result() is seen

    moved = torch.zeros(1000)
    memory = memory_of(moved, writable=False)
    moved.untyped_storage().resize_(0)
    with pytest.raises(tensorferry.StorageError, match="was released to torch"):
        transfers.transfer(EndedAtOnce(), directory / "file", memory, 0, write=True)  # type: ignore[arg-type]
