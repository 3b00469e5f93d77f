"""Answers of a server against what the reference decoder would keep of them."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.bench.served_tau import STEPS, checked_drafts, main, measure, serve_command
from longdraft.bench.server import Generation
from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.reference_decode import speculative_decode
from longdraft.errors import UserError
from longdraft.kernels.view_attention import View

PROMPT, NEW = 37, 40


@pytest.mark.parametrize("context", [None, 48])
def test_a_served_answer_needs_what_the_reference_decoder_needs(tmp_path: Path, context: int | None) -> None:
    target = tiny_target("llama", num_hidden_layers=4)
    draft = tiny_draft(target, window=16)
    save_draft(draft, tmp_path, "tiny")
    ids = torch.randint(0, 256, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    view = context and View(context, 32, context - 32, 1)
    want = speculative_decode(target.model, draft, ids, NEW, STEPS, view or None)
    counters = {"target_verifications": want.stats.verifications}
    other = [*want.tokens[:-1], (want.tokens[-1] + 1) % 256]
    answers = [Generation(tokens, "", 0.0, counters) for tokens in (want.tokens, other)]
    cases = [(PROMPT, "d", ids)] * 2
    rows = measure(target, "a", tmp_path, cases, answers, context or target.spec.max_position)
    assert [row.same_tokens for row in rows] == [True, False]
    assert rows[0].verifications == rows[0].served_verifications == want.stats.verifications
    assert rows[0].gained == NEW - 1


def test_every_draft_is_checked_before_the_first_is_served(tmp_path: Path) -> None:
    target = tiny_target("llama", num_hidden_layers=4)
    save_draft(tiny_draft(target, window=16), tmp_path / "draft", "tiny")
    good = f"a={tmp_path / 'draft'}"
    assert checked_drafts([good, f"b={tmp_path / 'draft'}"], target.spec) == [(n, tmp_path / "draft") for n in "ab"]
    for words, told in (
        ([good, "b=nowhere"], "draft folder 'nowhere' has no config.json"),
        ([good, good], "every name once"),
        ([str(tmp_path / "draft")], "write NAME=FOLDER"),
    ):
        with pytest.raises(UserError, match=told):
            checked_drafts(words, target.spec)
    with pytest.raises(UserError):
        checked_drafts([good], tiny_target("llama", num_hidden_layers=2).spec)


def test_the_servers_draft_reads_what_is_asked() -> None:
    words = serve_command("T", Path("D"), 4096, 16, 7900)
    assert words[words.index("--draft-context") + 1] == "4096" and words[words.index("--dtype") + 1] == "float32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_what_to_do_instead(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--target", "T", "--draft", "a=D", "--answers", str(tmp_path / "x")])
    assert end.value.code == 2 and "shipped_tau" in capsys.readouterr().err
