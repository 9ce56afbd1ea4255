"""The Vision Transformer: building it, its weights, and what it costs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitscale.models.build import create_model

__all__ = ["create_model"]


def __getattr__(name: str) -> object:
    # Lazy: vitscale.models.cost must stay importable without torch.
    if name == "create_model":
        from vitscale.models.build import create_model

        return create_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
