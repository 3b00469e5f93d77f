"""What a calibration found for a pair of target and draft: whose attention chooses the tokens of a sparse verification.

One JSON file, written by ``longdraft calibrate`` and read by serving (Dustin, section 4.2 and Algorithm 1 there):
``{"target": {"layer": 17, "heads": [1, 4]}, "draft": [{"layer": 2, "heads": [0]}], "lookahead": 208, "budget": 512, "provenance": {}}``.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from longdraft.errors import UserError, shown
from longdraft.schema import Settings, validate

PROTECTED = 4 + 16  # sinks and window of a sparse set, which count (Dustin, equation 6)
REMEDY = "make it with longdraft calibrate"


class LayerHeads(Settings):
    """Query heads of one layer, whose attention is summed."""

    layer: int = Field(
        ge=0, description="from 0; of a LongSpec draft the target's layer that it reads, of an EAGLE-3 draft 0"
    )
    heads: list[int] = Field(description="query heads, from 0")

    @field_validator("heads")
    @classmethod
    def _heads_differ(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 0 or len(set(value)) < len(value):
            raise ValueError("list different heads from 0 on, at least one")
        return sorted(value)


class SparseRecipe(Settings):
    """Layers and heads of both models, and how the tokens of a set are divided between them."""

    target: LayerHeads = Field(description="whose attention at the last accepted token is the history")
    draft: list[LayerHeads] = Field(
        default_factory=list, description="whose attention while drafting is the lookahead; none: history alone"
    )
    lookahead: int = Field(ge=0, description="tokens of a set that the lookahead chooses (m)")
    budget: int = Field(512, gt=PROTECTED, description="tokens of the sets that this was found for (k)")
    provenance: dict[str, Any] = Field(default_factory=dict, description="how it was found, for people")

    @field_validator("draft")
    @classmethod
    def _layers_differ(cls, value: list[LayerHeads]) -> list[LayerHeads]:
        if len({each.layer for each in value}) < len(value):
            raise ValueError("name every layer once")
        return value

    @model_validator(mode="after")
    def _lookahead_fits(self) -> "SparseRecipe":
        if self.lookahead > self.budget - PROTECTED:
            raise ValueError(
                f"lookahead={self.lookahead} with budget={self.budget}, of which {PROTECTED} are sinks and window: write "
                f"{self.budget - PROTECTED} or less"
            )
        if self.lookahead and not self.draft:
            raise ValueError(
                f"lookahead={self.lookahead} without draft layers to look ahead with: name some, or write 0"
            )
        return self

    def save(self, path: str | Path) -> None:
        """Write the file, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, work = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(self.model_dump_json(indent=1) + "\n")
            os.chmod(work, 0o644)
            os.replace(work, path)
        finally:
            Path(work).unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> "SparseRecipe":
        """Read a file of :meth:`save`.

        Raises:
            UserError: no such file, one that is no JSON object, or a field that is missing, unknown or unfit.
        """
        where = f"sparse recipe {str(path)!r}"
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise UserError(f"{where} cannot be read ({error.strerror}): {REMEDY}") from None
        except (ValueError, RecursionError):
            raise UserError(f"{where} is not JSON: {REMEDY}") from None
        if not isinstance(data, dict):
            raise UserError(f"{where} holds {shown(data)}: {REMEDY}")
        try:
            return validate(SparseRecipe, data)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
