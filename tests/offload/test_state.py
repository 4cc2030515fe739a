"""State dicts in both directions, snapshots, and reads of one parameter's state."""

import collections
import io

import pytest
import torch

from tensorferry.offload.optimizer_snapshot import same
from tests.offload.twins import (
    SMALL,
    Gradients,
    adamw,
    assert_equal,
    assert_same_state,
    copies,
    pair,
    parameters,
    train,
)


def test_a_state_dict_stays_as_it_was(offloaded):
    wanted, params, memory, drive = pair(offloaded)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    then = {
        index: {key: value.clone() for key, value in state.items()}
        for index, state in memory.state_dict()["state"].items()
    }
    saved = drive.state_dict()
    train(gradients, memory, drive, steps=4)
    drive.drain()
    drive.close()
    for index, state in then.items():
        for key, value in state.items():
            assert torch.equal(saved["state"][index][key], value), key


@pytest.mark.parametrize("budget", [SMALL, 64 << 20])
def test_the_first_state_has_entries_of_no_parameter_too(offloaded, budget):
    memory = adamw(parameters())
    train(Gradients(memory.param_groups[0]["params"]), memory)
    memory.state["of all"] = {"count": 3}
    wanted = memory.state_dict()
    drive = offloaded(memory, budget)
    assert drive.state["of all"] == {"count": 3}
    assert list(drive.state_dict()["state"]) == list(wanted["state"])


@pytest.mark.parametrize("budget", [SMALL, 64 << 20])
def test_a_new_state_replaces_all_of_the_old_one(offloaded, budget):
    wanted, params, memory, drive = pair(offloaded, budget=budget)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    drive.state["of all"] = 1
    with pytest.raises(KeyError):
        drive.state = {params[0]: {}, torch.zeros(1): {"step": 1}}
    with pytest.raises(TypeError):
        drive.state = {params[0]: {}, params[1]: 1}
    assert drive.state.pop("of all") == 1
    assert_same_state(memory, drive)
    key = ("of", "all")
    for optimizer, mine in ((memory, wanted), (drive, params)):
        kept = {mine[1]: optimizer.state[mine[1]]}
        state = collections.defaultdict(dict, kept)
        if optimizer is drive:
            state |= {mine[0]: {}, key: 0}
        optimizer.state = state
    assert ("of", "all") in drive.state
    drive.state = drive.state
    assert drive.state.pop(key) == 0
    assert_same_state(memory, drive)
    train(gradients, memory, drive)
    assert_equal(wanted, params)


def test_a_deleted_master_is_made_again_from_the_parameter(offloaded):
    found = []
    for budget in (SMALL, 64 << 20):
        params = parameters(dtype=torch.bfloat16)
        drive = offloaded(adamw(params), budget, master_dtype=torch.float32)
        gradients = Gradients(params)
        train(gradients, drive)
        del drive.state[params[0]]
        assert params[0] not in drive.state
        train(gradients, drive, steps=1)
        found.append({key: value.clone() for key, value in drive.state[params[0]].items()})
    assert same(*found)


def test_a_saved_state_dict_can_be_changed_and_written(offloaded):
    wanted, params, memory, drive = pair(offloaded)
    train(Gradients(wanted, params), memory, drive)
    saved = drive.state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    for state in saved["state"].values():
        state["exp_avg"].zero_()
        state["step"].zero_()
    assert_same_state(memory, drive)
    file.seek(0)
    loaded = torch.load(file)
    fresh = copies(params)
    other = adamw(fresh)
    other.load_state_dict(loaded)
    assert_same_state(memory, other)


def resets(state):
    for value in state.values():
        value.zero_()


def resets_by_item(state):
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def counts_anew(state):
    state["step"] = torch.tensor(1.0)


def is_cleared(state):
    state.clear()


@pytest.mark.parametrize("budget", [SMALL, 16 << 20])
@pytest.mark.parametrize("change", [resets, resets_by_item, counts_anew, is_cleared])
def test_what_is_written_into_state_counts(offloaded, change, budget):
    wanted, params, memory, drive = pair(offloaded, budget=budget)
    assert len(drive.state) == 0
    assert drive.state[params[0]] == {}
    gradients = Gradients(wanted, params, missing=lambda _, index: index == 1)
    train(gradients, memory, drive)
    assert params[0] in drive.state
    assert params[1] not in drive.state
    assert list(drive.state) == [each for each in params if each is not params[1]]
    for left, right in zip(wanted, params, strict=True):
        state = drive.state[right]
        assert state.keys() == memory.state.get(left, {}).keys()
        for key, value in memory.state.get(left, {}).items():
            assert torch.equal(state[key], value)
    for index in (0, 2, 4):
        change(memory.state[wanted[index]])
        change(drive.state[params[index]])
    train(gradients, memory, drive, steps=2)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


