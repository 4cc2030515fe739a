"""Train a transformer that does not fit into memory: its weights, gradients and optimizer state are on a drive.

    python examples/offload/train_larger.py
    python examples/offload/train_larger.py --parameters 1B --reference

The model is written to safetensors files layer by layer, and is never completely in memory. Then it is trained on the
CPU with a memory limit (a cgroup) that is too small for it, each time in a separate process:

1. with torch alone: the process is killed;
2. with torch and accelerate's ``disk_offload``, if that is installed: the process is killed, or trains nothing;
3. with ``offload_training``: it trains.

With ``--reference``, torch also trains without a limit. Its results must be identical to those of the third training,
bit for bit.

Memory limits need root, and a system that allows new cgroups. Otherwise, or with ``--no-limit``, torch alone is not
killed, and both trainings must have the same weights and losses.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limits import memory_limit, memory_nbytes, print_training, run_kind

if TYPE_CHECKING:
    import torch

VOCABULARY, BATCH, LENGTH = 1000, 2, 16
MIB = 1 << 20
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
# The memory of each parameter in training: the parameter, its gradient, and AdamW's state.
PARAMETER_NBYTES = 16


def train_on_drives(options: argparse.Namespace) -> tuple[torch.nn.Module, list[float], int]:
    """Train within a memory budget. This is the complete code for it."""
    import torch

    from tensorferry.offload import offload_training

    with torch.device("meta"):  # allocates no memory
        model = new_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = offload_training(
        model,
        optimizer,
        options.directory / "scratch",
        memory_budget=options.budget_nbytes,
        blocks=model.layers,
        files=options.directory / "model",
    )
    return model, *train(model, optimizer, options)


def train(
    model: Any, optimizer: Any, options: argparse.Namespace, check: Any = None
) -> tuple[list[float], int]:
    """Train with the loop that all variants share. Return the losses and the peak memory in bytes."""
    import torch

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    losses, peak_nbytes = [], 0
    for number in range(options.steps):
        text = torch.randint(
            VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number)
        )
        found = model(text[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, text[:, 1:].flatten())
        loss.backward()
        if check is not None:
            check(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        peak_nbytes = max(peak_nbytes, memory_nbytes())
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, peak_nbytes


def train_in_memory(options: argparse.Namespace) -> tuple[torch.nn.Module, list[float], int]:
    import torch

    model = loaded(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, *train(model, optimizer, options)


def train_with_accelerate(options: argparse.Namespace) -> str:
    """Train with accelerate keeping the weights on the drive, and return the outcome."""
    import accelerate
    import torch

    model = loaded(options)
    accelerate.disk_offload(
        model,
        options.directory / "accelerate",
        execution_device="cpu",
        # This class uses the weights of its submodules directly, so accelerate must load them all with the layer.
        preload_module_classes=["TransformerEncoderLayer"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        train(model, optimizer, options, check=_check_gradients)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0]
    return "trained"


def _check_gradients(model: torch.nn.Module) -> None:
    params = list(model.parameters())
    lacking = sum(param.grad is None for param in params)
    if lacking:
        raise ValueError(f"{lacking} of {len(params)} parameters have no gradient")


def new_model(options: argparse.Namespace) -> Any:
    import torch
    from torch import nn

    width, layers = shape(options.parameters)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Embedding(LENGTH, width)
            self.layers = nn.ModuleList(new_layer(width) for _ in range(layers))
            self.head = nn.Linear(width, VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return Transformer()


def new_layer(width: int) -> torch.nn.Module:
    from torch import nn

    return nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True)


def shape(parameters: int) -> tuple[int, int]:
    """Return the width and the number of layers of a model with approximately ``parameters`` parameters."""
    width = 256
    while parameters > 60 * 12 * width * width and width < 8192:
        width *= 2
    return width, max(1, round(parameters / (12 * width * width)))


def save_new(options: argparse.Namespace) -> dict[str, Any]:
    """Write a model with random weights, layer by layer. Train one layer, to measure the memory of torch itself."""
    import torch
    from safetensors.torch import save_file
    from torch import nn

    width, layers = shape(options.parameters)
    torch.manual_seed(0)
    folder = options.directory / "model"
    folder.mkdir()
    outer = {"embedding": nn.Embedding(VOCABULARY, width), "positions": nn.Embedding(LENGTH, width)}
    outer["head"] = nn.Linear(width, VOCABULARY)
    save_file(nn.ModuleDict(outer).state_dict(), folder / "outer.safetensors")
    parameters = sum(param.numel() for each in outer.values() for param in each.parameters())
    for number in range(layers):
        layer = new_layer(width)
        state = {f"layers.{number}.{name}": value for name, value in layer.state_dict().items()}
        save_file(state, folder / f"layer-{number:05}.safetensors")
    parameters += layers * sum(param.numel() for param in layer.parameters())
    layer(torch.rand(BATCH, LENGTH, width)).square().mean().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    layer_nbytes = sum(param.nbytes for param in layer.parameters())
    return {
        "parameters": parameters,
        "layer_nbytes": layer_nbytes,
        "peak_nbytes": memory_nbytes(),
    }


def loaded(options: argparse.Namespace) -> Any:
    """Return the model in memory."""
    import torch
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = new_model(options)
    model.to_empty(device="cpu")
    for file in sorted((options.directory / "model").iterdir()):
        model.load_state_dict(load_file(file), strict=False)
    return model


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run the variant that ``--kind`` selects, and return its result."""
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), 2))
    if options.kind == "new":
        return save_new(options)
    if options.kind == "accelerate":
        return {"message": train_with_accelerate(options)}
    train_variant = train_on_drives if options.kind == "ours" else train_in_memory
    model, losses, peak_nbytes = train_variant(options)
    weights = hashlib.sha256()
    for value in model.state_dict().values():  # values on the drive are mapped, and take no memory
        weights.update(value.numpy().data)
    return {"losses": losses, "weights": weights.hexdigest(), "peak_nbytes": peak_nbytes}


