"""Retrieval heads: one planted by hand is found first, and what counts is counted as the procedure says (U6).

Legend: P rows, N keys, S layers, H heads.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target
from transformers import LlamaForCausalLM

from longdraft.train.calibration.lookahead import LongSpecLookahead
from longdraft.train.calibration.needles import Needle, Prompter, Trial
from longdraft.train.calibration.reading import Reading
from longdraft.train.calibration.retrieval_heads import (
    Asking,
    ask,
    best_heads,
    end_tokens,
    head_mass,
    own_answer,
    rouge_recall,
    score_answer,
)
from longdraft.train.tiny_random import byte_tokenizer, tiny_config

NEEDLE = Needle("xzzz", "Which three letters?", "zzz")  # no other text has an x or a z
HAY = "It rained all day. " * 9
PLANTED, DECOY = (1, 3), (0, 2)  # layer and head
ASKING = Asking(3, 50, "mass", [257])


def planted(decoy: bool = False) -> Any:
    """A model whose head :data:`PLANTED` looks at every z and makes it the next token; its :data:`DECOY` may look at the x beside them.

    Channels of the hidden rows: 0 of every token, 1 of z, 2 of x, 3 what says z.
    """
    model = LlamaForCausalLM(tiny_config("llama")).eval()
    size, slow = 16, 7  # of a head; a dimension that turns by a third of a milliradian a token
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.dim() == 1 else 0.0)
        embedding, z, x = model.model.embed_tokens.weight, ord("z") - 33, ord("x") - 33
        embedding[:, 0], embedding[z, 1], embedding[x, 2] = 1, 1, 1
        for (layer, head), channel in ((PLANTED, 1), (DECOY, 2))[: 1 + decoy]:
            attention, group = model.model.layers[layer].self_attn, head // 2
            attention.q_proj.weight[head * size + slow, 0] = 4
            attention.k_proj.weight[group * size + slow, channel] = 4
        attention = model.model.layers[PLANTED[0]].self_attn
        attention.v_proj.weight[PLANTED[1] // 2 * size, 1] = 1
        attention.o_proj.weight[3, PLANTED[1] * size] = 1
        model.lm_head.weight[z, 3] = 1
    return model


def trial(sentence: str = NEEDLE.sentence) -> Trial:
    prompter = Prompter(byte_tokenizer(), chat=False)
    needle = Needle(sentence, NEEDLE.question, NEEDLE.answer)
    length = sum(map(len, prompter.around(needle.question))) + len(f" {sentence}") + len(HAY)
    return Trial(0, 0, length, 0.5, *prompter.hide(needle, prompter.encode(HAY), 0.5, length))


def first(score_SH: torch.Tensor, count: int = 1) -> list[tuple[int, int]]:
    """The heads with the largest scores."""
    order = score_SH.flatten().argsort(descending=True)[:count].tolist()
    return [divmod(place, score_SH.shape[1]) for place in order]


def test_a_planted_retrieval_head_is_found_first() -> None:
    """The model answers by itself. Its own z draw attention too: one of the second step's four, two of the third's five."""
    text, recall, heads = ask(planted(), byte_tokenizer(), None, trial(), NEEDLE, ASKING, None)
    assert (text, recall) == ("zzz", 100) and heads is not None and heads.hits == 3
    assert first(heads.target_SH) == [PLANTED]
    assert heads.target_SH[PLANTED].item() == pytest.approx(3 * (1 + 3 / 4 + 3 / 5), rel=0.05)
    heads.target_SH[PLANTED] = 0
    assert heads.target_SH.max() < 1, "all other heads spread their attention over the whole prompt"


def test_mass_and_argmax_differ_in_a_head_that_looks_beside_what_is_copied() -> None:
    """Mass over the needle takes the decoy for a retrieval head, a traditional retrieval head's favourite is the copied token."""
    found = {}
    for rule in ("mass", "argmax"):
        heads = ask(planted(decoy=True), byte_tokenizer(), None, trial(), NEEDLE, replace(ASKING, rule=rule), None)[2]
        assert heads is not None
        found[rule] = heads.target_SH
    assert set(first(found["mass"], 2)) == {PLANTED, DECOY} and found["mass"][DECOY] > 3
    assert first(found["argmax"]) == [PLANTED]
    # The first step alone: the favourite of later ones is a z of the answer itself, which stands nearer.
    assert found["argmax"][PLANTED] == 3 and found["argmax"][DECOY] == 0


