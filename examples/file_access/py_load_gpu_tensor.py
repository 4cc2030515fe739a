"""Load a file into a GPU tensor with plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import utils
from py_load_cpu_tensor import file_read as read_into_host

if TYPE_CHECKING:
    import torch


def file_read(path: str) -> torch.Tensor:
    return read_into_host(path).cuda()


def main() -> None:
    options = utils.load_options(__doc__)
    utils.require_gpu()
    utils.measure_load("py load_gpu", options, file_read)


if __name__ == "__main__":
    utils.run(main)
