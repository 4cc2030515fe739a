"""``python -m tensorferry.deepspeed script.py ...`` or ``-m module ...``: run a program with DeepSpeed on tensorferry.

Processes that the program starts inherit TENSORFERRY_DEEPSPEED=1 and use tensorferry, too.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import _tensorferry_startup
from tensorferry.deepspeed import VARIABLE

_USAGE = """\
usage: python -m tensorferry.deepspeed script.py [argument ...]
       python -m tensorferry.deepspeed -m module [argument ...]

Run a program with DeepSpeed on tensorferry."""


def main(arguments: list[str]) -> None:
    """Run a script or module like ``python`` does; exceptions of the program are not caught."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return
    as_module = arguments[:1] == ["-m"]
    program = arguments[as_module:]
    if not program or (program[0].startswith("-") and not as_module):
        sys.exit(_refuse(2, _USAGE))
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit(_refuse(1, "DeepSpeed is not installed (remedy: pip install deepspeed)"))
    if not as_module and not Path(program[0]).exists():
        sys.exit(_refuse(2, f"script.py: file not found (got {program[0]!r})"))

    os.environ[VARIABLE] = "1"
    _tensorferry_startup.arm("deepspeed")
    sys.argv = program
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).absolute().parent)
        runpy.run_path(program[0], run_name="__main__")


def _refuse(status: int, message: str) -> int:
    print(message, file=sys.stderr)
    return status


if __name__ == "__main__":
    main(sys.argv[1:])
