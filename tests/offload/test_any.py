"""Any shapes, dtypes, budgets and missing gradients."""

import tempfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorferry.offload import MemoryBudgetError, offload_optimizer
from tests.offload.twins import Gradients, assert_equal, assert_same_state, parameters
from tests.support.effort import examples

shapes = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 9000)),
        st.tuples(st.integers(1, 90), st.integers(1, 90)),
        st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=9,
)
makers = st.sampled_from(
    [
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.Adam(params, amsgrad=True),
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, foreach=False),
        torch.optim.Adafactor,
    ]
)


@settings(max_examples=examples(12))
@given(
    make=makers,
    shapes=shapes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    budget=st.integers(1, 400 << 10),
    missing=st.lists(st.sets(st.integers(0, 8)), min_size=1, max_size=6),
    load=st.booleans(),
)
def test_any_of_it_is_as_in_memory(make, shapes, dtype, budget, missing, load):
    wanted, params = parameters(shapes, dtype), parameters(shapes, dtype)
    memory = make(wanted)
    with tempfile.TemporaryDirectory() as path:
        try:
            drive = offload_optimizer(make(params), path, memory_budget=budget)
        except MemoryBudgetError as error:
            drive = offload_optimizer(make(params), path, memory_budget=error.needed_nbytes)
        gradients = Gradients(
            wanted, params, missing=lambda step, index: index in missing[step % len(missing)]
        )
        for step in range(len(missing) + 2):
            gradients.give()
            memory.step()
            drive.step()
            if load and step == 1:
                saved = memory.state_dict()
                memory.load_state_dict(saved)
                drive.load_state_dict(saved)
        assert_equal(wanted, params)
        assert_same_state(memory, drive)
        drive.close()
