"""Two ranks with parameters sharded by FSDP2: each keeps the state of its shards on its drive."""

import pathlib
from typing import Any

import pytest
import torch

from tests.support.ranks import call_on_ranks

pytest.importorskip("torch.distributed.fsdp", reason="torch without FSDP2")


class Training:
    """A sharded model and its optimizer, which trains the same with any number of ranks."""

    def __init__(self, rank: int, ranks: int, directory: str, offloaded: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from tensorferry.offload import offload_optimizer

        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(200, 301),
            torch.nn.ReLU(),
            torch.nn.Linear(301, 100),
            torch.nn.Linear(100, 1),
        )
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if offloaded:
            path = pathlib.Path(directory) / f"rank-{rank}-of-{ranks}"
            self.optimizer = offload_optimizer(self.optimizer, path, memory_budget=192 << 10)

    def step(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.model(torch.randn(8, 200, generator=random)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        from torch.distributed.checkpoint import state_dict as dicts

        return {
            "model": dicts.get_model_state_dict(self.model),
            "optimizer": dicts.get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load(self, saved: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as dicts

        state = self.state()
        dcp.load(state, checkpoint_id=saved)
        dicts.set_model_state_dict(self.model, state["model"])
        dicts.set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def whole(self) -> list[bytes]:
        """Return the bytes of parameters and of the optimizer's tensors, those of all ranks together."""
        states = self.optimizer.state_dict()["state"].values()
        tensors = list(self.model.parameters())
        tensors += [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        return [bytes_of(tensor.full_tensor()) for tensor in tensors]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def train_on_a_rank(rank: int, directory: str, offloaded: bool, saved: str | None) -> list[bytes]:
    import torch.distributed.checkpoint as dcp

    training = Training(rank, 2, directory, offloaded)
    for seed in range(3):
        training.step(100 * rank + seed)
    if saved:
        dcp.save(training.state(), checkpoint_id=saved)
        training.step(100 * rank + 3)  # to be undone
        training.load(saved)
    for seed in range(4, 6):
        training.step(100 * rank + seed)
    tensors = [param.to_local() for param in training.model.parameters()]
    for state in training.optimizer.state_dict()["state"].values():
        tensors.append(state["exp_avg"].to_local())
    return [bytes_of(tensor) for tensor in tensors]


@pytest.mark.parametrize("save", [False, True])
def test_sharded_parameters_are_as_in_memory(directory, save):
    results = [
        call_on_ranks(
            2,
            train_on_a_rank,
            str(directory),
            offloaded,
            str(directory / f"checkpoint-{offloaded}") if save else None,
        )
        for offloaded in (False, True)
    ]
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


def save_on_a_rank(rank: int, directory: str, saved: str) -> list[bytes]:
    import torch.distributed.checkpoint as dcp

    training = Training(rank, 2, directory, offloaded=True)
    for seed in range(3):
        training.step(seed)
    dcp.save(training.state(), checkpoint_id=saved)
    return training.whole()


def go_on_on_a_rank(
    rank: int, ranks: int, directory: str, offloaded: bool, saved: str
) -> list[list[bytes]]:
    training = Training(rank, ranks, directory, offloaded)
    training.step(7)  # state that the load replaces
    training.load(saved)
    loaded = training.whole()
    for seed in range(3, 6):
        training.step(seed)
    return [loaded, training.whole()]


PLACEMENTS = ("replicated", "rows", "columns")


def train_placed_on_a_rank(
    rank: int, ranks: int, directory: str, weight: str, batch: str, decay: float
) -> Any:
    """Train a weight that is placed in one way by a batch that is placed in another, in memory and offloaded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tensorferry.offload import NotSeparableError, offload_optimizer

    mesh = init_device_mesh("cpu", (ranks,))
    of = dict(zip(PLACEMENTS, ([Replicate()], [Shard(0)], [Shard(1)]), strict=True))
    ends = []
    for offloaded in (False, True):
        random = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(distribute_tensor(torch.randn(shape, generator=random), mesh, how))
            for shape, how in (((256, 257), of[weight]), ((257,), of["replicated"]))
        ]
        optimizer: Any = torch.optim.Adam(params, lr=1e-2, weight_decay=decay)
        if offloaded:
            path = f"{directory}/{weight}-{batch}-{decay}-{rank}"
            optimizer = offload_optimizer(optimizer, path, memory_budget=200 << 10)
        for seed in range(3):
            random = torch.Generator().manual_seed(100 + seed)
            given = distribute_tensor(torch.randn(8, 256, generator=random), mesh, of[batch])
            (given @ params[0] + params[1]).square().mean().backward()
            try:
                optimizer.step()
            except NotSeparableError as error:
                assert offloaded
                assert optimizer.steps == 0
                return str(error)
            optimizer.zero_grad()
        ends.append([bytes_of(param.to_local()) for param in params])
    assert ends[0] == ends[1]
    return None


@pytest.mark.parametrize("weight", PLACEMENTS)
@pytest.mark.parametrize("batch", PLACEMENTS[:2])
def test_gradients_that_are_placed_otherwise_are_as_in_memory(directory, weight, batch):
    """The sum over ranks is made before the step; a step is refused if torch makes it later, with another result."""
    arguments = (2, str(directory), weight, batch)
    assert call_on_ranks(2, train_placed_on_a_rank, *arguments, 0.0) == [None, None]
    found = call_on_ranks(2, train_placed_on_a_rank, *arguments, 0.1)
    assert found[0] == found[1]
    assert found[0] is None or "before redistributing it" in found[0]
    assert (found[0] is not None) == (weight != "columns" and batch == "rows")


def commit_on_a_rank(rank: int, directory: str, steps: tuple[int, int]) -> Any:
    """Resume from the last commit, then commit some steps; return the resumed step."""
    from tensorferry.offload import offload_optimizer

    params = [torch.nn.Parameter(torch.full((300, 10), 1.0))]
    optimizer = offload_optimizer(
        torch.optim.SGD(params, 0.1, momentum=0.9), directory, memory_budget="1MiB", commit="step"
    )
    memory = [torch.nn.Parameter(torch.full((300, 10), 1.0))]
    inner = torch.optim.SGD(memory, 0.1, momentum=0.9)
    try:
        resumed: Any = optimizer.resume()
    except RuntimeError as error:
        resumed = str(error)
        optimizer.discard_committed()
    for _ in range(optimizer.steps):
        memory[0].grad = torch.ones_like(memory[0])
        inner.step()
    assert torch.equal(params[0], memory[0])
    for _ in range(steps[rank]):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    optimizer.close()
    return resumed


def test_ranks_go_back_to_the_last_step_that_all_have_committed(directory):
    """The kill is between the commits of the ranks, or in the run after such a kill."""

    def run(*steps: int) -> list[Any]:
        return call_on_ranks(2, commit_on_a_rank, str(directory), steps)

    assert run(2, 2) == [None, None]
    assert run(1, 0) == [2, 2]
    assert run(0, 1) == [2, 2]
    assert run(0, 0) == [2, 2]
    assert run(1, 0) == [2, 2]
    assert run(2, 1) == [2, 2]
    assert run(0, 0) == [3, 3]
    assert run(2, 0) == [3, 3]  # ranks that do not wait for each other
    found = run(0, 0)
    assert found[0] == found[1]
    assert "rank 0: [5, 4], rank 1: [3, 2]" in found[0]
    assert run(1, 1) == found
    assert run(0, 0) == [1, 1]


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks_go_on_from_a_checkpoint(directory, ranks):
    """torch's distributed checkpoint reshards the state."""
    saved = str(directory / "checkpoint")
    wanted = call_on_ranks(2, save_on_a_rank, str(directory), saved)[0]
    plain, offloaded = (
        call_on_ranks(ranks, go_on_on_a_rank, ranks, str(directory), offloaded, saved)
        for offloaded in (False, True)
    )
    assert offloaded == plain
    for loaded, after in offloaded:
        assert loaded == wanted
        assert after != wanted


def with_nothing_on_a_rank(
    rank: int, directory: str, name: str, shapes: list[tuple[int, int]]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from tensorferry.offload import offload_optimizer

    mesh = init_device_mesh("cpu", (2,))

    def made() -> torch.optim.Optimizer:
        tensors = [torch.full(shape, 2.0) for shape in shapes]
        params = [torch.nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in tensors]
        return getattr(torch.optim, name)([{"params": [param]} for param in params])

    def step(optimizer: torch.optim.Optimizer, number: int) -> list[bytes]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            grad = torch.arange(1.0, param.numel() + 1).view(param.shape).pow(number)
            param.grad = distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
        return [bytes_of(param.to_local()) for param in params]

    plain = made()
    ours = offload_optimizer(made(), f"{directory}/{rank}", memory_budget="8MiB")
    for number in range(2):
        assert step(plain, number) == step(ours, number)
    ours.checkpoint(f"{directory}/kept-{rank}")
    assert ours.restore(f"{directory}/kept-{rank}") == 2
    for number in range(2, 4):
        assert step(plain, number) == step(ours, number)
    ours.close()


@pytest.mark.parametrize("shapes", [[(1, 500)], [(1, 500), (7, 300)]])
@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_a_rank_may_have_nothing_of_a_parameter(directory, name, shapes):
    call_on_ranks(2, with_nothing_on_a_rank, str(directory), name, shapes)


def refused_on_a_rank(rank: int, directory: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tensorferry.offload import NotSeparableError, offload_optimizer

    model = torch.nn.Linear(64, 128, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.to(torch.bfloat16)
    offload_optimizer(  # rounding differs between pieces, but each element is computed separately
        torch.optim.AdamW(model.parameters()), f"{directory}/{rank}", memory_budget="8MiB"
    ).close()
    with pytest.raises(NotSeparableError) as caught:
        offload_optimizer(
            torch.optim.Muon(model.parameters()), f"{directory}/{rank}", memory_budget="8MiB"
        )
    return str(caught.value)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch without Muon")
def test_what_wants_whole_parameters_is_refused_where_they_are_sharded(directory):
    for why in call_on_ranks(2, refused_on_a_rank, str(directory)):
        assert "sharded" in why
