"""Runs a command under a seccomp filter that forbids io_uring, Linux AIO, or both, as profiles of containers do.

`python -m tests.support.seccomp --block io_uring --block aio -- command...`

The forbidden system calls fail with EPERM, as with Docker's default profile; `--errno ENOSYS` is Podman's way.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SYSTEM_CALLS = {
    "io_uring": ["io_uring_setup", "io_uring_enter", "io_uring_register"],
    "aio": [
        "io_setup",
        "io_submit",
        "io_getevents",
        "io_pgetevents",
        "io_cancel",
        "io_destroy",
    ],
}


def block(groups: Iterable[str], error_number: int = errno.EPERM) -> None:
    """Forbid the system calls of these groups to this process and all its children."""
    import pyseccomp

    filter_ = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    filter_.set_attr(pyseccomp.Attr.CTL_TSYNC, True)  # also for the threads that already run
    filter_.set_attr(pyseccomp.Attr.CTL_NNP, False)  # set-user-ID helpers go on working
    for group in groups:
        for name in SYSTEM_CALLS[group]:
            filter_.add_rule(pyseccomp.ERRNO(error_number), name)
    try:
        filter_.load()
    except OSError:  # an unprivileged process first has to set PR_SET_NO_NEW_PRIVS: see seccomp(2)
        filter_.set_attr(pyseccomp.Attr.CTL_NNP, True)
        filter_.load()


def main() -> None:
    """Install the filter and become the command."""
    parser = argparse.ArgumentParser(prog="tests.support.seccomp", description=__doc__)
    parser.add_argument("--block", action="append", default=[], choices=sorted(SYSTEM_CALLS))
    parser.add_argument("--errno", default="EPERM", choices=["EPERM", "ENOSYS"])
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    block(options.block, getattr(errno, options.errno))
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    sys.exit(main())
