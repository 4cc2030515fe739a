"""``tensorferry tune``: finds faster settings for a drive, and prints them in each form in which they can be used."""

from __future__ import annotations

import errno
import json
import warnings
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.consoles import make_console, make_table, print_json, progress_bar, say, show
from tensorferry.cli.exit_codes import FAILED, UNUSABLE, ExitError, printable, say_problems
from tensorferry.cli.options import command_with
from tensorferry.errors import EngineUnavailableError
from tensorferry.tuning import gpus
from tensorferry.tuning import tune as tuning
from tensorferry.tuning.candidates import available_engines, candidates_of_json, default_settings

if TYPE_CHECKING:
    from rich.console import Console

    from tensorferry.transfer.settings import Settings
    from tensorferry.tuning.tune import Finding, Job, Result

_GB = 1e9
_REMEDIES = {
    errno.ENOSPC: "free some space, or use a smaller --io-size",
    errno.EDQUOT: "the quota is exhausted; use a smaller --io-size",
    errno.EACCES: "choose a writable folder",
    errno.EROFS: "the file system is mounted read-only",
}


def run_tune(given: dict[str, Any]) -> None:
    """Find settings that are faster than the default on a drive.

    Tries about a dozen combinations of engine, block size, queue depth and number of workers, by writing and reading an
    unnamed file in each folder, alternately with the default settings. Then the best combination is compared with the
    default again. Prints proven settings, separately for reads and writes, and the settings to use for both: as
    environment variables, as arguments, and as the aio section for DeepSpeed. Changes nothing.
    """
    console = make_console()
    job = make_job(given)
    if not given["json"]:
        seconds = job.folder_seconds * len(job.folders)
        say(console, f"This takes at most {_duration(seconds)} of measurements.")
    result = run(job)
    if given["json"]:
        print_json(result.as_json())
    else:
        print_result(console, result)


tune = command_with("tune", run_tune)


def make_job(given: dict[str, Any]) -> Job:
    """Return the job for the options. Exit with 2 if they are invalid."""
    folders = given["folders"]
    problems = [] if folders else ["FOLDER: name a folder on the drive to tune"]
    excluded = {"write": given["no_write"], "read": given["no_read"]}
    if all(excluded.values()):
        problems.append("--no-read, --no-write: nothing is left to measure")
    candidates: list[Settings] = []
    if given["sweep_config"] is not None:
        try:
            candidates = candidates_of_json(given["sweep_config"], default_settings())
        except ValueError as problem:
            problems.append(f"--sweep-config: {problem}")
    gds = given["use_gds"]
    gpu = given["gpu"] or gds
    if gpu and (reason := gpus.gpu_refusal()):
        problems.append(f"{'--gds' if gds else '--gpu'}: {reason}")
    elif gds and (reason := gpus.gds_refusal()):
        problems.append(f"--gds: {reason}")
    if problems:
        raise ExitError(UNUSABLE, problems)
    return tuning.Job(
        tuple(folder.resolve() for folder in folders),
        tuple(direction for direction in excluded if not excluded[direction]),
        tuple(candidates),
        given["io_size"],
        tuning.QUICK_SECONDS if given["quick"] else given["seconds"],
        tuple(range(gpus.device_count())) if gpu else (None,),
        gds,
        gds and gpus.gds_uses_cufile(),
    )


def run(job: Job) -> Result:
    """Tune, with a progress bar. An error is one line, with exit code 1."""
    try:
        with warnings.catch_warnings(record=True) as caught, progress_bar() as progress:
            warnings.simplefilter("always", RuntimeWarning)
            result = tuning.tune(job, progress)
    except (OSError, MemoryError) as problem:
        raise ExitError(FAILED, [_explain(problem, job)]) from None
    except EngineUnavailableError as problem:
        raise ExitError(FAILED, [problem]) from None
    say_problems("Note", (warning.message for warning in caught))
    return result


