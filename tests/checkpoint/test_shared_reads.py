"""What several ranks want is read by one of them, and handed on; whatever happens on one rank ends the load on all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter
from tensorferry.checkpoint.storage import sharing
from tests.checkpoint.damage import flip
from tests.checkpoint.states import assert_same, empty_like, metadata_of, mixed_state, save
from tests.support.ranks import call_on_ranks

if TYPE_CHECKING:
    import pathlib

    from tests.support.faultfs import FaultFS

MIB = 1 << 20


def replicated() -> dict[str, Any]:
    """A state of 80 MiB in tensors of many sizes, more than two rounds."""
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {
        f"{number}": torch.randn(numel, generator=generator)
        for number, numel in enumerate([8 * MIB, 5 * MIB + 77, 3, 1000, 65536, 6 * MIB, 70000])
    }
    return state | {f"small {number}": torch.full((500,), number) for number in range(300)}


def nbytes_of(state: dict[str, Any]) -> int:
    return sum(each.nbytes for each in state.values())


def load_replicated(rank: int, path: str, **options: Any) -> int:
    torch.manual_seed(rank)
    loaded = {key: torch.zeros_like(value) for key, value in replicated().items()}
    reader = FileSystemReader(path, **options)
    dcp.load(loaded, storage_reader=reader)
    assert_same(loaded, replicated())
    assert reader.last_load is not None
    assert reader.last_load.nbytes == nbytes_of(loaded)
    return reader.nbytes_read


def load_in_each_way(rank: int, path: str) -> list[int]:
    ways: list[Any] = [{"broadcast": way} for way in (True, False, "auto")]
    return [load_replicated(rank, path, **options) for options in [*ways, {}]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_byte_of_a_replicated_state_is_read_once(
    directory: pathlib.Path, world_size: int
) -> None:
    save(replicated(), directory)
    nbytes = nbytes_of(replicated())
    shared, alone, auto, default = zip(
        *call_on_ranks(world_size, load_in_each_way, str(directory)), strict=True
    )
    assert nbytes <= sum(shared) <= 1.1 * nbytes
    assert max(shared) <= 1.3 * nbytes / world_size
    assert min(alone) >= nbytes
    # gloo, and a drive of this machine.
    assert auto == alone
    assert default == alone


def load_mixed(rank: int, path: str, verify: Any, size: int) -> int:
    """Load some of the state on each rank, all of it on rank 0."""
    wanted = mixed_state(3)
    keys = [key for number, key in enumerate(sorted(wanted)) if rank == 0 or number % 3 != rank]
    loaded = empty_like({key: wanted[key] for key in keys})
    sharing.PART_NBYTES = size
    reader = FileSystemReader(path, broadcast=True, verify=verify)
    dcp.load(loaded, storage_reader=reader)
    assert_same(loaded, {key: wanted[key] for key in keys})
    return reader.nbytes_read


@pytest.mark.parametrize("verify", ["read", "before", "off"])
@pytest.mark.parametrize("size", [sharing.PART_NBYTES, 100000], ids=["large", "small"])
@pytest.mark.parametrize("writer", [FileSystemWriter, dcp.FileSystemWriter], ids=["ours", "torch"])
def test_ranks_that_want_different_things_get_all_of_them(
    directory: pathlib.Path, writer: Any, size: int, verify: str
) -> None:
    dcp.save(mixed_state(3), storage_writer=writer(directory), no_dist=True)
    call_on_ranks(3, load_mixed, str(directory), verify, size)


def hybrid(seed: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    values = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(seed))
    mesh = init_device_mesh("cpu", (2, 2))
    return distribute_tensor(values, mesh, [Replicate(), Shard(0)])


def load_hybrid(rank: int, path: str) -> int:
    dcp.save({"a": hybrid(1)}, storage_writer=FileSystemWriter(path))
    loaded = {"a": hybrid(2)}
    reader = FileSystemReader(path, broadcast=True)
    dcp.load(loaded, storage_reader=reader)
    assert torch.equal(loaded["a"].to_local(), hybrid(1).to_local())
    return reader.nbytes_read


def test_replicas_of_shards_are_read_once(directory: pathlib.Path) -> None:
    read = call_on_ranks(4, load_hybrid, str(directory))
    assert sum(read) <= 1.1 * 16 * MIB


class Moving(DefaultLoadPlanner):
    """A planner that lends the same memory for all tensors, and takes them from there."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.memory = torch.zeros(8 * MIB, dtype=dtype)
        self.lent = 0
        self.found: dict[str, torch.Tensor] = {}

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.lent += 1
        return self.memory[: math.prod(read_item.lengths)].view(read_item.lengths)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.lent -= 1
        assert self.lent == 0
        self.found[read_item.dest_index.fqn] = tensor.clone()


