"""GPUs for the tests behind one interface: real ones with torch, or those of the stand-in driver.

A test with the fixture `gpu` runs on either. Arrays are one-dimensional and of uint8. Their type (a
torch tensor, a `DeviceArray`) matters to tensorferry only, so tests access their bytes only by these
methods. The "current stream" is the one of the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.standin import DeviceArray, StandIn

Data = Any  # an object with a buffer, or a number of zeros


class Gpu(Protocol):
    """The operations that a test can do with GPUs."""

    name: str
    count: int

    def array(self, data: Data, device: int = 0) -> Any:
        """Return a new array with a copy of data, or with that many zeros; it is there on return."""

    def bytes_of(self, array: Any) -> bytes:
        """Return the array's bytes after all work that is queued on its device."""

    def part(self, array: Any, begin: int, end: int) -> Any:
        """Return array[begin:end], which shares its memory."""

    def new_stream(self, device: int = 0) -> contextlib.AbstractContextManager[int]:
        """Make a new stream of device current; its handle is given."""

    def fill_later(self, array: Any, value: int, seconds: float) -> None:
        """Queue a fill of array on the current stream, which runs after at least `seconds`."""

    def copy_later(self, source: Any, destination: Any) -> None:
        """Queue on the current stream a copy between two arrays of one device and size."""

    def synchronize(self, device: int = 0) -> None:
        """Wait for all work that is queued on device."""

    def live(self) -> int:
        """Return the number of live allocations in GPU memory."""


class StandInGpu:
    """Two GPUs of the stand-in driver; their arrays have `__cuda_array_interface__`."""

    name = "stand-in"
    count = 2

    def __init__(self, driver: StandIn) -> None:
        self.driver = driver

    def array(self, data: Data, device: int = 0) -> DeviceArray:
        return self.driver.array(data, device)

    def bytes_of(self, array: DeviceArray) -> bytes:
        self.driver.synchronize(array.device)
        return self.driver.peek(array.address, array.nbytes)

    def part(self, array: DeviceArray, begin: int, end: int) -> DeviceArray:
        return array.part(begin, end)

    def new_stream(self, device: int = 0) -> contextlib.AbstractContextManager[int]:
        return self.driver.new_stream(device)

    def fill_later(self, array: DeviceArray, value: int, seconds: float) -> None:
        self.driver.kernel(array, value, seconds=seconds)

    def copy_later(self, source: DeviceArray, destination: DeviceArray) -> None:
        self.driver.copy(source, destination)

    def synchronize(self, device: int = 0) -> None:
        self.driver.synchronize(device)

    def live(self) -> int:
        return self.driver.count("allocations")


class TorchGpu:
    """The GPUs that torch sees; their arrays are torch's tensors."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.count = torch.cuda.device_count()
        self.cycles_per_second = [self._cycles_per_second(device) for device in range(self.count)]

    def array(self, data: Data, device: int = 0) -> Any:
        torch = self.torch
        if isinstance(data, int):
            array = torch.zeros(data, dtype=torch.uint8, device=f"cuda:{device}")
        else:
            copy = bytearray(data)
            on_host = torch.frombuffer(copy, dtype=torch.uint8) if copy else torch.empty(0).byte()
            array = on_host.to(f"cuda:{device}")
        self.synchronize(device)  # the caller may go on to another stream
        return array

    def bytes_of(self, array: Any) -> bytes:
        self.synchronize(array.device.index)
        return array.cpu().numpy().tobytes()

    def part(self, array: Any, begin: int, end: int) -> Any:
        return array[begin:end]

    @contextlib.contextmanager
    def new_stream(self, device: int = 0) -> Iterator[int]:
        stream = self.torch.cuda.Stream(device=device)
        with self.torch.cuda.stream(stream):
            yield stream.cuda_stream

    def fill_later(self, array: Any, value: int, seconds: float) -> None:
        device = array.device.index
        cycles = int(seconds * self.cycles_per_second[device])
        with self.torch.cuda.device(device):
            self.torch.cuda._sleep(cycles)
            array.fill_(value)

    def copy_later(self, source: Any, destination: Any) -> None:
        destination.copy_(source, non_blocking=True)

    def synchronize(self, device: int = 0) -> None:
        self.torch.cuda.synchronize(device)

    def live(self) -> int:
        statistics = (self.torch.cuda.memory_stats(device) for device in range(self.count))
        return sum(of_device.get("allocation.all.current", 0) for of_device in statistics)

    def _cycles_per_second(self, device: int) -> float:
        """Return no fewer cycles than torch.cuda._sleep counts in a second: the clock varies."""
        cuda = self.torch.cuda
        cycles = 20_000_000
        rates = []
        with cuda.device(device):
            for _ in range(4):
                begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                cuda._sleep(cycles)
                end.record()
                end.synchronize()
                rates.append(cycles / (begin.elapsed_time(end) / 1000))
        return 1.2 * max(rates)


@functools.cache
def chosen() -> Gpu | str:
    """Return the GPUs to test with, or the reason why none is available."""
    if os.environ.get("TENSORFERRY_LIBCUDA"):
        from tests.support import standin

        if not standin.chosen():
            return "TENSORFERRY_LIBCUDA names a library that is not the stand-in driver"
        return StandInGpu(standin.loaded())
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed, and TENSORFERRY_LIBCUDA names no stand-in driver"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU, and TENSORFERRY_LIBCUDA names no stand-in driver"
    return TorchGpu()
