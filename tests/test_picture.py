"""tools/picture.py, and the picture in the README that it drew."""

import struct

import torch

from tools.picture import BAD, HEIGHT, ROOT, SCALE, WIDTH, example


def test_one_batch_is_bad() -> None:
    train, unspoilt = example(), example(bad=None)
    spoilt, sound = train.Text(), unspoilt.Text()
    for number in (0, BAD - 1, BAD, BAD + 1):
        (inputs, targets), (own_inputs, own_targets) = spoilt.batch(number), sound.batch(number)
        assert torch.equal(inputs, own_inputs)
        assert torch.equal(targets, own_targets) == (number != BAD)
        assert targets.max() < spoilt.vocabulary


def test_the_picture_is_small() -> None:
    data = (ROOT / "docs" / "report.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (WIDTH * SCALE, HEIGHT * SCALE)
    assert len(data) <= 150_000
    assert "](docs/report.png)" in (ROOT / "README.md").read_text(encoding="utf-8")
