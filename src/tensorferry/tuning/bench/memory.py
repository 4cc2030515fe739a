"""The memory that a process reads into or writes from, and what is in it."""

from __future__ import annotations

import array
import contextlib
import random
import warnings
from typing import TYPE_CHECKING, Any

from tensorferry.transfer.memory import locked_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PAGE_NBYTES = 4096
_CHUNK_NBYTES = 8 << 20


class ValidationError(Exception):
    """A file and the memory that should equal it differ."""


class Memory:
    """What a transfer reads into or writes from: host memory, or a tensor on a GPU, perhaps by way of host memory.

    Parameters
    ----------
    nbytes : int
        Its size.
    kind : str
        Host memory: "locked" (as ``tensorferry.empty`` gives it), "ordinary", or "accelerator" (pinned by torch).
        "gpu": the device's memory goes to the handle as it is, without any on the host.
    device : torch.Tensor, optional
        Bytes on a GPU. With a kind of host memory, each transfer includes the copy of all of them between both.
    pin_each_time : bool
        Make the host memory anew in each transfer: what that costs is what ds_io's slow bounce buffer shows.
    """

    def __init__(
        self, nbytes: int, kind: str, device: Any = None, pin_each_time: bool = False
    ) -> None:
        self.nbytes = nbytes
        self.device = device
        self.notes: list[str] = []
        self._kind = kind
        self._pin_each_time = pin_each_time and device is not None
        self._host: memoryview | None = None
        if kind != "gpu":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._host = _allocate(nbytes, kind)
            self.notes += [str(warning.message) for warning in caught]

    @property
    def host(self) -> memoryview:
        """The host memory. Where the GPU's goes to the handle, it is for those who cannot use that: plain Python."""
        if self._host is None:
            self._host = _allocate(self.nbytes, "ordinary")
        return self._host

    def tensor(self) -> Any:
        """Return what a program would hold: a torch tensor of the bytes, on the GPU if there is one."""
        return self.device if self.device is not None else _tensor_on(self.host)

    def content(self) -> Any:
        """Return the same as an array, without torch where there is no GPU."""
        return self.device if self.device is not None else self.host

    @contextlib.contextmanager
    def transferred(self, operation: str) -> Iterator[Any]:
        """Give what a read or write of a file is to use, and do the part between that and the GPU, if any."""
        if self._kind == "gpu":
            yield self.device
            return
        with self.on_host(operation) as host:
            yield host

    @contextlib.contextmanager
    def on_host(self, operation: str) -> Iterator[memoryview]:
        """Give host memory to a read or write of a file, and do the part between it and the GPU."""
        if self.device is None:
            yield self.host
            return
        if self._pin_each_time:
            self._host = _allocate(self.nbytes, self._kind)
        if operation == "write":
            _tensor_on(self.host).copy_(self.device)
        yield self.host
        if operation == "read":
            self.device.copy_(_tensor_on(self.host))
            self._synchronize()

    def fill(self, stamp: int) -> None:
        """Fill it with bytes that differ between pages and between stamps, and do not compress.

        Each page is marked with its number and the stamp: stale, lost and misplaced pages show.
        """
        block = random.Random(0).randbytes(1 << 20) * (_CHUNK_NBYTES >> 20)
        for begin in range(0, self.nbytes, _CHUNK_NBYTES):
            part = bytearray(block[: self.nbytes - begin])
            _stamp(memoryview(part), stamp, begin // _PAGE_NBYTES)
            self._put(begin, part)
        self._synchronize()

    def clear(self) -> None:
        """Fill it with bytes that no file of ours holds in whole pages."""
        for begin in range(0, self.nbytes, _CHUNK_NBYTES):
            self._put(begin, bytearray(min(_CHUNK_NBYTES, self.nbytes - begin)))
        self._synchronize()

    def check(self, path: Path) -> None:
        """Compare it with a file, which is read by plain Python.

        Raises
        ------
        ValidationError
            They differ.
        """
        with path.open("rb", buffering=0) as file:
            for begin in range(0, self.nbytes, _CHUNK_NBYTES):
                expected = self._part(begin)
                if file.read(len(expected)) != expected:
                    raise ValidationError(
                        f"validation failed: {str(path)!r} and the memory differ within {len(expected)} bytes "
                        f"from offset {begin} on"
                    )

    def _put(self, begin: int, part: bytearray) -> None:
        if self._host is not None:
            self._host[begin : begin + len(part)] = part
        if self.device is not None:
            self.device[begin : begin + len(part)].copy_(_tensor_on(memoryview(part)))

    def _part(self, begin: int) -> memoryview:
        if self.device is None:
            return self.host[begin : begin + _CHUNK_NBYTES]
        part = self.device[begin : begin + _CHUNK_NBYTES].cpu()
        return memoryview(part.numpy()).cast("B")

    def _synchronize(self) -> None:
        if self.device is not None and self.device.is_cuda:
            import torch

            torch.cuda.synchronize(self.device.device)


def _stamp(part: memoryview, stamp: int, first_page: int) -> None:
    words = part[: len(part) // 8 * 8].cast("Q")
    if len(words):
        step = _PAGE_NBYTES // 8
        first = (stamp << 32) + first_page
        count = len(words[::step])
        words[::step] = memoryview(array.array("Q", range(first, first + count)))


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
