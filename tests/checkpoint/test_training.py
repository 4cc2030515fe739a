"""Trainings are saved and restored whole: the losses after a resume are those of the run without it, bit for bit."""

from __future__ import annotations

import copy
import errno
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tensorferry.checkpoint import Checkpoints, RandomState
from tensorferry.checkpoint.storage import commit
from tensorferry.offload import offload_optimizer, offload_training
from tests.checkpoint.steps import Steps
from tests.support.data import SEED
from tests.support.ranks import call_on_ranks, started

if TYPE_CHECKING:
    import pathlib

STEPS = 8
OPTIMIZERS: list[Any] = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True, "lr": torch.tensor(0.01)}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adafactor, {}),
]


class Sampler:
    """An object whose state has numbers as keys, empty dicts and a tensor."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {0: {}, "order": torch.randperm(20), "position": (0, None)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def next(self) -> int:
        position = self.state["position"][0]
        self.state["position"] = (position + 1, None)
        self.state[position + 1] = {"epoch": {}}
        return int(self.state["order"][position % 20])


class Net(torch.nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, width, dtype=dtype)
        self.body = torch.nn.Linear(width, width, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(width, dtype=dtype)
        self.late = torch.nn.Linear(width, width, dtype=dtype)
        self.unused = torch.nn.Linear(width, width, dtype=dtype)
        self.head = torch.nn.Linear(width, 20, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.norm(F.dropout(self.body(self.embed(tokens)), 0.1))
        return self.head(self.late(x) if self.late.weight.requires_grad else x)


class Training:
    """A random training: its optimizer, its groups, what is frozen, and when `late` begins to learn."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        random.seed(seed)
        self.net = Net(draw.choice([3, 8]), draw.choice([torch.float32, torch.bfloat16]))
        self.net.late.requires_grad_(False)
        kind, options = draw.choice(OPTIMIZERS)
        self.net.body.bias.requires_grad_(draw.random() < 0.5)
        first = [*self.net.embed.parameters(), *self.net.body.parameters()]
        groups = [
            {"params": first},
            {"params": [*self.net.unused.parameters()], "weight_decay": 0.1},
        ]
        groups.insert(draw.randrange(3), {"params": []})
        self.optimizer = kind(groups, **copy.deepcopy(options))
        self.late_from = draw.randrange(1, STEPS)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.sampler = Sampler()
        self.state = {
            "model": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "sampler": self.sampler,
            "random": RandomState(),
        }

    def step(self, number: int) -> list[float]:
        if number == self.late_from:
            self.net.late.requires_grad_(True)
            self.optimizer.add_param_group({"params": [*self.net.late.parameters()]})
        tokens = torch.randint(20, (8,)) + self.sampler.next() - random.randrange(20)
        loss = F.cross_entropy(self.net(tokens % 20).float(), torch.randint(20, (8,)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return [loss.item(), np.random.rand()]


@pytest.mark.parametrize("number", range(4))
def test_a_random_training_resumed_at_random_steps_has_equal_losses(
    tmp_path: pathlib.Path, number: int
) -> None:
    seed = SEED + number
    torch.set_num_threads(1)
    np.random.seed(seed % 2**32)
    expected_training = Training(seed)
    expected = [expected_training.step(number) for number in range(1, STEPS + 1)]
    np.random.seed(seed % 2**32)
    stops = {*random.Random(seed).sample(range(1, STEPS), 3), STEPS}
    losses: list[list[float]] = []
    for stop in sorted(stops):
        training = Training(seed)  # as a new process makes it
        with Checkpoints(tmp_path, keep_last=1) as checkpoints:
            done = checkpoints.restore(training.state) or 0
            assert done == len(losses)
            if done == 0:
                np.random.seed(seed % 2**32)
            for number in range(done + 1, stop + 1):
                losses.append(training.step(number))
            checkpoints.save(stop, training.state)
    assert losses == expected
    for one, other in zip(
        training.net.parameters(), expected_training.net.parameters(), strict=True
    ):
        assert torch.equal(one, other)
    assert len(training.optimizer.state) == len(expected_training.optimizer.state)


def test_all_differences_are_named_at_once_and_nothing_is_loaded(tmp_path: pathlib.Path) -> None:
    def state(**sizes: int) -> dict[str, Any]:
        layers = {name: torch.nn.Linear(size, 2, bias=False) for name, size in sizes.items()}
        model = torch.nn.ModuleDict(layers)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}

    saved, other = state(same=1, gone=2, grown=3, short=1), state(same=1, grown=4, new=2, short=1)
    other["model"]["short"].half()
    before = other["model"]["same"].weight.clone()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(other, strict=False) == (None, (), (), ())
        checkpoints.save(1, saved, wait=True)
        with pytest.raises(ValueError, match=r"nothing has been loaded") as failure:
            checkpoints.restore(other)
        assert torch.equal(other["model"]["same"].weight, before)
        with pytest.warns(RuntimeWarning, match="dtypes that may not hold"):
            found = checkpoints.restore(other, strict=False)
    assert found.step == 1
    assert found.missing == ("model.new.weight", "optimizer.new.weight")
    assert found.unexpected == ("model.gone.weight", "optimizer.gone.weight")
    assert [each.partition(" ")[0] for each in found.changed] == [
        "model.grown.weight",
        "model.short.weight",
    ]
    for name in (*found.missing, *found.unexpected, *found.changed):
        assert name in str(failure.value)
    assert torch.equal(other["model"]["same"].weight, saved["model"]["same"].weight)


def resume_on(rank: int, root: str, saves: bool) -> Any:
    """Save or restore a training of sharded parameters and values of each rank; return what follows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def shard(_name: str, module: torch.nn.Module, mesh: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            shared = distribute_tensor(param.detach(), mesh, [Shard(0)])
            module.register_parameter(name, torch.nn.Parameter(shared))

    size = torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    distribute_module(model, init_device_mesh("cpu", (size,)), shard)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    position = {0: rank, "empty": {}}
    state = {"m": model, "o": optimizer, "r": RandomState(), "position": position}

    def step() -> None:
        for param in model[0].parameters():  # those of model[1] have no state yet
            param.grad = torch.ones_like(param)
        optimizer.step()

    found: Any = None
    with Checkpoints(root, per_rank=["position"]) as checkpoints:
        if saves:
            step()
            checkpoints.save(1, state, wait=True)
        else:
            state["position"] = None
            if size == 1:
                with pytest.raises(ValueError, match=r"position\.rank_1.*r\.rank_1"):
                    checkpoints.restore(state)
            found = checkpoints.restore(state, strict=False)[1:]
    step()
    weights = [param.full_tensor().tolist() for param in model.parameters()]
    return weights, torch.rand(1).item(), state["position"], found


def test_ranks_resume_with_their_own_values_and_say_what_other_ranks_had(
    tmp_path: pathlib.Path,
) -> None:
    expected = call_on_ranks(2, resume_on, str(tmp_path), True)
    assert [each[2] for each in expected] == [{0: 0, "empty": {}}, {0: 1, "empty": {}}]
    found = call_on_ranks(2, resume_on, str(tmp_path), False)
    assert [each[:3] for each in found] == [each[:3] for each in expected]
    assert [each[3] for each in found] == [((), (), ())] * 2
    [alone] = call_on_ranks(1, resume_on, str(tmp_path), False)
    assert alone[0] == expected[0][0]
    assert alone[3] == ((), ("position.rank_1", "r.rank_1"), ())


def save_counted(_rank: int, root: str, options: Any, step: int, save: Any, die_at: int) -> None:
    """Save one checkpoint, and kill the process at one of its changes to files."""
    counted = Steps(die_at)
    counted.install()
    with Checkpoints(root, **options) as checkpoints:
        checkpoints.save(step, {"number": save[0]}, True, overwrite=True, metric=save[1])


class Run:
    """Saves, some of which fail or are killed, beside a model: the metric of each save, by its number."""

    def __init__(self, root: pathlib.Path, draw: random.Random) -> None:
        self.draw = draw
        self.metrics: list[float | None] = []
        self.root, self.best_is = root, draw.choice(["lowest", "highest"])
        best, last = draw.randrange(1, 3), draw.randrange(1, 4)
        self.options: Any = {"keep_last": last, "keep_best": best, "best_is": self.best_is}

    def path(self, step: int) -> pathlib.Path:
        return Checkpoints(self.root).path(step)

    def complete(self) -> dict[int, int]:
        """Return the number of the save that each step's checkpoint is from."""
        checkpoints, found = Checkpoints(self.root), {}
        for step in checkpoints.steps():
            state = {"number": -1}
            checkpoints.restore(state, step=step)
            found[step] = state["number"]
        return found

    def best(self, numbers: dict[int, int]) -> list[int]:
        known = {
            step: value
            for step, number in numbers.items()
            if (value := self.metrics[number]) is not None and value == value
        }
        sign = 1 if self.best_is == "lowest" else -1
        return sorted(known, key=lambda step: (sign * known[step], -step))

    def save(self, how: str) -> None:
        before = self.complete()
        step = self.draw.choice([*before, max(before, default=0) + 1])
        metric = self.draw.choice([None, float("nan"), *[self.draw.random() for _ in range(4)]])
        number = len(self.metrics)
        self.metrics.append(metric)
        if how == "is killed":
            arguments = str(self.root), self.options, step, (number, metric)
            with started(1, save_counted, *arguments, self.draw.randrange(100)) as ranks:
                ranks[0].process.join(120)
            found = self.complete()
            if found.get(step) == number:
                assert self.kept(before, step).items() <= found.items()
                assert found.items() <= {**before, step: number}.items()
            else:
                assert found == before
            return
        with Checkpoints(self.root, **self.options) as checkpoints:
            if how == "goes back" and before:
                step = self.draw.choice([*before])
                checkpoints.restore({}, step=step)
                before = {each: value for each, value in before.items() if each <= step}
                step += 1
            saved = {"number": number}
            if how == "fails":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(commit, "write_metadata", fail)
                    with pytest.raises(OSError, match="full"):
                        checkpoints.save(step, saved, True, overwrite=True, metric=metric)
                    assert self.complete() == before
                    self.check_links(before)
                    return
            checkpoints.save(step, saved, True, overwrite=True, metric=metric)
        expected = self.kept(before, step)
        assert self.complete() == expected
        self.check_links(expected)

    def kept(self, before: dict[int, int], step: int) -> dict[int, int]:
        """Return what is there once the last save has ended."""
        numbers = {**before, step: len(self.metrics) - 1}
        older = [each for each in sorted(numbers) if each < step]
        kept = {*self.best(numbers)[: self.options["keep_best"]]}
        kept |= {*[*older, step][-self.options["keep_last"] :]}
        return {key: each for key, each in numbers.items() if key >= step or key in kept}

    def check_links(self, complete: dict[int, int]) -> None:
        for name, steps in (("last", sorted(complete)[-1:]), ("best", self.best(complete)[:1])):
            path = self.root / name
            assert [path.resolve()] * path.is_symlink() == [self.path(step) for step in steps]


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "the drive is full")


