"""Store a GPU tensor in a file with plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils
from py_store_cpu_tensor import file_write as write_from_host

if TYPE_CHECKING:
    import torch


def file_write(path: str, tensor: torch.Tensor) -> None:
    write_from_host(path, tensor.cpu())


def main() -> None:
    options = utils.store_options(__doc__)
    utils.require_gpu()
    utils.measure_store(
        "py store_gpu", options, utils.random_tensor(options.nbytes).cuda(), file_write
    )


if __name__ == "__main__":
    utils.run(main)
