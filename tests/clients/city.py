"""What the clients ask for: small enough for a small model."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=12)]
    inhabitants: Annotated[int, Field(ge=0, le=9_999_999)]
    coast: bool
