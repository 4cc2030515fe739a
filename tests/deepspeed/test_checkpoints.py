"""DeepSpeed's checkpoints with our engine: a resumed training is the same as an uninterrupted one, to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tests.conftest import ROOT
from tests.support import effort, warm
from tests.support.ranks import MAX_MEETINGS, NOT_MET, TIMEOUT_SECONDS
from tests.support.warm import call

if TYPE_CHECKING:
    import pathlib

    from tests.deepspeed.conftest import Environment

SERVED = {"TENSORFERRY_DEEPSPEED": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
# The variables that DeepSpeed's own writer needs; and parameters large enough for it to swap.
MACHINES = {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
SWAPPED = {"HIDDEN": "512"}


class Ranks:
    """Processes of a training, with the output of each in a file."""

    def __init__(
        self,
        count: int,
        directory: pathlib.Path,
        environment: Environment,
        scenario: str,
        **arguments: Any,
    ) -> None:
        (directory / "swaps").mkdir(parents=True, exist_ok=True)
        meeting = directory.with_name(f"{directory.name}.met")
        meeting.unlink(missing_ok=True)
        text = json.dumps({"directory": str(directory)} | arguments)
        program = [warm.python(), "-m", "tests.deepspeed.checkpointing", scenario]
        self.outputs = [directory.with_name(f"{directory.name}.{rank}") for rank in range(count)]
        self.processes = []
        for rank, output in enumerate(self.outputs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": 0}
            place |= {"LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
            with output.open("w") as file:
                process = subprocess.Popen(
                    [*program, str(meeting), text],
                    cwd=ROOT,
                    env=os.environ | environment | SERVED | {k: str(v) for k, v in place.items()},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def said(self, rank: int, word: str) -> list[list[str]]:
        """Return the lines of a rank that begin with a word; a line that is being written is not one yet."""
        text = self.outputs[rank].read_text()
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line[1:] for line in lines if line[:1] == [word]]

    def kill(self) -> None:
        """Kill the processes that train; the launcher then ends on its own."""
        for rank in range(len(self.processes)):
            for said in self.said(rank, "loaded"):
                os.kill(int(said[1]), signal.SIGKILL)
        for process in self.processes:
            process.wait(TIMEOUT_SECONDS)


def run(
    count: int, directory: pathlib.Path, environment: Environment, scenario: str, **arguments: Any
) -> list[Any]:
    """Run a scenario to its end, and return the findings of each rank."""
    for _ in range(MAX_MEETINGS):
        ranks = Ranks(count, directory, environment, scenario, **arguments)
        ended = [process.wait(TIMEOUT_SECONDS) for process in ranks.processes]
        output = "".join(each.read_text()[-3000:] for each in ranks.outputs)
        if not any(ended) or NOT_MET not in output:
            break
    assert not any(ended), output
    ((text,),) = [[" ".join(line)] for line in ranks.said(0, "results")]
    found: list[Any] = json.loads(text)
    return found


def losses(found: list[Any]) -> list[list[str]]:
    return [each["losses"] for each in found]


def assert_resumed(found: list[Any], steps: int, tag: str, before: list[Any]) -> None:
    """Compare trainings that went on from a checkpoint with the one that made it."""
    for rank, each in enumerate(found):
        assert each["steps"] == steps
        assert each["client"]
        assert f"/{tag}/" in each["path"]
        assert each["losses"] == before[rank]["losses"][steps:]


@pytest.mark.parametrize(
    ("stage", "ranks", "options"),
    [
        (1, 2, {}),
        (2, 2, {"checkpoint": {"writer": {"type": "fast", "decoupled": True}}}),
        (2, 2, {"checkpoint": {"checkpoint_serialization": False}}),
        (3, 2, {}),
        ("nvme", 1, {"checkpoint": {"writer": {"decoupled": True}}}),
        ("all on nvme", 2, {}),
    ],
    ids=str,
)
def test_training_goes_on_from_checkpoints_to_the_last_bit(
    newest: Environment,
    directory: pathlib.Path,
    stage: int | str,
    ranks: int,
    options: dict[str, Any],
) -> None:
    environment = newest | (SWAPPED if "nvme" in str(stage) else {})
    place, arguments = directory / "c", {"stage": stage} | options
    saves = {"2": None, "3": "other/second"}
    before = run(ranks, place, environment, "train", begin=0, end=5, saves=saves, **arguments)
    assert (place / "latest").read_text() == "other/second"
    assert (place / "other" / "second" / "tensorferry.json").exists()
    older = run(
        ranks, place, environment, "train", begin=2, end=5, load="global_step2", **arguments
    )
    assert_resumed(older, 2, "global_step2", before)
    if stage in (2, "nvme"):
        newer = run(ranks, place, environment, "train", begin=3, end=5, load="latest", **arguments)
        assert_resumed(newer, 3, "second", before)


def test_training_goes_on_with_an_older_deepspeed(
    version: Environment, directory: pathlib.Path
) -> None:
    place = directory / "c"
    before = run(2, place, version, "train", stage=2, begin=0, end=4, saves={"2": None})
    found = run(2, place, version, "train", stage=2, begin=2, end=4, load="latest")
    assert_resumed(found, 2, "global_step2", before)


def test_checkpoints_of_deepspeed_itself_and_ours_are_each_others(
    newest: Environment, directory: pathlib.Path
) -> None:
    variable = "TENSORFERRY_DEEPSPEED_CHECKPOINTS"
    for saving, loading in (("1", "0"), ("0", "1")):
        place = directory / saving
        environment = newest | {variable: saving}
        before = run(2, place, environment, "train", stage=2, begin=0, end=3, saves={"1": None})
        assert (place / "global_step1" / "tensorferry.json").exists() == (saving == "1")
        environment = newest | {variable: loading}
        found = run(2, place, environment, "train", stage=2, begin=1, end=3, load="latest")
        assert_resumed(found, 1, "global_step1", before)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_tools_read_them(
    newest: Environment, directory: pathlib.Path, stage: int
) -> None:
    place = directory / "c"
    before = run(2, place, newest, "train", stage=stage, begin=0, end=3, saves={"1": None})
    tag = place / "global_step1"
    folders = ["--input_folder", str(tag), "--output_folder", str(place / "universal")]
    commands = [
        [str(place / "zero_to_fp32.py"), str(place), str(place / "merged")],
        ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *folders],
    ]
    for command in commands:
        done = subprocess.run(
            [warm.python(), *command],
            env=os.environ | newest | SERVED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == 0, done.stdout[-3000:]
    import torch

    merged = torch.load(place / "merged" / "pytorch_model.bin")
    if stage == 2:
        whole = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        assert merged.keys() == whole.keys()
        assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())
    assert sum(tensor.numel() for tensor in merged.values()) == 132992
    found = run(
        2, place, newest, "train", stage=stage, begin=1, end=3, load="latest", universal=True
    )
    assert losses(found) == [each["losses"][1:] for each in before]


def test_frozen_parameters_are_left_out(newest: Environment, directory: pathlib.Path) -> None:
    place, frozen = directory / "c", {"stage": 2, "frozen": True}
    before = run(
        *(2, place, newest, "train"),
        begin=0,
        end=3,
        saves={"1": None},
        exclude_frozen=True,
        **frozen,
    )
    import torch

    saved = torch.load(place / "global_step1" / "mp_rank_00_model_states.pt", weights_only=False)
    assert "embedding.weight" not in saved["module"]
    found = run(2, place, newest, "train", begin=1, end=3, load="latest", strict=False, **frozen)
    assert_resumed(found, 1, "global_step1", before)


@pytest.mark.parametrize("stage", [2, 3, "nvme"])
def test_what_is_not_whole_is_refused_by_its_name(
    newest: Environment, directory: pathlib.Path, stage: int | str
) -> None:
    environment = newest | (SWAPPED if stage == "nvme" else {})
    [found] = run(1, directory / "c", environment, "refused", stage=stage)
    refused, names = found["refused"], found["names"]
    assert found["latest"] == "whole"
    assert len(names) >= (5 if stage == "nvme" else 2)
    for name in names:
        for what in ("cut", "flipped", "mixed", "missing"):
            text = refused.pop(f"{what} {name}")
            assert text.startswith("CheckpointError: ")
            assert f"/whole/{name}'" in text
        if "optim" in name and stage == 2:
            assert refused.pop(f"without {name}") == "loaded whole"
        if "optim" in name and stage == 3:  # which weights are read from
            assert f"/whole/{name}'" in refused.pop(f"weights of {name}")
            assert f"/whole/{name}'" in refused.pop(f"without {name}")
    assert refused.pop("whole again") == "loaded whole"
    assert refused.pop("no list") == "loaded whole"
    assert refused.pop("no latest") == "loaded None"
    assert "it names the checkpoint '', which does not exist" in refused.pop("empty latest")
    assert "it names the checkpoint 'gone', which does not exist" in refused.pop("wrong latest")
    assert "was not completed" in refused.pop("unfinished")
    assert "tensorferry.json': it is damaged" in refused.pop("damaged list")
    assert refused == {}


def test_a_file_that_is_missing_is_missed_on_all_ranks(
    newest: Environment, directory: pathlib.Path
) -> None:
    for error in run(2, directory / "c", newest, "missing", stage=2):
        assert "the file is missing: the checkpoint is incomplete" in error


@pytest.mark.parametrize(("stage", "kind"), [(2, "optim"), (3, "model"), (3, "optim")])
def test_damage_that_one_rank_finds_is_raised_on_all_ranks(
    newest: Environment, directory: pathlib.Path, stage: int, kind: str
) -> None:
    for error in run(2, directory / "c", newest, "damaged", stage=stage, kind=kind):
        assert f"{kind}_states.pt" in error


@pytest.mark.parametrize(("failing", "decoupled"), [(0, False), (1, False), (1, True)])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_changes_nothing(
    newest: Environment, directory: pathlib.Path, failing: int, decoupled: bool
) -> None:
    how = {"stage": 2, "decoupled": decoupled, "failing": failing}
    found = run(2, directory / "c", newest, "failing", **how)
    for each in found:
        assert each["first"] == "first"
        for name in ("second", "again"):
            file = "zero_pp_rank_1_mp_rank_00_optim" if failing else "mp_rank_00_model"
            assert each[name].startswith(f"{file}_states.pt: File too large")
        assert each["left"] == ["tensorferry.json"]
        assert (each["latest"], each["steps"]) == (["first", "first"], 0)
        assert each["third"] == "second"


@pytest.mark.parametrize("stage", [2, "all on nvme"])
def test_engines_that_have_gone_on_load_as_new_ones(
    newest: Environment, directory: pathlib.Path, stage: int | str
) -> None:
    [found] = run(1, directory / "c", newest | SWAPPED, "live", stage=stage)
    assert len(found) == 5
    assert all(found.values()), found


def test_what_happens_while_decoupled_saves_are_written(
    newest: Environment, directory: pathlib.Path
) -> None:
    for found in run(2, directory / "c", newest, "meanwhile"):
        assert found["latest"] == ["3", "3"]
        assert (found["failed"], found["last"]) == (4, "last")
        assert found["save_checkpoint"] == "NotADirectoryError"
        assert found["own"] is not None  # tags may be each rank's own


def test_a_mixture_of_two_saves_is_refused_where_nobody_had_listed_the_first(
    newest: Environment, directory: pathlib.Path
) -> None:
    run(1, directory / "c", newest, "killed_between")
    ranks = Ranks(1, directory / "c", newest, "train", stage=2, begin=0, end=1, load="last")
    assert ranks.processes[0].wait(TIMEOUT_SECONDS) != 0
    assert "was not completed" in ranks.outputs[0].read_text()


def test_engines_are_replaced_and_put_back(newest: Environment, directory: pathlib.Path) -> None:
    [found] = run(1, directory / "c", newest | MACHINES, "replaced")
    ours, theirs = "TensorferryCheckpointEngine", "TorchCheckpointEngine"
    assert found == {
        "none": ours,
        "python": ours,
        "fast": ours,
        "decoupled": ours,
        "mock": "FastCheckpointEngine",
        "uninstalled": theirs,
        "latest of none": "none",
        "files of none": 2,
        "latest of decoupled": "decoupled",
        "files of decoupled": 2,
        "installed again": ours,
        "listed": True,
    }


def test_a_save_in_the_background_ends_though_its_files_cannot_be_removed(
    newest: Environment,
) -> None:
    program = "tests.deepspeed.programs:background_save_that_cannot_be_discarded"
    assert call(program, environment=newest).result == "ValueError('not saved')"


def test_the_switch_leaves_deepspeeds_engine(newest: Environment) -> None:
    program = "tests.deepspeed.programs:checkpoints_variable"
    assert call(program, environment=newest, given=None).result == [True, "1", None]
    assert call(program, environment=newest, given=False).result == [False, "0", None]
    off = newest | {"TENSORFERRY_DEEPSPEED_CHECKPOINTS": "0"}
    assert call(program, environment=off, given=None).result == [False, "0", "0"]
    assert call(program, environment=off, given=True).result == [True, "1", "0"]
    wrong = newest | {"TENSORFERRY_DEEPSPEED_CHECKPOINTS": "no"}
    assert "'no' is neither 0 nor 1" in call(program, environment=wrong, given=None).result


@pytest.mark.parametrize("decoupled", [False, True])
def test_killed_saves_leave_the_newest_whole_checkpoint(
    newest: Environment, directory: pathlib.Path, decoupled: bool
) -> None:
    """More lives: TENSORFERRY_TEST_EFFORT=20."""
    place, moment = directory / "c", random.Random(str(tensorferry.__version__))
    options = {"stage": 2, "checkpoint": {"writer": {"decoupled": decoupled}}}
    seen: list[dict[str, str]] = [{}, {}]
    saved = begun = 0
    for _ in range(max(2, round(2 * effort.EFFORT))):
        ranks = Ranks(2, place, newest, "until_killed", **options)
        wanted = moment.randint(1, 3)
        while len(ranks.said(0, "saving")) < wanted:
            assert not any(each.poll() for each in ranks.processes), ranks.outputs[0].read_text()
            time.sleep(0.002)
        time.sleep(moment.uniform(0, 0.1))
        ranks.kill()
        for rank in (0, 1):
            [[loaded, _]] = ranks.said(rank, "loaded")
            assert saved <= int(loaded) <= begun
            for number, loss in ranks.said(rank, "loss"):
                assert seen[rank].setdefault(number, loss) == loss
        saved = max([saved, *(int(number) for [number] in ranks.said(0, "saved"))])
        begun = max([begun, *(int(number) for [number] in ranks.said(0, "saving"))])
