"""Stager: a snapshot that later training steps do not change, in memory that is reused."""

from __future__ import annotations

import collections
import copy
import dataclasses
import importlib.util
import io
import pickle
import threading
import traceback
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies
from torch.distributed.checkpoint.staging import AsyncStager

from tensorferry.checkpoint import FileSystemWriter, Stager, staging
from tests.checkpoint.states import assert_same, bits_of, mixed_state, takes_stagers
from tests.support.ranks import call_on_ranks
from tests.support.threads import no_new_threads

if TYPE_CHECKING:
    import pathlib


def test_torch_takes_it_for_a_stager() -> None:
    assert isinstance(Stager(), AsyncStager)
    assert Stager().should_synchronize_after_execute is False


def test_the_copy_stays_when_the_state_changes() -> None:
    state, wanted = mixed_state(), mixed_state()
    state["nested"]["object"] = io.BytesIO(b"data")
    staged = Stager().stage(state)
    state["weight"].zero_()
    state["large"] += 1
    state["nested"]["step"] += 1
    state["nested"]["list"].append(3)
    state["nested"]["object"].write(b"more")
    assert staged["nested"].pop("object").getvalue() == b"data"
    assert_same(staged, wanted)


def test_layouts_and_gradients_are_as_they_were() -> None:
    state = mixed_state()
    staged = Stager().stage(state)
    for name in ("weight", "transposed", "channels_last", "slice", "empty", "scalar", "parameter"):
        assert staged[name].stride() == state[name].stride(), name
        assert staged[name].requires_grad == state[name].requires_grad, name
        assert staged[name].is_leaf
    assert staged["expanded"].stride() == state["expanded"].stride()


def test_each_storage_has_just_its_tensors_bytes() -> None:
    staged = Stager().stage({"a": torch.ones(3), "b": torch.ones(100_000)})
    assert [t.untyped_storage().nbytes() for t in staged.values()] == [12, 400_000]
    assert staged["b"].data_ptr() % 4096 == 0


def test_what_is_the_same_memory_is_copied_once() -> None:
    weight = torch.randn(100)
    staged = Stager().stage(
        {"a": weight, "b": weight, "c": [weight.view(100)], "d": weight.view(10, 10)}
    )
    assert staged["a"] is staged["b"]
    assert staged["c"][0].data_ptr() == staged["a"].data_ptr()
    assert torch.equal(staged["d"].view(-1), weight)


def test_any_containers_and_objects_are_copied() -> None:
    Pair = collections.namedtuple("Pair", "first second")
    state = {
        "pair": Pair(torch.ones(1), "x"),
        "ordered": collections.OrderedDict(a=torch.ones(2)),
        "set": {1, 2},
        "sparse": torch.eye(4).to_sparse(),
        "object": torch.nn.Linear(2, 3),
        "graph": (torch.ones(2, requires_grad=True) * 2),
    }
    staged = Stager().stage(state)
    assert isinstance(staged["pair"], Pair)
    assert isinstance(staged["ordered"], collections.OrderedDict)
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(4))
    assert torch.equal(staged["object"].weight, state["object"].weight)
    assert staged["object"].weight is not state["object"].weight
    assert staged["graph"].grad_fn is None


def test_memory_is_used_again() -> None:
    stager, addresses = Stager(), set()
    for step in range(4):
        staged = stager.stage({"a": torch.full((1000,), step), "b": torch.ones(1 << 20)})
        assert bool((staged["a"] == step).all())
        addresses.add(staged["a"].data_ptr())
        del staged
    assert len(addresses) == 1


def test_memory_in_use_is_left_alone_and_a_third_stage_waits() -> None:
    stager = Stager()
    first = stager.stage({"a": torch.full((1000,), 1)})
    second = stager.stage({"a": torch.full((1000,), 2)})
    view = first["a"][:10]
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(stager.stage({"a": torch.full((9,), 3)})))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    del first
    thread.join(0.2)
    assert thread.is_alive()  # a view is use as well
    assert bool((view == 1).all())
    del view
    thread.join(120)
    assert not thread.is_alive()
    assert bool((third[0]["a"] == 3).all())
    assert bool((second["a"] == 2).all())


def test_states_in_reference_cycles_are_not_waited_for() -> None:
    stager, addresses = Stager(), set()
    for step in range(6):
        staged = stager.stage({"a": torch.full((1000,), step)})
        addresses.add(staged["a"].data_ptr())
        staged["itself"] = staged
        del staged
    assert len(addresses) <= 2


