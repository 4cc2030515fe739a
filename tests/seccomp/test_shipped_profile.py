"""The shipped seccomp profile: it allows io_uring, and refuses the calls that containers must not make."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pathlib

from tests.support import child, required

PROFILE = pathlib.Path(__file__).parents[2] / "examples/containers/io_uring.json"
ACTIONS = {"SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"}
CLONE_NEWUSER, SIGCHLD = 0x10000000, 17


def under_the_profile(directory: str) -> dict[str, object]:
    """Load the profile as a container runtime does; return the engines' answers, and the errors of refused calls."""
    import pyseccomp

    profile = json.loads(PROFILE.read_text())
    filter_ = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for rule in profile["syscalls"]:
        arguments = [
            pyseccomp.Arg(each["index"], pyseccomp.MASKED_EQ, each["value"], each["valueTwo"])
            for each in rule.get("args", [])
        ]
        for name in rule["names"]:
            try:
                filter_.add_rule(pyseccomp.ERRNO(rule["errnoRet"]), name, *arguments)
            except (OSError, ValueError, RuntimeError) as error:
                if os.uname().machine == "x86_64" and name in ("mount", "unshare", "clone"):
                    raise AssertionError(
                        name
                    ) from error  # others are of other processors or kernels
    try:
        filter_.load()
    except OSError:
        filter_.set_attr(pyseccomp.Attr.CTL_NNP, True)
        filter_.load()

    import tensorferry

    libc = ctypes.CDLL(None, use_errno=True)

    def refused(call: object, *arguments: object) -> str:
        result = call(*arguments)  # type: ignore[operator]
        return errno.errorcode[ctypes.get_errno()] if result == -1 else "allowed"

    path = pathlib.Path(directory) / "file"
    tensorferry.write(path, bytes(3_000_001))
    tensorferry.read(path, bytearray(3_000_001))
    pid = os.fork()  # by clone(), without namespaces
    if pid == 0:
        os._exit(7)
    return {
        "engines": tensorferry.engines(),
        "child": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
        "unshare": refused(libc.unshare, CLONE_NEWUSER),
        "mount": refused(libc.mount, b"none", directory.encode(), b"tmpfs", 0, None),
        "setns": refused(libc.setns, 0, 0),
        "ptrace": refused(libc.ptrace, 0, 0, None, None),
    }


def test_io_uring_works_under_the_shipped_profile_and_other_things_do_not(
    directory: pathlib.Path,
) -> None:
    required.module("pyseccomp")
    import tensorferry

    found = child.call(f"{__name__}:under_the_profile", directory=directory).result
    assert found["engines"] == tensorferry.engines()
    assert found["child"] == 7
    for name in ("unshare", "mount", "setns", "ptrace"):
        assert found[name] == "EPERM", name


def test_the_profile_says_only_what_runtimes_know() -> None:
    profile = json.loads(PROFILE.read_text())
    assert set(profile) == {"defaultAction", "syscalls"}
    assert profile["defaultAction"] in ACTIONS
    names = [name for rule in profile["syscalls"] for name in rule["names"]]
    assert not {name for name in names if name.startswith(("io_", "futex", "memfd"))}
    for rule in profile["syscalls"]:
        assert rule["action"] in ACTIONS
