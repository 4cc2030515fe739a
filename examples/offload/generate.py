"""Generate text with a language model that does not fit into memory.

    python examples/offload/generate.py

A causal language model with random weights is saved in shards. Then it generates text greedily on the CPU, each time in
a separate process:

1. in memory, without a limit: the other runs must generate the same tokens;
2. in memory, with a memory limit (a cgroup) that is too small for the model: the process is killed;
3. with the same limit, and with weights that are streamed from the shards: it generates the same tokens.

The model is a Llama of transformers if that is installed, otherwise (or with ``--built-in``) a small transformer in
this file. Memory limits need root, and a system that allows new cgroups. Otherwise, or with ``--no-limit``, there is no
limit, and no process is killed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from limits import memory_limit, memory_nbytes, run_kind

VOCABULARY, LENGTH = 1000, 6
MIB = 1 << 20


def streamed(options: argparse.Namespace) -> Any:
    """Return a model with weights that stay in their files. This is the complete code for streaming."""
    import torch

    from tensorferry.offload import stream_weights

    with torch.device("meta"):
        model = new_model(options)
    if not options.built_in:  # the files lack only the buffers of the rotary embedding
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    stream_weights(model, options.directory, memory_budget=options.budget_nbytes)
    return model


def new_model(options: argparse.Namespace) -> Any:
    import torch

    width, heads = 512, 8
    torch.manual_seed(0)
    if options.built_in:
        layers = max(1, round(options.parameters / (12 * width * width)))
        return built_in(width, heads, layers).eval().requires_grad_(False)
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_hidden_layers=max(1, round(options.parameters / (16 * width * width))),
        vocab_size=VOCABULARY,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def built_in(width: int, heads: int, layers: int) -> Any:
    import torch
    from torch import nn

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Embedding(512, width)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
                for _ in range(layers)
            )
            self.head = nn.Linear(width, VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            length = tokens.shape[1]
            x = self.embedding(tokens) + self.positions(torch.arange(length))
            mask = torch.full((length, length), float("-inf")).triu(1)
            for layer in self.layers:
                x = layer(x, src_mask=mask)
            return self.head(x)

        def generate(self, tokens: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
            for _ in range(max_new_tokens):
                following = self(tokens)[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, following], 1)
            return tokens

    return LanguageModel()


def save(model: Any, options: argparse.Namespace) -> None:
    """Save the model in 8 shards."""
    nbytes = sum(param.nbytes for param in model.parameters())
    if not options.built_in:
        model.save_pretrained(options.directory, max_shard_size=nbytes // 8)
        return
    from safetensors.torch import save_file

    state = model.state_dict()
    names = list(state)
    for number in range(8):
        part = {name: state[name] for name in names[number::8]}
        save_file(part, options.directory / f"model-{number + 1}-of-8.safetensors")


def generate(options: argparse.Namespace) -> None:
    """Generate text, and print the result as JSON."""
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), 2))
    if not options.built_in:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    base_nbytes = memory_nbytes()
    model = streamed(options) if options.kind == "streamed" else new_model(options)
    tokens = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    begin = time.perf_counter()
    with torch.no_grad():
        tokens = model.generate(
            tokens,
            max_new_tokens=options.tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    seconds = (time.perf_counter() - begin) / options.tokens
    result = {
        "tokens": tokens[0].tolist(),
        "token_seconds": seconds,
        "base_nbytes": base_nbytes,
        "peak_nbytes": memory_nbytes(),
        "weights_nbytes": sum(param.numel() * param.element_size() for param in model.parameters()),
    }
    if options.kind == "saved":
        save(model, options)
    print(json.dumps(result))


def main() -> int:
    options = _options()
    if options.kind:
        generate(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="tensorferry-", dir=options.directory) as name:
        return compare(options, Path(name))


def compare(options: argparse.Namespace, directory: Path) -> int:
    reference = _run(options, "saved", directory, 0)
    weights_nbytes = reference["weights_nbytes"]
    budget_nbytes = max(weights_nbytes // 6, 16 * MIB)
    kind = "small transformer" if options.built_in else "Llama"
    print(f"A {kind} with {weights_nbytes / MIB:.0f} MiB of weights.")
    limit_nbytes = reference["base_nbytes"] + budget_nbytes + 96 * MIB
    with memory_limit(None if options.no_limit else limit_nbytes) as group:
        if group is None:
            print("There is no memory limit.")
        else:
            print(
                f"Without the model, the process takes {reference['base_nbytes'] / MIB:.0f} MiB; "
                f"the limit is {limit_nbytes / MIB:.0f} MiB."
            )
            _print("in memory", _run(options, "memory", directory, 0, group))
        ours = _run(options, "streamed", directory, budget_nbytes, group)
        _print(f"streamed, with a budget of {budget_nbytes / MIB:.0f} MiB", ours)
    if "killed" in ours:
        return 1
    equal = reference["tokens"] == ours["tokens"]
    print(
        f"The tokens are {'the same as' if equal else 'different from'} those of the model in memory."
    )
    return 0 if equal else 1


def _print(label: str, result: dict[str, Any]) -> None:
    if "killed" in result:
        print(f"{label}: killed for memory.")
        return
    print(
        f"{label}: {result['token_seconds']:.2f} s a token, {result['peak_nbytes'] / MIB:.0f} MiB."
    )


def _run(
    options: argparse.Namespace,
    kind: str,
    directory: Path,
    budget_nbytes: int,
    group: Path | None = None,
) -> dict[str, Any]:
    arguments = [f"--parameters={options.parameters}", f"--tokens={options.tokens}"]
    arguments += ["--built-in"] if options.built_in else []
    return run_kind(__file__, kind, directory, budget_nbytes, arguments, group)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Generate text with a language model that does not fit into memory."
    )
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="folder for the files")
    parser.add_argument("--parameters", type=int, default=250_000_000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--no-limit", action="store_true", help="compare tokens only")
    parser.add_argument("--built-in", action="store_true", help="do not use transformers")
    parser.add_argument("--kind", choices=["saved", "memory", "streamed"], help=argparse.SUPPRESS)
    parser.add_argument("--budget-nbytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.built_in |= importlib.util.find_spec("transformers") is None
    return options


if __name__ == "__main__":
    sys.exit(main())
