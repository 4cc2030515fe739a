"""One rank reads the data that several ranks need, and sends them on; a failure on one rank ends the load on all."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from tensorferry import checkpoint
from tensorferry.checkpoint import FileSystemReader, FileSystemWriter
from tensorferry.checkpoint.storage import sharing
from tensorferry.safetensors.dtypes import DTYPES
from tensorferry.safetensors.sharded import save_sharded
from tests.checkpoint.damage import flip
from tests.checkpoint.states import assert_same, empty_like, metadata_of, mixed_state, save
from tests.safetensors.files import written
from tests.support.ranks import call_on_ranks

if TYPE_CHECKING:
    from tests.support.faultfs import FaultFS

needs_hugging_face = pytest.mark.skipif(
    not hasattr(dcp, "HuggingFaceStorageReader"), reason="this torch has no such storage"
)

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


def load_replicated(rank: int, path: str, kind: str = "FileSystemReader", **options: Any) -> int:
    torch.manual_seed(rank)
    loaded = {key: torch.zeros_like(value) for key, value in replicated().items()}
    reader = getattr(checkpoint, kind)(path, **options)
    dcp.load(loaded, storage_reader=reader)
    assert_same(loaded, replicated())
    assert reader.last_load is not None
    assert reader.last_load.nbytes == nbytes_of(loaded)
    read: int = reader.nbytes_read
    return read


def load_in_each_way(rank: int, path: str, kind: str) -> list[int]:
    ways: list[Any] = [{"broadcast": way} for way in (True, False, "auto")]
    return [load_replicated(rank, path, kind, **options) for options in [*ways, {}]]


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        (3, "FileSystemReader"),
        pytest.param(2, "HuggingFaceStorageReader", marks=needs_hugging_face),
    ],
)
def test_each_byte_of_a_replicated_state_is_read_once(
    directory: Path, world_size: int, kind: str
) -> None:
    if kind == "FileSystemReader":
        save(replicated(), directory)
    else:
        save_sharded(replicated(), directory, "30MB")
    nbytes = nbytes_of(replicated())
    shared, alone, auto, default = zip(
        *call_on_ranks(world_size, load_in_each_way, str(directory), kind), strict=True
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


@pytest.mark.parametrize(
    ("writer", "size", "verify"),
    [
        (FileSystemWriter, sharing.PART_NBYTES, "read"),
        (FileSystemWriter, 100_000, "before"),
        (FileSystemWriter, 100_000, "off"),
        (dcp.FileSystemWriter, 100_000, "read"),
    ],
)
def test_ranks_that_want_different_things_get_all_of_them(
    directory: Path, writer: Any, size: int, verify: str
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


def test_replicas_of_shards_are_read_once(directory: Path) -> None:
    read = call_on_ranks(4, load_hybrid, str(directory))
    assert sum(read) <= 1.1 * 16 * MIB


def zeros(size: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of any dtype: torch fills not all of them."""
    *outer, inner = size
    return torch.zeros((*outer, inner * dtype.itemsize), dtype=torch.uint8).view(dtype)


