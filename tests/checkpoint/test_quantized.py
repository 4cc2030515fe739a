"""torch's reader of quantised models on our engine: dequantised values equal those of torch's reader bit for bit."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tensorferry.checkpoint import CheckpointError, install, uninstall
from tensorferry.checkpoint.storage import destinations
from tensorferry.checkpoint.storage.reader import PreallocatedPlanner
from tensorferry.safetensors.errors import SafetensorError
from tests.support import child

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

torchs = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
quantized = pytest.importorskip("tensorferry.checkpoint.storage.quantized")
Reader, TorchsReader = (
    quantized.QuantizedHuggingFaceStorageReader,
    torchs.QuantizedHuggingFaceStorageReader,
)

MIB = 1 << 20
E4M3 = torch.float8_e4m3fn
INDEX = "model.safetensors.index.json"
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CODES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.uint8,
    torch.bfloat16,
    torch.float32,
]
SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8]


def save(folder: pathlib.Path, *files: Mapping[str, torch.Tensor]) -> None:
    """Write a model of several files, with its index."""
    owners = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        safetensors.torch.save_file(dict(tensors), folder / name)
        owners |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": owners}))


def random_codes(sizes: Sequence[int], dtype: torch.dtype = torch.uint8, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(sizes) * dtype.itemsize
    codes = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return codes.view(dtype).view(*sizes)


def random_scales(sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(*sizes, generator=generator).exp() * 3 - 1
    return scales.to(dtype)


def fp8(rows: int, columns: int, side: int = 128) -> dict[str, torch.Tensor]:
    blocks = -(-rows // side), -(-columns // side)
    return {
        "a.weight": random_codes((rows, columns), torch.float8_e4m3fn),
        "a.weight_scale_inv": random_scales(blocks),
    }


def mxfp4(*sizes: int) -> dict[str, torch.Tensor]:
    scales = random_codes(sizes[:-1], seed=2)
    if not torch.ldexp(torch.tensor(0.5), torch.tensor(128)).isfinite():  # before torch 2.10
        scales %= 255
    return {"a_blocks": random_codes(sizes), "a_scales": scales}


def values_of_mxfp4(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the expected values: two in each byte, the lower half first, multiplied by powers of two."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    blocks, scales = tensors["a_blocks"], tensors["a_scales"]
    values = table[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)


def requests_of(
    name: str, offsets: Sequence[int], lengths: Sequence[int], dims: int | None = None
) -> list[ReadItem]:
    where = MetadataIndex(name, torch.Size([0] * (dims or len(offsets))))
    place, size = torch.Size(offsets), torch.Size(lengths)
    return [ReadItem(LoadItemType.TENSOR, where, place, where, place, size)]


def read(reader: Any, requests: list[ReadItem], dtype: torch.dtype) -> torch.Tensor:
    """Read one slice, as a planner of one rank would have it."""
    target = torch.full(requests[0].lengths, 77.0).to(dtype)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    reader.read_data(LoadPlan(requests), PreallocatedPlanner([(requests[0], target)])).wait()
    return target


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = unsigned[found.dtype.itemsize]
    assert torch.equal(found.view(bits)[numbers], wanted.view(bits)[numbers])


@contextlib.contextmanager
def small_steps() -> Iterator[None]:
    """Make slabs, pieces and batches of scales small, which splits the reads of small tensors into many."""
    with (
        mock.patch.object(destinations, "_SLAB_NBYTES", 96),
        mock.patch.object(quantized, "_PIECE_NBYTES", 300),
        mock.patch.object(quantized, "_SCALES_NBYTES", 40),
    ):
        yield


@st.composite
def slices(draw: Any, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    offsets = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [
        draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True)
    ]
    return offsets, lengths


@pytest.mark.filterwarnings("ignore:tensors are converted")
@given(st.data())
def test_blocks_of_matrices_are_dequantised_as_torchs_reader_does(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    sizes = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    side = data.draw(st.integers(1, 50))
    codes, scales = data.draw(st.sampled_from(CODES)), data.draw(st.sampled_from(SCALES))
    target, wanted = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS))
    offsets, lengths = data.draw(slices(sizes))
    together, many = data.draw(st.booleans()), data.draw(st.booleans())
    weight = {"a.weight": random_codes(sizes, codes)}
    blocks = [-(-size // side) for size in sizes]
    scale = {"a.weight_scale_inv": random_scales(blocks, scales)}
    folder = tmp_path_factory.mktemp("model")
    save(folder, *([weight | scale] if together else [weight, scale]))
    requests = requests_of("a.weight", offsets, lengths)
    theirs = read(TorchsReader(str(folder), 1, target, side), requests, wanted)
    reader = Reader(folder, 1, target, side)
    with small_steps() if many else contextlib.nullcontext():
        ours = read(reader, requests, wanted)
    assert_same_bits(ours, theirs)
    if tuple(lengths) == sizes and not many:  # pieces that end within a block share its scales
        assert reader.nbytes_read == weight["a.weight"].nbytes + scale["a.weight_scale_inv"].nbytes


@pytest.mark.filterwarnings("ignore:tensors are converted")
@given(st.data())
def test_mxfp4_is_dequantised_as_torchs_reader_does(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    sizes = [data.draw(st.integers(1, each)) for each in (4, 6, 5, 9)]
    target, wanted = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(FLOATS))
    offsets, lengths = data.draw(slices((*sizes[:2], 2 * sizes[2] * sizes[3])))
    tensors, many = mxfp4(*sizes), data.draw(st.booleans())
    folder = tmp_path_factory.mktemp("model")
    save(folder, tensors)
    # torch's metadata differs for whole tensors: see below.
    torchs_reader = TorchsReader(str(folder), 1, target)
    theirs = read(torchs_reader, requests_of("a_blocks", offsets, lengths, dims=4), wanted)
    with small_steps() if many else contextlib.nullcontext():
        ours = read(Reader(folder, 1, target), requests_of("a_blocks", offsets, lengths), wanted)
    assert_same_bits(ours, theirs)


def test_a_slice_that_begins_within_blocks_has_the_scale_of_each(directory: pathlib.Path) -> None:
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save(directory, {"a.weight": torch.full((8, 8), 2.0).to(E4M3), "a.weight_scale_inv": scales})
    requests = requests_of("a.weight", [2, 1], [4, 4])
    wanted = torch.tensor([[2.0, 2, 2, 4]] * 2 + [[6.0, 6, 6, 8]] * 2)
    assert_same_bits(read(Reader(directory, block_size=4), requests, torch.float32), wanted)


@pytest.mark.parametrize("sizes", [(3, 5, 7, 16), (40, 90, 16), (6, 16), (1, 1, 1, 5000)], ids=str)
def test_mxfp4_is_loaded_whole(directory: pathlib.Path, sizes: tuple[int, ...]) -> None:
    # torch's reader reports blocks of the stored size to planners, and returns only the first values of each row.
    tensors = mxfp4(*sizes)
    save(directory, tensors)
    wanted = values_of_mxfp4(tensors)
    state = {"a_blocks": torch.full(wanted.shape, 77.0), "a_scales": tensors["a_scales"] * 0}
    with small_steps() if sizes == (1, 1, 1, 5000) else contextlib.nullcontext():
        dcp.load(state, storage_reader=Reader(directory), no_dist=True)
    assert_same_bits(state["a_blocks"], wanted)
    assert torch.equal(state["a_scales"], tensors["a_scales"])


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("ranks", [3, 7])
def test_ranks_whose_parts_begin_within_a_block_make_the_whole(
    directory: pathlib.Path, kind: str, dim: int, ranks: int
) -> None:
    tensors = fp8(300, 500, side=64) if kind == "fp8" else mxfp4(8, 11, 9, 16)
    name = next(iter(tensors))
    save(directory, tensors)
    reader = Reader(directory, block_size=64)
    described = reader.read_metadata().state_dict_metadata[name]
    state = {name: torch.zeros(described.size)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    parts = []
    for of_rank in torch.arange(described.size[dim]).tensor_split(ranks):
        offsets, lengths = [0] * len(described.size), [*described.size]
        offsets[dim], lengths[dim] = int(of_rank[0]), len(of_rank)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
        parts.append(
            read(reader, create_read_items_for_chunk_list(name, described, [chunk]), torch.float32)
        )
    assert_same_bits(torch.cat(parts, dim), state[name])


def test_models_of_both_kinds_and_plain_tensors_are_loaded_by_one_call(
    directory: pathlib.Path,
) -> None:
    plain = {"bias": torch.randn(100), "b.weight": torch.randn(5, 6).bfloat16()}
    blocks = fp8(200, 300)
    # Scales in another file than their codes, before and behind it.
    save(
        directory,
        {"a.weight_scale_inv": blocks["a.weight_scale_inv"]},
        {"a.weight": blocks["a.weight"], "a_blocks": mxfp4(2, 3, 4, 16)["a_blocks"], **plain},
        {"a_scales": mxfp4(2, 3, 4, 16)["a_scales"]},
    )
    reader = Reader(directory, target_dtype=torch.bfloat16)
    state = {
        name: torch.zeros(described.size, dtype=described.properties.dtype)
        for name, described in reader.read_metadata().state_dict_metadata.items()
    }
    assert state["a.weight"].dtype == state["a_blocks"].dtype == torch.bfloat16
    dcp.load(state, storage_reader=reader, no_dist=True)
    theirs = {name: torch.zeros_like(state[name]) for name in ("a.weight", *plain)}
    dcp.load(
        theirs,
        storage_reader=TorchsReader(str(directory), target_dtype=torch.bfloat16),
        no_dist=True,
    )
    for name, wanted in theirs.items():
        assert_same_bits(state[name], wanted)
    assert_same_bits(state["a_blocks"], values_of_mxfp4(mxfp4(2, 3, 4, 16)).bfloat16())
    assert reader.nbytes_read == sum(
        path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        for path in directory.glob("*.safetensors")
    ) + sum(
        state[name].numel() * size for name, size in (("a.weight_scale_inv", 4), ("a_scales", 1))
    )


def test_a_model_of_one_file_needs_no_index(directory: pathlib.Path) -> None:
    tensors = fp8(100, 100)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    state = {"a.weight": torch.zeros(100, 100)}
    dcp.load(state, storage_reader=Reader(directory), no_dist=True)
    factor = tensors["a.weight_scale_inv"].item()
    assert_same_bits(state["a.weight"], tensors["a.weight"].float() * factor)


def test_scales_that_are_powers_of_two_by_their_dtype_are_read_as_such(
    directory: pathlib.Path,
) -> None:
    kind = getattr(torch, "float8_e8m0fnu", None)
    if kind is None:
        pytest.skip("this torch has no such dtype")
    tensors = mxfp4(2, 3, 4, 16)
    wanted = values_of_mxfp4(tensors)
    # torch's reader would use their values as exponents.
    save(directory, tensors | {"a_scales": tensors["a_scales"].view(kind)})
    state = {"a_blocks": torch.zeros(wanted.shape)}
    dcp.load(state, storage_reader=Reader(directory), no_dist=True)
    assert_same_bits(state["a_blocks"], wanted)


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no scales of blocks": ({"a_blocks": random_codes((2, 3, 4, 16))}, "scales are missing"),
    "no scales of a matrix": (
        {
            "a.weight": random_codes((9, 9), E4M3),
            "b.weight": random_codes((9, 9), E4M3),
            "b.weight_scale_inv": torch.ones(1, 1),
        },
        "scales are missing",
    ),
    "too few scales": (
        {"a.weight": random_codes((300, 9), E4M3), "a.weight_scale_inv": torch.ones(2, 1)},
        r"'a.weight_scale_inv', must have the size \[3, 1\].*are \[2, 1\].*block_size",
    ),
    "scales of smaller blocks": (
        {"a.weight": random_codes((300, 9), E4M3), "a.weight_scale_inv": torch.ones(5, 1)},
        r"must have the size \[3, 1\].*are \[5, 1\]",
    ),
    "scales of another dimension": (
        {"a.weight": random_codes((300, 9), E4M3), "a.weight_scale_inv": torch.ones(3)},
        "no such tensor",
    ),
    "complex scales": (
        {
            "a.weight": random_codes((9, 9), E4M3),
            "a.weight_scale_inv": torch.ones(1, 1, dtype=torch.complex64),
        },
        "are torch.complex64",
    ),
    "three dimensions": (
        {"a.weight": random_codes((2, 9, 9), E4M3), "a.weight_scale_inv": torch.ones(2, 1, 1)},
        "not a supported format of blocks with scales",
    ),
    "complex numbers": (
        {
            "a.weight": torch.ones(9, 9, dtype=torch.complex64),
            "a.weight_scale_inv": torch.ones(1, 1),
        },
        "not a supported format of blocks with scales",
    ),
    "other blocks": (
        {"a_blocks": random_codes((2, 3, 4, 16), torch.int8), "a_scales": random_codes((2, 3, 4))},
        "not a supported format of blocks with scales",
    ),
    "too many scales of blocks": (
        {"a_blocks": random_codes((2, 3, 4, 16)), "a_scales": random_codes((2, 3, 5))},
        r"must have the size \[2, 3, 4\]",
    ),
    "floating-point scales of blocks": (
        {"a_blocks": random_codes((2, 3, 4, 16)), "a_scales": torch.ones(2, 3, 4)},
        "are torch.float32",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_dequantised_is_refused_by_name(directory: pathlib.Path, wrong: str) -> None:
    tensors, reason = WRONG[wrong]
    save(directory, tensors)
    reader = Reader(directory)
    name = next(iter(tensors))
    size = reader.read_metadata().state_dict_metadata[name].size
    state = {name: torch.full(size, 77.0)}
    with pytest.raises(dcp.api.CheckpointException, match=reason) as raised:
        dcp.load(state, storage_reader=reader, no_dist=True)
    (failure,) = (error for error, _ in raised.value.failures.values())
    assert isinstance(failure, CheckpointError)
    assert failure.names == (name,)
    assert failure.path.endswith("model-00001-of-00001.safetensors")
    assert (state[name] == 77).all()


def test_a_matrix_without_scales_is_plain_where_no_matrix_has_any(directory: pathlib.Path) -> None:
    codes = random_codes((9, 9), E4M3)
    save(directory, {"a.weight": codes})
    state = {"a.weight": torch.zeros(9, 9)}
    dcp.load(state, storage_reader=Reader(directory), no_dist=True)
    assert_same_bits(state["a.weight"], codes.float())


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_parts_that_ranks_have_saved_are_refused(directory: pathlib.Path, kind: str) -> None:
    # The blocks would be counted from the begin of the part.
    whole = fp8(256, 10) if kind == "fp8" else mxfp4(4, 2, 3, 16)
    name, scales = whole
    for rank in range(2):
        half = whole[name].shape[0] // 2
        saved = json.dumps(
            {
                name: {"saved_offsets": [rank * half] + [0] * (whole[name].dim() - 1)},
                scales: {"saved_offsets": [rank] + [0] * (whole[scales].dim() - 1)},
            }
        )
        tensors = {
            name: whole[name][rank * half :][:half].clone(),
            scales: whole[scales][rank : rank + 1].clone(),
        }
        file = directory / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file(tensors, file, {"DCP_SHARDING_INFO": saved})
    reader = Reader(directory)
    size = reader.read_metadata().state_dict_metadata[name].size
    with pytest.raises(dcp.api.CheckpointException, match="in parts"):
        dcp.load({name: torch.zeros(size)}, storage_reader=reader, no_dist=True)


@pytest.mark.parametrize("replaced", [1, 2], ids=["codes", "scales"])
def test_files_that_are_replaced_after_their_headers_were_read_are_noticed(
    directory: pathlib.Path, replaced: int
) -> None:
    tensors = fp8(200, 200)
    save(
        directory,
        {"a.weight": tensors["a.weight"]},
        {"a.weight_scale_inv": tensors["a.weight_scale_inv"]},
    )
    reader = Reader(directory)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    path = directory / f"model-{replaced:05d}-of-00002.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    requests = requests_of("a.weight", [0, 0], [200, 200])
    with pytest.raises(CheckpointError, match="has changed since its header was read") as raised:
        reader.read_data(
            LoadPlan(requests), PreallocatedPlanner([(requests[0], torch.zeros(200, 200))])
        )
    assert raised.value.path == str(path)


def test_damaged_headers_and_indexes_are_refused(directory: pathlib.Path) -> None:
    save(directory, fp8(200, 200))
    file, index = directory / "model-00001-of-00001.safetensors", directory / INDEX
    said = json.loads(index.read_text())
    said["weight_map"]["b.weight_scale_inv"] = file.name
    index.write_text(json.dumps(said))
    with pytest.raises(SafetensorError, match=r"b\.weight_scale_inv.*does not contain it"):
        Reader(directory).read_metadata()
    save(directory, fp8(200, 200))
    data = bytearray(file.read_bytes())
    file.write_bytes(data[:-1])
    with pytest.raises(SafetensorError, match=file.name):
        Reader(directory).read_metadata()
    data[9] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(SafetensorError, match=file.name):
        Reader(directory).read_metadata()


def test_arguments_are_checked(directory: pathlib.Path) -> None:
    for wrong in ({"target_dtype": torch.int8}, {"target_dtype": "float32"}, {"block_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Reader(directory, **wrong)
    with pytest.raises((TypeError, ValueError), match="block_size"):
        Reader(directory, block_size=2.5)
    with pytest.raises(ValueError, match="path"):
        Reader("hf://model")


def test_what_a_subclass_changes_counts(directory: pathlib.Path) -> None:
    class Renaming(Reader):  # type: ignore[misc]
        def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
            self._weight_scale_mapping = {"a.matrix": "a.matrix_scale"}
            super()._build_weight_scale_mapping(weight_map)

    blocks, both = mxfp4(2, 3, 4, 16), fp8(200, 300)
    renamed = {
        "a.matrix": both["a.weight"].clone(),
        "a.matrix_scale": both["a.weight_scale_inv"].clone(),
    }
    save(directory, both | blocks | renamed)
    found = {}
    for kind in (Renaming, Reader):
        found[kind] = {"a.weight": torch.zeros(200, 300), "a_blocks": torch.zeros(2, 3, 128)}
        if kind is Renaming:
            found[kind]["a.matrix"] = torch.zeros(200, 300)
        dcp.load(found[kind], storage_reader=kind(directory), no_dist=True)
        assert_same_bits(found[kind]["a_blocks"], values_of_mxfp4(blocks))
        assert_same_bits(found[kind]["a.weight"], found[Renaming]["a.weight"])
    assert_same_bits(found[Renaming]["a.matrix"], found[Reader]["a.weight"])


def test_it_is_found_by_torchs_name(directory: pathlib.Path) -> None:
    assert dcp.QuantizedHuggingFaceStorageReader is TorchsReader
    install()
    try:
        assert dcp.QuantizedHuggingFaceStorageReader is Reader
        assert torchs.QuantizedHuggingFaceStorageReader is Reader
        save(directory, fp8(20, 30))
        state = {"a.weight": torch.zeros(20, 30)}
        reader = dcp.QuantizedHuggingFaceStorageReader(str(directory), thread_count=4)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert reader.last_load.nbytes == 600
    finally:
        uninstall()
    assert (
        dcp.QuantizedHuggingFaceStorageReader
        is torchs.QuantizedHuggingFaceStorageReader
        is TorchsReader
    )


def peak_of_load(path: str, kind: str, nbytes: int) -> int:
    """Load one large tensor, and return the memory that the load needed in addition to its values."""
    import ctypes

    from tensorferry.tuning.stopwatch import Stopwatch

    # Make the C library unmap freed memory at once (M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    side = 4 if kind == "many scales" else 128
    dtype = torch.float64 if kind == "mxfp4 in double" else torch.float32
    peak = None
    for size in (1 << 16, nbytes):  # the first call makes objects that do not count
        folder = pathlib.Path(path, f"{size}")
        folder.mkdir()
        is_mxfp4 = kind.startswith("mxfp4")
        tensors = mxfp4(1, size >> 12, 256, 16) if is_mxfp4 else fp8(size >> 10, 1024, side)
        save(folder, tensors)
        codes = next(iter(tensors))
        del tensors
        reader = Reader(folder, target_dtype=dtype, block_size=side)
        sizes = reader.read_metadata().state_dict_metadata[codes].size
        target = torch.ones(sizes, dtype=torch.bfloat16)
        with Stopwatch() as watch:
            dcp.load({codes: target}, storage_reader=reader, no_dist=True)
        peak = watch.peak_growth_nbytes
    assert peak is not None
    return peak


@pytest.mark.parametrize("kind", ["many scales", "mxfp4 in double"])
def test_it_takes_bounded_memory(directory: pathlib.Path, kind: str) -> None:
    ended = child.call(
        "tests.checkpoint.test_quantized:peak_of_load",
        path=directory,
        kind=kind,
        nbytes=400 * MIB,
        imports=["torch.distributed.checkpoint"],
    )
    assert 0 < ended.result <= 160 * MIB  # the codes alone are 400
