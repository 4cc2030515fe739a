"""Helpers for tests of safetensors: files and models, cold or (partly) warm, and counts of the bytes read."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import json
import os
import pathlib
import signal
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import tensorferry
from tensorferry.safetensors import index
from tensorferry.safetensors.sharded import INDEX_NAME, SINGLE_NAME
from tests.support import leaks

_NAME_CHANGES = ("link", "rename", "replace", "unlink")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bytes; not of bytes that no bool has."""
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).view(shape)


def saved(path: pathlib.Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> pathlib.Path:
    """Save tensors by safetensors itself, on the drive."""
    safetensors.torch.save_file(dict(tensors), path, **options)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return path


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self, *, strided: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        if strided:
            self.third = torch.nn.Parameter(torch.randn(3, 4).t())


def loaded(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    """Load a model as transformers does: the file of the standard name if it exists, otherwise by the index."""
    if (directory / SINGLE_NAME).exists():
        return safetensors.torch.load_file(directory / SINGLE_NAME)
    weights = index.read(directory / INDEX_NAME)
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(weights.values())):
        tensors = safetensors.torch.load_file(directory / name)
        found |= {key: value for key, value in tensors.items() if weights[key] == name}
    assert found.keys() == weights.keys()
    return found


def assert_readers_agree(directory: pathlib.Path, state: Mapping[str, torch.Tensor]) -> None:
    """Check that all our readers find the same model."""
    from torch.distributed.checkpoint import load

    from tensorferry.checkpoint import verify
    from tensorferry.checkpoint.tools import entries
    from tensorferry.safetensors.plans import load_files

    assert verify(directory).sound
    assert {entry.name for entry in entries(directory)} == state.keys()
    several = [dict(load_files(directory))]
    if importlib.util.find_spec("torch.distributed.checkpoint.hf_storage"):  # since torch 2.8
        from tensorferry.checkpoint.storage.huggingface import HuggingFaceStorageReader
        from tensorferry.checkpoint.tools.convert import convert

        filled = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load(filled, storage_reader=HuggingFaceStorageReader(directory), no_dist=True)
        convert(directory, directory.parent / "converted")
        convert(directory.parent / "converted", directory.parent / "converted.safetensors")
        several += [
            filled,
            safetensors.torch.load_file(directory.parent / "converted.safetensors"),
        ]
    for found in several:
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@contextlib.contextmanager
def name_change(step: int, act: Callable[[], object]) -> Iterator[itertools.count[int]]:
    """Call a function before change number ``step`` of a file's name; yield the count of all changes."""
    calls = itertools.count()

    def changing(real: Any) -> Any:
        def changes(*arguments: Any, **options: Any) -> Any:
            if next(calls) == step:
                act()
            return real(*arguments, **options)

        return changes

    # Python 3.10's pathlib has its own references.
    owners = [os, *filter(None, [getattr(pathlib, "_normal_accessor", None)])]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in itertools.product(owners, _NAME_CHANGES):
            if real := getattr(owner, name, None):
                patch.setattr(owner, name, changing(real))
        yield calls


def killed_at(step: int, function: Callable[[], object]) -> bool:
    """Call a function in a forked child, which is killed before that change of a name; return whether it was."""
    if (child := os.fork()) == 0:
        try:
            with name_change(step, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                function()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def failed_at(step: int, function: Callable[[], object]) -> bool:
    """Call a function in which that change of a name fails; return whether the function has come to it."""

    def fail() -> None:
        raise OSError(errno.EIO, "injected")

    with name_change(step, fail) as calls, contextlib.suppress(OSError):
        function()
    return next(calls) > step


def cached_nbytes(path: pathlib.Path) -> int:
    """Return how much of a file the page cache holds, in whole pages."""
    with tensorferry.open(path) as file:
        found = file._open_file().residency(0, file.size)
    assert found is not None
    return found[0] * os.sysconf("SC_PAGESIZE")


def descriptors_of(path: pathlib.Path) -> int:
    """Return the number of descriptors of a file, or of files in a directory, after ended transfers are released."""
    leaks.Holdings.now()
    return sum(target.startswith(str(path)) for target in leaks.descriptors())


class Read:
    """Bytes read from files."""

    nbytes = 0


@contextlib.contextmanager
def counting(path: pathlib.Path) -> Iterator[Read]:
    """Count the bytes that the workers of the process read in the block."""
    counted = Read()
    with tensorferry.open(path) as file:
        assert leaks.settled(lambda: not file._scheduler.outstanding())  # of earlier tests
        before = file.stats()["read_nbytes"]
        yield counted
        counted.nbytes = file.stats()["read_nbytes"] - before


def assert_same(found: Any, expected: torch.Tensor) -> None:
    """Compare dtype, shape and bytes; NaNs are as good as any."""
    assert found.dtype == expected.dtype
    assert tuple(found.shape) == tuple(expected.shape)
    assert bytes_of(found) == bytes_of(expected)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor)
    return copy.view(-1).view(torch.uint8).numpy().tobytes()


def written(
    path: pathlib.Path, entries: Mapping[str, tuple[str, list[int], bytes]], pad: int = 0
) -> pathlib.Path:
    """Write a file with the given dtype, shape and bytes of each tensor, and spaces after the header."""
    header, data = {}, b""
    for name, (dtype, shape, content) in entries.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode() + b" " * pad
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.flush()
        os.fsync(file.fileno())
    return path
