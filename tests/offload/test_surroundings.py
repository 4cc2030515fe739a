"""The surroundings of an optimizer: its constructor, users' methods, hooks, models, and objects that users keep."""

from __future__ import annotations

import errno
import io
import signal
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tensorferry import checkpoint
from tensorferry.offload import OffloadError, offload_optimizer
from tests.offload.twins import SMALL, Gradients, assert_equal, copies, parameters, train
from tests.support.faultfs import Fault

if TYPE_CHECKING:
    from pathlib import Path


def test_a_scheduler_of_the_optimizer_itself_goes_on(offloaded: Any) -> None:
    wanted, params = parameters(), parameters()
    memory, inner = torch.optim.AdamW(wanted), torch.optim.AdamW(params)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (memory, inner)]
    drive = offloaded(inner, SMALL)
    gradients = Gradients(wanted, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, that the optimizer was not stepped before
        for _ in range(3):
            train(gradients, memory, drive, steps=1)
            for schedule in schedules:
                schedule.step()
    assert_equal(wanted, params)
    with pytest.raises(RuntimeError, match="has been offloaded"):
        inner.step()
    with pytest.raises(ValueError, match="offloaded already"):
        offloaded(inner, SMALL)
    assert_equal(wanted, params)


@pytest.mark.parametrize("budget", [SMALL, 16 << 20])
def test_what_is_written_into_a_parameter_counts_beside_its_master(
    offloaded: Any, budget: int
) -> None:
    params = parameters(dtype=torch.bfloat16)
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    memory = torch.optim.AdamW(masters)
    drive = offloaded(torch.optim.AdamW(params), budget, master_dtype=torch.float32)
    gradients = Gradients(params)
    for number in range(5):
        gradients.give()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
        memory.step()
        drive.step()
        assert_equal([master.bfloat16() for master in masters], params)
        if number in (1, 3):
            with torch.no_grad():
                for each in (params, masters):
                    each[0][:5] = 7
                    each[4].fill_(-9)


def test_a_committed_step_has_what_hooks_and_users_have_done(directory: Path) -> None:
    def made() -> tuple[Any, Any]:
        params = parameters()
        optimizer = offload_optimizer(
            torch.optim.SGD(params, lr=1.0, momentum=0.9),
            directory,
            memory_budget=SMALL,
            commit="step",
        )
        optimizer.register_step_post_hook(lambda *_: params[0].data.clamp_(-0.1, 0.1))
        return params, optimizer

    params, optimizer = made()
    gradients = Gradients(params, missing=lambda step, index: index == 4)
    train(gradients, optimizer, steps=2)
    params[4].data.fill_(3)  # it has no gradient
    train(gradients, optimizer, steps=1)
    optimizer.close()
    again, other = made()
    for param in again:
        param.data.zero_()
    assert other.resume() == 3
    assert_equal(params, again)
    other.close()


def test_a_retry_with_other_gradients_is_refused(faultfs: Any, offloaded: Any) -> None:
    wanted, params = parameters(), parameters()
    memory = torch.optim.AdamW(wanted)
    drive = offloaded(torch.optim.AdamW(params), SMALL, path=faultfs.path)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=2)
    drive.drain()
    gradients.give()
    memory.step()
    faultfs.order(Fault("read", error=errno.EIO, skip=1))
    with pytest.raises(OffloadError, match="half done"):
        drive.step()
    faultfs.clear()
    kept = [param.grad for param in params]
    versions = [None if grad is None else grad._version for grad in kept]
    drive.zero_grad()
    with pytest.raises(
        OffloadError, match="has been replaced, removed or modified since the step began"
    ):
        drive.retry()
    for param, grad in zip(params, kept, strict=True):
        param.grad = grad
    assert versions == [None if grad is None else grad._version for grad in kept]
    drive.retry()
    assert_equal(wanted, params)


def test_a_handler_of_sigterm_that_raises_is_called_when_the_step_is_whole(
    offloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled(*arguments: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        return lend(*arguments, **more)

    def ends(*_: Any) -> None:
        raise SystemExit("preempted")

    wanted, params = parameters(), parameters()
    memory, drive = torch.optim.AdamW(wanted), offloaded(torch.optim.AdamW(params), SMALL)
    lend = drive._lender.lend
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    gradients.give()
    memory.step()
    before = signal.signal(signal.SIGTERM, ends)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(drive._lender, "lend", signalled)
            with pytest.raises(SystemExit, match="preempted"):
                drive.step()
        assert signal.getsignal(signal.SIGTERM) is ends
    finally:
        signal.signal(signal.SIGTERM, before)
    assert drive.steps == 4
    assert_equal(wanted, params)
    train(gradients, memory, drive)
    assert_equal(wanted, params)


def test_a_step_is_outside_of_a_compiled_graph(offloaded: Any) -> None:
    wanted, params = parameters(), parameters()
    memory, drive = torch.optim.AdamW(wanted), offloaded(torch.optim.AdamW(params), SMALL)
    gradients = Gradients(wanted, params)
    compiled = torch.compile(lambda: drive.step(), backend="eager")
    for _ in range(2):
        gradients.give()
        memory.step()
        compiled()
    assert_equal(wanted, params)


@pytest.mark.parametrize("budget", [SMALL, 16 << 20])
def test_state_of_several_dtypes_is_saved_in_its_own_bytes(
    offloaded: Any, budget: int, directory: Path
) -> None:
    shapes = [(300, 300), (300,), (17,), ()]
    params = [
        *parameters(shapes, torch.bfloat16),
        *parameters(shapes, torch.float32),
        *parameters(shapes, torch.float64),
    ]
    drive = offloaded(torch.optim.AdamW(params), 3 << 20 if budget > SMALL else 400 << 10)
    train(Gradients(params), drive)
    saved = drive.state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    nbytes = sum(value.nbytes for state in saved["state"].values() for value in state.values())
    assert len(file.getvalue()) < 1.5 * nbytes
    torch.save(saved, io.BytesIO(), _use_new_zipfile_serialization=False)
    checkpoint.save(saved, directory / "file")
    file.seek(0)
    other = torch.optim.AdamW(copies(params))
    other.load_state_dict(torch.load(file))
    for index, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(other.state_dict()["state"][index][key], value)


def test_nothing_but_the_optimizer_keeps_it(offloaded: Any, directory: Path) -> None:
    """It is freed with its last reference, without the garbage collector."""
    import gc
    import weakref

    params = parameters()
    drive = offload_optimizer(torch.optim.AdamW(params), directory, memory_budget=SMALL)
    train(Gradients(params), drive)
    drive.drain()
    gone = weakref.ref(drive)
    gc.collect()
    gc.disable()
    try:
        del drive
        assert gone() is None
    finally:
        gc.enable()
