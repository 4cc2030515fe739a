"""torch, DeepSpeed, CUDA and others: their versions, and what they say of themselves in a process of their own.

Loading them takes seconds, prints, and may end the process where a driver is broken; so a child does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry import _core
from tensorferry.base.libraries import cufile_folders
from tensorferry.tuning.gpus import why_torch_has_none
from tensorferry.tuning.machine.probe import Facts, ProbeError, attempt, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1

# Loading takes a few seconds; a driver that hangs must not hang who asks.
TIMEOUT_SECONDS = 60


def version(name: str) -> str | None:
    """Return the version of an installed distribution, or None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def asking(library: str) -> Iterator[Callable[[float], Facts]]:
    """Ask "torch", "deepspeed" or "cuda" in a child process, which ends with the block at the latest.

    Yields
    ------
    function
        Takes the seconds that the child may take from its start on, and returns the answer, or unknown() with the
        reason why there is none.
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
            # Python files in the user's folder are not what is asked about.
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            start_new_session=True,  # so that compilers and others which a library starts end with it
        )
    except OSError as error:
        refusal = unknown(f"no process could be started: {error.strerror}")
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
        return unknown("it takes too long to answer")
    code = child.returncode
    if code < 0:
        return unknown(f"loading it ends the process by {signal.Signals(-code).name}")
    if code > 0:
        return unknown((complaints.strip().splitlines() or [f"its process ended with {code}"])[-1])
    found: Facts = json.loads(facts)
    return found


def answer(library: str) -> None:
    """Print what a library says of itself, as JSON, and nothing else. This runs in the child."""
    # A parent that is killed cannot kill its child.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries print as they are imported
        if library == "cuda":
            json.dump(cuda_facts(), out)
        elif importlib.util.find_spec(library) is None:
            json.dump({"version": None}, out)
        else:
            json.dump({"torch": torch_facts, "deepspeed": deepspeed_facts}[library](), out)


def cuda_facts() -> Facts:
    """Open CUDA's driver and cuFile, and return whether tensorferry can use them, else the reason.

    cuFile's ``mode`` is "native" where transfers can bypass host memory, else "compat".
    """
    refusal = _core.cuda_refusal()
    facts: Facts = {"driver": {"usable": refusal is None, "reason": refusal}}
    folders = cufile_folders()
    os.chdir("/proc/self")  # cuFile writes its log into the working folder, here not even root can
    refusal, native, detail = _core.open_cufile(folders)
    facts["cufile"] = {
        "usable": refusal is None,
        "reason": refusal,
        "mode": None if refusal is not None else "native" if native else "compat",
        "detail": detail or None,
    }
    return facts


def torch_facts() -> Facts:
    """Import torch and return its version, what it was built for and the GPUs that it can use."""
    import torch

    cuda = torch.cuda
    reason = why_torch_has_none()
    cards = [] if reason else map(cuda.get_device_properties, range(cuda.device_count()))
    gpus = [{"name": card.name, "memory_nbytes": card.total_memory} for card in cards]
    versions = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    return {"version": torch.__version__, **versions, "gpus": unknown(reason) if reason else gpus}


def deepspeed_facts() -> Facts:
    """Import DeepSpeed and return, for each of its I/O ops, who serves it and whether it can be used.

    An op's ``reason`` is why it cannot; None where it can.
    """
    installed = importlib.import_module("deepspeed.git_version_info")
    builders = importlib.import_module("deepspeed.ops.op_builder")
    names = {"async_io": "AsyncIOBuilder", "gds": "GDSBuilder"}
    return {
        "version": installed.version,
        "ops": {
            op: attempt(_op, getattr(builders, name), installed.installed_ops.get(op, False))
            for op, name in names.items()
        },
    }


def _op(builder_type: Any, built: bool) -> Facts:
    builder = builder_type()
    served = builder_type.load.__module__.startswith("tensorferry.")
    if not served and builder.NAME == "deepspeed_not_implemented":
        raise ProbeError("DeepSpeed has no such op for this machine's accelerator")
    reasons: list[str] = []
    builder.warning = reasons.append  # the first says what is missing, the others what might help
    compatible = bool(builder.is_compatible(verbose=True))
    if compatible and not built and not served:
        reasons = _missing_tools()
    elif not compatible and not reasons:
        reasons = ["DeepSpeed does not say why"]
    return {
        "built": built,
        "compatible": compatible,
        "reason": reasons[0] if reasons else None,
        "served_by": "tensorferry" if served else "deepspeed",
    }


def _missing_tools() -> list[str]:
    # ninja may come as a Python package, beside an interpreter that is not on PATH.
    path = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
    tools = (os.environ.get("CXX", "c++"), "ninja")
    return [f"{tool} is not installed" for tool in tools if shutil.which(tool, path=path) is None]
