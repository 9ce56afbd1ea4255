"""Fingerprints that were taken so far, beside the list, so that a killed job goes on."""

import io

import numpy as np
import numpy.typing as npt

from data_prep.fingerprint import FINGERPRINT_VERSION, FINGERPRINT_WIDTH
from vitscale.data.manifest import Manifest
from vitscale.data.storage import Storage


class FingerprintCache:
    """One small file a shard, until the list is written.

    Args:
        storage: Of the list.
        name: Of the list.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._folder = f"{name}.fingerprints/"
        self._kept = set(storage.list(self._folder))

    def load(self, manifest: Manifest, shard_id: int) -> npt.NDArray[np.uint64] | None:
        """Give the fingerprints of a shard, or None where they are not here or not whole."""
        name = self._name(manifest, shard_id)
        if name not in self._kept:
            return None
        try:
            array = np.load(io.BytesIO(self._storage.read_bytes(name)), allow_pickle=False)
        except (ValueError, OSError, EOFError):
            return None  # taken anew
        shape = int(manifest.shards.num_samples[shard_id]), FINGERPRINT_WIDTH
        return array if array.dtype == np.uint64 and array.shape == shape else None

    def keep(self, manifest: Manifest, shard_id: int, array: npt.NDArray[np.uint64]) -> None:
        """Write the fingerprints of a shard."""
        data = io.BytesIO()
        np.save(data, array, allow_pickle=False)
        self._storage.put(self._name(manifest, shard_id), data.getvalue())

    def clear(self) -> None:
        """Remove all."""
        for name in self._storage.list(self._folder):
            self._storage.delete(name)
        folder = self._storage.local_path(self._folder)
        if folder is not None and folder.is_dir():
            folder.rmdir()

    def _name(self, manifest: Manifest, shard_id: int) -> str:
        # The dataset's own hash: of another dataset nothing is taken, nor of one that was replaced.
        return f"{self._folder}v{FINGERPRINT_VERSION}-{manifest.digest[:32]}-{shard_id:06d}.npy"
