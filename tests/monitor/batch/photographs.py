"""Everything that looking at a batch has to leave as it was, in a form that compares equal."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def photograph(model: nn.Module, *others: Tensor) -> dict[str, Any]:
    """Of a model, of other tensors with gradients, and of the process."""
    picture = {f"other {i}": _tensor(other) for i, other in enumerate(others)}
    for name, module in model.named_modules():
        for table in ("_parameters", "_buffers"):
            picture[f"{name} {table}"] = [
                (key, _tensor(tensor)) for key, tensor in getattr(module, table).items()
            ]
        picture[f"{name} training"] = module.training
        for key, hooks in vars(module).items():
            if "hook" in key and isinstance(hooks, Mapping):
                picture[f"{name} {key}"] = [(number, id(hook)) for number, hook in hooks.items()]
    picture["random"] = (random.getstate(), str(np.random.get_state()), bits(torch.get_rng_state()))
    if torch.cuda.is_available():
        picture["random on GPUs"] = [bits(state) for state in torch.cuda.get_rng_state_all()]
    picture["modes"] = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
    for key in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks"):
        picture[key] = list(getattr(nn.modules.module, key))
    return picture


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensor(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    hooks = tensor._post_accumulate_grad_hooks if tensor.is_leaf else None
    return (
        *(id(tensor), tensor.data_ptr(), bits(tensor), tensor.requires_grad),
        *((id(tensor.grad), bits(tensor.grad)) if tensor.grad is not None else ()),
        *([(number, id(hook)) for number, hook in hooks.items()] if hooks else ()),
    )
