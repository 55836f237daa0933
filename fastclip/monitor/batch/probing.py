"""Watching one forward and one backward pass, module by module."""

import itertools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fastclip.monitor.batch.faults import Gradient, Output, largest
from fastclip.monitor.batch.preserving import Leaves, preserved

Magnitudes = tuple[Tensor, ...]  # of one element each, still on their device


class Call(NamedTuple):
    """A call of a module that is running, or ran."""

    number: int
    name: str
    module: nn.Module | None
    given: Magnitudes


class Probe:
    """Hooks on every module of a model, and on every operation of the graph it builds.

    What is measured stays on its device until `outputs` or `gradients` reads it at once.

    The backward pass is watched at the operations and not at the modules: full backward hooks put a
    view around a module's output, which a following in-place operation may not write to, and the
    gradient of a tensor that several modules share does not say which of them spoilt it. An
    operation belongs to the innermost call that was running when it was recorded.
    """

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._numbers = itertools.count()
        self._around: Call | None = self._call("")  # that to which code outside all modules belongs
        self._running: dict[int, list[Call]] = {}  # by thread, outermost first
        self._in_backward = False
        self._raised: tuple[BaseException | None, str] = None, ""  # and the innermost module
        self._handles: list[Any] = []
        self._outputs: list[tuple[str, Magnitudes, Magnitudes]] = []
        self._gradients: list[tuple[Call, Magnitudes, Magnitudes, list[bool]]] = []

    def attach(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._devices = devices(model)
        # Modules of others too: a checkpoint hides their parameters until it runs them again.
        self._handles.append(register_module_forward_pre_hook(self._hide_parameters))
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            self._handles.append(before)
            after = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._handles.append(after)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def forward(self, forward: Callable[[], Tensor]) -> Tensor:
        """The loss."""
        with torch.enable_grad():
            loss = forward()
        _require_loss(loss)
        self._own(loss, self._around)
        return loss

    def backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            if any(parameter.requires_grad for parameter in self._parameters):
                raise ValueError("forward() returned a loss without a graph: is no_grad in force?")
            return
        self._in_backward, self._around = True, None
        with ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            loss.backward()

    def outputs(self) -> list[Output]:
        """Of the calls in the forward pass, in the order in which they ended."""
        read = iter(_read(part for _, *parts in self._outputs for part in parts))
        return [
            Output(name, largest(next(read)), largest(next(read))) for name, *_ in self._outputs
        ]

    def gradients(self) -> list[Gradient]:
        """Of the operations of the backward pass, in order of execution."""
        read = iter(_read(part for _, *parts, _ in self._gradients for part in parts))
        found = []
        for call, _, _, leaving in self._gradients:
            incoming, outgoing = next(read), next(read)
            left = largest(itertools.compress(outgoing, leaving))
            found.append(
                Gradient(call.number, call.name, largest(incoming), largest(outgoing), left)
            )
        return found

    def raised_in(self, error: BaseException) -> str | None:
        """The innermost module that an error went through, if it went through any."""
        raised, name = self._raised
        return name if raised is error else None

    def leaves_finite(self) -> bool:
        """Whether the gradients of everything that got one are finite."""
        (read,) = _read([_magnitudes(self._leaves.grads())])
        return math.isfinite(largest(read))

    def grad_norm(self) -> float:
        """The 2-norm of the gradients of the model's parameters."""
        grads = [_dense(p.grad) for p in self._parameters if p.grad is not None]
        norms = tuple(torch.linalg.vector_norm(grad, dtype=_widest(grad)) for grad in grads)
        return math.hypot(*_read([norms])[0])

    def _call(self, name: str, module: nn.Module | None = None, given: Magnitudes = ()) -> Call:
        return Call(next(self._numbers), name, module, given)

    def _stack(self) -> list[Call]:
        return self._running.setdefault(threading.get_ident(), [])

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        stack = self._stack()
        self._own((args, kwargs), stack[-1] if stack else self._around)
        # A checkpoint runs modules again within the backward pass: the graph is new, no output is.
        given = () if self._in_backward else _magnitudes((args, kwargs))
        stack.append(self._call(name, module, given))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Also called where the module raised, which is how some checkpoints end; not entered
        where a hook before ours did.
        """
        stack = self._stack()
        if not stack or stack[-1].module is not module:
            return
        call = stack.pop()
        raised = sys.exc_info()[1]
        if raised is not self._raised[0]:
            self._raised = raised, call.name
        self._own(output, call)
        if not self._in_backward:
            self._outputs.append((call.name, call.given, _magnitudes(output)))

    def _hide_parameters(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.is_leaf:
                self._leaves.hide(parameter)

    def _own(self, value: Any, call: Call | None) -> None:
        """The operations behind `value` that belong to no call yet belong to this one.

        Those of no call at all (code of a checkpoint that is run again, outside all modules) are
        not watched: the checkpoint's own operation is.
        """
        nodes: list[Any] = []  # torch declares neither `metadata` nor `variable` as what they are
        for tensor in tensors(value):
            if tensor.grad_fn is not None:
                nodes.append(tensor.grad_fn)
            elif tensor.requires_grad:
                self._leaves.hide(tensor)
        while nodes:
            node = nodes.pop()
            if self in node.metadata:
                continue
            node.metadata[self] = call
            leaving = []
            for behind, _ in node.next_functions:
                if behind is None:
                    leaving.append(False)
                elif behind.name() == "torch::autograd::AccumulateGrad":
                    self._leaves.hide(behind.variable)
                    leaving.append(True)
                else:
                    leaving.append(behind.metadata.get(self, call) is not call)
                    nodes.append(behind)
            if call is not None:
                self._handles.append(node.register_hook(partial(self._passed, call, leaving)))

    def _passed(
        self,
        call: Call,
        leaving: list[bool],
        outgoing: Sequence[Tensor | None],
        incoming: Sequence[Tensor | None],
    ) -> None:
        if not self._in_backward:  # a gradient that forward() itself takes
            return
        given = [(g, left) for g, left in zip(outgoing, leaving, strict=True) if g is not None]
        self._gradients.append(
            (
                call,
                _magnitudes(incoming),
                tuple(_magnitude(gradient) for gradient, _ in given),
                [left for _, left in given],
            )
        )


@contextmanager
def probed(model: nn.Module) -> Iterator[Probe]:
    """A probe at the model, which is afterwards as before."""
    with preserved(model) as leaves, _eager():
        probe = Probe(leaves)
        try:
            probe.attach(model)
            yield probe
        finally:
            probe.detach()


@contextmanager
def autocast(model: nn.Module, dtype: str) -> Iterator[None]:
    """`torch.autocast` to a dtype, off for float32, on the devices of the model.

    It shares no casts with one around it: those would be in the graph of both.
    """
    enabled = dtype != "float32"
    target = getattr(torch, dtype) if enabled else None
    with ExitStack() as stack:
        for device in devices(model):
            stack.enter_context(
                torch.autocast(device, dtype=target, enabled=enabled, cache_enabled=False)
            )
            if torch.is_autocast_enabled(device) != enabled:
                raise RuntimeError(f"autocast on the device {device} has no {dtype}")
        yield


def devices(model: nn.Module) -> list[str]:
    """The device types of a model; the CPU for one without tensors."""
    held = itertools.chain(model.parameters(), model.buffers())
    return sorted({tensor.device.type for tensor in held}) or ["cpu"]


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled code does not run the hooks that come after its compilation."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes a second
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        # The compiled module is one more to them, which does no harm.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global")
        yield


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield _plain(value)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors(getattr(value, field.name, None))


def _require_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"forward() must return the loss as a tensor, got {type(loss).__name__}")
    if not loss.is_floating_point():
        raise TypeError(
            f"forward() must return the loss as a floating-point tensor, got one of {loss.dtype}"
        )
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise ValueError(f"forward() must return a loss of one element, got the shape {shape}")


def _magnitudes(value: Any) -> Magnitudes:
    return tuple(
        _magnitude(tensor)
        for tensor in tensors(value)
        if tensor.is_floating_point() or tensor.is_complex()
    )


def _magnitude(tensor: Tensor) -> Tensor:
    """The largest one in it, NaN where one is: finite if and only if all are."""
    dense = _dense(tensor)
    if dense.numel() == 0:
        return torch.zeros((), device=dense.device)
    if dense.element_size() == 1:  # no arithmetic in 8 bits
        dense = dense.float()
    return _plain(torch.linalg.vector_norm(dense, math.inf))


def _plain(tensor: Tensor) -> Tensor:
    """What torch.func wraps: all samples of `vmap`, which outlive it."""
    # Nothing public unwraps them. Both functions are in torch 2.10.0, 2.13.0 and 2.14.1.
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout == torch.strided:
        return tensor
    return (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()


def _read(groups: Iterable[Magnitudes]) -> list[list[float]]:
    """Numbers from their devices: one copy for each device and dtype."""
    kept = list(groups)
    flat = [number for group in kept for number in group]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, number in enumerate(flat):
        alike.setdefault((number.device, number.dtype), []).append(i)
    values = [0.0] * len(flat)
    for (device, _), chosen in alike.items():
        with torch.autocast(device.type, enabled=False):  # it refuses to stack some dtypes
            stacked = torch.stack([flat[i] for i in chosen]).tolist()
        for i, value in zip(chosen, stacked, strict=True):
            values[i] = value
    read = iter(values)
    return [list(itertools.islice(read, len(group))) for group in kept]
