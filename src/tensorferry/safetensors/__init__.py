"""Safetensors files: the functions of the ``safetensors`` package at the drive's speed. Every header is validated.

>>> from tensorferry.safetensors import safe_open
>>> from tensorferry.safetensors.torch import load_file
"""

from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.installing import install, uninstall
from tensorferry.safetensors.memory import deserialize
from tensorferry.safetensors.opened import PrefetchLoader, PySafeSlice, TensorMeta, safe_open
from tensorferry.safetensors.plans import load_files, tensor_parallel_plan
from tensorferry.safetensors.saving import TensorSpec, serialize, serialize_file
from tensorferry.safetensors.sharded import save_sharded
from tensorferry.safetensors.slicing import SliceError

__all__ = [
    "PrefetchLoader",
    "PySafeSlice",
    "SafetensorError",
    "SliceError",
    "TensorMeta",
    "TensorSpec",
    "deserialize",
    "install",
    "load_files",
    "safe_open",
    "save_sharded",
    "serialize",
    "serialize_file",
    "tensor_parallel_plan",
    "uninstall",
]


# Submodules that other parts of the package import would otherwise show up in dir() and in tab completion.
def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])
