"""Random sequences of an optimizer's operations, with random parameters."""

import tempfile

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tensorferry.offload import MemoryBudgetError, offload_optimizer
from tests.offload.twins import assert_equal, assert_same_state, copies, parameters
from tests.support.effort import examples

shapes = st.lists(
    st.one_of(
        st.sampled_from([(), (0,), (3, 0)]),
        st.tuples(st.integers(1, 9000)),
        st.tuples(st.integers(1, 90), st.integers(1, 90)),
        st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=5,
)
budgets = st.integers(1, 400 << 10)
rates = st.floats(0, 0.1)
makers = st.sampled_from(
    [
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.Adam(params, amsgrad=True),
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=False),
        lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.ASGD,
        torch.optim.Adafactor,
    ]
)


class Life(RuleBasedStateMachine):
    """An optimizer in memory and an offloaded one, to which the same happens."""

    @initialize(
        make=makers,
        shapes=shapes,
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        budget=budgets,
        commit=st.sampled_from(["none", "step"]),
    )
    def begin(self, make, shapes, dtype, budget, commit):
        self.directory = tempfile.TemporaryDirectory()
        self.make, self.dtype, self.commit = make, dtype, commit
        self.random = torch.Generator().manual_seed(1)
        self.kept = 0
        self.committed = False  # whether the stored state is the current one
        self.memory = make(self.parameters(shapes))
        self.drive = self.offloaded(make(self.parameters(shapes)), budget)

    def parameters(self, shapes):
        if self.make is torch.optim.Adafactor:  # divides by the number of elements
            shapes = [tuple(max(size, 1) for size in shape) for shape in shapes]
        return parameters(shapes, self.dtype)

    def offloaded(self, optimizer, budget):
        path, options = f"{self.directory.name}/state", {"commit": self.commit}
        try:
            return offload_optimizer(optimizer, path, memory_budget=budget, **options)
        except MemoryBudgetError as error:
            return offload_optimizer(optimizer, path, memory_budget=error.needed_nbytes, **options)

    def another(self, budget):
        """Close the offloaded optimizer; return another one with as many parameters, of the same values."""
        self.drive.close()
        groups = self.drive.param_groups
        optimizer = self.make([{"params": copies(group["params"])} for group in groups])
        return self.offloaded(optimizer, budget)

    @rule(missing=st.sets(st.integers(0, 9)))
    def step(self, missing):
        pairs = zip(params_of(self.memory), params_of(self.drive), strict=True)
        for index, (wanted, param) in enumerate(pairs):
            grad = torch.randn(param.shape, generator=self.random).to(param.dtype)
            wanted.grad = None if index in missing else grad
            param.grad = None if index in missing else grad.clone()
        self.memory.step()
        self.drive.step()
        self.committed = self.commit == "step"

    @rule(rate=rates)
    def change_rates(self, rate):
        for group in (*self.memory.param_groups, *self.drive.param_groups):
            group["lr"] = rate
        self.committed = False

    @precondition(lambda self: len(self.memory.param_groups) < 4)
    @rule(shapes=shapes, rate=rates)
    def add_group(self, shapes, rate):
        try:
            self.drive.add_param_group({"params": self.parameters(shapes), "lr": rate})
        except MemoryBudgetError:  # the optimizer has not changed
            return
        self.memory.add_param_group({"params": self.parameters(shapes), "lr": rate})
        self.committed = False

    @rule(ours=st.booleans())
    def load(self, ours):
        saved = (self.drive if ours else self.memory).state_dict()
        defaults = dict(self.memory.defaults)
        self.memory.load_state_dict(saved)
        # torch adds a value to the defaults, which later groups would get.
        self.memory.defaults = defaults
        self.drive.load_state_dict(saved)
        self.committed = False

    @rule(budget=budgets)
    def restore_by_another(self, budget):
        self.kept += 1
        path = f"{self.directory.name}/kept-{self.kept}"
        self.drive.checkpoint(path)
        self.drive = self.another(budget)
        self.drive.discard_committed()
        self.drive.restore(path)
        self.committed = False

    @precondition(lambda self: self.committed)
    @rule(budget=budgets)
    def resume_by_another(self, budget):
        for param in params_of(self.drive):
            param.data.zero_()
        self.drive = self.another(budget)
        assert self.drive.resume() is not None

    @invariant()
    def parameters_are_the_same(self):
        assert_equal(params_of(self.memory), params_of(self.drive))

    def teardown(self):
        if hasattr(self, "drive"):
            assert_same_state(self.memory, self.drive)
            self.drive.close()
            self.directory.cleanup()


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def test_any_of_it_is_as_in_memory():
    run_state_machine_as_test(
        Life, settings=settings(max_examples=examples(25), stateful_step_count=12)
    )
