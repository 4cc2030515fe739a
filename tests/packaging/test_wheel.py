"""The results of `pip install`: a wheel that works alone, and sources that report missing requirements.

TENSORFERRY_WHEEL names an existing wheel; without it, the tests build one.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tools import build_wheels

from tests.support import required
from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[2]

# The libraries of every Linux with a C++ runtime. The package must not need any other, such as liburing.
SYSTEM_LIBRARIES = {"libc", "libm", "libgcc_s", "libstdc++", "libpthread", "libdl", "librt"} | {
    "ld-linux-x86-64",
    "ld-linux-aarch64",
}
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}  # makes builds at different times equal

MOVE_A_FILE = """
import sys
import tensorferry

path = sys.argv[1]
data = bytes(range(256)) * 4097 + b"ragged end"
tensorferry.write(path, data)
with open(path, "rb") as file:
    assert file.read() == data

buffer = bytearray(len(data))
assert tensorferry.read(path, buffer) is buffer
assert buffer == data

part = bytearray(1000)
tensorferry.read(path, part, offset=4097)
assert part == data[4097:5097]

assert "torch" not in sys.modules and "numpy" not in sys.modules
print(tensorferry.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("TENSORFERRY_WHEEL")
    if given:
        return Path(given).resolve()
    required.module("auditwheel")
    folder = tmp_path_factory.getbasetemp()
    out = (
        folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    ) / "wheel"  # for all workers
    out.mkdir(exist_ok=True)
    script = ROOT / "tools" / "build_wheels.py"
    # As `make build` does, which has compiled it all.
    settings = {"BUILD_DIR": "build/core-{cache_tag}", "CMAKE_DEFINE": "TENSORFERRY_WERROR=ON"}
    environment = (
        os.environ | {f"SKBUILD_{name}": value for name, value in settings.items()} | EPOCH
    )
    command = [sys.executable, script, "--no-isolation", "--out", out, sys.executable]
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "wheel.lock", "w") as lock:  # the first worker builds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(out.glob("*.whl")):
            built = run(*command, env=environment)
            assert built.returncode == 0, built.stdout
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment that contains only the wheel."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    made = run(sys.executable, "-m", "venv", venv)
    assert made.returncode == 0, made.stdout
    # No index, nor one that the environment names: a package that the wheel needed is not found.
    pip = [venv / "bin/python", "-m", "pip", "--isolated"]
    done = run(*pip, "install", "--no-index", wheel)
    assert done.returncode == 0, done.stdout
    return venv


def bare_environment(venv: Path) -> dict[str, str]:
    """Return an environment without a compiler and without the settings of this one."""
    return {"PATH": str(venv / "bin"), "HOME": str(venv), "LC_ALL": "C.UTF-8"}


