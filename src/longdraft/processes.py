"""Child processes that do not outlive what started them."""

import ctypes
import signal
import sys

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # looked up here: between fork and exec that could hang
SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """Have Linux end the calling process when the thread that started it ends, however that ends; a no-op elsewhere."""
    if LIBC is not None:
        LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
