"""A store of named tensors in files, in one or more directories: for more data than fits into memory.

>>> store = tensorferry.store.TensorStore("/nvme/scratch")  # doctest: +SKIP
>>> ticket = store.write("layer.0", tensor)  # doctest: +SKIP
>>> ticket.result()  # doctest: +SKIP
>>> tensor = store.read("layer.0").result()  # doctest: +SKIP
"""

from tensorferry.store.tensor_store import TensorStore
from tensorferry.store.tensors import TensorInfo

__all__ = ["TensorInfo", "TensorStore"]


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])
