"""Train a transformer with AdamW and a state that does not fit into memory.

    python examples/offload/train.py

A small transformer is trained three times on the CPU, each time in a separate process:

1. with plain SGD, which has no state: this shows the memory of the model, its gradients and torch itself;
2. with torch's AdamW, and a memory limit (a cgroup) with space for an eighth of its state and 96 MiB: it is killed;
3. with the same AdamW offloaded, and the same limit: it trains.

With ``--reference``, the second training is repeated without a limit. Its results must be identical to those of the
third one, bit for bit.

Memory limits need root, and a system that allows new cgroups. Otherwise, or with ``--no-limit``, AdamW in memory is not
killed, and both trainings must have the same weights and losses, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from limits import memory_limit, memory_nbytes, print_training, run_kind

WIDTH, VOCABULARY, BATCH, LENGTH = 512, 1000, 2, 16
LAYER_PARAMETERS = 12 * WIDTH * WIDTH + 13 * WIDTH
MIB = 1 << 20


def train(kind: str, parameters: int, steps: int, directory: Path, budget_nbytes: int) -> None:
    """Train, and print the result as JSON. Only offload_optimizer() is added to an ordinary training."""
    import torch
    from torch import nn

    from tensorferry.offload import offload_optimizer

    torch.manual_seed(0)
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.TransformerEncoder(layer, max(1, round(parameters / LAYER_PARAMETERS))),
        nn.Linear(WIDTH, VOCABULARY),
    )
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if kind == "offloaded":
        optimizer = offload_optimizer(optimizer, directory, memory_budget=budget_nbytes)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    losses, peak_nbytes = [], 0
    for number in range(steps):
        text = torch.randint(
            VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number)
        )
        found = model(text[:, :-1])
        loss = nn.functional.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        peak_nbytes = max(peak_nbytes, memory_nbytes())
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())

    weights = hashlib.sha256()
    for param in model.parameters():
        weights.update(param.detach().numpy().data)
    result: dict[str, Any] = {
        "losses": losses,
        "weights": weights.hexdigest(),
        "peak_nbytes": peak_nbytes,
        "parameters": sum(param.numel() for param in model.parameters()),
    }
    print(json.dumps(result))


def main() -> int:
    options = _options()
    if options.kind:
        budget = options.budget_nbytes
        train(options.kind, options.parameters, options.steps, options.directory, budget)
        return 0
    with tempfile.TemporaryDirectory(prefix="tensorferry-", dir=options.directory) as name:
        return compare(options, Path(name))


def compare(options: argparse.Namespace, directory: Path) -> int:
    bare = _run(options, "adamw" if options.no_limit else "sgd", directory, 0)
    state_nbytes = 8 * bare["parameters"]
    budget_nbytes = max(state_nbytes // 8, 4 * MIB)
    print(
        f"{bare['parameters'] / 1e6:.1f} M parameters; AdamW's state: {state_nbytes / MIB:.0f} MiB."
    )
    limit_nbytes = bare["peak_nbytes"] + budget_nbytes * 11 // 10 + 96 * MIB
    with memory_limit(limit_nbytes if not options.no_limit else None) as group:
        if group is None:
            print("There is no memory limit.")
        else:
            print(
                f"Without any state, the training takes {bare['peak_nbytes'] / MIB:.0f} MiB; the limit "
                f"is {limit_nbytes / MIB:.0f} MiB."
            )
        plain = bare if options.no_limit else _run(options, "adamw", directory, 0, group)
        print_training("AdamW in memory", plain)
        ours = _run(options, "offloaded", directory, budget_nbytes, group)
        print_training(f"offloaded, with a budget of {budget_nbytes / MIB:.0f} MiB", ours)
    if "killed" in ours:
        return 1
    if "killed" in plain and options.reference:
        plain = _run(options, "adamw", directory, 0)
        print_training("AdamW in memory, without a limit", plain)
    if "killed" not in plain:
        equal = all(plain[name] == ours[name] for name in ("losses", "weights"))
        print(f"Losses and weights are {'the same, bit for bit' if equal else 'different'}.")
        return 0 if equal else 1
    return 0


def _run(
    options: argparse.Namespace,
    kind: str,
    directory: Path,
    budget_nbytes: int,
    group: Path | None = None,
) -> dict[str, Any]:
    arguments = [f"--parameters={options.parameters}", f"--steps={options.steps}"]
    return run_kind(__file__, kind, directory, budget_nbytes, arguments, group)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train with AdamW and a state that does not fit into memory."
    )
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="folder for the state")
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--no-limit", action="store_true", help="set no limit, and compare the results"
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="also compare the results with a training without a limit",
    )
    parser.add_argument("--kind", choices=["sgd", "adamw", "offloaded"], help=argparse.SUPPRESS)
    parser.add_argument("--budget-nbytes", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
