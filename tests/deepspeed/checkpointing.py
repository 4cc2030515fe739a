"""A rank of trainings that save and load: `python -m tests.deepspeed.checkpointing SCENARIO MEETING JSON`.

Ranks meet by a file. Rank 0 prints a line of JSON with what the test looks at, of each rank.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from benchmarks.training import Transformer, join

import tensorferry.deepspeed

HIDDEN = int(
    os.environ.get("HIDDEN", "64")
)  # from 512 on there are parameters that DeepSpeed swaps


class Training:
    """An engine of DeepSpeed under ZeRO of a stage; or with what of stage 3 is on NVMe."""

    def __init__(
        self,
        stage: int | str,
        swaps: Path,
        *,
        checkpoint: dict[str, Any] | None = None,
        frozen: bool = False,
        universal: bool = False,
    ) -> None:
        self.stage = stage
        zero: dict[str, Any] = {"stage": stage if isinstance(stage, int) else 3}
        nvme = {"device": "nvme", "nvme_path": str(swaps)}
        if stage in ("nvme", "all on nvme"):
            piped = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
            zero["offload_optimizer"] = nvme | (piped if stage == "all on nvme" else {})
            zero["sub_group_size"] = 4 * HIDDEN * HIDDEN
        if stage == "all on nvme":
            zero["offload_param"] = nvme | {"buffer_count": 8, "buffer_size": 8 * HIDDEN * HIDDEN}
            zero["stage3_param_persistence_threshold"] = 0
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": zero,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
        }
        if checkpoint is not None:
            config["checkpoint"] = checkpoint
        if universal:
            config["checkpoint"] = {"load_universal": True}
        torch.manual_seed(1)
        model = Transformer(2, HIDDEN)
        if frozen:
            model.embedding.weight.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]

    def step(self, number: int) -> str:
        """Learn from one batch; return the loss to the last bit."""
        rank = dist.get_rank()
        starts = torch.tensor([[7 * number + rank], [11 * number + rank]])
        loss = self.engine((starts + torch.arange(16)) % 256)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss).hex()

    def steps(self, begin: int, end: int) -> list[str]:
        return [self.step(number) for number in range(begin, end)]


def scenario_train(
    directory: Path,
    stage: int | str,
    *,
    begin: int,
    end: int,
    saves: dict[str, str | None] | None = None,
    load: str | None = None,
    strict: bool = True,
    exclude_frozen: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Take steps, and save before some of them; load before the first one, the tag "latest" is what the file says."""
    training = Training(stage, directory / "swaps", **options)
    engine = training.engine
    found: dict[str, Any] = {}
    if load is not None:
        tag = None if load == "latest" else load
        path, client = engine.load_checkpoint(str(directory), tag=tag, load_module_strict=strict)
        found["path"], found["steps"] = path, engine.global_steps
        writer = 0 if isinstance(stage, int) and stage < 3 else dist.get_rank()
        found["client"] = client["a"][0] == 1 and bool((client["a"][1] == writer).all())
    losses = []
    for number in range(begin, end + 1):
        if str(number) in (saves or {}):
            state = {"a": [1, torch.full((2,), float(dist.get_rank()))]}
            engine.save_checkpoint(
                str(directory),
                tag=saves[str(number)],
                client_state=state,
                exclude_frozen_parameters=exclude_frozen,
            )
        if number < end:
            losses.append(training.step(number))
    engine.destroy()
    return found | {"losses": losses}


def scenario_until_killed(directory: Path, stage: int | str, **options: Any) -> None:
    """Go on from the newest checkpoint, and save after each step, until somebody kills this process."""
    training = Training(stage, directory / "swaps", **options)
    number = 0
    if (directory / "latest").exists():
        training.engine.load_checkpoint(str(directory))
        number = training.engine.global_steps
    print("\nloaded", number, os.getpid(), flush=True)
    while True:
        print("\nloss", number, training.step(number), flush=True)
        number += 1
        print("\nsaving", number, flush=True)
        training.engine.save_checkpoint(str(directory))
        if training.engine.checkpoint_engine.is_decoupled():
            training.engine.checkpoint_engine.cleanup()
        print("\nsaved", number, flush=True)
        if dist.get_rank() == 0:
            shutil.rmtree(directory / f"global_step{number - 3}", ignore_errors=True)


