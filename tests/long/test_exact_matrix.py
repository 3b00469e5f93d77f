"""``make test-long``: mode ``exact`` is plain decoding on fifty prompts, with every selector and four budgets (V1, P8).

SmolLM2-135M in float32 with its shipped EAGLE-3 draft; a record of it is kept in ``bench/results/``.
"""

import json
from pathlib import Path

import pytest
import torch

from longdraft.bench.demo_text import write_long_text
from longdraft.bench.view_agreement import main
from longdraft.models import demo_model_folder, shipped_draft
from longdraft.serve.views.selectors import SELECTORS

BUDGETS = (64, 128, 512, 1024)
LENGTHS = (40, 7900, 97, 5000, 180, 3000, 400, 1024, 777, 2049)
COUNT = 50
RECORD = Path(__file__).parents[2] / "bench" / "results" / "exact_matrix.json"


@pytest.mark.timeout(0)
def test_exact_is_plain_decoding_for_every_selector_and_budget(tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    write_long_text(documents, COUNT)
    on_card = torch.cuda.is_available()
    words = [
        "--target",
        str(demo_model_folder()),
        "--draft",
        str(shipped_draft("smollm2-135m", "eagle3")),
        "--identity",
    ]
    words += ["--selectors", *SELECTORS, "--budgets", *map(str, BUDGETS), "--prompt-tokens", *map(str, LENGTHS)]
    words += ["--dtype", "float32", "--attention-backend", "triton", "--new-tokens", "64", "--count", str(COUNT)]
    words += ["--batch", "16", "--parallel", "8"] if on_card else ["--batch", "2"]
    status = main([*words, "--documents", str(documents), "--logs", str(tmp_path / "logs"), "--record", str(RECORD)])
    record = json.loads(RECORD.read_text())
    assert status == 0, (record["checks"], record["differing"])
    assert record["figures"]["prompts"] == COUNT
