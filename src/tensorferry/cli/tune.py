"""``tensorferry tune``: find the settings that suit a drive, and have them used."""

from __future__ import annotations

import errno
import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.consoles import make_console, print_json, say
from tensorferry.cli.leaving import FAILED, UNUSABLE, LeavingError, printable, say_problems
from tensorferry.cli.options import taking
from tensorferry.cli.tune_options import OPTIONS, make_job
from tensorferry.cli.tune_view import LiveView, print_profiles, print_result
from tensorferry.errors import EngineUnavailableError
from tensorferry.transfer import profiles, runtime
from tensorferry.tuning import heatmap, storing
from tensorferry.tuning.space import default_space, quick_space
from tensorferry.tuning.tune import Job, Result
from tensorferry.tuning.tune import tune as run_job

_REMEDIES = {
    errno.ENOSPC: "free some space, or use a smaller --io-size",
    errno.EDQUOT: "the quota is used up; use a smaller --io-size",
    errno.EACCES: "choose a folder that you may write to",
    errno.EROFS: "the file system is mounted read-only",
}
_STORE_REMEDY = "--no-save, or another file in TENSORFERRY_PROFILES"


@taking(*OPTIONS)
def tune(
    *,
    folders: list[str],
    full: bool,
    quick: bool,
    json: bool,
    plot: str | None,
    no_save: bool,
    show: bool,
    forget: bool,
    **given: Any,
) -> None:
    """Find the settings that reach a drive's full speed, and have them used.

    Tries engines, block sizes, queue depths and numbers of workers by writing and reading a file without a name in each
    folder, and drops slow ones early. What is left is measured against the default settings again. If it is proven to
    be better by 2 %, it is stored for the folder's file system: handles and files that are given no settings use it
    from then on. If not, the defaults stay. Prints the aio section for DeepSpeed.
    """
    console = make_console()
    if show and forget:
        raise LeavingError(UNUSABLE, ["--show, --forget: choose one of them"])
    if show or forget:
        (_show if show else _forget)(console, [Path(folder) for folder in folders])
        return
    problems = ["--full, --quick: choose one of them"] if full and quick else []
    picture = None if plot is None else Path(plot)
    problems += [] if picture is None else _plot_problems(picture)
    space = quick_space() if quick else default_space()
    job = make_job(OPTIONS, given | {"folders": folders, "full": full}, space, problems)
    result = run(Console(stderr=True) if json else console, job, save=not no_save)
    if json:
        print_json(result.as_json())
    else:
        print_result(console, result)
    if picture is not None:
        title = f"{', '.join(map(str, job.folders))}, {format_nbytes(result.nbytes)}"
        heatmap.draw(heatmap.grids(result.found.turns), picture, title)
    leave_if_not_stored(result)


def run(console: Console, job: Job, *, save: bool) -> Result:
    """Tune; what goes wrong with the machine is one clear line and exit code 1, Ctrl-C 130."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with LiveView(console) as view:
            try:
                result = run_job(job, view, save=save)
            except (OSError, MemoryError) as problem:
                _fail(_explained(problem, job))
            except EngineUnavailableError as problem:
                _fail(problem)
    say_problems("Note", (warning.message for warning in caught))
    return result


def leave_if_not_stored(result: Result) -> None:
    """End with 1 where what was found should have been stored and could not be."""
    if result.not_stored:
        _fail(f"not stored: {result.not_stored}")


def _fail(problem: object) -> NoReturn:
    raise LeavingError(FAILED, [problem])


def _plot_problems(path: Path) -> list[str]:
    if path.is_dir():
        return [f"--plot: {path} is a folder"]
    if not path.parent.is_dir():
        return [f"--plot: the folder {str(path.parent)!r} does not exist"]
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return [f"--plot: {path} cannot be written"]
    if importlib.util.find_spec("matplotlib") is None:
        return ["--plot: needs matplotlib; install it with: pip install 'tensorferry[plot]'"]
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        return [f"--plot: {path} ends neither in .png nor in .svg or .pdf"]
    return []


def _explained(problem: OSError | MemoryError, job: Job) -> str:
    if isinstance(problem, MemoryError):
        return f"{problem or 'no memory'} (remedy: a smaller --io-size)"
    # A transfer names the file, which has no name.
    name = str(problem.filename or "(deleted)")
    where = ", ".join(map(str, job.folders)) if name.endswith("(deleted)") else name
    of_store = name == runtime.profiles_path()
    remedy = _STORE_REMEDY if of_store else _REMEDIES.get(problem.errno or 0)
    return f"{where}: {problem.strerror or problem}" + (f" (remedy: {remedy})" if remedy else "")


def _show(console: Console, paths: list[Path]) -> None:
    store = _store()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        kept = profiles.load(store)
    if caught:
        raise LeavingError(FAILED, [warning.message for warning in caught])
    if paths:
        kept = [profile for path in paths for profile in _of(path, kept)]
    if kept:
        print_profiles(console, kept, str(store))
    else:
        say(console, printable(f"no settings are stored in {store}"))


def _forget(console: Console, paths: list[Path]) -> None:
    store = _store()
    try:
        if not paths:
            removed = storing.forget(store)
        else:
            kept = profiles.load(store)
            chosen = [profile for path in paths for profile in _of(path, kept)]
            removed = [gone for each in chosen for gone in storing.forget(store, each.file_system)]
    except OSError as problem:
        _fail(f"{problem.filename or store}: {problem.strerror}")
    for profile in removed:
        say(console, printable(f"forgotten: {profile.file_system.mount_point}"))
    if not removed:
        say(console, printable(f"no settings are stored in {store}"))


def _store() -> Path:
    path = runtime.profiles_path()
    if path is None:
        _fail("TENSORFERRY_PROFILES=0 switches stored settings off")
    return Path(str(path))


def _of(path: Path, kept: list[profiles.Profile]) -> list[profiles.Profile]:
    """Return the profile of a path's file system; where the path is gone, those it was mounted at."""
    if path.exists():
        match = profiles.profile_of(profiles.file_system_of(path), kept)
        return [match] if match else []
    found = [each for each in kept if Path(each.file_system.mount_point) == path.absolute()]
    if not found:
        missing = f"the folder {str(path)!r} does not exist, and no settings are stored for it"
        raise LeavingError(UNUSABLE, [f"FOLDER: {missing}"])
    return found
