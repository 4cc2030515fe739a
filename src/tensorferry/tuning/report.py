"""The facts of ``tensorferry report``: what a machine supports for a path, what limits it, and advice."""

from __future__ import annotations

import dataclasses
import os
import platform
from contextlib import ExitStack
from pathlib import Path

import tensorferry
from tensorferry.transfer.runtime import close_scheduler, make_scheduler
from tensorferry.transfer.settings import Settings
from tensorferry.tuning.advice import advise, known
from tensorferry.tuning.machine import devices, gpus, kernel, limits, storage
from tensorferry.tuning.machine.libraries import TIMEOUT_SECONDS, asking, version
from tensorferry.tuning.machine.probe import Facts, attempt, is_unknown


def report(path: Path) -> Facts:
    """Collect everything that affects how fast files at a path can be transferred, and derive advice.

    Importing torch and DeepSpeed and starting CUDA take most of the time, at most about two minutes. The call writes
    one page to the path's file system, in a temporary file.

    Parameters
    ----------
    path : Path
        A folder, a file, or a block device.

    Returns
    -------
    Facts
        A dict for JSON. A fact that could not be determined is ``{"unknown": reason}``. ``advice`` is a list, most
        important first, of dicts with level, about, finding, meaning and remedy.

    Raises
    ------
    OSError
        The path does not exist, or cannot be accessed.
    """
    path = Path(os.path.realpath(path, strict=True))
    # The child processes import libraries while this process collects the other facts.
    with ExitStack() as children:
        pending = {
            name: children.enter_context(asking(name)) for name in ("cuda", "torch", "deepspeed")
        }
        system = attempt(storage.file_system, path)
        facts: Facts = {
            "tensorferry": {
                "version": tensorferry.__version__,
                "python": platform.python_version(),
            },
            "path": str(path),
            "engines": _engines(),
            "kernel": kernel.system(),
            "processors": kernel.processors(),
            "memory": kernel.memory(),
            "limits": limits.resources(),
            "control_groups": limits.control_groups(),
            "file_system": system,
            "devices": attempt(devices.behind, known(system, "device_number")),
            "gpu": gpus.gpus(),
            "gpudirect_storage": gpus.gpudirect_storage(),
            "libraries": {"numpy": attempt(lambda: {"version": version("numpy")})},
        }
        answers = {name: answer(TIMEOUT_SECONDS) for name, answer in pending.items()}
    cuda = answers.pop("cuda")
    facts["gpu"]["cuda"] = cuda if is_unknown(cuda) else cuda["driver"]
    facts["gpudirect_storage"]["cufile"] = cuda if is_unknown(cuda) else cuda["cufile"]
    facts["libraries"] |= answers
    return facts | {"advice": [dataclasses.asdict(advice) for advice in advise(facts)]}


def _engines() -> Facts:
    return {
        "chosen": attempt(_chosen_engine),
        "forced": os.environ.get("TENSORFERRY_ENGINE") or None,
        "available": tensorferry.engines(),
    }


def _chosen_engine() -> str:
    scheduler = make_scheduler(Settings.of())
    try:
        return scheduler.engine
    finally:
        close_scheduler(scheduler)
