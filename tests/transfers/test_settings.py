"""Settings of files and handles: the argument, else the environment, else the default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import tensorferry
from tensorferry.transfer import runtime, settings
from tests.support.engines import one_engine

if TYPE_CHECKING:
    import pathlib

NAMES = ("block_size", "queue_depth", "intra_op_parallelism")
DEFAULTS = (1 << 20, 128, 1)
VARIABLES = {name: f"TENSORFERRY_{name.upper()}" for name in NAMES}


def settings_of(handle: tensorferry.aio_handle) -> tuple[int, ...]:
    return tuple(getattr(handle, f"get_{name}")() for name in NAMES)


@one_engine
def test_an_explicit_setting_wins_over_the_environment(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tensorferry.aio_handle(engine=engine) as handle:
        assert settings_of(handle) == DEFAULTS
    for name, text in zip(NAMES, ("64K", "7", "3"), strict=True):
        monkeypatch.setenv(VARIABLES[name], text)
    for given, expected in [
        ({}, (64 << 10, 7, 3)),
        ({"block_size": 1 << 20}, (1 << 20, 7, 3)),  # also if it equals the default
        ({"queue_depth": 128, "intra_op_parallelism": 1}, (64 << 10, 128, 1)),
        ({"num_threads": 2}, (64 << 10, 7, 2)),
    ]:
        with tensorferry.aio_handle(engine=engine, **given) as handle:  # type: ignore[arg-type]
            assert settings_of(handle) == expected


@one_engine
def test_files_and_functions_use_the_environment(
    engine: str, directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[settings.Settings] = []
    start = runtime.start_scheduler
    monkeypatch.setattr(runtime, "_default", None)
    monkeypatch.setattr(
        runtime, "start_scheduler", lambda name, each: made.append(each) or start(name, each)
    )
    monkeypatch.setenv("TENSORFERRY_ENGINE", engine)
    monkeypatch.setenv("TENSORFERRY_BLOCK_SIZE", "128K")
    monkeypatch.setenv("TENSORFERRY_INTRA_OP_PARALLELISM", "2")
    tensorferry.write(directory / "file", b"some bytes")
    with tensorferry.open(directory / "file", queue_depth=5) as file:
        assert file.engine == engine
        assert file.read(bytearray(4)) == b"some"
    assert [(one.block_size, one.queue_depth) for one in made] == [(128 << 10, 128), (128 << 10, 5)]
    assert {one.intra_op_parallelism for one in made} == {2}


@pytest.mark.parametrize("text", ["many", "0", "-1", "1e3", "9T", " "])
@pytest.mark.parametrize("name", NAMES)
def test_a_variable_that_is_wrong_is_refused_by_name(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setattr(runtime, "_default", None)
    monkeypatch.setenv(VARIABLES[name], text)
    calls: list[Any] = [
        tensorferry.aio_handle,
        lambda: tensorferry.write(directory / "file", b"1"),
        lambda: tensorferry.open(directory / "file", "w", queue_depth=None),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"^{VARIABLES[name]}: "):
            call()
    assert not list(directory.iterdir())


def test_settings_are_printed_in_forms_that_give_the_same_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = settings.Settings(4 << 20, 8, False, True, 2, "threads")
    for name, value in chosen.as_environment().items():
        monkeypatch.setenv(name, value)
    assert settings.Settings.of(overlap_events=True)[:-1] == chosen[:-1]
    assert runtime.make_scheduler(settings.Settings.of()).engine == "threads"
    assert settings.Settings.of(**chosen.as_deepspeed(), engine="threads") == chosen
