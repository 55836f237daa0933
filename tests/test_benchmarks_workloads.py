"""Workloads: the shapes are those of the models they name, the gradients as promised."""

import math
from collections.abc import Callable

import pytest
import torch

from fastclip.benchmarking import models
from fastclip.benchmarking.checks import WrongResult, require_right
from fastclip.benchmarking.models import Shape
from fastclip.benchmarking.workloads import (
    DTYPES,
    WORKLOADS,
    Clip,
    clip,
    copies_beyond,
    dtypes,
    gradients,
    plain_statistics,
    shapes,
)

SMALL: list[Shape] = [(300, 7), (65,), (1,)]
HALVES = [torch.float32, torch.bfloat16, torch.float16]

each_dtype = pytest.mark.parametrize("dtype", HALVES, ids=str)


def count(shapes: list[Shape]) -> tuple[int, int]:
    return len(shapes), sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize(
    ("shapes", "tensors", "elements"),
    [
        pytest.param(models.resnet50(), 161, 25_557_032, id="ResNet-50"),
        pytest.param(models.vit(), 152, 86_567_656, id="ViT-B/16"),
        pytest.param(models.bert(), 391, 335_141_888, id="BERT-large"),
        pytest.param(models.gpt2(), 148, 124_439_808, id="GPT-2 small"),
        pytest.param(models.gpt2(1024, 24), 292, 354_823_168, id="GPT-2 medium"),
        pytest.param(models.gpt2(1280, 36), 436, 774_030_080, id="GPT-2 large"),
        pytest.param(models.gpt2(1600, 48), 580, 1_557_611_200, id="GPT-2 XL"),
        pytest.param(models.llama(), 291, 8_030_261_248, id="Llama 3 8B"),
        pytest.param(models.experts(), 18_867, 30_532_122_624, id="Qwen3-30B-A3B"),
    ],
)
def test_models_have_their_published_counts(
    shapes: list[Shape], tensors: int, elements: int
) -> None:
    assert count(shapes) == (tensors, elements)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llama3-8b/16", models.llama()),
        ("moe-20k/256", models.experts(models.EXPERT_LAYERS)),
    ],
)
def test_a_scaled_model_states_its_factor(name: str, full: list[Shape]) -> None:
    """The factor is that of the matrices; vectors shrink by its root."""
    small = shapes(name)
    assert len(small) == len(full)
    assert WORKLOADS[name].factor == int(name.split("/")[1])
    ratio = count(full)[1] / count(small)[1]
    assert ratio == pytest.approx(WORKLOADS[name].factor, rel=0.02)


def test_the_list_of_experts_has_twenty_thousand_tensors() -> None:
    assert len(models.experts(models.EXPERT_LAYERS - 1)) < 20_000 <= len(shapes("moe-20k/256"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2000x1024", (2000, 2000 * 1024)),
        ("20000x1", (20_000, 20_000)),
        ("one", (1, 1 << 26)),
        ("lopsided", (4001, 128_256 * 1024 + 4000 * 1024)),
    ],
)
def test_the_synthetic_edges(name: str, expected: tuple[int, int]) -> None:
    assert count(shapes(name)) == expected


def test_every_workload_says_where_its_shapes_are_from() -> None:
    assert all(one.source and "\n" not in one.source for one in WORKLOADS.values())
    with pytest.raises(KeyError, match="no workload is called 'gpt5'; there are resnet50"):
        shapes("gpt5")


def test_mixed_keeps_vectors_precise() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    assert dtypes([(4, 4), (4,), (2, 2, 2), ()], "mixed") == [bf16, f32, bf16, f32]
    assert dtypes([(4,)] * 3, "mixed") == [f32, bf16, f32]
    assert dtypes(SMALL, "float16") == [torch.float16] * 3


@pytest.mark.parametrize("name", DTYPES)
def test_gradients_have_memory_of_their_own_and_the_promised_values(name: str) -> None:
    long: list[Shape] = [*SMALL, (1 << 20, 2)]
    grads = gradients(long, dtypes(long, name))
    assert [g.dtype for g in grads] == dtypes(long, name)
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 4
    for grad in grads:
        assert grad.abs().min() >= 0.5
        assert grad.abs().max() <= 1.5
    last = grads[-1].view(-1).double()
    assert last.square().mean().item() == pytest.approx(13 / 12, rel=5e-3)
    assert abs(last.mean().item()) < 5e-3
    assert not torch.equal(last[: 1 << 20], last[1 << 20 :])  # its pieces differ
    again = gradients(long, dtypes(long, name))
    assert all(map(torch.equal, grads, again))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    "shapes", [SMALL, models.many(50, 16), models.gpt2(width=8)], ids=["small", "many", "gpt2"]
)
def test_a_clipped_workload_clips_on_every_repetition(
    shapes: list[Shape], name: str, copies: int
) -> None:
    problem = clip(shapes, dtypes(shapes, name), clips=True, copies=copies)
    originals = [g.clone() for g in problem.gradients]
    for _ in range(5):
        problem.restore()
        assert all(map(torch.equal, problem.gradients, originals))
        norm = torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm)
        assert norm > 1.5 * problem.max_norm
        assert problem.left()[1] < 0.7
        for grad, original in zip(problem.gradients, originals, strict=True):
            assert (grad.double() / original.double()).max() < 0.7
            assert grad.abs().min() > torch.finfo(grad.dtype).smallest_normal


