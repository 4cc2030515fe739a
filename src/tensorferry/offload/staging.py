"""Buckets on the device that steps them: buffers there, and copies from and to host memory on separate streams.

A bucket is the state of some parameters, which are stepped together. Three operations overlap: the copy of a bucket to
the device, the arithmetic on the previous bucket, and the copy of the bucket before that back to the host. The host
memory of a bucket must not be used for another bucket before the copy back is complete.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.offload.plan import Bucket

# One bucket is loaded, one is stepped, and one is stored.
_BUFFERS = 3


class Staging:
    """Buffers on a device, each for one bucket: :meth:`load`, step, :meth:`store`, and then :meth:`stored`.

    Parameters
    ----------
    device : torch.device
        A GPU with streams; on any other device, copies block.
    nbytes : int
        Size of the largest bucket.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._buffers = deque(
            torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)
        )
        make: Any = torch.cuda.Stream
        self._streams = (make(device), make(device)) if device.type == "cuda" else None
        if self._streams is not None:
            # torch's caching allocator may have reused memory that kernels on the current stream still
            # use, so the first copies into the buffers wait for these kernels.
            self._streams[0].wait_stream(torch.cuda.current_stream(device))
        self._copies_back: deque[tuple[Bucket, torch.Tensor, Any]] = deque()

    def load(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a bucket's bytes on the device; kernels queued on the current stream from now on see them."""
        if not self._buffers:
            raise RuntimeError("no free buffer: stored() frees them")
        here = self._buffers[0][: memory.numel()]
        if self._streams is None:
            here.copy_(memory)
            return here
        loading, _ = self._streams
        # The buffer is free: the last copy from it to the host is complete, and that copy followed the arithmetic in
        # the buffer. So this copy need not wait for the arithmetic on the previous bucket, which is in another buffer.
        with torch.cuda.stream(loading):
            here.copy_(memory, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(loading)
        return here

    def store(self, bucket: Bucket, here: torch.Tensor, memory: torch.Tensor) -> None:
        """Begin to copy a stepped bucket, in the memory that :meth:`load` returned, back to its host memory."""
        buffer = self._buffers.popleft()
        if self._streams is None:
            memory.copy_(here)
            self._copies_back.append((bucket, buffer, None))
            return
        _, storing = self._streams
        storing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(storing):
            memory.copy_(here, non_blocking=True)
        self._copies_back.append((bucket, buffer, storing.record_event()))

    def stored(self, *, but: int = 0) -> Iterator[Bucket]:
        """Yield stored buckets in order, each after its copy back is complete.

        The last ``but`` buckets are left for a later call.
        """
        while len(self._copies_back) > but:
            bucket, buffer, event = self._copies_back.popleft()
            self._buffers.append(buffer)
            if event is not None:
                event.synchronize()
            yield bucket
