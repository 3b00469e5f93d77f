"""Triton kernels built for an H100 on a machine without one, to look at what the compiler made of them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile


def build_for_h100(kernel: Any, fixed: dict[str, Any], kinds: dict[str, str], odd: set[str], **options: int) -> Any:
    """A kernel with its constants, its arguments' types (int32 where none is given) and which of them 16 does not divide."""
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in kernel.arg_names}
    constants = {(i,): fixed[name] for i, name in enumerate(kernel.arg_names) if name in fixed}
    even = [
        i for i, name in enumerate(kernel.arg_names) if signature[name] not in ("constexpr", "fp32") and name not in odd
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(built: Any, folder: Path) -> int:
    """Bytes of registers that the assembler spills to memory."""
    source = folder / "kernel.ptx"
    source.write_text(built.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (stores,) = re.findall(r"(\d+) bytes spill stores", said)
    return int(stores)
