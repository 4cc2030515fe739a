"""An offloaded optimizer supports the usual operations of an optimizer, with the same results as in memory."""

import math

import pytest
import torch

from tensorferry.offload import MemoryBudgetError
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


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    ],
)
def test_groups_schedulers_and_clipping(offloaded, scheduler):
    def make(params):
        return adamw(
            [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "weight_decay": 0.0}]
        )

    wanted, params, memory, drive = pair(offloaded, make)
    schedulers = [scheduler(each) for each in (memory, drive)]
    gradients = Gradients(wanted, params)
    for _ in range(5):
        gradients.give()
        norms = [torch.nn.utils.clip_grad_norm_(each, 1.0) for each in (wanted, params)]
        assert norms[0] == norms[1]
        for each in (memory, drive, *schedulers):
            each.step()
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


def test_a_rate_that_is_a_tensor(offloaded):
    wanted, params, memory, drive = pair(
        offloaded, lambda params: adamw(params, lr=torch.tensor(0.01))
    )
    rate = drive.param_groups[0]["lr"]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (memory, drive)]
    train(Gradients(wanted, params), memory, drive, *schedulers)
    assert drive.param_groups[0]["lr"] is rate
    assert_equal(wanted, params)


def test_named_parameters(offloaded):
    wanted, params = torch.nn.Linear(100, 200), torch.nn.Linear(100, 200)
    params.load_state_dict(wanted.state_dict())
    memory, drive = adamw(wanted.named_parameters()), adamw(params.named_parameters())
    drive = offloaded(drive, SMALL)
    train(Gradients(list(wanted.parameters()), list(params.parameters())), memory, drive)
    assert_equal(wanted.parameters(), params.parameters())
    assert_same_state(memory, drive)


