"""Calls functions in fresh processes: for what would end this one, or change it for good.

The child is `python -m tests.support.child module:function {"keyword": value}`; what the function
returns comes back as JSON before the child leaves the interpreter, so that the way it leaves can be
tested too.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    result: Any
    returncode: int
    output: str


def call(
    function: str,
    /,
    *,
    timeout_s: float = 60,
    prefix: Sequence[str] = (),
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Ended:
    """Call `module:function` with arguments (JSON) in a new process; fail unless that exits with 0.

    `prefix` is a command that executes another command. Paths are passed as strings.
    """
    reader, writer = os.pipe()
    plain = {k: str(v) if isinstance(v, os.PathLike) else v for k, v in arguments.items()}
    command = [*prefix, python, "-m", "tests.support.child"]
    try:
        ended = subprocess.run(
            [*command, function, json.dumps(plain), str(writer)],
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        os.close(writer)
        writer = -1
        with os.fdopen(reader) as pipe:
            reader = -1
            answer = pipe.read()
    except subprocess.TimeoutExpired as expired:
        output = (expired.output or b"").decode(errors="replace")
        raise AssertionError(f"{function} did not end in {timeout_s} s:\n{output}") from expired
    finally:
        for descriptor in (reader, writer):
            if descriptor >= 0:
                os.close(descriptor)
    assert ended.returncode == 0, f"{function} exited with {ended.returncode}:\n{ended.stdout}"
    assert answer, f"{function} gave no result:\n{ended.stdout}"
    return Ended(json.loads(answer), ended.returncode, ended.stdout)


def main(function: str, arguments: str, writer: str) -> None:
    """Call the function that `call` asked for, and write its result."""
    faulthandler.enable()
    os.set_inheritable(int(writer), False)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    with os.fdopen(int(writer), "w") as pipe:
        json.dump(result, pipe)


if __name__ == "__main__":
    main(*sys.argv[1:4])
