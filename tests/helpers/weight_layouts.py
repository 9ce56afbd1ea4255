"""Weights of small models as Google and Hugging Face lay them out, written by hand for the tests.

Independent of vitscale.models: these know the published layouts alone.
"""

import numpy as np


def google_vit(
    width=32, depth=3, heads=4, mlp=64, patch=4, grid=4, classes=10, *, style="google",
    pre_logits=False, cls=True, pool="token", scan=False, prefix="", seed=0, in_chans=3,
):  # fmt: skip
    """Arrays of a Vision Transformer; style "google" (2020 and AugReg) or "big_vision"."""
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=0.1):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    old = style == "google"
    dim = width // heads
    arrays = {
        "embedding/kernel": draw(patch, patch, in_chans, width),
        "embedding/bias": draw(width),
        "Transformer/encoder_norm/scale": 1 + draw(width),
        "Transformer/encoder_norm/bias": draw(width),
    }
    positions = "Transformer/posembed_input/pos_embedding" if old else "pos_embedding"
    arrays[positions] = draw(1, grid * grid + (old and cls), width)
    if cls:
        arrays["cls"] = draw(1, 1, width)
    if classes:
        arrays |= {"head/kernel": draw(width, classes), "head/bias": draw(classes)}
    if pre_logits:
        arrays |= {"pre_logits/kernel": draw(width, width), "pre_logits/bias": draw(width)}

    def attention(name):
        parts = {}
        for part in ("query", "key", "value"):
            parts[f"{name}/{part}/kernel"] = draw(width, heads, dim, scale=0.3)
            parts[f"{name}/{part}/bias"] = draw(heads, dim)
        return parts | {
            f"{name}/out/kernel": draw(heads, dim, width),
            f"{name}/out/bias": draw(width),
        }

    def dense(name):
        return {
            f"{name}/Dense_0/kernel": draw(width, mlp),
            f"{name}/Dense_0/bias": draw(mlp),
            f"{name}/Dense_1/kernel": draw(mlp, width),
            f"{name}/Dense_1/bias": draw(width),
        }

    def norm(name):
        return {f"{name}/scale": 1 + draw(width), f"{name}/bias": draw(width)}

    numbers = (1, 2, 3) if old else (0, 1, 0)
    blocks = [
        norm("LayerNorm_0")
        | attention(f"MultiHeadDotProductAttention_{numbers[0]}")
        | norm(f"LayerNorm_{numbers[1]}")
        | dense(f"MlpBlock_{numbers[2]}")
        for _ in range(depth)
    ]
    if scan:
        for name in blocks[0]:
            stacked = np.stack([block[name] for block in blocks])
            arrays[f"Transformer/encoderblock/{name}"] = stacked
    else:
        for index, block in enumerate(blocks):
            for name, array in block.items():
                arrays[f"Transformer/encoderblock_{index}/{name}"] = array
    if pool == "map":
        arrays |= {"MAPHead_0/probe": draw(1, 1, width)}
        arrays |= attention("MAPHead_0/MultiHeadDotProductAttention_0")
        arrays |= norm("MAPHead_0/LayerNorm_0") | dense("MAPHead_0/MlpBlock_0")
    return {prefix + name: array for name, array in arrays.items()}


def google_hybrid(units, width=32, **fields):
    """Arrays of a hybrid: a Vision Transformer over the map of a ResNet with these units."""
    rng = np.random.default_rng(7)
    patch = 1 if units else 8
    arrays = google_vit(width=width, patch=patch, in_chans=256 * 2 ** (len(units) - 1) if units
                        else 64, **fields)  # fmt: skip

    def conv(name, side, ins, outs):
        arrays[name] = (rng.standard_normal((side, side, ins, outs)) * 0.1).astype(np.float32)

    def norm(name, channels):
        scale = 1 + 0.1 * rng.standard_normal((1, 1, 1, channels))
        arrays[f"{name}/scale"] = scale.astype(np.float32)
        bias = 0.1 * rng.standard_normal((1, 1, 1, channels))
        arrays[f"{name}/bias"] = bias.astype(np.float32)

    conv("conv_root/kernel", 7, 3, 64)
    for part in ("scale", "bias"):
        arrays[f"gn_root/{part}"] = (1 + 0.1 * rng.standard_normal(64)).astype(np.float32)
    ins = 64
    for stage, count in enumerate(units):
        outs = 256 * 2**stage
        for unit in range(count):
            name = f"block{stage + 1}/unit{unit + 1}"
            shapes = [(1, ins, outs // 4), (3, outs // 4, outs // 4), (1, outs // 4, outs)]
            for number, (side, a, b) in enumerate(shapes, 1):
                conv(f"{name}/conv{number}/kernel", side, a, b)
                norm(f"{name}/gn{number}", b)
            if unit == 0:
                conv(f"{name}/conv_proj/kernel", 1, ins, outs)
                norm(f"{name}/gn_proj", outs)
            ins = outs
    return arrays


def bit_resnet(units, classes=5, seed=0):
    """Arrays of a BiT ResNet of width 1."""
    rng = np.random.default_rng(seed)
    arrays = {}

    def conv(name, side, ins, outs):
        kernel = (rng.standard_normal((side, side, ins, outs)) * 0.1).astype(np.float32)
        arrays[f"resnet/{name}/standardized_conv2d/kernel"] = kernel

    def norm(name, channels):
        for part, start in (("gamma", 1), ("beta", 0)):
            values = start + 0.1 * rng.standard_normal(channels)
            arrays[f"resnet/{name}group_norm/{part}"] = values.astype(np.float32)

    conv("root_block", 7, 3, 64)
    ins = 64
    for stage, count in enumerate(units):
        outs = 256 * 2**stage
        for unit in range(count):
            name = f"block{stage + 1}/unit{unit + 1:02d}"
            shapes = [(1, ins, outs // 4), (3, outs // 4, outs // 4), (1, outs // 4, outs)]
            for letter, (side, a, b) in zip("abc", shapes, strict=True):
                norm(f"{name}/{letter}/", a)
                conv(f"{name}/{letter}", side, a, b)
            if unit == 0:
                conv(f"{name}/a/proj", 1, ins, outs)
            ins = outs
    norm("", ins)
    head = (rng.standard_normal((1, 1, ins, classes)) * 0.1).astype(np.float32)
    bias = rng.standard_normal(classes).astype(np.float32)
    return arrays | {"resnet/head/conv2d/kernel": head, "resnet/head/conv2d/bias": bias}
