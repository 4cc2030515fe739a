"""Training steps while a mirror uploads the checkpoint to a bucket, compared with steps while the mirror is stopped.

The bucket is a moto server on loopback, which receives only the processor time that other processes leave. A training's
machine does not run an S3 server, so its processor time must not slow down the steps. Measure the speed of a network on
a machine that has one.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.bench import scenario
from tensorferry.tuning.rounds import Sample
from tensorferry.tuning.workers import UnavailableError

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Measure
    from tensorferry.tuning.workers import Worker

_STEPS = 10
_ROUNDS = 24
_WIDTH, _BATCH = 1024, 256
# A server in the idle scheduling class, also where the kernel shares processors between sessions: sched(7).
_LEFTOVERS = ["sh", "-c", 'echo 19 > /proc/self/autogroup; exec chrt --idle 0 "$@"', "sh"]


class Trainer:
    """A training, in a worker, with a mirror that is uploading during every measurement."""

    def __init__(self, root: str, nbytes: int, threads: int, bucket: list[str]) -> None:
        from tests.support.buckets import Bucket

        from tensorferry.checkpoint import Checkpoints

        endpoint, name = bucket
        store = Bucket(name, endpoint).store(timeout="600s")
        torch.set_num_threads(threads)
        self.checkpoints = Checkpoints(root, keep_last=1, mirror=(store, "run"))
        self.state = {"weights": torch.rand(nbytes // 4)}
        layers = itertools.chain.from_iterable(
            (nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(4)
        )
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.data = torch.rand(_BATCH, _WIDTH)
        self.numbers = itertools.count(1)

    def step(self) -> None:
        self.model(self.data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, uploads: bool) -> dict[str, Any]:
        """Measure some steps while the mirror uploads, or while it is stopped, and the bytes that the mirror reads."""
        mirror: Any = self.checkpoints._mirror
        if mirror.wait(0):  # all is uploaded: give the mirror another checkpoint
            self.checkpoints.save(next(self.numbers), self.state, wait=True)
            for _ in range(_STEPS):
                self.step()
        process = mirror._process.pid
        if not uploads:
            os.kill(process, signal.SIGSTOP)
        try:
            begin, read = time.perf_counter(), _nbytes_read(process)
            for _ in range(_STEPS):
                self.step()
            seconds = time.perf_counter() - begin
            return {"seconds": seconds, "nbytes": _nbytes_read(process) - read}
        finally:
            os.kill(process, signal.SIGCONT)

    def give_up(self) -> None:
        self.checkpoints._mirror.close()  # type: ignore[union-attr]


def _nbytes_read(process: int) -> int:
    said = Path(f"/proc/{process}/io").read_text()
    return int(said.partition("rchar: ")[2].partition("\n")[0])


@scenario
def steps(bench: Bench) -> None:
    """Measure a training step while its mirror uploads, with training threads on all and on half of the processors."""
    if not all(map(importlib.util.find_spec, ("moto", "flask_cors", "obstore"))):
        raise UnavailableError("moto or obstore is not installed")
    from tests.support import buckets

    with buckets.s3_server(_LEFTOVERS) as address:
        everything = os.cpu_count() or 1
        for threads in dict.fromkeys([everything, max(1, everything // 2)]):
            rates: list[float] = []  # MB/s of the mirror
            worker = bench.worker(
                Trainer,
                root=str(bench.directory / str(threads)),
                nbytes=bench.nbytes,
                threads=threads,
                bucket=[address, buckets.Bucket.new(address).name],
            )
            comparison = bench.compare(
                f"a step on {threads} of {everything} processors",
                f"the mirror uploads {bench.nbytes >> 20} MiB",
                ours={"while the mirror uploads": _steps(worker, rates)},
                peer={"while it is stopped": _steps(worker, None)},
                unit="s",
                rounds=2 if bench.smoke else _ROUNDS,
            )
            worker.call("give_up")
            over = comparison.over("while the mirror uploads", "while it is stopped")
            bench.at_most(
                f"steps while a mirror uploads, on {threads} of {everything} processors",
                1.05,
                over,
                note=f"the mirror read {statistics.fmean(rates):.0f} MB/s of its files",
            )


def _steps(worker: Worker, rates: list[float] | None) -> Measure:
    def measure(_number: int) -> Sample:
        said = worker.call("steps", rates is not None)
        if rates is not None:
            rates.append(said["nbytes"] / said["seconds"] / 1e6)
        return Sample(said["seconds"] / _STEPS, said["seconds"])

    return measure