@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler_and_a_skipped_step_that_moves_nothing(offloaded, fused):
    wanted, params, memory, drive = pair(
        offloaded, lambda params: torch.optim.AdamW(params, fused=fused)
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    gradients = Gradients(wanted, params)
    for step in range(5):
        gradients.give()
        for scaler, each in zip(scalers, (wanted, params), strict=True):
            scale = scaler.scale(torch.ones(()))
            for param in each:
                param.grad.mul_(scale)
            if step == 2:
                each[3].grad.fill_(math.inf)
        if step == 3:
            scalers[0].unscale_(memory)
            scalers[1].unscale_(drive)
        drive.drain()
        before = drive.stats()
        scalers[0].step(memory)
        scalers[1].step(drive)
        if step == 2:
            drive.drain()
            after = drive.stats()
            assert after["read_nbytes"] == before["read_nbytes"]
            assert after["written_nbytes"] == before["written_nbytes"]
        for scaler in scalers:
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() < 1024
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


def test_closures_and_hooks_are_called_once(offloaded):
    params = parameters()
    inner = adamw(params)
    calls = []
    before = inner.register_step_post_hook(lambda *_: calls.append("registered before"))
    drive = offloaded(inner, SMALL)
    drive.register_step_pre_hook(lambda *_: calls.append("pre"))
    drive.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        drive.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    assert drive.step(closure) > 0
    assert calls == ["pre", "closure", "registered before", "post"]
    before.remove()
    calls.clear()
    drive.step()
    assert calls == ["pre", "post"]


def test_groups_that_are_added(offloaded):
    wanted, params, memory, drive = pair(offloaded, budget=600 << 10)
    train(Gradients(wanted, params), memory, drive)
    assert drive.stats()["read_nbytes"] == 0
    more_wanted, more = parameters(), parameters()
    memory.add_param_group({"params": more_wanted, "lr": 0.01})
    drive.add_param_group({"params": more, "lr": 0.01})  # past the budget
    train(Gradients(wanted + more_wanted, params + more), memory, drive)
    assert drive.stats()["read_nbytes"] > 0
    assert drive.stats()["memory_nbytes"] <= 600 << 10
    assert_equal(wanted + more_wanted, params + more)
    assert_same_state(memory, drive)


def test_masters_are_what_a_step_in_fp32_would_have(offloaded):
    params = parameters(dtype=torch.bfloat16)
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    memory = adamw(masters)
    drive = offloaded(adamw(params), SMALL, master_dtype=torch.float32)
    gradients = Gradients(params)
    for _ in range(4):
        gradients.give()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        memory.step()
        drive.step()
    assert_equal([master.bfloat16() for master in masters], params)
    assert_equal(masters, [drive.read_state(param)["master"] for param in params])
    saved = drive.state_dict()
    again = copies(params)
    other = offloaded(adamw(again), SMALL, master_dtype=torch.float32)
    other.load_state_dict(saved)
    assert_same_state(drive, other)
    train(Gradients(params, again), drive, other)
    assert_equal(params, again)


def test_a_negative_zero_that_is_written_reaches_the_master(offloaded):
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    drive = offloaded(torch.optim.SGD([param]), master_dtype=torch.float32)
    for value in (0.0, -0.0, 0.0):
        param.data.fill_(value)
        param.grad = torch.zeros_like(param)
        drive.step()
        assert same(drive.read_state(param)["master"], torch.full((4,), value))


def test_masters_of_an_optimizer_without_state(offloaded):
    params = parameters(dtype=torch.bfloat16)
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    memory = torch.optim.SGD(masters, lr=1e-3)
    drive = offloaded(torch.optim.SGD(params, lr=1e-3), SMALL, master_dtype=torch.float32)
    gradients = Gradients(params)
    for _ in range(5):
        gradients.give()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        memory.step()
        drive.step()
    assert_equal([master.bfloat16() for master in masters], params)


def test_masters_of_an_optimizer_that_has_stepped_without(offloaded):
    params = parameters(dtype=torch.bfloat16)
    inner = adamw(params)
    train(Gradients(params), inner, steps=1)
    drive = offloaded(inner, SMALL, master_dtype=torch.float32)
    for param in params:
        assert_equal([param], [drive.read_state(param)["master"].bfloat16()])
    train(Gradients(params), drive, steps=1)


def test_a_parameter_laid_out_anew_is_refused_before_anything_changes(offloaded):
    param = torch.nn.Parameter(torch.randn(32, 64, 9, 9))
    drive = offloaded(adamw([param]), SMALL)
    gradients = Gradients([param])
    train(gradients, drive, steps=1)
    param.data = param.data.to(memory_format=torch.channels_last)
    before = param.detach().clone()
    gradients.give()
    with pytest.raises(ValueError, match="strides"):
        drive.step()
    assert_equal([before], [param])
    assert drive.steps == 1


def test_groups_that_are_taken_away_are_refused(offloaded):
    params = parameters()
    drive = offloaded(adamw([{"params": params[:4]}, {"params": params[4:]}]), SMALL)
    gradients = Gradients(params)
    train(gradients, drive, steps=1)
    drive.param_groups.pop(0)
    before = copies(params)
    gradients.give()
    with pytest.raises(ValueError, match="param_groups"):
        drive.step()
    assert_equal(before, params)


def trained_with_the_least_budget(offloaded, shapes):
    """Train float64 with three states for each element in memory and offloaded; the parameters must be the same."""
    wanted, params = (parameters(shapes, torch.float64) for _ in range(2))
    memory = torch.optim.Adam(wanted, amsgrad=True)
    with pytest.raises(MemoryBudgetError) as caught:
        offloaded(torch.optim.Adam(params, amsgrad=True), 1)
    drive = offloaded(torch.optim.Adam(params, amsgrad=True), caught.value.needed_nbytes)
    train(Gradients(wanted, params), memory, drive, steps=3)
    assert_equal(wanted, params)
    return memory, drive


def test_the_smallest_pieces_fit_in_slots(offloaded):
    """Pieces are multiples of some thousand elements: with wide elements that is more than the smallest slots hold."""
    memory, drive = trained_with_the_least_budget(offloaded, [(639,), (5864,), (30, 67)])
    assert_same_state(memory, drive)


def test_a_budget_of_all_state_to_the_byte_holds_all_of_it(offloaded):
    """Divided into slots, the state would need more memory, because each piece of a tensor begins at a page."""
    _, drive = trained_with_the_least_budget(offloaded, [(4, 6, 12, 4), (27, 59)])
    assert drive.stats()["read_nbytes"] == 0


@pytest.mark.parametrize("budget", ["1MiB", "64MiB"])
def test_a_state_leaves_memory_with_tensors_of_the_user(offloaded, budget):
    """They are kept when an option, or a group, brings more state than the budget holds."""

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)

    wanted, params, memory, drive = pair(offloaded, sgd, [(300, 300)] * 4, budget)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=1)
    mine = torch.arange(5000.0)
    memory.state[wanted[0]]["mine"] = mine
    drive.write_state(params[0], {"mine": mine})
    for optimizer in (memory, drive):
        optimizer.param_groups[0]["momentum"] = 0.9  # from now on there is more state than memory
    train(gradients, memory, drive, steps=1)
    assert drive.stats()["memory_nbytes"] <= (1 << 20 if budget == "1MiB" else 64 << 20)
    train(gradients, memory, drive)
    assert (drive.stats()["read_nbytes"] > 0) == (budget == "1MiB")
    more_wanted, more = parameters([(400, 400)]), parameters([(400, 400)])
    memory.add_param_group({"params": more_wanted})
    drive.add_param_group({"params": more})
    assert_same_state(memory, drive)
    train(Gradients(wanted + more_wanted, params + more), memory, drive)
    assert_same_state(memory, drive)
    assert_equal(wanted + more_wanted, params + more)
