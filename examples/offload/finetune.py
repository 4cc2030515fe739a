"""Fine-tune a Llama of transformers whose weights, gradients and optimizer's state are on a drive.

    python examples/offload/finetune.py
    python examples/offload/finetune.py --lora

A small Llama with random weights is saved by ``save_pretrained``, and trained for a few steps twice: in memory, and on
the drive. There it begins on the meta device, so that it is never in memory whole, and its trained weights are saved
from the drive. Both must end with the same losses and the same weights, bit for bit.

With ``--lora`` (peft) the Llama is frozen: its weights stay in their safetensors files, and adapters are trained.

Needs transformers, and peft for ``--lora``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tensorferry.offload import offload_training

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY, BATCH, LENGTH = 1000, 2, 16
MIB = 1 << 20


def new_model(config: LlamaConfig) -> Any:
    """Make the model as in memory; on the meta device where that is the default one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    # In no file, so that it needs values even where all else is on the meta device.
    with torch.device("cpu"):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.train()


def with_adapters(model: Any) -> Any:
    """Freeze a model, and add adapters, which are small: they are in memory until the training is offloaded."""
    import peft

    names = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for adapter in (*module.lora_A.values(), *module.lora_B.values()):
                if adapter.weight.is_meta:
                    adapter.to_empty(device="cpu")
    return model


def train(model: Any, optimizer: Any, clip: Any, steps: int) -> list[float]:
    """Train as ever: nothing here knows where the weights are."""
    losses = []
    for number in range(steps):
        text = torch.randint(
            VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number)
        )
        loss = model(input_ids=text, labels=text, use_cache=False).loss
        loss.backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainable(model: Any) -> list[Any]:
    return [param for param in model.parameters() if param.requires_grad]


def fine_tune(config: LlamaConfig, options: argparse.Namespace, directory: Path) -> bool:
    torch.manual_seed(0)
    whole = new_model(config)
    files = directory / "pretrained"
    whole.save_pretrained(files, max_shard_size="8MB")

    with torch.device("meta"):  # without memory
        model = new_model(config)
    if options.lora:
        whole, model = with_adapters(whole), with_adapters(model)
        first = {name: each for name, each in whole.state_dict().items() if "lora_" in name}
        model.load_state_dict(first, strict=False)  # both begin with the same adapters
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
    model, optimizer = offload_training(
        model,
        optimizer,
        directory / "scratch",
        memory_budget=options.budget,
        blocks=model.get_decoder().layers,
        files=files,
    )
    losses = train(model, optimizer, optimizer.clip_grad_norm_, options.steps)
    state = {name: value for name, value in model.state_dict().items() if is_kept(name, options)}
    save_file(state, directory / "trained.safetensors")
    stats = optimizer.stats()
    optimizer.close()

    of_memory = torch.optim.AdamW(trainable(whole), lr=1e-3)

    def clip(limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(whole.parameters(), limit)

    losses_of_memory = train(whole, of_memory, clip, options.steps)
    found = load_file(directory / "trained.safetensors")
    wanted = {name: value for name, value in whole.state_dict().items() if is_kept(name, options)}
    print(
        f"{sum(param.numel() for param in whole.parameters()) / 1e6:.1f} M parameters, "
        f"{sum(param.numel() for param in trainable(whole)) / 1e6:.2f} M of them trained, "
        f"with {stats['memory_nbytes'] / MIB:.0f} MiB: loss {losses[0]:.4f} to {losses[-1]:.4f}."
    )
    equal = losses == losses_of_memory and found.keys() == wanted.keys()
    equal = equal and all(torch.equal(found[name], value) for name, value in wanted.items())
    print(f"Losses and saved weights are {'the same, bit for bit' if equal else 'different'}.")
    return equal


def is_kept(name: str, options: argparse.Namespace) -> bool:
    """Return whether a weight is one to be saved: of a model with adapters these alone."""
    return not options.lora or "lora_" in name


def main() -> int:
    import transformers

    options = _options()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    config = transformers.LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_attention_heads=8,
        num_hidden_layers=options.layers,
        vocab_size=VOCABULARY,
    )
    with tempfile.TemporaryDirectory(prefix="tensorferry-", dir=options.directory) as name:
        return 0 if fine_tune(config, options, Path(name)) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a Llama on a drive.")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where the files go")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", default="32MiB", help="memory_budget")
    parser.add_argument("--lora", action="store_true", help="train adapters, not the model")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
