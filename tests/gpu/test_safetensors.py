"""Safetensors files are loaded into GPU memory: whole tensors by one transfer, slices, warm and cold."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tensorferry.safetensors.frameworks import Framework
from tensorferry.safetensors.loading import SourceFile
from tensorferry.safetensors.parts import PartLoader, TensorPart
from tensorferry.safetensors.read_ahead import FileTensors

if TYPE_CHECKING:
    import pathlib

    from tensorferry.safetensors.header import Tensor
    from tests.support.gpus import Gpu

pytest.importorskip("torch")

from tests.safetensors.files import written
from tests.support.page_cache import make_cold, make_warm


class Memory:
    """Bytes of a GPU as a framework has them."""

    def __init__(self, gpu: Gpu, array: Any, nbytes: int) -> None:
        self._gpu = gpu
        self.array = array
        self.shape = (nbytes,)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Memory:
        if not isinstance(index, slice):
            return self  # the remaining index is applied by the framework
        begin, end, _ = index.indices(self.shape[0])
        return Memory(self._gpu, self._gpu.part(self.array, begin, end), end - begin)


class OnGpu(Framework):
    """A framework with arrays of bytes, because no framework supports the stand-in."""

    on_host = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def empty(self, nbytes: int) -> Memory:
        return Memory(self._gpu, self._gpu.array(bytes(nbytes), 0), nbytes)

    def wrap(self, memory: Any) -> Any:
        raise AssertionError("host memory is not what was asked for")

    def shape(self, tensor: Tensor, path: str) -> tuple[int, ...]:
        return tensor.shape

    def as_array(self, data: Memory, dtype: str, shape: tuple[int, ...]) -> Memory:
        return data

    def as_integers(self, data: Memory, itemsize: int, shape: tuple[int, ...]) -> Memory:
        return data

    def owner_of(self, data: Memory) -> Memory:
        return data

    def memory_of(self, owner: Memory | None) -> Memory | None:
        return owner

    def strided(self, data: Any, shape: Any, strides: Any, first: int) -> Any:
        raise AssertionError("nothing is to be picked")

    def index_by_lists(self, array: Memory, lists: tuple[Any, ...]) -> Memory:
        return array

    def as_dtype(self, array: Memory, dtype: str) -> Memory:
        return array


ROW = 200_000


@pytest.fixture
def content() -> dict[str, bytes]:
    chance = random.Random(3)
    return {
        "large": chance.randbytes(40 * ROW),
        "small": chance.randbytes(77),
        "nothing": b"",
        "last": chance.randbytes(5_000_001),
    }


@pytest.fixture
def path(directory: pathlib.Path, content: dict[str, bytes]) -> pathlib.Path:
    shapes = {name: [len(data)] for name, data in content.items()} | {"large": [40, ROW]}
    return written(
        directory / "model",
        {name: ("U8", shapes[name], data) for name, data in content.items()},
        pad=3,
    )


@pytest.mark.parametrize("state", ["cold", "warm"])
@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_tensors_are_loaded_into_gpu_memory(
    gpu: Gpu, path: pathlib.Path, content: dict[str, bytes], state: str, direct: str
) -> None:
    (make_warm if state == "warm" else make_cold)(path)
    source, framework = SourceFile(str(path), direct), OnGpu(gpu)
    tensors = FileTensors(source, framework)
    parts = [TensorPart(source.stored(name), None, framework) for name in content]
    found = dict(PartLoader(parts, tensors, 1 << 30))
    assert {name: gpu.bytes_of(each.array) for name, each in found.items()} == content
    for name in ("last", "large", "small"):  # out of order, and in order
        assert gpu.bytes_of(tensors.get(name).array) == content[name]


def test_rows_are_read_into_gpu_memory(
    gpu: Gpu, path: pathlib.Path, content: dict[str, bytes]
) -> None:
    make_cold(path)
    tensors = FileTensors(SourceFile(str(path), "auto"), OnGpu(gpu))
    rows = [content["large"][at * ROW + 5 : at * ROW + 60_000] for at in range(40)]
    for index, expected in (
        ((slice(3, 40, 9), slice(5, 60_000)), rows[3:40:9]),
        (([30, 2], slice(5, 60_000)), [rows[2], rows[30]]),
    ):
        found = tensors.get_part("large", index)
        assert gpu.bytes_of(found.array) == b"".join(expected)


def test_torchs_tensors_on_a_gpu(gpu: Gpu, path: pathlib.Path, content: dict[str, bytes]) -> None:
    if gpu.name != "torch":
        pytest.skip("needs torch's CUDA tensors; the stand-in driver has none")
    import torch

    from tensorferry.safetensors import safe_open
    from tensorferry.safetensors.torch import load_file

    expected = torch.frombuffer(bytearray(content["large"]), dtype=torch.uint8).view(40, ROW)
    for device in ("cuda", "cuda:0", 0, torch.device("cuda")):
        found = load_file(path, device)
        assert {str(tensor.device) for tensor in found.values()} == {"cuda:0"}
        assert torch.equal(found["large"].cpu(), expected)
    with safe_open(path, "pt", "cuda") as file:
        weights = file.get_slice("large")
        for index in ((slice(None), slice(1, 9, 3)), ([4, 1], ...), (-1, 3), slice(2, 5)):
            assert torch.equal(weights[index].cpu(), expected[index])
        assert torch.equal(file.get_tensor("large").cpu(), expected)
    with safe_open(path, "pt") as file:
        for name, tensor in file.prefetch({"large": slice(2, 7), "small": None}, device="cuda"):
            assert tensor.is_cuda
            if name == "large":
                assert torch.equal(tensor.cpu(), expected[2:7])
