"""Peers run in processes of their own: a crash of one is a row in the table, not our end.

The benchmark starts ``python -m benchmarks.worker module:Class '{"json": "settings"}'`` and sends
one JSON line for each call, ``{"call": "write", "with": {...}}``; the answer is one JSON line. A
worker lives for a whole comparison, so that imports and the first touch of its memory are paid
before the clock runs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import MeasurementError, Sample, UnavailableError, throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROOT = Path(__file__).resolve().parent.parent
_CALL_SECONDS_MAX = 600.0
# Idle threads of torch's pool spin for a while after each operation, and would count as the next one's
# CPU time. DeepSpeed must not build all its ops when it is imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0", "TENSORFERRY_PROFILES": "0"}


class Worker:
    """The benchmark's side of a worker process."""

    def __init__(self, target: str, **settings: Any) -> None:
        self.target = target
        self.settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._unavailable: str | None = None
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (closed by close())

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Call a method in the worker; start the worker first if there is none."""
        if self._unavailable:
            raise UnavailableError(self._unavailable)
        if self._process is None:
            self._process = self._start()
            self._receive(self._process)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"call": name, "with": arguments}) + "\n")
            self._process.stdin.flush()
        return self._receive(self._process)

    def sample(self, name: str, **arguments: Any) -> Sample:
        """Call a method that answers with a measurement: of a value, or else of throughput."""
        answer = self.call(name, **arguments)
        return Sample(**answer) if "value" in answer else throughput(**answer)

    def close(self) -> None:
        self._stop()
        self._log.close()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", self.target, json.dumps(self.settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=_ROOT,
            env=os.environ | ENVIRONMENT,
        )

    def _receive(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        timer = threading.Timer(_CALL_SECONDS_MAX, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            code = process.wait()
            self._stop()
            raise MeasurementError(f"died: {_exit_name(code)}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            self._stop()
            self._unavailable = answer["unavailable"]
            raise UnavailableError(self._unavailable)
        if "error" in answer:
            raise MeasurementError(answer["error"])
        return answer

    def _stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.readlines() if line.strip()]
        return f" ({lines[-1][:160]})" if lines else ""


@contextlib.contextmanager
def workers() -> Iterator[Callable[..., Worker]]:
    """A function that makes workers, all of which are ended afterwards."""
    made: list[Worker] = []

    def make(target: str, **settings: Any) -> Worker:
        made.append(Worker(target, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for worker in made:
            worker.close()


def _exit_name(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def main() -> None:
    """The worker's side: answer calls until the benchmark closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints must not get between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the benchmark's; it closes the pipe

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    module, _, name = sys.argv[1].partition(":")
    try:
        peer = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    except UnavailableError as reason:
        answer({"unavailable": str(reason)})
        return
    except ImportError as error:
        answer({"unavailable": f"{type(error).__name__}: {error}"})
        return
    answer({})
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer(getattr(peer, message["call"])(**message["with"]) or {})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