def scenario_refused(directory: Path, stage: int | str) -> dict[str, Any]:
    """Load checkpoints that are not whole, by one engine; return what is said of each."""
    training = Training(stage, directory / "swaps")
    engine = training.engine
    training.steps(0, 2)  # the first one has a rate of zero
    whole, other = directory / "whole", directory / "other"
    engine.save_checkpoint(str(directory), tag="whole")
    training.step(2)
    engine.save_checkpoint(str(directory), tag="other", save_latest=False)
    found: dict[str, Any] = {"latest": (directory / "latest").read_text(), "refused": {}}

    def load(what: str, tag: str | None = "whole", **options: Any) -> None:
        try:
            path, _ = engine.load_checkpoint(str(directory), tag=tag, **options)
            found["refused"][what] = f"loaded {path and Path(path).parent.name}"
        except (ValueError, OSError) as error:
            found["refused"][what] = f"{type(error).__name__}: {error}"

    names = [str(each.relative_to(whole)) for each in sorted(whole.rglob("*")) if each.is_file()]
    found["names"] = [name for name in names if name != "tensorferry.json"]
    for name in found["names"]:
        path, data = whole / name, (whole / name).read_bytes()
        path.write_bytes(data[:-100])
        load(f"cut {name}")
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        load(f"flipped {name}")
        path.write_bytes((other / name).read_bytes())
        load(f"mixed {name}")
        path.unlink()
        load(f"missing {name}")
        if "optim" in name and stage == 2:
            load(f"without {name}", load_optimizer_states=False)
        path.write_bytes(data)
    load("whole again")
    (directory / "latest").write_text("")
    load("empty latest", None)
    (directory / "latest").write_text("gone")
    load("wrong latest", None)
    (directory / "latest").unlink()
    load("no latest", None)
    listed = (whole / "tensorferry.json").read_text()
    (whole / "tensorferry.json").write_text('{"version": 1, "unfinished": true}')
    load("unfinished")
    (whole / "tensorferry.json").write_text(listed[:-3])
    load("damaged list")
    (whole / "tensorferry.json").unlink()
    load("no list")
    return found


def scenario_failing(directory: Path, stage: int, decoupled: bool) -> dict[str, Any]:
    """Save where one rank may write no file so large; then where it may again."""
    training = Training(stage, directory, checkpoint={"writer": {"decoupled": decoupled}})
    engine = training.engine

    def save(tag: str) -> str:
        try:
            engine.save_checkpoint(str(directory), tag=tag)
            engine.checkpoint_engine.cleanup()
        except OSError as error:
            return f"{Path(error.filename).name}: {error.strerror}"
        return (directory / "latest").read_text()

    found: dict[str, Any] = {"first": save("first")}
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    training.step(0)
    found["second"] = save("second")
    found["latest"] = [(directory / "latest").read_text()]
    dist.barrier()
    found["again"] = save("first")  # replaces what is there, or leaves it
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    found["left"] = sorted(each.name for each in (directory / "second").iterdir())
    found["latest"].append((directory / "latest").read_text())
    engine.load_checkpoint(str(directory), tag="first")
    found["steps"] = engine.global_steps
    training.step(1)
    found["third"] = save("second")
    return found


def scenario_replaced(directory: Path) -> dict[str, Any]:
    """Which engines there are, by what is configured; and what they do after uninstall()."""
    found: dict[str, Any] = {}
    kinds: dict[str, Any] = {"none": None, "python": {"type": "python"}}
    kinds["mock"] = {"type": "mock", "data_parallel": "replica"}
    kinds["fast"] = {"type": "fast", "io_buffer_size": 1 << 20, "data_parallel": "replica"}
    kinds["decoupled"] = {"decoupled": True}
    engines = {}
    for name, writer in kinds.items():
        training = Training(2, directory, checkpoint={"writer": writer} if writer else None)
        engines[name] = training.engine
        found[name] = type(training.engine.checkpoint_engine).__name__
    tensorferry.deepspeed.uninstall()
    later = Training(2, directory).engine
    found["uninstalled"] = type(later.checkpoint_engine).__name__
    for name in ("none", "decoupled"):  # made before: they go on, as DeepSpeed's own do
        engine = engines[name]
        engine.save_checkpoint(str(directory), tag=name)
        engine.backward(engine(torch.arange(16)[None]))
        engine.step()
        found[f"latest of {name}"] = (directory / "latest").read_text()
        found[f"files of {name}"] = len(list((directory / name).iterdir()))
    tensorferry.deepspeed.install()
    later.save_checkpoint(str(directory), tag="later")  # made by DeepSpeed itself
    found["installed again"] = type(later.checkpoint_engine).__name__
    found["listed"] = (directory / "later" / "tensorferry.json").exists()
    return found


def main(name: str, meeting: str, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    arguments["directory"] = Path(arguments["directory"])
    result = globals()[f"scenario_{name}"](**arguments)
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, result)
    dist.destroy_process_group()
    if rank == 0:
        print("\nresults", json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:3], json.loads(sys.argv[3]))
