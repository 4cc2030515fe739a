"""States to save, and facts about their files."""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemWriter

if TYPE_CHECKING:
    import pathlib

_ASYNC_SAVE_TAKES = inspect.signature(dcp.async_save).parameters
takes_stagers = pytest.mark.skipif(
    "async_stager" not in _ASYNC_SAVE_TAKES, reason="this torch takes no stagers (2.9 and later do)"
)
saves_in_processes = pytest.mark.skipif(
    "async_checkpointer_type" not in _ASYNC_SAVE_TAKES,
    reason="this torch saves in threads only (2.7 and later in processes)",
)

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"thread_count": 3},
    {"single_file_per_rank": False},
    {"single_file_per_rank": False, "thread_count": 4},
    {"sync_files": False, "per_thread_copy_ahead": 0},
]


def save(state: dict[str, Any], directory: pathlib.Path, **options: Any) -> Any:
    """Save with our writer, in this process alone."""
    return dcp.save(state, storage_writer=FileSystemWriter(directory, **options), no_dist=True)


def load(directory: pathlib.Path, like: dict[str, Any]) -> dict[str, Any]:
    """Load with torch's reader, in this process alone."""
    state = empty_like(like)
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return state


def mixed_state(seed: int = 0) -> dict[str, Any]:
    """Return a state with every kind of tensor that is saved in a different way, and with other objects."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "weight": random(300, 400),
        "large": random(3 << 20).bfloat16(),
        "transposed": random(5, 6).t(),
        "channels_last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "slice": random(100)[20:70],
        "steps": random(20)[::2],
        "expanded": random(3).expand(4, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(random(7)),
        "bool": random(9) > 0,
        "float8": random(8).to(torch.float8_e4m3fn),
        "conjugate": torch.view_as_complex(random(4, 2)).conj(),
        "nested": {"step": torch.tensor(seed), "text": f"step {seed}", "list": [1, 2.5, None]},
    }


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    """The same with other values."""
    return {
        key: empty_like(value)
        if isinstance(value, dict)
        else torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, torch.Tensor)
        else None
        for key, value in state.items()
    }


def assert_same(actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare states bit for bit."""
    assert actual.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_same(actual[key], value)
        elif isinstance(value, torch.Tensor):
            found = actual[key]
            assert (found.dtype, found.shape) == (value.dtype, value.shape), key
            assert bits_of(found) == bits_of(value), key
        else:
            assert actual[key] == value, key


def bits_of(tensor: torch.Tensor) -> bytes:
    # Not contiguous(), which would keep any stride of a single element.
    plain = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


def telling(step: int) -> dict[str, Any]:
    """Return a state in which every value is the step; it fills several buffers and several files."""
    sizes = [(1 << 20) + 5, 300, 1, 1 << 18]
    return {str(k): torch.full((n,), float(step)) for k, n in enumerate(sizes)} | {"step": step}


def steps_in(state: dict[str, Any]) -> set[float]:
    """Return the steps that the values of a state belong to."""
    found: set[float] = set()
    for value in state.values():
        found |= (
            steps_in(value)
            if isinstance(value, dict)
            else set(torch.as_tensor(value).double().unique().tolist())
        )
    return found


def done(answer: Any) -> None:
    """Wait for the result of async_save()."""
    getattr(answer, "upload_completion", answer).result(300)


def digests(directory: pathlib.Path) -> list[str]:
    """The data files' MD5 sums, those of empty files aside."""
    return sorted(
        hashlib.md5(path.read_bytes()).hexdigest()
        for path in directory.glob("*.distcp")
        if path.stat().st_size
    )


def metadata_of(directory: pathlib.Path, name: str = ".metadata") -> Any:
    """The metadata as torch reads it."""
    return pickle.load(io.BytesIO((directory / name).read_bytes()))
