"""Files and folders of all formats, sound and damaged: `convert`, `ls`, `verify` and loads are right, or refuse.

A place is a state that a writer of this project, torch or safetensors has saved in one of the formats. It may then be
damaged: a file is missing, duplicated or old. The tests convert it in both directions, and other libraries read the
results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, Literal

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import safetensors
from tensorferry.checkpoint import (
    CheckpointError,
    FileSystemReader,
    FileSystemWriter,
    load,
    save,
    verify,
)
from tensorferry.checkpoint.tools import entries
from tensorferry.safetensors.errors import SafetensorError
from tensorferry.safetensors.plans import load_files
from tensorferry.safetensors.sharded import INDEX_NAME, save_sharded
from tensorferry.safetensors.torch import load as load_bytes
from tensorferry.safetensors.torch import load_file
from tests.safetensors.files import loaded
from tests.support.effort import examples

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("torch.distributed.checkpoint.hf_storage")
from torch.distributed.checkpoint import hf_storage

from tensorferry.checkpoint.storage.huggingface import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from tensorferry.checkpoint.tools.convert import convert
from tensorferry.checkpoint.tools.formats import SAFETENSORS, format_of

State = dict[str, torch.Tensor]
REFUSALS = (CheckpointError, SafetensorError, OSError)
RIGHT, REFUSED, EITHER = "right", "refused", "either"
PUT_ASIDE = "model-00001-of-00002.old-0123abcd.safetensors"

DTYPES = [
    torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.uint16, torch.float64,
]  # fmt: skip
SHAPES = [(), (0,), (3,), (1,), (2, 3), (0, 3), (4, 5), (3, 1, 2)]
KEYS = ["a", "b", "weight", "layers", "0", "é", "a b", "optimizer"]


@dataclasses.dataclass
class Place:
    """A place, and the truth about it.

    Attributes
    ----------
    path : Path
        Where it is.
    tensors : dict of str to torch.Tensor
        Its tensors.
    metadata : dict of str to str
        The metadata of safetensors files.
    outcome : "right", "refused" or "either"
        The expected outcome.
    tensors_only : bool
        Whether it has something else, which is to be left out.
    """

    path: pathlib.Path
    tensors: State
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    outcome: Literal["right", "refused", "either"] = "right"
    tensors_only: bool = False


class Draw:
    """Draws for one place, by a function that draws an integer from a first to a last one."""

    def __init__(self, number: Callable[[int, int], int], folder: pathlib.Path) -> None:
        self.number = number
        self.folder = folder

    def one(self, choices: Any) -> Any:
        found = list(choices)
        return found[self.number(0, len(found) - 1)]

    def some(self, count: int, choices: Any) -> list[Any]:
        found = list(choices)
        return [found.pop(self.number(0, len(found) - 1)) for _ in range(count)]

    def chance(self, one_in: int) -> bool:
        return self.number(1, one_in) == one_in

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = self.one(DTYPES) if dtype is None else dtype
        shape = shape or self.one(SHAPES)
        values = torch.randint(0, 100, shape, generator=self.generator)
        if dtype.is_complex:
            return torch.complex(values.float(), torch.randint(0, 100, shape).float()).to(dtype)
        return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.number(0, 1 << 16))

    def state(self, least: int = 1) -> State:
        keys = [f"{a}.{b}" for a in KEYS for b in KEYS] + KEYS
        return {name: self.tensor() for name in self.some(self.number(least, 5), keys)}


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return plain.dtype, plain.shape, data


def assert_are(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert bits(found[name]) == bits(tensor), name


# --- files of torch.save's ---


class Leaf:
    """Kinds of tensors in files that all tools must read."""

    @staticmethod
    def plain(draw: Draw) -> Any:
        return draw.tensor()

    @staticmethod
    def part(draw: Draw) -> Any:
        return draw.tensor(6, 2)[draw.number(0, 3) : 5]

    @staticmethod
    def transposed(draw: Draw) -> Any:
        return draw.tensor(2, 5).t()

    @staticmethod
    def parameter(draw: Draw) -> Any:
        return torch.nn.Parameter(draw.tensor(3, dtype=torch.float32))

    @staticmethod
    def conjugate(draw: Draw) -> Any:
        return draw.tensor(3, 2, dtype=torch.complex64).conj()

    @staticmethod
    def transposed_conjugate(draw: Draw) -> Any:
        return draw.tensor(3, 2, dtype=torch.complex64).mH

    @staticmethod
    def negative(draw: Draw) -> Any:
        return torch._neg_view(draw.tensor(4, dtype=draw.one([torch.float32, torch.int64])))

    @staticmethod
    def both(draw: Draw) -> Any:
        return torch._neg_view(draw.tensor(4, dtype=torch.complex64).conj())


class Odd(Leaf):
    """Kinds of tensors that tools may refuse."""

    @staticmethod
    def imaginary(draw: Draw) -> Any:
        return draw.tensor(1, dtype=torch.complex64).conj().imag

    @staticmethod
    def apart(draw: Draw) -> Any:
        return draw.tensor(4, 4)[:, :2]

    @staticmethod
    def expanded(draw: Draw) -> Any:
        return draw.tensor(1).expand(3)

    @staticmethod
    def with_attributes(draw: Draw) -> Any:
        tensor = draw.tensor(3)
        tensor.scale = draw.one([2.0, torch.ones(2)])  # type: ignore[attr-defined]
        return tensor

    @staticmethod
    def not_of_the_format(draw: Draw) -> Any:
        return draw.tensor(3, dtype=torch.complex64).to(torch.complex128).conj()


class Unknown:
    """Kinds of tensors that tools must refuse."""

    @staticmethod
    def sparse(draw: Draw) -> Any:
        return torch.eye(3).to_sparse()

    @staticmethod
    def quantized(draw: Draw) -> Any:
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)

    @staticmethod
    def storage(draw: Draw) -> Any:
        return torch.ones(4).untyped_storage()

    @staticmethod
    def deep(draw: Draw) -> Any:
        value: Any = torch.ones(3)
        for _ in range(120):
            value = [value]
        return value


class Kept(dict[str, Any]):
    """Of a class that is not made."""


NO_TENSORS = [3, "text", None, 2.5, True, {}, [], torch.float32, torch.Size([1])]


def ways(kind: Any) -> list[Any]:
    return [way for name, way in vars(kind).items() if not name.startswith("_")]


def files(draw: Draw) -> Place:
    """Return a file written by torch.save or by our own save."""
    found = Place(draw.folder / draw.one(["s.pt", "s.bin", "blob"]), {})
    containers: list[Any] = []
    tensors: list[torch.Tensor] = []

    def leaf() -> Any:
        if tensors and draw.chance(4):
            return draw.one(tensors)  # tied
        if draw.chance(40):
            found.outcome = REFUSED
            return draw.one(ways(Unknown)).__func__(draw)
        if draw.chance(20):
            if found.outcome == RIGHT:
                found.outcome = EITHER
            tensors.append(draw.one(ways(Odd)).__func__(draw))
        else:
            tensors.append(draw.one(ways(Leaf)).__func__(draw))
        return tensors[-1]

    def container(depth: int) -> Any:
        values = []
        for _ in range(draw.number(1, 3)):
            if containers and draw.chance(4):
                values.append(draw.one(containers))  # under a second name
            elif depth < 3 and draw.chance(3):
                values.append(container(depth + 1))
            elif draw.chance(12):
                found.tensors_only = True
                values.append(draw.one(NO_TENSORS))
            else:
                values.append(leaf())
        keys = draw.some(len(values), [*KEYS, 1, 2, 7])
        kind = draw.one([dict, dict, list, tuple, Kept])
        made = kind(zip(keys, values, strict=True)) if issubclass(kind, dict) else kind(values)
        found.tensors_only |= kind is Kept
        containers.append(made)
        return made

    def flatten(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if name in found.tensors:  # "a": {"b": ...} and "a.b"
                found.outcome = REFUSED
            found.tensors[name] = value
            flatten(vars(value).get("scale"), f"{name}.scale")
        elif isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, child in items:
                flatten(child, f"{name}.{key}" if name else str(key))

    root = container(0)
    flatten(root, "")
    write = draw.one([torch.save, save])
    write(root, found.path)
    if draw.chance(20):
        torch.save(root, found.path, _use_new_zipfile_serialization=False)
        found.outcome = REFUSED
    elif draw.chance(10):
        data = found.path.read_bytes()
        found.path.write_bytes(data[: draw.number(0, len(data) - 1)])
        found.outcome = REFUSED
    return found


# --- safetensors ---


def metadata(draw: Draw, state: State) -> dict[str, str]:
    found = {}
    if draw.chance(3):
        found["trained_with"] = "recipe 7"
    if draw.chance(3):
        found["tied.weight"] = draw.one(state)
    if draw.chance(6):
        found["format"] = "mlx"
    return found


def one_file(draw: Draw) -> Place:
    """Return a safetensors file: given directly, under any name, or as the only one in a folder."""
    state = draw.state()
    said = metadata(draw, state)
    name = draw.one(["model.safetensors", "0123abcd", "x.bin", "folder"])
    path = draw.folder / name
    file = path
    if name == "folder":
        path.mkdir()
        file = path / draw.one(["model.safetensors", "other.safetensors"])
    safetensors.torch.save_file(state, file, {"format": "pt"} | said)
    found = Place(path, state, said)
    if draw.chance(10):
        data = file.read_bytes()
        file.write_bytes(
            draw.one(
                [data[:-1], b"version https://git-lfs.github.com/spec/v1\noid", b"<!DOCTYPE html>"]
            )
        )
        found.outcome = REFUSED if any(tensor.numel() for tensor in state.values()) else EITHER
    return found


def several_files(draw: Draw) -> Place:
    """Return a model in several files, with or without an index, perhaps with typical damage."""
    state = draw.state(least=2)
    state = {name: draw.tensor(3, 4) if not t.numel() else t for name, t in state.items()}
    said = metadata(draw, state)
    path = draw.folder / "model"
    weights = save_sharded(state, path, 1, said)
    found = Place(path, state, said)
    index, shards = path / INDEX_NAME, sorted(set(weights.values()))
    shard = path / draw.one(shards)
    text = json.loads(index.read_text())
    what = draw.number(0, 17)
    if what == 0:
        shard.unlink()
        found.outcome = REFUSED
    elif what == 1:
        index.unlink()
    elif what == 2:
        index.unlink()
        shard.unlink()
        found.outcome = REFUSED
    elif what == 3:
        index.write_text(index.read_text()[: draw.number(0, index.stat().st_size - 3)])
        found.outcome = REFUSED
    elif what == 4:  # the index is older than a file of it
        del text["weight_map"][draw.one(state)]
        index.write_text(json.dumps(text))
        found.outcome = REFUSED
    elif what == 5:
        text["weight_map"]["more"] = shard.name
        index.write_text(json.dumps(text))
        found.outcome = REFUSED
    elif what == 6:  # as some repositories have it
        other = {f"other.{name}" if draw.chance(2) else name: t for name, t in state.items()}
        safetensors.torch.save_file(other, path / "consolidated.safetensors")
    elif what == 7:
        safetensors.torch.save_file(draw.state(), path / "model.safetensors")
        found.outcome = REFUSED
    elif what == 8:
        shutil.copy(shard, path / "copy.safetensors")
    elif what == 9:
        shutil.copy(shard, path / "copy.safetensors")
        index.unlink()
        found.outcome = REFUSED
    elif what == 10:  # a library has put one file in the place of all
        for name in shards:
            (path / name).unlink()
        safetensors.torch.save_file(state, path / "model.safetensors", {"format": "pt"} | said)
    elif what == 11:
        for name in shards:
            (path / name).unlink()
        found.outcome = REFUSED
        if draw.chance(2):
            lesser = dict(list(state.items())[1:])
            safetensors.torch.save_file(lesser, path / "model.safetensors")
    elif what == 12:
        found.path = shard
        found.outcome = REFUSED
    elif what == 13:
        found.path = index
    elif what == 14:  # what a killed save has left
        (path / PUT_ASIDE).write_bytes(shard.read_bytes())
    elif what == 15:
        tensors = safetensors.torch.load_file(shard)
        said_here = {"trained_with": "another recipe", "format": "pt"}
        safetensors.torch.save_file(tensors, shard, said_here)
        found.tensors_only = len(shards) > 1 and "trained_with" in said
        found.metadata = {
            key: value
            for key, value in {**said_here, **said}.items()
            if key != "trained_with" or not found.tensors_only
        }
        if said.get("format", "pt") != "pt" and len(shards) > 1:
            found.tensors_only = True
            del found.metadata["format"]
    return found


# --- checkpoints and files of ranks ---


class Boxes(dcp.DefaultSavePlanner):
    """A rank's planner, which gives parts of tensors."""

    def __init__(self, state: State, parts: list[tuple[str, tuple[int, ...], tuple[int, ...]]]):
        super().__init__()
        self.state = state
        items = []
        for name, offsets, sizes in parts:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            properties = TensorProperties(dtype=state[name].dtype)
            data = TensorWriteData(chunk, properties, state[name].size())
            where = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(where, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={name: (name,) for name, _, _ in parts})

    def resolve_data(self, write_item: WriteItem) -> Any:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state[write_item.index.fqn][place].contiguous()


