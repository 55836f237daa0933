"""Parameters: how large they are and how much an update changes them, for records of a Monitor."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

from fastclip.checks import require

if TYPE_CHECKING:
    from fastclip.gradients import Parameters
    from fastclip.monitor.watches.updates import Before


class ParameterWatch:
    """Measures what an update does to the parameters, for records of a Monitor: a block around the
    optimizer's step.

    >>> parameters = ParameterWatch(model, every=100)
    >>> monitor = Monitor(sinks=[JSONL("run.jsonl")], watches=[parameters])
    >>> with parameters:
    ...     stats = clipper.step(optimizer, scaler)
    >>> monitor.observe(step=step, loss=loss, stats=stats)

    In every `every`-th block, first in the `every`-th, it fills

    * `param_norm`: the 2-norm of all parameters as one vector, after the update of the record's
      step;
    * `update_ratio`: the 2-norm of the update (parameters after it minus before it) over that of
      the parameters before it;
    * `layers`: both for each parameter, under its name.

    An update that changes nothing
    (a step that was skipped) has the ratio 0, one of parameters that were all 0 the ratio infinity.

    The parameters are those that require a gradient when the block begins; tied ones count once.
    Where a block exchanges a module's parameters (``load_state_dict(assign=True)``), what is there
    at its end is compared, by name.
    DTensors (FSDP2, tensor parallel) are measured whole: all processes of their mesh have to come
    with the same blocks, and have the same numbers, after three small collectives. Of FSDP1 each
    process measures the shards it holds. Two optimizers that make one step go into one block.

    From the begin to the end of such a block it holds one copy of these parameters, in their own
    dtype; at the end differences are formed in its place, in float32 for half types (which takes
    twice the memory of the copy for a moment). Everything is measured with fastclip's kernels, on
    the device, and nothing waits for it. An exception in the block frees the copy, and nothing is
    reported. Other blocks cost a microsecond.

    Args:
        parameters: a Module, which is read again in every block, or as for `GradClipper` a Tensor
            or an iterable of Tensors or of ``(name, Tensor)`` pairs.
        every: measure in every so many blocks.

    Raises:
        TypeError: `every` is no whole number.
        ValueError: `every` is less than 1.
        RuntimeError: a block is entered within another one; or at its end a parameter is not there
            any more, or has another shape.
    """

    def __init__(self, parameters: "Parameters", every: int = 100) -> None:
        from fastclip.monitor.watches.updates import Watched

        require("every", every, "a whole number of at least 1", lambda x: x >= 1, whole=True)
        self._every = every
        self._watched = Watched(parameters)
        self._blocks = 0
        self._open = False
        self._before: Before | None = None
        self._measured: dict[str, Any] = {}

    def __enter__(self) -> "ParameterWatch":
        if self._open:
            raise RuntimeError(
                "a block of this ParameterWatch is open already; one block goes around all that "
                "is one step"
            )
        self._blocks += 1
        if self._blocks % self._every == 0:
            self._before = self._watched.before()
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before, self._before, self._open = self._before, None, False
        if before is not None and kind is None:
            self._measured = before.measured()

    def take(self) -> dict[str, Any]:
        """What the last block measured, on the device; {} if none did since the last call."""
        measured, self._measured = self._measured, {}
        return measured
