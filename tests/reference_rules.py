"""The rules in plain Python, one number after the other, as their formulas are written.

What `fastclip.rules` is tested against, and the baselines of its benchmarks: `clip_` takes
parameters, waits for each norm, and multiplies the gradients of all or of one.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def norm(x: Tensor) -> float:
    return x.double().norm().item()


class Global:
    """A rule with one coefficient."""

    def decide(self, total: float) -> tuple[float, float]:
        """The coefficient and the threshold of a step with that norm."""
        raise NotImplementedError

    def clip_(self, parameters: Iterable[Tensor]) -> float:
        grads = [p.grad for p in parameters if p.grad is not None]
        total = math.hypot(*(norm(grad) for grad in grads))
        coef, _ = self.decide(total)
        if coef < 1:
            for grad in grads:
                grad.mul_(coef)
        return total


class ZClip(Global):
    """bluorion-com/ZClip with its default options."""

    def __init__(
        self,
        alpha: float = 0.97,
        z: float = 2.5,
        warmup: int = 25,
        max_norm: float | None = 1.0,
        eps: float = 1e-6,
    ) -> None:
        self.alpha, self.z, self.warmup, self.eps = alpha, z, warmup, eps
        self.cap = math.inf if max_norm is None else max_norm
        self.first: list[float] = []
        self.mean = self.var = math.nan

    def decide(self, total: float) -> tuple[float, float]:
        if len(self.first) < self.warmup:
            self.first.append(total)
            if len(self.first) == self.warmup:
                self.mean = sum(self.first) / self.warmup
                self.var = sum((x - self.mean) ** 2 for x in self.first) / self.warmup
            return min(1.0, self.cap / (total + 1e-6)), self.cap
        std = math.sqrt(self.var)
        score = (total - self.mean) / (std + self.eps)
        threshold, x = math.inf, total
        if score > self.z:
            threshold = x = self.mean + (self.z * std) / (score / self.z)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * x
        self.var = self.alpha * self.var + (1 - self.alpha) * (x - self.mean) ** 2
        threshold = min(threshold, self.cap)
        return (threshold / (total + 1e-6) if total > threshold else 1.0), threshold


class LogZ(Global):
    """Mean and deviation as weighted sums over all that is remembered."""

    def __init__(
        self,
        k: float = 4.0,
        halflife: float = 100,
        warmup: int = 50,
        max_norm: float | None = None,
    ) -> None:
        self.k, self.halflife, self.warmup = k, halflife, warmup
        self.cap = math.inf if max_norm is None else max_norm
        self.remembered: list[float] = []

    def moments(self) -> tuple[float, float]:
        weights = [0.5 ** (age / self.halflife) for age in range(len(self.remembered))][::-1]
        pairs = list(zip(weights, self.remembered, strict=True))
        mean = sum(w * x for w, x in pairs) / sum(weights)
        return mean, math.sqrt(sum(w * (x - mean) ** 2 for w, x in pairs) / sum(weights))

    def decide(self, total: float) -> tuple[float, float]:
        threshold, x = math.inf, math.log(total)
        if len(self.remembered) >= self.warmup:
            mean, std = self.moments()
            if x > mean + self.k * std:
                x = mean + self.k * std
                threshold = math.exp(x)
        self.remembered.append(x)
        threshold = min(threshold, self.cap)
        return min(1.0, threshold / (total + 1e-6)), threshold


class AutoClip(Global):
    """A sorted copy of the last norms, and a place between two of them."""

    def __init__(
        self, percentile: float = 10.0, window: int = 1000, max_norm: float | None = None
    ) -> None:
        self.percentile = percentile
        self.cap = math.inf if max_norm is None else max_norm
        self.norms: deque[float] = deque(maxlen=window)

    def decide(self, total: float) -> tuple[float, float]:
        self.norms.append(total)
        ordered = sorted(self.norms)
        place = (len(ordered) - 1) * self.percentile / 100
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        threshold = low + (high - low) * (place - math.floor(place))
        threshold = min(threshold if total > threshold else math.inf, self.cap)
        return min(1.0, threshold / (total + 1e-6)), threshold


class AdaGC:
    """lishuai-97/AdaGC, with the steps of the warm-up counted for each tensor."""

    def __init__(
        self,
        ratio: float = 1.04,
        beta: float = 0.99,
        warmup: int = 100,
        max_norm: float | None = 1.0,
        eps: float = 1e-6,
    ) -> None:
        self.ratio, self.beta, self.warmup, self.eps = ratio, beta, warmup, eps
        self.cap = math.inf if max_norm is None else max_norm
        self.gamma: dict[int, float] = {}
        self.count: dict[int, int] = {}

    def decide(self, norms: Mapping[int, float]) -> dict[int, tuple[float, float]]:
        """The coefficient and the threshold of every tensor that has a norm."""
        total = math.hypot(*norms.values())
        return {key: self._decide(key, n, total) for key, n in norms.items()}

    def _decide(self, key: int, n: float, total: float) -> tuple[float, float]:
        count = self.count.get(key, 0)
        self.count[key] = count + 1
        if count < self.warmup:
            coef = min(1.0, self.cap / (total + self.eps))
            self.gamma[key] = min(self.gamma.get(key, math.inf), n * coef)
            return coef, self.cap
        gamma = self.gamma.get(key, n)
        threshold, coef, clipped = self.ratio * gamma, 1.0, n
        if n > threshold:
            coef, clipped = threshold / (n + self.eps), threshold
        self.gamma[key] = gamma * self.beta + clipped * (1 - self.beta)
        return coef, threshold

    def clip_(self, parameters: Iterable[Tensor]) -> None:
        grads = {key: p.grad for key, p in enumerate(parameters) if p.grad is not None}
        decided = self.decide({key: norm(grad) for key, grad in grads.items()})
        for key, (coef, _) in decided.items():
            if coef < 1:
                grads[key].mul_(coef)


class AGC:
    """One unit after the other."""

    def __init__(self, clip_factor: float = 0.01, eps: float = 1e-3) -> None:
        self.clip_factor, self.eps = clip_factor, eps

    def decide(self, parameter: Tensor, gradient: Tensor) -> list[tuple[float, float]]:
        """The coefficient and the threshold of every unit."""
        return [
            self._decide(norm(w), norm(g))
            for w, g in zip(_units(parameter), _units(gradient), strict=True)
        ]

    def _decide(self, w: float, g: float) -> tuple[float, float]:
        threshold = self.clip_factor * max(w, self.eps)
        return (threshold / max(g, 1e-6) if g > threshold else 1.0), threshold

    @torch.no_grad()
    def clip_(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                continue
            decided = self.decide(parameter, parameter.grad)
            for unit, (coef, _) in zip(_units(parameter.grad), decided, strict=True):
                if coef < 1:
                    unit.mul_(coef)


def _units(x: Tensor) -> list[Tensor]:
    return list(x.unbind()) if x.dim() > 1 else [x]
