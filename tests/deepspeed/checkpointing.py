"""A rank of trainings that save and load: `python -m tests.deepspeed.checkpointing SCENARIO MEETING JSON`.

Ranks find each other by a file. Rank 0 prints a line of JSON with the findings of each rank.
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
from benchmarks.models import Transformer
from benchmarks.training import join

import tensorferry.deepspeed
from tensorferry.transfer import replacement

HIDDEN = int(
    os.environ.get("HIDDEN", "64")
)  # from 512 on some parameters are large enough for DeepSpeed to swap


class Training:
    """An engine of DeepSpeed with a stage of ZeRO; for stage 3 also with states on NVMe."""

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
        if stage == "all on nvme":  # more groups than DeepSpeed has buffers for at a time
            zero["sub_group_size"] = HIDDEN * HIDDEN
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
    """Run steps, and save before some of them; load before the first one. The tag "latest" is read from that file."""
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
    """Continue from the newest checkpoint, and save after each step, until the test kills this process."""
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
    """Load incomplete checkpoints by one engine; return the message for each."""
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
        if "optim" in name and stage == 3:
            load(f"weights of {name}", load_optimizer_states=False)
        path.write_bytes((other / name).read_bytes())
        load(f"mixed {name}")
        path.unlink()
        load(f"missing {name}")
        if "optim" in name and stage != "nvme":
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


def loaded_or_error(training: Training, directory: Path) -> str:
    """Load a checkpoint once all ranks are here; return "loaded" or the error."""
    dist.barrier()
    try:
        training.engine.load_checkpoint(str(directory))
    except ValueError as error:
        return str(error)
    return "loaded"


def scenario_missing(directory: Path, stage: int) -> str:
    """Load a checkpoint without a file that the first rank misses; return the error."""
    training = Training(stage, directory / "swaps")
    training.engine.save_checkpoint(str(directory), tag="whole")
    if dist.get_rank() == 0:
        next((directory / "whole").glob("*_rank_0_*optim_states.pt")).unlink()
    return loaded_or_error(training, directory)


def scenario_damaged(directory: Path, stage: int, kind: str) -> str:
    """Load a checkpoint of which a file, which only the last rank reads, is damaged; return the error."""
    training = Training(stage, directory / "swaps")
    training.engine.save_checkpoint(str(directory), tag="whole")
    if dist.get_rank() == 0:
        path = next((directory / "whole").glob(f"*_rank_1_*{kind}_states.pt"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return loaded_or_error(training, directory)


def scenario_failing(directory: Path, stage: int, decoupled: bool, failing: int) -> dict[str, Any]:
    """Save with a limit of file sizes on one rank, then without it."""
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
    if dist.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, resource.RLIM_INFINITY))
    training.step(0)
    found["second"] = save("second")
    found["latest"] = [(directory / "latest").read_text()]
    dist.barrier()
    found["again"] = save("first")  # replaces the existing checkpoint, or keeps it
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    found["left"] = sorted(each.name for each in (directory / "second").iterdir())
    found["latest"].append((directory / "latest").read_text())
    engine.load_checkpoint(str(directory), tag="first")
    found["steps"] = engine.global_steps
    training.step(1)
    found["third"] = save("second")
    return found


def scenario_live(directory: Path, stage: int | str) -> dict[str, Any]:
    """Load an earlier and a later checkpoint into an engine after its steps, and into a new engine."""
    training, found = Training(stage, directory / "swaps"), {}
    training.engine.save_checkpoint(str(directory), tag="0")
    wanted = {"0": training.steps(0, 3)}
    training.engine.save_checkpoint(str(directory), tag="3")
    wanted["3"] = training.steps(3, 6)
    for tag in ("3", "0"):
        training.engine.load_checkpoint(str(directory), tag=tag)
        found[f"live {tag}"] = training.steps(int(tag), int(tag) + 3) == wanted[tag]
    training.engine.destroy()
    second = Training(stage, directory / "swaps")
    for tag in ("3", "0"):
        second.engine.load_checkpoint(str(directory), tag=tag)
        found[f"second {tag}"] = second.steps(int(tag), int(tag) + 3) == wanted[tag]
    second.engine.save_checkpoint(
        str(directory), tag="3"
    )  # DeepSpeed would refuse to copy there again
    found["again"] = second.engine.load_checkpoint(str(directory), tag="3")[0] is not None
    second.engine.destroy()
    return found


def scenario_meanwhile(directory: Path) -> dict[str, Any]:
    """Write decoupled saves of two engines, among them saves that fail; return what the test checks."""
    decoupled = {"writer": {"decoupled": True, "show_statistics": True}}
    both = [Training(2, directory, checkpoint=decoupled) for _ in range(2)]
    found: dict[str, Any] = {}
    os.chdir(directory)
    for number in range(4):
        for name, training in zip("ab", both, strict=True):
            training.step(number)
            training.engine.save_checkpoint(name, tag=str(number))
    os.chdir("/")
    for training in both:
        training.engine.checkpoint_engine.cleanup()
    found["latest"] = [(directory / name / "latest").read_text() for name in "ab"]
    engine = both[0].engine
    kept = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, resource.RLIM_INFINITY))
    for number in range(4):
        try:
            engine.save_checkpoint(str(directory / "a"), tag=f"failed {number}")
            engine.checkpoint_engine.cleanup()
        except OSError as error:
            kept.append(error)  # its traceback must not keep the copies alive
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["failed"] = len(kept)
    dist.barrier()
    engine.save_checkpoint(str(directory / "a"), tag="last")
    engine.checkpoint_engine.cleanup()
    found["last"] = (directory / "a" / "latest").read_text()
    if dist.get_rank() == 0:  # a rank that cannot make a folder does not keep the others waiting
        (directory / "file").touch()
    for call in (engine.save_checkpoint, engine.save_16bit_model):
        try:
            call(str(directory / "file" / "x"))
            engine.checkpoint_engine.cleanup()
        except OSError as error:
            found[call.__name__] = type(error).__name__
    both[0].steps(4, 6)
    engine.save_checkpoint(str(directory / "own"), tag=f"rank {dist.get_rank()}")
    engine.checkpoint_engine.cleanup()
    found["own"] = engine.load_checkpoint(
        str(directory / "own"), tag="rank 0", load_module_only=True
    )[0]
    return found


def scenario_killed_between(directory: Path) -> None:
    """End while files of a checkpoint that has no list are replaced: one of them is."""
    training = Training(2, directory)
    training.engine.save_checkpoint(str(directory), tag="last")
    (directory / "last" / "tensorferry.json").unlink()
    training.steps(0, 2)
    commit = replacement.Target.commit

    def commit_and_end(self: Any, **options: Any) -> None:
        commit(self, **options)
        if self.target.endswith(".pt"):
            print("\nresults []", flush=True)
            os._exit(0)

    replacement.Target.commit = commit_and_end  # type: ignore[method-assign]
    training.engine.save_checkpoint(str(directory), tag="last")


def scenario_replaced(directory: Path) -> dict[str, Any]:
    """Return the checkpoint engine for each configuration, and the effects of uninstall()."""
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
