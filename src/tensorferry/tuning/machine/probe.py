"""Helpers for probes: functions that return a fact about the machine, or the reason why it is unknown."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Facts = dict[str, Any]


class ProbeError(LookupError):
    """A fact could not be determined. The message has the reason, for the user."""


def unknown(reason: str) -> Facts:
    """Return the representation of a fact that could not be determined, with the reason."""
    return {"unknown": reason}


def is_unknown(fact: Any) -> bool:
    """Return whether a fact could not be determined."""
    return isinstance(fact, dict) and "unknown" in fact


def attempt(probe: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a probe, or unknown() with the reason of its failure."""
    try:
        return probe(*arguments)
    except ProbeError as error:
        return unknown(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return unknown(f"{where}{error.strerror or error}")
    except Exception as error:  # one broken part of the machine must not prevent the report
        return unknown(f"{type(error).__name__}: {error}")


def text(path: Path) -> str:
    """Return the content of a file in /proc or /sys."""
    return path.read_text(errors="replace").strip()


def number(path: Path) -> int:
    """Return the number in a file in /proc or /sys."""
    return int(text(path))


def text_or_none(path: Path) -> str | None:
    """Return the content of a file in /proc or /sys, or None if it cannot be read."""
    try:
        return text(path)
    except OSError:
        return None


def number_or_none(path: Path) -> int | None:
    """Return the number in a file in /proc or /sys, or None if it cannot be read or has no number."""
    try:
        return number(path)
    except (OSError, ValueError):
        return None


def texts(folder: Path, *names: str) -> Facts:
    """Return the contents of files in a folder of /sys by their names, with None for missing files."""
    return {name: text_or_none(folder / name) for name in names}


def fields(path: Path) -> dict[str, str]:
    """Return the values of a file in /proc with lines of the form "name: value"."""
    lines = (line.partition(":") for line in text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def chosen(options: str) -> str:
    """Return the option in brackets, as in "always [madvise] never", or the whole text if there are no brackets."""
    _, bracket, rest = options.partition("[")
    return rest.partition("]")[0] if bracket else options


def output_of(command: Sequence[str], timeout_seconds: float) -> str:
    """Return the standard output of a command.

    Raises
    ------
    ProbeError
        The command is not installed, failed, or exceeded the time limit.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError:
        raise ProbeError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{command[0]} did not answer in {timeout_seconds:g} s") from None
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ProbeError(f"{command[0]} failed: {words[-1] if words else done.returncode}")
    return done.stdout
