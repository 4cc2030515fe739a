"""Optimizers that are offloaded to the disk, stepped by one thread."""

import importlib.util

import pytest

# All of this needs torch, which the project's tests can do without.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def offloaded(directory):
    """Return a function that offloads an optimizer to the disk; its results are closed at the end."""
    from tensorferry.offload import offload_optimizer

    made = []

    def offload(optimizer, memory_budget=256 << 10, **options):
        path = options.pop("path", directory / "state")
        made.append(offload_optimizer(optimizer, path, memory_budget=memory_budget, **options))
        return made[-1]

    yield offload
    for each in made:
        each.close()
