"""Two optimizers side by side: one in memory, one offloaded."""

import torch

from tensorferry.offload.equality import same

# Together these shapes fill several slots, and each one fits into a slot, for optimizers that need whole parameters.
SMALL = 192 << 10  # a budget of several slots, for less than half of their state
SHAPES = [(60, 100), (17,), (64, 64), (), (8000,), (80, 100), (20, 400), (40, 200), (8000,)]
MATRICES = [(60, 100), (64, 64), (80, 100), (20, 400), (40, 200), (100, 80), (400, 20)]


def adamw(params, **options):
    return torch.optim.AdamW(params, **{"fused": True} | options)


class ByNorm(torch.optim.Optimizer):
    """A step that depends on a whole parameter, as LAMB's and LARS's do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                trust = param.norm() / state["mean"].norm()
                param.data.add_(state["mean"] * trust, alpha=-group["lr"])


def pair(offloaded, make=adamw, shapes=SHAPES, budget=SMALL, **options):
    """Return the parameters of two optimizers, and these: in memory and offloaded."""
    wanted, params = parameters(shapes), parameters(shapes)
    return wanted, params, make(wanted), offloaded(make(params), budget, **options)


def parameters(shapes=SHAPES, dtype=torch.float32, seed=1):
    """Return parameters that are the same at each call."""
    random = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


def copies(params):
    """Return parameters with the same values, laid out as they are."""
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


class Gradients:
    """Random gradients, the same for several lists of parameters."""

    def __init__(self, *lists, missing=lambda step, index: False):
        self.lists = lists
        self.random = torch.Generator().manual_seed(5)
        self.missing = missing
        self.steps = 0

    def give(self):
        """Set the next gradient of each parameter, or None for parameters without one."""
        for index, params in enumerate(zip(*self.lists, strict=True)):
            grad = torch.randn(params[0].shape, generator=self.random).to(params[0].dtype)
            for param in params:
                param.grad = None if self.missing(self.steps, index) else grad.clone()
        self.steps += 1


def train(gradients, *optimizers, steps=3):
    for _ in range(steps):
        gradients.give()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(wanted, params):
    """Compare parameters bit for bit."""
    for index, (left, right) in enumerate(zip(wanted, params, strict=True)):
        assert same(left.detach(), right.detach()), f"parameter {index} differs"


def assert_same_state(wanted, optimizer):
    """Compare the results of state_dict(), bit for bit."""
    wanted, got = wanted.state_dict(), optimizer.state_dict()
    assert wanted["param_groups"] == got["param_groups"]
    assert wanted["state"].keys() == got["state"].keys()
    for index, state in wanted["state"].items():
        assert list(state) == list(got["state"][index])
        for key, value in state.items():
            assert same(value, got["state"][index][key]), f"{key} of parameter {index} differs"
