"""Exit codes and error output of the commands: 0 success, 1 failure, 2 invalid arguments, 130 interrupted.

Each problem is one line on stderr, which begins with the command's name. Commands never print a traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ExitError(Exception):
    """The end of a command with an exit code and a line for each problem."""

    def __init__(self, code: int, problems: Iterable[object] = ()) -> None:
        super().__init__(code)
        self.code = code
        self.problems = [str(problem) for problem in problems]


class _OutputError(Exception):
    """The command's own output cannot be written.

    This is not an OSError. The commands raise OSError for other files, and it must not be reported as an error of the
    output.
    """


class _Output:
    """A wrapper of stdout that raises _OutputError in place of OSError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _output_errors():
            count: int = self._stream.write(text)
            return count

    def flush(self) -> None:
        with _output_errors():
            self._stream.flush()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _OutputError from error


@contextlib.contextmanager
def reporting_output_errors(command: str) -> Iterator[None]:
    """Exit with 1 if stdout cannot be written, in the block or at its end, or if the block raises any other OSError."""
    plain = sys.stdout
    output = _Output(plain)
    sys.stdout = output
    try:
        try:
            yield
        except BaseException:
            try:
                output.flush()
            except _OutputError:
                _discard(plain)  # the exception of the block says more
            raise
        output.flush()
    except _OutputError as error:
        _exit_for_output(command, plain, error.__cause__)
    except OSError as error:
        say_problems(command, [error])
        sys.exit(FAILED)
    finally:
        sys.stdout = plain


def open_missing_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that was closed when the process started."""
    # The order matters: open() returns the lowest free descriptor, so each stream gets its own number. Otherwise the
    # next file that is opened would become descriptor 1, and output would be written into it.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Names of tensors and files may have characters that the encoding of the terminal or pipe lacks.
        if isinstance(stream, io.TextIOWrapper):
            # reconfigure() flushes the stream, which raises OSError if its descriptor is unusable.
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def exiting_with(code: int, *kinds: type[Exception], name: str = "") -> Iterator[None]:
    """Convert exceptions of some types to ExitError. ``name`` is the argument that they refer to."""
    try:
        yield
    except kinds as error:
        raise ExitError(code, [f"{name}: {error}" if name else error]) from None


@contextlib.contextmanager
def reporting_failures(command: str) -> Iterator[None]:
    """Convert all failures of a command to messages on stderr and an exit code.

    Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the block, so ``finally`` blocks clean up. After the first of
    them, the process ignores all three, because a second one would interrupt the cleanup. A signal that was ignored
    when the process started, for example because of nohup, stays ignored.
    """
    open_missing_streams()
    handled = [each for each in _ENDING_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in handled}
    try:
        with reporting_output_errors(command):
            yield
    except ExitError as leave:
        say_problems(command, leave.problems)
        sys.exit(leave.code)
    except KeyboardInterrupt:
        # Python removes its handlers before the process ends, so only SIG_IGN protects the last moments. Before SIG_IGN
        # is set, pthread_sigmask() blocks further signals, and runs _ignore() for those that have already arrived.
        # Otherwise Python might find SIG_IGN in place of the function to run: see _ignore().
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
        before = dict.fromkeys(before, signal.SIG_IGN)
        say_problems(command, ["interrupted; its files were removed and its processes ended"])
        sys.exit(INTERRUPTED)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_for_output(command: str, stdout: Any, error: Any) -> NoReturn:
    """Exit because the command's own output cannot be written."""
    _discard(stdout)
    # BrokenPipeError: the reader closed the pipe on purpose, as head(1) does.
    if not isinstance(error, BrokenPipeError):
        say_problems(command, [f"its output cannot be written: {error.strerror}"])
    sys.exit(FAILED)


def _discard(stdout: Any) -> None:
    """Send what is left in the buffer of stdout to /dev/null: at exit, the interpreter flushes stdout again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout.fileno())
    os.close(nowhere)


def say_problems(command: str, problems: Iterable[object]) -> None:
    """Print one line for each problem on stderr."""
    for problem in problems:
        print(f"{command}: {printable(str(problem))}", file=sys.stderr)


def printable(text: str) -> str:
    """Return text with escapes for characters that are not printable, such as a terminal's control codes."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in _ENDING_SIGNALS:  # a second signal must not interrupt the cleanup
        signal.signal(number, _ignore)
    raise KeyboardInterrupt


def _ignore(_number: int, _frame: FrameType | None) -> None:
    # Not SIG_IGN: if a signal has arrived and its Python handler has not run yet, Python would report an error when it
    # finds SIG_IGN in place of a function.
    pass
