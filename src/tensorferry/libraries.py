"""Where NVIDIA's libraries may be that the linker does not know of: looked for by name, without loading anything."""

from __future__ import annotations

import ctypes.util
import os
import site
import sys
import sysconfig
from pathlib import Path

CUFILE = "libcufile.so.0"


def cufile_folders() -> list[str]:
    """Return the folders beside the linker's that may hold cuFile, in the order in which they should be tried.

    They are those of `nvidia-*` wheels wherever this process finds packages, then those of a CUDA toolkit.
    """
    packages = [sysconfig.get_path("purelib"), *sys.path]
    if site.ENABLE_USER_SITE:
        packages.append(site.getusersitepackages())
    folders = [found for package in packages for found in Path(package).glob("nvidia/*/lib")]
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for home in (Path(name) for name in (*homes, "/usr/local/cuda") if name):
        folders += [home / "lib64", *home.glob("targets/*/lib")]
    return list(dict.fromkeys(os.fspath(found) for found in folders if found.is_dir()))


def cufile_refusal() -> str | None:
    """Return why cuFile cannot be there; None where a library of its name is found.

    Nothing is loaded: that would initialise CUDA, and cuFile writes a log into the current folder.
    """
    chosen = os.environ.get("TENSORFERRY_LIBCUFILE")
    if chosen:
        return None if Path(chosen).exists() else f"TENSORFERRY_LIBCUFILE={chosen!r} does not exist"
    if any(Path(folder, CUFILE).exists() for folder in cufile_folders()):
        return None
    if ctypes.util.find_library("cufile") is not None:
        return None
    return f"{CUFILE} is not found (remedy: pip install nvidia-cufile)"
