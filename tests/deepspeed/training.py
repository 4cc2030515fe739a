"""One process of a training, started by torch's launcher: `python -m tests.deepspeed.training ARGUMENTS`.

The arguments are JSON, and so is a line of rank 0's output: the exact losses, and the engine that moved the tensors.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from benchmarks.training import Training, join


def run(directory: str, steps: int, **options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    join()
    training = Training(Path(directory), **options)
    losses = [training.step() for _ in range(steps)]
    torch.distributed.barrier()
    handle = deepspeed.ops.op_builder.AsyncIOBuilder().load().aio_handle
    result = {
        "losses": losses,
        "swapped_nbytes": training.swapped_nbytes(),
        "served_by": handle.__module__.partition(".")[0],
    }
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return result


if __name__ == "__main__":
    found = run(**json.loads(sys.argv[1]))
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
