"""Stores with GPU memory: small and large tensors, verified reads, and reads behind writes in flight."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tensorferry.store import TensorStore
from tests.gpu.arrays import Amid

if TYPE_CHECKING:
    import pathlib

    from tests.support.gpus import Gpu

LARGE = 4 << 20


@pytest.mark.parametrize("nbytes", [0, 5, 4096, LARGE, 5 * LARGE + 77])
@pytest.mark.parametrize("checksums", [True, False])
def test_gpu_memory_is_stored_and_filled(
    gpu: Gpu, directory: pathlib.Path, nbytes: int, checksums: bool
) -> None:
    versions = [random.Random(seed).randbytes(nbytes) for seed in range(3)]
    with TensorStore(directory, checksums=checksums) as store:
        tickets = []
        for data in versions:
            store.write("a", Amid(gpu, data, 12).array)
            out = Amid(gpu, nbytes, 4)
            tickets.append((store.read("a", out=out.array), out, data))
        for ticket, out, data in tickets:
            ticket.result()
            assert out.contents() == data
        assert bytes(store.read("a").result()) == versions[-1]


def test_lists_of_gpu_and_host_memory(gpu: Gpu, directory: pathlib.Path) -> None:
    data = random.Random(1).randbytes(3 * LARGE)
    with TensorStore(directory) as store:
        store.write("a", [data[:100], Amid(gpu, data[100:], 8).array]).result()
        out, host = Amid(gpu, 2 * LARGE, 4), bytearray(LARGE)
        store.read("a", out=[out.array, host]).result()
        assert out.contents() == data[: 2 * LARGE]
        assert host == data[2 * LARGE :]
