"""Extensions of torch's storage, which change the contents of files."""

from __future__ import annotations

import io
from typing import Any

import pytest

extension = pytest.importorskip(
    "torch.distributed.checkpoint._extension", reason="extensions came with torch 2.7"
)


class Inverting(extension.StreamTransformExtension):  # type: ignore[misc]
    """Inverts every bit on its way to the file, and back."""

    @staticmethod
    def registry_name() -> str:
        return "stream.inverting"

    @staticmethod
    def from_descriptor(version: str) -> Inverting:
        return Inverting()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        return _Inverted(output)

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        return io.BytesIO(bytes(byte ^ 255 for byte in input.read()))


class _Inverted(io.RawIOBase):
    def __init__(self, output: Any) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(bytes(byte ^ 255 for byte in memoryview(data).cast("B")))
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._output.close()
