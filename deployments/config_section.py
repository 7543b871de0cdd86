"""What every part of the config is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config: frozen, strict types, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
