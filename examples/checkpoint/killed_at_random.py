"""Train, be killed at random moments, go on: in the end everything is the same, bit for bit.

    python examples/checkpoint/killed_at_random.py

A small model is trained twice. The first training runs through. The second one is killed (``kill -9``) over and over,
wherever it is: in a step, in a save, while an old checkpoint is removed. Each time it is started once more, and goes on
from the newest checkpoint that ``Checkpoints`` finds. What that takes is all in ``Training.state_dict``: weights, the
optimizer's state, the schedule and random numbers; data depend on the step alone.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tensorferry.checkpoint import Checkpoints

BATCH, WIDTH = 16, 256


class Training:
    """All that a training is; ``Checkpoints`` asks it for its state, and gives it back."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 50, gamma=0.5)

    def step(self, number: int) -> float:
        data = torch.Generator().manual_seed(number)
        x = torch.rand(BATCH, 8, generator=data)
        loss = F.mse_loss(self.model(x), x.sum(dim=1, keepdim=True).sin())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])


def train(directory: Path, steps: int, save_every: int) -> None:
    """Go on from the newest checkpoint, up to a number of steps."""
    torch.set_num_threads(1)
    training = Training()
    with (
        Checkpoints(directory, keep_last=3, keep_every=100) as checkpoints,
        directory.with_suffix(".losses").open("a") as losses,
    ):
        done = checkpoints.restore({"training": training}) or 0
        for step in range(done + 1, steps + 1):
            loss = training.step(step)
            losses.write(json.dumps([step, loss]) + "\n")
            losses.flush()
            if step % save_every == 0:
                checkpoints.save(step, {"training": training})


def start(directory: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    arguments = [f"--train={directory}", f"--steps={options.steps}"]
    arguments += [f"--save-every={options.save_every}"]
    return subprocess.Popen([sys.executable, __file__, *arguments])


def kill_once(directory: Path, options: argparse.Namespace, moments: random.Random) -> bool:
    """Start a training, and kill it some time after it has got further; return whether it was not through by then."""
    checkpoints = Checkpoints(directory)
    before = checkpoints.latest() or 0
    process = start(directory, options)
    while process.poll() is None and (checkpoints.latest() or 0) <= before:
        time.sleep(0.001)
    time.sleep(moments.uniform(0, 0.1))
    process.kill()
    if process.wait() == 0:
        return False
    left = sorted(path.name for path in directory.iterdir())
    print(f"killed; there are checkpoints of {checkpoints.steps()}, and in the folder: {left}")
    return True


def losses_in(directory: Path) -> dict[int, set[float]]:
    """Return what each step's loss was: of steps done again, each time."""
    losses: dict[int, set[float]] = {}
    for line in directory.with_suffix(".losses").read_text().splitlines():
        step, loss = json.loads(line)
        losses.setdefault(step, set()).add(loss)
    return losses


def final_state(directory: Path) -> dict[str, Any]:
    training = Training()
    Checkpoints(directory).restore({"training": training})
    return {"random": torch.get_rng_state(), **training.model.state_dict()}


def compare(base: Path, options: argparse.Namespace) -> int:
    """Do what is said above, and return the exit code."""
    whole, killed = base / "whole", base / "killed"
    if start(whole, options).wait() != 0:
        raise SystemExit("the training does not run")
    moments = random.Random(options.seed)
    kills = sum(kill_once(killed, options, moments) for _ in range(options.kills))
    if start(killed, options).wait() != 0:
        raise SystemExit("the training that had been killed does not go on")
    one, other = final_state(whole), final_state(killed)
    same = all(torch.equal(value, other[name]) for name, value in one.items())
    same = same and losses_in(whole) == losses_in(killed)
    print(f"killed {kills} times of {options.kills}; checkpoints: {Checkpoints(killed).steps()}")
    print("All is the same, bit for bit." if same else "Something differs.")
    return 0 if same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, help="where to work (default: a temporary one)")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--train", type=Path, help="train with checkpoints in this folder, only")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.save_every)
        return 0
    with tempfile.TemporaryDirectory(prefix="tensorferry-example-", dir=options.directory) as path:
        return compare(Path(path), options)


if __name__ == "__main__":
    sys.exit(main())
