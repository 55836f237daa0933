"""What is measured: gradients as real models have them, made by pure setup functions.

Values. Every element is +-[0.5, 1.5): halved by a clip it is still far from a denormal in every
dtype, and the norm of n elements is sqrt(13 n / 12) within a fraction of a percent, so thresholds
follow from the count alone, whatever error a measured norm has (torch's fp16 norm is some percent
too small on tensors of this size). They are cut from a block of random numbers at random places:
no kernel here looks at more of a value than whether it is finite or zero, so drawing all of them
anew (5 ns each) would change no time.

Clipping again and again. A clip changes its own input: the second call would find nothing to do.
So `restore` writes the original values back before every clipped call, outside the timed part.
Every repetition then sees bitwise the same gradients, where a threshold that shrinks with each
call would drift into fp16's denormals, and multiplying back would pile up rounding.

Caches. A list smaller than the last-level cache would be found there by every call but the first.
`copies` of it that together are at least twice the cache, used in turn, show the other case: every
call finds its gradients in memory. A training step lies between the two.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fastclip.benchmarking import models
from fastclip.benchmarking.models import Shape

BLOCK = 1 << 22  # elements drawn
PIECE = 1 << 20  # longer tensors are made of such pieces
MEAN_SQUARE = 13 / 12  # of a uniform magnitude in [0.5, 1.5)
LARGEST = 1.5
OBJECT_BYTES = 1024  # what a call touches of a tensor besides its elements, roughly
SAMPLE = 16  # tensors looked at after a call
MIXED = "mixed"
DTYPES = ("float32", "bfloat16", "float16", MIXED)

Dtypes = torch.dtype | Sequence[torch.dtype]


@dataclass(frozen=True)
class Workload:
    """A named list of shapes, and in one line where they are from."""

    name: str
    source: str
    shapes: Callable[[], list[Shape]]
    factor: int = 1  # by which the model was divided to get these elements


def _workloads() -> list[Workload]:
    def gpt2(name: str, width: int, blocks: int) -> Workload:
        source = f"GPT-2 {name}: {blocks} blocks of width {width}, 50,257 tokens, 1,024 places"
        return Workload(f"gpt2-{name}", source, lambda: models.gpt2(width, blocks))

    return [
        Workload("resnet50", "ResNet-50, 1,000 classes, as torchvision has it", models.resnet50),
        Workload("vit-b16", "ViT-B/16, 224 pixels, 1,000 classes, as timm has it", models.vit),
        Workload("bert-large", "BERT-large, uncased, with pooler", models.bert),
        gpt2("small", 768, 12),
        gpt2("medium", 1024, 24),
        gpt2("large", 1280, 36),
        gpt2("xl", 1600, 48),
        Workload(
            "llama3-8b/16",
            "Llama 3 8B: its 291 tensors, each dimension divided by 4",
            lambda: models.llama(1024, 32, 256, 3584, 32064),
            factor=16,
        ),
        Workload(
            "moe-20k/256",
            "Qwen3-30B-A3B with 51 layers for its 48, each dimension divided by 16",
            lambda: models.experts(models.EXPERT_LAYERS, divisor=16),
            factor=256,
        ),
        Workload("2000x1024", "synthetic: many small vectors", lambda: models.many(2000, 1024)),
        Workload("2000x1", "synthetic: the cost per tensor", lambda: models.many(2000, 1)),
        Workload("20000x1", "synthetic: the cost per tensor", lambda: models.many(20_000, 1)),
        Workload("one", "synthetic: one matrix of 8,192 x 8,192", lambda: [(8192, 8192)]),
        Workload(
            "lopsided",
            "synthetic: an embedding of 128,256 x 1,024 before 4,000 vectors of 1,024",
            models.lopsided,
        ),
    ]


WORKLOADS = {workload.name: workload for workload in _workloads()}


def shapes(name: str) -> list[Shape]:
    """The shapes of a registered workload; an unknown name is a KeyError that lists the known."""
    if name not in WORKLOADS:
        raise KeyError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name].shapes()


def dtypes(shapes: Sequence[Shape], name: str) -> list[torch.dtype]:
    """One dtype a shape. `mixed` is what keeps norms and biases precise: vectors float32, all else
    bfloat16; where there are only vectors, every other one."""
    if name != MIXED:
        return [getattr(torch, name)] * len(shapes)
    vectors = [len(shape) < 2 for shape in shapes]
    if all(vectors):
        vectors = [index % 2 == 0 for index in range(len(shapes))]
    return [torch.float32 if vector else torch.bfloat16 for vector in vectors]


def n_bytes(shapes: Sequence[Shape], dtype: str) -> int:
    """Of one copy of the gradients."""
    pairs = zip(shapes, dtypes(shapes, dtype), strict=True)
    return sum(math.prod(shape) * one.itemsize for shape, one in pairs)


class Clip:
    """Arguments of one `clip_grad_norm_` call, and what makes them ready for the next.

    `parameters` and `gradients` are those of the copy whose turn it is; `restore`, called before a
    call, brings the values of the last one back if it clips, and goes on to the next copy.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        dtype: Dtypes,
        *,
        clips: bool,
        norm_type: float,
        copies: int,
    ) -> None:
        self._copies = [_parameters(gradients(shapes, dtype)) for _ in range(copies)]
        self.turn = 0
        self.norm_type, self.clips = norm_type, clips
        self.n_tensors = len(shapes)
        self.n_bytes = sum(grad.nbytes for grad in self.gradients)
        self.n_elements = sum(grad.numel() for grad in self.gradients)
        largest = norm_type == math.inf
        self.norm = LARGEST if largest else math.sqrt(MEAN_SQUARE * self.n_elements)
        self.max_norm = self.norm / 2 if clips else self.norm * 2
        self._originals = [_ends(grad) for grad in self.gradients]
        self._seen: set[str] = set()
        self._sampled = 0

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self._copies[self.turn]

    def copies(self) -> list[list[torch.Tensor]]:
        """The gradients of every copy; `turn` is the index of the one in use."""
        return [[p.grad for p in copy if p.grad is not None] for copy in self._copies]

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def restore(self) -> None:
        if self.clips:
            _fill(self.gradients)
        self.turn = (self.turn + 1) % len(self._copies)

    def is_first(self, name: str) -> bool:
        """Whether this is the first time that it is asked about this name."""
        first = name not in self._seen
        self._seen.add(name)
        return first

    def left(
        self, grads: Sequence[torch.Tensor] | None = None, *, whole: bool = True
    ) -> tuple[float, float]:
        """The least and the largest share that `grads` (default: the gradients) have of their
        originals: over all elements, or over the ends of `SAMPLE` tensors, others each time."""
        grads = self.gradients if grads is None else grads
        if whole:
            return _extremes(grads)
        start, self._sampled = self._sampled, self._sampled + SAMPLE
        indices = {index % self.n_tensors for index in range(start, start + SAMPLE)}
        shares = [
            float(now) / then
            for index in indices
            for now, then in zip(_ends(grads[index]), self._originals[index], strict=True)
        ]
        # Of a NaN, min and max would depend on its place.
        return (math.nan, math.nan) if any(map(math.isnan, shares)) else (min(shares), max(shares))


