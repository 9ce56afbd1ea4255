"""From requests to a batch of examples: read, check, decode, augment; run by the readers."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vitscale.config.errors import DataError
from vitscale.config.recipe import AugmentConfig
from vitscale.data.mixture import Mixture
from vitscale.data.order import Order
from vitscale.data.permute import stream
from vitscale.data.picture import eval_example, train_example
from vitscale.data.quarantine import BadSample
from vitscale.data.reader import Record, SetsReader
from vitscale.data.requests import Requests

# Label of a padded place; torch's losses ignore it when told to.
PADDING_LABEL = -1
_HINT = (
    "; mend the dataset with `vitscale verify --repair`, or resume without such samples: "
    "--set data.on_bad_sample=substitute"
)


@dataclass(frozen=True)
class Filled:
    """The arrays of a micro-batch in slot order, as the readers fill them.

    Legend: b examples, c channels, s side in px.
    """

    # [b, c, s, s]
    images: NDArray[np.uint8]
    # Class of each example; PADDING_LABEL where there is none.
    labels: NDArray[np.int64]
    # xxh64 of each key as a signed number; 0 for padding.
    key_hash: NDArray[np.int64]
    # True where another sample stands in for one that is bad.
    substitutes: NDArray[np.bool_]
    # There, the hash of the bad sample's key; else 0.
    replaced: NDArray[np.int64]


@dataclass(frozen=True)
class DamagePolicy:
    """What to do about a sample that cannot be read.

    Args:
        on_bad_sample: "stop": an error; "substitute": feed another one of its window.
        max_in_a_row: Samples that may fail one after the other in the search for a substitute.
    """

    on_bad_sample: Literal["stop", "substitute"] = "stop"
    max_in_a_row: int = 32


class Examples:
    """Turns requests into batches.

    Args:
        reader: Where the samples come from.
        augment: How an example is made of an image.
        jpeg_scale: "exact" or "fast": how a JPEG may be decoded for a random crop.
        seed: Seed of the random numbers; None makes evaluation examples.
        order: Where substitutes come from; None: there are none.
        policy: What to do about bad samples.
    """

    def __init__(
        self,
        reader: SetsReader,
        augment: AugmentConfig,
        jpeg_scale: Literal["exact", "fast"],
        seed: int | None,
        order: Order | Mixture | None = None,
        policy: DamagePolicy | None = None,
    ) -> None:
        self.reader, self.augment, self.seed = reader, augment, seed
        self.jpeg_scale: Literal["exact", "fast"] = jpeg_scale
        self.order, self.policy = order, policy or DamagePolicy()
        self._starts = reader.starts
        # What this process has found to be bad: it is not tried again.
        self._bad: set[tuple[int, int]] = set()

    def fill(self, requests: Requests, out: Filled) -> list[BadSample]:
        """Make the examples of one micro-batch.

        Args:
            requests: What to make.
            out: Where to; every place is written.

        Returns:
            Samples that were found to be bad on the way and replaced.

        Raises:
            DataError: A sample is bad and must not be replaced, or an index is damaged.
        """
        found: list[BadSample] = []
        out.labels[:], out.key_hash[:] = PADDING_LABEL, 0
        out.substitutes[:], out.replaced[:] = False, 0
        # By shard and place in it, so that a shard is read in one go; filled in slot order.
        for i in np.lexsort((requests.indexes, requests.shard_ids)).tolist():
            if requests.positions[i] < 0:
                out.images[i] = 0
                continue
            self._fill_place(requests, i, out, found)
        return found

    def _fill_place(self, requests: Requests, i: int, out: Filled, found: list[BadSample]) -> None:
        place = int(requests.shard_ids[i]), int(requests.indexes[i])
        is_known = bool(requests.quarantined[i]) or place in self._bad
        if not is_known and self._fill_one(requests, i, place, out, found):
            return
        assert self.order is not None, "a quarantine without an order"
        out.substitutes[i] = True
        out.replaced[i] = _signed(self.reader.key_hash(*place))
        failed = 0
        for candidate in self.order.replacements(int(requests.positions[i])):
            if candidate in self._bad:
                continue
            if self._fill_one(requests, i, candidate, out, found):
                return
            failed += 1
            if failed >= self.policy.max_in_a_row:
                raise DataError(
                    f"{failed} samples in a row are damaged (data.max_bad_in_a_row); the last: "
                    f"{found[-1].message}"
                )

    def _fill_one(
        self,
        requests: Requests,
        i: int,
        place: tuple[int, int],
        out: Filled,
        found: list[BadSample],
    ) -> bool:
        """Make one example; False: the sample is bad, and noted."""
        try:
            record = self.reader.read(*place, int(requests.epochs[i]))
            self._decode(record, place, requests, i, out.images[i])
        except DataError as error:
            if self.order is None or self.policy.on_bad_sample == "stop":
                hint = "" if self.order is None else _HINT
                raise DataError(f"{error}{hint}") from error
            self._bad.add(place)
            found.append(
                BadSample(
                    int(self._starts[place[0]]) + place[1],
                    # Not to be had without the index; then this raises, and nothing is replaced.
                    *self.reader.name_of(*place),
                    key_hash=self.reader.key_hash(*place),
                    message=str(error),
                    position=int(requests.positions[i]),
                    epoch=int(requests.epochs[i]),
                )
            )
            return False
        out.labels[i], out.key_hash[i] = record.label, _signed(record.key_hash)
        return True

    def _decode(
        self,
        record: Record,
        place: tuple[int, int],
        requests: Requests,
        i: int,
        out: NDArray[np.uint8],
    ) -> None:
        try:
            if self.seed is None:
                eval_example(record.image, out, self.augment)
                return
            sample_index = int(self._starts[place[0]]) + place[1]
            rng = np.random.default_rng(
                stream(self.seed, "augment", int(requests.epochs[i]), sample_index)
            )
            train_example(record.image, out, self.augment, self.jpeg_scale, rng)
        except DataError as error:
            # The bytes are those of pack time, so reading them again would not help.
            raise self.reader.damaged(*place, str(error)) from error


def _signed(key_hash: int) -> int:
    return key_hash - 2**64 if key_hash >= 2**63 else key_hash
