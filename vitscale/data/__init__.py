"""Datasets on storage: how they are laid out, ordered, read and checked."""

from vitscale.data.dataset import Dataset, Sample, open_dataset

__all__ = ["Dataset", "Sample", "open_dataset"]
