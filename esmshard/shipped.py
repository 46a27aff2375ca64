"""The paths of files that come with the package: recipes, samples, and small trained models."""

from pathlib import Path
from typing import Literal


def shipped(kind: Literal["recipes", "data"]) -> Path:
    """Return the directory of shipped recipes or data: inside the installed package, or at the top of a clone."""
    installed = Path(__file__).parent / "_shipped" / kind
    return installed if installed.is_dir() else Path(__file__).parent.parent / kind
