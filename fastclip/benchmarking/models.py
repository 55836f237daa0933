"""Shapes of the parameters of published models, in the order of their modules.

Every function takes the sizes of its model and has those of one member of the family as defaults,
so that a model scaled down is the same function with smaller widths.
"""

Shape = tuple[int, ...]

EXPERT_LAYERS = 51  # of 393 tensors: the first count of layers with 20,000 tensors and more


def gpt2(
    width: int = 768, blocks: int = 12, vocabulary: int = 50257, context: int = 1024
) -> list[Shape]:
    """GPT-2; the defaults are GPT-2 small: 148 tensors, 124,439,808 elements."""
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp: list[Shape] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *attention, *norm, *mlp]
    return [(vocabulary, width), (context, width), *block * blocks, *norm]


def resnet50() -> list[Shape]:
    """ResNet-50 with 1,000 classes: 161 tensors, 25,557,032 elements."""
    shapes = _convolution(64, 3, 7)
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        middle = 64 << stage
        for block in range(blocks):
            shapes += _convolution(middle, width, 1)
            shapes += _convolution(middle, middle, 3)
            shapes += _convolution(4 * middle, middle, 1)
            if block == 0:
                shapes += _convolution(4 * middle, width, 1)
            width = 4 * middle
    return [*shapes, (1000, width), (1000,)]


def bert(width: int = 1024, layers: int = 24, vocabulary: int = 30522) -> list[Shape]:
    """BERT with its pooler; the defaults are BERT-large, uncased: 391 tensors, 335,141,888."""
    norm: list[Shape] = [(width,), (width,)]
    dense: list[Shape] = [(width, width), (width,)]
    mlp: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    embeddings: list[Shape] = [(vocabulary, width), (512, width), (2, width), *norm]
    return [*embeddings, *[*dense * 4, *norm, *mlp, *norm] * layers, *dense]


def vit(width: int = 768, layers: int = 12, patch: int = 16) -> list[Shape]:
    """A vision transformer for 224 x 224 pixels and 1,000 classes; the defaults are ViT-B/16: 152
    tensors, 86,567,656 elements."""
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    places = (224 // patch) ** 2 + 1
    stem: list[Shape] = [
        *[(1, 1, width), (1, places, width)],
        *[(width, 3, patch, patch), (width,)],
    ]
    return [*stem, *[*norm, *attention, *norm, *mlp] * layers, *norm, (1000, width), (1000,)]


def llama(
    width: int = 4096, layers: int = 32, key: int = 1024, mlp: int = 14336, vocabulary: int = 128256
) -> list[Shape]:
    """Llama 3; the defaults are its 8B: 291 tensors, 8,030,261,248 elements. `key` is the width of
    keys and values, which groups of heads share."""
    attention: list[Shape] = [(width, width), (key, width), (key, width), (width, width)]
    block: list[Shape] = [*attention, *[(mlp, width)] * 2, (width, mlp), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,), (vocabulary, width)]


def experts(layers: int = 48, divisor: int = 1) -> list[Shape]:
    """Qwen3-30B-A3B, 128 experts a layer, every dimension divided by `divisor`; as published (48
    layers, not divided) 18,867 tensors, 30,532,122,624 elements."""
    width, queries, keys, head = (n // divisor for n in (2048, 4096, 512, 128))
    mlp, vocabulary = 768 // divisor, 151936 // divisor
    attention: list[Shape] = [(queries, width), (keys, width), (keys, width), (width, queries)]
    expert: list[Shape] = [(mlp, width), (mlp, width), (width, mlp)]
    norms: list[Shape] = [(head,), (head,), (width,), (width,)]
    layer = [*attention, *norms, (128, width), *expert * 128]
    return [(vocabulary, width), *layer * layers, (width,), (vocabulary, width)]


def many(count: int, elements: int) -> list[Shape]:
    """`count` vectors of `elements` each: where the cost per tensor shows."""
    return [(elements,)] * count


def lopsided(rows: int = 128256, width: int = 1024, biases: int = 4000) -> list[Shape]:
    """One embedding of Llama 3's vocabulary, then thousands of vectors."""
    return [(rows, width), *many(biases, width)]


def _convolution(outputs: int, inputs: int, size: int) -> list[Shape]:
    """A convolution without bias, and the batch norm behind it."""
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]
