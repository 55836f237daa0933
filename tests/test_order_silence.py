"""The order guard says nothing about loops that are right. Warnings are errors in all tests."""

import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import fastclip
from tests.order_loops import CLIPS, Clip, Training

STEPS = 4


@pytest.fixture(params=[True, False], ids=["to-none", "to-zero"])
def set_to_none(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


@pytest.fixture(params=["torch-norm", "torch-value", "fastclip-norm"])
def clip(request: pytest.FixtureRequest) -> Clip:
    return CLIPS[request.param]


@pytest.fixture
def t(clip: Clip, set_to_none: bool) -> Iterator[Training]:
    """A training whose optimizer is guarded."""
    training = Training(clip)
    training.set_to_none = set_to_none
    with fastclip.order_guard(training.optimizer):
        yield training


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam-loop": functools.partial(torch.optim.Adam, foreach=False),
    "adam-foreach": functools.partial(torch.optim.Adam, foreach=True),
    "adam-fused": functools.partial(torch.optim.Adam, fused=True),
    "sgd-fused": functools.partial(torch.optim.SGD, fused=True),
    "adagrad-fused": functools.partial(torch.optim.Adagrad, fused=True),
}


@pytest.mark.parametrize("told", [True, False], ids=["told-of-scaler", "not-told"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_accumulation_with_skipped_steps(
    make: Callable[..., torch.optim.Optimizer], scaled: bool, told: bool, set_to_none: bool
) -> None:
    t = Training(scaled=scaled, make=make)
    t.set_to_none = set_to_none
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    t.optimizer.register_step_post_hook(count)
    with fastclip.order_guard(t.optimizer, t.scaler if told else None):
        for step in range(2 * STEPS):
            for _ in range(3):
                t.backward(math.inf if scaled and step < STEPS else 1.0)
            t.scaler.unscale_(t.optimizer)
            t.clip(t.params, 1.0)
            t.scaler.step(t.optimizer)
            t.scaler.update()
            t.zero_grad()
    assert steps >= STEPS
    if scaled and "fused" not in str(make):
        assert steps == STEPS  # the others were skipped


def test_a_step_that_the_loop_leaves_out(t: Training) -> None:
    for step in range(STEPS):
        t.backward()
        t.clip(t.params, 1.0)
        if step % 2:
            t.optimizer.step()
        t.zero_grad()


def test_zeroed_gradients_that_the_next_backward_leaves_out(set_to_none: bool) -> None:
    parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    with fastclip.order_guard(optimizer):
        for step in range(STEPS):
            sum(part(torch.ones(4)).sum() for part in parts[: 2 - step % 2]).backward()
            clip_grad_norm_(parts.parameters(), 1.0)
            optimizer.zero_grad(set_to_none=set_to_none)


def test_gradients_kept_over_steps(t: Training) -> None:
    for _ in range(STEPS):
        t.backward()
        t.clip(t.params, 1.0)
        t.optimizer.step()


def test_clipped_twice_in_a_row(t: Training) -> None:
    for _ in range(STEPS):
        t.backward()
        fastclip.clip_grad_norm_(t.params, 1.0)
        t.clip(t.params, 0.1)
        clip_grad_value_(t.params, 0.01)
        t.loss()  # recorded, and without a backward
        t.clip(t.params, 0.1)
        t.optimizer.step()
        t.clip(t.params, 0.1)  # too late, but this step was clipped
        t.zero_grad()


def test_arithmetic_between(t: Training) -> None:
    for _ in range(STEPS):
        t.backward()
        for grad in t.grads():
            grad.div_(2)
        t.clip(t.params, 1.0)
        for grad in t.grads():
            grad.mul_(0.5)
        t.clip(t.params, 1.0)
        for grad in t.grads():
            grad.add_(torch.randn_like(grad))
        t.optimizer.step()
        t.zero_grad()


@pytest.mark.parametrize("limit", [math.inf, torch.tensor(math.inf)], ids=["float", "tensor"])
def test_measuring(limit: Any, set_to_none: bool) -> None:
    t = Training(scaled=True)
    t.set_to_none = set_to_none
    with fastclip.order_guard(t.optimizer, t.scaler):
        for _ in range(STEPS):
            for _ in range(3):
                t.backward()
                clip_grad_norm_(t.params, limit)
                fastclip.clip_grad_norm_(t.params, limit)
                fastclip.grad_stats(t.params)
            t.scaler.step(t.optimizer)
            t.scaler.update()
            clip_grad_norm_(t.params, limit)
            torch.nn.utils.get_total_norm(t.grads())
            fastclip.get_total_norm(t.grads())
            t.zero_grad()


def test_a_scaler_that_does_not_scale() -> None:
    t = Training()
    t.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with fastclip.order_guard(t.optimizer, t.scaler):
        t.backward()
        t.clip(t.params, 1.0)
        t.scaler.step(t.optimizer)


def test_no_gradients(set_to_none: bool) -> None:
    t = Training()
    t.params[0].requires_grad_(False)
    with fastclip.order_guard(t.optimizer):
        clip_grad_norm_(t.params, 1.0)
        t.optimizer.step()
        for _ in range(STEPS):
            t.backward()
            clip_grad_norm_(iter(t.params), 1.0)
            t.optimizer.step()
            t.optimizer.zero_grad(set_to_none=set_to_none)
            if set_to_none:
                clip_grad_norm_(t.params, 1.0)


def test_parameters_added_later(t: Training) -> None:
    more = nn.Linear(4, 4)
    for step in range(STEPS):
        t.backward()
        more(torch.randn(4)).sum().backward()
        t.clip([*t.params, *more.parameters()], 1.0)
        t.optimizer.step()
        t.zero_grad()
        if step == 1:
            t.optimizer.add_param_group({"params": list(more.parameters())})
        if step == 2:
            t.optimizer.param_groups[0]["params"][2:] = []


@pytest.mark.parametrize("both", [True, False], ids=["guard-of-both", "guard-of-one"])
def test_two_networks(both: bool, clip: Clip, set_to_none: bool) -> None:
    """The generator's backward also writes the discriminator's gradients; one clip lists both."""
    d, g = Training(clip), Training(clip)
    d.set_to_none = g.set_to_none = set_to_none
    g.model.append(nn.Linear(1, 4))
    g.params = list(g.model.parameters())
    g.optimizer = torch.optim.SGD(g.params, lr=0.01)
    with fastclip.order_guard([d.optimizer, g.optimizer] if both else d.optimizer):
        for through_d in (True, False, True, False):
            d.zero_grad()
            for fake in (torch.randn(8, 4), g.model(torch.randn(8, 4)).detach()):
                d.model(fake).mean().backward()
            if through_d:
                d.clip(d.params, 1.0)
            d.optimizer.step()
            g.zero_grad()
            fake = g.model(torch.randn(8, 4))
            (d.model(fake) if through_d else fake).mean().backward()
            g.clip([*d.params, *g.params], 1.0)
            g.optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SGD])
