"""Saves on N ranks and loads on M: DTensors of every placement, with each pair of our and torch's writer and reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.damage import flip
from tests.support.ranks import call_on_ranks

if TYPE_CHECKING:
    import pathlib


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a tensor of the state, which are the same on all ranks."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) % 251).reshape(shape).to(dtype)


def state(world_size: int) -> dict[str, Any]:
    """Return DTensors over all ranks, by placement; all hold the same values whatever the world size."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))

    def over(on: Any, placements: list[Any], shape: tuple[int, ...], dtype: Any) -> Any:
        return distribute_tensor(values(shape, dtype), on, placements)

    result: dict[str, Any] = {
        "rows": over(mesh, [Shard(0)], (64, 48), torch.float32),
        "columns": over(mesh, [Shard(1)], (30, 64), torch.bfloat16),
        "uneven rows": over(mesh, [Shard(0)], (13, 7), torch.float32),
        "uneven columns": over(mesh, [Shard(1)], (9, 11), torch.int64),
        "fewer rows than ranks": over(mesh, [Shard(0)], (2, 5), torch.float32),
        "third dimension": over(mesh, [Shard(2)], (3, 4, 10), torch.float32),
        "large": over(mesh, [Shard(1)], (500, 3000), torch.float32),
        "replicated": over(mesh, [Replicate()], (17, 3), torch.float64),
        "plain": values((5, 5), torch.float32),
        "step": 7,
    }
    if world_size % 2 == 0:
        grid = init_device_mesh("cpu", (2, world_size // 2))
        result["grid"] = over(grid, [Shard(0), Shard(1)], (37, 29), torch.float32)
        result["hybrid"] = over(grid, [Replicate(), Shard(0)], (21, 3), torch.float32)
    else:
        result["grid"] = over(mesh, [Shard(1)], (37, 29), torch.float32)
        result["hybrid"] = over(mesh, [Shard(0)], (21, 3), torch.float32)
    return result


def save_state(rank: int, world_size: int, path: str, ours: bool) -> None:
    import tensorferry.checkpoint

    kind = tensorferry.checkpoint.FileSystemWriter if ours else dcp.FileSystemWriter
    dcp.save(state(world_size), storage_writer=kind(path))


def load_state(rank: int, world_size: int, path: str, *, ours: bool) -> None:
    from torch.distributed.tensor import DTensor

    from tensorferry.checkpoint import FileSystemReader

    reader = FileSystemReader(path) if ours else dcp.FileSystemReader(path)
    wanted = state(world_size)
    loaded = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for key, value in wanted.items()
    }
    dcp.load(loaded, storage_reader=reader)
    for key, value in wanted.items():
        found = loaded[key]
        if isinstance(value, DTensor):
            value, found = value.to_local(), found.to_local()
        if isinstance(value, torch.Tensor):
            assert torch.equal(found, value), key
        else:
            assert found == value, key


SAVERS = [(1, True), (2, False), (3, True)]


def load_all(rank: int, world_size: int, paths: list[str]) -> None:
    for path in paths:
        load_state(rank, world_size, path, ours=True)
        load_state(rank, world_size, path, ours=False)


def test_state_is_loaded_on_any_number_of_ranks(directory: pathlib.Path) -> None:
    """The same values, saved on different numbers of ranks, by us and by torch."""
    paths = []
    for saved_on, ours in SAVERS:
        paths.append(str(directory / f"{len(paths)}"))
        call_on_ranks(saved_on, save_state, saved_on, paths[-1], ours)
    for loaded_on in (1, 2, 4):
        call_on_ranks(loaded_on, load_all, loaded_on, paths)


def count_failures(rank: int, path: str) -> tuple[str, bool]:
    """Load with verification before, and return this rank's failure and whether anything was touched."""
    from tensorferry.checkpoint import FileSystemReader

    wanted = state(2)
    loaded = {key: torch.zeros_like(value) for key, value in wanted.items() if key != "step"}
    try:
        dcp.load(loaded, storage_reader=FileSystemReader(path, verify="before"))
    except dcp.api.CheckpointException as error:
        failures = ", ".join(f"{k}: {type(e).__name__}" for k, (e, _) in error.failures.items())
    locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in loaded.values()]
    return failures, any(bool(tensor.any()) for tensor in locals_)


def test_no_rank_is_touched_where_one_finds_damage_before(directory: pathlib.Path) -> None:
    path = directory / "checkpoint"
    call_on_ranks(2, save_state, 2, str(path), True)
    # Only rank 1 needs its half of "large", which is the large payload of its file.
    (file,) = path.glob("__1_*.distcp")
    flip(file, 4 * file.stat().st_size)
    results = call_on_ranks(2, count_failures, str(path))
    assert [failures for failures, _ in results] == ["1: CheckpointError"] * 2
    assert [touched for _, touched in results] == [False, False]


def read_slices(rank: int, path: str) -> tuple[int, int]:
    """Load the rows of this rank, and return the bytes read and the total bytes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from tensorferry.checkpoint import FileSystemReader

    mesh = init_device_mesh("cpu", (2,))
    zeros = torch.zeros(2048, 4096)
    loaded = {"a": distribute_tensor(zeros, mesh, [Shard(0)])}
    reader = FileSystemReader(path)
    dcp.load(loaded, storage_reader=reader)
    local = loaded["a"].to_local()
    assert torch.equal(local, values((2048, 4096), torch.float32)[1024 * rank :][:1024])
    return reader.nbytes_read, zeros.nbytes


def save_large(rank: int, path: str) -> None:
    from tensorferry.checkpoint import FileSystemWriter

    state = {"a": values((2048, 4096), torch.float32)}
    dcp.save(state, storage_writer=FileSystemWriter(path))


def test_ranks_read_their_parts_only(directory: pathlib.Path) -> None:
    path = str(directory / "checkpoint")
    call_on_ranks(1, save_large, path)
    for nbytes_read, nbytes in call_on_ranks(2, read_slices, path):
        assert nbytes_read <= 0.55 * nbytes
