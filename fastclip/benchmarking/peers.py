"""Who else clips by the global norm: each peer as one entry of a table.

A peer that cannot take part (not installed, fails to import, cannot take this list) is a gap with
its reason, never a crash: `contest` puts it beside the sides that run.
"""

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

import fastclip
from fastclip.benchmarking.checks import WrongResult, require_gradients, require_right
from fastclip.benchmarking.contest import OURS, Contest, Size
from fastclip.benchmarking.measure import Side, once
from fastclip.benchmarking.workloads import Clip

# XLA compiled 148 tensors in 1.7 s, 500 in 8 s, 2,000 in 39 s (EPYC, 2 cores, JAX 0.10).
OPTAX_TENSORS = 450

Call = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """`prepare` imports what it needs and returns the call on the parameters of a problem."""

    name: str
    about: str
    prepare: Callable[[Clip], Call]
    packages: tuple[str, ...] = ()
    module: str | None = None  # the one that is imported
    in_place: bool = True
    only_l2: bool = False
    most_tensors: int | None = None
    sums_in_float16: bool = False  # the squares of float16 gradients
    remark: Callable[[], str | None] = lambda: None  # on how it runs here

    def missing(self) -> str | None:
        """Why it cannot run in this environment, or None."""
        if self.module is None:
            return None
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            return f"no module named {error.name}"
        except Exception as error:
            # Whatever an import of somebody else's may raise is the reason that the table gives.
            return f"{self.module} does not import: {type(error).__name__}: {error}".split("\n")[0]
        return None

    def why_not(self, problem: Clip, memory_bytes: int) -> str | None:
        """Why it takes no part in this one, or None."""
        if reason := self.missing():
            return reason
        if self.only_l2 and problem.norm_type != 2:
            return "it has the L2 norm only"
        if self.most_tensors is not None and problem.n_tensors > self.most_tensors:
            return f"its compiler takes too long for {problem.n_tensors:,} tensors"
        half = any(grad.dtype == torch.float16 for grad in problem.gradients)
        if self.sums_in_float16 and half and problem.norm**2 > torch.finfo(torch.float16).max:
            return "its float16 sum of squares overflows"
        if not self.in_place and problem.gradients[0].device.type != "cpu":
            return "its arrays take the place of gradients on a CPU only"
        if not self.in_place and 2 * problem.n_bytes > memory_bytes:
            return f"its results beside the gradients take {2 * problem.n_bytes / 2**30:.1f} GiB"
        return None

    def note(self) -> str:
        """Versions, and what is different about it."""
        parts = [f"{name} {importlib.metadata.version(name)}" for name in self.packages]
        remark = self.remark()
        if not self.in_place:
            parts.append("out of place")
        return ", ".join(parts if remark is None else [*parts, remark])

    def side(self, problem: Clip) -> Side:
        check = require_right if self.in_place else require_right_results
        call = self.prepare(problem)
        return Side(self.name, call, problem.restore, partial(check, self.name, problem))


def contest(problem: Clip, size: Size, peers: Sequence[Peer] | None = None) -> Contest:
    """fastclip against all peers; ratios go to the faster of torch's two implementations."""
    sides, gaps, notes = [OURSELVES.side(problem)], {}, {}
    for peer in PEERS if peers is None else peers:
        reason = peer.why_not(problem, size.memory_bytes)
        side = peer.side(problem) if reason is None else None
        if side is not None and peer.module is not None:
            reason = _fault(side)
        if reason is not None or side is None:
            gaps[peer.name] = str(reason)
            continue
        sides.append(side)
        notes[peer.name] = peer.note()
    return Contest(sides, problem.n_bytes, problem.n_tensors, TORCH, gaps, notes)


def _fault(side: Side) -> str | None:
    """What is wrong with a first call; of somebody else's code any exception is an answer."""
    try:
        once(side)
    except WrongResult as error:
        return f"wrong result: {error}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}".split("\n")[0]
    return None


