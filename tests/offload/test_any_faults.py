"""Random faults of the drive during random operations: after the faults the optimizer equals the one in memory."""

import errno
import itertools
import tempfile

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorferry.offload import MemoryBudgetError, OffloadError, offload_optimizer
from tests.offload.twins import Gradients, assert_equal, assert_same_state, parameters
from tests.support.effort import examples
from tests.support.faultfs import Fault

shapes = st.lists(
    st.sampled_from([(), (17,), (60, 90), (9000,), (40000,), (200, 300)]), min_size=1, max_size=5
)
makers = st.sampled_from(
    [
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        torch.optim.Adafactor,
    ]
)
skip = st.integers(0, 12)
faults = st.one_of(
    st.builds(
        Fault,
        op=st.sampled_from(["read", "write", "fsync", "fallocate", "open", "truncate", "flush"]),
        error=st.sampled_from([errno.EIO, errno.ENOSPC]),
        times=st.sampled_from([1, 2, -1]),
        skip=skip,
    ),
    # A limited number of times, because transfers of one byte are slow.
    st.builds(
        Fault,
        op=st.just("read"),
        short=st.sampled_from([0, 1, 100, 4096]),
        times=st.integers(1, 20),
        skip=skip,
    ),
)
deeds = st.sampled_from(["step", "step", "step", "state_dict", "load", "checkpoint", "restore"])


@settings(max_examples=examples(40))
@given(
    make=makers,
    of=shapes,
    budget=st.sampled_from([200 << 10, 400 << 10]),
    commit=st.sampled_from(["none", "step", "fsync"]),
    life=st.lists(st.tuples(deeds, st.lists(faults, max_size=3)), min_size=3, max_size=9),
    at_end=st.lists(faults, max_size=2),
)
@example(  # two writes fail at once, and retry() writes both again
    make=torch.optim.AdamW,
    of=[(9000,)],
    budget=200 << 10,
    commit="step",
    life=[("step", []), ("step", []), ("step", [Fault("write", error=errno.EIO, times=2)])],
    at_end=[],
)
def test_any_faults_change_nothing(faultfs, make, of, budget, commit, life, at_end):
    with tempfile.TemporaryDirectory(dir=faultfs.path) as root:
        try:
            live(faultfs, root, make, of, budget, commit, life, at_end)
        finally:
            faultfs.clear()


def live(faultfs, root, make, of, budget, commit, life, at_end):
    numbers = itertools.count()

    def offloaded(params):
        def made(nbytes):
            return offload_optimizer(
                make(params), f"{root}/state", memory_budget=nbytes, commit=commit
            )

        try:
            return made(budget)
        except MemoryBudgetError as error:
            return made(error.needed_nbytes)

    def kept():
        path = f"{root}/kept-{next(numbers)}"
        drive.checkpoint(path)
        return path

    def again_and_again(call, orders, retry=lambda: None):
        """Call with the faults; and again without them, if the call raised."""
        faultfs.order(*orders)
        try:
            call()
        except (OffloadError, OSError):  # StorageErrors are some
            faultfs.clear()
            retry()
            call()
        faultfs.clear()

    def step():
        nonlocal stepped
        if not stepped:
            stepped = True
            drive.step()

    wanted, params = parameters(of), parameters(of)
    memory, drive = make(wanted), offloaded(params)
    gradients = Gradients(wanted, params)
    for deed, orders in life:
        if deed == "step":
            gradients.give()
            memory.step()
            stepped = False
            again_and_again(step, orders, drive.retry)
        elif deed == "state_dict":
            again_and_again(drive.state_dict, orders, drive.retry)
        elif deed == "load":
            saved = memory.state_dict()
            again_and_again(lambda saved=saved: drive.load_state_dict(saved), orders)
        elif deed == "checkpoint":
            again_and_again(kept, orders, drive.retry)
        else:
            path = kept()
            again_and_again(lambda path=path: drive.restore(path), orders)
        drive.retry()  # includes the write-behind
        assert_equal(wanted, params)
        assert_same_state(memory, drive)
    if commit != "none":
        gradients.give()
        memory.step()
        drive.step()
        drive.close()
        fresh = parameters(of)
        drive = offloaded(fresh)
        again_and_again(drive.resume, at_end)
        drive.retry()
        assert_equal(wanted, fresh)
        assert_same_state(memory, drive)
    drive.close()
