"""Activations: how large they are and where they are not finite, for records of a Monitor."""

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastclip.checks import require

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from fastclip.monitor.watches.outputs import ActivationStats, Outputs


class ActivationWatch:
    """Measures what the modules of a model put out, for `activation_max` of a `StepRecord`.

    >>> activations = ActivationWatch(model)
    >>> monitor = Monitor(sinks=[JSONL("run.jsonl")], watches=[activations])
    >>> monitor.observe(step=step, loss=loss, stats=stats)
    >>> activations.stats().cpu().worst(3)

    Forward hooks read each output once, as it is at that time, with fastclip's kernels: the largest
    magnitude and the numbers of NaN and infinite elements. The numbers stay on the device, and
    nothing waits for it. Those of all forward passes since the last `take` (gradient accumulation,
    modules that are called several times) are put together; they are from before the update of the
    step whose record they go into.

    What counts: tensors of floating or complex dtype, also within tuples, lists, mappings and
    dataclasses; of a sparse tensor the stored values, of a DTensor what this process holds. Other
    outputs are passed over, as are tensors without values (meta, fake). Only forward passes with
    gradients enabled count, so that validation under ``torch.no_grad()`` does not, nor do those of
    `compare_precisions` and `find_first_nonfinite`. A module that
    activation checkpointing runs again during backward counts once. A tensor that several modules
    return, as a Sequential does its last module's, is read once and counts for each. Leave out with
    `modules` what puts out infinities on purpose, as masks do.

    Each process measures its own batch. Where processes have to decide the same, do not give the
    watch to the Monitor: call `take`, reduce `activation_max` as the loss, and observe that.

    Under torch.compile hooks are Python, and each is a graph break (an error with
    ``fullgraph=True``). Hooks have to be there when a model is compiled: torch does not look for
    later ones. To keep graphs whole, compile blocks by themselves and choose with `modules` what
    ``torch.compile`` returned for them: its own hooks run outside of the graph. Inside transforms
    of torch.func, while torch.jit traces and in replays of a CUDA graph nothing is measured.

    A copy of the model (deepcopy, pickle) is not watched, and a copy of the watch measures nothing;
    replicas of DataParallel are watched. Hooks are gone after `remove`, at the end of a ``with``
    block, and when the watch itself is: the model does not keep it alive.

    Args:
        model: whose modules are watched; of a DistributedDataParallel what it wraps.
        every: measure in every so many steps (intervals between two calls of `take`), first in the
            `every`-th; in the others a hook is one comparison.
        modules: ``(name, module) -> bool``, which modules to watch; None: all.

    Raises:
        TypeError: `every` is no whole number.
        ValueError: `every` is less than 1.
    """

    def __init__(
        self,
        model: "nn.Module",
        *,
        every: int = 1,
        modules: "Callable[[str, nn.Module], bool] | None" = None,
    ) -> None:
        from fastclip.monitor.watches.outputs import watched

        require("every", every, "a whole number of at least 1", lambda x: x >= 1, whole=True)
        self._stats: ActivationStats | None = None
        self._hold(*watched(model, every, modules))

    def _hold(self, outputs: "Outputs", handles: "list[RemovableHandle]") -> None:
        self._outputs = outputs
        self._finalizer = weakref.finalize(self, _remove, handles)
        self._finalizer.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_stats": self._stats}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy, which has no hooks
        from fastclip.monitor.watches.outputs import Outputs

        vars(self).update(state)
        self._hold(Outputs([], 1), [])

    def take(self) -> dict[str, Any]:
        """End a step: its `activation_max`, 0-d on the device; {} if nothing was measured."""
        stats = self._outputs.end()
        if stats is None:
            return {}
        self._stats = stats
        return {"activation_max": stats.activation_max}

    def stats(self) -> "ActivationStats":
        """Of each module, in the last measured step that `take` ended. `RuntimeError` before."""
        if self._stats is None:
            raise RuntimeError("no activations were measured in a step that take() has ended")
        return self._stats

    def remove(self) -> None:
        """Take the hooks off the model; what has been measured stays. Again: does nothing."""
        self._finalizer()

    def __enter__(self) -> "ActivationWatch":
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


def _remove(handles: "Iterable[RemovableHandle]") -> None:
    for handle in handles:
        handle.remove()
