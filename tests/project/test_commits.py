"""`make lint` looks at the subjects of commits since the last tag."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from tools.commit_subjects import problem_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    "subject",
    ["Add a table of formats", "docs: say what a rank reads", "Speed up small reads", "x" * 72],
)
def test_good_subjects_pass(subject: str) -> None:
    assert problem_of(subject) is None


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("x" * 73, "73 characters"),
        ("Add a table of formats.", "full stop"),
        ("Added a table", "imperative"),
        ("core: fixing small reads", "imperative"),
        ("", "imperative"),
    ],
)
def test_bad_subjects_are_named(subject: str, problem: str) -> None:
    assert problem in str(problem_of(subject))


def test_commits_since_the_last_tag_are_looked_at(tmp_path: pathlib.Path) -> None:
    names = ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL")
    environment = {**os.environ, **dict.fromkeys(names, "a"), "PYTHONPATH": str(ROOT)}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, env=environment, check=True)

    def check() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tools.commit_subjects"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    assert check().returncode == 0  # no repository
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "Added this before the tag.")
    git("tag", "v1")
    git("commit", "--quiet", "--allow-empty", "--message", "Add this")
    assert check().returncode == 0
    git("commit", "--quiet", "--allow-empty", "--message", "Fixed that")
    result = check()
    assert result.returncode == 1
    assert "'Fixed that'" in result.stderr
    assert "before the tag" not in result.stderr
