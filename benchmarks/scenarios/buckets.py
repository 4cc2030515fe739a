"""A model in a bucket into tensors, beside obstore's own range requests into bytes, which are the limit here.

The server is on loopback, and sends files of a folder by sendfile, as S3 answers; moto copies the whole object for each
request, and would be all that is measured. It has the same processors as its clients. With a delay every answer waits:
then what counts is how many requests are on their way. Peers are those that are installed.
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
_WAYS = ((8, 8), (16, 8), (32, 8), (8, 32))  # threads, and MiB of a request


class Client:
    """Gets the model, in a worker; what AWS_ENDPOINT_URL names is asked."""

    def __init__(self, endpoint: str) -> None:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }
        self.url = f"s3://{_BUCKET}/{_NAME}"

    def obstore(self, threads: int, request_nbytes: int) -> dict[str, Any]:
        """By ranges into bytes."""
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
            raise MeasurementError("not all of it came")
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

    def runai(self) -> dict[str, Any]:
        """By Run:ai's streamer, 16 requests at a time; a copy is kept of each tensor, as its memory is used again."""
        os.environ["RUNAI_STREAMER_CONCURRENCY"] = "16"
        from runai_model_streamer import SafetensorsStreamer

        with Stopwatch() as watch, SafetensorsStreamer() as streamer:
            streamer.stream_file(self.url)
            found = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
        return watch.result(_checked(found))

    def s3fs(self) -> dict[str, Any]:
        """By s3fs, and safetensors of the bytes."""
        import safetensors.torch
        from s3fs import S3FileSystem

        touch_free_memory()
        with Stopwatch() as watch:
            fs = S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
            with fs.open(self.url, "rb") as file:
                found = safetensors.torch.load(file.read())
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
    """The whole model, with and without a delay of each answer."""
    if importlib.util.find_spec("obstore") is None:
        bench.note("obstore is not installed (tensorferry[remote])")
        return
    from tests.support import buckets

    _save(bench.directory, 2 * bench.nbytes)
    with contextlib.ExitStack() as stack:
        # Fresh memory costs all the same: see benchmarks.memory.
        stack.enter_context(little_free_memory(6 * bench.nbytes + GIB))
        server = stack.enter_context(buckets.file_server(bench.directory))
        delaying = [sys.executable, "-m", "tests.support.fault_proxy", server, str(_DELAY_SECONDS)]
        proxy = stack.enter_context(buckets.serving(delaying))
        ways = _WAYS[:1] if bench.smoke else _WAYS
        peers = {"runai": "runai_model_streamer", "s3fs": "s3fs"}
        peers = {call: name for call, name in peers.items() if importlib.util.find_spec(name)}
        for where, endpoint in (("loopback", server), ("50 ms an answer", proxy)):
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
                "into tensors; obstore: into bytes",
                ours={call: measured(client, call) for call in calls},
                peer={call: measured(client, call) for call in peers},
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
            for call, least in (("runai", 1.0), ("s3fs", 3.0)):
                if call in peers:
                    over = comparison.over("load_files", call)
                    bench.at_least(f"load_files over {call}, {where}", least, over)
