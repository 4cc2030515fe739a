"""The package as a whole: its imports, its documentation, and its stub."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

import tensorferry
from tensorferry.transfer import settings

# Folders of the repository, and pages: `docs/guide.md`, CONTRIBUTING, README.md.
REPOSITORY_FILE = re.compile(
    r"(?<![\w/.])(?:docs|tests|tools|csrc|benchmarks|examples|third_party|src)/|"
    r"\.md\b|\b(?:ARCHITECTURE|CONTRIBUTING|CHANGELOG|README)\b"
)
SOURCE = pathlib.Path(tensorferry.__file__).parent


def test_import_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, tensorferry; "
        "heavy = {'torch', 'numpy', 'asyncio', 'logging', 'rich', 'typer'} & set(sys.modules); "
        "heavy |= {'dataclasses', 'inspect'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", tensorferry.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(tensorferry, name)
    assert len(inspect.getdoc(thing) or "") > 30
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize(
    "name", ["", ".checkpoint", ".deepspeed", ".offload", ".safetensors", ".store"]
)
def test_help_points_at_no_file_that_a_wheel_lacks(name: str) -> None:
    if name in (".checkpoint", ".offload"):
        pytest.importorskip("torch")
    package = importlib.import_module(f"tensorferry{name}")
    for public in package.__all__:
        thing = getattr(package, public)
        members = vars(thing).items() if inspect.isclass(thing) else ()
        ours = [(f".{member}", value) for member, value in members if not member.startswith("_")]
        for member, each in (("", package), ("", thing), *ours):
            found = REPOSITORY_FILE.search(inspect.getdoc(each) or "")
            assert found is None, f"{public}{member} names {found}"


def test_help_of_the_handle_reads_like_documentation() -> None:
    text = tensorferry.aio_handle.__doc__ or ""
    for section in ("Parameters", "Raises", "Notes", "Examples"):
        assert f"{section}\n    {'-' * len(section)}" in text


def test_engines_are_reported_in_order_of_preference() -> None:
    found = tensorferry.engines()
    assert list(found) == ["io_uring", "libaio", "threads"]
    assert found["threads"] is None
    chosen = next(name for name, refusal in found.items() if refusal is None)
    handle = tensorferry.aio_handle()
    assert handle.engine in found
    if "TENSORFERRY_ENGINE" not in __import__("os").environ:
        assert handle.engine == chosen
        assert handle.engine_refusals == {name: why for name, why in found.items() if why}


def test_the_environment_forces_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_ENGINE", "threads")
    assert tensorferry.aio_handle().engine == "threads"
    monkeypatch.setenv("TENSORFERRY_ENGINE", "steam")
    with pytest.raises(ValueError, match="steam"):
        tensorferry.aio_handle()


def test_native_errors_do_not_leak_references(tmp_path: pathlib.Path) -> None:
    buffer = bytearray(10)
    count = sys.getrefcount(buffer)
    for _ in range(100):
        with pytest.raises(tensorferry.StorageError):
            tensorferry.read(tmp_path / "missing", buffer)
    assert sys.getrefcount(buffer) == count


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python is not free-threaded"
)
def test_importing_it_leaves_a_free_threaded_python_free() -> None:
    program = "import sys, tensorferry; assert not sys._is_gil_enabled()"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_core_python_and_the_docs_have_the_same_defaults() -> None:
    root = pathlib.Path(__file__).parents[2]
    depth, block = settings.DEFAULT_QUEUE_DEPTH, settings.DEFAULT_BLOCK_NBYTES
    for header in ("csrc/transfer/scheduler.h", "csrc/engine/engine.h"):
        assert re.findall(r"queue_depth = (\d+);", (root / header).read_text()) == [str(depth)]
    sizes = re.findall(
        r"block_nbytes = uint64_t\{1\} << (\d+);", (root / "csrc/transfer/scheduler.h").read_text()
    )
    assert {1 << int(size) for size in sizes} == {block}
    page = (root / "docs/coming-from-deepnvme.md").read_text()
    for kind in ("aio_handle", "gds_handle"):
        assert f"`{kind}(block_size={block}, queue_depth={depth}, " in page
