"""Saving offloaded optimizers: checkpoint() and restore(), committed steps and resume()."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tensorferry
from tensorferry import offload
from tensorferry.offload.equality import same
from tests.offload.numbered import (
    ALL,
    OTHER,
    SOME,
    assert_same,
    in_memory,
    offloaded,
    parameters,
    params_of,
    step,
)
from tests.offload.twins import assert_equal, copies
from tests.support import warm
from tests.support.child import ROOT
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.faultfs import FaultFS


@pytest.mark.parametrize("budget", [SOME, OTHER, ALL])
def test_what_is_restored_goes_on_as_if_nothing_had_been(directory: Path, budget: int) -> None:
    expected = in_memory(4)
    with_us = offloaded(parameters(), directory / "state")
    for number in range(4):
        step(with_us, number)
    with_us.checkpoint(directory / "kept")
    for number in range(4, 6):
        step(with_us, number)  # does not change the checkpoint
    with_us.close()

    fresh = copies(params_of(expected))
    again = offloaded(fresh, directory / "state", budget, lr=0.5)
    assert again.restore(directory / "kept") == again.steps == 4
    assert_same(again, expected)
    for number in range(4, 7):
        step(again, number)
        step(expected, number)
    assert_same(again, expected)
    again.close()


def test_the_names_of_new_directories_are_durable_too(directory: Path, faultfs: FaultFS) -> None:
    optimizer = offloaded(parameters(), directory)
    step(optimizer, 0)
    faultfs.clear()
    optimizer.checkpoint(faultfs.path / "some" / "where" / "kept")
    optimizer.close()
    assert {"", "some", "where"} <= {request.name for request in faultfs.requests("fsyncdir")}


@pytest.mark.parametrize("budget", [SOME, ALL])
def test_masters_are_kept_and_restored(directory: Path, budget: int) -> None:
    first = offloaded(
        parameters(dtype=torch.bfloat16), directory, budget, master_dtype=torch.float32
    )
    for number in range(3):
        step(first, number)
    first.checkpoint(directory / "kept")
    fresh = copies(params_of(first))
    again = offloaded(fresh, directory, SOME, master_dtype=torch.float32)
    again.restore(directory / "kept")
    for number in range(3, 6):
        step(first, number)
        step(again, number)
    assert_same(again, first)
    again.close()
    first.close()


def test_a_parameter_without_a_step_has_no_state_when_restored(directory: Path) -> None:
    first = offloaded(parameters(), directory)
    step(first, 0, without=[3])
    first.checkpoint(directory / "kept")
    again = offloaded(parameters(), directory)
    again.restore(directory / "kept")
    assert sorted(again.state_dict()["state"]) == [0, 1, 2, 4]
    again.close()
    first.close()


@pytest.mark.parametrize("commit", ["none", "step"])
@pytest.mark.parametrize("first", [False, True], ids=["kept-with", "loaded-with"])
def test_a_schedule_may_be_made_before_or_after(directory: Path, commit: Any, first: bool) -> None:
    """The optimizer keeps values in its groups, so the loaded state has other values than the optimizer."""

    def made(with_schedule: bool) -> offload.OffloadedOptimizer:
        optimizer = offloaded(parameters(), directory / "state", commit=commit)
        if with_schedule:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    kept = made(not first)
    step(kept, 0)
    kept.checkpoint(directory / "kept")
    wanted = copy.deepcopy(kept.state_dict())
    kept.close()
    again = made(first)
    assert (again.restore(directory / "kept") if commit == "none" else again.resume()) == 1
    assert same(again.state_dict(), wanted)
    torch.optim.lr_scheduler.StepLR(again, 1)
    step(again, 1)
    again.close()


@pytest.mark.parametrize("loaded", ["restored", "resumed"])
def test_a_parameter_that_was_committed_without_a_step_has_no_state_either(
    directory: Path, loaded: str
) -> None:
    """Its bucket has its value all the same."""

    def made() -> offload.OffloadedOptimizer:
        return offloaded(
            parameters(dtype=torch.bfloat16),
            directory / "state",
            master_dtype=torch.float32,
            commit="step",
        )

    first = made()
    step(first, 0, without=[3])
    first.checkpoint(directory / "kept")
    wanted = copy.deepcopy(first.state_dict())
    first.close()
    again = made()
    if loaded == "restored":
        again.discard_committed()
        again.restore(directory / "kept")
    else:
        again.resume()
        assert_equal(params_of(first), params_of(again))
    assert same(again.state_dict(), wanted)
    for number in range(1, 3):
        step(again, number)
    again.close()
    third = made()
    assert third.resume() == 3
    assert_equal(params_of(again), params_of(third))
    third.close()


@pytest.mark.parametrize("shape", [(17,), (5000,)])
@pytest.mark.parametrize("kept_with", [None, torch.float32])
def test_state_of_another_master_dtype_is_refused(
    directory: Path, shape: tuple[int, ...], kept_with: Any
) -> None:
    """Also for small state that is not in a bucket."""

    def made(master_dtype: Any) -> offload.OffloadedOptimizer:
        optimizer = MaybeWhole(parameters([shape], torch.bfloat16), whole=True)
        return offload.offload_optimizer(
            optimizer,
            directory,
            memory_budget=SOME,
            kind="per_parameter",
            master_dtype=master_dtype,
        )

    first = made(kept_with)
    step(first, 0)
    first.checkpoint(directory / "kept")
    first.close()
    other = made(None if kept_with else torch.float32)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="remedy: the same master_dtype"):
        other.restore(directory / "kept")
    assert same(other.state_dict(), before)
    step(other, 0)
    other.close()


def test_state_without_bytes_is_restored(directory: Path) -> None:
    """A rank may have no part of a group's parameters, or no parameters at all."""

    def groups(*shapes: tuple[int, ...]) -> list[dict[str, Any]]:
        return [{"params": parameters([shape])} for shape in shapes]

    for number, shapes in enumerate([[(0,)], [(0, 5), (300,), (0,)]]):
        folder = directory / str(number)
        kept = offloaded(groups(*shapes), folder / "state")
        committed = offloaded(groups(*shapes), folder / "committed", commit="step")
        for each in (kept, committed):
            step(each, 0)
        kept.checkpoint(folder / "kept")
        committed.close()
        resumed = offloaded(groups(*shapes), folder / "committed", commit="step")
        assert resumed.resume() == 1
        restored = offloaded(
            [{"params": copies(each["params"])} for each in kept.param_groups], folder / "restored"
        )
        assert restored.restore(folder / "kept") == 1
        for each in (kept, resumed, restored):
            step(each, 1)
        for each in (resumed, restored):
            assert_same(each, kept)
            each.close()
        kept.close()


