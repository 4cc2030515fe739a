"""Make small checkpoints with another version of torch, and read ours with it. Needs only torch, 2.4 or later.

    python -m venv /tmp/torch-2.4 && /tmp/torch-2.4/bin/pip install torch==2.4.1 numpy
    /tmp/torch-2.4/bin/python tests/checkpoint/golden/make.py write
    /tmp/torch-2.4/bin/python tests/checkpoint/golden/make.py read DIRECTORY

`write` makes a folder next to this file, with the version as its name. It has a checkpoint of
torch.distributed.checkpoint and a file of torch.save. tests/checkpoint/test_versions.py reads all of them. `read`
compares the files that tensorferry has written to DIRECTORY (see `test_versions.py`) with the expected values, and
exits with 1 if they differ.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

HERE = Path(__file__).parent

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
)


def golden_state(version: str = str(torch.__version__)) -> dict[str, Any]:
    """Return the same state in every version of torch, with dtypes that it can save; the values are not random."""

    def count(*shape: int) -> torch.Tensor:
        return torch.arange(float(torch.Size(shape).numel())).view(shape)

    state: dict[str, Any] = {
        f"dtype.{str(dtype).partition('.')[2]}": (count(3, 5) % 7).to(dtype) for dtype in DTYPES
    }
    if version.startswith("2.4."):
        del state["dtype.uint16"]
    return state | {
        "transposed": count(4, 6).t(),
        "slice": count(100)[7:31],
        "steps": count(40)[::3],
        "expanded": count(3).expand(2, 3),
        "channels_last": count(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(1.25),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(count(9)),
        "nested": {"step": torch.tensor(17), "numbers": [1, 2.5], "text": "grün", "none": None},
    }


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    """The same with zeros."""
    return {
        key: emptied(value)
        if isinstance(value, dict)
        else torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, torch.Tensor)
        else None
        for key, value in state.items()
    }


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Which entries differ, by a single bit or by type."""
    wrong = sorted(found.keys() ^ wanted.keys())
    for key in found.keys() & wanted.keys():
        ours, theirs = found[key], wanted[key]
        if isinstance(theirs, dict):
            wrong += [f"{key}.{inner}" for inner in differences(ours, theirs)]
        elif isinstance(theirs, torch.Tensor):
            if (
                ours.dtype != theirs.dtype
                or ours.shape != theirs.shape
                or _bits(ours) != _bits(theirs)
            ):
                wrong.append(key)
        elif ours != theirs:
            wrong.append(key)
    return wrong


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def write(directory: Path) -> None:
    """Save with this torch."""
    writer = dcp.FileSystemWriter(directory / "checkpoint")
    dcp.save(golden_state(), storage_writer=writer)
    torch.save(golden_state(), directory / "object.pt")


def read(directory: Path) -> list[str]:
    """Load with this version of torch, and return the differences."""
    state = emptied(golden_state())
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory / "checkpoint"))
    wrong = differences(state, golden_state())
    loaded = torch.load(directory / "object.pt", weights_only=True)
    return wrong + [f"object.pt: {key}" for key in differences(loaded, golden_state())]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["write"]:
        folder = HERE / torch.__version__.partition("+")[0]
        folder.mkdir()
        write(folder)
    elif len(sys.argv) == 3 and sys.argv[1] == "read":
        wrong = read(Path(sys.argv[2]))
        print(torch.__version__, "differs: " + ", ".join(wrong) if wrong else "reads all of it")
        sys.exit(bool(wrong))
    else:
        sys.exit(__doc__)
