"""Putting a model, its gradients and all random numbers back to what they were."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastclip.monitor import randomness
from fastclip.monitor.watches.outputs import unwatched


class Leaves:
    """The tensors that a backward pass would add gradients to, without those they have.

    Their hooks on accumulated gradients are taken off: an optimizer may step in one.
    """

    def __init__(self) -> None:
        # By id, with a weak reference: the inputs that a checkpoint detaches come and go.
        self._hidden: dict[int, tuple[weakref.ref[Tensor], Callable[[], None]]] = {}

    def hide(self, leaf: Tensor) -> None:
        known = self._hidden.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return
        self._hidden[id(leaf)] = weakref.ref(leaf), _hide(leaf)

    def restore(self) -> None:
        for _, restore in self._hidden.values():
            restore()
        self._hidden.clear()

    def grads(self) -> list[Tensor]:
        """What they have got since."""
        leaves = [reference() for reference, _ in self._hidden.values()]
        return [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]


def _hide(leaf: Tensor) -> Callable[[], None]:
    reference, grad = weakref.ref(leaf), leaf.grad
    hooks = leaf._post_accumulate_grad_hooks
    kept = dict(hooks or {})

    def restore() -> None:
        again = reference()
        if again is not None:
            again.grad = grad
        if kept:
            hooks.clear()
            hooks.update(kept)

    if grad is not None:
        leaf.grad = None
    if kept:
        hooks.clear()
    return restore


@contextmanager
def preserved(model: nn.Module) -> Iterator[Leaves]:
    """Within, anything may happen to the model; the leaves start with the model's parameters.

    The copies of parameters and buffers are in host memory: that of the device may be short.
    """
    _require_watchable(model)
    leaves = Leaves()
    with ExitStack() as undo:
        undo.enter_context(unwatched(model))
        undo.callback(randomness.write, randomness.read())
        undo.callback(_module_state(model))
        undo.callback(leaves.restore)
        for parameter in model.parameters():
            if parameter.is_leaf:
                leaves.hide(parameter)
        yield leaves


def _require_watchable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"module {name!r} is TorchScript, which runs no hooks of its parts")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            text = f"parameter {name!r} has no shape yet: put a batch through the model first"
            raise ValueError(text)


def _module_state(model: nn.Module) -> Callable[[], None]:
    """Takes training mode, which tensors are parameters and buffers, and their values; calling what
    it returns sets them again.

    `forward` may write into them (running statistics, renormalised embeddings), freeze them or put
    other tensors in their place.
    """
    modules = list(model.modules())
    undo = ExitStack()
    tensors: dict[int, Tensor] = {}
    for module in modules:
        undo.callback(setattr, module, "training", module.training)
        for generator in vars(module).values():
            if isinstance(generator, torch.Generator):
                undo.callback(generator.set_state, generator.get_state())
        for table in (module._parameters, module._buffers):
            undo.callback(_refill, table, dict(table))
            tensors.update((id(t), t) for t in table.values() if t is not None)
    for tensor in tensors.values():
        if tensor.is_leaf:
            undo.callback(_leaf_again, tensor, tensor.requires_grad)
        if tensor.layout == torch.strided:
            copy = tensor.detach().to("cpu", copy=True)
            undo.callback(_put_back, tensor, tensor.data, copy)
    return undo.close


def _refill(table: dict[str, Any], entries: dict[str, Any]) -> None:
    table.clear()
    table.update(entries)


def _leaf_again(tensor: Tensor, requires_grad: bool) -> None:
    """Where `forward` froze it, or wrote what has a graph into it."""
    if not tensor.is_leaf:
        tensor.detach_()
    tensor.requires_grad_(requires_grad)


def _put_back(tensor: Tensor, data: Tensor, copy: Tensor) -> None:
    # Through `data`, which autograd does not see: a graph that the caller holds stays valid.
    tensor.data = data
    if not torch.equal(_bits(data), _bits(copy)):
        data.copy_(copy)


def _bits(tensor: Tensor) -> Tensor:
    """On the host: NaNs are equal there, and the two zeros are not."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
