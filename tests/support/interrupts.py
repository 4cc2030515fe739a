"""Something that happens between two bytecodes of chosen sources, as signal handlers do, at the nth such moment."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

# After these instructions the interpreter checks for signals.
_LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION", "RESUME"}
_JUMPS = {"JUMP_BACKWARD", "JUMP_ABSOLUTE"}


@functools.cache
def _moments(code: CodeType) -> frozenset[int]:
    """Return the offsets after such instructions, where a trace function can raise in place of the instruction.

    Offsets with other exception handlers are left out: at the end of a ``with``, its __exit__ would not be called.
    """
    handlers: Any = getattr(dis.Bytecode(code), "exception_entries", ())  # none before Python 3.11

    def handler_at(offset: int) -> int | None:
        return next((one.target for one in handlers if one.start <= offset < one.end), None)

    found = set()
    for before, after in itertools.pairwise(dis.get_instructions(code)):
        # The instruction after a jump is reached from another place.
        next_one = before.argval if before.opname in _JUMPS else after.offset
        looks = before.opname in _LOOKS or before.opname in _JUMPS
        if looks and handler_at(before.offset) == handler_at(next_one):
            found.add(next_one)
    return frozenset(found)


def _name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified ones


class At:
    """Within the block ``action`` is called once: at moment ``number`` of code in files under ``path``, or several."""

    def __init__(
        self, number: int, path: str | tuple[str, ...], action: Callable[[], object]
    ) -> None:
        self.count = 0
        self.happened_in: str | None = None
        self._number = number
        self._path = path
        self._action = action

    def __enter__(self) -> At:
        self._before = sys.gettrace()
        # CPython 3.11 crashes if tracing ends in a destructor that the garbage collector calls.
        gc.disable()
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._path):
            return None
        if frame.f_code.co_name == "__del__":  # exceptions do not leave a destructor
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _moments(frame.f_code):
            self.count += 1
            if self.count == self._number:
                self.happened_in = f"{_name(frame.f_code)}, line {frame.f_lineno}"
                sys.settrace(None)
                self._action()
        return self._traced
