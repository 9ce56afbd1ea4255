"""From requests to a batch of examples: read, check, decode, augment; run by the readers."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vitscale.config.errors import DataError, VitscaleError
from vitscale.config.recipe import AugmentConfig
from vitscale.data.augment import eval_image, train_image
from vitscale.data.decode import decode_rgb
from vitscale.data.permute import stream
from vitscale.data.reader import ShardReader
from vitscale.data.requests import Requests

# Label of a padded place; torch's losses ignore it when told to.
PADDING_LABEL = -1


@dataclass(frozen=True)
class Batch:
    """A micro-batch in slot order."""

    images: UInt8[Tensor, "b c h w"]
    # Class of each example; PADDING_LABEL where there is none.
    labels: Int64[Tensor, " b"]
    # xxh64 of each key as a signed number; 0 for padding.
    key_hash: Int64[Tensor, " b"]
    epochs: Int64[Tensor, " b"]
    # Place of each example in the order of the run; in an evaluation its sample_index, or -1.
    positions: Int64[Tensor, " b"]
    # True where a quarantined sample was replaced.
    substitutes: Bool[Tensor, " b"]

    def pin_memory(self) -> "Batch":
        """Return the batch with what goes to the device in page-locked memory (DataLoader asks)."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


class Examples(Dataset[object]):
    """Turns requests into batches, as the dataset of torch's DataLoader.

    Args:
        reader: Where the samples come from.
        augment: How an example is made of an image.
        img_size: Side of an example, px.
        in_chans: Channels of an example.
        seed: Seed of the random numbers; None makes evaluation examples.
    """

    def __init__(
        self,
        reader: ShardReader,
        augment: AugmentConfig,
        img_size: int,
        in_chans: int,
        seed: int | None,
    ) -> None:
        self.reader, self.augment, self.seed = reader, augment, seed
        self.img_size, self.in_chans = img_size, in_chans

    def __getitems__(self, requests: Requests) -> Batch | VitscaleError:
        try:
            return self._batch(requests)
        except VitscaleError as error:
            # torch would wrap the traceback of this process around the message.
            return error

    def _batch(self, requests: Requests) -> Batch:
        count = len(requests)
        images = torch.zeros(
            (count, self.in_chans, self.img_size, self.img_size), dtype=torch.uint8
        )
        labels = np.full(count, PADDING_LABEL, dtype=np.int64)
        key_hash = np.zeros(count, dtype=np.uint64)
        if get_worker_info() is not None:
            images.share_memory_()  # filled where the rank will see it: no copy at hand-over
        # By shard and place in it, so that a shard is read in one go; filled in slot order.
        for i in np.lexsort((requests.indexes, requests.shard_ids)):
            if requests.positions[i] < 0:
                continue
            record = self.reader.read(int(requests.shard_ids[i]), int(requests.indexes[i]))
            images[i] = self._example(record.image, requests, int(i))
            labels[i], key_hash[i] = record.label, record.key_hash
        return Batch(
            images,
            *map(
                torch.from_numpy,
                (
                    labels,
                    key_hash.view(np.int64),
                    requests.epochs.copy(),
                    requests.positions.copy(),
                    requests.substitutes.copy(),
                ),
            ),
        )

    def _example(self, image: bytes, requests: Requests, i: int) -> UInt8[Tensor, "c s s"]:
        try:
            pixels = decode_rgb(image, self.in_chans)
        except DataError as error:
            # The bytes are those of pack time, so reading them again would not help.
            place = int(requests.shard_ids[i]), int(requests.indexes[i])
            raise self.reader.damaged(*place, str(error)) from error
        if self.seed is None:
            return eval_image(pixels, self.img_size, self.augment)
        epoch, sample_index = int(requests.epochs[i]), int(requests.sample_indexes[i])
        rng = np.random.default_rng(stream(self.seed, "augment", epoch, sample_index))
        return train_image(pixels, self.img_size, self.augment, rng)
