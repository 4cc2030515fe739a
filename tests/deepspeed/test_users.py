"""DeepSpeed's own users of the ops, one by one: its pinned memory, its fast writer, its swap buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import child
from tests.support.warm import call

if TYPE_CHECKING:
    import pathlib

    from tests.deepspeed.conftest import Environment

PROGRAMS = "tests.deepspeed.programs"
SWAPPED = {"found": [True, True], "grads": [True, True], "pinned": True}


@pytest.fixture
def served(newest: Environment) -> Environment:
    return newest | {"TENSORFERRY_DEEPSPEED": "1"}


def test_deepspeeds_pinned_memory_lives_as_long_as_its_tensors(served: Environment) -> None:
    found = call(f"{PROGRAMS}:native_pins", environment=served).result
    assert found == {"known": True, "kept": True, "gone": True, "freed": True}


@pytest.mark.parametrize("double_buffer", [True, False])
def test_torch_save_through_the_fast_file_writer(
    newest: Environment, directory: pathlib.Path, double_buffer: bool
) -> None:
    found = call(
        f"{PROGRAMS}:fast_file_writer",
        environment=newest | {"TENSORFERRY_DEEPSPEED": "1"},
        directory=directory,
        double_buffer=double_buffer,
    ).result
    assert found["same"] == [True, True]
    assert found["step"] == 5
    assert found["storages"]
    assert found["direct_nbytes"] >= 2 << 20


def test_swap_buffers_go_out_and_come_back(served: Environment, directory: pathlib.Path) -> None:
    found = call(f"{PROGRAMS}:swap_buffers", environment=served, directory=directory).result
    assert found == SWAPPED


def test_swap_buffers_work_where_no_memory_can_be_locked(
    served: Environment, directory: pathlib.Path, lock_nothing: list[str]
) -> None:
    ended = child.call(
        f"{PROGRAMS}:swap_buffers", prefix=lock_nothing, environment=served, directory=directory
    )
    assert ended.result == SWAPPED
    assert "RLIMIT_MEMLOCK" in ended.output
