"""FileSystemReader in one process: it loads all saved objects, into every kind of destination."""

from __future__ import annotations

import copy
import dataclasses
import errno
import inspect
import itertools
import pickle
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import LoadPlan

import tensorferry
from tensorferry.base.file_locks import writer_lock
from tensorferry.checkpoint import CheckpointError, FileSystemReader, FileSystemWriter
from tensorferry.checkpoint.storage import destinations, reading
from tensorferry.checkpoint.storage import reader as reader_module
from tensorferry.transfer import pipeline
from tests.checkpoint.damage import flip
from tests.checkpoint.loads import LEVELS, WRITERS, Targets, fails, item, load, read_slices
from tests.checkpoint.states import (
    LAYOUTS,
    assert_same,
    bits_of,
    empty_like,
    metadata_of,
    mixed_state,
    save,
)
from tests.support import child
from tests.support.data import SEED
from tests.support.faultfs import Fault
from tests.support.leaks import nothing_leaks

if TYPE_CHECKING:
    import io
    import pathlib

    from torch.distributed.checkpoint.planner import ReadItem

    from tests.support.faultfs import FaultFS


@pytest.mark.parametrize("verify", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_all_that_was_saved_is_loaded(
    directory: pathlib.Path, writer: Any, layout: dict[str, Any], verify: Any
) -> None:
    state = mixed_state(3)
    dcp.save(state, storage_writer=writer(directory, **layout), no_dist=True)
    loaded = empty_like(state)
    load(loaded, directory, verify=verify)
    assert_same(loaded, state)


def test_torchs_own_load_takes_the_reader_again_and_again(directory: pathlib.Path) -> None:
    reader = FileSystemReader(directory / "0")
    for step in range(3):
        save(mixed_state(step), directory / str(step))
        loaded = empty_like(mixed_state(step))
        dcp.load(loaded, checkpoint_id=directory / str(step), storage_reader=reader, no_dist=True)
        assert_same(loaded, mixed_state(step))
        assert str(reader.checkpoint_id) == str(directory / str(step))


def test_ranks_that_saved_alone_are_loaded_alone(directory: pathlib.Path) -> None:
    writer = FileSystemWriter(directory)
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("this torch cannot save without collectives")
    dcp.save(mixed_state(), storage_writer=writer, no_dist=True, use_collectives=False)
    assert (directory / "__0.metadata").exists()
    loaded = empty_like(mixed_state())
    load(loaded, directory)
    assert_same(loaded, mixed_state())


# --- slices and destinations, by plans that the tests make ---


def narrowed(tensor: torch.Tensor, offsets: Any, lengths: Any) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


DRAWN = torch.Generator().manual_seed(SEED)
STORED = {
    "matrix": torch.randn(700, 900, generator=DRAWN),
    "cube": torch.randint(-(2**40), 2**40, (40, 50, 60), generator=DRAWN),
    "transposed": torch.randn(800, 90, generator=DRAWN).t(),
    "permuted": torch.randn(30, 40, 50, dtype=torch.float64, generator=DRAWN).permute(2, 0, 1),
    "channels_last": torch.randn(4, 8, 30, 20, generator=DRAWN).to(
        memory_format=torch.channels_last
    ),
    "half": torch.randn(333, 77, 5, generator=DRAWN).half(),
    "flat": torch.randint(0, 256, (3_000_001,), dtype=torch.uint8, generator=DRAWN),
    "flags": torch.rand(5000, 11, generator=DRAWN) > 0.5,
    "scalar": torch.tensor(2.5),
    "complex": torch.randn(40, 30, dtype=torch.complex64, generator=DRAWN),
}


@pytest.fixture(scope="module", params=WRITERS.values(), ids=WRITERS.keys())
def stored(request: Any, tmp_path_factory: Any) -> pathlib.Path:
    path: pathlib.Path = tmp_path_factory.mktemp("stored")
    dcp.save(STORED, storage_writer=request.param(path), no_dist=True)
    return path


DESTINATIONS = ["contiguous", "narrowed", "permuted", "strided", "other dtype", "parameter"]


def destination(kind: str, lengths: Any, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of one kind."""
    if kind == "narrowed" and lengths:
        return torch.zeros([lengths[0] + 3, *lengths[1:]], dtype=dtype)[2:-1]
    if kind == "permuted":
        order = list(reversed(range(len(lengths))))
        return torch.zeros(list(reversed(lengths)), dtype=dtype).permute(order)
    if kind == "strided":
        return torch.zeros([*lengths, 3], dtype=dtype)[..., 1]
    if kind == "other dtype":
        return torch.zeros(lengths, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    if kind == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        return torch.nn.Parameter(torch.zeros(lengths, dtype=dtype))
    return torch.zeros(lengths, dtype=dtype)


@st.composite
def slices(draw: st.DrawFn) -> tuple[str, Any, Any, str]:
    name = draw(st.sampled_from(sorted(STORED)))
    offsets, lengths = [], []
    for size in STORED[name].size():
        offset = draw(st.one_of(st.just(0), st.integers(0, size)))
        offsets.append(offset)
        lengths.append(draw(st.one_of(st.just(size - offset), st.integers(0, size - offset))))
    return name, tuple(offsets), tuple(lengths), draw(st.sampled_from(DESTINATIONS))


@pytest.fixture(params=[False, True], ids=["usual sizes", "small sizes"])
def small_sizes(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits make rows go directly to their destinations, and split tensors into several runs and slabs."""
    if request.param:
        monkeypatch.setattr(reading, "RUN_NBYTES", 1 << 18)
        monkeypatch.setattr(reading, "_MEMORY_NBYTES", 1 << 20)
        monkeypatch.setattr(pipeline, "_MAX_IN_FLIGHT", 3)
        monkeypatch.setattr(destinations, "_MIN_ROW_NBYTES", 512)
        monkeypatch.setattr(destinations, "_SLAB_NBYTES", 10_000)


@given(wanted=st.lists(slices(), min_size=1, max_size=6), verify=st.sampled_from(LEVELS))
def test_any_slices_come_to_any_destinations(
    stored: pathlib.Path,
    small_sizes: None,
    wanted: list[tuple[str, Any, Any, str]],
    verify: str,
) -> None:
    targets = [destination(kind, n, STORED[name].dtype) for name, _, n, kind in wanted]
    plan = [(name, o, n, t) for (name, o, n, _), t in zip(wanted, targets, strict=True)]
    read_slices(stored, plan, verify)
    for (name, offsets, lengths, _), target in zip(wanted, targets, strict=True):
        expected = narrowed(STORED[name], offsets, lengths).to(target.dtype)
        assert bits_of(target) == bits_of(expected), name


def test_a_single_element_may_have_any_strides(stored: pathlib.Path) -> None:
    targets = [torch.zeros(9).as_strided((1, 1), strides) for strides in ((3, 3), (9, 2), (1, 5))]
    read_slices(stored, [("matrix", (7, 9), (1, 1), target) for target in targets])
    for target in targets:
        assert target.item() == STORED["matrix"][7, 9]


def test_what_lies_beside_a_destination_stays(stored: pathlib.Path) -> None:
    whole = torch.full((20, 900), 7.0)
    read_slices(stored, [("matrix", (100, 0), (10, 900), whole[5:15])])
    assert bits_of(whole[5:15]) == bits_of(STORED["matrix"][100:110])
    assert bool((whole[:5] == 7).all())
    assert bool((whole[15:] == 7).all())


@pytest.mark.parametrize("layout", ["strided", "permuted", "other dtype"])
def test_inference_tensors_are_filled_outside_of_it(stored: pathlib.Path, layout: str) -> None:
    with torch.inference_mode():
        target = destination(layout, (700, 900), torch.float32)
    read_slices(stored, [("matrix", (0, 0), (700, 900), target)])
    assert bits_of(target) == bits_of(STORED["matrix"].to(target.dtype))


def test_inference_tensors_get_what_only_torch_can_read(directory: pathlib.Path) -> None:
    state = {"a": torch.eye(3).to_sparse()}
    dcp.save(state, storage_writer=FileSystemWriter(directory), no_dist=True)
    with torch.inference_mode():
        loaded = {"a": torch.zeros(3, 3).to_sparse()}
    load(loaded, directory)
    assert torch.equal(loaded["a"].to_dense(), torch.eye(3))


def test_inference_tensors_are_filled_in_inference_mode(stored: pathlib.Path) -> None:
    with torch.inference_mode():
        contiguous, strided = torch.zeros(700, 900), torch.zeros(900, 700).t()
        wanted = [("matrix", (0, 0), (700, 900), target) for target in (contiguous, strided)]
        read_slices(stored, wanted)
        for target in (contiguous, strided):
            assert bits_of(target) == bits_of(STORED["matrix"])


def test_autograd_sees_that_a_tensor_has_changed(stored: pathlib.Path) -> None:
    weight = torch.ones(700, 900, requires_grad=True)
    loss = (weight * weight).sum()
    read_slices(stored, [("matrix", (0, 0), (700, 900), weight)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_meta_tensors_stay_as_they_are_and_those_beside_them_are_loaded(
    stored: pathlib.Path,
) -> None:
    meta, beside = torch.empty(700, 900, device="meta"), torch.zeros(700, 900)
    read_slices(stored, [("matrix", (0, 0), (700, 900), target) for target in (meta, beside)])
    assert meta.is_meta
    assert bits_of(beside) == bits_of(STORED["matrix"])


def test_sizes_that_do_not_fit_are_refused_as_torch_does(directory: pathlib.Path) -> None:
    save({"a": torch.ones(4, 6)}, directory)
    reader = FileSystemReader(directory)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    theirs = dcp.FileSystemReader(directory)
    theirs.set_up_storage_reader(theirs.read_metadata(), True)
    plan = LoadPlan([item("a", 0, (1, 0), (2, 6))])
    messages = []
    for each in (theirs, reader):
        with pytest.raises(AssertionError) as caught:
            each.read_data(plan, Targets([torch.zeros(3, 6)])).wait()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_slices_beyond_the_tensor_are_refused(stored: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"'matrix'.*\[700, 900\]"):
        read_slices(stored, [("matrix", (600, 0), (200, 900), torch.zeros(200, 900))])


# --- how much is read ---


def big_state() -> dict[str, torch.Tensor]:
    return {f"layer{k}": torch.randn(1024, 2048) for k in range(6)} | {"bias": torch.randn(100)}


def test_half_of_the_rows_takes_half_of_the_bytes(directory: pathlib.Path) -> None:
    state = big_state()
    save(state, directory)
    names = [name for name in state if name != "bias"]
    for offset in (0, 512):
        targets = {name: torch.zeros(512, 2048) for name in names}
        reader = read_slices(
            directory, [(n, (offset, 0), (512, 2048), t) for n, t in targets.items()]
        )
        for name, target in targets.items():
            assert bits_of(target) == bits_of(state[name][offset : offset + 512])
        assert reader.nbytes_read <= 0.55 * sum(state[name].nbytes for name in names)


@pytest.mark.parametrize("small", [False, True], ids=["large tensors", "small tensors"])
def test_each_byte_is_read_once(faultfs: FaultFS, small: bool) -> None:
    state = {f"t{k}": torch.randn(10) for k in range(500)} if small else big_state()
    save(state, faultfs.path)
    (file,) = faultfs.path.glob("*.distcp")
    loaded = empty_like(state)
    faultfs.clear()
    reader = load(loaded, faultfs.path)
    assert_same(loaded, state)
    requests = [each for each in faultfs.requests("read") if each.name == file.name]
    parts = sorted((each.offset, each.offset + each.size) for each in requests)
    assert parts
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert reader.nbytes_read <= file.stat().st_size


def test_few_columns_do_not_take_the_whole_of_far_rows(directory: pathlib.Path) -> None:
    matrix = torch.randn(16, 1 << 20)  # rows of 4 MiB
    save({"a": matrix}, directory)
    target = torch.zeros(16, 100)
    reader = read_slices(directory, [("a", (0, 5), (16, 100), target)])
    assert bits_of(target) == bits_of(matrix[:, 5:105])
    assert reader.nbytes_read <= 16 * (512 << 10)


# --- planners ---


class Recording(dcp.DefaultLoadPlanner):
    """A planner that records its calls and their threads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.open = self.most_open = 0

    def note(self, call: str, read_item: ReadItem, change: int) -> None:
        self.calls.append((call, read_item.dest_index.fqn))
        self.threads.add(threading.get_ident())
        self.open += change
        self.most_open = max(self.most_open, self.open)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.note("resolve", read_item, 1)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.note("commit", read_item, -1)
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.note("bytes", read_item, 0)
        super().load_bytes(read_item, value)


def test_planner_is_asked_once_for_each_item_by_the_thread_that_loads(
    directory: pathlib.Path,
) -> None:
    save(mixed_state(), directory)
    planner = Recording()
    dcp.load(
        empty_like(mixed_state()),
        storage_reader=FileSystemReader(directory),
        planner=planner,
        no_dist=True,
    )
    assert len(planner.calls) == len(set(planner.calls))
    resolved = {name for call, name in planner.calls if call == "resolve"}
    assert resolved == {name for call, name in planner.calls if call == "commit"}
    objects = {name for call, name in planner.calls if call == "bytes"}
    names = metadata_of(directory).state_dict_metadata.keys()
    assert resolved | objects == names - {"empty"}
    assert planner.threads == {threading.get_ident()}


def test_destinations_are_asked_for_shortly_before_their_bytes_come(
    directory: pathlib.Path,
) -> None:
    state = {f"t{k}": torch.randn(1 << 19) for k in range(100)}  # 200 MiB
    save(state, directory)
    planner = Recording()
    reader = FileSystemReader(directory)
    dcp.load(empty_like(state), storage_reader=reader, planner=planner, no_dist=True)
    assert planner.most_open == 1


class Lending(dcp.DefaultLoadPlanner):
    """A planner that returns the same tensor for all items, and copies its values at the commit."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.zeros(1000, 1000)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.scratch

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(self.scratch)


def test_planner_may_lend_the_same_memory_again(directory: pathlib.Path) -> None:
    state = {f"t{k}": torch.full((1000, 1000), float(k)) for k in range(8)}
    save(state, directory)
    loaded = empty_like(state)
    reader = FileSystemReader(directory)
    dcp.load(loaded, storage_reader=reader, planner=Lending(), no_dist=True)
    assert_same(loaded, state)


class Remembering(dcp.DefaultLoadPlanner):
    """A planner that remembers its last tensor, as Megatron's planner does, and uses it at the commit of an item."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.last = torch.empty(read_item.lengths)
        return self.last

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(self.last)


@pytest.mark.parametrize("shape", [(5,), (1000, 1000)])
def test_an_item_is_committed_before_the_planner_is_asked_for_the_next_one(
    directory: pathlib.Path, shape: tuple[int, ...]
) -> None:
    state = {f"t{k}": torch.full(shape, float(k)) for k in range(8)}
    save(state, directory)
    loaded = empty_like(state)
    reader = FileSystemReader(directory)
    dcp.load(loaded, storage_reader=reader, planner=Remembering(), no_dist=True)
    assert_same(loaded, state)


class Failing(dcp.DefaultLoadPlanner):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if self.call == "resolve":
            raise ZeroDivisionError("resolve")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if self.call == "commit":
            raise ZeroDivisionError("commit")


@pytest.mark.parametrize("call", ["resolve", "commit"])
def test_failure_of_the_planner_is_what_is_raised(
    directory: pathlib.Path, unlogged: None, call: str
) -> None:
    save(big_state(), directory)
    loaded = empty_like(big_state())

    def attempt() -> None:
        reader = FileSystemReader(directory)
        with fails(ZeroDivisionError, call):
            dcp.load(loaded, storage_reader=reader, planner=Failing(call), no_dist=True)

    attempt()
    with nothing_leaks(resident_slack_nbytes=64 << 20):
        for _ in range(3):
            attempt()


# --- failures of the machine, and other folders ---


def test_missing_data_file_is_named(directory: pathlib.Path) -> None:
    save(big_state(), directory)
    (file,) = directory.glob("*.distcp")
    file.unlink()
    with fails(tensorferry.StorageError, file.name):
        load(empty_like(big_state()), directory)


def test_missing_checkpoint_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"\.metadata"):
        load({"a": torch.ones(1)}, directory)


def test_damaged_metadata_is_told_with_its_name(directory: pathlib.Path) -> None:
    save({"a": torch.ones(1)}, directory)
    flip(directory / ".metadata", 800)
    with fails(CheckpointError, str(directory / ".metadata")):
        load({"a": torch.zeros(1)}, directory)


def test_read_error_reaches_the_caller_and_the_next_load_reads_all(faultfs: FaultFS) -> None:
    state = big_state()
    loaded = empty_like(state)
    save(state, faultfs.path)
    (file,) = faultfs.path.glob("*.distcp")
    faultfs.order(Fault("read", start=20 << 20, end=21 << 20, error=errno.EIO, name=file.name))
    with fails(tensorferry.StorageError, f"bytes moved): '{file}'"):
        load(loaded, faultfs.path)
    faultfs.clear()
    load(loaded, faultfs.path)
    assert_same(loaded, state)


def test_incomplete_checkpoint_names_what_is_missing(directory: pathlib.Path) -> None:
    dcp.save(big_state(), storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    metadata = metadata_of(directory)
    metadata.storage_data = {
        index: info for index, info in metadata.storage_data.items() if index.fqn != "layer3"
    }
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with fails(CheckpointError, "'layer3'"):
        load(empty_like(big_state()), directory)


def test_file_names_that_lead_elsewhere_are_refused(directory: pathlib.Path) -> None:
    checkpoint = directory / "checkpoint"
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(checkpoint), no_dist=True)
    (checkpoint / "__0_0.distcp").rename(directory / "elsewhere")
    metadata = metadata_of(checkpoint)
    metadata.storage_data = {
        index: dataclasses.replace(info, relative_path="../elsewhere")
        for index, info in metadata.storage_data.items()
    }
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = {"a": torch.zeros(3)}
    with fails(CheckpointError, "outside"):
        load(loaded, checkpoint)
    assert loaded["a"].tolist() == [0, 0, 0]
    load(loaded, checkpoint, trust_pickle=True)
    assert loaded["a"].tolist() == [1, 1, 1]


def test_arguments_of_torchs_to_come_are_taken(directory: pathlib.Path) -> None:
    save(mixed_state(), directory)
    for reader in (
        FileSystemReader(directory, thread_count=8),
        FileSystemReader(directory, None, 8),
    ):
        loaded = empty_like(mixed_state())
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert_same(loaded, mixed_state())


def test_whether_a_checkpoint_may_be_overwritten_is_as_the_installed_torch_has_it() -> None:
    ours, theirs = (
        inspect.signature(kind.__init__).parameters["overwrite"].default
        for kind in (FileSystemWriter, dcp.FileSystemWriter)
    )
    assert ours is theirs


def test_unknown_level_is_refused(directory: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="verify: 'always'"):
        FileSystemReader(directory, verify="always")  # type: ignore[arg-type]


def test_loads_leak_nothing(directory: pathlib.Path, unlogged: None) -> None:
    save(mixed_state(), directory)
    loaded = empty_like(mixed_state())
    load(loaded, directory, verify="before")
    with nothing_leaks(resident_slack_nbytes=64 << 20):
        for verify in LEVELS * 2:
            load(loaded, directory, verify=verify)


# --- memory ---


def peak_of_load(path: str, mebibytes: int, other_dtype: bool, columns: bool) -> int:
    """Save tensors of 64 MiB, load them (or half of each row), and return the growth of memory during the load."""
    from tensorferry.tuning.stopwatch import Stopwatch

    count = mebibytes // 64
    first = torch.randn(2048, 8192)
    state = {str(k): first + k for k in range(count)}
    dcp.save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    dtype = torch.float64 if other_dtype else torch.float32
    width = 4096 if columns else 8192
    targets = [torch.ones(2048, width, dtype=dtype) for _ in range(count)]
    with Stopwatch() as watch:
        read_slices(
            path,  # type: ignore[arg-type]
            [(str(k), (0, 0), (2048, width), target) for k, target in enumerate(targets)],
        )
    for k, target in enumerate(targets):
        assert torch.equal(target, state[str(k)][:, :width].to(dtype))
    assert watch.peak_growth_nbytes is not None
    return watch.peak_growth_nbytes


@pytest.mark.parametrize("other_dtype", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_load_takes_little_memory(
    directory: pathlib.Path, other_dtype: bool, columns: bool
) -> None:
    ended = child.call(
        "tests.checkpoint.test_reader:peak_of_load",
        imports=["torch.distributed.checkpoint"],
        path=directory / "checkpoint",
        mebibytes=192,
        other_dtype=other_dtype,
        columns=columns,
    )
    assert ended.result <= 64 << 20


HOLDS = {
    **{(kind, kind): True for kind in ("bool", "int8", "uint8", "int64", "float16", "bfloat16")},
    **{("bool", kind): True for kind in ("int8", "float16", "complex64")},
    ("float32", "int8"): False,
    ("float32", "bfloat16"): False,
    ("float32", "float64"): True,
    ("float16", "bfloat16"): False,
    ("bfloat16", "float16"): False,
    ("bfloat16", "float32"): True,
    ("int64", "int32"): False,
    ("uint8", "int8"): False,
    ("uint8", "int16"): True,
    ("int8", "bool"): False,
    ("int8", "uint8"): False,
    ("int8", "bfloat16"): True,
    ("uint8", "bfloat16"): True,
    ("int16", "float16"): False,
    ("int16", "bfloat16"): False,
    ("int16", "float32"): True,
    ("int32", "float32"): False,
    ("int32", "float64"): True,
    ("int64", "float64"): False,
    ("complex64", "float32"): False,
    ("float32", "complex64"): True,
    ("int32", "complex64"): False,
    ("float64", "complex64"): False,
    ("complex64", "complex128"): True,
    ("float8_e4m3fn", "float8_e5m2"): False,
    ("float8_e5m2", "float16"): True,
    ("float8_e4m3fn", "bfloat16"): True,
    ("float16", "float8_e5m2"): False,
}


@pytest.mark.parametrize("kind", ["reader", "Hugging Face's"])
def test_a_load_into_dtypes_that_cannot_hold_all_values_names_them(
    directory: pathlib.Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_SHOWN_NAMES", len(HOLDS))
    own: Any = FileSystemReader
    dtypes = {
        " to ".join(pair): tuple(getattr(torch, each) for each in pair)
        for pair in HOLDS
        if kind == "reader" or "complex128" not in pair  # which safetensors do not have
    }
    state = {name: torch.ones(3).to(stored) for name, (stored, _) in dtypes.items()}
    if kind == "reader":
        save(state, directory)
    else:
        storage = pytest.importorskip("tensorferry.checkpoint.storage.huggingface")
        own = storage.HuggingFaceStorageReader
        writer = storage.HuggingFaceStorageWriter(directory)
        dcp.save(state, storage_writer=writer, no_dist=True)
    found = {name: torch.zeros(3).to(wanted) for name, (_, wanted) in dtypes.items()}
    with pytest.warns(RuntimeWarning) as told:
        dcp.load(found, storage_reader=own(directory), no_dist=True)
    (about,) = (str(each.message) for each in told if each.category is RuntimeWarning)
    for name, (stored, wanted) in dtypes.items():
        ones = torch.ones(3, dtype=torch.complex128)
        assert torch.equal(found[name].to(torch.complex128), ones)
        named = f"{name!r} ({stored} to {wanted})" in about
        assert named == (not HOLDS[tuple(name.split(" to "))]), name  # type: ignore[index]


@pytest.mark.parametrize("stored", [torch.int8, torch.int16, torch.uint8, torch.float8_e5m2])
def test_what_counts_as_held_is_held(stored: torch.dtype) -> None:
    """Every value of a small dtype comes back from each dtype that is said to hold it."""
    bits = torch.arange(1 << 8 * stored.itemsize).to(
        torch.uint8 if stored.itemsize == 1 else torch.uint16
    )
    values = bits.view(stored)
    for wanted in (torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float32):
        same = values.to(wanted).to(stored)
        equal = same.view(bits.dtype) == bits
        equal |= values.to(torch.float32).isnan() & same.to(torch.float32).isnan()
        assert bool(equal.all()) or not reader_module.holds(wanted, stored), wanted


@given(data=st.data())
def test_destinations_that_share_memory_get_what_torchs_reader_leaves_there(
    data: st.DataObject,
) -> None:
    flat = torch.zeros(12)
    state, wanted = {}, {}
    order = data.draw(st.permutations(range(data.draw(st.integers(1, 6)))))
    for number in order:
        begin, count = data.draw(st.integers(0, 8)), data.draw(st.integers(1, 4))
        step = data.draw(st.integers(1, 2)) if begin + 2 * count <= 12 else 1
        wanted[str(number)] = flat[begin:][::step][:count]
        state[str(number)] = torch.full(wanted[str(number)].shape, float(number + 1))
    with tempfile.TemporaryDirectory() as folder:
        saved = {name: state[name] for name in sorted(state)}
        dcp.save(saved, storage_writer=FileSystemWriter(folder), no_dist=True)
        found = []
        for kind in (dcp.FileSystemReader, FileSystemReader):
            flat.zero_()
            dcp.load(dict(wanted), storage_reader=kind(folder), no_dist=True)
            found.append(flat.tolist())
    assert found[0] == found[1]


def pickled_copy(reader: FileSystemReader) -> Any:
    return pickle.loads(pickle.dumps(reader))


def is_read(folder: pathlib.Path) -> bool:
    with writer_lock(folder, ".metadata") as is_unread:
        return not is_unread


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled_copy])
def test_a_copy_of_a_reader_loads_and_leaves_the_lock_of_the_original(
    directory: pathlib.Path, copied: Any
) -> None:
    dcp.save({"x": torch.arange(4.0)}, storage_writer=FileSystemWriter(directory), no_dist=True)
    reader = FileSystemReader(directory)
    state = {"x": torch.zeros(4)}
    with reader.holding_folder():
        dcp.load(state, storage_reader=copied(reader), no_dist=True)
        assert is_read(directory)
    assert state["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not is_read(directory)


class Locked(dcp.DefaultLoadPlanner):
    """Notes whether the folder is locked while the planner is called, and fails in one call."""

    def __init__(self, folder: pathlib.Path, fails_in: str) -> None:
        super().__init__()
        self.folder, self.fails_in, self.locked = folder, fails_in, False

    def note(self, call: str) -> None:
        self.locked = is_read(self.folder)
        if call == self.fails_in:
            raise ZeroDivisionError(call)

    def create_local_plan(self) -> LoadPlan:
        self.note("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.note("create_global_plan")
        return super().create_global_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.note("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.note("resolve_tensor")
        return super().resolve_tensor(read_item)


@pytest.mark.parametrize(
    "call", ["create_local_plan", "create_global_plan", "finish_plan", "resolve_tensor"]
)
def test_a_folder_is_locked_while_it_is_read_and_not_after_a_failure(
    directory: pathlib.Path, call: str
) -> None:
    save({"x": torch.arange(4.0)}, directory)
    reader, planner = FileSystemReader(directory), Locked(directory, call)
    with fails(ZeroDivisionError, call):
        dcp.load({"x": torch.zeros(4)}, storage_reader=reader, planner=planner, no_dist=True)
    assert planner.locked == (call == "resolve_tensor")
    assert not is_read(directory)
