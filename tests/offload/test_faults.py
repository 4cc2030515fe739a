"""Failing drives and Ctrl-C: a step is complete, or reports that it is not and can be completed."""

import contextlib
import errno
import gc
import os
import signal
import threading
import weakref

import pytest
import torch

from tensorferry import StorageError
from tensorferry.offload import OffloadError, offload_optimizer
from tensorferry.offload.loans import Lender
from tests.offload.test_word import Averaging
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
from tests.support.faultfs import Fault
from tests.support.leaks import settled
from tests.support.threads import InThread


@pytest.fixture
def both(faultfs, offloaded):
    wanted, params, memory, drive = pair(offloaded, path=faultfs.path)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=2)
    drive.drain()
    return wanted, params, memory, drive, gradients


def whole(wanted, params, memory, drive, gradients):
    """Check that the optimizer equals the one in memory, also after further steps."""
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
    train(gradients, memory, drive, steps=2)
    assert_equal(wanted, params)


@pytest.mark.parametrize("skip", [0, 2])
def test_a_read_that_fails_in_a_step(both, faultfs, skip):
    *_, memory, drive, gradients = both
    gradients.give()
    memory.step()
    faultfs.order(Fault("read", error=errno.EIO, skip=skip))
    with pytest.raises(OffloadError, match="step 3 is half done") as caught:
        drive.step()
    assert (caught.value.step, caught.value.finished) == (2, False)
    assert isinstance(caught.value.__cause__, StorageError)
    assert caught.value.__cause__.errno == errno.EIO
    assert drive.steps == 2
    for call in (drive.step, drive.state_dict, drive.retry):
        with pytest.raises(OffloadError):
            call()
    faultfs.clear()
    drive.retry()
    assert drive.steps == 3
    whole(*both)


def test_a_write_that_fails(both, faultfs):
    *_, memory, drive, gradients = both
    faultfs.order(Fault("write", error=errno.EIO))
    gradients.give()
    memory.step()
    errors = []
    for call in (drive.step, drive.drain, drive.retry):
        try:
            call()
        except OffloadError as error:
            errors.append(error)
    assert errors
    assert all(error.__cause__.errno == errno.EIO for error in errors)
    faultfs.clear()
    drive.retry()
    assert drive.steps == 3
    whole(*both)


def test_a_write_that_fails_once_the_step_is_done(faultfs, offloaded):
    wanted, params, memory, drive = pair(offloaded, budget=2 * SMALL, path=faultfs.path)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=2)
    gradients.give()
    memory.step()
    drive.step()
    drive.drain()
    faultfs.order(Fault("write", error=errno.EIO))
    with pytest.raises(OffloadError, match="step 3 is complete") as caught:
        drive.state_dict()  # stores the state that is only in memory
    assert (caught.value.step, caught.value.finished) == (3, True)
    faultfs.clear()
    drive.retry()
    whole(wanted, params, memory, drive, gradients)