@pytest.mark.parametrize("number", range(2))
def test_the_best_and_the_last_stay_whatever_happens_to_saves(
    tmp_path: pathlib.Path, number: int
) -> None:
    draw = random.Random(f"{SEED} {number}")
    run = Run(tmp_path / "run", draw)
    run.save("ends")
    (run.root / ".tensorferry-new-link").symlink_to("step_00000007")  # of a save that was killed
    for how in draw.choices(["ends", "ends", "fails", "is killed", "goes back"], k=10):
        run.save(how)
    run.save("ends")
    assert not (run.root / ".tensorferry-new-link").is_symlink()


def preempted(rank: int, root: str) -> tuple[bool, list[int], Any]:
    """Train until one rank receives a signal."""
    handler = signal.getsignal(signal.SIGUSR1)
    state = {"a": torch.zeros(2)}
    with Checkpoints(root) as checkpoints, checkpoints.on_signal(signal.SIGUSR1):
        for step in range(1, 100):
            checkpoints.save(step, state) if step == 2 else None
            if rank == 0 and step == 3:
                signal.raise_signal(signal.SIGUSR1)
            if checkpoints.due(step, state):
                break
    assert signal.getsignal(signal.SIGUSR1) == handler
    return step == 3, checkpoints.steps(), checkpoints.restore(state)


