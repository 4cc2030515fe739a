"""stream_weights() with models of libraries: transformers, which packs experts, and peft's LoRA."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tensorferry.offload import stream_weights
from tests.support import required

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "qwen2_moe": "num_experts",
    "olmoe": "num_experts",
}


def config_of(kind: str, **extra: Any) -> Any:
    transformers = required.module("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        required.missing("tools", "transformers 5 is not installed")
    return transformers.AutoConfig.for_model(kind, **SIZES, **extra)


def whole_of(config: Any, dtype: Any = torch.float32, kind: str = "AutoModelForCausalLM") -> Any:
    made = getattr(required.module("transformers"), kind).from_config(config, dtype=dtype)
    return made.eval().requires_grad_(False)


def empty_of(config: Any, kind: str = "AutoModelForCausalLM") -> Any:
    with torch.device("meta"):
        model = whole_of(config, kind=kind)
    for module in model.modules():  # the only buffers that are in no file
        if getattr(module, "rotary_emb", None) is not None:
            module.rotary_emb = type(module.rotary_emb)(config)
    return model


def ids(seed: int = 0) -> Any:
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=12)
@given(
    kind=st.sampled_from(sorted(EXPERTS)),
    experts=st.integers(2, 13),
    budget=st.sampled_from(["256KiB", "1MiB", "64MiB"]),
    shards=st.sampled_from(["20KB", "100MB"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_experts_that_are_stored_one_by_one(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    experts: int,
    budget: str,
    shards: str,
    dtype: Any,
) -> None:
    directory = tmp_path_factory.mktemp("model")
    extra = {} if kind in ("mixtral", "olmoe") else {"moe_intermediate_size": 16}
    if kind == "qwen2_moe":
        extra["shared_expert_intermediate_size"] = 24
    config = config_of(kind, **{EXPERTS[kind]: experts}, num_experts_per_tok=2, **extra)
    torch.manual_seed(experts)
    whole = whole_of(config, dtype)
    whole.save_pretrained(directory, max_shard_size=shards)
    assert len(list(directory.glob("*.safetensors"))) > 1 or shards != "20KB"
    model = empty_of(config)
    with stream_weights(model, directory, memory_budget=budget), torch.no_grad():
        for seed in range(3):
            assert torch.equal(model(ids(seed)).logits, whole(ids(seed)).logits)


def test_experts_of_a_state_dict_are_as_they_are(directory: Path) -> None:
    config = config_of("mixtral", num_local_experts=3)
    whole = whole_of(config)
    save_file(whole.state_dict(), directory / "model.safetensors")
    model = empty_of(config)
    with stream_weights(model, directory, memory_budget="1MiB"), torch.no_grad():
        assert torch.equal(model(ids()).logits, whole(ids()).logits)


def test_a_model_of_transformers_without_its_head(directory: Path) -> None:
    config = config_of("qwen3_moe", num_experts=3, num_experts_per_tok=2)
    whole = whole_of(config)
    whole.save_pretrained(directory)
    model = empty_of(config, "AutoModel")
    with pytest.warns(UserWarning, match=r"with the names lm_head\.weight"):
        stream = stream_weights(model, directory, memory_budget="1MiB")
    with stream, torch.no_grad():
        assert torch.equal(model(ids()).last_hidden_state, whole.model(ids()).last_hidden_state)


def test_experts_that_do_not_fit_are_refused(directory: Path) -> None:
    config = config_of("mixtral", num_local_experts=3)
    whole_of(config).save_pretrained(directory)
    path = directory / "model.safetensors"
    state = load_file(path)
    experts = "model.layers.1.block_sparse_moe.experts"

    def refused(match: str, changed: dict[str, Any]) -> None:
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=match):
            stream_weights(empty_of(config), directory, memory_budget="1MiB")

    def without(*names: str) -> dict[str, Any]:
        return {name: one for name, one in state.items() if name not in names}

    name = f"{experts}.1.w1.weight"
    packed = r"layers\.1\.mlp\.experts\.gate_up_proj"
    refused(packed, without(name))
    refused(
        rf"{packed} has shape \[2, 96, 32\] in the files and \[3, 96, 32\] in the model",
        without(name, f"{experts}.1.w3.weight"),
    )
    refused(packed, {**state, name: state[name][:-1].clone()})
    refused(f"{packed}.*different shapes", {**state, name: state[name][:, :-1].clone()})
    refused(f"{packed}.*different dtypes", {**state, name: state[name].half()})
    refused(f"missing.*{packed}", without(*(each for each in state if each.startswith(experts))))
    gate = state["model.layers.1.block_sparse_moe.gate.weight"].clone()
    refused("both map to the model's", {**state, "model.layers.1.mlp.gate.weight": gate})


def test_what_transformers_computes_rather_than_moves_is_refused(directory: Path) -> None:
    """The experts of Qwen3-VL on the hub are transposed."""
    transformers = required.module("transformers")
    text = config_of("qwen3_vl_moe_text", num_experts=3, num_experts_per_tok=2, head_dim=8)
    config = transformers.Qwen3VLMoeConfig(text_config=text.to_dict())
    config.vision_config.update(
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    )
    with torch.device("meta"):
        model = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    state = {
        name: torch.zeros(one.shape, dtype=one.dtype) for name, one in model.state_dict().items()
    }
    name = next(name for name in state if name.endswith("experts.gate_up_proj"))
    state[name] = state[name].transpose(1, 2).contiguous()
    save_file(state, directory / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"{name} from {name}, with Transpose.*cannot be streamed"
    ):
        stream_weights(model.requires_grad_(False), directory, memory_budget="64MiB")


@pytest.fixture
def adapted(directory: Path) -> tuple[Any, Any, Any, Any]:
    """A configuration, its model, one with LoRA in memory, and peft."""
    peft = required.module("peft")
    config = config_of("llama")
    torch.manual_seed(0)
    whole = whole_of(config)
    whole.save_pretrained(directory)
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        r=4,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "down_proj", "lm_head"],
    )
    return config, whole, peft.get_peft_model(copy.deepcopy(whole), lora).eval(), peft


def test_lora_on_a_streamed_model(adapted: tuple[Any, Any, Any, Any], directory: Path) -> None:
    config, whole, in_memory, peft = adapted
    model = empty_of(config)
    with stream_weights(model, directory, memory_budget="128KiB") as stream, torch.no_grad():
        torch.manual_seed(1)
        streamed = peft.get_peft_model(model, in_memory.peft_config["default"]).eval()
        wanted = in_memory(ids()).logits
        assert not torch.equal(wanted, whole(ids()).logits)
        for _ in range(2):
            assert torch.equal(streamed(ids().to(streamed.device)).logits, wanted)
        with streamed.disable_adapter():
            assert torch.equal(streamed(ids()).logits, whole(ids()).logits)
        assert stream.stats()["passes"] == 3
        with pytest.raises(RuntimeError, match=r"q_proj\.weight .*not in memory"):
            streamed.merge_adapter()
        with torch.enable_grad(), pytest.raises(RuntimeError, match="for inference"):
            streamed(ids())


def test_a_saved_lora_on_a_streamed_model(
    adapted: tuple[Any, Any, Any, Any], directory: Path
) -> None:
    config, _, in_memory, peft = adapted
    model = empty_of(config)
    with stream_weights(model, directory, memory_budget="128KiB"):
        torch.manual_seed(1)
        lora = peft.get_peft_model(model, in_memory.peft_config["default"])
        lora.save_pretrained(directory / "adapter", save_embedding_layers=False)
    model = empty_of(config)
    with stream_weights(model, directory, memory_budget="128KiB"), torch.no_grad():
        streamed = peft.PeftModel.from_pretrained(model, directory / "adapter").eval()
        assert torch.equal(streamed(ids()).logits, in_memory(ids()).logits)
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones(2, 9)}
        assert torch.equal(
            streamed.generate(input_ids=ids(), **options),
            in_memory.generate(input_ids=ids(), **options),
        )
