"""What a model costs: parameters, arithmetic and memory, from its config alone, without torch.

Legend of the formulas: T tokens, N patches, D embed_dim, M mlp_dim, h heads, K classes, P patch
side, c channels, L blocks, B micro batch, s bytes of a compute number, W ranks.
"""

from dataclasses import dataclass
from typing import Literal

from vitscale.config.errors import UserError
from vitscale.config.model import ModelConfig
from vitscale.config.variants import ModelShape, is_resnet, resolve_resnet, resolve_shape
from vitscale.models.resnet_cost import ResNetCost, resnet_cost

Precision = Literal["fp32", "bf16", "fp16"]

_NUM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one rank, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all purposes."""
        return self.weights + self.gradients + self.optimizer + self.ema + self.activations


def _num_classes(config: ModelConfig) -> int:
    if config.num_classes is None:
        raise UserError("model.num_classes is not set; give the number, or 0 to count no head")
    return config.num_classes


def num_params(config: ModelConfig) -> int:
    """Count the trained numbers; the fixed sincos2d table is none.

    Args:
        config: num_classes must be known; 0 counts the model without classifier.
    """
    k = _num_classes(config)
    if is_resnet(config.variant):
        resnet = _resnet_cost(config)
        return resnet.params + resnet.channels * k + k
    shape = resolve_shape(config)
    d = shape.embed_dim
    patch_bias = 0 if config.pre_norm else d
    if shape.backbone is None:
        patch_embed = config.in_chans * shape.patch_size**2 * d + patch_bias
    else:
        stem = _backbone_cost(config, shape)
        patch_embed = stem.params + stem.channels * shape.patch_size**2 * d + patch_bias
    norms = int(config.pre_norm) + int(config.final_norm)
    pre_logits = d * d + d if config.head == "mlp" else 0
    return (
        patch_embed
        + shape.num_prefix_tokens * d
        + _position_params(config, shape)
        + shape.depth * _block_params(config, shape)
        + norms * _norm_params(config, d)
        + (_pool_params(config, shape) if config.global_pool == "map" else 0)
        + pre_logits
        + d * k
        + k
    )


def _norm_params(config: ModelConfig, width: int) -> int:
    return width if config.norm == "rmsnorm" else 2 * width


def _position_params(config: ModelConfig, shape: ModelShape) -> int:
    d, (rows, columns) = shape.embed_dim, shape.grid_size
    copies = shape.depth if config.pos_embed_at == "every" else 1
    if config.pos_embed == "learned":
        return copies * (shape.num_prefix_rows + shape.num_patches) * d
    if config.pos_embed == "learned2d":
        return copies * (rows + columns) * d // 2
    if config.pos_embed == "relative":
        attentions = copies * (2 if config.block == "pairs" else 1)
        return attentions * (2 * shape.num_patches - 1) * (d // shape.num_heads)
    return 0


def _block_params(config: ModelConfig, shape: ModelShape) -> int:
    d, m = shape.embed_dim, shape.mlp_dim
    norm = _norm_params(config, d)
    qk_norms = 2 * _norm_params(config, d // shape.num_heads) if config.qk_norm else 0
    attention = 3 * d * d + (3 * d if config.qkv_bias else 0) + d * d + d + qk_norms
    widened = 2 * m if config.mlp == "swiglu" else m
    mlp = d * widened + widened + m * d + d
    scale = 0 if config.init_values is None else d
    if config.block == "parallel":
        return norm + attention + mlp + scale
    serial = 2 * (norm + scale) + attention + mlp
    return 2 * serial if config.block == "pairs" else serial


def _pool_params(config: ModelConfig, shape: ModelShape) -> int:
    d, m = shape.embed_dim, shape.mlp_dim
    return d + 4 * (d * d + d) + _norm_params(config, d) + 2 * d * m + m + d


def _resnet_cost(config: ModelConfig) -> ResNetCost:
    shape = resolve_resnet(config)
    return resnet_cost(
        config.in_chans, config.img_size, shape.layers, shape.width_factor, pre_activation=True
    )


def _backbone_cost(config: ModelConfig, shape: ModelShape) -> ResNetCost:
    assert shape.backbone is not None
    return resnet_cost(config.in_chans, config.img_size, shape.backbone, 1, pre_activation=False)


def forward_macs(config: ModelConfig) -> int:
    """Count multiply-accumulates of one example's forward pass.

    Counted are the matrix products and convolutions: N*c*P^2*D for the patches, T*(4*D^2 + 2*D*M) +
    2*T^2*D a block, D^2 for the hidden head layer and D*K for the classifier. Norms, activations,
    softmax, weight standardisation, dropping and additions are not. Published tables of
    transformers usually leave the classifier out: set num_classes to 0 for those.
    """
    k = _num_classes(config)
    if is_resnet(config.variant):
        resnet = _resnet_cost(config)
        return resnet.macs + resnet.channels * k
    shape = resolve_shape(config)
    d, m, n = shape.embed_dim, shape.mlp_dim, shape.num_patches
    t = n + shape.num_prefix_tokens
    if shape.backbone is None:
        patch_embed = n * config.in_chans * shape.patch_size**2 * d
    else:
        stem = _backbone_cost(config, shape)
        patch_embed = stem.macs + n * stem.channels * shape.patch_size**2 * d
    mlp = 3 * d * m if config.mlp == "swiglu" else 2 * d * m
    block = t * (4 * d * d + mlp) + 2 * t * t * d
    if config.pos_embed == "relative":
        block += n * (2 * n - 1) * d
    if config.block == "pairs":
        block *= 2
    # One query: its own layers once, keys and values for every patch.
    pool = 2 * d * d + 2 * n * d * d + 2 * n * d + 2 * d * m if config.global_pool == "map" else 0
    pre_logits = d * d if config.head == "mlp" else 0
    return patch_embed + shape.depth * block + pool + pre_logits + d * k


def train_flops_per_example(config: ModelConfig) -> int:
    """Count the FLOPs that training needs for one example.

    Two FLOPs a multiply-accumulate, and the backward pass costs twice the forward one. Work that
    activation checkpointing repeats is not counted, as in model FLOPs utilisation.

    Source:
        arXiv:2204.02311 appendix B for the convention.
    """
    return 6 * forward_macs(config)


def activation_bytes(config: ModelConfig, precision: Precision, micro_batch: int) -> int:
    """Estimate what the backward pass of one micro-batch keeps at its peak, with fused attention.

    A plain block keeps T*(8*D + 2*M)*s bytes an example: inputs and outputs of both norms (4 D), q,
    k, v (3 D), the attention's output (D), inputs and output of the GELU (2 M); and in float32
    T*(h + 4): the attention's log-sum and the norms' mean and deviation. Dropout adds a byte for
    each number that it touches (CUDA; CPU kernels keep more), T*(2*D + M). The image and both sides
    of the last norm come on top.
    A ResNet keeps the inputs of its norms and convolutions, and its kernels standardised.
    With checkpointing each block or unit keeps its input only, T*D*s, and one at a time all of it.
    Temporaries inside a kernel are not counted.
    """
    s = _NUM_BYTES[precision]
    if is_resnet(config.variant):
        return _resnet_bytes(_resnet_cost(config), config.grad_checkpointing, s, micro_batch)
    shape = resolve_shape(config)
    d = shape.embed_dim
    t = shape.num_patches + shape.num_prefix_tokens
    tokens = t * d * s
    block = _block_bytes(config, shape, s)
    kept = shape.depth * block
    if config.grad_checkpointing:
        kept = shape.depth * tokens + block - tokens
    first = t * d if config.drop_rate > 0 else 0
    first += tokens if config.pre_norm else 0
    last = 2 * tokens + 8 * t
    # The pooling's keys and values.
    last += 2 * tokens if config.global_pool == "map" else 0
    total = micro_batch * (first + kept + last)
    if shape.backbone is None:
        return total + micro_batch * config.in_chans * config.img_size**2 * s
    stem = _backbone_cost(config, shape)
    return total + _resnet_bytes(stem, config.grad_checkpointing, s, micro_batch)


def _block_bytes(config: ModelConfig, shape: ModelShape, s: int) -> int:
    """Bytes that one block keeps of one example."""
    d, m, h = shape.embed_dim, shape.mlp_dim, shape.num_heads
    t = shape.num_patches + shape.num_prefix_tokens
    masks = t * (2 * d + m) if config.drop_rate > 0 else 0
    # Gated: two halves, the SiLU of one, the product.
    hidden = 4 * m if config.mlp == "swiglu" else 2 * m
    # LayerScale keeps its input, a norm of queries and keys its output.
    more = (2 * d if config.init_values is not None else 0) + (2 * d if config.qk_norm else 0)
    numbers = t * (8 * d + hidden + more)
    # Scores as added and as probabilities, and what the softmax over them keeps beside (measured):
    # there is no fused kernel with their gradient.
    scores = h * t * t * (s + 9) if config.pos_embed == "relative" else 0
    if config.block == "parallel":
        # One norm and one LayerScale; the bias of the hidden values is added to a copy.
        numbers -= t * (2 * d + (d if config.init_values is not None else 0))
        numbers += 0 if config.qkv_bias else t * m
    block = numbers * s + 4 * t * (h + 4) + masks + scores
    # Both attentions share their input, and both MLPs theirs.
    return 2 * block - 2 * t * d * s if config.block == "pairs" else block


def _resnet_bytes(cost: ResNetCost, recompute: bool, s: int, micro_batch: int) -> int:
    numbers = cost.kept_inputs + cost.largest_unit if recompute else cost.kept
    # Kernels as convolved and, in float32, centred; of half precision also as float32.
    kernels = 0 if recompute else cost.kernels * (s + (4 if s == 4 else 8))
    return micro_batch * (numbers * s + 8 * cost.pooled) + kernels


def memory_per_rank(
    config: ModelConfig,
    zero_stage: int,
    world_size: int,
    precision: Precision,
    micro_batch: int,
    ema: bool,
    num_moments: int = 2,
) -> MemoryPlan:
    """Estimate the memory of one rank under data parallelism with ZeRO.

    With P parameters: weights P*s (divided by W at stage 3); gradients accumulated in float32, 4*P
    (divided at stages 2 and 3); optimizer 4*P a moment plus a float32 master copy of 4*P, which
    only float32 training at stage 0 goes without (divided at stages 1 to 3); averaged weights 4*P
    (divided like the optimizer). Communication buckets and allocator slack are not included.

    Args:
        config: num_classes must be known.
        zero_stage: 0 to 3.
        world_size: Ranks that share the partitions.
        precision: Of weights and activations.
        micro_batch: Examples of one rank in one forward pass.
        ema: Whether averaged weights are kept.
        num_moments: Optimizer state tensors a parameter: 2 for AdamW, 1 for SGD with momentum.

    Raises:
        UserError: zero_stage is not one of 0 to 3.

    Source:
        Partitions by stage: ZeRO, arXiv:1910.02054 section 5.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise UserError(f"zero_stage = {zero_stage} is none of 0, 1, 2, 3")
    params = num_params(config)

    def share(num_bytes: int, from_stage: int) -> int:
        # Rounded up: the partitions are padded to equal length.
        return -(-num_bytes // world_size) if zero_stage >= from_stage else num_bytes

    has_master = precision != "fp32" or zero_stage > 0
    return MemoryPlan(
        weights=share(params * _NUM_BYTES[precision], 3),
        gradients=share(4 * params, 2),
        optimizer=share(4 * params * (num_moments + has_master), 1),
        ema=share(4 * params, 1) if ema else 0,
        activations=activation_bytes(config, precision, micro_batch),
    )
