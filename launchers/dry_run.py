"""What `--dry-run` prints; needs no torch, no accelerator and no process group."""

from collections.abc import Sequence
from pathlib import Path

from vitscale.config.ds_json import Resolved
from vitscale.config.duration import Duration
from vitscale.config.recipe import RunConfig
from vitscale.config.variants import is_resnet, resolve_shape
from vitscale.data.manifest import Manifest
from vitscale.data.mixture import Mixture
from vitscale.data.train_sets import build_order
from vitscale.models.cost import forward_macs, memory_per_rank, num_params, train_flops_per_example

GIB = 1 << 30


def describe(resolved: Resolved, run_dir: Path, manifests: Sequence[Manifest]) -> str:
    """Return the resolved recipe, the batch arithmetic, and what the model costs.

    Args:
        resolved: Recipe and DeepSpeed JSON.
        run_dir: Where the run would go.
        manifests: Of the training sets, where they exist.
    """
    config = _known_classes(resolved.config, manifests)
    lines = [f"run_dir = {run_dir}", ""]
    lines += _tree(config.model_dump(mode="json"))
    lines += _data_lines(config, manifests)
    lines += _batch_lines(resolved)
    lines += _cost_lines(config, resolved)
    return "\n".join(lines)


def _known_classes(config: RunConfig, manifests: Sequence[Manifest]) -> RunConfig:
    if config.model.num_classes is not None:
        return config
    classes = manifests[0].num_classes if manifests else 0
    model = config.model.model_copy(update={"num_classes": classes})
    return config.model_copy(update={"model": model})


def _tree(tree: dict[str, object]) -> list[str]:
    lines = []
    for table, leaves in tree.items():
        assert isinstance(leaves, dict)
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in leaves.items() if value is not None]
        lines.append("")
    return lines


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        inner = ", ".join(f"{k} = {_toml(v)}" for k, v in value.items() if v is not None)
        return "{ " + inner + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _data_lines(config: RunConfig, manifests: Sequence[Manifest]) -> list[str]:
    assert config.batch.global_batch is not None
    if not manifests:
        uris = ", ".join(one.uri for one in config.data.train_sets)
        return [f"data: {uris} does not exist yet; counted without a head", ""]
    duration = Duration.parse(config.run.duration)
    batch = config.batch.global_batch
    order = build_order(config.data, manifests, config.run.seed, batch)
    steps = duration.steps(num_samples=order.usable, global_batch=batch)
    lines = []
    for one, manifest in zip(config.data.train_sets, manifests, strict=True):
        stored = f" of {manifest.view.stored.num_samples:,}" if manifest.view else ""
        lines.append(
            f"data: {manifest.num_samples:,}{stored} samples, {manifest.num_classes:,} classes, "
            f"{manifest.num_shards:,} shards"
            + (f" of {one.name} = {one.uri}" if len(manifests) > 1 else "")
        )
    if isinstance(order, Mixture):
        shares = zip(order.sources, order.shares, strict=True)
        lines.append("mixture: " + ", ".join(f"{one.name} {share:.4f}" for one, share in shares))
    lines[-1] += f"; {steps:,} steps = {steps * batch / max(order.usable, 1):.2f} epochs"
    return [*lines, ""]


def _batch_lines(resolved: Resolved) -> list[str]:
    batch = resolved.batch
    return [
        f"batch: global_batch {batch.global_batch} = micro_batch {batch.micro_batch} * grad_accum "
        f"{batch.grad_accum} * {batch.world_size} ranks",
        "",
    ]


def _tokens(config: RunConfig) -> str:
    if is_resnet(config.model.variant):
        return ""
    shape = resolve_shape(config.model)
    return f"{shape.num_patches} patches + {shape.num_prefix_tokens} prefix tokens, "


def _cost_lines(config: RunConfig, resolved: Resolved) -> list[str]:
    model, batch = config.model, resolved.batch
    precision = config.run.precision or "fp32"
    lines = [
        f"model: {model.variant} at {model.img_size} px: {_tokens(config)}"
        f"{num_params(model):,} parameters, "
        f"{forward_macs(model) / 1e9:.2f} GMACs forward, "
        f"{train_flops_per_example(model) / 1e9:.2f} GFLOP a training example",
        "",
        f"memory per rank, GiB, {precision}, {batch.world_size} ranks (no buffers, no fragments):",
        "  stage  weights  gradients  optimizer  average  activations   total",
    ]
    for stage in range(4):
        plan = memory_per_rank(
            model,
            stage,
            batch.world_size,
            precision,
            batch.micro_batch,
            config.optim.ema_decay is not None,
            num_moments=2 if config.optim.name == "adamw" else 1,
        )
        mark = "  <- this run" if stage == resolved.zero_stage else ""
        parts = (plan.weights, plan.gradients, plan.optimizer, plan.ema, plan.activations)
        figures = [f"{part / GIB:.3f}" for part in (*parts, plan.total)]
        widths = (9, 11, 11, 9, 13, 8)
        row = "".join(f"{text:>{width}}" for text, width in zip(figures, widths, strict=True))
        lines.append(f"  {stage:<5}{row}{mark}")
    return lines
