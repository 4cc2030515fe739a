"""Refusals of cases that cannot be exact, or that need more memory; the message names a remedy."""

import copy
import pickle

import pytest
import torch

from tensorferry.offload import (
    MemoryBudgetError,
    NotSeparableError,
    offload_optimizer,
    offload_training,
)
from tensorferry.offload.equality import same
from tests.offload.twins import SMALL, Gradients, adamw, assert_equal, copies, parameters, train
from tests.support.forks import passes_in_child


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda params: torch.optim.AdamW(params, differentiable=True), "differentiable"),
    ],
)
def test_what_cannot_be_exact(offloaded, make, why):
    params = parameters()
    before, random = copies(params), torch.get_rng_state()
    with pytest.raises(NotSeparableError, match=why):
        offloaded(make(params))
    assert_equal(before, params)
    assert torch.equal(random, torch.get_rng_state())


def test_bad_arguments(directory):
    inner = adamw(parameters())
    for budget, kind in ((0, ValueError), ("much", ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match="memory_budget"):
            offload_optimizer(inner, directory, memory_budget=budget)
    with pytest.raises(TypeError, match="optimizer"):
        offload_optimizer(torch.nn.Linear(1, 1), directory, memory_budget=SMALL)
    assert not list(directory.iterdir())


def test_sparse_gradients_and_other_sizes_are_refused_before_anything_changes(offloaded):
    params = parameters([(20, 4), (64, 64)])
    drive = offloaded(adamw(params))
    gradients = Gradients(params)
    gradients.give()
    before = copies(params)
    params[0].grad = torch.ones(20, 4).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        drive.step()
    gradients.give()
    params[1].data = torch.zeros(3, 3)
    params[1].grad = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        drive.step()
    assert_equal(before[:1], params[:1])
    assert drive.steps == 0


def test_closed_copied_pickled_twice(offloaded, directory):
    drive = offloaded(adamw(parameters()))
    for call in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="pickled or copied"):
            call(drive)
    with pytest.raises(ValueError, match="already"):
        offload_optimizer(drive, directory, memory_budget=SMALL)
    drive.close()
    drive.close()
    for call in (drive.step, drive.state_dict, drive.retry, drive.stats):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_forked_child_cannot_use_it(offloaded):
    params = parameters()
    drive = offloaded(adamw(params), SMALL)
    gradients = Gradients(params)
    train(gradients, drive)
    kept = copies(params)

    def child():
        with pytest.raises(RuntimeError, match="fork"):
            drive.step()
        drive.close()

    passes_in_child(child)
    assert_equal(kept, params)
    train(gradients, drive)
    drive.state_dict()


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@pytest.mark.parametrize("shapes", [[(300, 200)], [(50, 50)] * 30, [(100, 150), (10, 10)] * 3])
def test_what_is_said_to_be_needed_is_enough(offloaded, name, shapes):
    def make():
        return getattr(torch.optim, name)(parameters(shapes))

    with pytest.raises(MemoryBudgetError) as caught:
        offloaded(make(), 100)
    needed = caught.value.needed_nbytes
    assert str(needed) in str(caught.value)
    with pytest.raises(MemoryBudgetError) as again:
        offloaded(make(), needed - 1)
    assert again.value.needed_nbytes == needed
    drive = offloaded(make(), needed)
    train(Gradients(drive.param_groups[0]["params"]), drive, steps=2)
    assert drive.stats()["memory_nbytes"] <= needed


@pytest.mark.parametrize("budget", [40 << 10, SMALL])
def test_groups_that_the_budget_cannot_take(offloaded, budget):
    first = parameters([(64, 64)] * (1 if budget < SMALL else 20))
    drive = offloaded(torch.optim.Muon(first), budget)
    gradients = Gradients(first)
    train(gradients, drive)
    with pytest.raises(MemoryBudgetError):
        drive.add_param_group({"params": parameters([(512, 300)])})
    assert len(drive.param_groups) == 1
    train(gradients, drive)
    assert drive.stats()["memory_nbytes"] <= budget


def test_a_group_that_could_not_be_loaded_again_is_not_added(offloaded):
    """The budget is exact: empty parameters need only entries in its tables."""
    first = parameters([(847,), (3,)])
    with pytest.raises(MemoryBudgetError) as caught:
        offloaded(adamw(first), 100)
    drive = offloaded(adamw(first), caught.value.needed_nbytes)
    try:
        drive.add_param_group({"params": parameters([(0,)])})
    except MemoryBudgetError:
        assert len(drive.param_groups) == 1
    drive.load_state_dict(drive.state_dict())


def test_values_for_whose_state_there_is_no_room_are_not_loaded(offloaded):
    """Neither the groups nor the layout of the state has changed."""
    params = parameters([(847,), (400, 30)])
    with pytest.raises(MemoryBudgetError) as caught:
        offloaded(adamw(params), 100)
    drive = offloaded(adamw(params), caught.value.needed_nbytes)
    gradients = Gradients(params)
    train(gradients, drive)
    before = copy.deepcopy(drive.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(MemoryBudgetError):
        drive.load_state_dict(saved)
    assert same(drive.state_dict(), before)
    train(gradients, drive)


def test_blocks_that_are_not_iterable_are_named(directory):
    model = torch.nn.Linear(3, 3)
    with pytest.raises(TypeError, match="blocks: expected an iterable of modules, got int"):
        offload_training(model, adamw(model.parameters()), directory, memory_budget="1M", blocks=3)
    assert not list(directory.iterdir())
