"""The base of all tables of a recipe."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all tables: unknown keys refused, nothing coerced, nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