def test_an_answer_that_recalls_too_little_does_not_count() -> None:
    model, tokenizer, question = planted(), byte_tokenizer(), trial()
    strict = Asking(4, 50, "mass", [257])  # four letters are another word
    assert ask(model, tokenizer, None, question, NEEDLE, strict, None) == ("zzzz", 0, None)
    text, _, heads = ask(model, tokenizer, None, question, NEEDLE, strict, tokenizer("zz").input_ids)
    assert text == "zz" and heads is not None and heads.hits == 2, "a given one counts whatever it recalls"
    silent = Asking(3, 50, "mass", [ord("z") - 33])
    assert ask(model, tokenizer, None, question, NEEDLE, silent, None) == ("", 0, None)


def test_a_token_counts_as_often_as_the_needle_holds_it() -> None:
    model = planted()
    scores = {}
    for sentence in ("xz", "xzzz"):
        question = trial(sentence)
        reading = Reading(model)
        reading.read(question.ids)
        got = score_answer(reading, None, question, byte_tokenizer()("za").input_ids, "mass")
        assert got.hits == 1, "no needle holds an a"
        scores[sentence] = float(got.target_SH[PLANTED])
    assert scores["xzzz"] == pytest.approx(3 * scores["xz"], rel=1e-3)


@pytest.mark.parametrize("rule", ["mass", "argmax"])
def test_head_mass_is_what_the_rule_says(rule: str) -> None:
    g = torch.Generator().manual_seed(0)
    score_HPN, id_N, span = 3 * torch.randn(5, 4, 12, generator=g), torch.randint(0, 3, (12,), generator=g), range(2, 9)
    said, times = [0, 1, 2, 1], [3, 1, 2, 1]
    got_H = head_mass(score_HPN, id_N, span, torch.tensor(said), torch.tensor(times), rule)
    for h in range(5):
        want = 0.0
        for p in range(4):
            mass_N = score_HPN[h, p].softmax(-1)
            best = int(mass_N.argmax())
            hit = float(mass_N[2:9].sum()) if rule == "mass" else float(best in span and int(id_N[best]) == said[p])
            want += times[p] * hit
        assert got_H[h].item() == pytest.approx(want, rel=1e-5)
    assert got_H.any()


def test_a_draft_is_scored_along_the_same_answer() -> None:
    """A draft's row is the one that reads the token before the answer's."""
    target = tiny_target("llama")
    draft, question = LongSpecLookahead(tiny_draft(target, window=16)), trial()
    answer = byte_tokenizer()("zaz").input_ids
    reading = Reading(target.model)
    reading.read(question.ids)
    got = score_answer(reading, draft, question, answer, "mass")
    seen: list[torch.Tensor] = []
    prompt = len(question.ids)
    draft.look(reading, [prompt - 1, prompt + 1], 1, lambda _, score: seen.append(score[:, :, 0].softmax(-1)))
    want_H = 3 * seen[0][:, :, question.span.start : question.span.stop].sum((1, 2))
    assert got.draft_SH is not None and got.hits == 2
    torch.testing.assert_close(got.draft_SH[0], want_H.double())
    assert reading.ids == question.ids + answer[:-1]


def test_own_answers_are_greedy_and_end_where_the_model_ends_them() -> None:
    target = tiny_target("llama")
    ids = byte_tokenizer()("Once upon a time").input_ids
    answer = own_answer(Reading(target.model), ids, 6, [])
    with torch.no_grad():
        for i, token in enumerate(answer):
            logits = target.model(torch.tensor([ids + answer[:i]])).logits[0, -1]
            assert int(logits.argmax()) == token
    assert own_answer(Reading(target.model), ids, 6, [answer[2]]) == answer[: answer.index(answer[2])]
    assert 257 in end_tokens(target.model, byte_tokenizer())


def test_recall_counts_the_references_words() -> None:
    assert rouge_recall("behind the blue clock", "It is behind the clock.") == 75
    assert rouge_recall("behind the blue clock", "") == 0


def test_the_best_heads_of_a_layer_are_listed_by_number_and_ties_go_to_the_first() -> None:
    score_SH = torch.tensor([[0.1, 0.9, 0.5, 0.7], [0.0, 0.0, 0.0, 0.0]])
    assert best_heads(score_SH, 2) == [[1, 3], [0, 1]]
    assert best_heads(score_SH, 9) == [[0, 1, 2, 3], [0, 1, 2, 3]]