def print_result(console: Console, result: Result) -> None:
    """Print the chosen settings and their gain for each drive and direction."""
    table = make_table(["drive", "", "settings"], ("GB/s", "min .. max", "default", "CPU s/GB"))
    for each in result.found:
        rates = [each.rates[name] / _GB for name in ("median", "low", "high")]
        table.add_row(
            Text(printable(str(each.folder))),
            f"{each.direction} {each.memory}",
            describe(each.decision.chosen, each.decision.default),
            f"{rates[0]:.2f}",
            f"{rates[1]:.2f} .. {rates[2]:.2f}",
            f"{each.default_rates['median'] / _GB:.2f}",
            f"{each.rates['cpu_seconds_per_gb']:.3f}",
        )
    show(console, table)
    for each in result.found:
        say(console, printable(conclusion(each)))
    count = sum(len(each["seconds"]) for each in result.measurements)
    say(console, f"{count} measurements in {_duration(result.seconds)}")
    _print_forms(console, result)
    for warning in result.warnings:
        say(console, printable(f"Note: {warning}"))


def _print_forms(console: Console, result: Result) -> None:
    """Print the settings in each form in which a program can get them."""
    settings = result.settings
    if settings == result.default:
        say(
            console,
            "\nNo settings are faster for all that was measured: the defaults are the best choice.",
        )
    else:
        values = {**settings.as_deepspeed(), "engine": settings.engine}
        of_open = [f"{name}={values[name]!r}" for name in ("engine", "block_size", "queue_depth")]
        of_handle = [f"{name}={value!r}" for name, value in values.items()]
        variables = " ".join(f"{name}={value}" for name, value in settings.as_environment().items())
        say(console, "\nFor files and handles that give no settings, in the environment:")
        say(console, variables)
        say(console, "In Python, for one file or handle:")
        say(console, f"tensorferry.open(path, {', '.join(of_open)})")
        say(console, f"tensorferry.aio_handle({', '.join(of_handle)})")
    say(console, "For DeepSpeed's configuration:")
    say(console, json.dumps(result.deepspeed(), indent=2))
    if settings.engine not in (available_engines()[0], gpus.CUFILE):
        say(console, f"with TENSORFERRY_ENGINE={settings.engine} in the environment")


def conclusion(found: Finding) -> str:
    """Return a sentence with the choice and how well it is proven."""
    decision = found.decision
    subject = f"{found.folder}: {found.direction}"
    if decision.nominee is None and decision.speedups:
        return f"{subject}: the default settings: no others were at least 2 % faster"
    if decision.nominee is None or decision.low == decision.gain == 1.0:
        return (
            f"{subject}: the default settings: in the given time the drive allowed too few measurements to prove that "
            "others are faster (remedy: more time, with tensorferry tune --seconds)"
        )
    gain = (
        f"{decision.gain:.2f} times as fast as the default, at least {decision.low:.2f}, in "
        f"{decision.pairs} pairs"
    )
    nominee = describe(decision.nominee, decision.default)
    if decision.chosen == decision.default:
        return f"{subject}: the default settings: {nominee} came closest, {gain}"
    return f"{subject}: {nominee}: {gain}"


def describe(settings: Settings, default: Settings | None = None) -> str:
    """Return settings in words."""
    if settings == default:
        return "default"
    words = f"{settings.engine} {format_nbytes(settings.block_size)} x {settings.queue_depth}"
    if settings.intra_op_parallelism > 1:
        words += f", {settings.intra_op_parallelism} workers"
    return words + (", single submit" if settings.single_submit else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} minutes" if minutes else f"{rest} s"


def _explain(problem: OSError | MemoryError, job: Job) -> str:
    if isinstance(problem, MemoryError):
        return f"{problem or 'out of memory'} (remedy: a smaller --io-size)"
    # The error of a transfer names the unnamed file, as "... (deleted)". The folders are more useful.
    name = str(problem.filename or "(deleted)")
    where = ", ".join(map(str, job.folders)) if name.endswith("(deleted)") else name
    remedy = _REMEDIES.get(problem.errno or 0)
    return f"{where}: {problem.strerror or problem}" + (f" (remedy: {remedy})" if remedy else "")
