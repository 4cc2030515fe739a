"""One process that trains with DeepSpeed's ZeRO-3: on its own engine, or on ours."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Stopwatch, drive_nbytes
from benchmarks.peers.deepnvme import async_io

if TYPE_CHECKING:
    from collections.abc import Callable


class Trainer:
    """A training of one process, which goes on from sample to sample."""

    def __init__(self, directory: str, served: bool, **options: Any) -> None:
        self._clock, self._scratch = _begin(served)
        from benchmarks.training import Training

        self._training = Training(Path(directory), **options)

    def steps(self, count: int) -> dict[str, Any]:
        """Time some steps; the bytes are what the process read from and wrote to drives meanwhile."""
        before, in_handle = drive_nbytes("read", "write"), self._clock.seconds
        with Stopwatch() as watch:
            losses = [self._training.step() for _ in range(count)]
        return watch.result(
            drive_nbytes("read", "write") - before,
            losses=losses,
            seconds_in_handle=self._clock.seconds - in_handle,
        )


class OptimizerStepper:
    """Steps of an optimizer whose states are on NVMe, on DeepSpeed's own engine."""

    def __init__(
        self, directory: str, shapes: list[list[int]], buffers: int, aio: dict[str, Any]
    ) -> None:
        _, self._scratch = _begin(served=False)
        from benchmarks.training import OptimizerOnNvme

        tensors = [tuple(each) for each in shapes]
        self._training = OptimizerOnNvme(Path(directory), tensors, buffers, aio)

    def step(self) -> dict[str, Any]:
        """Time a step, and count what it, and the gradients for it, have moved."""
        before = drive_nbytes("read", "write")
        self._training.compute_gradients()
        with Stopwatch() as watch:
            self._training.step()
        return watch.result(drive_nbytes("read", "write") - before)


def _begin(served: bool) -> tuple[_HandleClock, tempfile.TemporaryDirectory[str]]:
    """Have DeepSpeed in this process, with its own engine or ours."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # looked for, and not used
    import tensorferry.deepspeed
    from benchmarks.training import join

    if served:
        tensorferry.deepspeed.install()
    else:
        tensorferry.deepspeed.uninstall()
    clock = _HandleClock(async_io().aio_handle)
    scratch = tempfile.TemporaryDirectory()
    store = f"file://{scratch.name}/store"
    join(init_method=store, rank=0, world_size=1)
    return clock, scratch


class _HandleClock:
    """How long DeepSpeed was held up by calls of a handle's methods: submitting and waiting."""

    def __init__(self, kind: type) -> None:
        self.seconds = 0.0
        self._inside = False
        for name in ("wait", "async_pread", "async_pwrite", "pread", "pwrite"):
            setattr(kind, name, self._timed(getattr(kind, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:  # one method of ours may call another
                return method(*arguments, **keywords)
            self._inside = True
            start = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return timed
