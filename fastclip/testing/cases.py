"""The one table of gradient lists every backend must get right, and the norm types to try on each.

A case builds its tensors afresh on every call, from a generator seeded by its own id: adding a case
never changes another one, and a test may write to what it gets.

>>> [case.id for case in CASES if case.id.startswith("layout/transposed")][0]
'layout/transposed-float32'
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fastclip.testing import layouts, values

NORM_TYPES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf"), float("-inf"), -1.0)
HALVES = (torch.bfloat16, torch.float16)
REALS = (torch.float32, *HALVES, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)

Make = Callable[[torch.Generator, torch.device], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A named list of gradients."""

    id: str
    make: Make
    cpu_only: bool = False  # needs an address no accelerator allocator gives out
    # sparse, or several elements in one place: fastclip.functional gives backends what is stored
    functional: bool = False

    def tensors(self, device: str | torch.device = "cpu") -> list[Tensor]:
        """Fresh tensors, the same values every time."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.id.encode()))
        return self.make(generator, torch.device(device))


def name_of(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _normals(shapes: Sequence[tuple[int, ...]], dtypes: list[torch.dtype]) -> Make:
    """Standard normal tensors: shape i with dtype i, the dtypes repeating."""

    def make(generator: torch.Generator, device: torch.device) -> list[Tensor]:
        return [
            values.normal(generator, shape, dtypes[i % len(dtypes)]).to(device)
            for i, shape in enumerate(shapes)
        ]

    return make


# The shapes of GPT-2 small (148 tensors), with a width of 48 and 512 words.
_LAYER = [(48,), (48,), (48, 144), (144,), (48, 48), (48,), (48,), (48,), (48, 192), (192,)]
GPT2_MINI = [(512, 48), (64, 48), *(12 * [*_LAYER, (192, 48), (48,)]), (48,), (48,)]

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "0-d": [()],
    "one-element": [(1,)],
    "one-tensor": [(40, 25)],
    "two-tensors": [(40, 25), (7,)],
    "empty-only": [(0,)],
    "empties-only": [(0,), (0, 5), (3, 0, 2)],
    "empty-first": [(0,), (5, 3), (70,)],
    "empty-middle": [(5, 3), (0,), (0, 4), (70,)],
    "empty-last": [(5, 3), (70,), (0,)],
    "every-length-to-130": [(n,) for n in range(131)],
    "many-dimensions": [(2, 1, 3, 1, 2, 1, 2, 5)],
}
BORDERS = (
    64,
    2048,
    4096,
    65536,
)  # vector, run, block and chunk sizes in use, each with its neighbours


def _shapes() -> Iterator[Case]:
    for name, shapes in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(f"shape/{name}-{name_of(dtype)}", _normals(shapes, [dtype]))
    for border in BORDERS:
        sizes = [(border - 1,), (border,), (border + 1,)]
        for dtype in REALS:
            yield Case(f"shape/around-{border}-{name_of(dtype)}", _normals(sizes, [dtype]))
    yield Case("shape/gpt2-mini-float32", _normals(GPT2_MINI, [torch.float32]))
    five_hundred = [(1 + n % 37,) for n in range(500)]
    yield Case("shape/five-hundred-small", _normals(five_hundred, [torch.float32, torch.bfloat16]))
    # more tensors than a launch takes whose table is in its arguments: 110, 320, 400, 770
    yield Case("shape/800-scalars", _normals(800 * [()], [torch.float32, torch.bfloat16]))


def _dtypes() -> Iterator[Case]:
    shapes = [(33, 5), (1,), (), (0,), (300,)]
    for dtype in (*REALS, *COMPLEX):
        yield Case(f"dtype/{name_of(dtype)}", _normals(shapes, [dtype]))
    kinds = [*REALS, torch.complex64]
    pairs = [(a, b) for a in kinds for b in kinds if a != b]
    for a, b in pairs:
        yield Case(f"dtype/{name_of(a)}-then-{name_of(b)}", _normals(4 * [(129,)], [a, b]))
    every = [*REALS, *COMPLEX]
    yield Case("dtype/all-mixed", _normals(18 * [(67,)], every))
    yield Case("dtype/all-mixed-reversed", _normals(18 * [(67,)], every[::-1]))
    yield Case("dtype/gpt2-mini-mixed", _normals(GPT2_MINI, [*HALVES, torch.float32]))


def _layouts() -> Iterator[Case]:
    for name, layout in layouts.LAYOUTS.items():
        for dtype in REALS:
            make = partial(layouts.build, layout, dtype)
            yield Case(f"layout/{name}-{name_of(dtype)}", make, cpu_only=name in layouts.CPU_ONLY)
    for name in ("transposed", "every-second", "offset-1"):
        for dtype in COMPLEX:
            make = partial(layouts.build, layouts.LAYOUTS[name], dtype)
            yield Case(f"layout/{name}-{name_of(dtype)}", make)
    for name, layout in layouts.COMPLEX_LAYOUTS.items():
        make = partial(layouts.build, layout, torch.complex64)
        yield Case(f"layout/{name}-complex64", make)
    for name, layout in layouts.FUNCTIONAL_LAYOUTS.items():
        for dtype in (*REALS, torch.complex64):
            make = partial(layouts.build, layout, dtype)
            yield Case(f"layout/{name}-{name_of(dtype)}", make, functional=True)


def _values() -> Iterator[Case]:
    for dtype in REALS:
        for name, pattern in values.patterns(dtype).items():
            yield Case(f"value/{name}-{name_of(dtype)}", partial(values.build, pattern, dtype))
        for name, bad in (("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf"))):
            lanes = partial(values.one_bad_at_every_lane, bad, dtype)
            yield Case(f"value/one-{name}-at-every-lane-{name_of(dtype)}", lanes)
            borders = partial(values.one_bad_at_borders, bad, dtype)
            yield Case(f"value/one-{name}-at-borders-{name_of(dtype)}", borders)
        payloads = partial(values.nan_payloads, dtype)
        yield Case(f"value/nan-payloads-{name_of(dtype)}", payloads)
    for dtype in COMPLEX:
        yield Case(f"value/complex-parts-{name_of(dtype)}", partial(values.complex_parts, dtype))
    yield Case("value/huge-complex64", values.huge_complex)
    yield Case("value/every-float16", partial(values.every_half, torch.float16))
    yield Case("value/every-bfloat16", partial(values.every_half, torch.bfloat16))


CASES: tuple[Case, ...] = (*_shapes(), *_dtypes(), *_layouts(), *_values())
BACKEND_CASES = tuple(case for case in CASES if not case.functional)
