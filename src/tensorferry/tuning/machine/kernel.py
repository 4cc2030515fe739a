"""Facts about the kernel, the processors and the memory, as visible to this process."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from tensorferry.tuning.machine.probe import (
    Facts,
    ProbeError,
    attempt,
    chosen,
    fields,
    number,
    number_or_none,
    text,
)

_SECCOMP_MODES = {0: "none", 1: "strict", 2: "filter"}
_IO_URING_DISABLED = {0: "allowed", 1: "for privileged processes only", 2: "forbidden"}


def system() -> Facts:
    """Return the kernel's version, and the restrictions of asynchronous I/O by the kernel or a container."""
    return {
        "release": platform.release(),
        "architecture": platform.machine(),
        "io_uring_disabled": attempt(_io_uring_disabled),
        "seccomp": attempt(_seccomp),
        "aio_max_nr": attempt(number, Path("/proc/sys/fs/aio-max-nr")),
        "aio_nr": attempt(number, Path("/proc/sys/fs/aio-nr")),
        "container": attempt(_container),
    }


def processors() -> Facts:
    """Return the processors, and the number that this process may use."""
    return {
        "model": attempt(cpu_model),
        "online": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "numa_nodes": attempt(_numa_nodes),
    }


def memory() -> Facts:
    """Return the size of the memory, and the state of huge pages. Sizes are in bytes."""
    return attempt(_memory)  # type: ignore[no-any-return]


def cpu_model() -> str:
    """Return the processors' name."""
    for line in text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def transparent_huge_pages() -> str:
    """Return the mode of transparent huge pages: always, madvise or never."""
    return chosen(text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))


def status_of_process() -> dict[str, str]:
    """Return the fields of /proc/self/status."""
    return fields(Path("/proc/self/status"))


def _io_uring_disabled() -> Facts:
    value = number_or_none(Path("/proc/sys/kernel/io_uring_disabled"))
    if value is None:
        raise ProbeError("the kernel lacks this setting (before 6.6), or /proc/sys is hidden")
    return {"value": value, "meaning": _IO_URING_DISABLED.get(value, "unknown value")}


def _seccomp() -> str:
    status = status_of_process()
    if "Seccomp" not in status:
        return "none"  # the kernel does not support seccomp
    return _SECCOMP_MODES.get(int(status["Seccomp"]), status["Seccomp"])


def _container() -> str | None:
    # These are only indications: a virtual machine that was made from a container image has the same files.
    for sign, runtime in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")):
        if Path(sign).exists():
            return f"{runtime}, judging by {sign}"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes, judging by KUBERNETES_SERVICE_HOST"
    return os.environ.get("container")  # noqa: SIM112  set in lower case by LXC and systemd-nspawn


def _numa_nodes() -> dict[str, str]:
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {node.name.removeprefix("node"): text(node / "cpulist") for node in sorted(nodes)}


def _memory() -> Facts:
    memory = psutil.virtual_memory()
    found = {name: int(value.split()[0]) for name, value in fields(Path("/proc/meminfo")).items()}
    return {
        "nbytes": memory.total,
        "available_nbytes": memory.available,
        "huge_pages": {
            "transparent": attempt(transparent_huge_pages),
            "page_nbytes": found.get("Hugepagesize", 0) << 10,
            "reserved": found.get("HugePages_Total", 0),
            "free": found.get("HugePages_Free", 0),
        },
    }
