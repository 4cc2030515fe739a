"""The places in which cuFile is searched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tensorferry.base import libraries
from tests.support import commands

if TYPE_CHECKING:
    import pathlib


@pytest.fixture
def nowhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return a folder in which packages are searched, on a machine without cuFile."""
    for name in ("TENSORFERRY_LIBCUFILE", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libraries, "_linker_cache", lambda: "")
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.setattr(libraries.site, "ENABLE_USER_SITE", False)
    monkeypatch.setattr(libraries.sysconfig, "get_path", lambda _: str(packages))
    return packages


def test_folders_of_wheels_come_before_those_of_toolkits(
    nowhere: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, toolkit = nowhere / "nvidia" / "cu13" / "lib", tmp_path / "cuda"
    target = toolkit / "targets" / "x86_64-linux" / "lib"
    for folder in (wheel, toolkit / "lib64", target):
        folder.mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    found = libraries.cufile_folders()
    assert found[:3] == [str(wheel), str(toolkit / "lib64"), str(target)]
    assert len(found) == len(set(found))


@pytest.mark.usefixtures("nowhere")
def test_without_a_library_the_refusal_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "cufile_folders", lambda: ["/usr/local/cuda/lib64/nowhere"])
    assert "pip install nvidia-cufile" in str(libraries.cufile_refusal())


def test_a_library_in_a_wheel_or_named_by_the_environment_is_found(
    nowhere: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = nowhere / "nvidia" / "cufile" / "lib" / libraries.CUFILE
    library.parent.mkdir(parents=True)
    library.touch()
    assert libraries.cufile_refusal() is None
    monkeypatch.setenv("TENSORFERRY_LIBCUFILE", str(library))
    assert libraries.cufile_refusal() is None
    monkeypatch.setenv("TENSORFERRY_LIBCUFILE", str(library) + "x")
    assert "TENSORFERRY_LIBCUFILE" in str(libraries.cufile_refusal())


def test_all_places_in_which_the_linker_would_look_are_searched(
    nowhere: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen() -> bool:
        return libraries.cufile_refusal() is None

    assert not seen()
    library = tmp_path / libraries.CUFILE
    library.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert seen()
    monkeypatch.delenv("LD_LIBRARY_PATH")
    cached = f"\t{libraries.CUFILE} (libc6,x86-64) => {library}\n"
    monkeypatch.setattr(libraries, "_linker_cache", lambda: cached)
    assert seen()
    monkeypatch.setenv("TENSORFERRY_LIBCUFILE", str(nowhere / "other.so"))
    assert not seen()


def test_importing_tensorferry_looks_for_nothing() -> None:
    program = (
        "import sys, tensorferry; print([name for name in ('torch', 'numpy', 'sysconfig', 'tensorferry.base.libraries')"
        " if name in sys.modules], tensorferry._core.cuda_in_use())"
    )
    assert commands.run(sys.executable, "-c", program).stdout == "[] False\n"
