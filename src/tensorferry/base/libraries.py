"""Finding NVIDIA's libraries by name in folders that the dynamic linker does not search, without loading them."""

from __future__ import annotations

import contextlib
import os
import re
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

CUFILE = "libcufile.so.0"


def cufile_folders() -> list[str]:
    """Return the folders outside of the linker's search path that may contain cuFile, in the order to try them.

    They are the folders of `nvidia-*` wheels in all places where this process finds packages, then those of a CUDA
    toolkit.
    """
    packages = [sysconfig.get_path("purelib"), *sys.path]
    if site.ENABLE_USER_SITE:
        packages.append(site.getusersitepackages())
    folders = [found for package in packages for found in Path(package).glob("nvidia/*/lib")]
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for home in (Path(name) for name in (*homes, "/usr/local/cuda") if name):
        folders += [home / "lib64", *home.glob("targets/*/lib")]
    return list(dict.fromkeys(os.fspath(found) for found in folders if found.is_dir()))


def cufile_libraries() -> list[str]:
    """Return the paths of the cuFile libraries that exist, in the order in which the native core tries to load them.

    This function loads none of them, because loading cuFile initializes CUDA and writes a log file into the current
    folder.
    """
    chosen = os.environ.get("TENSORFERRY_LIBCUFILE")
    if chosen:
        return [chosen] if Path(chosen).exists() else []
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    found = [Path(folder, CUFILE) for folder in folders]
    found += map(Path, re.findall(rf"{re.escape(CUFILE)} .* => (\S+)", _linker_cache()))
    found += [Path(folder, CUFILE) for folder in cufile_folders()]
    return list(dict.fromkeys(os.fspath(path) for path in found if path.exists()))


def cufile_refusal() -> str | None:
    """Return the reason why cuFile is not available, or None if a library with cuFile's name exists."""
    if cufile_libraries():
        return None
    if chosen := os.environ.get("TENSORFERRY_LIBCUFILE"):
        return f"TENSORFERRY_LIBCUFILE={chosen!r} does not exist"
    return f"{CUFILE} was not found (remedy: pip install nvidia-cufile)"


def _linker_cache() -> str:
    for command in ("ldconfig", "/sbin/ldconfig"):  # an ordinary user's PATH may lack /sbin
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                [command, "-p"], capture_output=True, text=True, errors="replace", timeout=5
            ).stdout
    return ""
