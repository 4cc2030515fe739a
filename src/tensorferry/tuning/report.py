"""What a machine can do for a path, why not more, and what helps: the facts of ``tensorferry report``."""

from __future__ import annotations

import dataclasses
import os
import platform
import warnings
from contextlib import ExitStack
from pathlib import Path

import tensorferry
from tensorferry.transfer import profiles
from tensorferry.transfer.defaults import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH
from tensorferry.transfer.runtime import (
    close_scheduler,
    make_scheduler,
    profiles_path,
)
from tensorferry.tuning.advice import advise, known
from tensorferry.tuning.machine import devices, gpus, kernel, limits, storage
from tensorferry.tuning.machine.libraries import TIMEOUT_SECONDS, asking, version
from tensorferry.tuning.machine.probe import Facts, attempt, is_unknown


def report(path: Path) -> Facts:
    """Look at everything that decides how fast files at a path can be moved, and say what would help.

    It takes as long as importing torch and DeepSpeed and starting CUDA, at most about two minutes, and writes one page
    to the path's file system, in a file without a name.

    Parameters
    ----------
    path : Path
        A folder, a file, or a block device.

    Returns
    -------
    Facts
        Ready for JSON. What could not be found out is ``{"unknown": reason}``; ``advice`` is a list, most important
        first, of level, about, finding, meaning and remedy.

    Raises
    ------
    OSError
        There is no such path, or it cannot be reached.
    """
    path = Path(os.path.realpath(path, strict=True))
    with ExitStack() as inquiries:
        asked = {
            name: inquiries.enter_context(asking(name)) for name in ("cuda", "torch", "deepspeed")
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
            "profile": attempt(_profile, path),
            "gpu": gpus.gpus(),
            "gpudirect_storage": gpus.gpudirect_storage(),
            "libraries": {"numpy": attempt(lambda: {"version": version("numpy")})},
        }
        answers = {name: answer(TIMEOUT_SECONDS) for name, answer in asked.items()}
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
    scheduler = make_scheduler(None, DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH, 1, False)
    try:
        return scheduler.engine
    finally:
        close_scheduler(scheduler)


def _profile(path: Path) -> Facts:
    """Return where profiles are kept (None: switched off) and the settings for a path, by what they are for."""
    file = profiles_path()
    found = None
    if file is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is wrong with the file becomes the reason
            known_ones = profiles.load(Path(file))
        found = {
            " ".join(each.use): dataclasses.asdict(each.settings)
            for each in profiles.profiles_of(profiles.file_system_of(path), known_ones)
        }
    return {"file": file, "settings": found or None}