@pytest.mark.parametrize("budget", [SMALL, 16 << 20])
def test_all_state_is_written_replaced_and_deleted(offloaded, budget):
    wanted, params, memory, drive = pair(offloaded, budget=budget)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    for optimizer in (memory, drive):
        for state in optimizer.state.values():
            for value in state.values():
                value.mul_(0.5)
    train(gradients, memory, drive)
    assert_same_state(memory, drive)
    for optimizer, each in ((memory, wanted), (drive, params)):
        optimizer.state[each[8]] = {
            key: value * 2 for key, value in optimizer.state[each[4]].items()
        }
        del optimizer.state[each[5]]
    train(gradients, memory, drive)
    assert_equal(wanted, params)
    for optimizer in (memory, drive):
        optimizer.state = {}
        assert len(optimizer.state) == 0
    memory.state = collections.defaultdict(dict)
    train(gradients, memory, drive)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


def test_what_cannot_count_raises_where_it_is_written_or_at_the_next_step(offloaded):
    wanted, params, memory, drive = pair(offloaded)
    train(Gradients(wanted, params), memory, drive)
    with pytest.raises(ValueError, match="'ema', a Tensor"):
        drive.state[params[0]] = {**drive.state[params[0]], "ema": torch.zeros(60, 100)}
    with pytest.raises(KeyError, match="parameter"):
        drive.state[torch.zeros(3)] = {}
    earlier = drive.state[params[0]]["exp_avg"]
    train(Gradients(wanted, params), memory, drive, steps=1)
    earlier.zero_()
    with pytest.raises(RuntimeError, match="before an earlier step"):
        drive.step()
    memory.step()
    drive.step()
    assert_equal(wanted, params)


def test_a_state_in_memory_is_taken_over(offloaded):
    wanted, params = parameters(), parameters()
    memory, inner = adamw(wanted), adamw(params)
    gradients = Gradients(wanted, params)
    train(gradients, memory, inner)
    drive = offloaded(inner, SMALL)
    assert not inner.state
    assert_same_state(memory, drive)
    train(gradients, memory, drive)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


def test_loading_casts_as_torch_does(offloaded):
    sixteen = parameters(dtype=torch.bfloat16)
    source = torch.optim.AdamW(sixteen, lr=0.3, amsgrad=True)
    train(Gradients(sixteen), source)
    wanted, params, memory, drive = pair(offloaded, torch.optim.AdamW)
    memory.load_state_dict(source.state_dict())
    drive.load_state_dict(source.state_dict())
    assert drive.param_groups[0]["lr"] == 0.3
    assert_same_state(memory, drive)
    train(Gradients(wanted, params), memory, drive)
    assert_equal(wanted, params)


def test_loading_calls_hooks_and_ends_what_was(offloaded):
    wanted, params, memory, drive = pair(offloaded)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=1)
    saved = memory.state_dict()
    calls = []
    drive.register_load_state_dict_pre_hook(lambda *_: calls.append("pre"))
    drive.register_load_state_dict_post_hook(lambda *_: calls.append("post"))
    drive.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    drive.load_state_dict(saved)
    assert calls == ["pre", "post"]
    drive.state_dict()
    assert calls == ["pre", "post", "saved"]
    drive.load_state_dict(adamw(parameters()).state_dict())
    assert len(drive.state) == 0


@pytest.mark.parametrize("how", ["another number of parameters", "another shape", "no dict"])
def test_a_state_of_others_is_refused_and_changes_nothing(offloaded, how):
    wanted, params, memory, drive = pair(offloaded)
    train(Gradients(wanted, params), memory, drive)
    saved = memory.state_dict()
    if how == "another number of parameters":
        saved = adamw(params[:3]).state_dict()
    else:
        saved["state"] = dict(saved["state"])
        if how == "no dict":
            saved["state"][2] = 7
        else:
            saved["state"][2] = {**saved["state"][2], "exp_avg": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"parameter|shape|dict"):
        drive.load_state_dict(saved)
    assert_same_state(memory, drive)
    train(Gradients(wanted, params), memory, drive)
    assert_equal(wanted, params)
