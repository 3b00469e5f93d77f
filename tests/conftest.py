"""Shared by all tests. Its presence puts this folder on the path, so that tests say ``from tiny import tiny_model``."""

import os

# Tiny models gain nothing from a second thread, and on a busy machine threads that wait for each other cost tenfold.
# Set before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
