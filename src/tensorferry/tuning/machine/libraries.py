"""Facts about libraries: the versions of any, and further facts about torch, DeepSpeed and CUDA.

Loading these three takes seconds, prints output, and may crash the process if a driver is broken. So a child process
loads them, and reports the facts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from tensorferry import _core
from tensorferry.base.libraries import cufile_folders
from tensorferry.tuning.gpus import torch_gpu_refusal
from tensorferry.tuning.machine.probe import Facts, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1

# Loading takes a few seconds. The limit keeps a hanging driver from blocking the report.
TIMEOUT_SECONDS = 60


def version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def asking(library: str) -> Iterator[Callable[[float], Facts]]:
    """Start a child process that collects the facts of "torch", "deepspeed" or "cuda". The child ends with the block.

    Yields
    ------
    function
        Its argument is a time limit in seconds, counted from the start of the child. It returns the facts, or unknown()
        with a reason.
    """
    command = [sys.executable, "-c", f"from {__name__} import answer; answer({library!r})"]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # PYTHONSAFEPATH keeps Python from importing files in the current folder.
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            # With a separate process group, killpg() also ends compilers and other processes that a library starts.
            start_new_session=True,
        )
    except OSError as error:
        refusal = unknown(f"a child process could not be started: {error.strerror}")
        yield lambda _: refusal
        return
    started = time.monotonic()
    with child:  # closes its pipes and waits for it
        try:
            yield lambda seconds: _answer_of(child, started + seconds - time.monotonic())
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


def _answer_of(child: subprocess.Popen[str], timeout_seconds: float) -> Facts:
    try:
        facts, complaints = child.communicate(timeout=max(timeout_seconds, 0.0))
    except subprocess.TimeoutExpired:
        return unknown("it did not answer within the time limit")
    code = child.returncode
    if code < 0:
        return unknown(f"loading it killed the process by {signal.Signals(-code).name}")
    if code > 0 or not facts:  # an import may end the process
        return unknown((complaints.strip().splitlines() or [f"its process ended with {code}"])[-1])
    found: Facts = json.loads(facts)
    return found


def answer(library: str) -> None:
    """Print the facts of a library as JSON, and nothing else. This runs in the child process."""
    # The child must also end if the parent is killed: the parent then cannot end the child.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(1), "w") as out:
        # Libraries may print when they are imported, which must not be mixed with the JSON: stdout becomes stderr.
        os.dup2(2, 1)
        if library == "cuda":
            json.dump(cuda_facts(), out)
        elif importlib.util.find_spec(library) is None:
            json.dump({"version": None}, out)
        else:
            json.dump({"torch": torch_facts, "deepspeed": deepspeed_facts}[library](), out)


def cuda_facts() -> Facts:
    """Open CUDA's driver and cuFile, and return whether tensorferry can use them, or why not.

    The ``mode`` of cuFile is "native" if transfers can bypass host memory, otherwise "compat".
    """
    refusal = _core.cuda_refusal()
    facts: Facts = {"driver": {"usable": refusal is None, "reason": refusal}}
    folders = cufile_folders()
    # cuFile writes a log to the working folder. In this folder no process can create a file, not even as root.
    os.chdir("/proc/self")
    refusal, native, detail = _core.open_cufile(folders)
    facts["cufile"] = {
        "usable": refusal is None,
        "reason": refusal,
        "mode": None if refusal is not None else "native" if native else "compat",
        "detail": detail or None,
    }
    return facts


def torch_facts() -> Facts:
    """Import torch, and return its version and the names of its usable GPUs."""
    import torch

    reason = torch_gpu_refusal()
    count = 0 if reason else torch.cuda.device_count()
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    return {"version": torch.__version__, "gpus": unknown(reason) if reason else names}


def deepspeed_facts() -> Facts:
    """Import DeepSpeed, and return its version, and which library serves its op async_io."""
    installed = importlib.import_module("deepspeed.git_version_info")
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder
    # None: DeepSpeed does not have this op for the machine's accelerator.
    served_by = None if builder.NAME == "deepspeed_not_implemented" else "deepspeed"
    if builder.load.__module__.startswith("tensorferry."):
        served_by = "tensorferry"
    return {"version": installed.version, "served_by": served_by}
