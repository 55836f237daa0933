"""Fused gradient clipping and gradient statistics for PyTorch.

Names load when they are first used: importing fastclip imports neither torch nor anything else.
"""

from importlib import import_module

# To a type checker this is typing.TYPE_CHECKING; importing typing would take 13 ms.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from fastclip import backends as backends
    from fastclip import distributed as distributed
    from fastclip import monitor as monitor
    from fastclip import rules as rules
    from fastclip.backends import backend as backend
    from fastclip.clipper import GradClipper as GradClipper
    from fastclip.functional import clip_grad_norm_ as clip_grad_norm_
    from fastclip.functional import clip_grad_value_ as clip_grad_value_
    from fastclip.functional import clip_grads_with_norm_ as clip_grads_with_norm_
    from fastclip.functional import get_total_norm as get_total_norm
    from fastclip.functional import grad_stats as grad_stats
    from fastclip.order import order_guard as order_guard
    from fastclip.stats import GradStats as GradStats
    from fastclip.stats import LayerStats as LayerStats
    from fastclip.stats import RankStats as RankStats

__version__ = "0.1.0"

__all__ = [
    "GradClipper",
    "GradStats",
    "LayerStats",
    "RankStats",
    "__version__",
    "backend",
    "backends",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "distributed",
    "get_total_norm",
    "grad_stats",
    "monitor",
    "order_guard",
    "rules",
]

_MODULES = frozenset({"backends", "distributed", "monitor", "rules"})

_HOME = {
    "GradClipper": "clipper",
    "GradStats": "stats",
    "LayerStats": "stats",
    "RankStats": "stats",
    "backend": "backends",
    "clip_grad_norm_": "functional",
    "clip_grad_value_": "functional",
    "clip_grads_with_norm_": "functional",
    "get_total_norm": "functional",
    "grad_stats": "functional",
    "order_guard": "order",
}


if not TYPE_CHECKING:  # a type checker would take __getattr__ to mean that every name exists

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"fastclip.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"fastclip.{_HOME[name]}"), name)
        globals()[name] = value  # the next access does not come through here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
