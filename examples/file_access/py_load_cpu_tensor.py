"""Load a file into a CPU tensor with plain Python."""

from __future__ import annotations

from pathlib import Path

import torch
import utils


def file_read(path: str) -> torch.Tensor:
    memory = bytearray(Path(path).stat().st_size)
    rest = memoryview(memory)
    with open(path, "rb", buffering=0) as file:
        while rest:
            rest = rest[file.readinto(rest) :]
    return torch.frombuffer(memory, dtype=torch.uint8)


def main() -> None:
    options = utils.load_options(__doc__)
    utils.measure_load("py load_cpu", options, file_read)


if __name__ == "__main__":
    utils.run(main)
