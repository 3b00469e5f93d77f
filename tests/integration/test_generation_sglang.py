"""`longdraft generate` with SGLang's engine, on the CPU: token for token what transformers gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny import tiny_model

from longdraft.train import generate


def test_sglang_and_transformers_write_the_same_bytes(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    records = [{"text": "A log of every boat. " * 20}, {"conversations": [{"role": "user", "content": "Sky?"}]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))

    def words(out: str, backend: str) -> list[str]:
        # fmt: off
        return ["--target.path", str(model), "--prompts.sources", str(tmp_path / "prompts.jsonl"), "--prompts.lengths", "[32, 64]",
                "--prompts.per-document", "3", "--sampling.max-new-tokens", "16", "--out", str(tmp_path / out), "--backend.name", backend]
        # fmt: on

    # A process of its own: the engine installs signal handlers and ends with its process.
    command = [sys.executable, "-m", "longdraft.cli", "generate", *words("sglang", "sglang")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    assert generate.main(words("transformers", "transformers")) == 0
    made = [(tmp_path / name / "generated.jsonl").read_bytes() for name in ("sglang", "transformers")]
    assert made[0] == made[1]
    assert made[0].count(b"\n") == 4
