"""A cache of tensors that is larger than memory: recently used tensors are in memory, all others on the drive.

    python examples/store/cache.py --directory /nvme/scratch

Several asyncio tasks request activations by name. Tensors that are not in the cache are read from a store. Tensors that
do not fit into the cache are written to the store in the background. The tasks do not wait for writes: a tensor that is
being written is still served from memory. At the end, the directory is empty.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import OrderedDict

import torch

from tensorferry.store import TensorStore


class Cache:
    """A cache of tensors by name. Tensors of up to ``memory_nbytes``, and those being written, are in memory."""

    def __init__(self, store: TensorStore, memory_nbytes: int) -> None:
        self._store = store
        self._free_nbytes = memory_nbytes
        self._held: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._writing: dict[str, asyncio.Task[torch.Tensor]] = {}
        self._reading: dict[str, asyncio.Task[torch.Tensor]] = {}
        self.hits = self.misses = 0

    async def put(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor under a name. The caller must not change it afterwards."""
        self._hold(name, tensor)
        await self._evict()

    async def get(self, name: str) -> torch.Tensor:
        """Return the tensor with a name. The caller must not change it."""
        if name in self._held:
            self.hits += 1
            self._held.move_to_end(name)
            return self._held[name]
        if (writing := self._writing.get(name)) is not None:
            self.hits += 1
            tensor = await asyncio.shield(writing)
            self._hold(name, tensor)
        else:
            self.misses += 1
            if name not in self._reading:  # concurrent requests for a tensor share one read
                self._reading[name] = asyncio.create_task(self._read(name))
            tensor = await asyncio.shield(self._reading[name])
        await self._evict()
        return tensor

    async def drain(self) -> None:
        """Wait for all writes."""
        await asyncio.gather(*self._writing.values())

    async def _read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = await self._store.read(name)
            self._hold(name, tensor)
            return tensor
        finally:
            del self._reading[name]

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._held:
            self._free_nbytes -= tensor.nbytes
        self._held[name] = tensor

    async def _evict(self) -> None:
        while self._free_nbytes < 0 and len(self._held) > 1:
            name, tensor = self._held.popitem(last=False)
            self._free_nbytes += tensor.nbytes
            # Tensors do not change, so one that is in the store need not be written again.
            if name not in self._store and name not in self._writing:
                self._writing[name] = asyncio.create_task(self._write(name, tensor))
        # Limit the number of tensors that are in memory in addition to the cache.
        while len(self._writing) > 8:
            await asyncio.wait(self._writing.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _write(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        await self._store.write(name, tensor)
        del self._writing[name]
        return tensor


def activation(number: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(nbytes // 4, generator=generator)


async def work(cache: Cache, seed: int, arguments: argparse.Namespace) -> None:
    """Request tensors, some more often than others, and check each of them."""
    chosen = random.Random(seed)
    for _ in range(arguments.requests):
        number = min(int(chosen.expovariate(8 / arguments.tensors)), arguments.tensors - 1)
        tensor = await cache.get(f"activation {number}")
        if not torch.equal(tensor, activation(number, arguments.nbytes)):
            raise AssertionError(f"activation {number} has changed")


async def run(arguments: argparse.Namespace, directory: str) -> None:
    total = arguments.tensors * arguments.nbytes
    with TensorStore(directory) as store:
        # Allocate the space now, to report a full disk before the work begins.
        store.reserve(total, in_flight_nbytes=0)
        cache = Cache(store, arguments.memory_nbytes)
        for number in range(arguments.tensors):
            await cache.put(f"activation {number}", activation(number, arguments.nbytes))
        await asyncio.gather(*(work(cache, seed, arguments) for seed in range(arguments.tasks)))
        await cache.drain()
        stats = store.stats()
    share = cache.hits / (cache.hits + cache.misses)
    print(f"{total / 1e6:.0f} MB of tensors, {arguments.memory_nbytes / 1e6:.0f} MB of memory")
    print(f"{share:.0%} of {arguments.tasks * arguments.requests} requests were served from memory")
    print(f"{stats['directories'][0]['used_nbytes'] / 1e6:.0f} MB on the drive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="a folder on the drive; by default a temporary one")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--nbytes", type=int, default=4 << 20, help="size of a tensor")
    parser.add_argument("--memory-nbytes", type=int, default=200 << 20)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--requests", type=int, default=50, help="requests of each task")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        asyncio.run(run(arguments, directory))


if __name__ == "__main__":
    main()
