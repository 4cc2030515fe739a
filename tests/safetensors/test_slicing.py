"""Slices: equal to torch's indexing of the whole tensor, with reads of only the bytes that they need."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorferry.base import ranges
from tensorferry.safetensors import SafetensorError, SliceError, safe_open, slicing
from tests.safetensors.files import (
    assert_same,
    bytes_of,
    counting,
    saved,
    tensor_of,
)
from tests.support.effort import examples
from tests.support.page_cache import make_cold, make_warm

if TYPE_CHECKING:
    import pathlib

PAGE = 4096

# Rows of all sizes: less than a page, about the gaps that are read, and longer.
TENSORS = {
    "small": (torch.float32, (3, 5, 7, 11)),
    "vector": (torch.bfloat16, (1_000_003,)),
    "scalar": (torch.float64, ()),
    "tall": (torch.uint8, (4096, 700)),
    "wide": (torch.int16, (9, 150_001)),
    "deep": (torch.float8_e4m3fn, (6, 40, 9000)),
    "empty": (torch.int64, (4, 0, 3)),
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: tensor_of(dtype, *shape) for name, (dtype, shape) in TENSORS.items()}


@pytest.fixture
def path(directory: pathlib.Path, tensors: dict[str, torch.Tensor]) -> pathlib.Path:
    return saved(directory / "model.safetensors", tensors)


def integers(length: int, beyond: int = 0) -> st.SearchStrategy[int]:
    return st.integers(-length - beyond, max(length - 1, 0) + beyond)


@st.composite
def parts(draw: st.DrawFn, length: int) -> Any:
    kind = draw(st.sampled_from(["slice"] * 5 + ["integer"] * 3 + ["list", "wrong"]))
    bound = st.none() | integers(length, 3)
    if kind == "slice":
        step = st.none() | st.integers(1, 3) | st.integers(1, max(length, 1))
        return slice(draw(bound), draw(bound), draw(step))
    if kind == "list":
        return draw(st.lists(integers(max(length, 1)), max_size=5))
    if kind == "integer":
        return draw(integers(length))
    return draw(
        st.one_of(
            integers(length, 2),
            st.just(slice(None, None, -1)),
            st.just(slice(None, None, 0)),
            st.lists(integers(length, 1), max_size=3),
        )
    )


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    count = draw(st.integers(0, len(shape)))
    lengths = shape[:count]
    ellipsis = draw(st.none() | st.integers(0, count))
    if ellipsis is not None:
        lengths = shape[:ellipsis] + shape[len(shape) - (count - ellipsis) :]
    chosen: list[Any] = [draw(parts(length)) for length in lengths]
    if ellipsis is not None:
        chosen.insert(ellipsis, ...)
        chosen += [...] * draw(st.sampled_from([0, 0, 1, 2]))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        chosen.insert(draw(st.integers(0, len(chosen))), None)
    if len(chosen) == 1 and draw(st.booleans()):
        return chosen[0]
    return tuple(chosen)


def needed_at_most(tensor: torch.Tensor, index: Any) -> int:
    """Return the bytes of whole sectors that an index needs, including gaps below 64 KiB (for lists: on average).

    Several lists need all combinations of their positions.
    """
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    parts = index if isinstance(index, tuple) else (index,)
    if sum(isinstance(part, list) for part in parts) > 1:
        chosen = slicing.select(index, tuple(tensor.shape))
        assert chosen is not None
        for dimension, positions in enumerate(chosen.positions):
            numbers = numbers.index_select(dimension, torch.tensor(positions, dtype=torch.int64))
    else:
        numbers = numbers[index]
    numbers = numbers.reshape(-1).unique()
    if len(numbers) == 0:
        return 0
    begins = numbers * tensor.element_size()
    gaps = begins[1:] - begins[:-1] - tensor.element_size()
    longest = max((len(part) for part in parts if isinstance(part, list)), default=2)
    apart = gaps >= ranges.GAP_NBYTES * max(1, longest - 1)
    between = int(gaps[apart].sum())
    span = int(begins[-1] - begins[0]) + tensor.element_size()
    return span - between + (int(apart.sum()) + 1) * 2 * PAGE


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("deep", (..., slice(None, 3, 2))),
        ("deep", (..., [0, 5])),
        ("wide", (..., slice(0, 9, 4))),
        ("deep", (slice(None), slice(0, 40, 2), slice(100, 4000, 7))),
    ],
    ids=str,
)
def test_few_bytes_of_rows_far_apart_read_their_pages_only(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], name: str, index: Any
) -> None:
    make_cold(path)
    with safe_open(path, "pt", direct="always") as file, counting(path) as read:
        found = file.get_slice(name)[index]
    expected = tensors[name].view(torch.uint8) if name == "deep" else tensors[name]
    assert_same(found, expected[index].view(tensors[name].dtype))
    assert read.nbytes <= needed_at_most(tensors[name], index)


def torch_checks_no_lists(expected: torch.Tensor, index: Any) -> bool:
    """Return whether torch gives something for any positions in lists, since it has no elements; we check them."""
    parts = index if isinstance(index, tuple) else (index,)
    return expected.numel() == 0 and any(isinstance(part, list) for part in parts)


def test_lists_are_checked_where_nothing_is_chosen(path: pathlib.Path) -> None:
    """As NumPy does."""
    with safe_open(path, "pt") as file:
        for index in (([], [5]), (slice(0, 0), [9]), ([9], slice(0, 0))):
            with pytest.raises(SliceError, match="Invalid index"):
                file.get_slice("small")[index]
        assert list(file.get_slice("small")[[], [4]].shape) == [0, 7, 11]


@pytest.mark.parametrize("name", TENSORS)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_slices_are_torchs_and_read_what_they_need(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], name: str, data: st.DataObject
) -> None:
    tensor = tensors[name]
    index = data.draw(indices(tuple(tensor.shape)))
    state = data.draw(st.sampled_from(["cold", "warm", "half"]))
    direct = data.draw(st.sampled_from(["auto", "auto", "always", "never"]))
    make_cold(path)
    if state != "cold":
        make_warm(path, 0, 0 if state == "warm" else path.stat().st_size // 2)
    expected: Any
    try:
        expected = tensor.view(torch.uint8)[index] if tensor.dtype.itemsize == 1 else tensor[index]
        expected = expected.view(tensor.dtype)
    except (IndexError, ValueError) as error:
        with safe_open(path, "pt", direct=direct) as file, pytest.raises(type(error)) as ours:
            file.get_slice(name)[index]
        assert isinstance(ours.value, SafetensorError)
        return
    with safe_open(path, "pt", direct=direct) as file, counting(path) as read:
        if torch_checks_no_lists(expected, index):
            with contextlib.suppress(SliceError):
                file.get_slice(name)[index]
            return
        found = file.get_slice(name)[index]
    assert_same(found, expected)
    assert read.nbytes <= needed_at_most(tensor, index)
    if direct == "never" or (direct == "auto" and state == "warm"):
        assert read.nbytes == 0


@given(data=st.data())
@settings(max_examples=examples(40))
@example(data=None)
def test_numpys_slices_are_torchs_as_well(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], data: Any
) -> None:
    index = ([2, 0], ..., 1, [1, 3]) if data is None else data.draw(indices((3, 5, 7, 11)))
    try:
        expected = tensors["small"][index]
    except (IndexError, ValueError):
        return
    if torch_checks_no_lists(expected, index):
        return
    make_cold(path)
    with safe_open(path, "np") as file:
        found = file.get_slice("small")[index]
    assert found.shape == tuple(expected.shape)
    assert found.tobytes() == bytes_of(expected)


@given(data=st.data())
@settings(max_examples=examples(200))
def test_plans_are_bounded_and_cover_each_wanted_byte_once(data: st.DataObject) -> None:
    """Checks every byte, of small shapes in place of real ones of gigabytes."""
    itemsize = data.draw(st.sampled_from([1, 2, 8]))
    shape = tuple(data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3)))
    positions: list[Any] = []
    for length in shape:
        first = data.draw(st.integers(0, length - 1))
        step = data.draw(st.integers(1, length))
        positions.append(range(first, data.draw(st.integers(first, length - 1)) + 1, step))
        if data.draw(st.booleans()):
            positions[-1] = sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(ranges, "WINDOW_NBYTES", 1024)
        limits = {"gap_nbytes": 256, "tiny_nbytes": 64}
        plan = ranges.read_plan(tuple(positions), shape, itemsize, **limits)
        windows = list(plan.windows)
    assert all(a.begin + a.nbytes <= b.begin for a, b in itertools.pairwise(windows))
    if not plan.exact:
        assert max(window.nbytes for window in windows) <= 1024
    read = [
        byte for window in windows for byte in range(window.begin, window.begin + window.nbytes)
    ]
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for dimension, chosen in enumerate(positions):
        numbers = numbers.index_select(dimension, torch.tensor(list(chosen)))
    wanted = (numbers.reshape(-1, 1) * itemsize + torch.arange(itemsize)).reshape(-1).tolist()
    if plan.exact:
        assert read == wanted
    assert set(wanted) <= set(read)


def test_columns_of_a_large_matrix_are_picked_from_bounded_windows(
    directory: pathlib.Path,
) -> None:
    matrix = tensor_of(torch.int16, 20_000, 1_024)
    path = saved(directory / "matrix.safetensors", {"w": matrix})
    make_cold(path)
    with safe_open(path, "pt") as file, counting(path) as read:
        columns = file.get_slice("w")[:, 5:300:7]
    assert_same(columns, matrix[:, 5:300:7])
    assert columns.untyped_storage().nbytes() == columns.numel() * 2
    assert read.nbytes <= matrix.nbytes + 4 * PAGE


def test_rows_far_apart_are_read_alone(directory: pathlib.Path) -> None:
    matrix = tensor_of(torch.float32, 64, 100_000)
    path = saved(directory / "matrix.safetensors", {"w": matrix})
    make_cold(path)
    with safe_open(path, "pt") as file, counting(path) as read:
        rows = file.get_slice("w")[::16, 1000:5000]
    assert_same(rows, matrix[::16, 1000:5000])
    assert read.nbytes <= 4 * (16_000 + 2 * PAGE)


@pytest.mark.parametrize(
    "index", [torch.tensor([2, 0]), torch.arange(3) > 0, [[0, 1], [1, 2]], True, (0, [True] * 5)]
)
def test_masks_and_tensors_are_left_to_torch(
    path: pathlib.Path, tensors: dict[str, torch.Tensor], index: Any
) -> None:
    with safe_open(path, "pt") as file:
        assert_same(file.get_slice("small")[index], tensors["small"][index])


@pytest.mark.parametrize("index", ["a", 1.5, (0, {}), slice("a", None)])
def test_what_is_no_index_is_a_type_error(path: pathlib.Path, index: Any) -> None:
    with safe_open(path, "pt") as file, pytest.raises(TypeError):
        file.get_slice("small")[index]


def test_refusals_name_file_tensor_and_dimension(path: pathlib.Path) -> None:
    with safe_open(path, "pt") as file:
        weights = file.get_slice("small")
        with pytest.raises(slicing.SliceError) as caught:
            weights[0, -6]
        assert str(caught.value) == "Invalid index -6 for dimension 1 of size 5"  # safetensors'
        assert (caught.value.path, caught.value.name) == (str(path), "small")
        assert all(str(path) in note for note in getattr(caught.value, "__notes__", [str(path)]))
        with pytest.raises(slicing.SliceError, match="5 dimensions are indexed"):
            weights[0, 0, 0, 0, 0]
        with pytest.raises(slicing.SliceError, match="a step of -1 is not positive"):
            weights[::-1]


def test_an_error_keeps_its_file_and_tensor_when_it_goes_to_another_process() -> None:
    """They are in its notes, because its text is safetensors' own."""
    with pytest.raises(SliceError) as caught:
        slicing.select(9, (3,), "model", "x")
    again = pickle.loads(pickle.dumps(caught.value))
    assert vars(again) == vars(caught.value)
    assert str(again) == str(caught.value)
