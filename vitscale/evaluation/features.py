"""What a trained model makes of pictures before its head: vectors whose angles compare contents."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from vitscale.config.errors import UserError
from vitscale.config.recipe import AugmentConfig, DataConfig, ModelConfig
from vitscale.data.loader import build_eval_loader
from vitscale.data.manifest import load_manifest
from vitscale.data.normalise import Normalise
from vitscale.data.storage import open_storage
from vitscale.models.build import create_model
from vitscale.models.weights import load_weights, read_safetensors


@dataclass(frozen=True)
class Embedder:
    """A model that gives features, with the preparation of its inputs."""

    model: Any
    config: ModelConfig
    augment: AugmentConfig
    normalise: Normalise
    device: torch.device

    @torch.no_grad()
    def embed(
        self, uri: str, batch_size: int, num_workers: int
    ) -> Iterator[tuple[Int64[Tensor, " b"], Float[Tensor, "b d"]]]:
        """Give (sample_index, features of length 1) of a dataset, batch by batch.

        Args:
            uri: The dataset.
            batch_size: Pictures at a time.
            num_workers: Reader processes.
        """
        storage = open_storage(uri)
        batches = build_eval_loader(
            DataConfig(train=uri, num_workers=num_workers),
            self.augment,
            storage,
            load_manifest(storage),
            img_size=self.config.img_size,
            in_chans=self.config.in_chans,
            rank=0,
            world_size=1,
            micro_batch=batch_size,
            pin_memory=self.device.type == "cuda",
        )
        for batch in batches:
            real = batch.positions >= 0
            tokens = self.model.forward_features(self.normalise(batch.images))
            features = self.model.forward_head(tokens, pre_logits=True).float()
            yield batch.positions[real], F.normalize(features, dim=1).cpu()[real]


def closest(
    embedder: Embedder, uri: str, others: Sequence[str], batch_size: int = 64, num_workers: int = 2
) -> Iterator[tuple[int, int, int, float]]:
    """Find for every sample of a dataset the one in others whose features are closest.

    The features of the others are held in memory: 4 bytes times their width each.

    Args:
        embedder: The model.
        uri: The dataset.
        others: At least one dataset.
        batch_size: Pictures at a time.
        num_workers: Reader processes.

    Yields:
        sample_index, position of the dataset in others, sample_index there, cosine (-1 to 1).
    """
    tables, origins = [], []
    for number, other in enumerate(others):
        for samples, features in embedder.embed(other, batch_size, num_workers):
            tables.append(features)
            origins += [(number, sample) for sample in samples.tolist()]
    table = torch.cat(tables)
    for samples, features in embedder.embed(uri, batch_size, num_workers):
        best, at = (features @ table.T).max(dim=1)
        found = zip(samples.tolist(), at.tolist(), best.tolist(), strict=True)
        for sample, place, cosine in found:
            yield sample, *origins[place], cosine


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