def require_right_results(name: str, problem: Clip, results: Sequence[Any]) -> None:
    """As require_right, for a peer that returns clipped gradients and leaves these alone."""
    require_gradients(name, problem, [from_dlpack(one) for one in results])
    if problem.left(whole=False) != (1.0, 1.0):
        raise WrongResult(f"{name} changed the gradients, which it should have copied")


def _clip_with(function: Callable[..., Any], problem: Clip) -> Call:
    return lambda: function(problem.parameters, problem.max_norm, problem.norm_type)


def _torch(problem: Clip, foreach: bool) -> Call:
    return _clip_with(partial(torch.nn.utils.clip_grad_norm_, foreach=foreach), problem)


def _timm(problem: Clip) -> Call:
    clip = importlib.import_module("timm.utils").dispatch_clip_grad
    return _clip_with(lambda parameters, norm, p: clip(parameters, norm, norm_type=p), problem)


def _deepspeed(problem: Clip) -> Call:
    """It averages over the data-parallel group, so there has to be one: of this process alone."""
    utils = importlib.import_module("deepspeed.runtime.utils")
    _process_group()
    return _clip_with(utils.clip_grad_norm_, problem)


@cache
def _process_group() -> None:
    dist: Any = torch.distributed  # not everything in it is exported to a type checker
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    comm = importlib.import_module("deepspeed.comm")
    comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def _optax(problem: Clip) -> Call:
    """The jitted transformation, compiled for this list before anything is timed. Arrays share the
    memory of the gradients; the results do not."""
    clip = _jitted()
    jax = importlib.import_module("jax")
    copies = [[jax.dlpack.from_dlpack(grad) for grad in grads] for grads in problem.copies()]
    jax.block_until_ready(clip(copies[0], problem.max_norm))
    return lambda: jax.block_until_ready(clip(copies[problem.turn], problem.max_norm))


def _other_threads() -> str | None:
    """A number of threads that the user chose for XLA is kept, and said."""
    threads = os.environ.get("NPROC")
    ours = threads in (None, str(torch.get_num_threads()))
    return None if ours else f"NPROC={threads} is kept"


@cache
def _jitted() -> Any:
    """One function for all lists, so that a list is compiled once whatever the threshold."""
    # What XLA makes as many threads as; it reads this when it starts, so in a process whose thread
    # count changes later it keeps the first one.
    os.environ.setdefault("NPROC", str(torch.get_num_threads()))
    jax, optax = importlib.import_module("jax"), importlib.import_module("optax")

    def clip(grads: list[Any], max_norm: float) -> list[Any]:
        return optax.clip_by_global_norm(max_norm).update(grads, optax.EmptyState())[0]

    return jax.jit(clip)


OURSELVES = Peer(OURS, "clip_grad_norm_", partial(_clip_with, fastclip.clip_grad_norm_))
TORCH = ("torch foreach", "torch for-loop")
PEERS = [
    Peer(TORCH[0], "clip_grad_norm_(foreach=True)", partial(_torch, foreach=True)),
    Peer(
        TORCH[1],
        "clip_grad_norm_(foreach=False): what torch chooses on a CPU",
        partial(_torch, foreach=False),
    ),
    Peer("timm", "utils.dispatch_clip_grad", _timm, ("timm",), "timm.utils"),
    Peer(
        "deepspeed",
        "runtime.utils.clip_grad_norm_, in a process group of one",
        _deepspeed,
        ("deepspeed",),
        "deepspeed.runtime.utils",
    ),
    Peer(
        "optax",
        "clip_by_global_norm under jax.jit: returns new arrays",
        _optax,
        ("jax", "optax"),
        "optax",
        in_place=False,
        only_l2=True,
        most_tensors=OPTAX_TENSORS,
        sums_in_float16=True,
        remark=_other_threads,
    ),
]
NAMES = tuple(peer.name for peer in PEERS)
