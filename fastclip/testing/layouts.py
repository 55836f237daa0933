"""Ways a gradient's elements can lie in memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from fastclip.testing import values

Normal = Callable[..., Tensor]  # normal(*shape) -> contiguous tensor of the case's dtype
Layout = Callable[[Normal], list[Tensor]]


def build(
    layout: Layout, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    """The layout's tensors, laid out on the device: a copy would undo strides and offsets."""

    def normal(*shape: int) -> Tensor:
        return values.normal(generator, shape, dtype).to(device)

    return layout(normal)


def _offset(offset: int) -> Layout:
    """Views that start `offset` elements into their storage, with lengths around a vector's."""
    return lambda normal: [normal(n + offset)[offset:] for n in (1, 15, 16, 17, 300, 5000)]


def _byte_offset(offset: int) -> Layout:
    """Tensors at addresses that are no multiple of the element size, from torch.frombuffer."""

    def layout(normal: Normal) -> list[Tensor]:
        result = []
        for n in (1, 15, 16, 17, 300, 5000):
            source = normal(n)
            buffer = bytearray(offset) + bytes(source.view(torch.uint8).tolist())
            result.append(torch.frombuffer(buffer, dtype=source.dtype, offset=offset))
        return result

    return layout


def _strided_overhang(normal: Normal) -> list[Tensor]:
    """Dimensions of size 1 may have any stride; rows longer than what is seen of them."""
    return [normal(4000).as_strided((5, 1, 7), (7, 1000, 1)), normal(40, 50)[:, 3:40]]


LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda normal: [normal(30, 70)],
    "transposed": lambda normal: [normal(30, 70).t(), normal(3, 65).t()],
    "permuted": lambda normal: [normal(6, 7, 8).permute(2, 0, 1), normal(5, 6, 7).permute(1, 0, 2)],
    "channels-last": lambda normal: [
        normal(4, 3, 9, 9).to(memory_format=torch.channels_last),
        normal(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    ],
    "every-second": lambda normal: [normal(999)[::2], normal(8, 33)[:, ::2], normal(9, 33)[::2]],
    "every-third-offset-1": lambda normal: [
        normal(3000)[1::3],
        normal(10, 12, 14)[1::3, ::3, 1::3],
    ],
    "column": lambda normal: [normal(500, 3)[:, 1], normal(70, 70).diagonal()],
    "overhang": _strided_overhang,
    "offset-1": _offset(1),
    "offset-2": _offset(2),
    "offset-3": _offset(3),
    "byte-offset-1": _byte_offset(1),
    "byte-offset-2": _byte_offset(2),
    "byte-offset-3": _byte_offset(3),
}
CPU_ONLY = ("byte-offset-1", "byte-offset-2", "byte-offset-3")

COMPLEX_LAYOUTS: dict[str, Layout] = {
    # lazily conjugated and lazily negated views: their memory holds other values than they show
    "conjugate": lambda normal: [normal(50).conj(), normal(6, 7).conj().t()],
    "negated": lambda normal: [normal(50).conj().imag, normal(50).imag, normal(50).real],
}


def _sparse(normal: Normal, indices: list[list[int]], size: tuple[int, ...]) -> Tensor:
    stored = normal(len(indices[0]), *size[len(indices) :])
    where = torch.tensor(indices, dtype=torch.int64, device=stored.device)
    return torch.sparse_coo_tensor(where, stored, size, check_invariants=True)


# A backend is given tensors whose elements are all stored, each in its own place.
FUNCTIONAL_LAYOUTS: dict[str, Layout] = {
    "expanded-scalar": lambda normal: [normal().expand(1000), normal(1).expand(3, 5)],
    "expanded-rows": lambda normal: [normal(1, 70).expand(30, 70), normal(4)],
    "expanded-columns": lambda normal: [
        normal(70, 1).expand(70, 30),
        normal(3, 1, 5).expand(3, 9, 5),
    ],
    "sparse-coalesced": lambda normal: [
        _sparse(normal, [[0, 3, 7]], (10, 6)).coalesce(),
        _sparse(normal, [[0, 1], [2, 0]], (2, 3)).coalesce(),
    ],
    # entries of the same row add up before anything is measured
    "sparse-uncoalesced": lambda normal: [_sparse(normal, [[3, 0, 3, 3, 9]], (10, 6)), normal(5)],
    "sparse-empty": lambda normal: [_sparse(normal, [[]], (10, 6)), normal(5)],
}
