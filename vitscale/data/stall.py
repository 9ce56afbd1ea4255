"""Says who waits for what when a rank stands still for want of data, and ends the run in time.

A rank without data keeps all others waiting in a collective, whose time-out would name nobody. This
speaks first: what every reader is doing, for how long, and on which object.
"""

from collections.abc import Callable

from vitscale.config.errors import VitscaleError

# Seconds of waiting after which it is said the first time; then whenever it has doubled.
FIRST_WORD_S = 20.0


class StallWatch:
    """Told of every second that a batch is late; see `loader.OnWait`.

    Args:
        rank: This process, for messages.
        limit_s: Waiting that ends the run; below the time-out of the collectives.
        states: What the readers are doing.
        print_stacks: Makes the readers print where in the program they are.
        warn: Takes a sentence for the log.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        states: Callable[[], list[str]],
        print_stacks: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._rank, self._limit_s = rank, limit_s
        self._states, self._print_stacks, self._warn = states, print_stacks, warn
        self._next_word_s = FIRST_WORD_S

    def __call__(self, waited_s: float) -> None:
        """Speak, or give up.

        Args:
            waited_s: For how long the batch that is due has been waited for.

        Raises:
            VitscaleError: It is longer than the limit.
        """
        if waited_s < 2:
            self._next_word_s = FIRST_WORD_S
        if waited_s >= self._limit_s:
            self._print_stacks()
            raise VitscaleError(
                f"rank {self._rank} has had no data for {waited_s:.0f} s (data.stall_limit_s = "
                f"{self._limit_s:g}): {self._described()}. The stacks of its readers are in the "
                "output. Resume from the last checkpoint when the store answers again"
            )
        if waited_s >= self._next_word_s:
            self._next_word_s = 2 * waited_s
            self._warn(
                f"rank {self._rank} has waited {waited_s:.0f} s for data: {self._described()}; "
                f"the run ends at {self._limit_s:g} s"
            )

    def _described(self) -> str:
        return "; ".join(self._states()) or "no reader is at work"
