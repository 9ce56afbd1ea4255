"""Distributed large-scale Vision Transformer training on DeepSpeed: pack, train, measure."""

__version__ = "0.1.0"
