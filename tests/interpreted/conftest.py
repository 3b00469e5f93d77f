"""Cases that run in Triton's interpreter, in a process of their own with TRITON_INTERPRET=1 (see ``interpreter.py``)."""

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 numbers as their 16 bits and multiplies those as integers: they are widened first."""
    stock = InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        return stock(self, wide(a), wide(b), d, *more)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