def gradients(shapes: Sequence[Shape], dtype: Dtypes = torch.float32) -> list[torch.Tensor]:
    """One tensor a shape, in memory of its own, the same values on every call."""
    each = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else dtype
    grads = [torch.empty(shape, dtype=one) for shape, one in zip(shapes, each, strict=True)]
    _fill(grads)
    return grads


def clip(
    shapes: Sequence[Shape],
    dtype: Dtypes = torch.float32,
    *,
    clips: bool = False,
    norm_type: float = 2.0,
    copies: int = 1,
) -> Clip:
    """A call that halves the gradients (`clips`), or one whose threshold is twice their norm."""
    return Clip(shapes, dtype, clips=clips, norm_type=norm_type, copies=copies)


def copies_beyond(cache_bytes: int, shapes: Sequence[Shape], dtype: Dtypes) -> int:
    """How many copies of a list, used in turn, push each other out of a cache: as many as together
    are at least twice its size (of a list just larger than the cache a part would be found there).
    Counts what a call touches: elements and the tensors themselves."""
    each = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else dtype
    touched = sum(
        math.prod(shape) * one.itemsize + OBJECT_BYTES
        for shape, one in zip(shapes, each, strict=True)
    )
    return max(1, -(-2 * cache_bytes // touched))


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


def _fill(grads: Sequence[torch.Tensor]) -> None:
    """The same values at every call for lists of the same shapes."""
    for piece, original in _pieces(grads):
        piece.copy_(original)


def _pieces(grads: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Piece by piece what is there, and the values that belong there (on the CPU)."""
    places = random.Random(0)
    blocks = {dtype: _block(dtype) for dtype in {grad.dtype for grad in grads}}
    for grad in grads:
        block = blocks[grad.dtype]
        for piece in grad.view(-1).split(PIECE):
            start = places.randrange(BLOCK - PIECE)
            yield piece, block[start : start + piece.numel()]


def _extremes(grads: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The least and the largest of elements over originals; NaN if there is one."""
    extremes, now, then = [], [], []
    n_left, n_waiting = sum(grad.numel() for grad in grads), 0
    for piece, original in _pieces(grads):
        now.append(piece)
        then.append(original)
        n_left, n_waiting = n_left - piece.numel(), n_waiting + piece.numel()
        if n_waiting >= PIECE or n_left == 0:  # 20,000 tiny ones one by one would take a second
            shares = torch.cat(now).float().div_(torch.cat(then).to(piece.device))
            extremes.append(torch.stack(torch.aminmax(shares)))
            now, then, n_waiting = [], [], 0
    low, high = torch.stack(extremes).unbind(1)
    return float(low.min()), float(high.max())


def _ends(grad: torch.Tensor) -> tuple[float, float]:
    flat = grad.view(-1)
    return float(flat[0]), float(flat[-1])


_blocks: dict[torch.dtype, torch.Tensor] = {}


def _block(dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _blocks:
        generator = torch.Generator().manual_seed(0)
        block = torch.empty(BLOCK, device="cpu").uniform_(0.5, LARGEST, generator=generator)
        # A clip's norm comes from the count, so signs matter only to sums: alternate them.
        block[1::2].neg_()
        _blocks[dtype] = block.to(dtype)
    return _blocks[dtype]


def _parameters(grads: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Parameters whose own memory is never touched, so that only the gradients take room."""
    parameters = []
    for grad in grads:
        parameter = torch.nn.Parameter(torch.empty_like(grad))
        parameter.grad = grad
        parameters.append(parameter)
    return parameters
