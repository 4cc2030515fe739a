"""Results are those of the same optimizer in memory, bit for bit."""

import weakref

import pytest
import torch

from tests.offload.twins import (
    MATRICES,
    SHAPES,
    SMALL,
    Gradients,
    assert_equal,
    assert_same_state,
    copies,
    parameters,
    train,
)

LARGE = 16 << 20
LOOPS = [{}, {"foreach": True}, {"foreach": False}]
PAIRED = LOOPS[1:]
FUSED = {"fused": True}
OPTIMIZERS = [
    ("AdamW", {}, [*LOOPS, FUSED]),
    ("Adam", {"amsgrad": True}, [*LOOPS, FUSED]),
    ("SGD", {"momentum": 0.9, "nesterov": True, "lr": 0.1}, [*LOOPS, FUSED]),
    ("SGD", {"lr": 0.1}, [{}]),
    ("Adagrad", {}, [*LOOPS, FUSED]),
    ("NAdam", {}, PAIRED),
    ("RAdam", {}, PAIRED),
    ("Adamax", {}, PAIRED),
    ("Adadelta", {}, PAIRED),
    ("RMSprop", {"centered": True, "momentum": 0.5}, PAIRED),
    ("Rprop", {}, PAIRED),
    ("ASGD", {}, PAIRED),
    ("Adafactor", {}, PAIRED),
    ("Muon", {}, [{}]),
]
MATRIX = [
    pytest.param(
        name, options | mode, dtype, id="-".join([name, *(f"{k}={v}" for k, v in mode.items()), of])
    )
    for number, (name, options, modes) in enumerate(OPTIMIZERS)
    for mode in modes
    for of, dtype in [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    # Of this one torch's own result is another one each time.
    if (name, mode, of) != ("SGD", FUSED, "bf16")
    # The first meet every dtype in every mode, the others each of both: neighbours in other pairs.
    if modes is not PAIRED or (number + modes.index(mode) + (of == "bf16")) % 2 == 0
]


def missing(step, index):
    """Every third step from the second on, every second parameter."""
    return step % 3 == 1 and index % 2 == 1


def made(name, params, options):
    try:
        return getattr(torch.optim, name)(params, **options)
    except (AttributeError, TypeError, RuntimeError) as error:
        pytest.skip(f"this torch has none: {error}")


@pytest.mark.parametrize(("name", "options", "dtype"), MATRIX)
def test_steps_and_state_dicts_are_those_of_memory(name, options, dtype, offloaded):
    shapes = MATRICES if name == "Muon" else SHAPES
    wanted, params = parameters(shapes, dtype), parameters(shapes, dtype)
    memory = made(name, wanted, options)
    drive = offloaded(made(name, params, options), SMALL)
    train(Gradients(wanted, params, missing=missing), memory, drive, steps=6)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
    moved = drive.stats()
    if moved["state_nbytes"] > SMALL:
        assert moved["read_nbytes"] > 0

    # Each loads the other's state; a load rounds the counters of NAdam and ASGD to bfloat16.
    saved, own, loaded, again = memory.state_dict(), *(copies(wanted) for _ in range(3))
    reference, taken = made(name, own, options), made(name, loaded, options)
    reference.load_state_dict(saved)
    taken.load_state_dict(drive.state_dict())
    drive.close()
    drive = offloaded(made(name, again, options), SMALL)
    drive.load_state_dict(saved)
    train(Gradients(own, loaded, again), reference, taken, drive, steps=2)
    assert_equal(own, loaded)
    assert_equal(own, again)
    assert_same_state(reference, drive)


@pytest.mark.parametrize(("name", "options"), [("AdamW", FUSED), ("Adafactor", {})])
@pytest.mark.parametrize("budget", [200_001, 350_000, LARGE])
def test_any_budget_gives_the_same(name, options, budget, offloaded):
    wanted, params = parameters(), parameters()
    memory, drive = made(name, wanted, options), offloaded(made(name, params, options), budget)
    train(Gradients(wanted, params, missing=missing), memory, drive, steps=7)
    drive.drain()
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
    assert drive.stats()["memory_nbytes"] <= budget
    if budget == LARGE:
        assert drive.stats()["read_nbytes"] == 0


def moved_parameters(memory, drive):
    for optimizer in (memory, drive):
        for param in optimizer.param_groups[0]["params"]:
            param.data = param.data.clone()


def another_rate(memory, drive):
    for optimizer in (memory, drive):
        optimizer.param_groups[0]["lr"] *= 0.5


def loaded(memory, drive):
    for optimizer in (memory, drive):
        optimizer.load_state_dict(optimizer.state_dict())


def without_some_gradients(memory, drive):
    for optimizer in (memory, drive):
        for param in optimizer.param_groups[0]["params"][::2]:
            param.grad = None


def gradients_in_other_memory(memory, drive):
    for optimizer in (memory, drive):
        for param in optimizer.param_groups[0]["params"]:
            if param.dim() == 2:
                param.grad = param.grad.t().contiguous().t()


def another_group(memory, drive):
    for optimizer in (memory, drive):
        param = torch.nn.Parameter(torch.ones(100))
        param.grad = torch.full_like(param, 0.1)
        optimizer.add_param_group({"params": [param]})


@pytest.mark.parametrize("budget", [640_000, LARGE])
@pytest.mark.parametrize("options", [*LOOPS, FUSED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_whatever_happens_between_steps_of_what_is_in_memory(options, dtype, budget, offloaded):
    wanted, params = parameters(dtype=dtype), parameters(dtype=dtype)
    memory = made("AdamW", wanted, options)
    drive = offloaded(made("AdamW", params, options), budget)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=3)
    for happens in (
        moved_parameters,
        another_rate,
        loaded,
        without_some_gradients,
        gradients_in_other_memory,
        another_group,
        lambda *_: drive.state_dict(),
    ):
        if happens is gradients_in_other_memory and options == FUSED:
            continue  # torch's kernels assume that they have the strides of their parameters
        for _ in range(2):
            gradients.give()
            happens(memory, drive)
            memory.step()
            drive.step()
        train(gradients, memory, drive, steps=2)
        assert_equal(wanted, params)
    assert_same_state(memory, drive)
    assert drive.stats()["read_nbytes"] == 0


@pytest.mark.parametrize("budget", [SMALL, 640_000])
def test_gradients_are_let_go_of(budget, offloaded):
    params = parameters()
    drive = offloaded(made("AdamW", params, FUSED), budget)
    train(Gradients(params), drive, steps=3)
    grads = [weakref.ref(param.grad) for param in params]
    drive.zero_grad()
    assert not any(grad() is not None for grad in grads)


def test_what_the_budget_holds_is_not_moved(offloaded):
    params = parameters([(16384,)] * 8)  # 128 KiB of state each, in slots of 64 KiB
    drive = offloaded(made("AdamW", params, FUSED), 12 << 16)
    gradients = Gradients(params)
    train(gradients, drive, steps=3)
    drive.drain()
    before = drive.stats()
    train(gradients, drive, steps=1)
    drive.drain()
    after = drive.stats()
    read = after["read_nbytes"] - before["read_nbytes"]
    assert 0 < read < 0.75 * before["state_nbytes"]


@pytest.mark.parametrize("how", ["channels_last", "transposed", "slice"])
def test_memory_layouts(how, offloaded):
    values = torch.randn(32, 40, 9, 9, generator=torch.Generator().manual_seed(3))

    def param():
        if how == "channels_last":
            return torch.nn.Parameter(values.clone().to(memory_format=torch.channels_last))
        if how == "transposed":
            return torch.nn.Parameter(values.view(64, -1).clone().t())
        return torch.nn.Parameter(values.clone()[:, :20])

    wanted, params = [param(), param()], [param(), param()]
    assert wanted[0].stride() == params[0].stride()
    memory = made("AdamW", wanted, {})
    drive = offloaded(made("AdamW", params, {}), (850 if how != "slice" else 450) << 10)
    train(Gradients(wanted, params), memory, drive)
    assert drive.stats()["read_nbytes"] > 0
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
    strides = memory.state[wanted[0]]["exp_avg"].stride()
    assert drive.read_state(params[0])["exp_avg"].stride() == strides


@pytest.mark.parametrize("how", ["expanded", "transposed", "bfloat16"])
def test_gradients_that_pieces_cannot_use_are_refused_before_anything_changes(how, offloaded):
    wanted, params = parameters([(300, 300)]), parameters([(300, 300)])
    memory, drive = made("AdamW", wanted, {}), offloaded(made("AdamW", params, {}), SMALL)
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive)
    grad = torch.randn(300, 300)
    grad = {"expanded": grad[:1].expand(300, 300), "transposed": grad.t()}.get(how, grad)
    if how == "bfloat16":
        if not hasattr(params[0], "grad_dtype"):
            pytest.skip("this torch has no gradients of another dtype")
        params[0].grad_dtype = None
        grad = grad.bfloat16()
    params[0].grad = grad
    with pytest.raises(ValueError, match=r"param.grad = param.grad.to\(param.dtype\).contiguous"):
        drive.step()
    assert_equal(wanted, params)
    wanted[0].grad = params[0].grad = grad.to(torch.float32).contiguous()
    memory.step()
    drive.step()
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


def test_empty_and_complex_parameters(offloaded):
    def both():
        values = torch.randn(100, 200, dtype=torch.complex64, generator=torch.Generator())
        return [torch.nn.Parameter(values.clone()), torch.nn.Parameter(torch.empty(0, 5))]

    wanted, params = both(), both()
    wanted[0].data.copy_(params[0].data)
    memory, drive = made("AdamW", wanted, {}), offloaded(made("AdamW", params, {}), 400 << 10)
    train(Gradients(wanted, params), memory, drive)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)


def test_momentum_that_begins_late(offloaded):
    wanted, params = parameters(), parameters()
    memory = made("SGD", wanted, {"lr": 0.1})
    drive = offloaded(made("SGD", params, {"lr": 0.1}))
    gradients = Gradients(wanted, params)
    train(gradients, memory, drive, steps=2)
    for optimizer in (memory, drive):
        optimizer.param_groups[0]["momentum"] = 0.9
    train(gradients, memory, drive)
    assert_equal(wanted, params)
    assert_same_state(memory, drive)
