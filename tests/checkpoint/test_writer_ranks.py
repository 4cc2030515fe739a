"""FileSystemWriter on several ranks: they save one checkpoint, and a failure of one rank fails on all ranks."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tensorferry
from tensorferry.checkpoint import FileSystemWriter
from tests.checkpoint import shards
from tests.checkpoint.states import assert_same, digests, done, load
from tests.support import mounts
from tests.support.ranks import call_on_ranks, files_of


def whole(step: int = 0) -> dict[str, Any]:
    """The state as one process sees it."""
    return {**shards.whole(step), "step": step}


def distributed(step: int = 0) -> dict[str, Any]:
    """This rank's part of it."""
    return shards.distributed(step) | {"step": step}


def save_both(rank: int, directory: str, layout: dict[str, Any]) -> None:
    state = distributed()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{directory}/torch", **layout))
    dcp.save(state, storage_writer=FileSystemWriter(f"{directory}/ours", **layout))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_of_all_ranks_make_torchs_checkpoint(
    directory: pathlib.Path, world_size: int
) -> None:
    call_on_ranks(world_size, save_both, str(directory), {})
    assert digests(directory / "ours") == digests(directory / "torch")
    assert_same(load(directory / "ours", whole()), whole())


@pytest.mark.parametrize("layout", [{"thread_count": 2}, {"single_file_per_rank": False}], ids=str)
def test_layouts_are_torchs_on_ranks_too(directory: pathlib.Path, layout: dict[str, Any]) -> None:
    call_on_ranks(2, save_both, str(directory), layout)
    assert digests(directory / "ours") == digests(directory / "torch")
    assert_same(load(directory / "ours", whole()), whole())


def save_three_steps(rank: int, directory: str) -> list[list[str]]:
    names = []
    for step in range(3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(distributed(step), storage_writer=FileSystemWriter(directory), planner=planner)
        names.append(sorted(files_of(pathlib.Path(directory))))
        dist.barrier()
    return names


def test_cached_plans_save_every_step_whole(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.7")
    names = call_on_ranks(2, save_three_steps, str(directory / "checkpoint"))[0]
    assert_same(load(directory / "checkpoint", whole(2)), whole(2))
    assert all(len(listed) == 3 for listed in names)
    assert not (set(names[0]) & set(names[1])) - {".metadata"}


class Failing(dcp.DefaultSavePlanner):
    """Fails on rank 1, in the middle."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "large":
            raise OSError(errno.EIO, "the cable is out")
        return super().resolve_data(write_item)


def save_and_fail(rank: int, directory: str) -> tuple[str, int]:
    dcp.save(distributed(1), storage_writer=FileSystemWriter(directory))
    try:
        dcp.save(distributed(2), storage_writer=FileSystemWriter(directory), planner=Failing())
    except dcp.api.CheckpointException as failure:
        (number,) = failure.failures
        return repr(failure.failures[number][0]), number
    raise AssertionError("the save succeeded")


def test_one_rank_that_fails_fails_the_save_on_all(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    for failure, number in call_on_ranks(2, save_and_fail, str(checkpoint)):
        assert "the cable is out" in failure
        assert number == 1
    assert_same(load(checkpoint, whole(1)), whole(1))
    assert not [name for name in files_of(checkpoint) if name.startswith("__1_")][1:]


def save_again_at_once(rank: int, directory: str) -> list[str]:
    try:
        dcp.save(distributed(1), storage_writer=FileSystemWriter(directory), planner=Failing())
    except dcp.api.CheckpointException:  # which refers to the writer
        dcp.save(distributed(2), storage_writer=FileSystemWriter(directory))
        names = sorted(files_of(pathlib.Path(directory)))
        dist.barrier()
        return names
    raise AssertionError("the save succeeded")


def test_a_save_right_after_one_that_failed_elsewhere_leaves_nothing_of_it(
    directory: pathlib.Path,
) -> None:
    names = call_on_ranks(2, save_again_at_once, str(directory / "checkpoint"))[0]
    assert len(names) == 3, names
    assert_same(load(directory / "checkpoint", whole(2)), whole(2))


def fill_the_disk(rank: int, directory: str) -> Any:
    dcp.save(distributed(1), storage_writer=FileSystemWriter(directory))
    if rank == 1:
        with open(f"{directory}/../ballast", "wb") as ballast:
            status = os.statvfs(directory)
            os.posix_fallocate(ballast.fileno(), 0, status.f_bavail * status.f_bsize - (3 << 20))
    dist.barrier()
    try:
        dcp.save(distributed(2), storage_writer=FileSystemWriter(directory))
    except dcp.api.CheckpointException as failure:
        return {number: error.errno for number, (error, _) in failure.failures.items()}
    return None


def test_full_disk_leaves_the_old_checkpoint_on_ranks_too(tmp_path: pathlib.Path) -> None:
    with mounts.tmpfs(tmp_path / "small", 32 << 20) as small:
        for failures in call_on_ranks(2, fill_the_disk, str(small / "checkpoint")):
            assert failures
            assert set(failures.values()) == {errno.ENOSPC}
        assert_same(load(small / "checkpoint", whole(1)), whole(1))


def save_by_parts(rank: int, directory: str) -> None:
    """Each rank saves alone, without talking to others."""
    dcp.save(
        {"a": torch.full((5,), float(rank))},
        storage_writer=FileSystemWriter(directory),
        use_collectives=False,
    )
    dcp.save(
        {"a": torch.full((5,), float(rank) + 10)},
        storage_writer=FileSystemWriter(directory),
        use_collectives=False,
    )


def test_ranks_may_save_without_collectives(directory: pathlib.Path) -> None:
    pytest.importorskip("torch", minversion="2.9")
    call_on_ranks(2, save_by_parts, str(directory / "checkpoint"))
    names = files_of(directory / "checkpoint")
    assert len(names) == 4
    assert {"__0.metadata", "__1.metadata"} < names
    for rank in range(2):
        assert len([name for name in names if name.startswith(f"__{rank}_")]) == 1


def save_async(rank: int, directory: str, kind: str) -> None:
    options: dict[str, Any] = {}
    if kind == "process":
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    state = distributed(3)
    writer = FileSystemWriter(directory)
    answer = dcp.async_save(state, storage_writer=writer, **options)
    del state["step"]
    for value in state.values():
        value.to_local().zero_()  # the save has a copy
    done(answer)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_asynchronous_saves_work_on_ranks(directory: pathlib.Path, kind: str) -> None:
    if kind == "process":
        pytest.importorskip("torch", minversion="2.7")
    call_on_ranks(2, save_async, str(directory / "checkpoint"), kind)
    assert_same(load(directory / "checkpoint", whole(3)), whole(3))


def test_what_the_disk_refuses_is_a_storage_error(directory: pathlib.Path) -> None:
    (results,) = call_on_ranks(1, save_below_a_file, str(directory))
    assert results == "StorageError"


def save_below_a_file(rank: int, directory: str) -> str:
    writer = FileSystemWriter(directory)
    writer.prepare_local_plan = lambda plan: plan  # type: ignore[method-assign]
    writer.path = writer.path / "missing"
    try:
        dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    except dcp.api.CheckpointException as failure:
        error = failure.failures[0][0]
        assert isinstance(error, tensorferry.StorageError)
        return type(error).__name__
    return "nothing"
