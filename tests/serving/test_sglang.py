"""The real SGLang, on the CPU, loads models by its own loader and by ours: `make test-sglang`."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest

from tests.serving import no_cuda  # noqa: F401  # before sglang
from tests.serving.models import INDEX, assert_equal, assert_read_once, files, index_of, save_llama

pytest.importorskip("sglang", reason="`make test-sglang` installs it")

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_loader import get_model_loader
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

import tensorferry
from tensorferry.safetensors import checksums
from tensorferry.safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def own_model(model: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(model, tmp_path / "own"))


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    """As SGLang does at the beginning of each of its processes."""
    load_plugins()


@pytest.fixture(scope="module", autouse=True)
def ranks(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The groups that SGLang's layers ask for, of this process alone."""
    join(model, 0, 1, tmp_path_factory.mktemp("ranks") / "store")


def join(model: pathlib.Path, rank: int, world: int, store: pathlib.Path) -> None:
    place = runtime_context.SpawnRanks(world_rank=rank)
    runtime_context.publish(arguments(model, tp_size=world), role="scheduler", ranks=place)
    init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
    initialize_model_parallel(backend="gloo")


def arguments(model: pathlib.Path, **options: Any) -> Any:
    return ServerArgs(
        model_path=str(model),
        device="cpu",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        **options,
    )


def loader_of(load_format: str, **options: Any) -> Any:
    config = LoadConfig(load_format=load_format, model_loader_extra_config=options)
    return get_model_loader(config)


def load(model: pathlib.Path, load_format: str = "tensorferry", **options: Any) -> Any:
    return loader_of(load_format, **options).load_model(
        model_config=ModelConfig.from_server_args(arguments(model)),
        device_config=DeviceConfig("cpu"),
    )


def test_the_command_line_knows_the_format(model: pathlib.Path) -> None:
    given = ["--model-path", str(model), "--load-format", "tensorferry", "--device", "cpu"]
    assert prepare_server_args(given).load_format == "tensorferry"


def test_other_formats_are_what_they_were() -> None:
    assert LoadConfig(load_format="SafeTensors").load_format is LoadFormat.SAFETENSORS
    assert type(loader_of("auto")) is DefaultModelLoader
    with pytest.raises(ValueError, match="tensorfairy"):
        LoadConfig(load_format="tensorfairy")


@pytest.mark.parametrize("theirs", ["auto", "safetensors"])
def test_weights_are_those_that_sglang_loads_itself(model: pathlib.Path, theirs: str) -> None:
    assert_equal(load(model, theirs), load(model))


def test_a_model_of_one_file_with_tied_weights(tmp_path: pathlib.Path) -> None:
    save_llama(tmp_path, shards=False, tie_word_embeddings=True)
    assert_equal(load(tmp_path, "safetensors"), load(tmp_path))


def test_each_of_two_ranks_gets_its_part(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    torch.multiprocessing.spawn(load_on_rank, (model, tmp_path / "store"), nprocs=2)


def load_on_rank(rank: int, model: pathlib.Path, store: pathlib.Path) -> None:
    load_plugins()
    join(model, rank, 2, store)
    ours = load(model)
    assert ours.lm_head.weight.shape == (256, 128)
    assert_equal(load(model, "safetensors"), ours)
    assert_read_once(model, lambda: assert_equal(ours, load(model, broadcast=True)))


def test_draft_weights_get_their_names(tmp_path: pathlib.Path) -> None:
    held = {f"model.mtp.layers.{n}.weight": torch.full((4,), float(n)) for n in range(3)}
    save_file(held | {"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    found = {}
    for load_format in ("safetensors", "tensorferry"):
        loader = get_model_loader(LoadConfig(load_format=load_format, draft_model_idx=1))
        source = loader.Source(str(tmp_path), None, prefix="draft.")
        found[load_format] = {
            name: tensor.tolist() for name, tensor in loader._get_weights_iterator(source)
        }
    assert found["tensorferry"]["draft.model.mtp.layers.0.weight"] == [1.0] * 4
    assert found["tensorferry"] == found["safetensors"]


def test_a_cut_file_is_named(own_model: pathlib.Path) -> None:
    path = files(own_model)[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(tensorferry.safetensors.SafetensorError, match=path.name):
        load(own_model)


@pytest.mark.parametrize("number", [0, -1])
def test_a_missing_file_is_named(own_model: pathlib.Path, number: int) -> None:
    path = files(own_model)[number]
    path.unlink()
    with pytest.raises(RuntimeError, match=path.name):
        load(own_model)


def test_a_tensor_that_only_the_index_has_is_named(own_model: pathlib.Path) -> None:
    name, file = next(iter(index_of(own_model).items()))
    held = load_file(own_model / file)
    del held[name]
    save_file(held, own_model / file)
    load(own_model, "safetensors")  # SGLang does not notice
    with pytest.raises(tensorferry.safetensors.SafetensorError, match=name):
        load(own_model)


def test_verify_finds_a_flipped_bit(own_model: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="crc32"):
        load(own_model, verify=True)
    checksums.write([str(path) for path in files(own_model)])
    assert_equal(load(own_model, "safetensors"), load(own_model, verify=True))
    path = files(own_model)[2]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(tensorferry.ChecksumError, match=path.name):
        load(own_model, verify=True)


def test_a_small_budget_is_kept_and_one_too_small_says_what_is_needed(model: pathlib.Path) -> None:
    assert_equal(load(model, "safetensors"), load(model, memory_budget="192KiB"))
    with pytest.raises(ValueError, match=r"memory_budget: 1000 bytes .* needs \d+"):
        load(model, memory_budget=1000)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"memory_budget": "much"}, ValueError, "memory_budget"),
        ({"verify": "yes"}, TypeError, "verify: 'yes'"),
        ({"num_threads": 4}, ValueError, "no option 'num_threads'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        loader_of("tensorferry", **options)


def test_files_of_other_formats_are_refused(own_model: pathlib.Path) -> None:
    for path in [*files(own_model), own_model / INDEX]:
        path.unlink()
    torch.save({}, own_model / "weights.pt")
    with pytest.raises(ValueError, match=r"weights\.pt' is not a safetensors file"):
        load(own_model)
