"""What is measured: gradients as real models have them, made by pure setup functions.

Values. Every element is +-[0.5, 1.5): halved by a clip it is still far from a denormal in every
dtype, and the norm of n elements is sqrt(13 n / 12) within a fraction of a percent, so thresholds
follow from the count alone, whatever error a measured norm has (torch's fp16 norm is some percent
too small on tensors of this size).

Clipping again and again. A clip changes its own input: the second call would find nothing to do.
So `restore` copies the original values back before every clipped call, outside the timed part.
Every repetition then sees bitwise the same gradients, where a threshold that shrinks with each
call would drift into fp16's denormals, and multiplying back would pile up rounding.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]

BLOCK = 1 << 20  # elements drawn; longer tensors repeat them (drawing 124 M takes seconds)
MEAN_SQUARE = 13 / 12  # of a uniform magnitude in [0.5, 1.5)
LARGEST = 1.5


@dataclass(frozen=True)
class Clip:
    """Arguments of one `clip_grad_norm_` call, and what brings the gradients back after it."""

    parameters: list[torch.nn.Parameter]
    max_norm: float
    norm_type: float
    clips: bool
    first: float  # magnitude of every gradient's first element before any clip
    restore: Callable[[], None] | None

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def n_bytes(self) -> int:
        return sum(g.numel() * g.element_size() for g in self.gradients)

    def is_scaled(self) -> bool:
        """Whether first and last gradient are below their originals (for a clip, by about half)."""
        grads = self.gradients
        return all(abs(g.view(-1)[0].item()) < 0.8 * self.first for g in (grads[0], grads[-1]))


def gpt2_small(
    width: int = 768, blocks: int = 12, vocabulary: int = 50257, context: int = 1024
) -> list[Shape]:
    """GPT-2's parameters in order; the defaults give 148 tensors, 124,439,808 elements."""
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *attention, *norm, *mlp]
    return [(vocabulary, width), (context, width), *block * blocks, *norm]


def many(count: int, elements: int) -> list[Shape]:
    """`count` vectors of `elements` each: where the cost per tensor shows."""
    return [(elements,)] * count


def gradients(shapes: Iterable[Shape], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One tensor a shape, in memory of its own, the same values on every call."""
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(BLOCK).uniform_(0.5, LARGEST, generator=generator)
    block[1::2].neg_()
    block = block.to(dtype)
    return [_filled(shape, block) for shape in shapes]


def clip(
    shapes: Iterable[Shape],
    dtype: torch.dtype = torch.float32,
    *,
    clips: bool = False,
    norm_type: float = 2.0,
) -> Clip:
    """A call that halves the gradients (`clips`), or one whose threshold is twice their norm."""
    grads = gradients(shapes, dtype)
    norm = LARGEST if norm_type == math.inf else _l2_norm(grads)
    restore = _restorer(grads) if clips else None
    max_norm = norm / 2 if clips else norm * 2
    first = abs(grads[0].view(-1)[0].item())
    return Clip(_parameters(grads), max_norm, norm_type, clips, first, restore)


def plain_statistics(grads: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The five statistics per tensor by a loop of plain torch calls: the baseline of grad_stats."""
    norms, max_abs, nans, infs, zeros = [], [], [], [], []
    for grad in grads:
        norms.append(torch.linalg.vector_norm(grad))
        max_abs.append(torch.where(torch.isfinite(grad), grad.abs(), 0).max())
        nans.append(torch.isnan(grad).sum())
        infs.append(torch.isinf(grad).sum())
        zeros.append(grad.numel() - torch.count_nonzero(grad))
    return {
        "norms": torch.stack(norms),
        "max_abs": torch.stack(max_abs),
        "nan_count": torch.stack(nans),
        "inf_count": torch.stack(infs),
        "zero_count": torch.stack(zeros),
    }


def require_right(name: str, problem: Clip, norm: torch.Tensor) -> None:
    """A row that did not do its work must not become a number."""
    clipped = float(norm) > problem.max_norm
    scaled = problem.is_scaled()
    if clipped != problem.clips or scaled != problem.clips:
        raise RuntimeError(
            f"{name} returned a norm of {float(norm):g} for max_norm={problem.max_norm:g} "
            f"and {'changed' if scaled else 'kept'} the gradients; this workload is to be "
            f"{'clipped' if problem.clips else 'left alone'}"
        )


def _filled(shape: Shape, block: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=block.dtype)
    for piece in tensor.view(-1).split(BLOCK):
        piece.copy_(block[: piece.numel()])
    return tensor


def _parameters(grads: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Parameters whose own memory is never touched, so that only the gradients take room."""
    parameters = []
    for grad in grads:
        parameter = torch.nn.Parameter(torch.empty_like(grad))
        parameter.grad = grad
        parameters.append(parameter)
    return parameters


def _l2_norm(grads: list[torch.Tensor]) -> float:
    return math.sqrt(MEAN_SQUARE * sum(g.numel() for g in grads))


def _restorer(grads: list[torch.Tensor]) -> Callable[[], None]:
    originals = [g.clone() for g in grads]

    def restore() -> None:
        for grad, original in zip(grads, originals, strict=True):
            grad.copy_(original)

    return restore
