"""The memory that a process reads into or writes from, and what is in it."""

from __future__ import annotations

import array
import contextlib
import random
import warnings
from typing import TYPE_CHECKING, Any

from tensorferry.memory import locked_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PAGE_NBYTES = 4096
_CHUNK_NBYTES = 8 << 20


class ValidationError(Exception):
    """A file and the memory that should equal it differ."""


class Memory:
    """Host memory for one transfer, and a tensor elsewhere that it stands between the file and, if any.

    Parameters
    ----------
    nbytes : int
        Its size.
    kind : str
        "locked" (as ``tensorferry.empty`` gives it), "ordinary", or "accelerator" (pinned by torch).
    device : torch.Tensor, optional
        Bytes on a GPU. Then each transfer includes the copy between it and the host memory.
    pin_each_time : bool
        Make the host memory anew in each transfer: what that costs is what ds_io's slow bounce buffer shows.
    """

    def __init__(
        self, nbytes: int, kind: str, device: Any = None, pin_each_time: bool = False
    ) -> None:
        self._kind = kind
        self._pin_each_time = pin_each_time and device is not None
        self.device = device
        self.notes: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.host = _allocate(nbytes, kind)
        self.notes += [str(warning.message) for warning in caught]

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.host.nbytes

    def tensor(self) -> Any:
        """Return what a program would hold: a torch tensor of the bytes, on the GPU if there is one."""
        return self.device if self.device is not None else _tensor_on(self.host)

    @contextlib.contextmanager
    def transferred(self, operation: str) -> Iterator[memoryview]:
        """Give the host memory to a read or write of a file, and do the part between it and the GPU."""
        if self.device is None:
            yield self.host
            return
        if self._pin_each_time:
            self.host = _allocate(self.nbytes, self._kind)
        if operation == "write":
            _tensor_on(self.host).copy_(self.device)
        yield self.host
        if operation == "read":
            self.device.copy_(_tensor_on(self.host))
            if self.device.is_cuda:
                import torch

                torch.cuda.synchronize(self.device.device)

    def fill(self, stamp: int) -> None:
        """Fill it with bytes that differ between pages and between stamps, and do not compress."""
        block = random.Random(0).randbytes(1 << 20)
        for start in range(0, self.nbytes, len(block)):
            part = self.host[start : start + len(block)]
            part[:] = block[: len(part)]
        self.stamp(stamp)

    def stamp(self, stamp: int) -> None:
        """Mark each page with its number and the stamp: stale, lost and misplaced pages show."""
        words = self.host[: self.nbytes // 8 * 8].cast("Q")
        if len(words):
            step = _PAGE_NBYTES // 8
            count = len(words[::step])
            first = stamp << 32
            words[::step] = memoryview(array.array("Q", range(first, first + count)))
        if self.device is not None:
            self.device.copy_(_tensor_on(self.host))

    def clear(self) -> None:
        """Fill it with bytes that no file of ours holds in whole pages."""
        block = bytes(1 << 20)
        for start in range(0, self.nbytes, len(block)):
            part = self.host[start : start + len(block)]
            part[:] = block[: len(part)]
        if self.device is not None:
            self.device.zero_()

    def check(self, path: Path) -> None:
        """Compare it with a file, which is read by plain Python.

        Raises
        ------
        ValidationError
            They differ.
        """
        held = self.host
        if self.device is not None:
            held = memoryview(self.device.cpu().numpy()).cast("B")
        with path.open("rb", buffering=0) as file:
            for start in range(0, self.nbytes, _CHUNK_NBYTES):
                expected = held[start : start + _CHUNK_NBYTES]
                if file.read(len(expected)) != expected:
                    raise ValidationError(
                        f"validation failed: {str(path)!r} and the memory differ within {len(expected)} bytes "
                        f"from offset {start} on"
                    )


def _tensor_on(view: memoryview) -> Any:
    import torch

    return torch.frombuffer(view, dtype=torch.uint8)


def _allocate(nbytes: int, kind: str) -> memoryview:
    if kind == "locked":
        return memoryview(locked_memory(nbytes)[0])
    if kind == "accelerator":
        import torch

        pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(pinned.numpy())  # type: ignore[arg-type]
    return memoryview(bytearray(nbytes))
