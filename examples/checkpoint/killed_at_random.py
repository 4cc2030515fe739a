"""Kill or preempt a training at random moments and resume it each time. The result is identical, bit for bit.

    python examples/checkpoint/killed_at_random.py

A small model is trained twice. The first training runs without interruption. The second one is killed (``kill -9``)
repeatedly, at any point: in a step, in a save, or while it removes an old checkpoint. Every other time it is not killed
but preempted: it gets SIGTERM, as from a scheduler that needs the machine, saves once more and ends. Each time, it is
restarted and resumes from the newest checkpoint that ``Checkpoints`` finds. ``Training.state`` has everything that an
identical continuation needs: the weights, the optimizer's state, the schedule and the state of the random number
generator. The training data depend only on the step. The checkpoint with the lowest loss is kept, too.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tensorferry.checkpoint import Checkpoints, RandomState

BATCH, WIDTH = 16, 256


class Training:
    """A training, with the parts that ``Checkpoints`` saves and restores."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 50, gamma=0.5)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "random": RandomState(),
        }

    def step(self, number: int) -> float:
        data = torch.Generator().manual_seed(number)
        x = torch.rand(BATCH, 8, generator=data)
        loss = F.mse_loss(self.model(x), x.sum(dim=1, keepdim=True).sin())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()


def train(directory: Path, steps: int, save_every: int) -> None:
    """Train up to a number of steps, starting from the newest checkpoint."""
    torch.set_num_threads(1)
    training = Training()
    with (
        Checkpoints(directory, keep_last=3, keep_every=100, keep_best=1) as checkpoints,
        checkpoints.on_signal(signal.SIGTERM),
        directory.with_suffix(".losses").open("a") as losses,
    ):
        done = checkpoints.restore(training.state) or 0
        for step in range(done + 1, steps + 1):
            loss = training.step(step)
            losses.write(json.dumps([step, loss]) + "\n")
            losses.flush()
            if step % save_every == 0:
                checkpoints.save(step, training.state, metric=loss)
            if checkpoints.due(step, training.state):  # this step has been saved
                break


def start(directory: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    arguments = [f"--train={directory}", f"--steps={options.steps}"]
    arguments += [f"--save-every={options.save_every}"]
    return subprocess.Popen([sys.executable, __file__, *arguments])


def kill_once(
    directory: Path, options: argparse.Namespace, number: int, moments: random.Random
) -> bool:
    """Start a training, and end it some time after its next checkpoint. Return False if it had already finished."""
    checkpoints = Checkpoints(directory)
    before = checkpoints.latest() or 0
    process = start(directory, options)
    while process.poll() is None and (checkpoints.latest() or 0) <= before:
        time.sleep(0.001)
    time.sleep(moments.uniform(0, 0.1))
    process.send_signal(signal.SIGTERM if number % 2 else signal.SIGKILL)
    process.wait()
    if checkpoints.latest() == options.steps:
        return False
    left = sorted(path.name for path in directory.iterdir())
    how = "preempted" if number % 2 else "killed"
    print(f"{how}; checkpoints of steps {checkpoints.steps()}, files in the folder: {left}")
    return True


def losses_in(directory: Path) -> dict[int, set[float]]:
    """Return the losses of each step, of which there are several if the step was repeated."""
    losses: dict[int, set[float]] = {}
    for line in directory.with_suffix(".losses").read_text().splitlines():
        step, loss = json.loads(line)
        losses.setdefault(step, set()).add(loss)
    return losses


def final_state(directory: Path) -> dict[str, Any]:
    training = Training()
    Checkpoints(directory).restore(training.state)
    return {"random": torch.get_rng_state(), **training.model.state_dict()}


def compare(base: Path, options: argparse.Namespace) -> int:
    """Run both trainings, compare their results, and return the exit code."""
    reference, killed = base / "reference", base / "killed"
    if start(reference, options).wait() != 0:
        raise SystemExit("the training failed")
    moments = random.Random(options.seed)
    kills = sum(kill_once(killed, options, k, moments) for k in range(options.kills))
    if start(killed, options).wait() != 0:
        raise SystemExit("the killed training could not be resumed")
    one, other = final_state(reference), final_state(killed)
    same = all(torch.equal(value, other[name]) for name, value in one.items())
    same = same and losses_in(reference) == losses_in(killed)
    same = same and (reference / "best").readlink() == (killed / "best").readlink()
    print(f"killed or preempted {kills} times of {options.kills}")
    print(f"checkpoints: {Checkpoints(killed).steps()}, the best: {(killed / 'best').readlink()}")
    print("The results are identical, bit for bit." if same else "The results differ.")
    return 0 if same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--directory", type=Path, help="the working directory (default: a temporary one)"
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--train", type=Path, help="only train, with checkpoints in this folder")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.save_every)
        return 0
    with tempfile.TemporaryDirectory(prefix="tensorferry-example-", dir=options.directory) as path:
        return compare(Path(path), options)


if __name__ == "__main__":
    sys.exit(main())
