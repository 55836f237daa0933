"""A real model on real data: what one bad batch does to it, with and without clipping.

The 1,797 scanned digits that come with scikit-learn, a small float32 network, plain SGD with
momentum. Seeds are fixed and private: nothing outside sees a changed random state.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fastclip
from fastclip.commands import InputError

BAD_STEP = 40  # early: the batch still holds mistakes, so its gradient is not zero
BAD_FACTOR = 1e4
MAX_NORM = 1.0
BATCH = 64
EPOCHS = 20
HELD_OUT = 360


class Data(NamedTuple):
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


class Setting(NamedTuple):
    name: str
    bad_batch: bool
    max_norm: float  # inf measures only


class Result(NamedTuple):
    name: str
    before: float  # accuracy on the held-out digits before the bad step, ...
    after: float  # ... right after it, ...
    final: float  # ... and at the end
    stats_before: fastclip.GradStats  # gradients one step before the bad one
    stats_bad: fastclip.GradStats  # gradients of the bad step, before clipping


SETTINGS = (
    Setting("no bad batch", False, float("inf")),
    Setting("bad batch, no clipping", True, float("inf")),
    Setting("bad batch, clipped to 1.0", True, MAX_NORM),
)


def load() -> Data:
    """The digits, scaled to 0..1 and split with a fixed seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            f"the digits need scikit-learn ({error}); "
            'install it with `pip install "torch-fastclip[demo]"`'
        ) from error
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return Data(x[train], y[train], x[test], y[test])


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            OrderedDict(
                hidden1=nn.Linear(64, 64),
                relu1=nn.ReLU(),
                hidden2=nn.Linear(64, 32),
                relu2=nn.ReLU(),
                head=nn.Linear(32, 10),
            )
        )


def batches(data: Data) -> list[Tensor]:
    """The rows of every batch of the training, in order; the same for every setting."""
    generator = torch.Generator().manual_seed(1)
    n = len(data.train_x)
    return [
        rows for _ in range(EPOCHS) for rows in torch.randperm(n, generator=generator).split(BATCH)
    ]


def accuracy(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return (model(data.test_x).argmax(1) == data.test_y).float().mean().item()


@contextmanager
def one_thread() -> Iterator[None]:
    """For matrices this small a second thread only waits (5 s of work became 20 s on two cores).

    It also makes the numbers the same for every thread count.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def train(setting: Setting, data: Data) -> Result:
    """Trains from scratch and reports on the bad step (an ordinary one if none is bad)."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accuracies: list[float] = []
    stats: list[fastclip.GradStats] = []
    for step, rows in enumerate(batches(data)):
        x, y = data.train_x[rows], data.train_y[rows]
        if step == BAD_STEP and setting.bad_batch:
            x = x * BAD_FACTOR
        if step in (BAD_STEP, BAD_STEP + 1):
            accuracies.append(accuracy(model, data))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step in (BAD_STEP - 1, BAD_STEP):
            stats.append(fastclip.grad_stats(model))
        fastclip.clip_grad_norm_(model.parameters(), setting.max_norm)
        optimizer.step()
    before, after = accuracies
    stats_before, stats_bad = stats
    return Result(setting.name, before, after, accuracy(model, data), stats_before, stats_bad)
