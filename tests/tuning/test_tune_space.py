"""What a sweep tries."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

import tensorferry
from tensorferry.tuning import space
from tensorferry.tuning.space import Space

if TYPE_CHECKING:
    import pathlib

MIB = 1 << 20


def of(**axes: tuple[object, ...]) -> Space:
    plain = {
        "engine": ("threads",),
        "block_size": (MIB,),
        "queue_depth": (4,),
        "intra_op_parallelism": (1,),
    }
    return Space(**(plain | axes))  # type: ignore[arg-type]


def test_points_are_all_combinations() -> None:
    points = of(block_size=(MIB, 2 * MIB), queue_depth=(4, 8), intra_op_parallelism=(1, 2)).points(
        512 * MIB
    )
    assert len(points) == len(set(points)) == 8


def test_queues_deeper_than_the_file_has_blocks_are_one_point() -> None:
    points = of(block_size=(8 * MIB,), queue_depth=(32, 64, 16, 8)).points(64 * MIB)
    assert [point.queue_depth for point in points] == [8]


def test_what_is_swept_unasked_has_no_queues_deeper_than_drives_need() -> None:
    deep = of(block_size=(MIB // 4, 8 * MIB), queue_depth=(16, 64))
    shallow = dataclasses.replace(deep, deep=False)
    assert len(deep.points(512 * MIB)) == 3
    for point in shallow.points(512 * MIB):
        assert space.in_flight_nbytes(point) <= 512 * MIB // 16
    assert len(shallow.points(512 * MIB)) == 2
    assert shallow.points(MIB, space.default_settings()) == [space.default_settings()]


def test_of_points_that_do_the_same_the_default_settings_stay() -> None:
    default = space.default_settings()
    both = of(engine=(default.engine,), queue_depth=(32, 128))
    assert both.points(2048 * MIB, default) == [default]
    assert [point.queue_depth for point in both.points(2048 * MIB)] == [32]


def test_threads_never_have_more_than_32_in_flight() -> None:
    points = of(queue_depth=(32, 64, 128)).points(512 * MIB)
    assert [point.queue_depth for point in points] == [32]


def test_default_space_has_the_working_engines_and_the_default_settings() -> None:
    working = [name for name, refusal in tensorferry.engines().items() if refusal is None]
    chosen = space.default_space()
    assert list(chosen.engine) == working
    default = space.default_settings()
    assert default in chosen.points(512 * MIB, default)
    assert default in space.quick_space().points(512 * MIB, default)


def test_points_carry_booleans_that_deepspeed_understands() -> None:
    (point,) = of().points(512 * MIB)
    text = json.dumps(point.as_deepspeed())
    assert '"single_submit": false' in text
    assert '"overlap_events": true' in text


def test_sweep_configuration_of_ds_nvme_tune_is_understood(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.json"
    content = {
        "block_size": ["1M", "8M"],
        "queue_depth": [32, 128],
        "sequential_requests": [True, False],
        "single_submit": [False],
        "io_parallel": [1, 2, 4, 8],
    }
    path.write_text(json.dumps(content))
    found = space.space_from_json(path, of())
    assert found == Space(("threads",), (MIB, 8 * MIB), (32, 128), (1, 2, 4, 8), (False,))


def test_all_problems_of_a_sweep_configuration_are_listed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.json"
    content = {
        "block_size": ["1Q"],
        "queue_depth": [0],
        "io_parallel": 4,
        "single_submit": ["false"],
        "io_engine": ["nvme"],
        "blocks": [1],
    }
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as caught:
        space.space_from_json(path, of())
    lines = str(caught.value).splitlines()
    assert len(lines) == len(content)
    for key, line in zip(content, lines, strict=True):
        assert key in line


@pytest.mark.parametrize("text", ["", "[]", "{", '{"queue_depth": []}'])
def test_sweep_configuration_that_is_none_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"sweep\.json"):
        space.space_from_json(path, of())


def test_sweep_configuration_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        space.space_from_json(tmp_path / "missing.json", of())


def test_sweep_of_too_many_points_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(
        json.dumps({"queue_depth": list(range(1, 200)), "io_parallel": list(range(1, 100))})
    )
    with pytest.raises(ValueError, match="combinations"):
        space.space_from_json(path, of())
