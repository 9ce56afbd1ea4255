"""What `--dry-run` prints; needs no torch, no accelerator and no process group."""

from pathlib import Path

from vitscale.config.ds_json import Resolved
from vitscale.config.duration import Duration
from vitscale.config.recipe import RunConfig
from vitscale.config.variants import resolve_shape
from vitscale.data.manifest import Manifest
from vitscale.models.cost import forward_macs, memory_per_rank, num_params, train_flops_per_example

GIB = 1 << 30


def describe(resolved: Resolved, run_dir: Path, manifest: Manifest | None) -> str:
    """Return the resolved recipe, the batch arithmetic, and what the model costs.

    Args:
        resolved: Recipe and DeepSpeed JSON.
        run_dir: Where the run would go.
        manifest: The training set, where it exists.
    """
    config = _known_classes(resolved.config, manifest)
    lines = [f"run_dir = {run_dir}", ""]
    lines += _tree(config.model_dump(mode="json"))
    lines += _data_lines(config, manifest)
    lines += _batch_lines(resolved)
    lines += _cost_lines(config, resolved)
    return "\n".join(lines)


def _known_classes(config: RunConfig, manifest: Manifest | None) -> RunConfig:
    if config.model.num_classes is not None:
        return config
    classes = manifest.num_classes if manifest else 0
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


def _data_lines(config: RunConfig, manifest: Manifest | None) -> list[str]:
    assert config.batch.global_batch is not None
    if manifest is None:
        return [f"data: {config.data.train} does not exist yet; counted without a head", ""]
    duration = Duration.parse(config.run.duration)
    batch, usable = config.batch.global_batch, manifest.num_samples
    if config.data.tail == "drop":
        usable = usable // batch * batch
    steps = duration.steps(num_samples=usable, global_batch=batch)
    epochs = steps * batch / max(usable, 1)
    stored = f" of {manifest.view.stored.num_samples:,}" if manifest.view else ""
    return [
        f"data: {manifest.num_samples:,}{stored} samples, {manifest.num_classes:,} classes, "
        f"{manifest.num_shards:,} shards; {steps:,} steps = {epochs:.2f} epochs",
        "",
    ]


def _batch_lines(resolved: Resolved) -> list[str]:
    batch = resolved.batch
    return [
        f"batch: global_batch {batch.global_batch} = micro_batch {batch.micro_batch} * grad_accum "
        f"{batch.grad_accum} * {batch.world_size} ranks",
        "",
    ]


def _cost_lines(config: RunConfig, resolved: Resolved) -> list[str]:
    model, batch = config.model, resolved.batch
    shape = resolve_shape(model)
    precision = config.run.precision or "fp32"
    lines = [
        f"model: {model.variant} at {model.img_size} px: {shape.num_patches} patches + "
        f"{shape.num_prefix_tokens} class token, {num_params(model):,} parameters, "
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
