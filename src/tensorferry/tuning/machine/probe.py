"""How facts are got: each probe answers, or says why it could not; none takes long."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Facts = dict[str, Any]


class ProbeError(LookupError):
    """A fact could not be found out; the message says why, to people."""


def unknown(reason: str) -> Facts:
    """Return the fact that something could not be found out, and why."""
    return {"unknown": reason}


def is_unknown(fact: Any) -> bool:
    """Return whether a fact could not be found out."""
    return isinstance(fact, dict) and "unknown" in fact


def attempt(probe: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a probe finds, or unknown() with the reason why it could not."""
    try:
        return probe(*arguments)
    except ProbeError as error:
        return unknown(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return unknown(f"{where}{error.strerror or error}")
    except Exception as error:  # a report must come out in whatever state a part of the machine is
        return unknown(f"{type(error).__name__}: {error}")


def text(path: Path) -> str:
    """Return what a file of /proc or /sys says."""
    return path.read_text(errors="replace").strip()


def number(path: Path) -> int:
    """Return the number that a file of /proc or /sys says."""
    return int(text(path))


def text_or_none(path: Path) -> str | None:
    """Return what a file of /proc or /sys says, or None where this kernel or device has no such file."""
    try:
        return text(path)
    except OSError:
        return None


def number_or_none(path: Path) -> int | None:
    """Return the number that a file of /proc or /sys says, or None where there is no such file or number."""
    try:
        return number(path)
    except (OSError, ValueError):
        return None


def texts(folder: Path, *names: str) -> Facts:
    """Return what files of a folder of /sys say, by their names; None for those that are not there."""
    return {name: text_or_none(folder / name) for name in names}


def fields(path: Path) -> dict[str, str]:
    """Return what a file of /proc says in lines of "name: value"."""
    lines = (line.partition(":") for line in text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def chosen(options: str) -> str:
    """Return the option in brackets, as in "always [madvise] never"; the whole text where none is."""
    _, bracket, rest = options.partition("[")
    return rest.partition("]")[0] if bracket else options


def output_of(command: Sequence[str], timeout_seconds: float) -> str:
    """Return what a command prints.

    Raises
    ------
    ProbeError
        It is not installed, failed, or took longer than it may; the message says which.
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
