"""The number of threads of a step: few if it waits for the drive or buckets are small; the result is the same."""

import threading

import pytest
import torch

from tensorferry.offload import threads as step_threads
from tensorferry.offload.threads import StepThreads
from tests.offload.twins import SHAPES, SMALL, ByNorm, Gradients, assert_equal, parameters, train
from tests.support.faultfs import Fault
from tests.support.leaks import settled

THREADS = 2
LARGE = 1 << 20  # elements


@pytest.fixture(autouse=True)
def _two_threads(_one_thread):
    torch.set_num_threads(THREADS)


def recording(kind, seen):
    """Return a subclass that notes how many threads each call of its step() has."""

    class Recording(kind):
        def step(self, closure=None):
            seen.append(torch.get_num_threads())
            return super().step(closure)

    return Recording


def slow(faultfs):
    faultfs.order(Fault("read", delay_s=0.05), Fault("write", delay_s=0.05))


@pytest.fixture
def _waiting(monkeypatch):
    """Make all steps appear to wait only for the drive, independent of the machine's load."""
    note = StepThreads.note
    monkeypatch.setattr(StepThreads, "note", lambda threads, *_: note(threads, 1.0, 1.0))


def test_one_thread_steps_where_the_drive_is_waited_for(faultfs, offloaded, monkeypatch):
    monkeypatch.setattr(step_threads, "_GRAIN_NUMEL", 1)  # as if the buckets were large
    wanted, params, seen = parameters(), parameters(), []
    memory = torch.optim.AdamW(wanted)
    drive = offloaded(
        recording(torch.optim.AdamW, seen)(params), SMALL, path=faultfs.path, kind="elementwise"
    )
    assert drive.stats()["buckets"] > 4
    gradients = Gradients(wanted, params)
    slow(faultfs)

    def one_thread():
        seen.clear()
        train(gradients, memory, drive, steps=1)
        return set(seen) == {1}

    assert settled(one_thread)
    assert torch.get_num_threads() == THREADS
    assert_equal(wanted, params)


def test_all_threads_step_what_is_in_memory(faultfs, offloaded):
    wanted, params, seen = parameters(), parameters(), []
    memory = torch.optim.AdamW(wanted)
    drive = offloaded(
        recording(torch.optim.AdamW, seen)(params), "1GiB", path=faultfs.path, kind="elementwise"
    )
    slow(faultfs)
    train(Gradients(wanted, params), memory, drive, steps=4)
    assert set(seen) == {THREADS}


@pytest.mark.usefixtures("_waiting")
def test_parameters_that_cannot_be_cut_are_stepped_by_all_threads(offloaded):
    """A sum over them is another one with other threads."""
    wanted, params, seen = parameters(3 * SHAPES), parameters(3 * SHAPES), []
    memory, drive = (
        ByNorm(wanted),
        offloaded(recording(ByNorm, seen)(params), SMALL, kind="per_parameter"),
    )
    train(Gradients(wanted, params), memory, drive, steps=4)
    assert drive.stats()["read_nbytes"] > 0
    assert set(seen) == {THREADS}
    assert_equal(wanted, params)


@pytest.mark.usefixtures("_waiting")
def test_the_number_is_as_before_after_a_step_that_raises(offloaded):
    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    params, seen = parameters(), []
    inner = recording(Failing, seen)(params)
    drive = offloaded(inner, SMALL, kind="elementwise")
    train(Gradients(params), drive, steps=2)
    inner.fails = True
    with pytest.raises(ZeroDivisionError):
        drive.step()
    assert seen[-1] == 1
    assert torch.get_num_threads() == THREADS


def test_other_threads_keep_theirs():
    threads, seen = StepThreads(), []
    for _ in range(3):
        threads.note(1.0, 0.9)
    with threads.limited(LARGE):
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [THREADS]
    assert torch.get_num_threads() == THREADS


@pytest.mark.parametrize(("numel", "wanted"), [(0, 1), (8192, 1), (65535, 1), (65536, 2)])
def test_short_operations_get_one_thread(numel, wanted):
    with StepThreads().limited(numel):
        assert torch.get_num_threads() == wanted


def test_small_buckets_are_stepped_by_one_thread(offloaded):
    wanted, params, seen = parameters(), parameters(), []
    memory = torch.optim.AdamW(wanted)
    drive = offloaded(recording(torch.optim.AdamW, seen)(params), SMALL, kind="elementwise")
    seen.clear()
    train(Gradients(wanted, params), memory, drive, steps=3)
    assert drive.stats()["buckets"] > 4
    assert set(seen) == {1}
    assert torch.get_num_threads() == THREADS
    assert_equal(wanted, params)


def limit(threads):
    with threads.limited(LARGE):
        return torch.get_num_threads()


def test_fewer_threads_are_tried_and_not_again_where_they_were_too_few():
    torch.set_num_threads(4)
    threads = StepThreads()
    assert limit(threads) == 4
    for waited, wanted in ((0.9, 2), (0.1, 2), (0.9, 1), (0.9, 1), (0.0, 2), (0.9, 2), (0.0, 4)):
        threads.note(1.0, waited)
        assert limit(threads) == wanted
    steps = 0
    while limit(threads) == 4:
        threads.note(1.0, 0.9)
        steps += 1
    assert 50 < steps < 200
    torch.set_num_threads(1)
    assert limit(threads) == 1
