"""What a checkpoint of a run has in it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fastclip.monitor import randomness
from fastclip.monitor.recovery.learning_rate import Cut
from fastclip.monitor.recovery.packing import Packed, Unpacker, pack
from fastclip.monitor.recovery.stateful import Stateful
from fastclip.monitor.recovery.telling import warn


class Contents:
    """The state that was handed in, and that of the random number generators."""

    def __init__(self, state: Mapping[str, Any], factor: Callable[[], float]) -> None:
        self.state = dict(state)
        self.modules = {n: each for n, each in self.state.items() if isinstance(each, nn.Module)}
        self.optimizers = [each for each in self.state.values() if isinstance(each, Optimizer)]
        self.cut = Cut(self.optimizers, factor)

    def pack(self) -> Packed:
        """Tensors are those of the run, not copies of them."""
        states = {name: each.state_dict() for name, each in self.state.items()}
        return pack({"state": states, "random": randomness.read()})

    def unpack(self, content: dict[str, Any]) -> None:
        """Make the run what it was. `ValueError`, with nothing changed, if a part is missing;
        `RuntimeError` naming the first part that cannot be loaded.

        Gradients are set to None, as in a new process: what a step at fault has left in them must
        not be added to.
        """
        states = content["state"]
        missing = self.state.keys() - states.keys()
        if missing:
            raise ValueError(f"the checkpoint has no state of {min(missing)!r}")
        extra = states.keys() - self.state.keys()
        if extra:
            text = f"the checkpoint has a state of {min(extra)!r}, which this run does not have"
            warn(text)
        for name, each in self.state.items():
            _load(name, each, states[name])
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        randomness.write(content["random"])

    def snapshot(self) -> tuple[Packed, list[tuple[Tensor, Tensor | None]]]:
        """A copy of all, and the gradients."""
        packed = self.pack()
        copies = {name: tensor.clone() for name, tensor in packed.tensors.items()}
        gradients = [(tensor, tensor.grad) for tensor in self.present()]
        return Packed(packed.tree, copies), gradients

    def reset(self, saved: tuple[Packed, list[tuple[Tensor, Tensor | None]]]) -> None:
        """Go back to a `snapshot`."""
        packed, gradients = saved
        unpacker = Unpacker(packed.tree, self.present())
        unpacker.templates.update(packed.tensors)
        self.unpack(unpacker.unpack())
        for tensor, gradient in gradients:
            tensor.grad = gradient

    def present(self) -> list[Tensor]:
        """The tensors of modules and optimizers; DTensors are loaded onto their meshes."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        return [
            *(tensor for each in self.modules.values() for tensor in each.parameters()),
            *(tensor for each in self.modules.values() for tensor in each.buffers()),
            *(tensor for group in groups for tensor in group["params"]),
        ]


def _load(name: str, part: Stateful, state: dict[str, Any]) -> None:
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise RuntimeError(
            f"the checkpoint has a state of {name!r} that state[{name!r}] cannot load: "
            f"{type(error).__name__}: {error}"
        ) from error
