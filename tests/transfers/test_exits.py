"""What has begun is complete when the process has ended, in whatever way it ends, short of os._exit and signals."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import commands
from tests.support.child import ROOT
from tests.transfers.exits import KINDS, NBYTES, WAYS

if TYPE_CHECKING:
    import pathlib


@pytest.mark.parametrize(
    ("method", "imported"),
    [("none", "yes"), ("none", "no"), ("fork", "no"), ("forkserver", "no"), ("spawn", "no")],
)
@pytest.mark.parametrize("way", WAYS)
def test_what_has_begun_is_complete_when_the_process_has_ended(
    directory: pathlib.Path, way: str, method: str, imported: str
) -> None:
    # A child of multiprocessing that was forked calls no exit handlers.
    if way == "in a handler" and method in ("fork", "forkserver"):
        pytest.skip("multiprocessing calls no exit handlers in such a child")
    command = [sys.executable, "-m", "tests.transfers.exits", way, method, imported]
    done = commands.run(*command, directory, cwd=ROOT)
    assert done.returncode == (way == "raise" and method == "none"), done.stdout
    assert "tensorferry" not in done.stdout.replace("tests/transfers", ""), done.stdout
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert set(found) == set(KINDS), done.stdout
    assert {kind: data.count(b"\x07") for kind, data in found.items()} == dict.fromkeys(
        KINDS, NBYTES
    )
