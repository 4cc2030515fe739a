"""``tensorferry-ds-nvme-tune``: DeepSpeed's ``ds_nvme_tune``, its options and its last lines, on tensorferry.

It sweeps what theirs does unless told otherwise, one engine only, but drops slow settings early and stores the result.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tensorferry.cli.leaving import FAILED, LeavingError, Parser, leaving_well, printable
from tensorferry.cli.tune_options import THEIRS, make_job
from tensorferry.tuning.space import deepspeed_space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorferry.tuning.tune import Result

_LOG_NAME = "tune.json"
_THEIR_GB = 1 << 30


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, or say what it needs."""
    given = vars(_parser().parse_args(arguments))
    try:
        from tensorferry.cli import tune as command
        from tensorferry.cli.consoles import make_console, say
        from tensorferry.cli.tune_view import print_result
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"this needs {missing.name}; install it with: pip install 'tensorferry[cli]'")
    with leaving_well("tensorferry-ds-nvme-tune"):
        job = make_job(THEIRS, given, deepspeed_space(), [])
        logs = Path(given["log_dir"])
        with _writing(logs):
            logs.mkdir(parents=True, exist_ok=True)
        console = make_console()
        if given["verbose"]:
            say(console, printable(f"args = {given}"))
        if given["flush_page_cache"]:
            say(console, "--flush_page_cache: not needed, reads do not come from the page cache")
        say(console, printable(f"Running DeepNVMe performance tuning on {given['nvme_dir']}"))
        result = command.run(console, job, save=not given["no_save"])
        if given["verbose"]:
            print_result(console, result)
        _print_as_theirs(result)
        with _writing(logs / _LOG_NAME):
            (logs / _LOG_NAME).write_text(json.dumps(result.as_json(), indent=1) + "\n")
        command.leave_if_not_stored(result)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """End with 1 where a log cannot be written."""
    try:
        yield
    except OSError as problem:
        raise LeavingError(FAILED, [f"--log_dir: {path}: {problem.strerror}"]) from None


def _print_as_theirs(result: Result) -> None:
    """Print what ds_nvme_tune ends with; its booleans are real ones here, not texts that are all true."""
    rates = {name: rate["median"] / _THEIR_GB for name, rate in result.rates().items()}
    words = [f"{name} = {rates[name]:5.2f}" for name in ("read", "write") if name in rates]
    print(f"Best performance (GB/sec): {', '.join(words)}")
    print(json.dumps(result.deepspeed(), indent=3))


def _parser() -> Parser:
    parser = Parser(
        prog="tensorferry-ds-nvme-tune",
        description="Find the aio settings for a drive: ds_nvme_tune's options, tensorferry's search.",
    )
    for option in THEIRS:
        parser.take(option, option.default, required=option.name == "nvme_dir")
    return parser


if __name__ == "__main__":
    main()
