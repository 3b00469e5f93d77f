"""Shared by all tests. It puts this folder on the path, so that tests say ``from tiny import tiny_model``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
