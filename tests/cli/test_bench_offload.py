"""`tensorferry bench --offload`: the estimated time of a step."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from tensorferry.tuning.offload import TRAINING_LAYOUTS, parse_count, predict
from tests.cli.running import bench
from tests.support import required

if TYPE_CHECKING:
    from pathlib import Path

required.module("typer")


def test_a_step_is_predicted_of_what_was_measured_and_nothing_is_left(
    directory: Path,
) -> None:
    arguments = (directory, "--offload=7B", "--io-size=3M", "--loops=2")
    content = json.loads(bench(*arguments, "--json").stdout)
    assert list(directory.iterdir()) == []
    assert content["parameters"] == 7_000_000_000
    measured = content["measured"]
    assert len(measured["io_seconds"]) == len(measured["arithmetic_seconds"]) == 2
    first, *_, last = content["predictions"]
    assert (first["state_nbytes"], last["state_nbytes"]) == (56 * 10**9, 84 * 10**9)
    assert first["moved_nbytes"] == 2 * first["state_nbytes"]
    assert first["io_seconds"] == pytest.approx(112e9 / measured["nbytes_per_second"])
    assert last["moved_nbytes"] == last["io_seconds"] == 0
    assert last["limit"] == "arithmetic"
    printed = bench(*arguments).stdout
    assert "fp32: 56 GB" in printed
    assert "bf16, fp32 masters: 84 GB" in printed


def test_a_whole_training_is_predicted(directory: Path) -> None:
    arguments = (directory, "--offload=7B", "--training", "--io-size=3M", "--loops=1")
    content = json.loads(bench(*arguments, "--json").stdout)
    assert content["training"]
    first, *_, last = content["predictions"]
    assert first["state_nbytes"] == last["state_nbytes"] == 112 * 10**9
    assert (first["moved_nbytes"], first["written_nbytes"]) == (280 * 10**9, 112 * 10**9)
    speed = content["measured"]["nbytes_per_second"]
    assert first["io_seconds"] == pytest.approx(280e9 / speed)
    assert last["moved_nbytes"] == last["written_nbytes"] == last["io_seconds"] == 0
    printed = bench(*arguments).stdout
    assert "fp32: 112 GB" in printed
    assert "step s" not in printed
    assert "own computation is not included" in printed
    assert "training: needs --offload" in bench(directory, "--training", expect=2).stderr


def test_all_that_is_wrong_is_told_before_anything_is_measured() -> None:
    done = bench("--offload=7B", "--io-size=3", "--queue-depth=4", "--plot=x.svg", expect=2)
    options = ["--offload: ", "--queue-depth: ", "--plot: ", "--io-size: "]
    assert re.findall(r"--[a-z-]+: ", done.stderr) == options


def test_numbers_of_parameters_are_read_as_people_write_them() -> None:
    assert parse_count("7B") == parse_count("7e9") == parse_count(" 7000M") == 7 * 10**9
    assert parse_count("1.5b") == 1_500_000_000
    for wrong in ("", "B", "-1", "0", "7BB", "nan", "1e99", "1e400", "0x10"):
        with pytest.raises(ValueError, match="parameters"):
            parse_count(wrong)


def test_a_step_takes_the_longer_of_both_and_what_the_budget_holds_is_not_moved() -> None:
    small, quarter, half, whole = predict(10**9, 2e9, 5e8)[:4]
    assert small.io_seconds == pytest.approx(8)
    assert small.arithmetic_seconds == pytest.approx(2)
    assert (small.step_seconds, small.limit) == (small.io_seconds, "drive")
    assert small.moved_nbytes > quarter.moved_nbytes > half.moved_nbytes > whole.moved_nbytes == 0
    assert (whole.step_seconds, whole.limit) == (whole.arithmetic_seconds, "arithmetic")


def test_a_training_moves_what_the_guide_says_and_less_with_more_memory() -> None:
    found = predict(10**9, 4e9, 5e8, TRAINING_LAYOUTS)
    assert [each.budget_nbytes for each in found[:4]] == [0, 4 * 10**9, 8 * 10**9, 16 * 10**9]
    whole, masters = found[0], found[4]
    assert (whole.moved_nbytes, whole.written_nbytes) == (40 * 10**9, 16 * 10**9)
    assert (masters.moved_nbytes, masters.written_nbytes) == (36 * 10**9, 16 * 10**9)
    assert whole.io_seconds == pytest.approx(10)
    for name in ("moved_nbytes", "written_nbytes", "io_seconds"):
        for first in (0, 4):
            values = [getattr(each, name) for each in found[first : first + 4]]
            assert values == sorted(set(values), reverse=True)
            assert values[-1] == 0
