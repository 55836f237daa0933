"""fastclip's functions in the place of those of ``torch.nn.utils``, for code that calls torch's."""

from types import TracebackType
from typing import Any

from torch.nn import utils
from torch.nn.utils import clip_grad

from fastclip import functional, redirecting

__all__ = ["Patch", "patch"]

_SERVED: dict[str, redirecting.Function] = {
    "clip_grad_norm_": functional.clip_grad_norm_,
    "_get_total_norm": functional.get_total_norm,
    "_clip_grads_with_norm_": functional.clip_grads_with_norm_,
    "clip_grad_value_": functional.clip_grad_value_,
}
_patches: list["Patch"] = []  # that have not been undone


class Patch:
    """What `patch` returns: undone by `undo`, or at the end of a ``with``. A copy is undone."""

    def undo(self) -> None:
        """Take this patch back; the last one to go leaves torch as it was. Again, it does nothing.

        Raises `RuntimeError` if somebody else has put another function in the place of one since,
        by the same means: that one stays.
        """
        with redirecting.lock:
            if self not in _patches:
                return
            _patches.remove(self)
            left = [] if _patches else redirecting.take("patch")
        if left:
            raise RuntimeError(
                f"torch.nn.utils.clip_grad.{left[0]} was replaced while it was patched, and what "
                "replaced it may still call fastclip's"
            )

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Patch of torch.nn.utils, {'active' if self in _patches else 'undone'}>"


def patch() -> Patch:
    """From now on, torch's functions that clip are fastclip's, wherever they were imported from.

    >>> with fastclip.integrations.torch.patch():
    ...     trainer.train()  # calls torch.nn.utils.clip_grad_norm_ somewhere

    These are `clip_grad_norm_`, `get_total_norm`, `clip_grads_with_norm_` and `clip_grad_value_` of
    ``torch.nn.utils``, and what is built on them, for all threads of the process. The functions
    stay the objects they were, and what they call is exchanged: so names that were imported
    earlier are served too, and none imported meanwhile is left over. Patches may be nested, and
    undone in any order and from any thread: torch is as it was when all of them are.

    Raises:
        RuntimeError: somebody else has replaced one of the functions, or this version of torch
            builds them otherwise. Nothing has been changed.
    """
    with redirecting.lock:
        _require_untouched()
        redirecting.put("patch", {name: _serving(name) for name in _SERVED})
        patched = Patch()
        _patches.append(patched)
    return patched


def _serving(name: str) -> Any:
    def make(of_torch: redirecting.Function) -> redirecting.Function:
        if getattr(of_torch, "__globals__", None) is not vars(clip_grad):
            raise RuntimeError(
                f"torch.nn.utils.clip_grad.{name} calls {of_torch!r}, which is not torch's, so "
                "that it cannot be patched"
            )
        return _SERVED[name]

    return make


def _require_untouched() -> None:
    """Raise `RuntimeError` if an attribute is not torch's own function."""
    for name in _SERVED:
        own = getattr(clip_grad, name, None)
        if getattr(own, "__globals__", None) is not vars(clip_grad):
            raise RuntimeError(
                f"torch.nn.utils.clip_grad.{name} is {own!r}, which is not torch's, so that it "
                "cannot be patched"
            )
        public = getattr(utils, name.removeprefix("_"), None)
        if public is not own:
            raise RuntimeError(
                f"torch.nn.utils.{name.removeprefix('_')} is {public!r}, which is not torch's, so "
                "that it cannot be patched"
            )
