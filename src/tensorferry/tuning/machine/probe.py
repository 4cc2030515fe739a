"""Helpers for probes: functions that return a fact about the machine, or the reason why it is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
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


def text_or_none(path: Path) -> str | None:
    """Return the content of a file in /proc or /sys, or None if it cannot be read."""
    try:
        return text(path)
    except OSError:
        return None


def number_or_none(path: Path) -> int | None:
    """Return the number in a file in /proc or /sys, or None if it cannot be read or has no number."""
    try:
        return int(text(path))
    except (OSError, ValueError):
        return None


def fields(path: Path) -> dict[str, str]:
    """Return the values of a file in /proc with lines of the form "name: value"."""
    lines = (line.partition(":") for line in text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def chosen(options: str) -> str:
    """Return the option in brackets, as in "always [madvise] never", or the whole text if there are no brackets."""
    _, bracket, rest = options.partition("[")
    return rest.partition("]")[0] if bracket else options
