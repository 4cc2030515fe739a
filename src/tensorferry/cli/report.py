"""``tensorferry report``: prints what decides the speed and the advice, on one screen."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tensorferry.base.checks import format_nbytes
from tensorferry.cli.consoles import AsJson, counted, make_console, print_json
from tensorferry.cli.exit_codes import UNUSABLE, ExitError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

_STYLE_OF_LEVEL = {"stops": "bold red", "speed": "bold yellow", "hint": "bold cyan"}
_MAX_LINES = 48  # with the command itself and the next prompt, a terminal of 50 lines
_MAX_DEVICES = 6
_MAX_LINES_OF_FACT = 3
_INDENT = 13


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="The folder, file or block device to inspect.", show_default=False
        ),
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Report what decides the speed of files at PATH on this machine, and how to improve it."""
    from tensorferry.tuning.report import report as collect

    try:
        path.stat()
    except OSError as error:
        problem = f"PATH: {(error.strerror or str(error)).lower()}: {str(path)!r}"
        raise ExitError(UNUSABLE, [problem]) from None
    facts = collect(path)
    if as_json:
        print_json(facts)
        return
    console = make_console()
    width = console.width if console.is_terminal else None
    lines: list[tuple[str, str]] = []
    for name, value in _facts(facts):
        lines += _lines("bold", name, value, width, _MAX_LINES_OF_FACT)
    advice = facts["advice"]
    head = "advice, most important first" if advice else "no advice: no improvement was found"
    lines += [("", ""), ("", head)]
    for number, item in enumerate(advice):
        style = _STYLE_OF_LEVEL[item["level"]]
        item_lines = _lines(style, item["level"], item["finding"], width)
        for name in ("meaning", "remedy"):
            item_lines += _lines("", f"  {name}", item[name], width)
        if len(lines) + len(item_lines) >= _MAX_LINES:
            lines.append(("", f"{len(advice) - number} more: --json has all"))
            break
        lines += item_lines
    for style, line in lines:
        text = Text(line)
        text.stylize(style, 0, _INDENT)
        console.print(text, soft_wrap=True)


def _lines(
    style: str, name: str, value: str, width: int | None, most: int | None = None
) -> list[tuple[str, str]]:
    """Return the lines of a row, with the style of its name. On a pipe (without a width), a row is one line."""
    value = printable(value)
    parts = [value]
    if width is not None:
        wrapper = textwrap.TextWrapper(max(20, width - _INDENT), break_on_hyphens=False)
        wrapper.max_lines, wrapper.placeholder = most, " ..."
        parts = wrapper.wrap(value)
    names = [name] + [""] * len(parts)
    return [(style, f"{name:{_INDENT}}{part}") for name, part in zip(names, parts, strict=False)]


def _facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each fact that decides the speed."""
    yield "path", facts["path"]
    versions = {name: found for name, found in facts["versions"].items() if not _gap(found)}
    yield "versions", ", ".join(f"{name} {found or 'none'}" for name, found in versions.items())
    engines = facts["engines"]
    why = "the preferred one of those that work"
    if engines["forced"]:
        why = "demanded by TENSORFERRY_ENGINE"
    elif refused := [name for name, reason in engines["available"].items() if reason]:
        why = f"refused: {', '.join(refused)}"
    yield "engine", _gap(engines["chosen"]) or f"{engines['chosen']} ({why})"
    yield "file system", _file_system(facts["file_system"])
    devices = [facts["devices"]] if _gap(facts["devices"]) else facts["devices"]
    for number, device in enumerate(devices[:_MAX_DEVICES]):
        yield "" if number else "devices", _device(device)
    if len(devices) > _MAX_DEVICES:
        yield "", f"and {counted(len(devices) - _MAX_DEVICES, 'more device')}"
    available, pages = (
        facts["system"][name] for name in ("available_nbytes", "transparent_huge_pages")
    )
    words = _gap(available) or f"{_gib(available)} available"
    yield "memory", f"{words}, transparent huge pages: {_gap(pages) or pages}"
    limits = facts["limits"]
    known = [] if _gap(limits) else limits
    each = [" ".join(f"{key} {value}" for key, value in limit.items()) for limit in known]
    yield "limits", _gap(limits) or ", ".join(each) or "no control group limits I/O"
    yield from _gpu(facts["gpu"], facts["libraries"]["torch"])
    if served_by := facts["libraries"]["deepspeed"].get("served_by"):
        yield "DeepSpeed", f"async_io is served by {served_by}"


def _file_system(system: dict[str, Any]) -> str:
    if reason := _gap(system):
        return reason
    words = [system["type"]]
    if "mount_point" in system:
        words[0] += f" at {system['mount_point']} ({system['source']})"
    if space := system.get("space"):
        words.append(_gap(space) or f"{_gib(space['free_nbytes'])} free")
    direct = system["direct_io"]
    works = "works" if direct.get("works") else "does not work"
    works += " for reads only" if direct.get("writes") is False else ""
    words.append(f"direct I/O: {_gap(direct) or works}")
    return ", ".join(words)


def _device(device: dict[str, Any]) -> str:
    if reason := _gap(device):
        return reason
    words = [f"{device['name']}: {device['kind']}"]
    if device["model"]:
        words[0] += f" {device['model']}"
    if device.get("scheduler"):
        words.append(f"scheduler {device['scheduler']}")
    if device.get("max_sectors_kb"):
        words.append(f"requests up to {format_nbytes(device['max_sectors_kb'] << 10)}")
    words += [f"link {link['link']} of {link['link_max']}" for link in device.get("pcie", [])]
    return ", ".join(words)


def _gpu(gpu: dict[str, Any], torch: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cuda, cufile, cards = gpu["cuda"], gpu["cufile"], torch.get("gpus")
    names = ", ".join(cards) if isinstance(cards, list) else "usable"
    yield "GPU", _gap(cuda) or cuda["reason"] or names
    if cuda.get("usable"):
        words = ", ".join(filter(None, (cufile.get("mode"), cufile.get("detail"))))
        yield "GDS", _gap(cufile) or cufile["reason"] or words


def _gap(fact: Any) -> str:
    """Return why a fact is unknown, or an empty text if it is known."""
    return f"unknown: {fact['unknown']}" if isinstance(fact, dict) and "unknown" in fact else ""


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
