"""Store a CPU tensor in a file with plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils

if TYPE_CHECKING:
    import torch


def file_write(path: str, tensor: torch.Tensor) -> None:
    with open(path, "wb") as file:
        file.write(tensor.numpy())


def main() -> None:
    options = utils.store_options(__doc__)
    utils.measure_store("py store_cpu", options, utils.random_tensor(options.nbytes), file_write)


if __name__ == "__main__":
    utils.run(main)
