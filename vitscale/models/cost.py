"""What a model costs: parameters, arithmetic and memory, from its config alone, without torch.

Legend of the formulas: T tokens, N patches, D embed_dim, M mlp_dim, h heads, K classes, P patch
side, c channels, L blocks, B micro batch, s bytes of a compute number, W ranks.
"""

from dataclasses import dataclass
from typing import Literal

from vitscale.config.errors import UserError
from vitscale.config.recipe import ModelConfig
from vitscale.config.variants import resolve_shape

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
    shape = resolve_shape(config)
    d, m, k = shape.embed_dim, shape.mlp_dim, _num_classes(config)
    patch_embed = config.in_chans * shape.patch_size**2 * d + d
    tokens = shape.num_prefix_tokens + shape.num_patches
    tables = shape.num_prefix_tokens * d + (tokens * d if config.pos_embed == "learned" else 0)
    norm = 2 * d
    attention = 3 * d * d + (3 * d if config.qkv_bias else 0) + d * d + d
    mlp = 2 * d * m + m + d
    pre_logits = d * d + d if config.head == "mlp" else 0
    head = d * k + k
    blocks = shape.depth * (2 * norm + attention + mlp)
    return patch_embed + tables + blocks + norm + pre_logits + head


def forward_macs(config: ModelConfig) -> int:
    """Count multiply-accumulates of one example's forward pass.

    Counted are the matrix products: N*c*P^2*D for the patches, T*(4*D^2 + 2*D*M) + 2*T^2*D a block,
    D^2 for the hidden head layer and D*K for the classifier. Norms, GELU, softmax and additions are
    not. Published tables usually leave the classifier out: set num_classes to 0 for those.
    """
    shape = resolve_shape(config)
    d, m = shape.embed_dim, shape.mlp_dim
    n = shape.num_patches
    t = n + shape.num_prefix_tokens
    patch_embed = n * config.in_chans * shape.patch_size**2 * d
    block = t * (4 * d * d + 2 * d * m) + 2 * t * t * d
    pre_logits = d * d if config.head == "mlp" else 0
    return patch_embed + shape.depth * block + pre_logits + d * _num_classes(config)


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

    A block keeps T*(8*D + 2*M)*s bytes an example: inputs and outputs of both norms (4 D), q, k, v
    (3 D), the attention's output (D), inputs and output of the GELU (2 M); and in float32
    T*(h + 4): the attention's log-sum and the norms' mean and deviation. Dropout adds a byte for
    each number that it touches (CUDA; CPU kernels keep more), T*(2*D + M). The image and both sides
    of the last norm come on top.
    With checkpointing each block keeps its input only, T*D*s, and one block at a time all of it.
    Temporaries inside a kernel are not counted.
    """
    shape = resolve_shape(config)
    d, m, s = shape.embed_dim, shape.mlp_dim, _NUM_BYTES[precision]
    t = shape.num_patches + shape.num_prefix_tokens
    tokens = t * d * s
    masks = t * (2 * d + m) if config.drop_rate > 0 else 0
    block = t * (8 * d + 2 * m) * s + 4 * t * (shape.num_heads + 4) + masks
    kept = shape.depth * block
    if config.grad_checkpointing:
        kept = shape.depth * tokens + block - tokens
    image = config.in_chans * config.img_size**2 * s
    first = image + (t * d if config.drop_rate > 0 else 0)
    last = 2 * tokens + 8 * t
    return micro_batch * (first + kept + last)


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