def compare(options: argparse.Namespace, directory: Path) -> int:
    bare = _run(options, "new", directory, 0)
    total_nbytes = PARAMETER_NBYTES * bare["parameters"]
    # offload_training() needs memory for at least two layers in transfer and one in computation, each with gradients.
    budget_nbytes = max(total_nbytes // 8, 8 * bare["layer_nbytes"], 16 * MIB)
    limit_nbytes = bare["peak_nbytes"] + budget_nbytes * 11 // 10 + 96 * MIB
    print(
        f"{bare['parameters'] / 1e6:.1f} M parameters; with gradients and AdamW's state "
        f"{total_nbytes / MIB:.0f} MiB."
    )
    plain: dict[str, Any] = {"killed": True}
    with memory_limit(None if options.no_limit else limit_nbytes) as group:
        if group is None:
            print("There is no memory limit.")
        else:
            print(f"The limit is {limit_nbytes / MIB:.0f} MiB, with torch itself.")
            plain = _run(options, "memory", directory, 0, group)
            print_training("torch alone", plain)
            if importlib.util.find_spec("accelerate") is None:
                print("accelerate is not installed.")
            else:
                print_training("accelerate", _run(options, "accelerate", directory, 0, group))
        ours = _run(options, "ours", directory, budget_nbytes, group)
        print_training(f"on the drive, with a budget of {budget_nbytes / MIB:.0f} MiB", ours)
    if "killed" in ours:
        return 1
    if "killed" in plain and (options.reference or group is None):
        plain = _run(options, "memory", directory, 0)
        print_training("torch alone, without a limit", plain)
    if "killed" in plain:
        return 0
    equal = all(plain[name] == ours[name] for name in ("losses", "weights"))
    print(f"Losses and weights are {'the same, bit for bit' if equal else 'different'}.")
    return 0 if equal else 1


def _run(
    options: argparse.Namespace,
    kind: str,
    directory: Path,
    budget_nbytes: int,
    group: Path | None = None,
) -> dict[str, Any]:
    arguments = [f"--parameters={options.parameters}", f"--steps={options.steps}"]
    return run_kind(__file__, kind, directory, budget_nbytes, arguments, group)


def count(text: str) -> int:
    """Parse a number such as "100M"."""
    unit = UNITS.get(text[-1:].upper())
    return round(float(text) if unit is None else float(text[:-1]) * unit)


def main() -> int:
    options = _options()
    if options.kind:
        print(json.dumps(work(options)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tensorferry-", dir=options.directory) as name:
        return compare(options, Path(name))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a transformer that does not fit into memory."
    )
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="folder for the files")
    parser.add_argument("--parameters", type=count, default=24_000_000, help="such as 100M or 1B")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--no-limit", action="store_true", help="set no limit, and compare the results"
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="also compare the results with a training without a limit",
    )
    kinds = ["new", "memory", "accelerate", "ours"]
    parser.add_argument("--kind", choices=kinds, help=argparse.SUPPRESS)
    parser.add_argument("--budget-nbytes", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
