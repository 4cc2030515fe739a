"""Train a small transformer with FSDP2 that can be killed at any time and resumed with any number of ranks.

    torchrun --nproc-per-node 2 examples/checkpoint/train.py --directory /data/run --steps 100

The training saves its complete state to one directory, over the previous checkpoint, and starts from the checkpoint in
the directory if there is one. The losses continue bit for bit, with any number of ranks (1, 2, 3 or 6). Such identical
losses need more than a checkpoint:

* The data depend on the step and the position in the batch, not on the rank.
* The model processes one sequence at a time, so all kernels have the same shapes with any number of ranks.
* Gradients are rounded to multiples of 2 ** -20 before they are added. Such sums are exact, so they do not depend on
  their order. Other floating-point sums differ with the number of ranks.
* Each rank's part of each parameter is a multiple of 32 elements. So vector instructions never leave a remainder, which
  could be rounded differently.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tensorferry.checkpoint import FileSystemReader, FileSystemWriter

WIDTH, HEADS, LAYERS, VOCABULARY = 192, 4, 2, 192
BATCH, LENGTH = 6, 32
GRID = 2.0**20


class Rounded(torch.autograd.Function):
    """The identity function for a weight, with a gradient that is rounded to values with exact sums."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.round(gradient * GRID) / GRID


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, Rounded.apply(self.weight), Rounded.apply(self.bias))


class LayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = Rounded.apply(self.weight), Rounded.apply(self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias)


class Embedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, Rounded.apply(self.weight))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = LayerNorm(WIDTH)
        self.queries_keys_values = Linear(WIDTH, 3 * WIDTH)
        self.attended = Linear(WIDTH, WIDTH)
        self.before_mlp = LayerNorm(WIDTH)
        self.up = Linear(WIDTH, 4 * WIDTH)
        self.down = Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        heads = [part.view(1, LENGTH, HEADS, -1).transpose(1, 2) for part in parts]
        attention = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attended(attention.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = Embedding(VOCABULARY, WIDTH)
        self.positions = Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.last = LayerNorm(WIDTH)
        self.predict = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH))
        return self.predict(self.last(self.blocks(x)))


def sequence(step: int, position: int) -> torch.Tensor:
    """Return the sequence at a position in a step's batch. Its tokens count up, which the model can learn."""
    generator = torch.Generator().manual_seed(step * BATCH + position)
    first = int(torch.randint(VOCABULARY, (), generator=generator))
    return (first + torch.arange(LENGTH + 1)) % VOCABULARY


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train on one batch, a part of it on each rank, and return the loss of the whole batch."""
    count = BATCH // dist.get_world_size()
    positions = range(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    losses = torch.empty(count)
    for k, position in enumerate(positions):
        model.set_requires_gradient_sync(position == positions[-1])
        tokens = sequence(step, position)
        loss = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])
        (loss / BATCH).backward()
        losses[k] = loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    all_losses = [torch.empty(count) for _ in range(dist.get_world_size())]
    dist.all_gather(all_losses, losses)
    return float(sum(torch.cat(all_losses).tolist())) / BATCH


def state_of(model: Any, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Return the complete state of the training."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def resume(model: Any, optimizer: torch.optim.Optimizer, directory: Path) -> int:
    """Load the checkpoint, if there is one, and return its step, or 0."""
    if not (directory / ".metadata").exists():
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, storage_reader=FileSystemReader(directory))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


class DyingPlanner(dcp.DefaultSavePlanner):
    """A planner that kills this process with SIGKILL after half of the save."""

    def finish_plan(self, new_plan: Any) -> Any:
        self.left = len(new_plan.items) // 2
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=12, help="the last step")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--losses", type=Path, help="append [step, loss] to this file, as JSON")
    parser.add_argument("--die-in-save-of-step", type=int, help="kill the last rank in this save")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    if BATCH % dist.get_world_size():
        raise SystemExit(f"{BATCH} sequences cannot be divided among {dist.get_world_size()} ranks")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = Transformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for module in (model, *model.blocks):  # sum the gradients, because a mean would be rounded
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    done = resume(model, optimizer, options.directory)
    for step in range(done + 1, options.steps + 1):
        loss = train_step(model, optimizer, step)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
            if options.losses:
                with options.losses.open("a") as file:
                    file.write(json.dumps([step, loss]) + "\n")
        if step % options.save_every == 0:
            is_last_rank = dist.get_rank() == dist.get_world_size() - 1
            dies = step == options.die_in_save_of_step and is_last_rank
            dcp.save(
                state_of(model, optimizer, step),
                storage_writer=FileSystemWriter(options.directory),
                planner=DyingPlanner() if dies else None,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