def test_views_of_one_storage_take_its_memory_once() -> None:
    flat = torch.arange(1 << 20, dtype=torch.float32)
    state: dict[str, Any] = {str(k): flat[k << 18 : (k + 1) << 18] for k in range(4)}
    state |= {
        "flat": flat,
        "odd": flat.view(torch.uint8)[5:9],
        "complex": flat[2:6].view(torch.complex64),
    }
    state |= {"grad": flat.view(-1).requires_grad_(), "steps": flat.detach()[::2]}
    staged = Stager().stage(state)
    wanted = {key: bits_of(value) for key, value in state.items()}
    with torch.no_grad():
        flat.zero_()
    assert {key: bits_of(value) for key, value in staged.items()} == wanted
    begin, storage = staged["flat"].data_ptr(), staged["flat"].untyped_storage()
    for key in state:
        assert staged[key].data_ptr() - begin == state[key].data_ptr() - flat.data_ptr(), key
        assert staged[key].untyped_storage().data_ptr() == storage.data_ptr(), key
        assert staged[key].storage_offset() == state[key].storage_offset(), key
    assert storage.nbytes() == flat.nbytes
    assert staged["grad"].requires_grad
    assert not staged["flat"].requires_grad


@dataclasses.dataclass(frozen=True)
class Holder:
    """An object with a tensor in it."""

    tensor: Any


class Scaled(torch.nn.Parameter):
    """A parameter with a method of its own, as those of vLLM and bitsandbytes."""

    def value(self) -> torch.Tensor:
        return self.data * 2


@pytest.mark.parametrize("wrap", [Holder, lambda each: [each], lambda each: {"a": each}, tuple])
def test_tensors_in_objects_and_containers_keep_kind_and_values(wrap: Any) -> None:
    tensors = [
        torch.ones(3),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        Scaled(torch.ones(3)),
    ]
    if wrap is not Holder:  # torch cannot copy these within objects
        tensors.append(torch.ones(3).as_subclass(type("Tagged", (torch.Tensor,), {})))

    def inner(each: Any) -> Any:
        while not isinstance(each, torch.Tensor):
            each = (
                each.tensor
                if isinstance(each, Holder)
                else next(iter(each.values() if isinstance(each, dict) else each))
            )
        return each

    for tensor in tensors:
        staged = Stager().stage({"held": wrap([tensor]) if wrap is tuple else wrap(tensor)})
        copied = inner(staged["held"])
        assert type(copied) is type(tensor)
        assert copied.requires_grad == tensor.requires_grad
        with torch.no_grad():
            tensor.zero_()
        assert copied.tolist() == [1.0] * 3


def test_attributes_of_tensors_stay() -> None:
    class Tagged(torch.Tensor):
        """A subclass without changes."""

    weight, parameter = torch.randn(10, 10), torch.nn.Parameter(torch.ones(3))
    weight.tag, parameter.tag = 42, [1, 2]  # type: ignore[attr-defined]
    tagged = torch.ones(2).as_subclass(Tagged)
    tagged.tag, tagged.same = "x", weight  # type: ignore[attr-defined]
    empty, sparse = torch.empty(0), torch.eye(3).to_sparse()
    empty.tag, sparse.tag = 1, 2  # type: ignore[attr-defined]
    state = {"weight": weight, "view": weight.view(100), "parameter": parameter}
    state |= {"tagged": tagged, "empty": empty, "sparse": sparse}
    staged = Stager().stage(state)
    assert staged["weight"].tag == 42
    assert not hasattr(staged["view"], "tag")
    assert staged["parameter"].tag == [1, 2]
    assert staged["parameter"].tag is not parameter.tag  # type: ignore[attr-defined]
    assert type(staged["parameter"]) is torch.nn.Parameter
    assert type(staged["tagged"]) is Tagged
    assert staged["tagged"].tag == "x"
    assert staged["tagged"].same is staged["weight"]
    assert staged["empty"].tag == 1
    assert staged["sparse"].tag == 2


@pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.checkpoint._state_dict_stager") is None,
    reason="this torch has no stager",
)
@hypothesis.given(data=strategies.data())
def test_copies_are_those_of_torchs_stager(data: strategies.DataObject) -> None:
    """Views of any strides, dtypes and attributes: the same values, layouts and sharing."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    bases = [torch.arange(48, dtype=torch.int32).view(6, 8), torch.arange(48).view(6, 8).float()]
    state: dict[str, Any] = {}
    for number in range(data.draw(strategies.integers(1, 6))):
        tensor = bases[data.draw(strategies.integers(0, 1))]
        for dim in (0, 1):
            begin = data.draw(strategies.integers(0, 5))
            step = data.draw(strategies.integers(1, 3))
            tensor = tensor[begin::step] if dim == 0 else tensor[:, begin::step]
        if data.draw(strategies.booleans()):
            tensor = tensor.t()
        if data.draw(strategies.booleans()):
            tensor = tensor[:1].expand(3, -1)
        if data.draw(strategies.booleans()):
            tensor = tensor.view(tensor.dtype)
            tensor.tag = number  # type: ignore[attr-defined]
        state[str(number)] = tensor

    ours, torchs = (
        list(each.values()) for each in (Stager().stage(state), StateDictStager().stage(state))
    )
    for one, other in zip(ours, torchs, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride(), vars(one)) == (other.dtype, other.stride(), vars(other))
    # A write to one of them is visible in those that share the element, as with torch's.
    for one, other in zip(ours, torchs, strict=True):
        with torch.no_grad():
            for tensor in (one, other):
                tensor.select(0, 0)[:1].fill_(99)
        assert all(map(torch.equal, ours, torchs))


def test_what_has_its_own_way_of_copying_is_copied_by_it() -> None:
    class Own:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.lock = tensor, threading.Lock()  # which cannot be copied

        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            return Own(copy.deepcopy(self.tensor, memo))

    state = {"own": Own(torch.ones(3)), "meta": torch.empty(3, device="meta")}
    staged = Stager().stage(state)
    state["own"].tensor.zero_()
    assert staged["own"].tensor.tolist() == [1.0] * 3
    assert staged["meta"].is_meta


def test_waiting_for_memory_changes_nothing_of_others() -> None:
    """Tracebacks that lead through torch's code stay whole while a stager waits."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load({"a": torch.ones(1)}, checkpoint_id="/nowhere/at/all", no_dist=True)
    kept = caught.value
    before = traceback.extract_tb(kept.__traceback__)
    stager = Stager()
    states = [stager.stage({"a": torch.full((10,), k)}) for k in range(2)]
    waiting = threading.Thread(target=lambda: states.append(stager.stage({"a": torch.ones(10)})))
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    del states[0]
    waiting.join(120)
    assert len(states) == 2
    assert traceback.extract_tb(kept.__traceback__) == before


def test_states_may_grow_and_shrink() -> None:
    stager = Stager()
    for count in (10, 1 << 20, 5, 3 << 20, 0):
        staged = stager.stage({"a": torch.full((count,), count)})
        assert torch.equal(staged["a"], torch.full((count,), count))
        del staged


def test_what_was_staged_outlives_the_stager() -> None:
    stager = Stager()
    staged = stager.stage({"a": torch.ones(1 << 20)})
    stager.close()
    del stager
    assert bool((staged["a"] == 1).all())


def test_an_overlapped_copy_is_a_future() -> None:
    stager = Stager(overlap=True)
    state = {"a": torch.ones(1 << 20)}
    staged = stager.stage(state).result(120)
    state["a"].zero_()
    assert bool((staged["a"] == 1).all())

    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stager.stage({"a": Uncopyable()}).result(120)
    stager.synchronize_staging()


def test_a_stager_travels_without_its_memory() -> None:
    stager = Stager(overlap=True)
    staged = stager.stage({"a": torch.ones(1 << 20)}).result(120)
    data = pickle.dumps(stager)
    assert len(data) < 1000
    assert bool((pickle.loads(data).stage(staged).result(120)["a"] == 1).all())


def test_files_of_a_staged_state_name_no_class_of_ours() -> None:
    staged = Stager().stage({"a": torch.ones(3), "step": 1})
    torch.save(staged, stream := io.BytesIO())
    assert b"tensorferry" not in stream.getvalue()
    stream.seek(0)
    assert torch.load(stream)["step"] == 1


