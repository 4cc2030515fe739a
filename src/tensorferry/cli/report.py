"""``tensorferry report``: prints what ``tuning.report`` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensorferry.cli.leaving import leaving_well
from tensorferry.tuning.bench.arguments import BadArgumentsError
from tensorferry.tuning.machine.devices import flat
from tensorferry.tuning.machine.probe import Facts, is_unknown, unknown
from tensorferry.tuning.report import report as collect

if TYPE_CHECKING:
    from collections.abc import Iterator

_GIB = 1 << 30
_STYLE_OF_LEVEL = {"stops": "bold red", "speed": "bold yellow", "hint": "bold cyan"}

_NO_LIMIT_KB = (1 << 31) - 1  # what a driver without a limit says
_MISSING = "none"  # how to begin where the reason says what is not there

Rows = list[tuple[str, str]]


def report(
    path: Annotated[
        Path, typer.Argument(help="Folder, file or block device to look at.", show_default=True)
    ] = Path(),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything that was found as JSON.")
    ] = False,
) -> None:
    """Say what this machine can do for files at PATH, why not more, and what would help."""
    with leaving_well("report"):
        try:
            facts = collect(path)
        except OSError as error:
            raise BadArgumentsError([f"PATH: {str(path)!r}: {error.strerror}"]) from None
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    console = Console(highlight=False)
    for title, rows in _sections(facts):
        console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
        _print_rows(console, rows)
        console.print()
    _print_advice(console, facts["advice"])


def _print_rows(console: Console, rows: Rows) -> None:
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(f"  {escape(name)}", escape(value))
        console.print(table)
        return
    # Elsewhere lines are as long as they need to be: they are searched and mailed.
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"  {name:{width}}  {value}", markup=False, soft_wrap=True)


def _print_advice(console: Console, advice: list[Facts]) -> None:
    if not advice:
        console.print("[bold]Advice[/bold]\n  None: nothing was found that would help.")
        return
    console.print("[bold]Advice[/bold], most important first")
    for number, item in enumerate(advice, 1):
        style = _STYLE_OF_LEVEL[item["level"]]
        console.print(
            f"  {number}. [{style}]{item['level']}[/{style}]  {escape(item['finding'])}",
            soft_wrap=True,
        )
        for name in ("meaning", "remedy"):
            console.print(f"     {name + ':':9}{escape(item[name])}", soft_wrap=True)


def _sections(facts: Facts) -> Iterator[tuple[str, Rows]]:
    about = facts["tensorferry"]
    title = f"tensorferry {about['version']}, Python {about['python']}, {facts['path']}"
    yield title, _engines(facts["engines"])
    yield "System", _system(facts)
    yield "Limits", _limits(facts)
    yield "File system", _file_system(facts["file_system"])
    yield "Devices", _devices(facts["devices"])
    yield "Profile", _profile(facts["profile"])
    yield "GPU", _gpu(facts)
    yield "Libraries", _libraries(facts["libraries"])


def _said(fact: Any, text: str | None = None, otherwise: str = "unknown") -> str:
    """Return a fact as text, or why it is unknown; ``text`` is how it is said where it is known."""
    if is_unknown(fact):
        return f"{otherwise}: {fact['unknown']}"
    if text is not None:
        return text
    return "none" if fact is None else str(fact)


def _engines(engines: Facts) -> Rows:
    rows = []
    for name, refusal in engines["available"].items():
        chosen = "works, chosen" if name == engines["chosen"] else "works"
        rows.append((name, f"refused: {refusal}" if refusal else chosen))
    if is_unknown(engines["chosen"]):
        rows.append(("chosen", _said(engines["chosen"])))
    if engines["forced"]:
        rows.append(("TENSORFERRY_ENGINE", engines["forced"]))
    return rows


def _system(facts: Facts) -> Rows:
    kernel, processors, memory = facts["kernel"], facts["processors"], facts["memory"]
    io_uring = kernel["io_uring_disabled"]
    rows = [
        ("kernel", f"Linux {kernel['release']} ({kernel['architecture']})"),
        (
            "io_uring_disabled",
            _said(io_uring)
            if is_unknown(io_uring)
            else f"{io_uring['value']} ({io_uring['meaning']})",
        ),
        ("seccomp", _said(kernel["seccomp"])),
        ("fs.aio-max-nr", f"{_said(kernel['aio_max_nr'])}, in use {_said(kernel['aio_nr'])}"),
        ("container", _said(kernel["container"])),
        (
            "processors",
            f"{processors['usable']} of {processors['online']} usable, {_said(processors['model'])}",
        ),
        (
            "NUMA nodes",
            _said(
                processors["numa_nodes"],
                ", ".join(f"{node}: {cpus}" for node, cpus in processors["numa_nodes"].items()),
            ),
        ),
    ]
    if is_unknown(memory):
        return [*rows, ("memory", _said(memory))]
    pages = memory["huge_pages"]
    return [
        *rows,
        ("memory", f"{_nbytes(memory['nbytes'])}, {_nbytes(memory['available_nbytes'])} available"),
        (
            "huge pages",
            f"transparent: {_said(pages['transparent'])}; reserved: {pages['reserved']} of "
            f"{_nbytes(pages['page_nbytes'])}, {pages['free']} free",
        ),
    ]


def _limits(facts: Facts) -> Rows:
    locked, descriptors = facts["limits"]["locked_memory"], facts["limits"]["descriptors"]
    groups = facts["control_groups"]
    exempt = " (not for this process: CAP_IPC_LOCK)" if locked["exempt"] is True else ""
    memory, cpus = groups["memory"], groups["cpus"]
    rows = [
        ("locked memory", _soft_and_hard(locked, _nbytes) + exempt),
        ("open files", _soft_and_hard(descriptors, str)),
        (
            "cgroup memory",
            _said(memory)
            if memory is None or is_unknown(memory)
            else f"{_nbytes(memory['nbytes'])}, {_nbytes(memory['used_nbytes'])} used (with page cache)",
        ),
        ("cgroup processors", _said(cpus)),
    ]
    if is_unknown(groups["io"]) or not groups["io"]:
        return [*rows, ("cgroup I/O", _said(groups["io"] or None))]
    for limit in groups["io"]:
        words = ", ".join(f"{name} {value}" for name, value in limit.items() if name != "device")
        rows.append(("cgroup I/O", f"device {limit['device']}: {words}"))
    return rows


def _soft_and_hard(limit: Facts, say: Any) -> str:
    soft, hard = (
        "unlimited" if limit[name] is None else say(limit[name]) for name in ("soft", "hard")
    )
    return soft if soft == hard else f"{soft}, up to {hard}"


def _file_system(system: Facts) -> Rows:
    if is_unknown(system):
        return [("type", _said(system))]
    direct = system["direct_io"]
    rows = [("type", system["type"])]
    if "mount_point" in system:
        rows = [
            ("type", f"{system['type']} on {system['source']}, mounted at {system['mount_point']}"),
            ("options", system["options"]),
            ("space", _space(system["space"])),
        ]
    if is_unknown(direct):
        return [*rows, ("direct I/O", _said(direct))]
    if not direct["works"]:
        return [*rows, ("direct I/O", f"does not work: {direct['reason']}")]
    works = f"works: memory at multiples of {direct['memory_alignment']}, offsets at multiples of "
    works += str(direct["offset_alignment"])
    accepted = direct["accepted"]
    tried = (
        _said(accepted)
        if is_unknown(accepted)
        else f"memory {accepted['memory_alignment']}, offsets {accepted['offset_alignment']}"
    )
    return [*rows, ("direct I/O", works), ("smallest that worked", tried)]


def _space(space: Facts) -> str:
    if is_unknown(space):
        return _said(space)
    access = (
        "read-only" if space["read_only"] else "writable" if space["writable"] else "not writable"
    )
    return f"{_nbytes(space['free_nbytes'])} of {_nbytes(space['nbytes'])} free, {access}"


def _devices(devices: Any) -> Rows:
    if is_unknown(devices):
        return [("device", _said(devices))]
    rows = [row for device in flat(devices) for row in _device(device)]
    rows += [("device", _said(device)) for device in devices if is_unknown(device)]
    return rows or [("none", "the file system names no block device")]


def _device(device: Facts) -> Rows:
    below = ", ".join(lower.get("name", "unknown") for lower in device["below"])
    words = [
        device["kind"],
        device.get("model"),
        _nbytes(device["nbytes"]) if device["nbytes"] else None,
    ]
    words += [f"on {below}" if below else None]
    rows = [(device["name"], ", ".join(word for word in words if word))]
    if "backing_file" in device:
        how = "direct I/O" if device["direct_io"] else "through the page cache"
        rows.append(("", f"file {device['backing_file']}, {how}"))
    if "queue" in device:
        queue = device["queue"]
        spins = "rotational" if device["rotational"] else "not rotational"
        rows.append(
            (
                "",
                f"sectors {queue.get('logical_block_size')} (physical {queue.get('physical_block_size')}), memory "
                f"alignment {queue.get('dma_alignment', 511) + 1}, {spins}, cache: {queue['write_cache']}",
            )
        )
        node = "" if device["numa_node"] is None else f", NUMA node {device['numa_node']}"
        rows.append(
            (
                "",
                f"scheduler {queue['scheduler']}, hardware queues: {queue['hardware_queues']}, requests: "
                f"{queue.get('nr_requests')}, each up to {queue.get('max_sectors_kb')} KiB "
                f"(drive: {_drives_limit(queue)}){node}",
            )
        )
    for controller in device.get("controllers", []):
        rows.append(("", _controller(controller)))
    return rows


def _drives_limit(queue: Facts) -> str:
    kib = queue.get("max_hw_sectors_kb", _NO_LIMIT_KB)
    return "no limit" if kib >= _NO_LIMIT_KB else f"{kib} KiB"


def _controller(controller: Facts) -> str:
    words = [f"controller {controller['name']}", controller["transport"], controller["state"]]
    words += [f"firmware {controller['firmware']}" if controller["firmware"] else None]
    link = controller["pcie"]
    if link is not None:
        words.append(f"{link['address']} at {link['speed']} x{link['width']}")
        words.append(f"which carries {link['gb_per_second']} GB/s (of {link['gb_per_second_max']})")
    return ", ".join(word for word in words if word)


def _profile(profile: Facts) -> Rows:
    if is_unknown(profile) or profile["file"] is None:
        return [
            ("settings", _said(profile, "the defaults; TENSORFERRY_PROFILES switches profiles off"))
        ]
    if profile["settings"] is None:
        return [("settings", f"the defaults; {profile['file']} has none for this file system")]
    words = ", ".join(f"{name} {value}" for name, value in profile["settings"].items())
    return [("settings", words), ("from", profile["file"])]


def _gpu(facts: Facts) -> Rows:
    gpu, storage = facts["gpu"], facts["gpudirect_storage"]
    torch = facts["libraries"]["torch"]
    torch_gpus = (
        torch if is_unknown(torch) else torch.get("gpus", unknown("torch is not installed"))
    )
    return [
        ("driver", _said(gpu["nvidia_driver"], otherwise=_MISSING)),
        ("nvidia-smi", _cards(gpu["nvidia"])),
        ("torch", _cards(torch_gpus)),
        (
            "cuFile",
            _said(storage["cufile_libraries"], ", ".join(storage["cufile_libraries"]), _MISSING),
        ),
        ("nvidia-fs", _said(storage["nvidia_fs"], otherwise=_MISSING)),
        ("CUDA tensors", _cuda(gpu["cuda"])),
        ("gds_handle", _gds(storage["cufile"])),
    ]


def _cuda(driver: Facts) -> str:
    if is_unknown(driver):
        return _said(driver)
    return (
        "can be moved"
        if driver["usable"]
        else f"cannot be moved by tensorferry: {driver['reason']}"
    )


def _gds(cufile: Facts) -> str:
    if is_unknown(cufile):
        return _said(cufile)
    if not cufile["usable"]:
        return f"{_MISSING}: {cufile['reason']}"
    return f"{cufile['mode']}: {cufile['detail']}"


def _cards(cards: Any) -> str:
    if is_unknown(cards):
        return _said(cards, otherwise=_MISSING)
    words = (f"{card['name']} ({_nbytes(card['memory_nbytes'] or 0)})" for card in cards)
    return ", ".join(words) or "none"


def _libraries(libraries: Facts) -> Rows:
    rows = []
    for name in ("torch", "numpy", "deepspeed"):
        found = libraries[name]
        rows.append(
            (name, _said(found) if is_unknown(found) else found["version"] or "not installed")
        )
    for name, operation in libraries["deepspeed"].get("ops", {}).items():
        rows.append(
            (
                f"  {name}",
                _said(operation, otherwise=_MISSING)
                if is_unknown(operation)
                else _operation(operation),
            )
        )
    return rows


def _operation(operation: Facts) -> str:
    if operation["served_by"] == "tensorferry":
        reason = operation["reason"]
        return "served by tensorferry" if reason is None else f"{_MISSING}: {reason}"
    if operation["reason"] is not None:
        return f"DeepSpeed's own, cannot be built: {operation['reason']}"
    return f"DeepSpeed's own, {'built' if operation['built'] else 'compiled at first use'}"


def _nbytes(nbytes: int) -> str:
    for unit, scale in (("GiB", _GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} bytes"