class MaybeWhole(torch.optim.Optimizer):
    """Momentum, in steps that depend on each element or on whole parameters: as its attribute has it."""

    def __init__(self, params: Any, *, whole: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.whole = whole

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state["steps"] = state.get("steps", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                param.data.sub_(mean / mean.norm() if self.whole else mean, alpha=group["lr"])


@pytest.mark.parametrize("commit", ["none", "step"])
@pytest.mark.parametrize("was_whole", [False, True])
def test_parameters_may_be_whole_where_they_could_be_cut_now_and_not_the_other_way(
    directory: Path, commit: Any, was_whole: bool
) -> None:
    """A checkpoint has the pieces that the optimizer was stepped in; a state dict has none."""

    def made(whole: bool) -> offload.OffloadedOptimizer:
        optimizer = MaybeWhole(
            parameters([(400000,), (17,), (64, 64), (), (300, 900)]), whole=whole
        )
        return offload.offload_optimizer(
            optimizer,
            directory / "state",
            memory_budget=6 << 20,
            kind="per_parameter" if whole else "elementwise",
            commit=commit,
        )

    kept = made(was_whole)
    for number in range(2):
        step(kept, number, without=[4] if number else [0, 4])
    if commit == "none":
        kept.checkpoint(directory / "kept")
    expected = copy.deepcopy(kept.state_dict())
    kept.close()
    again = made(not was_whole)
    if was_whole:
        assert (again.restore(directory / "kept") if commit == "none" else again.resume()) == 2
    else:
        with pytest.raises(ValueError, match="parameter 0 was stepped in pieces there"):
            again.restore(directory / "kept") if commit == "none" else again.resume()
        again.discard_committed()
        again.load_state_dict(expected)
    assert same(again.state_dict(), expected)
    for number in range(2, 4):
        step(again, number)
    assert again.stats()["written_nbytes"] > 0
    in_memory = MaybeWhole(copies(params_of(kept)), whole=not was_whole)
    in_memory.load_state_dict(expected)
    for number in range(2, 4):
        step(in_memory, number)
    if commit == "step" and was_whole:
        assert_equal(params_of(in_memory), params_of(again))
    assert same(again.state_dict(), in_memory.state_dict())
    again.close()


@pytest.mark.parametrize("name", ["kept", "committed"])
def test_parameters_that_lie_otherwise_in_memory_are_refused(directory: Path, name: str) -> None:
    """Pieces are ranges of memory."""

    def made(memory_format: torch.memory_format) -> offload.OffloadedOptimizer:
        params = parameters([(64, 64, 16, 16)])
        params[0].data = params[0].data.contiguous(memory_format=memory_format)
        commit: Any = "step" if name == "committed" else "none"
        return offloaded(params, directory / "state", 9 << 20, commit=commit)

    kept = made(torch.channels_last)
    step(kept, 0)
    if name == "kept":
        kept.checkpoint(directory / name)
    wanted = copy.deepcopy(kept.state_dict())
    kept.close()
    other = made(torch.contiguous_format)
    with pytest.raises(
        ValueError, match=r"parameter 0 has strides of \(16384, 1, 1024, 64\) there"
    ):
        other.restore(directory / name) if name == "kept" else other.resume()
    other.close()
    again = made(torch.channels_last)
    assert (again.restore(directory / name) if name == "kept" else again.resume()) == 1
    assert same(again.state_dict(), wanted)
    again.close()


def test_what_does_not_fit_is_refused_and_nothing_has_changed(directory: Path) -> None:
    kept = directory / "kept"
    first = offloaded(parameters(), directory)
    step(first, 0)
    first.checkpoint(kept)
    with pytest.raises(tensorferry.StorageError, match="exists"):
        first.checkpoint(kept)
    before = copy.deepcopy(first.state_dict())

    other = offload.offload_optimizer(
        torch.optim.SGD(parameters(), momentum=0.9), directory, memory_budget=SOME
    )
    with pytest.raises(ValueError, match="another optimizer: AdamW, not SGD"):
        other.restore(kept)
    other.close()
    fewer = offloaded(parameters()[:3], directory)
    with pytest.raises(
        ValueError, match=r"this optimizer have \[3\] parameters, those in .* have \[5\]"
    ):
        fewer.restore(kept)
    fewer.close()
    turned = parameters()
    turned[0] = torch.nn.Parameter(turned[0].detach().t().contiguous())
    with_turned = offloaded(turned, directory)
    with pytest.raises(ValueError, match=r"parameter 0 is float32 of shape \(300, 200\) there"):
        with_turned.restore(kept)
    with_turned.close()
    (directory / "empty").mkdir()
    with pytest.raises(tensorferry.StorageError):
        first.restore(directory / "empty")
    assert same(first.state_dict(), before)
    first.close()


def test_damage_is_found_wherever_it_is(directory: Path) -> None:
    first = offloaded(parameters(), directory, ALL)
    step(first, 0)
    first.checkpoint(directory / "kept")
    record = first.state_dict()
    first.close()
    exp_avg = record["state"][0]["exp_avg"].numpy().tobytes()
    del record
    path = max((directory / "kept").glob("*.segment"), key=lambda each: each.stat().st_size)
    data = path.read_bytes()
    at = data.index(exp_avg[:64])
    with path.open("r+b") as file:  # the link, and with it the segment
        file.seek(at + 70_001)
        file.write(bytes([data[at + 70_001] ^ 1]))
    again = offloaded(parameters(), directory, ALL)
    with pytest.raises(tensorferry.ChecksumError, match="bucket-"):
        again.restore(directory / "kept")
    for use in (lambda: step(again, 1), again.state_dict, lambda: again.checkpoint("never")):
        with pytest.raises(RuntimeError, match="only a part of a state has been loaded"):
            use()
    expected = in_memory(1)
    again.load_state_dict(expected.state_dict())
    assert same(again.state_dict(), expected.state_dict())
    again.close()


@pytest.mark.parametrize("value", [subprocess.Popen, lambda: 0])
def test_a_value_that_cannot_be_read_without_running_code_is_refused(
    directory: Path, value: Any
) -> None:
    inner = torch.optim.AdamW(parameters())
    inner.param_groups[0]["mine"] = value
    optimizer = offload.offload_optimizer(inner, directory, memory_budget=SOME)
    step(optimizer, 0)
    with pytest.raises(ValueError, match="cannot be saved"):
        optimizer.checkpoint(directory / "kept")
    assert not (directory / "kept").exists()
    optimizer.close()


# Committed steps


def test_a_committed_step_is_all_of_it_and_must_not_be_lost_by_accident(directory: Path) -> None:
    first = offloaded(parameters(), directory, commit="step")
    assert first.committed_step is None
    assert first.resume() is None
    for number in range(3):
        step(first, number)
    first.close()

    again = offloaded(parameters(), directory, OTHER, commit="step")
    assert again.committed_step == 3
    with pytest.raises(RuntimeError, match=r"step 3 is committed.*resume\(\)"):
        step(again, 0)
    assert again.resume() == again.steps == 3
    assert again.committed_step is None
    expected = in_memory(3)
    assert_same(again, expected)
    step(again, 3)
    step(expected, 3)
    assert_same(again, expected)
    again.close()

    third = offloaded(parameters(), directory, commit="fsync")
    assert third.committed_step == 4
    third.discard_committed()
    step(third, 0)
    third.close()
    assert_same_parameters_after_resume(directory, in_memory(1))


@pytest.mark.parametrize("number", [0, 1])
def test_a_commit_with_missing_files_is_no_directory_without_a_commit(
    directory: Path, number: int
) -> None:
    """For example, the second drive is not mounted: the next commit must not replace this one."""
    drives = [directory / "one", directory / "other"]
    first = offloaded(parameters(), drives, commit="step")
    step(first, 0)
    first.close()
    away = {file: file.read_bytes() for file in drives[number].glob("*.segment")}
    for file in away:
        file.unlink()
    with pytest.raises(tensorferry.StorageError, match="opening a segment"):
        offloaded(parameters(), drives, commit="step")
    for file, data in away.items():
        file.write_bytes(data)
    again = offloaded(parameters(), drives, commit="step")
    assert again.resume() == 1
    assert_same(again, in_memory(1))
    again.close()


@pytest.mark.parametrize("trains", [False, True])
def test_a_commit_of_the_other_kind_is_refused_and_nothing_changes(
    directory: Path, trains: bool
) -> None:
    model = torch.nn.Linear(8, 8)

    def opened(trains: bool, lr: float) -> offload.OffloadedOptimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        options: Any = {"memory_budget": "1MiB", "commit": "step"}
        if trains:
            return offload.offload_training(model, optimizer, directory, **options)[1]
        return offload.offload_optimizer(optimizer, directory, **options)

    first = opened(trains, 0.5)
    model(torch.ones(8)).sum().backward()
    first.step()
    first.close()
    model = torch.nn.Linear(8, 8)
    other = opened(not trains, 0.25)
    with pytest.raises(ValueError, match="was committed by"):
        other.resume()
    assert other.param_groups[0]["lr"] == 0.25
    assert other.state_dict()["state"] == {}
    other.discard_committed()
    model(torch.ones(8)).sum().backward()
    other.step()
    other.close()


def test_lazy_conjugates_are_committed_with_their_values(directory: Path) -> None:
    def opened() -> tuple[torch.Tensor, offload.OffloadedOptimizer]:
        values = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
        param = torch.nn.Parameter(torch.complex(*values).conj())
        assert param.is_conj()
        optimizer = torch.optim.SGD([param, torch.nn.Parameter(torch.ones(2))], momentum=0.9)
        return param, offload.offload_optimizer(
            optimizer, directory, memory_budget="1MiB", commit="step"
        )

    param, first = opened()
    param.grad = torch.ones_like(param)
    first.step()
    first.close()
    other, again = opened()
    assert again.resume() == 1
    assert torch.equal(other.detach().resolve_conj(), param.detach().resolve_conj())
    again.close()


def test_masters_and_parameters_are_those_of_the_committed_step(directory: Path) -> None:
    first = offloaded(
        parameters(dtype=torch.bfloat16), directory, commit="step", master_dtype=torch.float32
    )
    for number in range(3):
        step(first, number)
    expected = copies(params_of(first))
    first.close()
    again = offloaded(
        parameters(dtype=torch.bfloat16), directory, commit="step", master_dtype=torch.float32
    )
    assert again.resume() == 3
    assert_equal(params_of(again), expected)
    again.close()


def test_a_second_process_is_refused_by_name(directory: Path) -> None:
    first = offloaded(parameters(), directory, commit="step")
    with pytest.raises(tensorferry.StorageError, match=f"process {os.getpid()}"):
        offloaded(parameters(), directory, commit="step")
    step(first, 0)
    first.close()


def test_a_step_that_cannot_be_committed_says_so_and_is_committed_later(faultfs: FaultFS) -> None:
    optimizer = offloaded(parameters(), faultfs.path / "state", commit="step")
    step(optimizer, 0)
    faultfs.order(Fault("write", error=5))
    with pytest.raises(offload.OffloadError) as caught:
        step(optimizer, 1)
    faultfs.clear()
    optimizer.retry()
    assert caught.value.step == (2 if caught.value.finished else 1)
    assert optimizer.steps == 2
    optimizer.close()
    assert_same_parameters_after_resume(faultfs.path / "state", in_memory(2))


def assert_same_parameters_after_resume(directory: Path, expected: torch.optim.Optimizer) -> None:
    again = offloaded(parameters(), directory, ALL, commit="step")
    again.resume()
    assert_same(again, expected)
    again.close()


TRAINING = """
import sys
import torch
from tests.offload.numbered import SOME, offloaded, parameters, step
torch.set_num_threads(1)
optimizer = offloaded(parameters(), sys.argv[1], SOME, commit="step")
optimizer.resume()
print(optimizer.steps, flush=True)
while True:
    step(optimizer, optimizer.steps)
    print(optimizer.steps, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_last_committed_step(directory: Path) -> None:
    rng = np.random.default_rng(3)
    said = 0
    for _ in range(int(os.environ.get("TENSORFERRY_TEST_KILLS", "5"))):
        with subprocess.Popen(
            [warm.python(), "-c", TRAINING, str(directory)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as training:
            assert training.stdout is not None
            for _ in range(int(rng.integers(1, 4))):
                said = int(training.stdout.readline())
            time.sleep(float(rng.random()) * 0.1)
            training.send_signal(signal.SIGKILL)
            said = max([said, *map(int, training.stdout.read().split())])
        again = offloaded(parameters(), directory, OTHER, commit="step")
        committed = again.committed_step
        assert committed in (said, said + 1)  # the process prints a step after its commit
        assert again.resume() == committed
        assert_same(again, in_memory(committed or 0))
        again.close()
    assert len(list(directory.glob("*.segment"))) <= 4
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(exist_ok=True)
