"""The recipe's durations as steps: how long the run is and when things happen in it."""

from dataclasses import dataclass

from vitscale.config.duration import Duration
from vitscale.config.recipe import RunConfig
from vitscale.training.schedule import Schedule


@dataclass(frozen=True)
class Rhythm:
    """When things happen, in steps; None: only at the end.

    Args:
        total_steps: Length of the run.
        log_every: Steps between two lines.
        save_every: Steps between two checkpoints.
        eval_every: Steps between two evaluations.
        stop_at: Step at which to stop as if preempted.
    """

    total_steps: int
    log_every: int
    save_every: int | None
    eval_every: int | None
    stop_at: int | None


def rhythm_of(config: RunConfig, samples_an_epoch: int) -> Rhythm:
    """Turn the recipe's durations into steps."""
    assert config.batch.global_batch is not None
    duration = Duration.parse(config.run.duration)
    total = duration.steps(num_samples=samples_an_epoch, global_batch=config.batch.global_batch)

    def steps(text: str | None) -> int | None:
        return _steps(config, text, samples_an_epoch, total) if text else None

    return Rhythm(
        total_steps=total,
        log_every=config.run.log_every,
        save_every=steps(config.run.save_every),
        eval_every=steps(config.run.eval_every),
        stop_at=steps(config.run.stop_at),
    )


def schedule_of(config: RunConfig, total_steps: int, samples_an_epoch: int) -> Schedule:
    """Build the recipe's learning-rate schedule."""
    optim = config.optim

    def steps(text: str) -> int:
        return _steps(config, text, samples_an_epoch, total_steps)

    return Schedule(
        peak_lr=optim.lr,
        min_lr=optim.min_lr,
        warmup_steps=steps(optim.warmup),
        total_steps=total_steps,
        decay=optim.schedule,
        timescale=steps(optim.timescale),
        cooldown_steps=steps(optim.cooldown),
        drop_steps=tuple(steps(text) for text in optim.drop_at),
        drop_factor=optim.drop_factor,
    )


def _steps(config: RunConfig, text: str, samples_an_epoch: int, total_steps: int) -> int:
    assert config.batch.global_batch is not None
    return Duration.parse(text).steps(
        num_samples=samples_an_epoch,
        global_batch=config.batch.global_batch,
        total_steps=total_steps,
    )
