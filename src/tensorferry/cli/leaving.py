"""How commands end: 0 done, 1 the machine failed, 2 bad arguments, 130 interrupted; never with a traceback."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from tensorferry.tuning.bench.arguments import BadArgumentsError
from tensorferry.tuning.bench.run import BenchError
from tensorferry.tuning.crew import ENDING_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextlib.contextmanager
def leaving_well(command: str) -> Iterator[None]:
    """Turn the ways in which a command can fail into a message on stderr and an exit code.

    Ctrl-C, SIGTERM and SIGHUP all raise KeyboardInterrupt inside, so that everything is cleaned up.
    """
    before = {number: signal.signal(number, _interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    except BadArgumentsError as error:
        lines = [f"  {problem}" for problem in error.problems]
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        _leave("\n".join([f"{command}: {count} with the arguments:", *lines]), 2)
    except (BenchError, OSError) as error:
        _leave(f"{command}: {error}", 1)
    except KeyboardInterrupt:
        _leave(f"{command}: interrupted; its files and processes are gone", 130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    for number in ENDING_SIGNALS:  # once is enough: a second one must not stop the cleaning up
        signal.signal(number, _ignore)
    raise KeyboardInterrupt


def _ignore(_number: int, _frame: FrameType | None) -> None:
    # Not SIG_IGN: Python would complain of signals that have arrived but not reached a handler.
    pass
