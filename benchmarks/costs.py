"""``python -m benchmarks.costs``: the work for each tensor, file and rank, compared with torch and safetensors.

Each row does the same task with tensorferry and with the original function of torch or safetensors, in turns, in one
process, on equal files. Nearly no bytes are moved, so the time is the work for each item. The ratio of times is that of
the medians; the ratio of CPU times is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as TorchsReader

import safetensors
from tensorferry.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    Stager,
)
from tensorferry.checkpoint.storage.metadata import parse_metadata
from tensorferry.safetensors import safe_open
from tensorferry.tuning.rounds import Comparison, Contender, Sample, take_turns
from tensorferry.tuning.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable


class Row(NamedTuple):
    """The two functions of one row: tensorferry's, and the original of torch or safetensors."""

    ours: Callable[[], Any]
    original: Callable[[], Any]


def headers_of_ranks(folder: Path, scale: float) -> Row:
    """Read the metadata of a Hugging Face checkpoint: files of 512 ranks, each with parts of 100 tensors."""
    ranks, count = max(2, int(512 * scale)), max(2, int(100 * scale))
    tensors = {f"model.layers.{k}.weight": torch.zeros(4) for k in range(count)}
    for rank in range(ranks):
        parts = {name: {"saved_offsets": [4 * rank]} for name in tensors}
        metadata = {"DCP_SHARDING_INFO": json.dumps(parts), "DCP_VERSION": "1.0", "format": "pt"}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file(tensors, folder / name, metadata)
    return Row(
        lambda: HuggingFaceStorageReader(str(folder)).read_metadata(),
        lambda: TorchsReader(str(folder)).read_metadata(),
    )


def chunks_of_metadata(folder: Path, scale: float) -> Row:
    """Parse a `.metadata` file of 102,400 chunks: 1024 tensors on 100 ranks."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors, ranks = max(2, int(1024 * scale)), max(2, int(100 * scale))
    entries, places = {}, {}
    for number in range(tensors):
        name = f"model.layers.{number}.weight"
        chunks = []
        for rank in range(ranks):
            chunk = ChunkStorageMetadata(torch.Size([rank * 4, 0]), torch.Size([4, 1024]))
            chunks.append(chunk)
            place = _StorageInfo(f"__{rank}_0.distcp", number * 20000, 20000)
            places[MetadataIndex(name, chunk.offsets, rank)] = place
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size([ranks * 4, 1024]), chunks
        )
    data = pickle.dumps(Metadata(entries, storage_data=places))  # type: ignore[arg-type]
    return Row(lambda: parse_metadata(data, str(folder)), lambda: pickle.loads(data))


def views_of_one_storage(folder: Path, scale: float) -> Row:
    """Load into 10,000 views of one storage."""
    return _loads(folder, _views(int(10_000 * scale), 16))


def load_tiny(folder: Path, scale: float) -> Row:
    """Load 20,000 tensors of 16 bytes."""
    return _loads(folder, {str(k): torch.zeros(4) for k in range(int(20_000 * scale))})


def save_tiny(folder: Path, scale: float) -> Row:
    """Save 20,000 tensors of 16 bytes."""
    state = {str(k): torch.zeros(4) for k in range(int(20_000 * scale))}

    def save(writer: Any) -> None:
        dcp.save(state, storage_writer=writer, no_dist=True)

    return Row(
        lambda: save(FileSystemWriter(folder / "ours", overwrite=True)),
        lambda: save(dcp.FileSystemWriter(folder / "torch", overwrite=True)),
    )


def open_and_get(folder: Path, scale: float) -> Row:
    """Open a safetensors file of 3,000 tensors and get one of them, as accelerate does for each tensor."""
    count = max(2, int(3000 * scale))
    tensors = {f"model.layers.{k}.mlp.weight": torch.zeros(4) for k in range(count)}
    path = folder / "model.safetensors"
    safetensors.torch.save_file(tensors, path)

    def take(kind: Any) -> None:
        with kind(str(path), "pt") as file:
            file.get_tensor(f"model.layers.{count // 2}.mlp.weight")

    return Row(lambda: take(safe_open), lambda: take(safetensors.safe_open))


def stage_tiny(_folder: Path, scale: float) -> Row:
    """Stage a state of 20,000 tensors of 16 bytes."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    state = {str(k): torch.zeros(4) for k in range(int(20_000 * scale))}
    ours, torchs = Stager(), StateDictStager()
    return Row(lambda: ours.stage(state), lambda: torchs.stage(state))


ROWS: dict[str, Callable[[Path, float], Row]] = {
    "headers_of_ranks": headers_of_ranks,
    "chunks_of_metadata": chunks_of_metadata,
    "views_of_one_storage": views_of_one_storage,
    "load_tiny": load_tiny,
    "save_tiny": save_tiny,
    "open_and_get": open_and_get,
    "stage_tiny": stage_tiny,
}


def _views(count: int, numel: int) -> dict[str, torch.Tensor]:
    flat = torch.zeros(count * numel)
    return {str(k): flat[k * numel : (k + 1) * numel] for k in range(count)}


def _loads(folder: Path, state: dict[str, torch.Tensor]) -> Row:
    """Return loads of a state by both readers, each from a checkpoint that the same library wrote."""
    dcp.save(state, storage_writer=FileSystemWriter(folder / "ours"), no_dist=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "torch"), no_dist=True)

    def load(reader: Any) -> None:
        dcp.load(state, storage_reader=reader, no_dist=True)

    return Row(
        lambda: load(FileSystemReader(folder / "ours")),
        lambda: load(dcp.FileSystemReader(folder / "torch")),
    )


def compared(name: str, row: Row, rounds: int) -> Comparison:
    """Measure both functions in turns. The first call of each is not counted."""

    def timed(call: Callable[[], Any]) -> Callable[[int], Sample]:
        def measure(_: int) -> Sample:
            gc.collect()
            with Stopwatch() as watch:
                call()
            return Sample(watch.seconds, watch.seconds, 1, watch.cpu_seconds)

        call()
        return measure

    both = [Contender(label, "ours", timed(call)) for label, call in row._asdict().items()]
    return take_turns(Comparison(name, "", "s"), both, rounds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__)
    rows = f"rows to measure (all by default): {', '.join(ROWS)}"
    parser.add_argument("rows", nargs="*", metavar="ROW", help=rows)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each function")
    scale = "factor for the numbers of tensors, files and ranks"
    parser.add_argument("--scale", type=float, default=1.0, help=scale)
    directory = "directory for temporary files (default: the system's)"
    parser.add_argument("--directory", type=Path, help=directory)
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - ROWS.keys():
        parser.error(f"ROW: unknown name (got {', '.join(sorted(unknown))})")
    logging.disable()
    warnings.simplefilter("ignore")
    print(f"{'':<22}{'ours, s':>10}{'original, s':>12}{'ratio':>8}{'CPU ratio':>10}")
    for name in options.rows or ROWS:
        with (
            tempfile.TemporaryDirectory(dir=options.directory) as folder,
            contextlib.redirect_stderr(io.StringIO()),
        ):
            found = compared(name, ROWS[name](Path(folder), options.scale), options.rounds)
        ours, original = (found.median(label) or 0.0 for label in Row._fields)
        of_cpu = found.cpu_over(*Row._fields) or 0.0
        figures = f"{ours:>10.4f}{original:>12.4f}{ours / original:>8.2f}{of_cpu:>10.2f}"
        print(f"{name:<22}{figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
