"""What a trained model makes of pictures before its head: vectors whose angles compare contents."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from vitscale.config.errors import UserError
from vitscale.config.recipe import AugmentConfig, DataConfig, ModelConfig
from vitscale.data.dataset import Dataset
from vitscale.data.loader import build_eval_loader
from vitscale.data.normalise import Normalise
from vitscale.models.build import create_model
from vitscale.models.weights import load_weights, read_safetensors

# Cosines that are held at a time: 64 MB.
TILE_ROWS, TILE_COLUMNS = 1024, 16_384


@dataclass(frozen=True)
class Embedder:
    """A model that gives features, with the preparation of its inputs."""

    model: Any
    config: ModelConfig
    augment: AugmentConfig
    normalise: Normalise
    device: torch.device

    def embed(
        self, dataset: Dataset, batch_size: int = 64, num_workers: int = 0
    ) -> Iterator[tuple[Int64[Tensor, " b"], Float[Tensor, "b d"]]]:
        """Give (sample_index, features of length 1) of a dataset, batch by batch.

        Args:
            dataset: In its stored order.
            batch_size: Pictures at a time.
            num_workers: Reader processes; 0 reads in this one.
        """
        batches = build_eval_loader(
            DataConfig(train=dataset.storage.uri, num_workers=num_workers),
            self.augment,
            dataset.storage,
            dataset.manifest,
            img_size=self.config.img_size,
            in_chans=self.config.in_chans,
            rank=0,
            world_size=1,
            micro_batch=batch_size,
            pin_memory=self.device.type == "cuda",
        )
        for batch in batches:
            real = batch.positions >= 0
            yield batch.positions[real], embed(self.model, self.normalise(batch.images)).cpu()[real]


@torch.no_grad()
def embed(model: Any, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d"]:
    """Give what a model hands to its head, as float32 vectors of length 1.

    Args:
        model: Ours, in evaluation mode.
        images: Normalised, on its device.
    """
    tokens = model.forward_features(images)
    return F.normalize(model.forward_head(tokens, pre_logits=True).float(), dim=1)


class FeatureTable:
    """Features of a set, on the model's device: 4 bytes times their width a sample.

    Args:
        embedder: Where the features come from.
        count: Samples of the set.
    """

    def __init__(self, embedder: Embedder, count: int) -> None:
        width = int(embedder.model.shape.embed_dim)
        self._table = torch.zeros(count, width, device=embedder.device)

    def put(self, samples: Int64[Tensor, " b"], features: Float[Tensor, "b d"]) -> None:
        """Store features of samples."""
        self._table[samples] = features.to(self._table.device)

    def closest(
        self, features: Float[Tensor, "b d"], cosine: float
    ) -> list[tuple[int, int, float]]:
        """Find for every row the closest sample, where it is close enough.

        Args:
            features: Of length 1.
            cosine: Least cosine of a match.

        Returns:
            Row, sample, cosine.
        """
        own = features.to(self._table.device)
        best = torch.full((len(own),), -2.0, device=own.device)
        at = torch.zeros(len(own), dtype=torch.int64, device=own.device)
        for left in range(0, len(self._table), TILE_COLUMNS):
            value, place = (own @ self._table[left : left + TILE_COLUMNS].T).max(dim=1)
            better = value > best
            best = torch.where(better, value, best)
            at = torch.where(better, place + left, at)
        rows = torch.nonzero(best >= cosine).flatten()
        return list(zip(rows.tolist(), at[rows].tolist(), best[rows].tolist(), strict=True))

    def close_pairs(self, cosine: float) -> Iterator[tuple[int, int]]:
        """Find all pairs of samples whose features have at least this cosine; each once.

        Every sample is compared with every other one: the work grows with the square.
        """
        for top in range(0, len(self._table), TILE_ROWS):
            own = self._table[top : top + TILE_ROWS]
            for left in range(0, top + len(own), TILE_COLUMNS):
                close = own @ self._table[left : left + TILE_COLUMNS].T >= cosine
                # A sample is compared with earlier ones only.
                rows, others = torch.nonzero(close.tril(top - left - 1), as_tuple=True)
                yield from zip((rows + top).tolist(), (others + left).tolist(), strict=True)

    def cosine(self, one: int, other: int) -> float:
        """Give the cosine of two samples."""
        return float(self._table[one] @ self._table[other])


def load_embedder(path: str, device: str | None = None) -> Embedder:
    """Load a model from an exported or checkpointed safetensors file of ours.

    Raises:
        UserError: It does not describe its model.
    """
    weights, metadata = read_safetensors(path)
    if metadata is None:
        raise UserError(f"{path} was not written by vitscale: it does not describe its model")
    config = ModelConfig.model_validate_json(json.dumps(metadata["model"]))
    augment = AugmentConfig.model_validate_json(json.dumps(metadata["input"]))
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = create_model(config).to(place).eval()
    load_weights(model, weights, new_head=False)
    normalise = Normalise(augment.mean, augment.std, config.in_chans, place, torch.float32)
    return Embedder(model, config, augment, normalise, place)