def load_by_planner(rank: int, path: str) -> None:
    loaded = {key: torch.zeros_like(value) for key, value in replicated().items()}
    planner = Moving(torch.float32)
    wanted = {key: value for key, value in loaded.items() if value.dtype == torch.float32}
    dcp.load(wanted, storage_reader=FileSystemReader(path, broadcast=True), planner=planner)
    for key in wanted:
        assert torch.equal(planner.found[key], replicated()[key])


def test_planner_may_lend_the_same_memory_again(directory: pathlib.Path) -> None:
    save(replicated(), directory)
    call_on_ranks(2, load_by_planner, str(directory))


class Scaled(torch.Tensor):
    """A tensor of bytes and a scale that stands for numbers, as quantizing libraries have them."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, _scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.size(), dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        this, *rest = args
        name = function.overloadpacket.__name__
        if name == "copy_" and type(this) is Scaled:
            (other,) = rest[:1]
            if type(other) is Scaled:
                this.data_.copy_(other.data_)
                this.scale.copy_(other.scale)
            else:
                this.data_.copy_((other / this.scale).round())
            return this
        if name == "is_pinned":
            return False
        if name in ("detach", "clone", "_to_copy", "alias"):
            return Scaled(this.data_.clone() if name == "clone" else this.data_, this.scale)
        raise NotImplementedError(f"{name} of {cls.__name__}")


def load_quantized(rank: int, path: str) -> list[Any]:
    torch.serialization.add_safe_globals([Scaled, torch.device])
    found = []
    for broadcast in (False, True):
        target = Scaled(torch.zeros(MIB, dtype=torch.int8), torch.tensor(1.0))
        dcp.load({"a": target}, storage_reader=FileSystemReader(path, broadcast=broadcast))
        found.append((target.scale.item(), target.data_.sum().item()))
        plain = Scaled(torch.zeros(5 * MIB, dtype=torch.int8), torch.tensor(0.5))
        dcp.load({"plain": plain}, storage_reader=FileSystemReader(path, broadcast=broadcast))
        found.append((plain.scale.item(), plain.data_.sum().item()))
    return found


@pytest.mark.parametrize("writer", [FileSystemWriter, dcp.FileSystemWriter], ids=["ours", "torch"])
def test_quantized_tensors_are_loaded_as_without_sharing(
    directory: pathlib.Path, writer: Any
) -> None:
    quantized = Scaled(torch.full((MIB,), 3, dtype=torch.int8), torch.tensor(0.25))
    state = {"a": quantized, "plain": torch.ones(5 * MIB)}
    dcp.save(state, storage_writer=writer(directory), no_dist=True)
    for found in call_on_ranks(2, load_quantized, str(directory)):
        assert found == [(0.25, 3 * MIB), (0.5, 2 * 5 * MIB)] * 2


class Failing(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if dist.get_rank() == 1 and read_item.dest_index.fqn == "1":
            raise KeyboardInterrupt
        return super().resolve_tensor(read_item)


def twelve() -> dict[str, Any]:
    return {str(number): torch.full((MIB,), float(number + 1)) for number in range(12)}


def failures_of(rank: int, path: str, planner: Any = None) -> list[str]:
    loaded = {key: torch.zeros_like(value) for key, value in twelve().items()}
    reader = FileSystemReader(path, broadcast=True)
    try:
        dcp.load(loaded, storage_reader=reader, planner=planner() if planner else None)
    except CheckpointException as error:
        assert any(not value.any() for value in loaded.values())
        return [f"{type(each).__name__}: {each}" for _, (each, _) in sorted(error.failures.items())]
    raise AssertionError("loaded")


def test_damage_that_one_rank_reads_is_raised_on_all_before_it_is_handed_on(
    directory: pathlib.Path,
) -> None:
    save(twelve(), directory)
    (file,) = directory.glob("*.distcp")
    flip(file, 6 * file.stat().st_size + 8 * MIB)  # within a tensor
    first, second = call_on_ranks(2, failures_of, str(directory))
    assert first == second
    assert len(first) == 2
    assert all(each.startswith("CheckpointError: ") and str(file) in each for each in first)
    assert first[0] == first[1]


def test_ctrl_c_in_a_planner_of_one_rank_ends_the_load_on_all(directory: pathlib.Path) -> None:
    save(twelve(), directory)
    first, second = call_on_ranks(2, failures_of, str(directory), Failing)
    assert first == second
    assert first == [
        "RuntimeError: another rank was stopped by KeyboardInterrupt()",
        "KeyboardInterrupt: ",
    ]


def own_failures(rank: int, path: str) -> tuple[list[str], int]:
    """Load what is shared, and on rank 1 what is not there; then what is shared alone."""
    loaded = {"shared": torch.zeros(MIB)}
    own = {"own": torch.zeros(MIB)} if rank == 1 else {}
    reader = FileSystemReader(path, broadcast=True)
    failures = []
    try:
        dcp.load(loaded | own, storage_reader=reader)
    except CheckpointException as error:
        failures = [type(each).__name__ for _, (each, _) in sorted(error.failures.items())]
    assert not loaded["shared"].any()
    dcp.load(loaded, storage_reader=reader)
    assert loaded["shared"].all()
    return failures, reader.nbytes_read


def test_failure_with_what_one_rank_alone_wants_ends_the_load_on_all_and_the_next_one_works(
    directory: pathlib.Path,
) -> None:
    state = {"shared": torch.ones(MIB), "own": torch.ones(MIB)}
    save(state, directory, single_file_per_rank=False)
    places = metadata_of(directory).storage_data
    (name,) = (each.relative_path for index, each in places.items() if index.fqn == "own")
    (directory / name).unlink()
    for failures, nbytes_read in call_on_ranks(2, own_failures, str(directory)):
        assert failures == ["StorageError", "StorageError"]
        assert nbytes_read < 3 * MIB


def load_in_the_way_that_is_chosen(rank: int, path: str) -> int:
    return load_replicated(rank, path, broadcast="auto")


def test_ranks_share_where_the_drive_may_be_far_away(faultfs: FaultFS) -> None:
    save(replicated(), faultfs.path)
    read = call_on_ranks(2, load_in_the_way_that_is_chosen, str(faultfs.path))
    assert sum(read) <= 1.1 * nbytes_of(replicated())


def other_options(rank: int, path: str) -> list[str]:
    found = []
    loaded = {"shared": torch.zeros(MIB)}
    group = dist.new_group([0, 1])
    for broadcast, process_group in ((rank == 0, None), (True, None)):
        try:
            dcp.load(
                loaded,
                storage_reader=FileSystemReader(path, broadcast=broadcast),
                process_group=process_group or group,
            ) if rank < 2 else None
        except CheckpointException as error:
            found.extend(str(each) for each, _ in error.failures.values())
    if rank < 2:
        reader = FileSystemReader(path, broadcast=True, process_group=group)
        dcp.load(loaded, storage_reader=reader, process_group=group)
        assert loaded["shared"].all()
        assert reader.nbytes_read < 3 * MIB
    return found


def test_ranks_that_could_not_meet_are_told(directory: pathlib.Path) -> None:
    save({"shared": torch.ones(MIB)}, directory)
    first, second, _ = call_on_ranks(3, other_options, str(directory))
    assert first == second
    assert first[0] == "broadcast: ranks differ in it: True, False"
    assert first[1].startswith("process_group: the load is by 2 ranks")


def test_what_broadcast_may_be(directory: pathlib.Path) -> None:
    for wrong in ("yes", 1, None):
        with pytest.raises(ValueError, match="broadcast: "):
            FileSystemReader(directory, broadcast=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_numel", [1, 2, 3, 7, 24, 100])
@pytest.mark.parametrize("lengths", [(), (5,), (4, 6), (2, 3, 4), (1, 24)])
def test_boxes_cover_each_element_once_in_order(lengths: tuple[int, ...], max_numel: int) -> None:
    numbers = torch.arange(math.prod(lengths)).view(lengths)
    found = []
    for offsets, sizes in sharing._boxes(lengths, max_numel):
        assert math.prod(sizes) <= max_numel
        place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        found.extend(numbers[place].reshape(-1).tolist())
    assert found == list(range(numbers.numel()))


def peak_of_load(rank: int, path: str) -> int:
    """Load 320 MiB, and return by how much memory grew meanwhile."""
    from tensorferry.tuning.stopwatch import Stopwatch

    loaded = {str(k): torch.ones(16 * MIB, dtype=torch.bfloat16) for k in range(10)}
    with Stopwatch() as watch:
        dcp.load(loaded, storage_reader=FileSystemReader(path, broadcast=True))
    assert all(bool((value == k).all()) for k, value in enumerate(loaded.values()))
    assert watch.peak_growth_nbytes is not None
    return watch.peak_growth_nbytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_shared_load_takes_little_memory(directory: pathlib.Path, world_size: int) -> None:
    # Of another dtype than those it is loaded into.
    save({str(k): torch.full((16 * MIB,), float(k)) for k in range(10)}, directory)
    peaks = call_on_ranks(world_size, peak_of_load, str(directory))
    assert max(peaks) <= 96 * MIB
