"""The real vLLM, on the CPU, loads models by its own loaders and by ours: `make test-vllm`."""

from __future__ import annotations

import itertools
import pathlib
import shutil
from typing import Any

import pytest

from tests.serving.models import INDEX, assert_equal, assert_read_once, files, index_of, save_llama

pytest.importorskip("vllm", reason="`make test-vllm` installs it")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.argparse_utils import FlexibleArgumentParser

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
def ranks(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The groups that vLLM's layers ask for, of this process alone."""
    join(model, 0, 1, tmp_path_factory.mktemp("ranks") / "store")


def join(model: pathlib.Path, rank: int, world: int, store: pathlib.Path) -> None:
    with set_current_vllm_config(config_of(model, "auto", tensor_parallel_size=world)):
        init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(world, 1)


def config_of(model: pathlib.Path, load_format: str, **options: Any) -> Any:
    return EngineArgs(
        model=str(model),
        load_format=load_format,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        **options,
    ).create_engine_config()


def load(model: pathlib.Path, load_format: str = "tensorferry", **options: Any) -> Any:
    config = config_of(model, load_format, **options)
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return loader.load_model(vllm_config=config, model_config=config.model_config)


def extra(**options: Any) -> dict[str, Any]:
    return {"model_loader_extra_config": options}


def test_the_command_line_knows_the_format(model: pathlib.Path) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = ["--model", str(model), "--skip-tokenizer-init", "--load-format", "tensorferry"]
    given += ["--model-loader-extra-config", '{"memory_budget": "2GiB"}']
    config = EngineArgs.from_cli_args(parser.parse_args(given)).create_engine_config().load_config
    assert config.load_format == "tensorferry"
    loader = get_model_loader(config)
    assert type(loader).__module__ == "tensorferry.serving.vllm_loader"
    assert loader._options.memory_budget == "2GiB"


@pytest.mark.parametrize("theirs", ["auto", "safetensors"])
def test_weights_are_those_that_vllm_loads_itself(model: pathlib.Path, theirs: str) -> None:
    assert_equal(load(model, theirs), load(model))


def test_a_model_of_one_file_with_tied_weights(tmp_path: pathlib.Path) -> None:
    save_llama(tmp_path, shards=False, tie_word_embeddings=True)
    assert_equal(load(tmp_path, "safetensors"), load(tmp_path))


def test_each_of_two_ranks_gets_its_part(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    torch.multiprocessing.spawn(load_on_rank, (model, tmp_path / "store"), nprocs=2)


def load_on_rank(rank: int, model: pathlib.Path, store: pathlib.Path) -> None:
    join(model, rank, 2, store)
    ours = load(model, tensor_parallel_size=2)
    assert ours.lm_head.weight.shape == (256, 128)
    assert_equal(load(model, "safetensors", tensor_parallel_size=2), ours)
    assert_read_once(
        model,
        lambda: assert_equal(ours, load(model, tensor_parallel_size=2, **extra(broadcast=True))),
    )


def test_weights_are_loaded_again_into_the_same_model(model: pathlib.Path) -> None:
    config = config_of(model, "tensorferry")
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        ours = loader.load_model(vllm_config=config, model_config=config.model_config)
        for weight in ours.parameters():
            weight.data.zero_()
        loader.load_weights(ours, config.model_config)
    assert_equal(load(model, "safetensors"), ours)


def test_experts_of_other_ranks_are_not_read(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    names = [f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in range(8)]
    experts = {name: torch.full((4, 4), float(n)) for n, name in enumerate(names)}
    save_file(experts | {"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    found = {}
    for load_format in ("safetensors", "tensorferry"):
        loader = get_model_loader(config_of(model, load_format).load_config)
        loader.local_expert_ids = {2, 5}
        source = loader.Source(str(tmp_path), None)
        found[load_format] = dict(loader._get_weights_iterator(source))
    assert sorted(found["tensorferry"]) == sorted([names[2], names[5], "model.norm.weight"])
    assert found["tensorferry"].keys() == found["safetensors"].keys()


def test_a_cut_file_is_named(own_model: pathlib.Path) -> None:
    path = files(own_model)[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(tensorferry.safetensors.SafetensorError, match=path.name):
        load(own_model)


@pytest.mark.parametrize("number", [0, -1])
def test_a_missing_file_is_named(own_model: pathlib.Path, number: int) -> None:
    path = files(own_model)[number]
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        load(own_model)


def test_a_tensor_that_only_the_index_has_is_named(own_model: pathlib.Path) -> None:
    name, file = next(iter(index_of(own_model).items()))
    held = load_file(own_model / file)
    del held[name]
    save_file(held, own_model / file)
    with pytest.raises(tensorferry.safetensors.SafetensorError, match=name):
        load(own_model)


def test_verify_finds_a_flipped_bit(own_model: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="crc32"):
        load(own_model, **extra(verify=True))
    checksums.write([str(path) for path in files(own_model)])
    assert_equal(load(own_model, "safetensors"), load(own_model, **extra(verify=True)))
    path = files(own_model)[2]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(tensorferry.ChecksumError, match=path.name):
        load(own_model, **extra(verify=True))


def test_a_small_budget_is_kept_and_one_too_small_says_what_is_needed(model: pathlib.Path) -> None:
    assert_equal(load(model, "safetensors"), load(model, **extra(memory_budget="192KiB")))
    with pytest.raises(ValueError, match=r"memory_budget: 1000 bytes .* needs \d+"):
        load(model, **extra(memory_budget=1000))


def test_the_budget_is_at_least_the_largest_tensor(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorferry.serving.weights._BUDGET_NBYTES", 1)
    assert_equal(load(model, "safetensors"), load(model))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"memory_budget": "much"}, ValueError, "memory_budget"),
        ({"memory_budget": 1.5}, TypeError, "memory_budget"),
        ({"verify": "yes"}, TypeError, "verify: 'yes'"),
        ({"num_threads": 4}, ValueError, "no option 'num_threads'"),
        ({"enable_multithread_load": True}, ValueError, "no option 'enable_multithread_load'"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    model: pathlib.Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load(model, **extra(**options))


def test_vllms_own_check_of_weights_can_be_switched(own_model: pathlib.Path) -> None:
    file = files(own_model)[0]
    held = load_file(file)
    save_file(dict(itertools.islice(held.items(), 1)), file)
    (own_model / INDEX).unlink()
    with pytest.raises(ValueError, match="not initialized from checkpoint"):
        load(own_model)
    load(own_model, **extra(enable_weights_track=False))


@pytest.mark.parametrize("strategy", ["eager", "prefetch", "torchao"])
def test_strategies_are_refused(model: pathlib.Path, strategy: str) -> None:
    with pytest.raises(ValueError, match=f"safetensors_load_strategy: .*{strategy}"):
        load(model, safetensors_load_strategy=strategy)


def test_a_strategy_that_vllm_itself_chooses_is_refused(model: pathlib.Path) -> None:
    loader = get_model_loader(config_of(model, "tensorferry").load_config)
    loader.load_config.safetensors_load_strategy = "torchao"  # as load_weights() does
    with pytest.raises(ValueError, match="torchao"):
        loader._get_weights_iterator(loader.Source(str(model), None))


def test_files_of_other_formats_are_refused(own_model: pathlib.Path) -> None:
    torch.save({}, own_model / "weights.bin")
    (own_model / INDEX).unlink()
    loader = get_model_loader(config_of(own_model, "tensorferry").load_config)
    source = loader.Source(str(own_model), None, allow_patterns_overrides=["*.bin"])
    with pytest.raises(ValueError, match=r"weights\.bin' is not a safetensors file"):
        loader._get_weights_iterator(source)
    for path in files(own_model):
        path.unlink()
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        load(own_model)
