"""Check the subjects of commits since the last tag: imperative, at most 72 characters, no full stop.

Run it with `python -m tools.commit_subjects`. In a repository without a tag, it checks the commits since this file was
added. In a source archive, which has no commits, it succeeds.
"""

from __future__ import annotations

import subprocess
import sys

MAX_LENGTH = 72
# A first word with one of these endings is not an imperative ("Added", "Fixing"), unless it is one of the verbs below.
_NOT_IMPERATIVE = ("ed", "ing")
_IMPERATIVE = {
    "bring",
    "embed",
    "exceed",
    "feed",
    "need",
    "proceed",
    "seed",
    "shed",
    "speed",
    "string",
}


def git(*arguments: str) -> str:
    """Return the output of a git command, or "" if the command fails."""
    result = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=False, encoding="utf-8"
    )
    return result.stdout.strip() if result.returncode == 0 else ""


def problem_of(subject: str) -> str | None:
    """Return the problem of a commit's subject, or None if it has none."""
    if len(subject) > MAX_LENGTH:
        return f"it has {len(subject)} characters, more than {MAX_LENGTH}"
    if subject.endswith("."):
        return "it ends with a full stop"
    area, colon, rest = subject.partition(": ")
    words = (rest if colon and " " not in area else subject).split()
    first = words[0].lower() if words else ""
    if not first or (first.endswith(_NOT_IMPERATIVE) and first not in _IMPERATIVE):
        return "it does not begin with a verb in the imperative"
    return None


def main() -> int:
    """Print the subjects that have a problem. Return the exit status: 1 if there are any, otherwise 0."""
    since = git("describe", "--tags", "--abbrev=0")
    if not since:
        added = git("log", "--diff-filter=A", "--format=%H", "--", "tools/commit_subjects.py")
        since = added.splitlines()[-1] if added else "HEAD"
    bad = 0
    for line in git("log", "--no-merges", "--format=%h %s", f"{since}..HEAD").splitlines():
        commit, _, subject = line.partition(" ")
        if (problem := problem_of(subject)) is not None:
            print(f"{commit}: {problem}: {subject!r}", file=sys.stderr)
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
