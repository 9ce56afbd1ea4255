"""Datasets on storage: how they are laid out, ordered, read and checked."""

from vitscale.data.dataset import open_dataset

__all__ = ["open_dataset"]
