"""The functions, as a user's script calls them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fastclip
from fastclip import GradStats, LayerStats, RankStats, backends

model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
weight = nn.Parameter(torch.zeros(3))


def chosen() -> Iterator[nn.Parameter]:
    yield from model.parameters()


def unnamed() -> Iterator[Tensor]:
    yield weight


assert_type(fastclip.clip_grad_norm_(model, 1.0), Tensor)
assert_type(fastclip.clip_grad_norm_(model.parameters(), max_norm=1), Tensor)
assert_type(fastclip.clip_grad_norm_(list(model.parameters()), torch.tensor(1.0)), Tensor)
assert_type(fastclip.clip_grad_norm_(model.named_parameters(), 1.0, "inf"), Tensor)
assert_type(fastclip.clip_grad_norm_(chosen(), 1.0, 3, error_if_nonfinite=True), Tensor)
assert_type(fastclip.clip_grad_norm_(unnamed(), 1.0, foreach=None), Tensor)
assert_type(fastclip.clip_grad_norm_(weight, 1.0), Tensor)

grads = [parameter.grad for parameter in model.parameters()]  # list[Tensor | None]
assert_type(fastclip.get_total_norm(grads), Tensor)
assert_type(fastclip.get_total_norm([torch.ones(3)], 1.0), Tensor)
total = fastclip.get_total_norm(grads)
fastclip.clip_grads_with_norm_(model, 1.0, total)
fastclip.clip_grads_with_norm_(model.parameters(), torch.tensor(1.0), 3.0)
fastclip.clip_grad_value_(model, 0.5)

stats = fastclip.grad_stats(model)
assert_type(stats, GradStats)
assert_type(stats.names, tuple[str, ...])
assert_type(stats.numel, tuple[int, ...])
assert_type(stats.total_norm, Tensor)
assert_type(stats.norms, Tensor)
assert_type(stats.nonfinite_count, Tensor)
assert_type(stats.found_inf, Tensor)

host = stats.cpu()
assert_type(host, GradStats)
assert_type(host.layers(), list[LayerStats])
assert_type(host.worst(3, by="max_abs"), list[LayerStats])
assert_type(host.worst()[0].norm, float)
assert_type(host.nonfinite(), list[str])
assert_type(host.by_rank(), list[RankStats])
assert_type(host.grouped(depth=2), GradStats)
assert_type(host.grouped(lambda name: name.partition(".")[0]), GradStats)
assert_type(str(host), str)

with fastclip.backend("reference") as backend:
    assert_type(backend, backends.Backend)
assert_type(backends.explain(), dict[str, tuple[str, str]])
assert_type(backends.available(), dict[str, str | None])
assert_type(fastclip.__version__, str)
