"""The rules: each against a plain implementation as its authors wrote it, and against a fixed
threshold.

All gradients are left as they are. A rule that goes by norms reads them once, as the fixed
threshold does. AGC has to read the parameters too, and cannot do it in less than twice the bytes.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import fastclip
from fastclip.benchmarking.checks import WrongResult, require_norm
from fastclip.benchmarking.contest import OURS, Contest, Row, Size
from fastclip.benchmarking.measure import Side
from fastclip.benchmarking.peers import Peer
from fastclip.benchmarking.workloads import Clip, clip
from fastclip.rules import AGC, AdaGC, AutoClip, LogZ, Rule, ZClip
from tests import reference_rules as reference

AT_MOST = 1.1  # times the fixed threshold
FIXED = "fixed threshold"

# So lax that none of them clips gradients that do not change.
RULES: dict[str, Callable[[], Rule]] = {
    "AGC": partial(AGC, clip_factor=10.0),
    "AdaGC": partial(AdaGC, max_norm=None),
    "ZClip": partial(ZClip, max_norm=None),
    "LogZ": LogZ,
    "AutoClip": AutoClip,
}
READS = {name: 2 if name == "AGC" else 1 for name in RULES}  # gradients, and parameters


def _problem(size: Size) -> Clip:
    problem = clip(size.shapes("gpt2-small"))
    for parameter in problem.parameters:
        parameter.data.fill_(1.0)  # AGC reads them
    return problem


def _ours(problem: Clip, rule: Rule | None) -> Callable[[], object]:
    if rule is None:
        return fastclip.GradClipper(problem.parameters, problem.max_norm).clip_
    return fastclip.GradClipper(problem.parameters, rule=rule).clip_


def _against_plain(size: Size, rule: str) -> Contest:
    problem = _problem(size)
    contest = _contest(problem, "plain", PLAIN[rule](problem.parameters), RULES[rule]())
    if rule not in PEERS:
        return contest
    peer = PEERS[rule]
    if reason := peer.missing():
        return replace(contest, gaps={peer.name: reason})
    check = partial(require_untouched, peer.name, problem)
    sides = [*contest.sides, Side(peer.name, peer.prepare(problem), None, check)]
    return replace(contest, sides=sides, notes={peer.name: peer.note()})


def _against_fixed(size: Size, rule: str) -> Contest:
    problem = _problem(size)
    return _contest(problem, FIXED, _ours(problem, None), RULES[rule]())


def _contest(problem: Clip, name: str, rival: Callable[[], object], rule: Rule) -> Contest:
    sides = [
        Side(name, rival, None, partial(require_untouched, name, problem)),
        Side(OURS, _ours(problem, rule), None, partial(require_untouched, OURS, problem)),
    ]
    return Contest(sides, problem.n_bytes, problem.n_tensors)


def require_untouched(name: str, problem: Clip, result: object) -> None:
    """Nothing clipped, and by fastclip's own account measured; the others return nothing."""
    if isinstance(result, fastclip.GradStats):
        require_norm(name, problem, result.total_norm)
        if bool((result.coef != 1).any()):
            raise WrongResult(f"{name} clipped: coefficients down to {float(result.coef.min()):g}")
    elif name in (OURS, FIXED):
        raise WrongResult(f"{name} returned {result!r}, where statistics are right")
    if problem.left(whole=problem.is_first(name)) != (1.0, 1.0):
        raise WrongResult(f"{name} changed the gradients")


def _by_total(rule: reference.Global, parameters: Sequence[Tensor]) -> None:
    """As the scripts of ZClip and AutoClip do: the host waits for each norm."""
    grads = [p.grad for p in parameters if p.grad is not None]
    coef, _ = rule.decide(math.hypot(*(grad.norm().item() for grad in grads)))
    if coef < 1:
        for grad in grads:
            grad.mul_(coef)


def _by_tensor(rule: reference.AdaGC, parameters: Sequence[Tensor]) -> None:
    grads = {key: p.grad for key, p in enumerate(parameters) if p.grad is not None}
    decided = rule.decide({key: grad.norm().item() for key, grad in grads.items()})
    for key, (coef, _) in decided.items():
        if coef < 1:
            grads[key].mul_(coef)


@torch.no_grad()
def _by_unit(clip_factor: float, eps: float, parameters: Sequence[Tensor]) -> None:
    """AGC with one tensor operation after the other, nothing waited for."""
    for parameter in parameters:
        if (grad := parameter.grad) is None:
            continue
        limit = _unit_norm(parameter).clamp_(min=eps).mul_(clip_factor)
        norm = _unit_norm(grad)
        clipped = grad * (limit / norm.clamp(min=1e-6))
        grad.copy_(torch.where(norm < limit, grad, clipped))


def _unit_norm(x: Tensor) -> Tensor:
    return x.norm(dim=tuple(range(1, x.dim())), keepdim=True) if x.dim() > 1 else x.norm()


PLAIN: dict[str, Callable[[Sequence[Tensor]], Callable[[], object]]] = {
    "AGC": lambda parameters: partial(_by_unit, 10.0, 1e-3, parameters),
    "AdaGC": lambda parameters: partial(_by_tensor, reference.AdaGC(max_norm=None), parameters),
    "ZClip": lambda parameters: partial(_by_total, reference.ZClip(max_norm=None), parameters),
    "LogZ": lambda parameters: partial(_by_total, reference.LogZ(), parameters),
    "AutoClip": lambda parameters: partial(_by_total, reference.AutoClip(), parameters),
}


def _timm(problem: Clip) -> Callable[[], object]:
    clip = importlib.import_module("timm.utils").adaptive_clip_grad
    return partial(clip, problem.parameters, clip_factor=10.0, eps=1e-3)


PEERS = {"AGC": Peer("timm", "utils.adaptive_clip_grad", _timm, ("timm",), "timm.utils")}

SHARE = 0.4  # of the time of a row: there are ten of these

ROWS = [
    *(
        Row(
            f"rule-{name.lower()}",
            f"{name} to its plain implementation",
            partial(_against_plain, rule=name),
            reads=READS[name],
            share=SHARE,
            rivals=("plain", *(peer.name for rule, peer in PEERS.items() if rule == name)),
        )
        for name in RULES
    ),
    *(
        Row(
            f"rule-{name.lower()}-fixed",
            f"{name} to a fixed threshold",
            partial(_against_fixed, rule=name),
            at_least=1 / (AT_MOST * READS[name]),
            reads=READS[name],
            share=SHARE,
            rivals=(FIXED,),
        )
        for name in RULES
    ),
]
