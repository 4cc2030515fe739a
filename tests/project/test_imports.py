"""The layers of imports: a module imports only modules of lower levels, without circles.

Imports within functions count, too. Imports for types only may not go up either, but may be circular within a level.
"""

from __future__ import annotations

import ast
import graphlib
import pathlib

import pytest

import tensorferry

SOURCE = pathlib.Path(tensorferry.__file__).parent

# From the top down: products, the package that re-exports the public API, files and transfers, the common base. Modules
# of one line may import each other without a circle.
LEVELS = (
    ("__main__",),
    ("cli",),
    ("tuning",),
    ("deepspeed", "checkpoint", "offload", "serving"),
    ("deepnvme.builders", "deepnvme.ops"),
    ("safetensors", "store", "npy"),
    ("",),  # the package itself
    ("deepnvme.handles", "deepnvme.gds"),
    ("table",),
    ("transfer.calls",),
    ("transfer.replacement",),
    ("transfer.new_file", "transfer.piece_checksums"),
    ("transfer.pipeline", "transfer.python_files", "transfer.versioned"),
    ("transfer.files",),
    ("transfer.remote",),
    ("transfer.streams", "transfer.memory"),
    ("transfer.requests",),
    ("transfer.runtime",),
    ("transfer.futures", "transfer.arrays", "transfer.checksums"),
    ("transfer.stats", "transfer.publication", "transfer.sidecars"),
    ("transfer.settings",),
    ("transfer", "deepnvme"),  # no more than docstrings
    ("base", "errors"),
    ("_core",),
)
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: pathlib.Path) -> tuple[set[str], set[str]]:
    """Return which of our modules a file imports, and which it needs for types only."""
    found: tuple[set[str], set[str]] = (set(), set())

    def visit(node: ast.AST, types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.Import):
                found[types].update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: a relative import"
                found[types].update(f"{child.module}.{alias.name}" for alias in child.names)
            visit(child, types or for_types)

    visit(ast.parse(path.read_text()), False)
    ours = [{known for name in names if (known := _known(name)) is not None} for names in found]
    return ours[0], ours[1]


def _known(name: str) -> str | None:
    """Return the module of ours that a name denotes or is defined in, None for other modules."""
    package, _, rest = name.partition(".")
    if package != "tensorferry":
        return None
    while rest and rest not in MODULES and rest != "_core":
        rest = rest.rpartition(".")[0]
    return rest


IMPORTED = {module: imported(path) for module, path in MODULES.items()}


def room(module: str) -> str:
    package, _, rest = module.partition(".")
    return module if package in ("transfer", "deepnvme") and rest else package


def test_every_module_has_its_level() -> None:
    assert {room(name) for name in MODULES} <= set(LEVEL)


def test_no_import_goes_up() -> None:
    up = {
        (module, other)
        for module, (needed, for_types) in IMPORTED.items()
        for other in needed | for_types
        if LEVEL[room(other)] < LEVEL[room(module)]
    }
    assert up == set()


def test_nothing_imports_itself_by_a_detour() -> None:
    graph = {module: needed - {module} for module, (needed, _) in IMPORTED.items()}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as circle:
        pytest.fail(" -> ".join(name or "tensorferry" for name in circle.args[1]))
