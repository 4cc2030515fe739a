"""``tensorferry-ds-nvme-tune``: DeepSpeed's ``ds_nvme_tune`` with tensorferry, with the same options and last lines."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from tensorferry.cli import reporting_missing_packages

with reporting_missing_packages():
    from tensorferry.cli import tune as command
    from tensorferry.cli.app import command_of, run_command
    from tensorferry.cli.consoles import make_console, say
    from tensorferry.cli.exit_codes import FAILED, ExitError, printable
    from tensorferry.cli.options import command_with
    from tensorferry.cli.parsing import repeat_option

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tensorferry.tuning.tune import Result

_NAME = "tensorferry-ds-nvme-tune"
_LOG_NAME = "tune.json"
_THEIR_GB = 1 << 30  # ds_nvme_tune's GB is 2^30 bytes


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, or print which package is missing."""
    given = sys.argv[1:] if arguments is None else arguments
    given = repeat_option(given, "nvme_dir", last=True)
    run_command(command_of(ds_nvme_tune, _NAME, _NAME), _NAME, given, _NAME)


def run_ds_nvme_tune(given: dict[str, Any]) -> None:
    """Find the aio settings for a drive, with ds_nvme_tune's options and tensorferry's search.

    Options can also be written with underscores. `tensorferry tune` has more options.
    """
    job, log_dir = command.make_job(given), given["log_dir"]
    with _exiting_for_log(log_dir):
        log_dir.mkdir(parents=True, exist_ok=True)
    console = make_console()
    for name, is_given in (
        ("loops", given["loops"] > 1),
        ("flush_page_cache", given["flush_page_cache"]),
    ):
        if is_given:
            say(console, f"--{name} has no effect")
    folders = [str(folder) for folder in given["folders"]]
    say(console, printable(f"Running DeepNVMe performance tuning on {folders}"))
    result = command.run(job)
    if given["verbose"]:
        command.print_result(console, result)
    _print_as_theirs(result)
    with _exiting_for_log(log_dir / _LOG_NAME):
        (log_dir / _LOG_NAME).write_text(json.dumps(result.as_json(), indent=1) + "\n")


ds_nvme_tune = command_with("ds_nvme_tune", run_ds_nvme_tune)


@contextlib.contextmanager
def _exiting_for_log(path: Path) -> Iterator[None]:
    """Exit with 1 if the log cannot be written."""
    try:
        yield
    except OSError as problem:
        raise ExitError(FAILED, [f"--log-dir: {path}: {problem.strerror}"]) from None


def _print_as_theirs(result: Result) -> None:
    """Print ds_nvme_tune's last lines. Booleans are JSON booleans here, where ds_nvme_tune prints them as strings."""
    rates = {name: rate["median"] / _THEIR_GB for name, rate in result.rates().items()}
    words = [f"{name} = {rates[name]:5.2f}" for name in ("read", "write") if name in rates]
    print(f"Best performance (GB/sec): {', '.join(words)}")
    print(json.dumps(result.deepspeed(), indent=3))


if __name__ == "__main__":
    main()
