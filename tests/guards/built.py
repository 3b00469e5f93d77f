"""What the packaging fixtures hand out."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Distributions:
    """Both archives of this tree."""

    wheel: Path
    sdist: Path