def test_closures(make: type[torch.optim.Optimizer], clip: Clip, set_to_none: bool) -> None:
    t = Training(clip, make=make)
    t.set_to_none = set_to_none

    def closure() -> float:
        t.zero_grad()
        loss = t.loss()
        loss.backward()
        t.clip(t.params, 1.0)
        return loss.item()

    with fastclip.order_guard(t.optimizer):
        for step in range(STEPS):
            t.backward()
            t.clip(t.params, 1.0)
            t.backward()  # for nothing: the closure starts anew
            t.optimizer.step(closure) if step % 2 else t.optimizer.step(closure=closure)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpointing(reentrant: bool, t: Training) -> None:
    for _ in range(STEPS):
        for _ in range(2):
            x = torch.randn(8, 4, requires_grad=True)
            for layer in t.model:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            x.sum().backward()
        t.clip(t.params, 1.0)
        t.optimizer.step()
        t.zero_grad()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("bucket_view", [True, False], ids=["bucket-views", "copies"])
@pytest.mark.usefixtures("process_group")
def test_ddp(bucket_view: bool, set_to_none: bool) -> None:
    t = Training()
    t.set_to_none = set_to_none
    model = nn.parallel.DistributedDataParallel(t.model, gradient_as_bucket_view=bucket_view)
    with fastclip.order_guard(t.optimizer):
        for step in range(STEPS):
            with model.no_sync():
                for _ in range(2):
                    model(torch.randn(8, 4)).sum().backward()
            model(torch.randn(8, 4)).sum().backward()
            t.clip(t.params, 1.0)
            if step % 2:
                t.optimizer.step()
            t.zero_grad()


def test_gradients_written_without_counting(t: Training) -> None:
    """As a CUDA graph does when it replays a backward."""
    t.backward()
    for _ in range(STEPS):
        for grad in t.grads():
            grad.data.copy_(torch.randn_like(grad))
        t.clip(t.params, 1.0)
        t.optimizer.step()


def test_gradients_that_do_not_count(clip: Clip) -> None:
    t = Training(clip)
    with torch.inference_mode(), fastclip.order_guard(t.optimizer):
        for p in t.params:
            p.grad = torch.randn_like(p)
        t.optimizer.step()
        clip(t.params, 1.0)


def test_sparse_gradients(set_to_none: bool) -> None:
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with fastclip.order_guard(optimizer):
        for step in range(2 * STEPS):
            for _ in range(2):
                table(torch.randint(20, (9,))).square().sum().backward()
            fastclip.clip_grad_norm_(table.parameters(), 0.1)
            if step % 2:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


def test_one_optimizer_per_parameter(clip: Clip) -> None:
    """Clipped and stepped while the backward still runs."""
    t = Training()
    optimizers = {id(p): torch.optim.SGD([p], lr=0.1) for p in t.params}

    def step(p: torch.Tensor) -> None:
        clip([p], 1.0)
        optimizers[id(p)].step()
        optimizers[id(p)].zero_grad()

    for p in t.params:
        p.register_post_accumulate_grad_hook(step)
    with fastclip.order_guard(optimizers.values()):
        for _ in range(STEPS):
            t.backward()


def test_clip_and_step_in_another_thread(t: Training) -> None:
    """What autograd recorded here says nothing of what it recorded there."""

    def clip_there() -> None:
        t.loss()
        t.clip(t.params, 1.0)

    for _ in range(STEPS):
        t.backward()
        thread = threading.Thread(target=clip_there)
        thread.start()
        thread.join()
        for grad in t.grads():
            grad.mul_(0.5)
        t.optimizer.step()
        t.zero_grad()
