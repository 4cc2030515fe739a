"""Loads of a model in a bucket into tensors, compared with obstore's range requests into bytes, which are the limit.

The server on loopback answers as S3 does, and sends the files of a folder by sendfile. moto would copy the whole object
for each request, which would dominate the time. The server and its clients share the processors. In the runs with a
delay each answer waits, and the number of concurrent requests decides.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.bench import GIB, MIB, measured, scenario
from benchmarks.memory import Stopwatch, little_free_memory, touch_free_memory
from tensorferry.safetensors.plans import load_files
from tensorferry.safetensors.torch import load_file, save_file
from tensorferry.tuning.rounds import MeasurementError

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench

_TENSOR_NBYTES = 16 * MIB
_DELAY_SECONDS = 0.05
_BUCKET, _NAME = "models", "model.safetensors"
_WAYS = ((8, 8), (16, 8), (32, 8), (8, 32))  # threads, MiB of each request


class Client:
    """A client that loads the model, in a worker; AWS_ENDPOINT_URL names the server."""

    def __init__(self, endpoint: str) -> None:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.url = f"s3://{_BUCKET}/{_NAME}"

    def obstore(self, threads: int, request_nbytes: int) -> dict[str, Any]:
        """Get ranges of the object into bytes, by several threads."""
        import obstore

        store = obstore.store.from_url(f"s3://{_BUCKET}")
        touch_free_memory()
        with Stopwatch() as watch:
            nbytes = obstore.head(store, _NAME)["size"]

            def get(begin: int) -> Any:
                end = min(begin + request_nbytes, nbytes)
                return obstore.get_range(store, _NAME, start=begin, end=end)

            with ThreadPoolExecutor(threads) as pool:
                parts = [*pool.map(get, range(0, nbytes, request_nbytes))]
        if sum(map(len, parts)) != nbytes:
            raise MeasurementError(f"received {sum(map(len, parts))} of {nbytes} bytes")
        return watch.result(nbytes)

    def load_file(self) -> dict[str, Any]:
        touch_free_memory()
        with Stopwatch() as watch:
            found = load_file(self.url)
        return watch.result(_checked(found))

    def load_files(self) -> dict[str, Any]:
        touch_free_memory()
        with Stopwatch() as watch:
            found = dict(load_files(self.url))
        return watch.result(_checked(found))


def _checked(found: dict[str, torch.Tensor]) -> int:
    for at, name in enumerate(sorted(found)):
        if not bool((found[name][:: 1 << 12] == at % 251).all()):
            raise MeasurementError(f"{name} has other bytes than were saved")
    return sum(tensor.nbytes for tensor in found.values())


def _save(folder: Path, nbytes: int) -> None:
    (folder / _BUCKET).mkdir()
    count = max(1, nbytes // _TENSOR_NBYTES)
    model = {
        f"t{at:05}": torch.full((_TENSOR_NBYTES,), at % 251, dtype=torch.uint8)
        for at in range(count)
    }
    save_file(model, folder / _BUCKET / _NAME)


@scenario
def load(bench: Bench) -> None:
    """Load the whole model, with and without a delay of each answer."""
    if importlib.util.find_spec("obstore") is None:
        bench.note("obstore is not installed (tensorferry[remote])")
        return
    from tests.support import buckets

    _save(bench.directory, 2 * bench.nbytes)
    with contextlib.ExitStack() as stack:
        # All contenders pay the same for fresh memory: see benchmarks.memory.little_free_memory.
        stack.enter_context(little_free_memory(6 * bench.nbytes + GIB))
        server = stack.enter_context(buckets.file_server(bench.directory))
        delaying = [sys.executable, "-m", "tests.support.fault_proxy", server, str(_DELAY_SECONDS)]
        proxy = stack.enter_context(buckets.serving(delaying))
        ways = _WAYS[:1] if bench.smoke else _WAYS
        for where, endpoint in (("loopback", server), ("50 ms for each answer", proxy)):
            client = bench.worker(Client, endpoint=endpoint)
            limits = {
                f"obstore, {threads} threads, {request // MIB} MiB": measured(
                    client, "obstore", threads=threads, request_nbytes=request
                )
                for threads, request in ((threads, size * MIB) for threads, size in ways)
            }
            calls = ("load_file", "load_files")
            comparison = bench.compare(
                f"a model in a bucket, {where}",
                "into tensors; obstore into bytes",
                ours={call: measured(client, call) for call in calls},
                limit=limits,
            )
            best = comparison.best("limit")
            for call in calls:
                bench.at_least(f"{call} over obstore, {where}", 0.9, comparison.over(call, best))
            bench.at_most(
                f"CPU seconds of load_files over obstore, {where}",
                1.3,
                comparison.cpu_over("load_files", best),
            )
