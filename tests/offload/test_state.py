"""State dicts in both directions, snapshots, and reads of one parameter's state."""

import copy
import io

import pytest
import torch

from tensorferry.offload.equality import same
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


def zeros(state):
    return {key: torch.zeros_like(value) for key, value in state.items()}


def another_count(state):
    return {**state, "step": torch.tensor(1.0)}


def one_more(state):
    return {**state, "mine": torch.arange(5000.0)}


def nothing(state):
    return {}


@pytest.mark.parametrize("budget", [SMALL, 16 << 20])
@pytest.mark.parametrize("change", [zeros, another_count, one_more, nothing])
def test_what_is_read_and_written_is_that_of_memory(offloaded, change, budget):
    wanted, params, memory, drive = pair(offloaded, budget=budget)
    assert len(drive.state) == 0
    assert drive.read_state(params[0]) == {}
    gradients = Gradients(wanted, params, missing=lambda _, index: index == 1)
    train(gradients, memory, drive)
    assert list(drive.state) == [each for each in params if each is not params[1]]
    for left, right in zip(wanted, params, strict=True):
        state = dict(memory.state.get(left, {}))
        assert same(drive.read_state(right), state)
        assert list(drive.state[right]) == list(state)
    for index in (0, 2, 4):
        memory.state[wanted[index]] = change(memory.state[wanted[index]])
        drive.write_state(params[index], change(drive.read_state(params[index])))
        assert same(drive.read_state(params[index]), memory.state[wanted[index]])
        if change is nothing:
            del memory.state[wanted[index]]
            assert params[index] not in drive.state
    assert_same_state(memory, drive)
    if change is not one_more or budget > SMALL:
        train(gradients, memory, drive, steps=2)
        assert_equal(wanted, params)
        assert_same_state(memory, drive)


def test_what_is_read_is_a_copy_and_what_is_written_is_copied(offloaded):
    for budget in (SMALL, 16 << 20):
        _, params, _, drive = pair(offloaded, budget=budget)
        train(Gradients(params), drive)
        before = drive.read_state(params[0])
        for value in drive.read_state(params[0]).values():
            value.zero_()
        assert same(drive.read_state(params[0]), before)
        mine = {key: value.clone() for key, value in before.items()}
        drive.write_state(params[0], mine)
        for value in mine.values():
            value.zero_()
        assert same(drive.read_state(params[0]), before)


def test_a_state_is_not_read_or_changed_by_items(offloaded):
    _, params, _, drive = pair(offloaded)
    train(Gradients(params), drive)
    kept = copy.deepcopy(drive.state_dict())
    state = drive.state[params[0]]
    for access in (
        lambda: state["exp_avg"],
        lambda: state.__setitem__("step", 1),
        lambda: drive.state.__setitem__(params[0], {}),
        lambda: drive.state.__delitem__(params[0]),
        lambda: drive.state.clear(),
        lambda: drive.state.update({params[0]: {}}),
        lambda: setattr(drive, "state", {}),
    ):
        with pytest.raises(TypeError, match="write_state"):
            access()
    for param, state in drive.state.items():  # as Lightning moves state to a device
        drive.state[param] = state
    assert same(drive.state_dict(), kept)
    for call in (drive.read_state, lambda param: drive.write_state(param, {})):
        with pytest.raises(KeyError, match="parameter"):
            call(torch.zeros(3))
    with pytest.raises(TypeError, match="dict"):
        drive.write_state(params[0], [1])
    with pytest.raises(TypeError, match="Parametric"):
        drive.write_state(params[0], {"ema": Parametric(torch.zeros(3))})
    assert same(drive.state_dict(), kept)


class Parametric(torch.Tensor):
    pass


@pytest.mark.parametrize("budget", [SMALL, 64 << 20])
def test_a_deleted_master_is_made_again_from_the_parameter(offloaded, budget):
    params = parameters(dtype=torch.bfloat16)
    drive = offloaded(adamw(params), budget, master_dtype=torch.float32)
    gradients = Gradients(params)
    train(gradients, drive)
    drive.write_state(params[0], {})
    assert params[0] not in drive.state
    masters = [torch.nn.Parameter(params[0].detach().float())]
    fresh = adamw(masters)
    gradients.give()
    masters[0].grad = params[0].grad.float()
    fresh.step()
    drive.step()
    assert same(drive.read_state(params[0]), {**fresh.state[masters[0]], "master": masters[0].data})
    half = {**drive.read_state(params[0]), "master": torch.zeros_like(params[0])}
    drive.write_state(params[0], half)
    assert not drive.read_state(params[0])["master"].any()


def test_a_state_dict_with_state_of_no_parameter_is_refused(offloaded):
    wanted, params, memory, drive = pair(offloaded)
    train(Gradients(wanted, params), memory, drive)
    saved = memory.state_dict()
    saved["state"] = {**saved["state"], "of all": {"count": 1}}
    with pytest.raises(ValueError, match="of all"):
        drive.load_state_dict(saved)
    assert_same_state(memory, drive)
