#!/usr/bin/env python3
"""The environment that compiles DeepSpeed's own engine, once for each clone, and a wrapper that compiles it quickly.

A dozen files include torch's headers, which take nearly all of the compile time, and several tests need the result.
This program runs as the compiler, and compiles all files of an extension as one. The first file that build.ninja names
gets the code of all, and the objects of the others are empty. It adds guards to headers that have none, and renames
constants that several files define. Objects are cached outside the clone, under a hash of their inputs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

EXTENSIONS = Path(__file__).resolve().parents[2] / "build" / "torch_extensions"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tensorferry-tests"

ENVIRONMENT = {
    "CXX": str(Path(__file__).resolve()),
    "DS_ACCELERATOR": "cpu",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja is there
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
}


def main(arguments: list[str]) -> None:
    """Compile as g++ does."""
    if "-c" in arguments:
        rules = Path("build.ninja").read_text()
        sources = [Path(name) for name in re.findall(r": compile (\S+)$", rules, re.MULTILINE)]
        arguments = [argument for argument in arguments if argument != "-g"]
        source = arguments.index("-c") + 1
        first = arguments[source] == str(sources[0])
        whole = Path("whole" if first else f"empty-{Path(arguments[source]).stem}").absolute()
        shutil.rmtree(whole, ignore_errors=True)
        arguments[source] = str(whole / "all.cpp")
        if first:
            compile_all(sources, whole, arguments)
        whole.mkdir()
        Path(arguments[source]).touch()
    os.execvp("g++", ["g++", *arguments])


def compile_all(sources: list[Path], whole: Path, arguments: list[str]) -> None:
    """Compile sources as one, from a copy of their project in the folder `whole`, or use a cached object; then exit."""
    csrc = next(folder for folder in sources[0].parents if folder.name == "csrc")
    shutil.copytree(csrc, whole)
    code = ""
    for header in whole.rglob("*.h"):
        header.write_text(f"#pragma once\n{header.read_text()}")
    for number, source in enumerate(sources):
        constants = re.findall(r"^(?:static )?const \S+ (\w+) =", source.read_text(), re.MULTILINE)
        code += "".join(f"#define {name} {name}_{number}\n" for name in constants)
        code += f'#include "{source.relative_to(csrc)}"\n'
        code += "".join(f"#undef {name}\n" for name in constants)
    (whole / "all.cpp").write_text(code)
    # The inputs of the object file, without paths: code, processor (-march=native), compiler, torch and options.
    made_of = [
        path.read_text() for path in sorted(whole.rglob("*")) if path.suffix in (".h", ".cpp")
    ]
    made_of += re.findall(r"^flags.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:1]
    made_of.append(subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout)
    made_of += [argument for argument in arguments if not argument.startswith(("/", "-I"))]
    made_of += [
        path.read_text()
        for argument in arguments
        if argument.endswith("/torch/include")
        for path in Path(argument, "torch").glob("*/version.h")
    ]
    kept = CACHE / f"{hashlib.sha256(''.join(made_of).encode()).hexdigest()}.o"
    wanted = Path(arguments[arguments.index("-o") + 1])
    if not kept.exists():
        places = [argument.replace(str(csrc), str(whole)) for argument in arguments]
        done = subprocess.run(["g++", *places, f"-I{whole}"])
        if done.returncode != 0:
            sys.exit(done.returncode)
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.copy(wanted, kept.with_suffix(f".{os.getpid()}"))
        kept.with_suffix(f".{os.getpid()}").rename(kept)
    shutil.copy(kept, wanted)
    depfile = Path(arguments[arguments.index("-MF") + 1])
    depfile.write_text(f"{wanted}: {' '.join(map(str, sources))}\n")
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
