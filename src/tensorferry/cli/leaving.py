"""How commands end: 0 done, 1 the machine failed, 2 bad arguments, 130 interrupted; never with a traceback.

What went wrong is a line on stderr for each problem, which begins with the command's name.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LeavingError(Exception):
    """Ends a command with an exit code, and a line for each problem."""

    def __init__(self, code: int, problems: Iterable[object] = ()) -> None:
        super().__init__(code)
        self.code = code
        self.problems = [str(problem) for problem in problems]


def open_missing_streams() -> None:
    """Let what was started with stdin, stdout or stderr closed read and write nothing, on the numbers that are free."""
    # In this order: else the next file that is opened would be what others take for stdout.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Names of tensors and files may be in any script, and a terminal's or pipe's encoding may know none of it.
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # what it leads to may have been replaced
                stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def leaving_with(code: int, *kinds: type[Exception], name: str = "") -> Iterator[None]:
    """Make of exceptions of some kinds the end of the command; ``name`` is the argument that they are about."""
    try:
        yield
    except kinds as error:
        raise LeavingError(code, [f"{name}: {error}" if name else error]) from None


@contextlib.contextmanager
def leaving_well(command: str) -> Iterator[None]:
    """Turn the ways in which a command can fail into messages on stderr and an exit code.

    Ctrl-C, SIGTERM and SIGHUP all raise KeyboardInterrupt inside, so that everything is cleaned up. After one of them
    the process ignores all: it is about to end, and a second one must not change how. Those that it was started to
    ignore, as by nohup, stay ignored.
    """
    open_missing_streams()
    heard = [each for each in _ENDING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except LeavingError as leave:
        say_problems(command, leave.problems)
        sys.exit(leave.code)
    except OSError as error:
        leave_for(command, error)
    except KeyboardInterrupt:
        # A handler of ours would not do, as Python ends before its process. What has arrived reaches _ignore first.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
        before = dict.fromkeys(before, signal.SIG_IGN)
        say_problems(command, ["interrupted; its files and processes are gone"])
        sys.exit(INTERRUPTED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_for(command: str, error: OSError) -> NoReturn:
    """End after an error of the system; what has no file's name is of what the command prints."""
    if error.filename is not None:
        say_problems(command, [error])
        sys.exit(FAILED)
    # The interpreter's end must not try again to write what could not be written.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if not isinstance(error, BrokenPipeError):  # who read it has seen enough
        say_problems(command, [f"its output cannot be written: {error.strerror}"])
    sys.exit(FAILED)


def say_problems(command: str, problems: Iterable[object]) -> None:
    """Print a line for each problem, on stderr."""
    for problem in problems:
        print(f"{command}: {printable(str(problem))}", file=sys.stderr)


def printable(text: str) -> str:
    """Return text with what would not be shown, or would move a terminal's cursor, as an escape sequence."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in _ENDING_SIGNALS:  # once is enough: a second one must not stop the cleaning up
        signal.signal(number, _ignore)
    raise KeyboardInterrupt


def _ignore(_number: int, _frame: FrameType | None) -> None:
    # Not SIG_IGN: Python would complain of signals that have arrived but not reached a handler.
    pass
