"""Arrays of the tests: parts of a larger allocation, and arrays with the interfaces of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.expect import assert_equal

if TYPE_CHECKING:
    from tests.support.gpus import Gpu

NEIGHBOUR = 0xA5
AFTER = 67


class Amid:
    """An array of bytes inside an allocation; the bytes around it must not change."""

    def __init__(self, gpu: Gpu, data: Any, before: int = 0, device: int = 0) -> None:
        data = bytes(data)  # so many zeros, if it is a number
        self._gpu = gpu
        self._before = bytes([NEIGHBOUR]) * before
        self._after = bytes([NEIGHBOUR]) * AFTER
        self._nbytes = len(data)
        self.whole = gpu.array(self._before + data + self._after, device)
        self.array = gpu.part(self.whole, before, before + len(data))

    def contents(self) -> bytes:
        """Return the array's bytes, after a look at the neighbours."""
        found = self._gpu.bytes_of(self.whole)
        begin, end = len(self._before), len(self._before) + self._nbytes
        assert_equal(found[:begin], self._before)
        assert_equal(found[end:], self._after)
        return found[begin:end]


class Described:
    """An array that has only `__cuda_array_interface__`, as those of CuPy and Numba."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self._array = array
        self.__cuda_array_interface__ = dict(array.__cuda_array_interface__) | changes

    @property
    def address(self) -> int:
        address: int = self.__cuda_array_interface__["data"][0]
        return address
