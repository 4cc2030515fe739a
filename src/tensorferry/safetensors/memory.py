"""Safetensors files that are bytes in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.safetensors import header
from tensorferry.safetensors.errors import SNIFFED_NBYTES
from tensorferry.safetensors.loading import aligned

if TYPE_CHECKING:
    from tensorferry.safetensors.frameworks import Framework


def deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the tensors in a file's bytes as pairs of a name and a dict with "shape", "dtype" and "data".

    The dtype has the format's name. The data are copies.

    Raises
    ------
    SafetensorError
        The bytes break a rule of the format.
    """
    return [
        (
            tensor.name,
            {"shape": list(tensor.shape), "dtype": tensor.dtype, "data": bytearray(memory)},
        )
        for tensor, memory in _tensors(data)
    ]


def arrays_of(data: bytes, framework: Framework) -> dict[str, Any]:
    """Return the tensors in a file's bytes as arrays, which are copies."""
    tensors = [tensor for tensor, _ in _tensors(data)]
    shapes = [framework.shape(each, "") for each in tensors]
    mapping = _core.map_pieces([None], [0], [len(data)])
    memoryview(mapping.bytes(0, len(data)))[:] = memoryview(data).cast("B")
    arrays = {}
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor.nbytes > 0:
            memory = mapping.bytes(tensor.begin, tensor.nbytes, True)
            copy = aligned(framework.wrap(memory), tensor, framework)
        else:
            copy = framework.empty(0)
        arrays[tensor.name] = framework.as_array(copy, tensor.dtype, shape)
    return arrays


def _tensors(data: bytes) -> list[tuple[header.Tensor, memoryview]]:
    view = memoryview(data).cast("B")
    nbytes = header.length(bytes(view[:SNIFFED_NBYTES]), len(view), "")
    found = header.parse(bytes(view[:nbytes]), len(view), "")
    return [(tensor, view[tensor.begin : tensor.end]) for tensor in found.tensors.values()]
