"""The one module that knows DeepSpeed.

Facts about DeepSpeed 0.19.8 that shape it: its checkpoints are not atomic (checkpoint.py commits
them), it clips at 1.0 unless told otherwise (config/ds_json.py writes everything out), it guesses
missing rank variables through MPI (switched off), and it compiles a shared-memory extension at the
first start on a CPU (skipped unless asked for).
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from vitscale.config.ds_json import Resolved
from vitscale.config.errors import UserError, VitscaleError
from vitscale.data.mixing import Mixing
from vitscale.data.normalise import Normalise
from vitscale.distributed import World, fill_env
from vitscale.training.layout import Fragment, Layout, ShapedOptimizer
from vitscale.training.losses import Loss
from vitscale.training.optim import build_optimizer, check_offload

# Folder of DeepSpeed's own files inside a checkpoint.
ENGINE_TAG = "engine"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def init_distributed(world: World, *, build_shm_op: bool) -> None:
    """Start the process group of all ranks.

    Args:
        world: This process's place.
        build_shm_op: Compile DeepSpeed's shared-memory collective for CPUs: a minute or two once.

    Raises:
        VitscaleError: The meeting point cannot be opened or reached.
    """
    fill_env(world)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not build_shm_op:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(world.local_rank)
    try:
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            verbose=False,
        )
    except torch.distributed.DistNetworkError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise VitscaleError(
            f"the ranks cannot meet at {address}: {str(error).splitlines()[0]}. If another run on "
            "this machine uses that port, start with deepspeed --master_port N"
        ) from error


def check_precision(precision: str) -> None:
    """Refuse a precision that this device lacks.

    Raises:
        UserError: With what to use instead.
    """
    accelerator = get_accelerator()
    lacks_fp16 = precision == "fp16" and not accelerator.is_fp16_supported()
    lacks_bf16 = precision == "bf16" and not accelerator.is_bf16_supported()
    if lacks_fp16 or lacks_bf16:
        other = "bf16 or fp32" if lacks_fp16 else "fp32"
        raise UserError(
            f"run.precision = {precision!r} is not supported on this device "
            f"({accelerator.device_name()}); use {other}"
        )


class Engine:
    """A model under DeepSpeed with its optimizer.

    Args:
        model: With its initial weights, the same on every rank.
        resolved: Recipe and DeepSpeed JSON.
        loss: From logits and labels to a scalar.
        world: This process's place; its process group is up.
        mixing: Mixes the examples of a micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        resolved: Resolved,
        loss: Loss,
        world: World,
        mixing: Mixing | None = None,
    ) -> None:
        self.config, self.world = resolved.config, world
        self._loss, self._mixing = loss, mixing
        self._stage = resolved.zero_stage
        accelerator = get_accelerator()
        self.device = torch.device(accelerator.device_name(world.local_rank))
        self.is_accelerated = accelerator.device_name() != "cpu"
        check_offload(self.config.optim.name, resolved.ds)
        optimizer = build_optimizer(model, self.config.optim, fused=self.is_accelerated)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=resolved.ds, dist_init_required=False
        )
        if isinstance(optimizer, ShapedOptimizer) and self._stage > 0:
            optimizer.layout = Layout(self._fragments(), _add_ranks)
        identity = (
            self._engine.train_batch_size(),
            self._engine.train_micro_batch_size_per_gpu(),
            self._engine.gradient_accumulation_steps(),
        )
        batch = resolved.batch
        assert identity == (batch.global_batch, batch.micro_batch, batch.grad_accum), identity
        precision = self.config.run.precision
        assert precision is not None
        augment, chans = self.config.augment, self.config.model.in_chans
        self._normalise = Normalise(
            augment.mean, augment.std, chans, self.device, DTYPES[precision]
        )
        # At stage 0 in fp32 the optimizer is the bare torch one.
        self._plain = self._stage == 0 and precision == "fp32"
        self._skipped_before = 0
        self._grad_norm: Any = None

    def _fragments(self) -> dict[Tensor, list[Fragment]]:
        """Find the weights in the flat tensors that ZeRO gives the optimizer."""
        optimizer, stage = self._optimizer, self._stage
        if stage == 3:
            flats, groups = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
        elif hasattr(optimizer, "bf16_groups"):  # its stage 1 is a class of its own
            flats, groups = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        else:
            flats, groups = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups
        cut = self._equal_fragments if stage == 3 else _mapped_fragments
        return {flat: cut(params) for flat, params in zip(flats, groups, strict=True)}

    def _equal_fragments(self, params: list[Any]) -> list[Fragment]:
        """Stage 3 cuts every weight into as many equal parts as there are ranks."""
        fragments, offset = [], 0
        for param in params:
            size = param.partition_numel()
            start = min(self.world.rank * size, param.ds_numel)
            numel = min(size, param.ds_numel - start)
            fragments.append(Fragment(tuple(param.ds_shape), start, offset, numel))
            offset += size
        return fragments

    # One step: set_lr, then micro_step for each micro-batch; the last one updates the weights.

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next update."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def micro_step(
        self,
        images: UInt8[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        positions: Int[Tensor, " b"],
    ) -> Float[Tensor, ""]:
        """Run forward and backward of one micro-batch, and the update where it is the last one.

        Returns:
            The loss, still on the device.
        """
        engine = self._engine
        inputs = self._normalise(images)
        targets = labels.to(self.device, non_blocking=True)
        if self._mixing is not None:
            inputs, targets = self._mixing(inputs, targets, positions)
        loss = self._loss(engine(inputs), targets)
        engine.backward(loss)  # divides by the number of micro-batches
        updates = engine.is_gradient_accumulation_boundary()
        if updates and self._plain:
            # DeepSpeed keeps no norm here; the gradients are already averaged over the ranks.
            grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
            self._grad_norm = torch.nn.utils.get_total_norm(grads)
        scale = self._norm_scale() if updates else 1.0
        engine.step()
        if updates and not self._plain:
            norm = engine.get_global_grad_norm()
            self._grad_norm = None if norm is None else norm / scale
        return loss.detach()

    def _norm_scale(self) -> float:
        """What DeepSpeed's norm is too large by: fp16 at stage 0 leaves the loss scale in it."""
        if self._stage == 0 and self.config.run.precision == "fp16":
            return float(self._optimizer.loss_scale)
        return 1.0

    def grad_norm(self) -> Any:
        """Norm of the last update's gradient before clipping: a number or a device scalar."""
        return self._grad_norm

    def take_skipped(self) -> int:
        """Return how many updates DeepSpeed skipped since the last call (overflow)."""
        count = self._engine.skipped_steps - self._skipped_before
        self._skipped_before = self._engine.skipped_steps
        return int(count)

    def logits(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        """Run the model on pictures; every rank must do so the same number of times."""
        logits: Tensor = self._engine(self._normalise(images))
        return logits

    def train(self, mode: bool) -> None:
        """Switch between training and evaluation."""
        self._engine.train(mode)

    # Weights. What ZeRO cut is put together again one tensor at a time.

    def masters(self) -> list[Tensor]:
        """Return the fp32 tensors of this rank that the optimizer updates in place."""
        optimizer = self._optimizer
        for name in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # bf16 at stages 0 and 1
            "fp32_groups_flat",  # fp16 at stage 0, fused
        ):
            if getattr(optimizer, name, None):
                return list(getattr(optimizer, name))
        if getattr(optimizer, "fp32_groups", None):  # fp16 or bf16 at stage 0
            return [tensor for group in optimizer.fp32_groups for tensor in group]
        return [p.data for p in self._engine.module.parameters() if p.requires_grad]

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight and buffer in fp32 on the host; all ranks must iterate together.

        Only the first rank gets contents; the others get empty tensors.
        """
        module = self._engine.module
        unfused = self._unfused_masters()
        for name, param in module.named_parameters():
            full = safe_get_full_fp32_param(param) if param.requires_grad else None
            if full is None:
                full = unfused.get(id(param), param.data)
            yield name, self._on_host(full)
        persistent = module.state_dict(keep_vars=True).keys()
        for name, buffer in module.named_buffers():
            if name in persistent:
                yield name, self._on_host(buffer)

    def _unfused_masters(self) -> dict[int, Tensor]:
        """Masters of DeepSpeed's stage-0 half-precision optimizers, by identity of the weight."""
        optimizer = self._optimizer
        halves = getattr(optimizer, "fp16_groups", None)
        if not halves or self._stage > 0:
            return {}
        masters: dict[int, Tensor] = {}
        for i, group in enumerate(halves):
            flat = getattr(optimizer, "fp32_groups_flat", None)
            wide = (
                torch._utils._unflatten_dense_tensors(flat[i], group)
                if flat
                else optimizer.fp32_groups[i]
            )
            masters.update({id(half): full for half, full in zip(group, wide, strict=True)})
        return masters

    def _on_host(self, tensor: Tensor) -> Tensor:
        if not self.world.is_first:
            return torch.empty(0)
        return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()

    # DeepSpeed's own files. Torn, unverified and unordered as they are, checkpoint.py commits them.

    def save(self, folder: Path) -> None:
        """Write this rank's engine files under folder/engine; all ranks call it together."""
        self._engine.save_checkpoint(
            str(folder), tag=ENGINE_TAG, client_state={}, save_latest=False
        )

    def load(self, folder: Path) -> None:
        """Read back what save wrote, at the same stage and number of ranks.

        Raises:
            RuntimeError: DeepSpeed found nothing to load.
        """
        optimizer = self._optimizer
        # DeepSpeed brings the saved settings back; the recipe of this start is what counts.
        names = ("weight_decay", "betas", "eps", "momentum", "beta2_cap", "lr_scale", "use_muon")
        wanted = [{n: g[n] for n in names if n in g} for g in optimizer.param_groups]
        path, _ = self._engine.load_checkpoint(str(folder), tag=ENGINE_TAG)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / ENGINE_TAG}")
        for group, settings in zip(optimizer.param_groups, wanted, strict=True):
            group.update(settings)
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = self.config.optim.grad_clip_norm
        self._skipped_before = self._engine.skipped_steps

    def close(self) -> None:
        """End the process group."""
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _mapped_fragments(params: list[Any]) -> list[Fragment]:
    """Stages 1 and 2 lay weights end to end, cut that into equal parts, and note who has what."""
    fragments = []
    for param in params:
        shape, here = tuple(param.shape), param._hp_mapping
        if here is None:
            fragments.append(Fragment(shape, 0, 0, 0))
            continue
        own, place = here.lp_fragment_address, here.hp_fragment_address
        fragments.append(Fragment(shape, own.start, place.start, place.numel))
    return fragments


def _add_ranks(tensor: Tensor) -> None:
    torch.distributed.all_reduce(tensor)