@each_dtype
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_an_unclipped_workload_stays_as_it_is(dtype: torch.dtype, norm_type: float) -> None:
    problem = clip(SMALL, dtype, norm_type=norm_type)
    originals = [g.clone() for g in problem.gradients]
    norm = torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm, norm_type)
    assert 0 < norm < 0.7 * problem.max_norm < math.inf
    assert problem.left() == (1.0, 1.0)
    assert all(map(torch.equal, problem.gradients, originals))


def test_copies_take_turns_in_memory_of_their_own() -> None:
    problem = clip(SMALL, copies=3)
    seen = []
    for _ in range(6):
        problem.restore()
        seen.append(problem.gradients[0].data_ptr())
    assert len(set(seen)) == 3
    assert seen[:3] == seen[3:]
    assert [grads[0].data_ptr() for grads in problem.copies()] == [seen[-1], *seen[:2]]


@pytest.mark.parametrize(
    ("cache", "copies"),
    [(7168, 2), (7167, 2), (3584, 1), (3585, 2), (8000, 3), (71_680, 20)],
    ids=["just fits", "does not fit", "twice", "not twice", "rounded up", "small"],
)
def test_copies_are_as_many_as_push_each_other_out(cache: int, copies: int) -> None:
    """They touch 4 bytes for each of 1,280 elements and 1,024 for each of two tensors: 7,168."""
    assert copies_beyond(cache, [(100, 12), (80,)], torch.float32) == copies


def norm_of(problem: Clip) -> torch.Tensor:
    return torch.cat([grad.flatten() for grad in problem.gradients]).norm()


def right(problem: Clip) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(problem.parameters, problem.max_norm)


def zero(problem: Clip) -> torch.Tensor:
    for grad in problem.gradients:
        grad.zero_()
    return torch.tensor(math.inf)


def nothing(problem: Clip) -> torch.Tensor:
    return norm_of(problem)


def silent(problem: Clip) -> None:
    return None


def all_but_one(problem: Clip) -> torch.Tensor:
    kept = problem.gradients[20].clone()
    norm = right(problem)
    problem.gradients[20].copy_(kept)
    return norm


def one_element(problem: Clip) -> torch.Tensor:
    norm = norm_of(problem)
    problem.gradients[20].view(-1)[7] *= 1.5
    return norm


def spoiled(problem: Clip) -> torch.Tensor:
    norm = right(problem)
    problem.gradients[20].view(-1)[7] = math.nan
    return norm


MANY: list[Shape] = [(30, 70)] * 40


@pytest.mark.parametrize(
    ("call", "clips", "words"),
    [
        (zero, True, "returned a norm of inf, where"),
        (nothing, True, "left 1 to 1 of the elements"),
        (silent, True, "left 1 to 1 of the elements"),
        (all_but_one, True, r"left 0\.\d+ to 1 of"),
        (spoiled, True, "left nan to nan of"),
        (one_element, False, r"left 1 to 1\.5 of the elements of the gradients, where 1 is right"),
    ],
)
def test_a_call_that_does_not_do_its_work_is_a_wrong_result(
    call: Callable[[Clip], torch.Tensor | None], clips: bool, words: str
) -> None:
    problem = clip(MANY, clips=clips)
    with pytest.raises(WrongResult, match=words):
        require_right("side", problem, call(problem))


def test_later_calls_are_looked_at_in_other_tensors_each_time() -> None:
    problem = clip(MANY, clips=True)
    for _ in range(3):
        problem.restore()
        require_right("side", problem, right(problem))
    found = 0
    for _ in range(5):  # twice through all 40
        problem.restore()
        norm = right(problem)
        problem.gradients[20].mul_(2.0)
        found += problem.left(whole=False)[1] > 0.9
    assert norm > problem.max_norm
    assert found == 2


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("clips", [False, True])
def test_what_torch_does_is_right_in_every_dtype(name: str, clips: bool) -> None:
    problem = clip(MANY, dtypes(MANY, name), clips=clips)
    require_right("torch", problem, right(problem))


def test_the_statistics_baseline_is_right() -> None:
    nan, inf = math.nan, math.inf
    grads = [torch.tensor([3.0, -4.0, 0.0]), torch.tensor([[nan, inf], [-inf, -2.0]])]
    stats = plain_statistics(grads)
    assert stats["norms"][0] == 5.0
    assert stats["norms"][1].isnan()
    assert stats["max_abs"].tolist() == [4.0, 2.0]
    assert stats["nan_count"].tolist() == [0, 1]
    assert stats["inf_count"].tolist() == [0, 2]
    assert stats["zero_count"].tolist() == [1, 0]
