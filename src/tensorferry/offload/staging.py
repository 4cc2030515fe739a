"""Buckets on the device that steps them: a few buffers there, and copies to and from slots on streams of their own.

The copy of a bucket to the device, the arithmetic on the one before and the copy back of the one before that overlap.
A slot is released only when the copy back into it is over.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# One is loaded, one is stepped, one is stored.
_BUFFERS = 3


class Staging:
    """Buffers on a device.

    Parameters
    ----------
    device : torch.device
        A GPU, with streams; on any other device copies are blocking.
    nbytes : int
        Of the largest bucket.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._buffers = deque(
            torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)
        )
        make: Any = torch.cuda.Stream
        self._streams = (make(device), make(device)) if device.type == "cuda" else None
        if self._streams is not None:
            # Memory that torch has given may still be in use by what is queued there.
            self._streams[0].wait_stream(torch.cuda.current_stream(device))
        self._on_their_way: deque[tuple[int, torch.Tensor, Any]] = deque()

    def load(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a bucket's bytes on the device; what is queued on the current stream from now on has them."""
        if not self._buffers:
            raise RuntimeError("buffers are given back by stored()")
        here = self._buffers[0][: memory.numel()]
        if self._streams is None:
            here.copy_(memory)
            return here
        loading, _ = self._streams
        # The buffer was last used by a copy back, which came after the arithmetic on it and has ended. So this copy
        # need not wait for the arithmetic on the bucket before.
        with torch.cuda.stream(loading):
            here.copy_(memory, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(loading)
        return here

    def store(self, index: int, here: torch.Tensor, memory: torch.Tensor) -> None:
        """Begin to copy what :meth:`load` has returned, and has been stepped, back to its slot."""
        buffer = self._buffers.popleft()
        if self._streams is None:
            memory.copy_(here)
            self._on_their_way.append((index, buffer, None))
            return
        _, storing = self._streams
        storing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(storing):
            memory.copy_(here, non_blocking=True)
        self._on_their_way.append((index, buffer, storing.record_event()))

    def stored(self, *, but: int = 0) -> Iterator[int]:
        """Yield buckets that are back in their slots, in order; the last ``but`` of them are not waited for."""
        while len(self._on_their_way) > but:
            index, buffer, event = self._on_their_way.popleft()
            self._buffers.append(buffer)
            if event is not None:
                event.synchronize()
            yield index
