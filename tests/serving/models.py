"""A small model of random weights, as the Hub has models: several files, an index, and a configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

INDEX = "model.safetensors.index.json"


def save_llama(folder: pathlib.Path, *, shards: bool = True, **config: Any) -> pathlib.Path:
    import torch
    import transformers

    torch.manual_seed(7)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    }
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | config)))
    llama.to(torch.bfloat16).save_pretrained(folder, max_shard_size="500KB" if shards else "1GB")
    assert (len(files(folder)) > 2) is shards
    return folder


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.safetensors"))


def index_of(folder: pathlib.Path) -> dict[str, str]:
    weights: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weights


def weights_of(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def assert_read_once(folder: pathlib.Path, load: Callable[[], None]) -> None:
    """Load a model on two ranks, and compare the bytes that both have read with the size of its files."""
    import torch

    from tensorferry.safetensors.plans import Tensors

    read = []
    close = Tensors.close

    def counting(self: Tensors) -> None:
        read.append(self.nbytes_read)
        close(self)

    Tensors.close = counting  # type: ignore[method-assign]
    try:
        load()
    finally:
        Tensors.close = close  # type: ignore[method-assign]
    parts: list[Any] = [None, None]
    torch.distributed.all_gather_object(parts, max(read))
    size = sum(path.stat().st_size for path in files(folder))
    assert 0.9 * size < sum(parts) < 1.1 * size


def assert_equal(model: Any, other: Any) -> None:
    """Compare all weights bit by bit."""
    import torch

    pairs = list(zip(weights_of(model), weights_of(other), strict=True))
    assert len(pairs) > 20
    for (name, one), (other_name, two) in pairs:
        assert name == other_name
        assert (one.dtype, one.shape) == (two.dtype, two.shape), name
        if one.numel():
            assert torch.equal(
                one.detach().contiguous().flatten().view(torch.uint8),
                two.detach().contiguous().flatten().view(torch.uint8),
            ), name
