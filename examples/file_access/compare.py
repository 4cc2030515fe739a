"""Run the programs alternately, and print the README's table with GB/s and the speedup over plain Python.

The order is A B C, A B C, ..., because the speed of drives, especially of shared ones, changes from minute to minute.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import utils

import tensorferry

HERE = Path(__file__).parent
# The programs for each kind of work. The others are compared with the first one.
GROUPS = {
    f"{verb} {device} tensor": [
        f"{way}_{verb}_{device}_tensor.py"
        for way in ("py", "aio", "gds", "deepspeed")
        if (way, device) not in (("gds", "cpu"), ("deepspeed", "gpu"))
    ]
    for verb in ("load", "store")
    for device in ("cpu", "gpu")
}
_SPEED = re.compile(r"([\d.]+) GB, ([\d.]+) secs")


def main() -> None:
    options = parse()
    speeds: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory(
        prefix="tensorferry-example-", dir=options.nvme_folder
    ) as folder:
        input_file = Path(folder) / "input.bin"
        tensorferry.write(input_file, utils.random_tensor(options.mb_size << 20), sync=True)
        for _ in range(options.rounds):
            for programs in GROUPS.values():
                for program in programs:
                    if program in absent:
                        continue
                    arguments = [f"--loop={options.loop}"]
                    if "_load_" in program:
                        arguments += [f"--input_file={input_file}"]
                    else:
                        arguments += [f"--nvme_folder={folder}", f"--mb_size={options.mb_size}"]
                        arguments += ["--no_sync"] if options.no_sync else []
                    speed = run_program(program, arguments, absent)
                    if speed is not None:
                        speeds.setdefault(program, []).append(speed)
    print_table(speeds, absent, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nvme_folder", required=True, help="a folder on the drive")
    parser.add_argument("--mb_size", type=int, default=1024, help="MB of 2**20 (default 1024)")
    parser.add_argument("--loop", type=int, default=3, help="repetitions in a program (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (default 3)")
    parser.add_argument("--no_sync", action="store_true", help="do not end stores with fsync")
    options = parser.parse_args()
    problems = [
        f"--{name}: {getattr(options, name)} is less than 1"
        for name in ("mb_size", "loop", "rounds")
        if getattr(options, name) < 1
    ]
    if not Path(options.nvme_folder).is_dir():
        problems.append(f"--nvme_folder: {options.nvme_folder} is not a folder")
    if problems:
        parser.error("; ".join(problems))
    return options


def run_program(program: str, arguments: list[str], absent: dict[str, str]) -> float | None:
    """Return GB/s. If a requirement is missing, store the program's message in ``absent``, and return None."""
    done = subprocess.run(
        [sys.executable, HERE / program, *arguments], capture_output=True, text=True
    )
    if done.returncode == utils.MISSING:
        absent[program] = done.stderr.strip().splitlines()[-1].partition(": ")[2]
        return None
    found = _SPEED.search(done.stdout)
    if done.returncode != 0 or found is None:
        raise OSError(f"{program} failed: {done.stderr.strip()}")
    gb, seconds = found.groups()
    return float(gb) / float(seconds)


def print_table(
    speeds: dict[str, list[float]], absent: dict[str, str], options: argparse.Namespace
) -> None:
    for work, programs in GROUPS.items():
        rule = ", no fsync" if options.no_sync and work.startswith("store") else ""
        print(
            f"\n| {work}, {options.mb_size} MB{rule} | GB/s | lowest .. highest | speedup over Python |"
        )
        print("|---|---|---|---|")
        python = statistics.median(speeds[programs[0]]) if programs[0] in speeds else None
        for program in programs:
            if program in absent:
                print(f"| {program} | - | - | {absent[program]} |")
                continue
            found = speeds[program]
            median = statistics.median(found)
            ratio = f"{median / python:.2f}" if python else "-"
            print(f"| {program} | {median:.2f} | {min(found):.2f} .. {max(found):.2f} | {ratio} |")


if __name__ == "__main__":
    utils.run(main)