def load_of_all_kinds(rank: int, path: str, alone: list[str], size: int) -> list[int]:
    """Load tensors of all dtypes, and some of them into another one, as they are loaded without sharing."""
    sharing.PART_NBYTES = size
    read = []
    for into in (None, torch.float64):
        states: list[dict[str, Any]] = []
        for broadcast in (False, True):
            reader: Any = checkpoint.HuggingFaceStorageReader(path, broadcast=broadcast)
            described = reader.read_metadata().state_dict_metadata
            state: dict[str, Any] = {
                key: zeros(each.size, into or each.properties.dtype)
                for key, each in described.items()
                if into is None or each.properties.dtype in (torch.float32, torch.bfloat16)
                if rank == 0 or key not in alone
            }
            dcp.load(state, storage_reader=reader)
            read.append(reader.nbytes_read)
            states.append(state)
        for key, value in states[0].items():
            assert value.reshape(-1).view(torch.uint8).any()
            assert torch.equal(
                states[1][key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
            )
    return read


@needs_hugging_face
@pytest.mark.parametrize("size", [sharing.PART_NBYTES, 100000], ids=["large", "small"])
def test_tensors_of_all_dtypes_are_those_without_sharing(directory: Path, size: int) -> None:
    nbytes = 1 << 20
    kinds = [each for each in DTYPES.values() if each.torch and hasattr(torch, each.torch)]
    data = bytes(1 + k % 63 for k in range(nbytes))
    for number in range(2):
        entries = {
            f"{kind.name}.{number}": (
                kind.name,
                [64, nbytes // 64 * 8 // kind.bits],
                data if kind.name != "BOOL" else bytes([0, 1]) * (nbytes // 2),
            )
            for kind in kinds
        }
        written(directory / f"{number}.safetensors", entries)
    alone = ["F32.0", "I8.1"]  # of rank 0
    read = call_on_ranks(2, load_of_all_kinds, str(directory), alone, size)
    total = 2 * nbytes * len(kinds)
    assert sum(rank[0] for rank in read) == 2 * total - len(alone) * nbytes
    assert total <= sum(rank[1] for rank in read) <= 1.05 * total


def load_parts(rank: int, path: str) -> int:
    """Save shards of ranks, and load replicas of them and all of it."""
    writer = checkpoint.HuggingFaceStorageWriter(path, save_distributed=True)
    dcp.save({"a": hybrid(1)}, storage_writer=writer)
    loaded = {"a": hybrid(2)}
    whole = {"a": torch.zeros(4096, 1024)}
    read = 0
    for state in (loaded, whole):
        reader: Any = checkpoint.HuggingFaceStorageReader(path, broadcast=True)
        dcp.load(state, storage_reader=reader)
        read += reader.nbytes_read
    assert torch.equal(loaded["a"].to_local(), hybrid(1).to_local())
    assert torch.equal(whole["a"], hybrid(1).full_tensor())
    return read


@needs_hugging_face
def test_parts_of_ranks_are_read_once(directory: Path) -> None:
    assert sum(call_on_ranks(4, load_parts, str(directory))) <= 1.1 * 2 * 16 * MIB


def load_what_changes(rank: int, path: str, of_header: bool) -> list[str]:
    """Load while a file is replaced: for rank 1 before it reads the header, or for both after that."""
    (file,) = Path(path).glob("*.safetensors")

    def replace() -> None:
        if rank == 1:
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content)

    class Late(checkpoint.HuggingFaceStorageReader):
        def read_metadata(self, *arguments: Any, **options: Any) -> Any:
            if of_header and rank == 1:
                dist.barrier()
                replace()
            metadata = super().read_metadata(*arguments, **options)
            if of_header and rank == 0:
                dist.barrier()
            return metadata

        def read_data(self, *arguments: Any) -> Any:
            if not of_header:
                dist.barrier()
                replace()
                dist.barrier()
            return super().read_data(*arguments)

    loaded = {key: torch.zeros_like(value) for key, value in twelve().items()}
    try:
        dcp.load(loaded, storage_reader=Late(path, broadcast=True))
    except CheckpointException as error:
        assert not any(value.any() for value in loaded.values())
        return [f"{type(each).__name__}: {each}" for _, (each, _) in sorted(error.failures.items())]
    raise AssertionError("loaded")


@needs_hugging_face
@pytest.mark.parametrize("of_header", [True, False])
def test_what_ranks_have_read_of_different_files_is_not_mixed(
    directory: Path, of_header: bool
) -> None:
    save_sharded(twelve(), directory)
    first, second = call_on_ranks(2, load_what_changes, str(directory), of_header)
    assert first == second
    wanted = "ValueError: path: ranks of a node" if of_header else "CheckpointError: "
    assert all(each.startswith(wanted) for each in first)
    assert len(first) == (1 if of_header else 2)


def load_by_what_is_installed(rank: int, path: str) -> int:
    checkpoint.install(broadcast=True)
    try:
        reader: Any = dcp.HuggingFaceStorageReader(path)
        loaded = {key: torch.zeros_like(value) for key, value in twelve().items()}
        dcp.load(loaded, storage_reader=reader)
        assert_same(loaded, twelve())
    finally:
        checkpoint.uninstall()
    read: int = reader.nbytes_read
    return read


@needs_hugging_face
def test_readers_that_libraries_make_share_once_that_is_installed(directory: Path) -> None:
    save_sharded(twelve(), directory)
    read = call_on_ranks(2, load_by_what_is_installed, str(directory))
    assert sum(read) == nbytes_of(twelve())
    checkpoint.install(broadcast=True)
    checkpoint.uninstall()
    options = inspect.signature(checkpoint.HuggingFaceStorageReader.__init__).parameters
    assert options["broadcast"].default is False


class Moving(DefaultLoadPlanner):
    """A planner that returns the same memory for all tensors, and copies them from there."""

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


def test_planner_may_lend_the_same_memory_again(directory: Path) -> None:
    save(replicated(), directory)
    call_on_ranks(2, load_by_planner, str(directory))


class Scaled(torch.Tensor):
    """A tensor subclass that represents numbers by bytes and a scale, as quantizing libraries have them."""

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
def test_quantized_tensors_are_loaded_as_without_sharing(directory: Path, writer: Any) -> None:
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
    directory: Path,
) -> None:
    save(twelve(), directory)
    (file,) = directory.glob("*.distcp")
    flip(file, 6 * file.stat().st_size + 8 * MIB)  # within a tensor
    first, second = call_on_ranks(2, failures_of, str(directory))
    assert first == second
    assert len(first) == 2
    assert all(each.startswith("CheckpointError: ") and str(file) in each for each in first)
    assert first[0] == first[1]


def test_ctrl_c_in_a_planner_of_one_rank_ends_the_load_on_all(directory: Path) -> None:
    save(twelve(), directory)
    first, second = call_on_ranks(2, failures_of, str(directory), Failing)
    assert first == second
    assert first == [
        "RuntimeError: another rank was interrupted by KeyboardInterrupt()",
        "KeyboardInterrupt: ",
    ]


def own_failures(rank: int, path: str) -> tuple[list[str], int]:
    """Load shared tensors, and on rank 1 also a missing one; then load the shared tensors only."""
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
    directory: Path,
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


def test_ranks_that_could_not_meet_are_told(directory: Path) -> None:
    save({"shared": torch.ones(MIB)}, directory)
    first, second, _ = call_on_ranks(3, other_options, str(directory))
    assert first == second
    assert first[0] == "broadcast: ranks differ: True, False"
    assert first[1].startswith("process_group: 2 ranks load")


def test_what_broadcast_may_be(directory: Path) -> None:
    for wrong in ("yes", 1, None):
        with pytest.raises(ValueError, match="broadcast: "):
            FileSystemReader(directory, broadcast=wrong)  # type: ignore[arg-type]


@needs_hugging_face
def test_what_it_may_be_for_files_of_hugging_faces(directory: Path) -> None:
    for wrong in ("yes", 1, None):
        with pytest.raises(ValueError, match="broadcast: "):
            checkpoint.HuggingFaceStorageReader(directory, broadcast=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [(4, 3), (2, 3)], ids=["whole", "pieces"])
def test_inference_tensors_get_what_other_ranks_have_read(piece: tuple[int, ...]) -> None:
    wanted = sharing.RequestedSlice(MetadataIndex("a", torch.Size([0, 0])), (0, 0), (4, 3))
    boxes = [
        sharing.SharedBox(0, wanted, torch.float32, (begin, 0), piece)
        for begin in range(0, 4, piece[0])
    ]
    whole = boxes[0]._replace(lengths=(4, 3)).request
    with torch.inference_mode():
        target = torch.zeros(4, 3)
    done: list[Any] = []
    arrivals = sharing.Arrivals(
        [whole], lambda *_: target, lambda *each: done.append(each), lambda _: None
    )
    for box in boxes:
        arrivals.add(box, torch.ones(piece))
    assert bool((target == 1).all())
    assert len(done) == 1


def peak_of_load(rank: int, path: str) -> int:
    """Load 320 MiB, and return the growth of memory during the load."""
    from tensorferry.tuning.stopwatch import Stopwatch

    loaded = {str(k): torch.ones(16 * MIB, dtype=torch.bfloat16) for k in range(10)}
    with Stopwatch() as watch:
        dcp.load(loaded, storage_reader=FileSystemReader(path, broadcast=True))
    assert all(bool((value == k).all()) for k, value in enumerate(loaded.values()))
    assert watch.peak_growth_nbytes is not None
    return watch.peak_growth_nbytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_shared_load_takes_little_memory(directory: Path, world_size: int) -> None:
    # Of another dtype than those it is loaded into.
    save({str(k): torch.full((16 * MIB,), float(k)) for k in range(10)}, directory)
    peaks = call_on_ranks(world_size, peak_of_load, str(directory))
    assert max(peaks) <= 160 * MIB  # of 320