def test_all_ranks_save_once_and_end_when_one_is_told(tmp_path: pathlib.Path) -> None:
    assert call_on_ranks(2, preempted, str(tmp_path)) == [(True, [2, 3], 3)] * 2


def test_a_program_whose_last_save_failed_ends_with_a_code(tmp_path: pathlib.Path) -> None:
    program = (
        "import atexit, sys\n"
        "atexit.register(print, 'handled')\n"
        "import torch\n"
        "from tensorferry.checkpoint import Checkpoints, FileSystemWriter\n"
        "def fail(*_): raise OSError(5, 'the drive is gone')\n"
        "FileSystemWriter.write_data = fail\n"
        "c = Checkpoints(sys.argv[1]); c.save(1, {'a': torch.ones(1)}); print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (120, "done\nhandled\n"), done.stderr
    assert "the save of step 1 failed" in done.stderr


def offloaded(kind: str, where: pathlib.Path) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    model: torch.nn.Module = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "training":
        model, optimizer = offload_training(
            model, optimizer, where, memory_budget="1MiB", blocks=layers
        )
    elif kind == "optimizer":
        optimizer = offload_optimizer(optimizer, where, memory_budget="1MiB")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return {**parts, "random": RandomState()}


def losses(state: dict[str, Any]) -> list[float]:
    found = []
    for _ in range(3):
        loss = state["model"](torch.ones(4, 32)).square().sum()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["schedule"].step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["optimizer", "training"])
def test_an_offloaded_training_goes_on_as_one_in_memory(tmp_path: pathlib.Path, kind: str) -> None:
    first, second = offloaded(kind, tmp_path / "first"), offloaded(kind, tmp_path / "second")
    in_memory = offloaded("", tmp_path)
    with Checkpoints(tmp_path / "kept") as checkpoints:
        torch.manual_seed(1)
        losses(first)
        checkpoints.save(3, first)
        checkpoints.wait()
        expected = losses(first)
        checkpoints.restore(second)
        assert losses(second) == expected
        checkpoints.restore(in_memory)
        assert losses(in_memory) == expected
    first["optimizer"].close()
    second["optimizer"].close()
