"""Fine-tune a Llama of transformers with its weights, gradients and optimizer state on a drive.

    python examples/offload/finetune.py
    python examples/offload/finetune.py --lora

A small Llama with random weights is saved with ``save_pretrained``, and trained twice for a few steps: in memory, and
on the drive. On the drive, the model is created on the meta device, so it is never completely in memory, and its
trained weights are saved from the drive. Both trainings must have the same losses and final weights, bit for bit.

With ``--lora`` (peft), the Llama is frozen: its weights stay in their safetensors files, and adapters are trained.

This needs transformers, and peft for ``--lora``.
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
    """Create the model, on the default device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    # The buffers of the rotary embedding are not saved to the files. So this module is created on the CPU, with values,
    # even if the model is on the meta device.
    with torch.device("cpu"):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.train()


def with_adapters(model: Any) -> Any:
    """Freeze a model, and add adapters. These are small, and are in memory until the training is offloaded."""
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


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    """Train with an ordinary loop, which is independent of where the weights are."""
    losses = []
    for number in range(steps):
        text = torch.randint(
            VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number)
        )
        loss = model(input_ids=text, labels=text, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainable(model: Any) -> list[Any]:
    return [param for param in model.parameters() if param.requires_grad]


def fine_tune(config: LlamaConfig, options: argparse.Namespace, directory: Path) -> bool:
    torch.manual_seed(0)
    reference = new_model(config)
    files = directory / "pretrained"
    reference.save_pretrained(files, max_shard_size="8MB")

    with torch.device("meta"):  # allocates no memory
        model = new_model(config)
    if options.lora:
        reference, model = with_adapters(reference), with_adapters(model)
        adapters = {name: each for name, each in reference.state_dict().items() if "lora_" in name}
        model.load_state_dict(adapters, strict=False)  # both trainings begin with the same adapters
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
    model, optimizer = offload_training(
        model,
        optimizer,
        directory / "scratch",
        memory_budget=options.budget,
        blocks=model.get_decoder().layers,
        files=files,
    )
    losses = train(model, optimizer, options.steps)
    state = {name: value for name, value in model.state_dict().items() if is_saved(name, options)}
    save_file(state, directory / "trained.safetensors")
    stats = optimizer.stats()
    optimizer.close()

    reference_optimizer = torch.optim.AdamW(trainable(reference), lr=1e-3)
    reference_losses = train(reference, reference_optimizer, options.steps)
    found = load_file(directory / "trained.safetensors")
    expected = {
        name: value for name, value in reference.state_dict().items() if is_saved(name, options)
    }
    print(
        f"{sum(param.numel() for param in reference.parameters()) / 1e6:.1f} M parameters, "
        f"{sum(param.numel() for param in trainable(reference)) / 1e6:.2f} M of them trained, "
        f"with {stats['memory_nbytes'] / MIB:.0f} MiB: loss {losses[0]:.4f} to {losses[-1]:.4f}."
    )
    equal = losses == reference_losses and found.keys() == expected.keys()
    equal = equal and all(torch.equal(found[name], value) for name, value in expected.items())
    print(f"Losses and saved weights are {'the same, bit for bit' if equal else 'different'}.")
    return equal


def is_saved(name: str, options: argparse.Namespace) -> bool:
    """Return whether to save a weight. With adapters, only these are saved."""
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
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="folder for the files")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", default="32MiB", help="memory_budget")
    parser.add_argument("--lora", action="store_true", help="train adapters, not the model")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