class Failing(dcp.DefaultSavePlanner):
    """Fails in a call of torch's save()."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call

    def set_up_planner(self, *arguments: Any, **options: Any) -> None:
        if self.call == "set_up_planner":
            raise ZeroDivisionError
        super().set_up_planner(*arguments, **options)

    def create_local_plan(self) -> Any:
        if self.call == "create_local_plan":
            raise ZeroDivisionError
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        if self.call == "finish_plan":
            raise ZeroDivisionError
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        if self.call == "resolve_data":
            raise ZeroDivisionError
        return super().resolve_data(write_item)


@takes_stagers
@pytest.mark.parametrize(
    "call", ["set_up_planner", "create_local_plan", "finish_plan", "resolve_data", "none"]
)
@pytest.mark.parametrize("writer", [FileSystemWriter, dcp.FileSystemWriter])
def test_memory_is_free_once_a_save_has_ended_or_failed_anywhere(
    directory: pathlib.Path, call: str, writer: Any
) -> None:
    """Even if the exceptions, whose tracebacks refer to the state, are kept."""
    stager, kept, addresses = Stager(), [], set()
    for step in range(4):
        staged = stager.stage({"a": torch.full((1000,), step)})
        addresses.add(staged["a"].data_ptr())
        kept.append(staged["a"])
        thread = threading.Thread(target=save_quietly, args=(staged, writer(directory), call, kept))
        thread.start()
        del staged
        thread.join()
    assert len(addresses) == 1


def save_quietly(staged: Any, writer: Any, call: str, kept: list[Any]) -> None:
    try:
        dcp.save(staged, storage_writer=writer, planner=Failing(call), no_dist=True)
    except BaseException as error:
        kept.append(error)


def test_memory_of_a_state_that_is_looked_at_elsewhere_stays(directory: pathlib.Path) -> None:
    """Another thread iterates over the state, and saves another one."""
    stager = Stager()
    staged = stager.stage({"a": torch.full((1000,), 1.0)})

    def look() -> None:
        assert len(list(staged.items())) == 1
        writer = FileSystemWriter(directory)
        dcp.save({"b": torch.ones(3)}, storage_writer=writer, no_dist=True)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    stager.stage({"a": torch.full((1000,), 2.0)})
    assert staged["a"].tolist() == [1.0] * 1000


def stage_distributed(rank: int) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).view(7, 5)
    state: dict[str, Any] = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
        "same": distribute_tensor(whole, mesh, [Replicate()]).requires_grad_(),
        "sharded": sharded_tensor.rand(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 3),
    }
    before = copy.deepcopy(state["rows"].to_local())
    local = state["sharded"].local_shards()[0].tensor.clone()
    staged = Stager().stage(state)
    state["rows"].to_local().zero_()
    state["sharded"].local_shards()[0].tensor.zero_()
    assert type(staged["rows"]) is DTensor
    assert torch.equal(staged["rows"].to_local(), before)
    assert torch.equal(staged["rows"].full_tensor(), whole)
    assert torch.equal(staged["sharded"].local_shards()[0].tensor, local)
    for name in ("rows", "columns", "same"):
        wanted, got = state[name], staged[name]
        assert got.placements == wanted.placements
        assert got.device_mesh == wanted.device_mesh
        assert got.stride() == wanted.stride()
        assert got.requires_grad == wanted.requires_grad
    assert bits_of(staged["columns"].to_local()) == bits_of(state["columns"].to_local())


def test_distributed_tensors_are_copied_rank_by_rank() -> None:
    call_on_ranks(2, stage_distributed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_tensors_on_a_gpu_come_to_the_host() -> None:
    stager = Stager()
    for step in range(3):
        state = {
            "a": torch.full((1 << 20,), step, device="cuda"),
            "b": torch.ones(3, device="cuda"),
        }
        staged = stager.stage(state)
        state["a"].zero_()
        assert all(tensor.is_cpu for tensor in staged.values())
        assert bool((staged["a"] == step).all())
        del staged


@pytest.mark.parametrize("left_nbytes", [0, 8])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_tensor_whose_storage_was_made_smaller_is_refused(
    directory: pathlib.Path, left_nbytes: int, stride: int
) -> None:
    """Its bytes are others'; and torch's set_() would give it a storage of that size."""
    tensor = torch.arange(8.0)[::stride]
    tensor.untyped_storage().resize_(left_nbytes)
    with pytest.raises(ValueError, match="it was resized"):
        Stager().stage({"a": tensor})
    with pytest.raises(dcp.api.CheckpointException, match=r"a: .*it was resized"):
        dcp.save({"a": tensor}, storage_writer=FileSystemWriter(directory / "new"), no_dist=True)
    assert tensor.untyped_storage().nbytes() == left_nbytes


@pytest.mark.skipif(not hasattr(torch, "uint4"), reason="this torch has no integers of few bits")
def test_integers_of_few_bits_are_staged_in_any_order() -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(torch.uint4).as_strided((4, 6), (1, 4))
    staged = Stager().stage({"a": tensor})["a"]
    assert torch.equal(staged.view(torch.uint8), tensor.view(torch.uint8))


def test_a_stager_copies_where_no_thread_can_be_started() -> None:
    """As in a container with a limit of processes."""
    state = {"small": torch.arange(10), "large": torch.arange(3 << 20)}
    stager = Stager(overlap=True)
    with no_new_threads():
        for _ in range(2):
            staged = stager.stage(state).result()
            assert_same(staged, state)


def test_after_an_interruption_no_thread_copies_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is free then: a late copy would change the next state that is staged into it."""
    state = {"a": torch.arange(6 << 20)}  # several pieces
    begun, returned, late = threading.Event(), threading.Event(), []

    def copy_until_the_call_returns(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        late.append(returned.wait(2))

    monkeypatch.setattr(staging.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(staging.ctypes, "memmove", copy_until_the_call_returns)
    with pytest.raises(KeyboardInterrupt):
        Stager().stage(state)
    returned.set()
    assert late == [False]
