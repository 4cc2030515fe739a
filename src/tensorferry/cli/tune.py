"""``tensorferry tune``: find the settings that suit a drive, and have them used."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tensorferry import profiles, runtime
from tensorferry.cli.consoles import make_console, print_json, say
from tensorferry.cli.leaving import LeavingError, printable
from tensorferry.cli.tune_view import LiveView, print_profiles, print_result
from tensorferry.errors import EngineUnavailableError
from tensorferry.sizes import format_nbytes, parse_nbytes
from tensorferry.tuning import gpus, heatmap, storing
from tensorferry.tuning.bench import arguments
from tensorferry.tuning.space import Space, default_space, quick_space, space_from_json
from tensorferry.tuning.tune import SMALLEST_NBYTES, Job, Result
from tensorferry.tuning.tune import tune as run_job

if TYPE_CHECKING:
    from collections.abc import Iterable


def tune(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folders on the drives to tune; several are measured at the same time.",
            show_default=False,
        ),
    ] = None,
    io_size: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Bytes written and read in each folder, such as 400M. Default: what the drive moves in 0.3 s, "
            "at most a quarter of the free space and of the memory.",
            show_default=False,
        ),
    ] = None,
    no_read: Annotated[bool, typer.Option("--no-read", help="Do not look at reading.")] = False,
    no_write: Annotated[bool, typer.Option("--no-write", help="Do not look at writing.")] = False,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Move CUDA tensors: the first folder's is on GPU 0, and so on."),
    ] = False,
    gds: Annotated[
        bool, typer.Option("--gds", help="--gpu, as gds_handle does it (GPUDirect Storage).")
    ] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="Measure all settings in full, rather than drop slow ones."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Try a few settings only: seconds, not minutes."),
    ] = False,
    sweep_config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="JSON with lists of values to try: block_size, queue_depth, io_parallel, single_submit, io_engine.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result with every measurement, and nothing else."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Draw the heat maps here (.png; needs matplotlib).",
            show_default=False,
        ),
    ] = None,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Do not store the settings for use.")
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Show the stored settings (of the folders), and do no more."),
    ] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="Remove the stored settings (of the folders), and do no more."
        ),
    ] = False,
) -> None:
    """Find the settings that reach a drive's full speed, and have them used.

    Tries engines, block sizes, queue depths and numbers of workers by writing and reading a file without a name in each
    folder, and drops slow ones early. What is left is measured against the default settings again. If it is proven to
    be better by 2 %, it is stored for the folder's file system: handles and files that are given no settings use it
    from then on. If not, the defaults stay. Prints the aio section for DeepSpeed.
    """
    console = make_console()
    if show or forget:
        problems = ["--show, --forget: choose one of them"] if show and forget else []
        fail(problems)
        (_show if show else _forget)(console, paths or [])
        return
    folders = absolute(paths or [])
    problems = [] if folders else ["FOLDER: name a folder on the drive to tune"]
    problems += folder_problems("FOLDER", folders)
    nbytes = _checked_nbytes(io_size, problems)
    space = checked_space(sweep_config, quick_space() if quick else default_space(), problems)
    space = space_on_gpus(space, gpu, gds, problems)
    if no_read and no_write:
        problems.append("--no-read, --no-write: nothing is left to measure")
    if full and quick:
        problems.append("--full, --quick: choose one of them")
    if plot is not None:
        problems += _file_problems("--plot", plot) + _plot_problems(plot)
    fail(problems)
    job = Job(
        folders,
        space,
        nbytes,
        read=not no_read,
        write=not no_write,
        full=full,
        gpu=gpu or gds,
        gds=gds,
    )
    result = run(Console(stderr=True) if as_json else console, job, save=not no_save)
    if as_json:
        print_json(result.as_json())
    else:
        print_result(console, result)
    if plot is not None:
        title = f"{', '.join(str(folder) for folder in folders)}, {format_nbytes(result.nbytes)}"
        heatmap.draw(heatmap.grids(result.found.turns), plot, title)
    if result.not_stored:
        fail([f"not stored: {result.not_stored}"], 1)


def absolute(folders: Iterable[str | Path]) -> tuple[Path, ...]:
    """Return where folders are, their links followed; Path.resolve would raise where these lead in a circle."""
    return tuple(Path(os.path.realpath(folder)) for folder in folders)


def fail(problems: list[str], code: int = 2) -> None:
    """Print all problems and leave, if there are any."""
    if problems:
        raise LeavingError(code, problems)


def run(console: Console, job: Job, *, save: bool) -> Result:
    """Tune; what goes wrong with the machine is one clear line and exit code 1, Ctrl-C 130."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with LiveView(console) as view:
            try:
                result = run_job(job, view, save=save)
            except (OSError, MemoryError) as problem:
                fail([_explained(problem, job)], 1)
            except EngineUnavailableError as problem:
                fail([str(problem)], 1)
    for warning in caught:
        typer.echo(printable(f"Note: {warning.message}"), err=True)
    return result


