"""GPU arrays and a CUDA driver for checks that are made before any transfer: these arrays cannot be moved.

Transfers of GPU memory are tested in tests/gpu, with real GPUs or the stand-in driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorferry.transfer import arrays

if TYPE_CHECKING:
    import pytest

GPU = 3
ADDRESS = 0x7000


class CudaArray:
    """An array with the interface of numba's and CuPy's: by default 48 bytes at an address of the GPU."""

    def __init__(self, **interface: object) -> None:
        plain = {"shape": (3, 4), "typestr": "<f4", "data": (ADDRESS, False), "version": 3}
        self.__cuda_array_interface__ = plain | interface


def pretend_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the CUDA driver by one with 4096 bytes of memory on one GPU."""

    def device_of(address: int) -> int:
        if not ADDRESS <= address < ADDRESS + 4096:
            raise ValueError("none")
        return GPU

    monkeypatch.setattr(arrays._core, "cuda_refusal", lambda: None)
    monkeypatch.setattr(arrays._core, "device_of", device_of)
    monkeypatch.setattr(arrays, "last_gpu", -1)


def pretend_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no CUDA driver."""
    monkeypatch.setattr(arrays._core, "cuda_refusal", lambda: "no driver; remedy: a GPU")
