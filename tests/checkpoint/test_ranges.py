"""Slabs of a slice: they contain every wanted element once, in order, in boxes that one read can fill."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.base.ranges import (
    contiguous_run,
    is_inside,
    memory_order,
    rows,
    slabs,
    strides_of,
)


def elements_by_slabs(
    sizes: Any, offsets: Any, lengths: Any, max_span: int, max_gap: int
) -> torch.Tensor:
    """Assemble a slice as the reader does, from slabs of numbered elements; -1 marks elements without a slab."""
    stored = torch.arange(torch.Size(sizes).numel())
    result = torch.full(lengths, -1)
    last = -1
    for slab in slabs(sizes, offsets, lengths, max_span=max_span, max_gap=max_gap):
        assert slab.begin > last
        assert 1 <= slab.span <= max(max_span, 1)
        last = slab.begin
        box = stored[slab.begin : slab.begin + slab.span].as_strided(
            slab.lengths, strides_of(sizes)
        )
        place = tuple(slice(o, o + n) for o, n in zip(slab.offsets, slab.lengths, strict=True))
        target = result[place] if place else result
        assert bool((target == -1).all()), "an element came twice"
        target.copy_(box)
    return result


def wanted(sizes: Any, offsets: Any, lengths: Any) -> torch.Tensor:
    """Return the result of torch's narrow()."""
    result = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        result = result.narrow(dim, offset, length)
    return result


def slices_of(sizes: tuple[int, ...]) -> Any:
    ranges = [[(o, n) for o in range(size + 1) for n in range(size - o + 1)] for size in sizes]
    for combination in itertools.product(*ranges):
        yield tuple(o for o, _ in combination), tuple(n for _, n in combination)


@pytest.mark.parametrize("sizes", [(), (1,), (4,), (2, 3), (3, 1, 2), (2, 2, 3), (1, 2, 1, 2)])
def test_every_slice_of_small_tensors(sizes: Any) -> None:
    for offsets, lengths in slices_of(sizes):
        for max_span, max_gap in ((1, 0), (2, 1), (5, 0), (100, 100)):
            result = elements_by_slabs(sizes, offsets, lengths, max_span, max_gap)
            assert torch.equal(result, wanted(sizes, offsets, lengths))
        run = contiguous_run(sizes, offsets, lengths)
        flat = wanted(sizes, offsets, lengths).reshape(-1)
        if run is None:
            assert not torch.equal(flat, torch.arange(len(flat)) + flat[0])
        else:
            assert torch.equal(flat, torch.arange(run[0], run[0] + run[1]))


@st.composite
def slices(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    sizes = draw(st.lists(st.integers(1, 9), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - o)) for size, o in zip(sizes, offsets, strict=True)]
    return tuple(sizes), tuple(offsets), tuple(lengths)


@given(slices(), st.integers(1, 3000), st.integers(0, 3000))
def test_slabs_bring_what_narrowing_gives(box: Any, max_span: int, max_gap: int) -> None:
    result = elements_by_slabs(*box, max_span, max_gap)
    assert torch.equal(result, wanted(*box))


@given(slices(), st.integers(0, 50))
def test_no_slab_spans_a_large_gap(box: Any, max_gap: int) -> None:
    sizes, offsets, lengths = box
    for slab in slabs(sizes, offsets, lengths, max_span=1 << 30, max_gap=max_gap):
        places = wanted(sizes, offsets, lengths)[
            tuple(slice(o, o + n) for o, n in zip(slab.offsets, slab.lengths, strict=True))
        ].reshape(-1)
        steps = places[1:] - places[:-1]
        assert slab.begin == places[0]
        assert slab.span == places[-1] - places[0] + 1
        assert len(steps) == 0 or int(steps.max()) - 1 <= max_gap


@given(
    st.lists(st.integers(1, 5), max_size=5).flatmap(
        lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))
    )
)
def test_memory_order_is_the_order_in_which_a_tensor_is_contiguous(case: Any) -> None:
    sizes, order = case
    tensor = torch.empty(sizes).permute(order)
    found = memory_order(tensor.size(), tensor.stride())
    assert found is not None
    assert tensor.permute(found).is_contiguous()


@pytest.mark.parametrize(
    ("sizes", "strides"), [((3,), (2,)), ((2, 2), (0, 1)), ((2, 2), (3, 1)), ((4, 2), (1, 1))]
)
def test_memory_order_of_what_does_not_fill_one_range_is_none(sizes: Any, strides: Any) -> None:
    assert memory_order(sizes, strides) is None


@pytest.mark.parametrize(
    ("offsets", "lengths", "inside"),
    [
        ((0, 0), (2, 3), True),
        ((1, 1), (1, 2), True),
        ((2, 3), (0, 0), True),
        ((0,), (2,), False),
        ((1, 0), (2, 3), False),
        ((-1, 0), (1, 1), False),
        ((0, 0), (-1, 1), False),
    ],
)
def test_is_inside(offsets: Any, lengths: Any, inside: bool) -> None:
    assert is_inside((2, 3), offsets, lengths) == inside


@pytest.mark.parametrize("sizes", [(), (1,), (4,), (2, 3), (3, 1, 2), (2, 2, 3), (1, 2, 1, 2)])
@pytest.mark.parametrize("kind", ["contiguous", "wider", "reversed", "strided"])
def test_rows_of_every_slice_of_small_tensors(sizes: Any, kind: str) -> None:
    """Rows move every element to its destination, and are as long as possible."""
    stored = torch.arange(torch.Size(sizes).numel())
    for offsets, lengths in slices_of(sizes):
        target = torch.full([*lengths, 2], -1)[..., 0]
        if kind == "contiguous":
            target = torch.full(lengths, -1)
        elif kind == "wider" and lengths:
            target = torch.full([*lengths[:-1], lengths[-1] + 1], -1)[..., :-1]
        elif kind == "reversed":
            target = torch.full(lengths[::-1], -1).permute([*range(len(lengths))][::-1])
        found = rows(sizes, offsets, lengths, target.stride())
        if target.numel() == 0:
            assert found is None
            continue
        assert found is not None
        for index in itertools.product(*map(range, lengths[: found.dims])):
            row = target[index]
            assert row.is_contiguous()
            assert row.numel() == found.length
            row.view(-1).copy_(stored[found.place(index) :][: found.length])
        assert torch.equal(target, wanted(sizes, offsets, lengths))
        if kind == "contiguous" and contiguous_run(sizes, offsets, lengths) is not None:
            assert found.dims == 0


def test_elements_that_share_memory_have_no_rows() -> None:
    assert rows((4, 3), (0, 0), (4, 3), (0, 1)) is None
    assert rows((4, 3), (0, 0), (4, 3), (2, 1)) is None
    assert rows((4, 3), (0, 0), (4, 3), (3, 1)) == (0, 12, 0, ())
    assert rows((4, 3), (0, 0), (1, 3), (0, 1)) == (0, 3, 0, ())