def folder_problems(name: str, folders: tuple[Path, ...]) -> list[str]:
    """Return what is wrong with folders as arguments of this name."""
    return [
        problem for folder in folders for problem in arguments.folder_problems(name, str(folder))
    ]


def checked_space(path: Path | None, default: Space, problems: list[str]) -> Space:
    """Return the space that a JSON file asks for, or add to the problems."""
    if path is None:
        return default
    try:
        return space_from_json(path, default)
    except ValueError as problem:
        problems += [f"--sweep-config: {line}" for line in str(problem).splitlines()]
        return default


def space_on_gpus(space: Space, gpu: bool, gds: bool, problems: list[str]) -> Space:
    """Return the space for memory of GPUs, or add to the problems why that cannot be measured."""
    if not gpu and not gds:
        return space
    if reason := gpus.why_no_gpu():
        problems.append(f"{'--gds' if gds else '--gpu'}: {reason}")
    elif gds and (reason := gpus.why_no_gds()):
        problems.append(f"--gds: {reason}")
    elif gds and gpus.gds_uses_cufile():
        return dataclasses.replace(space, engine=(gpus.CUFILE,))
    return space


def _checked_nbytes(text: str | None, problems: list[str]) -> int | None:
    if text is None:
        return None
    try:
        nbytes = parse_nbytes(text)
    except ValueError as problem:
        problems.append(f"--io-size: {problem}")
        return None
    if nbytes < SMALLEST_NBYTES:
        problems.append(f"--io-size: {text} is less than {format_nbytes(SMALLEST_NBYTES)}")
    return nbytes


def _file_problems(name: str, path: Path) -> list[str]:
    if path.is_dir():
        return [f"{name}: {path} is a folder"]
    if not path.parent.is_dir():
        return [f"{name}: the folder {str(path.parent)!r} does not exist"]
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return [f"{name}: {path} cannot be written"]
    return []


def _plot_problems(path: Path) -> list[str]:
    if importlib.util.find_spec("matplotlib") is None:
        return ["--plot: needs matplotlib; install it with: pip install 'tensorferry[plot]'"]
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        return [f"--plot: {path} ends neither in .png nor in .svg or .pdf"]
    return []


_REMEDIES = {
    errno.ENOSPC: "free some space, or use a smaller --io-size",
    errno.EDQUOT: "the quota is used up; use a smaller --io-size",
    errno.EACCES: "choose a folder that you may write to",
    errno.EROFS: "the file system is mounted read-only",
}
_STORE_REMEDY = "--no-save, or another file in TENSORFERRY_PROFILES"


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
    fail([str(warning.message) for warning in caught], 1)
    if paths:
        kept = [profile for path in paths for profile in kept if profile in _of(path, kept)]
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
        fail([f"{problem.filename or store}: {problem.strerror}"], 1)
    for profile in removed:
        say(console, printable(f"forgotten: {profile.file_system.mount_point}"))
    if not removed:
        say(console, printable(f"no settings are stored in {store}"))


def _store() -> Path:
    path = runtime.profiles_path()
    if path is None:
        fail(["TENSORFERRY_PROFILES=0 switches stored settings off"], 1)
    return Path(str(path))


def _of(path: Path, kept: list[profiles.Profile]) -> list[profiles.Profile]:
    """Return the profile of a path's file system; where the path is gone, those it was mounted at."""
    if not path.exists():
        found = [each for each in kept if Path(each.file_system.mount_point) == path.absolute()]
        missing = (
            f"FOLDER: the folder {str(path)!r} does not exist, and no settings are stored for it"
        )
        fail([] if found else [missing])
        return found
    match = profiles.profile_of(profiles.file_system_of(path), kept)
    return [match] if match else []
