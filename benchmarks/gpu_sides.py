"""Who competes on a GPU, all of them on the same gradients.

`clip_sides` clip (or leave alone) one list; `step_sides` take an optimizer's step under mixed
precision: torch's own order of calls, `unscale_`, clip, `step`, against `GradClipper.step`, both
with fused AdamW. A competitor that cannot take part is a gap with its reason.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.optim import AdamW

import fastclip
from benchmarks.problems import RATES, Problem
from fastclip import backends
from fastclip.benchmarking.measure import Side

BACKENDS = ("triton", "cuda")
# The modules in which apex and TransformerEngine have the norm and the rescaling, and what calls
# them.
MULTI_TENSOR = {
    "apex": ("amp_C", "apex.multi_tensor_apply"),
    "transformer_engine": ("transformer_engine.pytorch.optimizers",) * 2,
}
LOSS_SCALE = 1024.0

Call = Callable[[Problem], Tensor]


def missing() -> dict[str, str]:
    """The competitors that cannot be had here, and why."""
    reasons = {f"fastclip-{name}": backends.available()[name] for name in BACKENDS}
    reasons.update({name: _import_error(*MULTI_TENSOR[name]) for name in MULTI_TENSOR})
    return {name: reason for name, reason in reasons.items() if reason is not None}


def clip_sides(problem: Problem, absent: Mapping[str, str]) -> list[Side]:
    """torch first. apex and TransformerEngine take lists of one dtype only."""
    calls: dict[str, Call] = {"torch": _torch}
    calls.update({f"fastclip-{name}": partial(_fastclip, name) for name in BACKENDS})
    if len({grad.dtype for grad in problem.gradients}) == 1:
        calls.update({name: partial(_multi_tensor, name) for name in MULTI_TENSOR})
    return [
        Side(name, partial(call, problem), check=partial(problem.settle, name))
        for name, call in calls.items()
        if name not in absent
    ]


def step_sides(problem: Problem, absent: Mapping[str, str]) -> list[Side]:
    steps = _Steps(problem)
    calls: dict[str, Callable[[], Tensor]] = {"torch": steps.by_torch}
    calls.update({f"fastclip-{name}": partial(steps.by_fastclip, name) for name in BACKENDS})
    return [
        Side(name, call, steps.before, partial(steps.check, name))
        for name, call in calls.items()
        if name not in absent
    ]


def _torch(problem: Problem) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm, foreach=True)


def _fastclip(name: str, problem: Problem) -> Tensor:
    with fastclip.backend(name):
        return fastclip.clip_grad_norm_(problem.parameters, problem.max_norm)


def _multi_tensor(name: str, problem: Problem) -> Tensor:
    """Norm and rescale as Megatron-LM does them: the host waits for the norm in between."""
    operators, applier = map(importlib.import_module, MULTI_TENSOR[name])
    apply, grads = applier.multi_tensor_applier, problem.gradients
    flag = torch.zeros(1, dtype=torch.int, device=grads[0].device)
    total, _ = apply(operators.multi_tensor_l2norm, flag, [grads], False)
    coef = problem.max_norm / (float(total) + 1e-6)
    if coef < 1:
        apply(operators.multi_tensor_scale, flag, [grads, grads], coef)
    return total


class _Steps:
    """One optimizer and one scaler for all sides; gradients scaled by `LOSS_SCALE`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        for parameter in problem.parameters:
            parameter.data.fill_(1.0)
        self.device = problem.gradients[0].device.type
        self.originals = [grad.clone() for grad in problem.gradients]
        self.max_norm = problem.max_norm / LOSS_SCALE
        self.optimizer = AdamW(problem.parameters, lr=1e-6, fused=True)
        self.clipper = fastclip.GradClipper(problem.parameters, self.max_norm)
        self.scaler = self._scaler()

    def by_torch(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.problem.parameters, self.max_norm, foreach=True)
        self.scaler.step(self.optimizer)
        return norm

    def by_fastclip(self, name: str) -> Tensor:
        with fastclip.backend(name):
            return self.clipper.step(self.optimizer, self.scaler).total_norm

    def before(self) -> None:
        """Fresh gradients, and a scaler that has unscaled nothing."""
        torch._foreach_copy_(self.problem.gradients, self.originals)
        self.scaler = self._scaler()

    def check(self, name: str, norm: Tensor) -> None:
        """The true norm came back, and the step was not skipped."""
        share = float(norm) / self.max_norm
        right = 2.0 if self.problem.clips else 0.5
        if not 0.9 < share / right < 1.1:
            raise RuntimeError(
                f"{name} returned {share:g} times the threshold, where {right} would be right"
            )

    def _scaler(self) -> torch.amp.GradScaler:
        scaler = torch.amp.GradScaler(self.device, init_scale=LOSS_SCALE)
        scaler.scale(torch.ones((), device=self.device))
        return scaler


def _import_error(*modules: str) -> str | None:
    for module in modules:
        try:
            importlib.import_module(module)
        # A package of somebody else's, built for another CUDA or torch, may fail in any way: the
        # table names how, and the run goes on.
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def rates(n_bytes: int, device: str) -> list[Side]:
    """torch's own operations on a float32 tensor of `n_bytes`."""
    source = torch.ones(n_bytes // 4, device=device)
    target = torch.empty_like(source)
    return [Side(name, partial(operation, source, target)) for name, operation in RATES.items()]
