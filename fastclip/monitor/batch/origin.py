"""The first module of a forward and a backward pass whose numbers cease to be finite."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastclip.monitor.batch.faults import NonFiniteOrigin, backward_origin, forward_origin

if TYPE_CHECKING:
    from torch import Tensor, nn


def find_first_nonfinite(
    model: "nn.Module", forward: "Callable[[], Tensor]"
) -> NonFiniteOrigin | None:
    """The first module that makes NaN or an infinity of finite numbers; None if all is finite.

    >>> find_first_nonfinite(model, lambda: loss_function(model(batch), target))
    NonFiniteOrigin(module='blocks.3.mlp.up', where='forward')

    `forward()` puts the batch through `model` and returns the loss, a floating-point tensor of one
    element. It is called once, as it is: a precision to be looked at is entered within it. The
    modules are watched one call at a time, and the innermost one is named:

    * "forward": the first one, in order of execution, with a non-finite output, where its inputs
      are finite. Module "" where all modules are in order and the loss is not.
    * "input": the same, where its inputs are not finite: the batch, or what code between the
      modules made of it. A mask of infinities counts as such an input, and as such an output.
    * "backward": the forward pass is clean, and this is the first one whose incoming gradient is
      finite and outgoing is not; outgoing are also the gradients of its parameters. Gradients that
      overflow only when several uses of a tensor are added are put down to the module that the
      tensor came from, those of a parameter to module "". No loss is scaled but by `forward()`.

    Parameters, their gradients, buffers, training mode, hooks and the generators of random numbers
    (torch's on every device, Python's, NumPy's, a module's own `torch.Generator`) are afterwards as
    before, also when `forward()` raises. What a module keeps elsewhere is its own. Hooks run as
    they do in training, except those on accumulated gradients, which would take an optimizer's
    step. Compiled code runs eagerly, which can round differently. A model wrapped for distributed
    training is passed unwrapped.

    Raises `TypeError` where `forward()` does not return a floating-point tensor, `ValueError` where
    that has not one element, or no graph although parameters require gradients; `ValueError` for
    parameters without a shape yet, `TypeError` for TorchScript.
    """
    from fastclip.monitor.batch.probing import probed

    with probed(model) as probe:
        loss = probe.forward(forward)
        found = forward_origin(probe.outputs(), loss.item())
        if found is not None:
            return found
        probe.backward(loss)
        return backward_origin(probe.gradients(), probe.leaves_finite())
