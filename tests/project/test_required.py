"""Tests are skipped if the machine lacks a component, or fail if it is required."""

from __future__ import annotations

import pytest

from tests.support import required


@pytest.mark.parametrize("look_for", [required.module, required.command])
@pytest.mark.parametrize(
    ("means", "ends"),
    [("", pytest.skip.Exception), ("fuse,tools", pytest.fail.Exception)],
)
def test_a_tool_that_is_missing_is_skipped_or_fails_where_it_is_required(
    means: str, ends: type[Exception], look_for: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(required.VARIABLE, means)
    with pytest.raises(ends, match="no_such_tool"):
        look_for("no_such_tool")  # type: ignore[operator]


def test_a_tool_that_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(required.VARIABLE, "tools")
    assert required.module("pytest") is pytest
    assert required.command("sh").endswith("/sh")
