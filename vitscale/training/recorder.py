"""What a step leaves behind: collected without waiting for the device, written when it is due."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitscale.config.errors import NumbersError
from vitscale.data.audit import EpochAudit, batch_digest
from vitscale.data.loader import Batch
from vitscale.data.order import Order
from vitscale.distributed import Collectives
from vitscale.observe.log import RunLog, clock

# Updates in a row that fp16 may skip while its loss scale settles: it halves each time, from 2^16.
SKIPS_IN_A_ROW = 32

WriteRows = Callable[[list[dict[str, Any]]], None]


class StepRecorder:
    """Buffers the results of steps and writes one row a step.

    Args:
        order: The data order.
        audit: Exactly-once accounting of this rank.
        collectives: All ranks flush together.
        log: Where progress lines go.
        write_rows: Takes the rows; called on the first rank.
        seen_examples: Examples consumed before the first step that is recorded.
        total_steps: For the time left.
        tolerate_skips: Whether non-finite gradients may occur (fp16's loss scale).
    """

    def __init__(
        self,
        order: Order,
        audit: EpochAudit,
        collectives: Collectives,
        log: RunLog,
        write_rows: WriteRows,
        *,
        seen_examples: int,
        total_steps: int,
        tolerate_skips: bool,
    ) -> None:
        self._order, self._audit = order, audit
        self._collectives, self._log, self._write_rows = collectives, log, write_rows
        self._total_steps, self._tolerate_skips = total_steps, tolerate_skips
        self._losses: list[Tensor] = []
        self._hashes: list[NDArray[np.int64]] = []
        self._wait_s = 0.0
        self._rows: list[dict[str, Any]] = []
        self._step_losses: list[Tensor] = []
        self._step_hashes: list[NDArray[np.int64]] = []
        self._skips_in_a_row = 0
        # Earlier epochs are complete and judged.
        self._next_epoch = order.epoch_at(seen_examples)
        self._window_start = time.perf_counter()

    def add(self, batch: Batch, loss: Tensor, wait_s: float) -> None:
        """Take the result of one micro-batch.

        Args:
            batch: What the model consumed.
            loss: Its loss, left on the device.
            wait_s: Seconds the step stood still for the data.
        """
        hashes = batch.key_hash.numpy()
        self._audit.add(batch.epochs.numpy(), hashes)
        self._losses.append(loss)
        self._hashes.append(hashes)
        self._wait_s += wait_s

    def end_step(self, step: int, seen_examples: int, lr: float, grad_norm: Any) -> None:
        """Close a step: all its micro-batches were added."""
        self._rows.append(
            {
                "step": step,
                "seen_examples": seen_examples,
                "epoch": round(seen_examples / self._order.usable, 6),
                "train/lr": lr,
                "train/grad_norm": grad_norm,
                "perf/data_wait_s": self._wait_s,
            }
        )
        self._step_losses.append(torch.stack(self._losses).mean())
        self._step_hashes.append(np.concatenate(self._hashes))
        self._losses, self._hashes, self._wait_s = [], [], 0.0

    def restart_clock(self) -> None:
        """Leave what happened since the last flush out of the speed."""
        self._window_start = time.perf_counter()

    def flush(self, *, say: bool, skipped: int) -> None:
        """Bring all buffered steps together over the ranks and write them; the host sync.

        Args:
            say: Print the progress line.
            skipped: Updates that the engine skipped among the buffered steps.

        Raises:
            NumbersError: A loss or gradient is not finite; the same on all ranks.
        """
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        losses = torch.stack(self._step_losses).to("cpu", torch.float64)
        waits = torch.tensor([row["perf/data_wait_s"] for row in rows], dtype=torch.float64)
        digests = self._digests()
        # The device is idle from here: the clock includes all the work of these steps.
        elapsed_s = time.perf_counter() - self._window_start
        world_size = self._collectives.world.world_size
        means = self._collectives.sum_float(torch.stack([losses, waits])) / world_size
        speed = self._order.global_batch * len(rows) / max(elapsed_s, 1e-9)
        for k, row in enumerate(rows):
            row["train/loss"] = float(means[0, k])
            row["perf/data_wait_s"] = round(float(means[1, k]), 6)
            row["perf/examples_per_s"] = round(speed, 3)
            row["data/digest"] = digests[k]
            norm = row["train/grad_norm"]
            row["train/grad_norm"] = None if norm is None else float(norm)
        self._step_losses, self._step_hashes = [], []
        self._check_finite(rows, skipped)
        for row in rows:  # a step that fp16 skipped; JSON has no word for infinity
            norm = row["train/grad_norm"]
            row["train/grad_norm"] = norm if norm is not None and math.isfinite(norm) else None
        if self._collectives.world.is_first:
            self._write_rows(rows)
            if say:
                self._say(rows, elapsed_s, speed, skipped)
        self._judge_epochs(rows[-1]["seen_examples"])
        self.restart_clock()

    def _digests(self) -> list[str]:
        """Digest of each buffered step's global batch, put into slot order."""
        mine = torch.from_numpy(np.stack(self._step_hashes))  # [steps, slots of this rank]
        parts = self._collectives.gather_tensor(mine).numpy()  # [ranks, steps, slots]
        world_size = self._collectives.world.world_size
        slots = np.concatenate([self._order.rank_slots(r, world_size) for r in range(world_size)])
        ordered = np.empty((parts.shape[1], len(slots)), dtype=np.int64)
        ordered[:, slots] = parts.transpose(1, 0, 2).reshape(parts.shape[1], -1)
        return [batch_digest(hashes) for hashes in ordered]

    def _check_finite(self, rows: list[dict[str, Any]], skipped: int) -> None:
        bad = [row for row in rows if not math.isfinite(row["train/loss"])]
        infinite = [
            row
            for row in rows
            if row["train/grad_norm"] is not None and not math.isfinite(row["train/grad_norm"])
        ]
        self._skips_in_a_row = self._skips_in_a_row + skipped if skipped == len(rows) else 0
        if not self._tolerate_skips:
            bad = bad or infinite
        if bad:
            row = bad[0]
            raise NumbersError(
                f"step {row['step']}: train/loss = {row['train/loss']}, train/grad_norm = "
                f"{row['train/grad_norm']}. Lower optim.lr, lengthen optim.warmup or set "
                "optim.grad_clip_norm = 1.0, and resume from the last checkpoint"
            )
        if self._skips_in_a_row > SKIPS_IN_A_ROW:
            raise NumbersError(
                f"the last {self._skips_in_a_row} updates were skipped for overflow: the fp16 loss "
                "scale has collapsed; use bf16"
            )

    def _judge_epochs(self, seen_examples: int) -> None:
        current = self._order.epoch_at(seen_examples)
        due = list(range(self._next_epoch, current))
        self._next_epoch = current
        if not due:
            return
        totals = self._collectives.sum(self._audit.totals(due).reshape(-1).tolist())
        for k, epoch in enumerate(due):
            pair = totals[2 * k : 2 * k + 2]
            verdict = self._audit.verdict(pair)
            fields = {"epoch": epoch, "samples": pair[0], "due": self._audit.num_examples}
            if verdict is None:
                self._log.line("audit", **fields, verdict="each exactly once")
            else:
                self._log.line("audit", **fields, verdict="MISMATCH")
                if self._collectives.world.is_first:
                    self._log.warn(f"audit of epoch {epoch}: {verdict}")
        self._audit.close(due)

    def audit_totals(self) -> dict[str, list[int]]:
        """Totals over all ranks of the epoch that is begun and not complete; for a checkpoint."""
        totals = self._collectives.sum(self._audit.totals([self._next_epoch]).reshape(-1).tolist())
        return {str(self._next_epoch): totals}

    def _say(
        self, rows: list[dict[str, Any]], elapsed_s: float, speed: float, skipped: int
    ) -> None:
        last = rows[-1]
        left = (self._total_steps - last["step"]) * elapsed_s / len(rows)
        wait = sum(row["perf/data_wait_s"] for row in rows) / max(elapsed_s, 1e-9)
        fields: dict[str, object] = {
            "epoch": f"{last['epoch']:.2f}",
            "loss": last["train/loss"],
            "lr": last["train/lr"],
            "grad_norm": "-" if last["train/grad_norm"] is None else last["train/grad_norm"],
            "examples/s": speed,
            "data_wait": f"{100 * min(wait, 1):.0f}%",
            "eta": clock(left),
        }
        if skipped:
            fields["skipped"] = skipped
        self._log.line(f"step {last['step']}/{self._total_steps}", **fields)
