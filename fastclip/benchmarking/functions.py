"""The rows of the functions that replace those of torch.nn.utils."""

import math
from collections.abc import Callable
from functools import partial

import torch

import fastclip
from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import Side
from fastclip.benchmarking.workloads import (
    Clip,
    clip,
    gradients,
    many,
    plain_statistics,
    require_right,
)

STATISTICS = ("norms", "max_abs", "nan_count", "inf_count", "zero_count")


def _gpt2(
    size: Size, dtype: torch.dtype, *, clips: bool = False, norm_type: float = 2.0
) -> Contest:
    return _clip_contest(clip(size.gpt2, dtype, clips=clips, norm_type=norm_type))


def _small(size: Size, elements: int, *, clips: bool = False) -> Contest:
    return _clip_contest(clip(many(size.n_small, elements), clips=clips))


def _clip_contest(problem: Clip) -> Contest:
    sides = [
        _clip_side("torch", torch.nn.utils.clip_grad_norm_, problem),
        _clip_side(OURS, fastclip.clip_grad_norm_, problem),
    ]
    return Contest(sides, problem.n_bytes)


def _clip_side(name: str, function: Callable[..., torch.Tensor], problem: Clip) -> Side:
    call = partial(function, problem.parameters, problem.max_norm, problem.norm_type)
    return Side(name, call, problem.restore, partial(require_right, name, problem))


def _statistics(size: Size) -> Contest:
    problem = clip(size.gpt2)
    grads = problem.gradients
    sides = [
        Side("torch", partial(plain_statistics, grads)),
        Side(OURS, partial(_our_statistics, problem.parameters)),
    ]
    return Contest(sides, problem.n_bytes)


def _our_statistics(parameters: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    stats = fastclip.grad_stats(parameters)
    return {name: getattr(stats, name) for name in STATISTICS}


def _read_rate(size: Size) -> Contest:
    problem = clip(size.gpt2)
    (big,) = gradients([(sum(g.numel() for g in problem.gradients),)])
    sides = [
        Side("sum", big.sum),
        _clip_side(OURS, fastclip.clip_grad_norm_, problem),
        Side("aminmax", big.aminmax),
    ]
    return Contest(sides, problem.n_bytes)


def _rows() -> list[Row]:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    untouched = [(f32, "float32", 2.2), (bf16, "bfloat16", 2.6), (f16, "float16", 6.0)]
    clipped = [(f32, "float32", 1.05), (bf16, "bfloat16", 1.2), (f16, "float16", 2.8)]
    return [
        *(
            Row(
                f"gpt2-{name}",
                f"GPT-2 small, {name}, not clipped",
                partial(_gpt2, dtype=dtype),
                target,
                reads=1,
            )
            for dtype, name, target in untouched
        ),
        *(
            Row(
                f"gpt2-{name}-clipped",
                f"GPT-2 small, {name}, clipped",
                partial(_gpt2, dtype=dtype, clips=True),
                target,
                reads=1,
                writes=1,
            )
            for dtype, name, target in clipped
        ),
        Row(
            "gpt2-float32-inf",
            "GPT-2 small, float32, inf norm",
            partial(_gpt2, dtype=f32, norm_type=math.inf),
            at_least=8.0,
            reads=1,
        ),
        Row("small-1024", "2,000 x 1,024, float32", partial(_small, elements=1024), 6.0),
        Row(
            "small-1024-clipped",
            "2,000 x 1,024, float32, clipped",
            partial(_small, elements=1024, clips=True),
        ),
        Row("small-1", "2,000 x 1, float32", partial(_small, elements=1), 5.0),
        Row("statistics", "five statistics per tensor, float32", _statistics, 20.0, reads=1),
        Row("read-rate", "read rate to best of sum, aminmax", _read_rate, 0.85, limit=1.0),
    ]


ROWS = _rows()