def test_wheel_moves_a_file_without_torch_numpy_or_compiler(
    installed: Path, tmp_path: Path
) -> None:
    command = [installed / "bin/python", "-c", MOVE_A_FILE, tmp_path / "data.bin"]
    done = run(*command, env=bare_environment(installed), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert Path(done.stdout.strip()).is_relative_to(installed)


def test_wheel_waits_for_deepspeed_where_the_variable_asks_and_nowhere_else(
    installed: Path, tmp_path: Path
) -> None:
    program = "import sys; print([m for m in sys.modules if 'tensorferry' in m])"
    for variable, modules in (("", "[]"), ("0", "[]"), ("1", "['_tensorferry_startup']")):
        environment = bare_environment(installed) | {"TENSORFERRY_DEEPSPEED": variable}
        done = run(installed / "bin/python", "-c", program, env=environment, cwd=tmp_path)
        assert done.stdout.strip() == modules
    # Something by DeepSpeed's name shows that its import ends in install(), which looks for the builders.
    (tmp_path / "deepspeed.py").write_text("")
    done = run(installed / "bin/python", "-c", "import deepspeed", env=environment, cwd=tmp_path)
    assert done.returncode != 0
    assert "deepspeed.ops" in done.stdout


def test_wheel_needs_only_the_c_and_cpp_libraries(installed: Path) -> None:
    (core,) = installed.glob("lib/python*/site-packages/tensorferry/_core*.so")
    dynamic = run("readelf", "--dynamic", "--wide", core)
    assert dynamic.returncode == 0, dynamic.stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\.so", dynamic.stdout)
    assert "libc" in needed
    assert set(needed) <= SYSTEM_LIBRARIES


def test_wheel_holds_types_and_license_and_bundles_no_library(wheel: Path) -> None:
    listing = run(sys.executable, "-m", "zipfile", "--list", wheel)
    assert listing.returncode == 0, listing.stdout
    names = [line.split()[0] for line in listing.stdout.splitlines()[1:]]
    assert "tensorferry/py.typed" in names
    assert "tensorferry/_core.pyi" in names
    # The license of each library that the core is linked with.
    parts = ["libdeflate/COPYING", "liburing/LICENSE", "nanobind/LICENSE", "robin_map/LICENSE"]
    for license_file in ("LICENSE", *(f"third_party/{part}" for part in parts)):
        assert any(name.endswith(f"/licenses/{license_file}") for name in names)
    assert not [name for name in names if ".libs/" in name]
    assert "manylinux" in wheel.name or "musllinux" in wheel.name


def test_wheel_says_what_it_is(installed: Path) -> None:
    program = """
import importlib.metadata, tensorferry
said = importlib.metadata.metadata("tensorferry")
assert said["Version"] == tensorferry.__version__
print(said["License-Expression"])
print(*said.get_all("Project-URL"), sep="\\n")
print(said.get_payload())
"""
    done = run(installed / "bin/python", "-c", program)
    assert done.returncode == 0, done.stdout
    license_, *rest = done.stdout.splitlines()
    assert license_ == "Apache-2.0 AND MIT AND BSD-3-Clause"
    for name in ("Homepage", "Documentation", "Changelog", "Issues"):
        assert any(line.startswith(f"{name}, https://") for line in rest)
    links = re.findall(r"\]\(([^)]+)\)", done.stdout)
    assert links
    assert [
        link for link in links if not link.startswith("https://")
    ] == []  # the page on PyPI has no files next to it


def test_the_core_does_not_know_where_it_was_built(installed: Path) -> None:
    (core,) = installed.glob("lib/python*/site-packages/tensorferry/_core*.so")
    assert os.fsencode(ROOT) not in core.read_bytes()


def test_the_tests_of_the_sources_pass_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(
        *(installed / "bin/python", ROOT / "tests/packaging/test_installed.py"),
        env=bare_environment(installed),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout


def test_make_wheel_ends_at_a_wheel_that_does_not_work(wheel: Path, tmp_path: Path) -> None:
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(broken, "w") as archive:
        for name, content in contents(wheel).items():
            if name != "tensorferry/transfer/futures.py":
                archive.writestr(name, content)
    with pytest.raises(SystemExit, match=r"test_installed\.py"):
        build_wheels.check_wheel(sys.executable, broken)


def test_wheel_holds_every_module_as_it_is_in_the_sources(wheel: Path) -> None:
    source = ROOT / "src"
    modules = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*.py*")}
    ours = {name: code for name, code in modules.items() if "__pycache__" not in name}
    packed = {
        name: code for name, code in contents(wheel).items() if name.endswith((".py", ".pyi"))
    }
    assert "tensorferry/serving/vllm.py" in ours
    assert [
        name for name in ours.keys() | packed.keys() if ours.get(name) != packed.get(name)
    ] == []


def test_source_build_without_liburing_names_the_package_to_install(tmp_path: Path) -> None:
    required.module("scikit_build_core")
    settings = {
        "build-dir": str(tmp_path / "build"),
        "cmake.define.Liburing_ROOT": str(tmp_path / "nothing"),
        "cmake.define.TENSORFERRY_LIBURING_ONLY_ROOT": "ON",
    }
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += [f"--config-settings={name}={value}" for name, value in settings.items()]
    done = run(*command, "--wheel-dir", tmp_path, ROOT)
    assert done.returncode != 0
    assert "apt-get install liburing-dev" in done.stdout
    assert "dnf install liburing-devel" in done.stdout
    assert not list(tmp_path.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_sources(tmp_path_factory.mktemp("sdist"))


def pack_sources(out: Path) -> Path:
    required.module("build.util")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, ROOT]
    done = run(*command, env=os.environ | EPOCH)
    assert done.returncode == 0, done.stdout
    (path,) = out.glob("*.tar.gz")
    return path


def test_sdist_holds_what_a_build_needs_and_no_more_and_is_the_same_each_time(
    sdist: Path, tmp_path: Path
) -> None:
    assert pack_sources(tmp_path).read_bytes() == sdist.read_bytes()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.h"), *ROOT.glob("src/**/*.py")]
    sources += [path for path in ROOT.glob("third_party/**/*") if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in sources} <= names
    assert {"CMakeLists.txt", "pyproject.toml", "LICENSE", "cmake/FindLiburing.cmake"} <= names
    tests = "tests/packaging/test_installed.py"
    assert [name for name in names if name.startswith(("tests/", "build/", ".venv/"))] == [tests]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