def shared_out(draw: Draw, state: State, ranks: int) -> list[Boxes]:
    """Give each rank parts of tensors, which are cut along one dimension or two, or given to one rank."""
    parts: list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = [[] for _ in range(ranks)]
    for name, tensor in state.items():
        dims = [dim for dim, size in enumerate(tensor.shape) if size]
        cuts = [[(0, size)] for size in tensor.shape]
        if tensor.numel() and dims and not draw.chance(3):
            for dim in draw.one([dims[:1], dims[-1:], dims[:2]]):
                step = -(-tensor.shape[dim] // ranks)
                cuts[dim] = [
                    (at, min(step, tensor.shape[dim] - at))
                    for at in range(0, tensor.shape[dim], step)
                ]
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
        for cut in cuts:
            boxes = [((*o, begin), (*s, size)) for o, s in boxes for begin, size in cut]
        for number, (offsets, sizes) in enumerate(boxes):
            # A rank's file of safetensors may have one part of each tensor.
            rank = number if len(boxes) > 1 else draw.number(0, ranks - 1)
            if rank < ranks:
                parts[rank].append((name, offsets, sizes))
            else:
                parts.append([(name, offsets, sizes)])
    return [Boxes(state, each) for each in parts]


def by_ranks(writer: Callable[[], Any], planners: list[Boxes]) -> None:
    """Save as ranks do, one after the other in this process."""
    writers = [writer() for _ in planners]
    plans = []
    for rank, (one, planner) in enumerate(zip(writers, planners, strict=True)):
        one.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(one.prepare_local_plan(planner.plan))
    plans, described = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        one.write_data(plan, planner).wait()
        for one, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    writers[0].finish(described, results)


def checkpoints(draw: Draw) -> Place:
    """A checkpoint of torch.distributed.checkpoint, of one rank or several."""
    state = draw.state()
    path = draw.folder / "checkpoint"
    kind = draw.one([FileSystemWriter, dcp.FileSystemWriter])
    planners = shared_out(draw, state, draw.number(1, 3))
    by_ranks(lambda: kind(path), planners)
    found = Place(path, state)
    data = sorted(each for each in path.glob("*.distcp") if each.stat().st_size)
    if data and draw.chance(4):
        file = draw.one([*data, path / ".metadata"])
        if draw.chance(2):
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
        # Empty tensors lose no data.
        found.outcome = REFUSED if all(tensor.numel() for tensor in state.values()) else EITHER
    elif draw.chance(8):
        save_sharded(state, path)
        found.outcome = REFUSED
    return found


def ranks_files(draw: Draw) -> Place:
    """Files of safetensors with parts of tensors, written by our ranks or torch's."""
    state = draw.state()
    path = draw.folder / "shards"
    kind = draw.one([HuggingFaceStorageWriter, hf_storage.HuggingFaceStorageWriter])
    planners = shared_out(draw, state, draw.number(1, 3))
    mapping = None
    if draw.chance(3) and len(state) > 1:
        mapping = {name: 1 + number % 2 for number, name in enumerate(state)}
    if draw.chance(4):  # over an existing file
        save_sharded(draw.state(), path, draw.one([1, "1GB"]))
        if kind is not HuggingFaceStorageWriter:
            shutil.rmtree(path)
    by_ranks(lambda: kind(str(path), mapping, save_distributed=True), planners)
    found = Place(path, state)
    written = sorted(path.glob("*.safetensors"))
    if kind is HuggingFaceStorageWriter and draw.chance(3):
        file = draw.one(written)
        what = draw.number(0, 4)
        if what == 0 and len(written) > 1:
            file.unlink()
            found.outcome = REFUSED
        elif what == 1:
            file.rename(path / file.name.replace("shard-0", "shard-1"))
        elif what == 2:
            shutil.copy(file, path / file.name.replace("shard-0", "shard-1"))
            found.outcome = REFUSED
        elif what == 3:
            other = draw.folder / "other"
            by_ranks(lambda: kind(str(other), mapping, save_distributed=True), planners)
            shutil.copy(other / file.name, file)
            found.outcome = REFUSED if len(written) > 1 else RIGHT
        else:
            found.path = file
            found.outcome = REFUSED
    elif draw.chance(6):  # which are the newer ones?
        old = draw.folder / "old"
        save_sharded({"x": torch.ones(2), "y": torch.ones(2)}, old, 1)
        for each in old.iterdir():
            shutil.copy(each, path)
        found.outcome = REFUSED
    return found


# --- the findings of readers ---


def read_checkpoint(path: pathlib.Path) -> tuple[State, dict[str, str]]:
    """Read a checkpoint by torch."""
    reader = dcp.FileSystemReader(path)
    described = reader.read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in described.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    said = found.pop("__metadata__", {})
    return found, said


def read(path: pathlib.Path) -> tuple[State, dict[str, str]]:
    """Read a place with the libraries that define its formats."""
    if (path / ".metadata").exists():
        found, said = read_checkpoint(path)
        for name, own in said.items():
            if own in found and name != "format":
                assert bits(found.pop(name)) == bits(found[own])
        return found, said
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    said = {}
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            said |= opened.metadata() or {}
    return (safetensors.torch.load_file(path) if path.is_file() else loaded(path)), said


def assert_read(path: pathlib.Path, place: Place) -> None:
    found, said = read(path)
    assert_are(found, place.tensors)
    if said or place.metadata:
        assert {"format": "pt"} | said == {"format": "pt"} | place.metadata


def assert_others_agree(place: Place) -> None:
    """Compare the results of `ls`, `verify` and loads with the truth, or expect a refusal."""
    truth = {name: (str(t.dtype)[6:], tuple(t.shape)) for name, t in place.tensors.items()}
    is_of_ranks = any(place.path.glob("shard-*"))
    is_file = place.path.is_file()
    with contextlib.suppress(*REFUSALS):
        listed = entries(place.path)
        told = {
            entry.name: (entry.dtype, entry.shape)
            for entry in listed
            if entry.dtype and place.metadata.get(entry.name) not in place.tensors
        }
        # `ls` of a single file lists the file's own tensors, even if it is a part of a damaged model.
        if not is_file or place.outcome == RIGHT:
            assert len(listed) == len({entry.name for entry in listed})
            assert told == truth
            assert place.outcome != REFUSED or (place.path / ".metadata").exists()
    try:
        sound = verify(place.path).sound
    except REFUSALS:
        sound = False
    if place.outcome == RIGHT:
        assert sound
        assert told == truth
    elif place.outcome == REFUSED and not is_file and not (place.path / ".metadata").exists():
        # Files without an index may belong to several models, and be sound separately.
        assert not sound or (place.path / "copy.safetensors").exists()
    if place.path.is_dir() and any(place.path.glob("*.safetensors")):
        for read_all in (load_all, load_by_dcp):
            if is_of_ranks and read_all is load_all:
                continue
            try:
                found = read_all(place.path)
            except (*REFUSALS, dcp.api.CheckpointException):
                assert place.outcome != RIGHT
                continue
            if not (place.path / ".metadata").exists():
                # An index selects the tensors: a load does not miss tensors that it does not name.
                assert all(bits(t) == bits(place.tensors[name]) for name, t in found.items())
                assert place.outcome != RIGHT or found.keys() == place.tensors.keys()


def load_all(path: pathlib.Path) -> State:
    return dict(load_files(path))


def load_by_dcp(path: pathlib.Path) -> State:
    reader = HuggingFaceStorageReader(path)
    found = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def target_of(path: pathlib.Path, draw: Draw) -> str:
    """Draw the name of a target for a conversion: safetensors become a folder, and all else either."""
    with contextlib.suppress(*REFUSALS):
        if format_of(str(path)) is not SAFETENSORS:
            return str(draw.one(["out.safetensors", "out"]))
    return "out"


@pytest.mark.parametrize("make", [files, one_file, several_files, checkpoints, ranks_files])
@settings(
    deadline=None,
    max_examples=examples(15),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_what_a_place_holds_is_told_right_or_refused(
    make: Callable[[Draw], Place], data: st.DataObject
) -> None:
    check(make, lambda first, last: data.draw(st.integers(first, last)))


def check(make: Callable[[Draw], Place], number: Callable[[int, int], int]) -> None:
    with tempfile.TemporaryDirectory(prefix="place-") as folder:
        root = pathlib.Path(folder)
        (root / "place").mkdir()
        draw = Draw(number, root / "place")
        place = make(draw)
        assert_others_agree(place)
        target = target_of(place.path, draw)
        options: Any = {"max_shard_nbytes": draw.one([1, 50, "1GB"])}
        (root / "first").mkdir()
        first = root / "first" / target
        if place.tensors_only and place.outcome == RIGHT:
            with pytest.raises(REFUSALS):
                convert(place.path, first, **options)
        try:
            convert(place.path, first, **options, tensors_only=place.tensors_only)
        except REFUSALS:
            assert place.outcome != RIGHT
            assert not first.exists() or not any(first.iterdir())
            return
        assert place.outcome != REFUSED
        assert_read(first, place)
        assert_others_agree(dataclasses.replace(place, path=first, outcome=EITHER))
        (root / "second").mkdir()
        second = root / "second" / target_of(first, draw)
        convert(first, second, **options)
        assert_read(second, place)


# --- messages ---


def assert_all_refuse(path: pathlib.Path, match: str) -> None:
    """Check that all readers refuse a place, each with a reason."""
    for look in (
        entries,
        load_all,
        load_by_dcp,
        lambda path: convert(path, path.parent / "out"),
    ):
        with pytest.raises(REFUSALS, match=match):
            look(path)
    report = verify(path)
    assert any(re.search(match, str(problem)) for problem in report.problems)


def test_a_file_that_any_rank_has_written_is_missed(directory: pathlib.Path) -> None:
    state = {"w": torch.arange(6.0), "last": torch.ones(2, 3)}
    parts = [[("w", (2 * k,), (2,))] for k in range(3)]
    parts[2].append(("last", (0, 0), (2, 3)))
    planners = [Boxes(state, each) for each in parts]
    path = directory / "model"
    by_ranks(lambda: HuggingFaceStorageWriter(str(path), save_distributed=True), planners)
    assert_are(load_by_dcp(path), state)
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        file.unlink()
        assert_all_refuse(path, "had 3 files, of which 2")
        file.write_bytes(data)
    convert(path, directory / "whole")
    convert(directory / "whole", directory / "whole.safetensors")
    assert_are(safetensors.torch.load_file(directory / "whole.safetensors"), state)


def test_saves_of_whole_files_and_of_ranks_replace_each_other(directory: pathlib.Path) -> None:
    state = {"a": torch.ones(4), "b": torch.zeros(3)}
    of_ranks = [
        Boxes(state, [("a", (0,), (2,))]),
        Boxes(state, [("a", (2,), (2,)), ("b", (0,), (3,))]),
    ]
    for limit in (1, "1GB"):
        save_sharded({"x": torch.ones(2), "y": torch.ones(2)}, directory, limit)
        by_ranks(lambda: HuggingFaceStorageWriter(str(directory), save_distributed=True), of_ranks)
        assert len(list(directory.iterdir())) == 2
        assert_are(load_by_dcp(directory), state)
        save_sharded(state, directory, limit)
        assert_are(load_all(directory), state)
        assert not any(directory.glob("shard-*"))


def test_further_names_of_a_tensor_are_the_same_bytes_in_a_checkpoint(
    directory: pathlib.Path,
) -> None:
    state, said = {"first": torch.randn(1000)}, {"second": "first", "note": "x"}
    safetensors.torch.save_file(state, directory / "a.safetensors", {"format": "pt"} | said)
    convert(directory / "a.safetensors", directory / "checkpoint")
    data = sum(each.stat().st_size for each in (directory / "checkpoint").glob("*.distcp"))
    assert data < 1.9 * state["first"].nbytes
    assert verify(directory / "checkpoint").sound
    for reader in (dcp.FileSystemReader, FileSystemReader):
        found = {"first": torch.zeros(1000), "second": torch.zeros(1000)}
        dcp.load(found, storage_reader=reader(directory / "checkpoint"), no_dist=True)
        assert_are(found, {"first": state["first"], "second": state["first"]})
    convert(directory / "checkpoint", directory / "b.safetensors")
    with safetensors.safe_open(directory / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} | said
        assert file.keys() == ["first"]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        (b"\n<!DOCTYPE html><html>Sign in</html>", "web page"),
        (b'<?xml version="1.0"?><Error/>', "web page"),
    ],
)
def test_what_was_downloaded_instead_of_a_model_is_said(
    directory: pathlib.Path, data: bytes, match: str
) -> None:
    for name in ("model.safetensors", "pytorch_model.bin", INDEX_NAME):
        path = directory / name
        path.write_bytes(data)
        for look in (entries, verify, lambda path: convert(path, directory / "out")):
            try:
                said = str(look(path).problems[0])
            except REFUSALS as error:
                said = str(error)
            assert re.search(match, said)
        path.unlink()
    path = directory / "state.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match):
        load(path)
    with pytest.raises(SafetensorError, match=match):
        load_file(path)
    with pytest.raises(SafetensorError, match=match):
        load_bytes(data)
