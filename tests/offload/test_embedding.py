"""TableEmbedding and TableEmbeddingBag: the results equal torch's bit for bit, with any prefetch, cache or failure."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import pickle
import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.fx.experimental import proxy_tensor

import tensorferry.offload
from tensorferry.offload import TableEmbedding, TableEmbeddingBag, embedding, stream_weights
from tensorferry.offload.row_cache import RowCache
from tensorferry.transfer import pipeline
from tests.safetensors.files import tensor_of
from tests.support import interrupts
from tests.support.faultfs import Fault
from tests.support.forks import held_by_another_thread, passes_in_child
from tests.support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.faultfs import FaultFS

ROWS, WIDTH = 300, 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
IDS = st.lists(st.integers(0, ROWS - 1), max_size=40).map(
    lambda ids: torch.tensor(ids, dtype=torch.int64)
)


def stored(path: Path, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> torch.Tensor:
    """Write a table of finite numbers, and return it."""
    weight = torch.randn(ROWS, width).to(dtype)
    path.write_bytes(weight.view(torch.uint8).numpy().tobytes())
    return weight


def table_at(path: Path, weight: torch.Tensor) -> tensorferry.Table:
    return tensorferry.Table(path, weight.shape, weight.dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@pytest.fixture
def rows(directory: Path) -> Iterator[tuple[TableEmbedding, torch.Tensor]]:
    """An embedding with a small cache, and its weight."""
    weight = stored(directory / "table")
    made = TableEmbedding(table_at(directory / "table", weight), cache_nbytes="8KiB")
    yield made, weight
    made.close()


@given(
    dtype=st.sampled_from([*DTYPES, torch.int8, torch.complex64, torch.float8_e4m3fn]),
    int32=st.booleans(),
    cache_nbytes=st.sampled_from([0, 100, 3000, 1 << 20]),
    steps=st.lists(st.tuples(st.sampled_from(["ahead", "now", "both"]), IDS), max_size=12),
)
def test_rows_are_those_of_torchs_whatever_was_prefetched(
    directory: Path, dtype: Any, int32: bool, cache_nbytes: int, steps: Any
) -> None:
    weight = tensor_of(dtype, ROWS, WIDTH)
    (directory / "table").write_bytes(weight.view(torch.uint8).numpy().tobytes())
    made = TableEmbedding(table_at(directory / "table", weight), cache_nbytes=cache_nbytes)
    try:
        for when, ids in steps:
            wanted = ids.reshape(2, -1) if len(ids) % 2 == 0 else ids
            wanted = wanted.int() if int32 else wanted
            if when != "now":
                made.prefetch(wanted)
            if when != "ahead":
                found = made(wanted)
                assert found.dtype == dtype
                assert found.shape == (*wanted.shape, WIDTH)
                assert torch.equal(found.view(torch.uint8), weight[wanted].view(torch.uint8))
                found.view(torch.uint8).fill_(7)  # it is the caller's
    finally:
        made.close()


@given(
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding=st.sampled_from([None, 0, 2, -1]),
    last=st.booleans(),
    bags=st.lists(st.lists(st.sampled_from([0, 1, 2, 77, ROWS - 1]), max_size=5), min_size=1),
    weighted=st.booleans(),
    width=st.sampled_from([1, 7, 64]),
)
def test_bags_are_those_of_torchs(
    directory: Path,
    dtype: Any,
    mode: Any,
    padding: int | None,
    last: bool,
    bags: list[list[int]],
    weighted: bool,
    width: int,
) -> None:
    weight = stored(directory / "table", dtype, width)
    options: Any = {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    ours = TableEmbeddingBag(table_at(directory / "table", weight), cache_nbytes=3000, **options)
    theirs = nn.EmbeddingBag.from_pretrained(weight, **options)
    ids = ids_of(*itertools.chain(*bags))
    ends = list(itertools.accumulate(map(len, bags)))
    offsets = torch.tensor([0, *ends] if last else [0, *ends[:-1]])
    factors = (
        torch.randn(len(ids)).to(dtype).requires_grad_() if weighted and mode == "sum" else None
    )
    ours.prefetch(ids)
    for _ in range(2):
        found, wanted = ours(ids, offsets, factors), theirs(ids, offsets, factors)
        assert same(found, wanted)
    if factors is not None and len(ids):
        (one,), (other,) = (torch.autograd.grad(all_.sum(), factors) for all_ in (found, wanted))
        assert same(one, other)
    ours.close()


def test_bags_of_one_length_and_what_torch_refuses(directory: Path) -> None:
    weight = stored(directory / "table")
    ours = TableEmbeddingBag(table_at(directory / "table", weight), padding_idx=5)
    ids = torch.randint(0, 10, (6, 8))
    assert same(ours(ids), nn.EmbeddingBag.from_pretrained(weight, padding_idx=5)(ids))
    with pytest.raises(ValueError, match="offsets"):
        ours(ids[0])
    with pytest.raises(NotImplementedError, match="per_sample_weights"):
        ours(ids, per_sample_weights=torch.ones(6, 8))
    with pytest.raises(ValueError, match="mode: 'min'"):
        TableEmbeddingBag(ours._reading_arguments[0], mode="min")
    assert "mode='mean'" in repr(ours)
    ours.close()


# Failures

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["ahead", "now"]), IDS),
        st.tuples(st.just("fail"), st.integers(1, 3)),
        st.tuples(st.just("heal"), st.none()),
    ),
    max_size=15,
)


@given(cache_nbytes=st.sampled_from([0, 5000]), steps=_STEPS)
def test_rows_are_right_or_the_pass_raises_whatever_fails_when(
    faultfs: FaultFS, cache_nbytes: int, steps: Any
) -> None:
    faultfs.clear()
    weight = stored(faultfs.backing / "table")
    made = TableEmbedding(table_at(faultfs.path / "table", weight), cache_nbytes=cache_nbytes)
    failing = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a dropped future must not warn of a failure
        for step, what in steps:
            if step == "ahead":
                made.prefetch(what)
            elif step == "fail":
                faultfs.order(Fault("read", error=errno.EIO, times=what))
                failing = True
            elif step == "heal":
                faultfs.clear()
                failing = False
            else:
                expected = [tensorferry.StorageError] if failing else []
                with contextlib.suppress(*expected):
                    assert same(made(what), weight[what])
        faultfs.clear()
        assert same(made(ids_of(1, 2, 3)), weight[1:4])
        made.close()


def test_a_failed_prefetch_is_read_again_and_only_a_second_failure_is_raised(
    faultfs: FaultFS,
) -> None:
    weight = stored(faultfs.backing / "table")
    made = TableEmbedding(table_at(faultfs.path / "table", weight))
    ids = ids_of(3, 1, 3)  # of one page
    for times, raised in ((1, 0), (2, 1)):
        faultfs.order(Fault("read", error=errno.EIO, times=times))
        made.prefetch(ids)
        made._reading._prefetched()[0]._future.exception()  # type: ignore[union-attr]
        with pytest.raises(tensorferry.StorageError) if raised else contextlib.nullcontext():
            assert same(made(ids), weight[ids])
        assert faultfs.hits() == times
        assert same(made(ids), weight[ids])
    made.close()


def test_a_truncated_file_is_told(directory: Path) -> None:
    weight = stored(directory / "table")
    made = TableEmbedding(table_at(directory / "table", weight))
    with open(directory / "table", "r+b") as file:
        file.truncate(8192)
    assert not made.prefetch(ids_of(299))
    with pytest.raises(tensorferry.ShortReadError):
        made(ids_of(299))
    assert same(made(ids_of(2)), weight[[2]])
    made.close()


# Prefetching


def test_a_prefetch_does_not_wait_and_what_it_has_read_is_not_read_again(faultfs: FaultFS) -> None:
    weight = stored(faultfs.backing / "table")
    made = TableEmbedding(table_at(faultfs.path / "table", weight))
    faultfs.order(Fault("read", hold=True))
    assert made.prefetch(ids_of(5, 200, 5))
    assert made.prefetch(ids_of(6, 7))
    faultfs.await_held()
    faultfs.release()
    for batch in made._reading._prefetched():
        batch.wait()
    faultfs.order(Fault("read", error=errno.EIO))
    assert same(made(ids_of(7)), weight[[7]])  # a part of one
    assert same(made(ids_of(5, 200, 5)), weight[[5, 200, 5]])
    assert same(made(ids_of(6)), weight[[6]])
    assert faultfs.hits() == 0
    assert made.stats() == {"rows": 5, "prefetched_rows": 5, "cached_rows": 0}
    with pytest.raises(tensorferry.StorageError):  # all prefetched rows have been used
        made(ids_of(6))
    faultfs.clear()
    made.close()


def test_prefetches_are_bounded_and_those_that_nobody_came_for_go(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORFERRY_READ_AHEAD", str(3 * 10 * WIDTH * 4))
    weight = stored(directory / "table")
    made = TableEmbedding(table_at(directory / "table", weight))
    batches = [torch.arange(at, at + 10) for at in range(0, 100, 10)]
    assert [made.prefetch(ids) for ids in batches[:4]] == [True, True, True, False]
    assert same(made(batches[0]), weight[:10])
    assert made.prefetch(batches[3])
    assert not made.prefetch(batches[4])
    assert not made.prefetch(torch.arange(ROWS))
    for _ in range(3):  # other ids than the prefetched ones
        assert same(made(batches[9]), weight[90:100])
    assert made.prefetch(batches[5])
    assert same(made(batches[5]), weight[50:60])
    assert made.prefetch(ids_of())
    made.close()
    many = TableEmbedding(table_at(directory / "table", weight))
    assert [many.prefetch(ids_of(at)) for at in range(20)] == [True] * 16 + [False] * 4
    assert same(many(torch.arange(20)), weight[:20])
    assert many.prefetch(ids_of(20))
    many.close()
    larger = TableEmbedding(table_at(directory / "table", weight))
    assert larger.prefetch(torch.arange(ROWS))  # a single one may be
    assert same(larger(torch.arange(ROWS)), weight)
    larger.close()


def test_ids_that_are_written_over_after_a_prefetch(rows: Any) -> None:
    made, weight = rows
    ids = ids_of(1, 2, 3)
    made.prefetch(ids)
    ids += 10
    assert same(made(ids), weight[[11, 12, 13]])
    assert same(made(ids - 10), weight[[1, 2, 3]])


def test_a_prefetch_of_inference_mode_serves_a_training(rows: Any) -> None:
    made, weight = rows
    layer = nn.Linear(WIDTH, 3)
    with torch.inference_mode():
        made.prefetch(ids_of(1, 2))
        made.prefetch(ids_of(3, 4))
        made(ids_of(1, 2))
    found = made(ids_of(3, 4))
    assert not found.requires_grad
    layer(found).sum().backward()
    assert layer.weight.grad is not None
    assert same(made.train()(ids_of(3)), weight[[3]])


# Requests of a module that are refused or ignored


def test_training_is_refused(rows: Any) -> None:
    made, weight = rows
    assert list(made.parameters()) == []
    assert made.state_dict() == {}
    assert not hasattr(made, "weight")
    for call in (
        lambda: made.weight,
        lambda: setattr(made, "weight", nn.Parameter(weight)),
        lambda: setattr(made, "weight", weight),
    ):
        with pytest.raises(AttributeError, match="stays in its file"):
            call()
    with pytest.raises(RuntimeError, match="cannot be trained"):
        made.requires_grad_()
    model = nn.Sequential(made).requires_grad_().requires_grad_(False)
    made.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.weight"):
        model.load_state_dict({"0.weight": weight})
    assert model.load_state_dict({"0.weight": weight}, strict=False).unexpected_keys == ["0.weight"]


def test_conversions_convert_the_rows(rows: Any) -> None:
    made, weight = rows
    ids = ids_of(9, 9, 250)
    model = nn.Sequential(made)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert same(model.to(dtype)(ids), weight.to(dtype)[ids])
    assert same(model.float()(ids), weight[ids])
    assert same(copy.deepcopy(model).half()(ids), weight.half()[ids])
    assert same(model(ids), weight[ids])


def test_a_copy_has_a_cache_of_its_own_and_pickles_are_refused(rows: Any) -> None:
    made, weight = rows
    made.prefetch(ids_of(8))
    model = nn.ModuleList([made, made])
    copied = copy.deepcopy(model)
    assert copied[0] is copied[1]
    assert copied[0]._reading is not made._reading
    assert same(copied[0](ids_of(8)), weight[[8]])
    assert copied[0].stats()["prefetched_rows"] == 0
    for refused in (lambda: pickle.dumps(model), lambda: copy.copy(made)):
        with pytest.raises(TypeError, match="cannot be pickled"):
            refused()
    made.close()
    with pytest.raises(ValueError, match="closed"):
        copied[0](ids_of(8))
    with pytest.raises(ValueError, match="closed"):
        made.prefetch(ids_of(8))


def test_arguments_are_checked(directory: Path) -> None:
    weight = stored(directory / "table")
    table = table_at(directory / "table", weight)
    assert TableEmbedding(table, padding_idx=-1).padding_idx == ROWS - 1
    assert repr(TableEmbedding(table, padding_idx=3)) == "TableEmbedding(300, 24, padding_idx=3)"
    named = tensorferry.Table(directory / "table", weight.shape, "float32")
    with torch.device("meta"):
        made = TableEmbedding(named)
    assert same(made(ids_of(4)), weight[[4]])
    flat = tensorferry.Table(directory / "table", [10], torch.float32)
    strange = tensorferry.Table(directory / "table", [2, 2], [("a", "i4")])
    for options, error in (
        ({"table": weight}, "table: Tensor is not"),
        ({"table": flat}, r"table: expected two dimensions.*got shape \[10\]"),
        ({"table": strange}, "numpy.void"),
        ({"padding_idx": ROWS}, "padding_idx: 300"),
        ({"cache_nbytes": "many"}, "cache_nbytes: 'many'"),
        ({"cache_nbytes": -1}, "cache_nbytes: -1"),
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            TableEmbedding(**{"table": table, **options})  # type: ignore[arg-type]
    for one in (table, named, flat, strange):
        one.close()


@pytest.mark.parametrize("call", ["forward", "prefetch"])
def test_ids_are_checked_before_anything_is_read(rows: Any, call: str) -> None:
    made, _ = rows
    made._reading_arguments[0].close()  # a read would fail
    asked = getattr(made, call)
    for ids, error, told in (
        (ids_of(0, -1), IndexError, "ids: -1 is outside of a table of 300 rows"),
        (ids_of(ROWS), IndexError, "ids: 300 is outside"),
        (torch.tensor([1.0]), TypeError, "ids: torch.float32"),
        (torch.tensor([True]), TypeError, "ids: torch.bool"),
        ([1], TypeError, "ids: list"),
    ):
        with pytest.raises(error, match=told):
            asked(ids)


def test_what_records_operations_is_refused_and_compile_leaves_it_out(rows: Any) -> None:
    made, weight = rows
    ids = ids_of(1, 2)
    with pytest.raises(RuntimeError, match="traced or exported"):
        torch.jit.trace(made, ids)
    with pytest.raises(RuntimeError, match="traced or exported"):
        proxy_tensor.make_fx(made)(ids)

    @torch.compile(backend="eager")
    def compiled(ids: torch.Tensor) -> torch.Tensor:
        made.prefetch(ids + 1)
        return made(ids) + 1

    for at in range(4):
        assert same(compiled(ids + at), weight[ids + at] + 1)
    assert made.stats()["prefetched_rows"] == 7


# Sources of the weight


def test_from_a_models_files(directory: Path) -> None:
    first, second = torch.randn(100, 8), torch.randn(50, 8)
    save_file({"a.weight": first}, directory / "model-00001-of-00002.safetensors")
    save_file({"b.weight": second}, directory / "model-00002-of-00002.safetensors")
    ids = ids_of(149, 0, 99, 100)
    made = TableEmbedding.from_safetensors(directory, ["a.weight", "b.weight"], cache_nbytes="1KiB")
    assert same(made(ids), torch.cat([first, second])[ids])
    made.close()
    bag = TableEmbeddingBag.from_safetensors(directory, "b.weight", mode="sum")
    assert same(bag(ids_of(1, 2)[None]), (second[1] + second[2])[None])
    bag.close()
    with pytest.raises(TypeError, match="max_norm"):
        TableEmbedding.from_safetensors(directory, "a.weight", max_norm=2.0)


def test_in_a_model_whose_other_weights_are_streamed(directory: Path) -> None:
    def new_model() -> nn.Module:
        layers = (nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 4))
        return nn.Sequential(*layers).eval().requires_grad_(False)

    whole = new_model()
    save_file(whole.state_dict(), directory / "model.safetensors")
    with torch.device("meta"):
        model = new_model()
    model[0] = TableEmbedding.from_safetensors(directory, "0.weight")  # type: ignore[operator]
    with (
        warnings.catch_warnings(action="error"),
        stream_weights(model, directory, memory_budget="1MiB"),
    ):
        assert same(model(ids_of(5, 99)), whole(ids_of(5, 99)))
    model[0].close()  # type: ignore[operator]


def test_names_of_the_package() -> None:
    assert {"TableEmbedding", "TableEmbeddingBag"} <= set(dir(tensorferry.offload))
    with pytest.raises(AttributeError, match="TableLinear"):
        tensorferry.offload.TableLinear  # noqa: B018


# Threads, signals, forks


def test_threads_get_their_own_rows(rows: Any) -> None:
    made, weight = rows

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(150):
            ids = ids_of(*(min(draw.randrange(ROWS), draw.randrange(ROWS)) for _ in range(30)))
            if draw.random() < 0.7:
                made.prefetch(ids)
            ids = ids[draw.choice([slice(None), slice(10), slice(5, None)])]
            found = made(ids)
            assert same(found, weight[ids])
            found.fill_(number)

    in_threads(4, work)
    assert made.stats()["cached_rows"] > 0


def test_a_pass_after_an_interruption_anywhere_is_right(rows: Any) -> None:
    made, weight = rows
    sources = embedding.__file__.rsplit("/", 1)[0], pipeline.__file__
    draw = random.Random(1)

    def ids() -> torch.Tensor:
        return ids_of(*(draw.randrange(40) for _ in range(12)))

    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in itertools.count(1, 3):
        one, other = ids(), ids()
        with (
            interrupts.At(number, sources, interrupt) as at,
            contextlib.suppress(KeyboardInterrupt),
        ):
            made.prefetch(one)
            made.prefetch(other)
            made(other[:4])
            made(one)
        for wanted in (one, other, ids(), torch.arange(40)):
            assert same(made(wanted), weight[wanted]), at.happened_in
        if at.happened_in is None:
            break
    assert number > 50


def test_a_signal_handler_may_look_up_rows_at_any_moment(rows: Any) -> None:
    made, weight = rows
    sources = embedding.__file__.rsplit("/", 1)[0]
    draw = random.Random(2)

    def check(low: int, high: int) -> None:
        ids = ids_of(*(draw.randrange(low, high) for _ in range(60)))
        assert same(made(ids), weight[ids])

    def handle() -> None:
        for _ in range(3):  # so often that others' rows go
            check(0, ROWS)

    for number in itertools.count(1, 5):
        made.prefetch(torch.arange(60, 70))
        with interrupts.At(number, sources, handle) as at:
            check(0, 60)
            check(0, 70)
        if at.happened_in is None:
            break
    assert number > 50


def test_a_forked_child_is_refused_and_the_parent_goes_on(rows: Any) -> None:
    made, weight = rows
    made.prefetch(ids_of(1, 2, 200))

    def work() -> None:
        for call in (made, made.prefetch, copy.deepcopy(made)):
            with pytest.raises(RuntimeError, match="fork"):
                call(ids_of(1))
        made.close()

    with held_by_another_thread(made._reading._pipeline.lock):
        passes_in_child(work)
    assert same(made(ids_of(1, 2, 200)), weight[[1, 2, 200]])
    assert made.stats()["prefetched_rows"] == 3


def test_a_module_that_is_dropped_with_reads_on_their_way_goes_at_once(faultfs: FaultFS) -> None:
    weight = stored(faultfs.backing / "table")
    made = TableEmbedding(table_at(faultfs.path / "table", weight))
    faultfs.order(Fault("read", hold=True))
    made.prefetch(ids_of(3))
    faultfs.await_held()
    with warnings.catch_warnings(action="error"):
        del made
        gc.collect()
    faultfs.release()


# The cache


@given(
    places=st.integers(0, 40),
    batches=st.lists(st.lists(st.integers(0, 99), max_size=30), max_size=20),
)
def test_a_cache_gives_the_rows_it_was_offered_in_its_bytes(
    places: int, batches: list[list[int]]
) -> None:
    weight = np.arange(100 * 4, dtype=np.uint8).reshape(100, 4) * 3
    nbytes = places * 29
    cache = RowCache(nbytes, 4)
    held: set[int] = set()
    for batch in batches:
        ids = np.array(batch, np.int64)
        out = np.zeros((len(ids), 4), np.uint8)
        here = cache.look_up(ids, out)
        assert set(ids[here].tolist()) <= held
        assert (out[here] == weight[ids[here]]).all()
        assert not out[~here].any()
        cache.offer(ids[~here], weight[ids[~here]])
        held |= set(batch)
    arrays = [one for one in vars(cache).values() if isinstance(one, np.ndarray)]
    assert sum(one.nbytes for one in arrays) <= nbytes


def test_a_scan_does_not_displace_what_is_wanted_often() -> None:
    cache = RowCache(1000 * (8 + 25), 8)
    often = np.arange(400) * 7919
    for at in range(60):
        ids = np.concatenate([often, 10_000_000 + np.arange(at * 2000, at * 2000 + 2000)])
        rows = ids.view(np.uint8).reshape(-1, 8)
        here = cache.look_up(ids, np.zeros_like(rows))
        cache.offer(ids[~here], rows[~here])
    assert here[:400].mean() > 0.95


def test_what_is_no_longer_wanted_goes() -> None:
    cache = RowCache(1000 * (8 + 25), 8)
    for first in (0, 100_000):
        for _ in range(20):
            ids = first + np.arange(700)
            rows = ids.view(np.uint8).reshape(-1, 8)
            here = cache.look_up(ids, np.zeros_like(rows))
            cache.offer(ids[~here], rows[~here])
        assert here.mean() > 0.85
