"""Which rank's gradients were bad, under ``torch.nn.parallel.DistributedDataParallel``.

DDP averages gradients during backward: once anybody sees them, a NaN of one rank is a NaN of all. A
communication hook sees each bucket before that. This one measures it, keeps the table of statistics
on its device and hands the bucket on: no communication and no wait until somebody asks.

What is measured is what DDP has in the bucket: this rank's gradient, accumulated over micro-batches
under ``no_sync``, still multiplied by a loss scale, and not yet divided by the number of ranks.
Parameters that this rank did not use have zeros.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported, unmarked
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fastclip import passes
from fastclip import table as tables
from fastclip.checks import norm_order
from fastclip.gradients import Gradients, Listed, unwrapped
from fastclip.ranks import RankStats, said
from fastclip.stats import GradStats

Hook = Callable[[Any, GradBucket], Future[Tensor]]


class _Part(NamedTuple):
    """What was measured of one bucket."""

    names: tuple[str, ...]
    numel: tuple[int, ...]
    table: Tensor
    dtype: torch.dtype  # of the norms


class _Step(NamedTuple):
    """What was measured of a backward, or the first error of doing so."""

    parts: list[_Part]
    error: Exception | None


class _Report(NamedTuple):
    """What a rank says when it is asked: of which step, and what; or why not."""

    step: int
    stats: RankStats | None
    failure: str


class Attribution:
    """What each rank's gradients were before DDP averaged them, of the last steps.

    >>> model = DistributedDataParallel(module)
    >>> attribution = fastclip.distributed.Attribution(model)
    >>> model.register_comm_hook(attribution, fastclip.distributed.attribution_hook)

    A step is a backward that synchronises; those under ``no_sync`` are none. Steps are numbered
    from 0 as they come; a negative number counts from the last, -1, back.

    Args:
        model: the model to register the hook with.
        history: how many steps are kept, 40 bytes a parameter each.
        inner: what to do with a bucket once it is measured: the ``(state, hook)`` that would be
            passed to ``register_comm_hook``, say of ``torch.distributed.algorithms``. None
            averages, with the very results of DDP without a hook.
        norm_type: the order p of the norms, any number or ``"inf"``.

    Raises:
        TypeError: `model` is not a DistributedDataParallel, or `inner` no such pair.
        ValueError: `history` is less than 1, or `norm_type` is NaN.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        history: int = 16,
        inner: tuple[Any, Hook] | None = None,
        norm_type: float | str = 2.0,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"model must be a DistributedDataParallel, got {type(model).__name__}. FSDP2 has "
                "no such hook: its shards are averages of all ranks, so GradStats.by_rank tells "
                "who holds a NaN and not whose it was; for that compare the losses of the ranks"
            )
        if history < 1:
            raise ValueError(f"history must be at least 1, got {history}")
        self.norm_type = norm_order(norm_type)
        self.steps = 0
        self._names: dict[Tensor, str] = {
            each: name for name, each in unwrapped(model).named_parameters()
        }
        self._group: dist.ProcessGroup = model.process_group
        self._inner = (self._group, _average) if inner is None else _state_and_hook(inner)
        self._open: list[_Part] = []  # of a backward that is going on
        self._failed: Exception | None = None  # what went wrong in it first
        self._kept: deque[_Step] = deque(maxlen=history)

    @torch.no_grad()
    def record(self, bucket: GradBucket) -> None:
        """Measure a bucket, of which nothing is changed. For hooks: a step ends with its last.

        An error of that is raised when the step is asked about: here it would keep this rank from
        the all-reduce that the others wait in.
        """
        try:
            self._open.append(self._measured(bucket))
        except Exception as error:
            # the frames of a traceback would keep the gradients
            self._failed = self._failed or error.with_traceback(None)
        if bucket.is_last():
            self._kept.append(_Step(self._open, self._failed))
            self._open, self._failed = [], None
            self.steps += 1

    def _measured(self, bucket: GradBucket) -> _Part:
        names = [self._name(parameter) for parameter in bucket.parameters()]
        buffer = bucket.buffer()
        tensors = [buffer] if buffer.is_sparse else bucket.gradients()
        found, table = passes.measure(Listed(tensors, names), self.norm_type)
        dtype = tables.result_dtype(found.tensors)
        return _Part(found.names, found.numel, table, dtype)

    def local(self, step: int = -1) -> GradStats:
        """The statistics of this rank's gradients, in the order of the model's parameters.

        Nothing is communicated, and nothing waits for the device.

        Raises:
            RuntimeError: there has been no step; or what went wrong when it was measured.
            IndexError: the step is none of those kept.
        """
        number = self._number(step)
        parts, error = self._kept[number - self.steps]
        if error is not None:
            raise RuntimeError(f"step {number} could not be measured: {error}") from error
        rows = {
            name: (numel, row)
            for part in parts
            for name, numel, row in zip(part.names, part.numel, part.table.unbind(), strict=True)
        }
        names = tuple(name for name in self._names.values() if name in rows)
        numel, lines = zip(*(rows[name] for name in names), strict=True)
        table = torch.stack([line.to(lines[0].device) for line in lines])
        wide = any(part.dtype == torch.float64 for part in parts)
        dtype = torch.float64 if wide else torch.float32
        without_tensors = Gradients(names, numel, [], (1,) * len(names), {})
        return GradStats.measured(without_tensors, table, self.norm_type, dtype)

    def by_rank(self, step: int = -1) -> list[RankStats]:
        """What each rank's gradients were: norm, maximum, and which were not finite.

        A collective of the model's process group: every rank has to call it, for the same step. It
        waits for the device.

        Raises:
            RuntimeError: there has been no step; ranks asked for different steps; a rank could not
                answer; or a rank was not there. If any rank raises, all do.
            IndexError: the step is none of those kept.
        """
        mine, failure = _Report(-1, None, ""), None
        try:
            mine = _Report(self._number(step), self._rank_stats(step), "")
        except Exception as error:  # raised below: the others are waiting for an answer
            failure, mine = error, _Report(-1, None, str(error) or type(error).__name__)
        reports = self._gather(mine)
        if failure is not None:
            raise failure
        for rank, report in reports.items():
            if report.failure:
                raise RuntimeError(f"rank {rank} has no answer: {report.failure}")
        if len({report.step for report in reports.values()}) > 1:
            asked = ", ".join(f"{each.step} by rank {rank}" for rank, each in reports.items())
            raise RuntimeError(f"ranks asked for different steps: {asked}")
        return [report.stats for report in reports.values() if report.stats is not None]

    def _number(self, step: int) -> int:
        """The number of a step that is kept."""
        if not self.steps:
            raise RuntimeError(
                "no step has been recorded: model.register_comm_hook(attribution, "
                "fastclip.distributed.attribution_hook) has to come before the backward, and a "
                "backward under no_sync() does not count"
            )
        number = step if step >= 0 else self.steps + step
        first = self.steps - len(self._kept)
        if not first <= number < self.steps:
            raise IndexError(
                f"step {step} is not kept: of {self.steps} so far, {first} to {self.steps - 1} "
                f"are (history={self._kept.maxlen})"
            )
        return number

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            raise RuntimeError(
                f"a bucket has a parameter of shape {tuple(parameter.shape)} that is none of this "
                "attribution's model: register it with the model that it was made for"
            )
        return self._names[parameter]

    def _rank_stats(self, step: int) -> RankStats:
        (stats,) = self.local(step).cpu().by_rank()
        return stats

    def _gather(self, mine: _Report) -> dict[int, _Report]:
        """The reports of all, by rank."""
        ranks = dist.get_process_group_ranks(self._group)
        reports: list[Any] = [None] * len(ranks)
        try:
            dist.all_gather_object(reports, mine, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"gathering the gradient statistics of {said(ranks)} failed: {error}"
            ) from error
        return dict(zip(ranks, reports, strict=True))


def attribution_hook(state: Attribution, bucket: GradBucket) -> Future[Tensor]:
    """For ``model.register_comm_hook(attribution, attribution_hook)``: measure, then go on."""
    state.record(bucket)
    inner_state, inner = state._inner
    return inner(inner_state, bucket)


def _average(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    # DDP without a hook multiplies by the inverse; allreduce_hook divides, which rounds otherwise
    # unless the number of ranks is a power of two.
    buffer = bucket.buffer().mul_(1 / group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _state_and_hook(inner: Sequence[Any]) -> tuple[Any, Hook]:
    if not isinstance(inner, tuple) or len(inner) != 2 or not callable(inner[1]):
        raise TypeError(
            "inner must be a pair (state, hook), in the order of register_comm_hook, "
            f"got {inner!r:.80}"
        )
    return inner[0], inner[1]
