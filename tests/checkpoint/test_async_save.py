"""dcp.async_save with our writer and stager: in a thread and in a process, repeatedly, and with reported failures."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensorferry.checkpoint import FileSystemWriter, Stager
from tests.checkpoint.states import (
    assert_same,
    done,
    load,
    mixed_state,
    saves_in_processes,
    takes_stagers,
)
from tests.support import mounts, warm
from tests.support.ranks import call_on_ranks, files_of

if TYPE_CHECKING:
    import pathlib


def test_each_of_several_saves_has_the_state_of_its_call(directory: pathlib.Path) -> None:
    writer = FileSystemWriter(directory / "0")
    state, answers = mixed_state(), []
    for step in range(4):
        state["weight"].fill_(step)
        state["nested"]["text"] = f"step {step}"
        # The previous save has not ended: the second one needs another image, and the third one waits for an image.
        answers.append(
            dcp.async_save(state, checkpoint_id=directory / str(step), storage_writer=writer)
        )
    for answer in answers:
        done(answer)
    for step in range(4):
        wanted = mixed_state()
        wanted["weight"].fill_(step)
        wanted["nested"]["text"] = f"step {step}"
        assert_same(load(directory / str(step), wanted), wanted)
    writer.close()


def test_a_writers_memory_is_used_again(directory: pathlib.Path) -> None:
    writer, addresses = FileSystemWriter(directory / "checkpoint"), set()
    stage = writer.stage

    def watch(state: dict[str, Any]) -> dict[str, Any]:
        staged = stage(state)
        addresses.add(staged["large"].data_ptr())
        return staged

    writer.stage = watch  # type: ignore[method-assign]
    for _ in range(4):
        done(dcp.async_save(mixed_state(), storage_writer=writer))
    assert len(addresses) == 1
    writer.close()


@takes_stagers
@pytest.mark.parametrize("writer", [FileSystemWriter, dcp.FileSystemWriter])
def test_a_stager_serves_any_writer(directory: pathlib.Path, writer: Any) -> None:
    stager = Stager()
    for step in range(3):
        answer = dcp.async_save(
            mixed_state(step), storage_writer=writer(directory / "c"), async_stager=stager
        )
        done(answer)
        assert_same(load(directory / "c", mixed_state(step)), mixed_state(step))
    stager.close()


@takes_stagers
def test_an_overlapped_save_tells_when_the_state_may_change(directory: pathlib.Path) -> None:
    stager, state = Stager(overlap=True), mixed_state()
    answer: Any = dcp.async_save(
        state, storage_writer=FileSystemWriter(directory / "c"), async_stager=stager
    )
    answer.staging_completion.result(120)
    for tensor in (state["weight"], state["large"], state["bool"]):
        tensor.zero_()
    answer.upload_completion.result(120)
    assert_same(load(directory / "c", mixed_state()), mixed_state())


def test_a_failed_save_is_told_and_leaves_the_checkpoint_before(tmp_path: pathlib.Path) -> None:
    with mounts.ext4(tmp_path, 32 << 20) as mount:
        writer = FileSystemWriter(mount / "checkpoint")
        done(dcp.async_save(mixed_state(1), storage_writer=writer))
        before = files_of(mount / "checkpoint")
        answer = dcp.async_save({"a": torch.ones(16 << 20)}, storage_writer=writer)
        with pytest.raises(dcp.api.CheckpointException) as caught:
            done(answer)
        assert caught.value.failures[0][0].errno == errno.ENOSPC
        assert files_of(mount / "checkpoint") == before
        # The exception still refers to the state, so this save uses the second image.
        done(dcp.async_save(mixed_state(2), storage_writer=writer))
        assert_same(load(mount / "checkpoint", mixed_state(2)), mixed_state(2))
        writer.close()


class FailingPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ZeroDivisionError


@pytest.mark.timeout(600)
def test_failed_saves_of_which_the_exceptions_are_kept_do_not_stop_later_ones(
    directory: pathlib.Path,
) -> None:
    writer, kept = FileSystemWriter(directory / "checkpoint"), []
    for _ in range(3):
        answer = dcp.async_save(mixed_state(), storage_writer=writer, planner=FailingPlanner())
        with pytest.raises(dcp.api.CheckpointException) as caught:
            done(answer)
        kept.append((answer, caught.value))
    done(dcp.async_save(mixed_state(4), storage_writer=writer))
    assert_same(load(directory / "checkpoint", mixed_state(4)), mixed_state(4))
    assert all(isinstance(error.failures[0][0], ZeroDivisionError) for _, error in kept)
    writer.close()


def save_over_and_over(rank: int, directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    writer = FileSystemWriter(directory)
    for step in range(3):
        whole = torch.full((37, 50), float(step))
        state = {"rows": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(step)}
        answer = dcp.async_save(state, storage_writer=writer)
        state["rows"].to_local().fill_(-1)
        done(answer)
        loaded = {"rows": torch.empty(37, 50), "step": torch.tensor(-1)}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory))
        assert torch.equal(loaded["rows"], whole)
        assert loaded["step"] == step


def test_two_ranks_save_their_parts(directory: pathlib.Path) -> None:
    call_on_ranks(2, save_over_and_over, str(directory / "checkpoint"))


@saves_in_processes
@pytest.mark.parametrize("stager", ["the writer's", "ours", "torch's"])
def test_a_process_saves_what_was_staged_here(directory: pathlib.Path, stager: str) -> None:
    if stager != "the writer's" and takes_stagers.args[0]:
        pytest.skip(takes_stagers.kwargs["reason"])
    warm.call(  # torch starts its process by sys.executable
        "tests.checkpoint.programs:save_in_a_process",
        path=directory / "checkpoint",
        stager=stager,
    )
    wanted = mixed_state(2)
    if stager == "torch's":  # which forgets that a tensor is conjugate
        del wanted["conjugate"]
    assert_same(load(directory / "checkpoint", wanted), wanted)
