"""What a step leaves behind: collected without waiting for the device, written when it is due."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitscale.config.errors import NumbersError
from vitscale.data.audit import EpochAudit, batch_digest
from vitscale.data.loader import Batch
from vitscale.data.mixture import Mixture
from vitscale.data.order import Order
from vitscale.data.quarantine import BadSample, Quarantine
from vitscale.distributed import Collectives
from vitscale.observe.log import RunLog, clock

# Updates in a row that fp16 may skip while its loss scale settles: it halves each time, from 2^16.
SKIPS_IN_A_ROW = 32

WriteRows = Callable[[list[dict[str, Any]]], None]
WriteBad = Callable[[list[BadSample]], None]
ReadCounters = Callable[[], dict[str, float]]
# Counter of the readers -> metric; summed over the ranks since the last flush.
COUNTED = {
    "bytes_fetched": "data/fetched_bytes",
    "cache_hits": "data/cache_hits",
    "retries": "data/retries",
    "hedges": "data/hedges",
}


class StepRecorder:
    """Buffers the results of steps and writes one row a step.

    Args:
        order: The data order.
        audits: Exactly-once accounting of this rank, one a dataset.
        quarantine: Bad samples of the run, the same on all ranks.
        collectives: All ranks flush together.
        log: Where progress lines go.
        write_rows: Takes the rows; called on the first rank.
        write_bad: Takes samples that were found to be bad; called on the first rank.
        read_counters: Gives what this rank's readers have done so far (activity.COUNTERS).
        seen_examples: Examples consumed before the first step that is recorded.
        total_steps: For the time left.
        tolerate_skips: Whether non-finite gradients may occur (fp16's loss scale).
    """

    def __init__(
        self,
        order: Order | Mixture,
        audits: Sequence[EpochAudit],
        quarantine: Quarantine,
        collectives: Collectives,
        log: RunLog,
        write_rows: WriteRows,
        write_bad: WriteBad,
        read_counters: ReadCounters,
        *,
        seen_examples: int,
        total_steps: int,
        tolerate_skips: bool,
    ) -> None:
        self._order, self._audits, self._quarantine = order, audits, quarantine
        self._collectives, self._log = collectives, log
        self._write_rows, self._write_bad = write_rows, write_bad
        self._read_counters = read_counters
        self._counted = dict.fromkeys(COUNTED, 0.0)
        self._ready: list[int] = []
        self._total_steps, self._tolerate_skips = total_steps, tolerate_skips
        self._losses: list[Tensor] = []
        self._hashes: list[NDArray[np.int64]] = []
        self._found_bad: list[BadSample] = []
        self._wait_s = 0.0
        self._rows: list[dict[str, Any]] = []
        self._step_losses: list[Tensor] = []
        self._step_hashes: list[NDArray[np.int64]] = []
        self._skips_in_a_row = 0
        # Earlier epochs are complete and judged.
        self._next_epochs = [open_.start for open_ in order.open_epochs(seen_examples)]
        self._window_start = time.perf_counter()

    def add(self, batch: Batch, loss: Tensor, wait_s: float) -> None:
        """Take the result of one micro-batch.

        Args:
            batch: What the model consumed.
            loss: Its loss, left on the device.
            wait_s: Seconds the step stood still for the data.
        """
        hashes = batch.key_hash.numpy()
        source = self._order.source_of(batch.positions.numpy())
        columns = batch.epochs, batch.key_hash, batch.substitutes, batch.replaced
        for k, audit in enumerate(self._audits):
            mine = source == k
            audit.add(*(column.numpy()[mine] for column in columns))
        self._found_bad += batch.found_bad
        self._ready.append(batch.num_ready)
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
            DataError: More samples are damaged than the recipe allows; the same on all ranks.
        """
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        losses = torch.stack(self._step_losses).to("cpu", torch.float64)
        waits = torch.tensor([row["perf/data_wait_s"] for row in rows], dtype=torch.float64)
        digests = self._digests()
        data = self._data_metrics(waits)
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
        rows[-1] |= data
        self._step_losses, self._step_hashes = [], []
        self._check_finite(rows, skipped)
        for row in rows:  # a step that fp16 skipped; JSON has no word for infinity
            norm = row["train/grad_norm"]
            row["train/grad_norm"] = norm if norm is not None and math.isfinite(norm) else None
        if self._collectives.world.is_first:
            self._write_rows(rows)
            if say:
                self._say(rows, elapsed_s, speed, skipped)
        self._collect_bad()
        self._judge_epochs(rows[-1]["step"], rows[-1]["seen_examples"])
        self.restart_clock()

    def _data_metrics(self, waits: Tensor) -> dict[str, float]:
        """Say how the data came since the last flush, over all ranks."""
        counters = self._read_counters()
        news = [counters[name] - self._counted[name] for name in COUNTED]
        self._counted = {name: counters[name] for name in COUNTED}
        ready = sum(self._ready) / len(self._ready)
        self._ready = []
        sums = self._collectives.sum_float(torch.tensor([*news, ready], dtype=torch.float64))
        everywhere = self._collectives.gather_tensor(waits).flatten()
        quantiles = torch.tensor([0.5, 0.99], dtype=torch.float64)
        middle, late = torch.quantile(everywhere, quantiles).tolist()
        return {
            "data/wait_p50_s": round(middle, 6),
            "data/wait_p99_s": round(late, 6),
            "data/wait_max_s": round(float(everywhere.max()), 6),
            "data/batches_ready": round(float(sums[-1]) / self._collectives.world.world_size, 3),
            **{metric: float(sums[k]) for k, metric in enumerate(COUNTED.values())},
        }

    def _collect_bad(self) -> None:
        """Bring together what the ranks found damaged, and see whether the run may go on."""
        found, self._found_bad = self._found_bad, []
        if not self._collectives.any(bool(found)):
            return
        new = self._quarantine.add(bad for part in self._collectives.gather(found) for bad in part)
        self._order.quarantine([bad.sample_index for bad in new])
        if self._collectives.world.is_first:
            self._write_bad(new)
            for bad in new:
                self._log.warn(f"bad sample, replaced from now on: {bad.message}")
        self._quarantine.check()

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

    def _judge_epochs(self, step: int, seen_examples: int) -> None:
        opened = self._order.open_epochs(seen_examples)
        for k, epochs in enumerate(opened):
            due = list(range(self._next_epochs[k], epochs.start))
            self._next_epochs[k] = epochs.start
            if due:
                self._judge(k, due, {"step": step, "seen_examples": seen_examples})

    def _judge(self, k: int, due: list[int], place: dict[str, Any]) -> None:
        """Judge complete epochs of one dataset, say it and write it down."""
        audit = self._audits[k]
        name = self._order.sources[k].name if isinstance(self._order, Mixture) else ""
        totals = self._collectives.sum(audit.totals(due).reshape(-1).tolist())
        rows = []
        for number, epoch in enumerate(due):
            part = totals[audit.COLUMNS * number : audit.COLUMNS * (number + 1)]
            fed, fed_sum, replaced, replaced_sum = part
            verdict = audit.verdict(part)
            fields: dict[str, object] = {"dataset": name} if name else {}
            fields |= {"epoch": epoch, "samples": fed, "due": audit.num_examples}
            if replaced:
                fields["quarantined"] = replaced
            digest = f"{(fed_sum + replaced_sum) % 2**64:016x}"
            said = "each exactly once" if verdict is None else "MISMATCH"
            self._log.line("audit", **fields, digest=digest, verdict=said)
            if verdict is not None and self._collectives.world.is_first:
                self._log.warn(f"audit of epoch {epoch}{name and ' of ' + name}: {verdict}")
            prefix = f"audit/{name}/" if name else "audit/"
            values = {
                "epoch": epoch,
                "samples": fed,
                "quarantined": replaced,
                "exactly_once": int(verdict is None),
                "digest": digest,
            }
            rows.append(place | {f"{prefix}{key}": value for key, value in values.items()})
        if self._collectives.world.is_first:
            self._write_rows(rows)
        audit.close(due)

    def audit_totals(self, seen_examples: int) -> list[dict[str, list[int]]]:
        """Totals over all ranks of epochs that are begun and not complete; for a checkpoint.

        Args:
            seen_examples: Examples consumed so far.

        Returns:
            Of each dataset: epoch -> its totals.
        """
        saved = []
        for audit, epochs in zip(self._audits, self._order.open_epochs(seen_examples), strict=True):
            totals = self._collectives.sum(audit.totals(list(epochs)).reshape(-1).tolist())
            width = audit.COLUMNS
            saved.append(
                {str(epoch): totals[width * k : width * (k + 1)] for k, epoch in enumerate(epochs)}
            )
        return saved

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
