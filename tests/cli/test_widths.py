"""The output of commands on terminals of several widths and in a pipe: no long lines, no broken or missing words."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import numpy
import pytest

from tensorferry.safetensors.numpy import save_file
from tests.cli.running import run
from tests.support import commands, libraries, required, warm

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")  # which reads checkpoints
required.module("typer")
required.module("rich")

COMMANDS = {
    "report": ("report", "."),
    "bench": ("bench", ".", "--io-size=64K", "--loops=1", "--write"),
    "ls": ("ls", "model.safetensors"),
    "ls --shards": ("ls", "--shards", "model.safetensors"),
    "verify": ("verify", "model.safetensors"),
    "convert": ("convert", "model.safetensors", "converted"),
}


@pytest.fixture
def place(
    directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Path:
    """A folder with a model to look at."""
    names = ("model.layers.0.attention.key", "model.layers.11.perceptron.down", "x")
    save_file({name: numpy.zeros((3, 1000)) for name in names}, directory / "model.safetensors")
    folder = tmp_path_factory.mktemp("home")
    warm.python()  # start the server before the variables below are set
    variables = {"TERM": "xterm", "NO_COLOR": "1"}
    if "convert" not in request.node.name:  # a report waits for torch in a separate process
        variables |= libraries.broken(folder)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return directory


def piped(command: str, place: Path) -> str:
    return run(*COMMANDS[command], cwd=place).stdout


def shown(arguments: tuple[str, ...], place: Path, width: int) -> list[str]:
    """Return the lines that a terminal gets, without its control codes."""
    command = [warm.python(), "-m", "tensorferry", *arguments]
    env = os.environ | {"COLUMNS": str(width)}
    output = commands.on_terminal(command, env=env, cwd=place)
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.decode()))


def words(text: str) -> set[str]:
    """Return the words with a letter in them; numbers are others in each run."""
    found = (re.sub(r"\d[\d.,]*", "0", word) for word in text.split())
    return {word for word in found if re.search(r"[^\W\d_]", word)}


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_shows_whole_words_within_its_width(
    command: str, width: int, place: Path
) -> None:
    before = words(piped(command, place))
    lines = shown(COMMANDS[command], place, width)
    after = words(piped(command, place))
    assert max(map(len, lines)) <= width
    found = words(" ".join(lines))
    # Only paths that are too long for their column may be folded, with the characters around them. The facts of a
    # report about the machine may change between the two runs.
    folded = {word for word in before | after if "/" in word and len(word) > width // 5}
    assert all(any(word in path for path in folded) for word in found - before - after)
    assert (before & after) - found <= folded, "nothing is cut off"


@pytest.mark.parametrize("command", COMMANDS)
def test_lines_in_a_pipe_are_as_long_as_they_are_and_end_with_their_text(
    command: str, place: Path
) -> None:
    name = "layer." * 40
    if command.startswith("ls"):
        save_file({name: numpy.zeros(3)}, place / "model.safetensors")
    output = piped(command, place)
    lines = output.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[0]
    assert lines[-1]
    assert "\x1b" not in output
    assert not command.startswith("ls") or f" {name} " in output


@pytest.mark.parametrize("width", [80, 100, 160])
def test_what_tune_finds_fits_the_terminal(width: int, place: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep").write_text('{"io_engine": ["threads"], "block_size": ["1M"]}')
    sweep = ("--sweep-config", str(tmp_path / "sweep"), "--seconds=1")
    lines = shown(("tune", ".", "--io-size=16M", *sweep), place, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(line.rstrip() for line in lines)
    assert re.search(
        r"^ ?drive +settings +GB/s +min .. max +default +CPU s/GB$", text, re.MULTILINE
    )
    assert "This takes at most" in text
    assert "For DeepSpeed" in text