def test_a_barrier_reports_writes_that_failed_before_it(faultfs, offloaded):
    wanted, params, memory, drive = pair(offloaded, path=faultfs.path)
    nbytes = drive.stats()["state_nbytes"]
    drive.close()
    drive = offloaded(adamw(params), nbytes * 7 // 8, path=faultfs.path)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=2)
    drive.drain()
    gradients.give()
    memory.step()
    faultfs.order(Fault("write", error=errno.EIO))
    with contextlib.suppress(OffloadError):
        drive.step()
    faultfs.clear()
    for _ in range(2):
        with pytest.raises(OffloadError):
            drive.drain()
    drive.retry()
    drive.drain()
    assert drive.steps == 3
    whole(wanted, params, memory, drive, gradients)


def test_a_failed_eval_is_finished_by_retry_without_gradients(faultfs, offloaded):
    wanted, params = parameters(), parameters()
    memory = Averaging(wanted)
    drive = offloaded(Averaging(params), SMALL, path=faultfs.path, kind="elementwise")
    train(Gradients(wanted, params), memory, drive, steps=2)
    drive.drain()
    for param in (*wanted, *params):
        param.grad = None
    memory.eval()
    faultfs.order(Fault("read", error=errno.EIO))
    with pytest.raises(OffloadError):
        drive.eval()
    faultfs.clear()
    drive.retry()
    assert drive.steps == 2
    assert_equal(wanted, params)
    assert not drive.param_groups[0]["trains"]


def test_an_optimizer_that_cannot_be_offloaded_keeps_its_state(offloaded):
    class Picky(torch.optim.AdamW):
        def load_state_dict(self, state_dict):
            if any("refused" in state for state in state_dict["state"].values()):
                raise ValueError("refused")
            super().load_state_dict(state_dict)

    params = parameters(dtype=torch.bfloat16)
    optimizer = Picky(params)
    train(Gradients(params), optimizer)
    optimizer.state[params[3]]["refused"] = 1
    kept = optimizer.state
    states = dict(kept)
    with pytest.raises(ValueError, match="refused"):
        offloaded(optimizer, 64 << 20, master_dtype=torch.float32, kind="elementwise")
    assert optimizer.state is kept
    assert dict(kept) == states


class Failing(torch.Tensor):
    """A gradient that fails to be converted, as for lack of memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "to":
            raise MemoryError
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("before", [0, 1])
def test_a_step_in_memory_that_cannot_begin_leaves_parameters_as_they_are(offloaded, before):
    params = parameters(dtype=torch.bfloat16)
    drive = offloaded(adamw(params), 64 << 20, master_dtype=torch.float32)
    gradients = Gradients(params)
    train(gradients, drive, steps=before)
    kept = copies(params)
    gradients.give()
    params[0].grad = params[0].grad.as_subclass(Failing)
    with pytest.raises(MemoryError):
        drive.step()
    assert_equal(kept, params)


def test_a_step_that_cannot_begin_changes_nothing(offloaded, monkeypatch):
    wanted, params = parameters(), parameters()
    memory, inner = [
        adamw([{"params": each[:4]}, {"params": each[4:]}]) for each in (wanted, params)
    ]
    drive = offloaded(inner, SMALL)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    gradients.give()
    memory.step()

    def fails(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Lender, "lend", fails)
        with pytest.raises(MemoryError):
            drive.step()
    assert all(param.grad is not None for param in params)
    drive.step()
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


def test_a_full_disk_at_the_start_changes_nothing(faultfs):
    wanted, params = parameters(), parameters()
    memory, inner = adamw(wanted), adamw(params)
    calls = []
    inner.register_step_post_hook(lambda *_: calls.append(1))
    gradients = Gradients(wanted, params)
    train(gradients, memory, inner)
    faultfs.order(Fault("fallocate", error=errno.ENOSPC))
    with pytest.raises(StorageError) as caught:
        offload_optimizer(inner, faultfs.path, memory_budget=SMALL)
    assert caught.value.errno == errno.ENOSPC
    calls.clear()
    train(gradients, memory, inner)  # still an optimizer in memory
    assert len(calls) == 3
    assert_equal(wanted, params)
    assert_same_state(memory, inner)


def test_ctrl_c_is_heard_when_the_step_is_whole(both, faultfs):
    *_, memory, drive, gradients = both
    gradients.give()
    memory.step()
    faultfs.order(Fault("read", hold=True))

    def press():
        faultfs.await_held()
        os.kill(os.getpid(), signal.SIGINT)
        faultfs.release()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        drive.step()
    thread.join()
    assert drive.steps == 3
    whole(*both)


def test_a_second_ctrl_c_ends_the_wait_for_a_drive(both, faultfs):
    *_, memory, drive, gradients = both
    gradients.give()
    memory.step()
    faultfs.order(Fault("read", hold=True))

    def press_twice():
        faultfs.await_held()
        os.kill(os.getpid(), signal.SIGINT)
        assert settled(lambda: drive._interrupts._count == 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = InThread(press_twice)
    with pytest.raises(KeyboardInterrupt):
        drive.step()
    thread.result()
    assert faultfs.held() > 0
    faultfs.release()
    faultfs.clear()
    if drive.steps == 2:
        try:
            drive.retry()
        finally:
            if drive.steps == 2:  # the step has not begun
                drive.step()
    whole(*both)


def test_closing_waits_for_writes(both, faultfs):
    *_, drive, gradients = both
    gradients.give()
    faultfs.order(Fault("write", hold=True))
    stepping = threading.Thread(target=drive.step)
    stepping.start()
    faultfs.await_held()
    closer = threading.Thread(target=drive.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    faultfs.release()
    for thread in (stepping, closer):
        thread.join(120)
        assert not thread.is_alive()
    assert not list(faultfs.backing.iterdir())


def test_the_last_reference(directory):
    params = parameters()
    drive = offload_optimizer(adamw(params), directory, memory_budget=SMALL)
    train(Gradients(params), drive)
    gone = weakref.ref(drive)
    saved = drive.state_dict()
    kept = {index: state["exp_avg"].clone() for index, state in saved["state"].items()}
    del drive
    gc.collect()
    assert gone() is None
    for index, value in kept.items():
        assert torch.equal(saved["state"][index]["exp_avg"], value)


def test_two_in_one_directory(offloaded):
    wanted, params = parameters(), parameters()
    others = copies(wanted)
    memory = adamw(wanted)
    drives = [offloaded(adamw(each), SMALL) for each in (params, others)]
    train(Gradients(wanted, params, others), memory, *drives, steps=4)
    assert_equal(wanted, params)
    assert_equal(wanted, others)
    for drive in drives:
        assert_same_state(memory, drive)


@pytest.mark.parametrize("retried", [True, False])
def test_a_step_whose_commit_could_not_be_synced_is_committed_by_the_next_call(
    faultfs, offloaded, retried
):
    """Also for a parameter that gets no more gradients: its state is in the file that failed."""
    wanted, params, memory, drive = pair(offloaded, path=faultfs.path, commit="fsync")
    gradients = Gradients(wanted, params, missing=lambda step, index: step and index < 4)
    train(gradients, memory, drive, steps=1)
    gradients.give()
    memory.step()
    faultfs.order(Fault("fsync", error=errno.EIO, times=1))
    with pytest.raises(OffloadError, match="step 2 is complete, but could not be committed"):
        drive.step()
    if retried:
        drive.retry()
    whole(wanted, params, memory, drive, gradients)


@pytest.mark.parametrize("budget", [SMALL, 16 << 20])
def test_a_layout_for_which_there_is_no_space_changes_nothing(faultfs, offloaded, budget):
    """An option brings state for which the drive has no room."""

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)

    wanted, params = parameters(), parameters()
    memory, drive = sgd(wanted), offloaded(sgd(params), budget, path=faultfs.path)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    drive.param_groups[0]["momentum"] = memory.param_groups[0]["momentum"] = 0.9
    gradients.give()
    kept = copies(params)
    faultfs.order(Fault("fallocate", error=errno.ENOSPC))
    with pytest.raises(StorageError) as caught:
        drive.step()
    assert caught.value.errno == errno.ENOSPC
    assert_equal(kept, params)
    faultfs.clear()
    memory.step()
    drive.step()
    train(gradients, memory, drive)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
