"""Libraries that clip by torch's functions, served by the patch; skipped where they are missing."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fastclip.integrations.torch import patch
from tests.making import floats, grads_of, parameters

BF16 = torch.bfloat16


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", ["norm", "value"])
def test_timm_dispatches_to_fastclip(mode: str) -> None:
    timm = pytest.importorskip("timm.utils.clip_grad", reason="timm is not installed")
    params = parameters(floats(3.0, -4.0, dtype=BF16))
    with patch():
        if mode == "value":
            with pytest.raises(ValueError, match="clip_value must be a number of at least 0"):
                timm.dispatch_clip_grad(params, -1.0, mode=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            timm.dispatch_clip_grad(params, 0.5, mode=mode)
    expected = [0.5, -0.5] if mode == "value" else [0.3, -0.4]
    assert grads_of(params)[0].tolist() == pytest.approx(expected, rel=4e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_trl_trainer_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `grad_norm` is that of fastclip, which does not round it to the gradients' dtype."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with patch():
        patched = _train(trl, datasets, tmp_path)
    plain = _train(trl, datasets, tmp_path)
    assert [norm for norm, _ in patched] != [norm for norm, _ in plain]
    for (norm, loss), (other_norm, other_loss) in zip(patched, plain, strict=True):
        assert norm == pytest.approx(other_norm, rel=4e-3)
        assert loss == pytest.approx(other_loss, rel=1e-2)
        assert torch.tensor(other_norm).to(BF16).item() == other_norm


def _train(trl: Any, datasets: Any, folder: Path) -> list[tuple[float, float]]:
    """Norm and loss of three steps of supervised fine-tuning of a tiny GPT-2 in bfloat16."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    rows = [{"input_ids": torch.randint(1, 64, (16,)).tolist()} for _ in range(24)]
    vocabulary = {f"t{number}": number for number in range(64)}
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    trainer = trl.SFTTrainer(
        model=transformers.GPT2LMHeadModel(config).to(BF16),
        args=trl.SFTConfig(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            max_grad_norm=0.1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="t0", pad_token="t0"
        ),
    )
    trainer.train()
    return [(row["grad_norm"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
