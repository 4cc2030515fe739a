"""Programs for tests/safetensors/test_installing.py, each run in a separate process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any


def names() -> dict[str, Any]:
    """Return the modules of the functions that a program gets when it imports safetensors."""
    import safetensors.numpy
    import safetensors.torch
    from safetensors.torch import load_file

    import safetensors
    from safetensors import safe_open

    return {
        "safe_open": safe_open.__module__,
        "in_torch": safetensors.torch.safe_open.__module__,
        "in_numpy": safetensors.numpy.safe_open.__module__,
        "torch": load_file.__module__,
        "load": safetensors.torch.load.__module__,
        "numpy": safetensors.numpy.load_file.__module__,
    }


def names_after_install() -> dict[str, Any]:
    """Return the same after install() and after uninstall(), for a program that imported some functions before."""
    import safetensors.torch
    from safetensors.torch import load_file

    import tensorferry.safetensors
    from safetensors import safe_open

    module = sys.modules["__main__" if __name__ == "__main__" else __name__]
    module.kept = load_file, safe_open  # type: ignore[attr-defined]
    module.load_file = load_file  # type: ignore[attr-defined]
    tensorferry.safetensors.install()
    tensorferry.safetensors.install()
    found = names() | {"by_name": module.load_file.__module__}  # type: ignore[attr-defined]
    tensorferry.safetensors.uninstall()
    tensorferry.safetensors.uninstall()
    after = names() | {"by_name": module.load_file.__module__}  # type: ignore[attr-defined]
    same = safetensors.torch.load_file is load_file and safetensors.safe_open is safe_open
    return {"installed": found, "after": after, "same": same, "variable": variable()}


def sent_to_another_process(path: str) -> list[Any]:
    """Return what a pickled function of each module loads while ours are installed."""
    import pickle

    import safetensors.numpy
    import safetensors.torch

    import tensorferry.safetensors

    tensorferry.safetensors.install()
    functions = safetensors.torch.load_file, safetensors.numpy.load_file
    return [pickle.loads(pickle.dumps(each))(path)["a"].tolist() for each in functions]


def variable() -> str | None:
    return os.environ.get("TENSORFERRY_SAFETENSORS")


def errors_are_kin(path: str) -> list[Any]:
    """Return whether `except` with safetensors' error also catches ours while it is installed."""
    import safetensors
    import tensorferry.safetensors as ours

    tensorferry_installed = []
    for step in (ours.install, ours.uninstall):
        step()
        try:
            ours.safe_open(path, "pt").get_tensor("zz")
        except safetensors.SafetensorError:
            tensorferry_installed.append("theirs")
        except ours.SafetensorError:
            tensorferry_installed.append("ours")
    return tensorferry_installed


def other_frameworks(path: str) -> str:
    """Return the module that opens a file for a framework that tensorferry does not support."""
    import tensorferry.safetensors

    tensorferry.safetensors.install()
    from safetensors import safe_open

    return type(safe_open(path, "jax")).__module__


def children() -> str:
    """Return the module of the functions that a child of a process with install() has."""
    import tensorferry.safetensors

    tensorferry.safetensors.install()
    program = "import json, tests.safetensors.installed_programs as p; print(p.names()['torch'])"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def transformers_model(folder: str) -> dict[str, Any]:
    """Save and load a tiny model of transformers, with ours in safetensors' place."""
    import tensorferry.safetensors
    from tensorferry.safetensors import opened

    tensorferry.safetensors.install()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    calls = {"safe_open": 0, "slices": 0}
    opening, slicing = opened.safe_open.__init__, opened.PySafeSlice.__getitem__

    def counted_open(*arguments: Any, **options: Any) -> None:
        calls["safe_open"] += 1
        opening(*arguments, **options)

    def counted_slice(*arguments: Any) -> Any:
        calls["slices"] += 1
        return slicing(*arguments)

    opened.safe_open.__init__ = counted_open  # type: ignore[method-assign]
    opened.PySafeSlice.__getitem__ = counted_slice  # type: ignore[method-assign]
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        eos_token_id=None,  # with random weights the token could end the text early
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="40KB")
    loaded = LlamaForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    return {
        **calls,
        "shards": len(list(pathlib.Path(folder).glob("*.safetensors"))),
        "same": all(torch.equal(state[name], each) for name, each in loaded.state_dict().items()),
        "tokens": loaded.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape[1],
    }


def accelerate_model(folder: str) -> bool:
    """Save a model by accelerate, and load it into an empty one."""
    import tensorferry.safetensors

    tensorferry.safetensors.install()
    import accelerate
    import torch

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 50))

    model = make()
    accelerate.Accelerator().save_model(model, folder, max_shard_size="6KB")
    with accelerate.init_empty_weights():
        other = make()
    accelerate.load_checkpoint_and_dispatch(other, folder, device_map={"": "cpu"})
    state = model.state_dict()
    return all(torch.equal(state[name], each) for name, each in other.state_dict().items())


def diffusers_model(folder: str) -> bool:
    """Save and load a model of diffusers."""
    import tensorferry.safetensors

    tensorferry.safetensors.install()
    import torch
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    model.save_pretrained(folder)
    state = model.state_dict()
    return all(
        torch.equal(state[name], each)
        for options in ({}, {"disable_mmap": True})
        for name, each in AutoencoderKL.from_pretrained(folder, **options).state_dict().items()
    )
