"""EAGLE-3 against SpecForge's own step, run from the installed package: the same draft on the same features.

Its config loader reads our JSON, its draft loads our weights strictly; hidden rows, logits, loss, gradients and counts agree.

Legend: B samples, S tokens, E hidden size, V target vocabulary, N draft vocabulary, K steps of the training-time test.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from specforge_harness import SpecForgeCase, SpecForgeStep, specforge_steps
from tiny import tiny_eagle3, tiny_target
from torch.nn.functional import pad

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_ttt import forward_ttt
from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Document
from longdraft.train.methods.eagle3 import Eagle3Method
from longdraft.train.samples import Packed, pack
from longdraft.train.specforge_seam.draft_json import specforge_json

N, S, K, B = 90, 24, 3, 2
TARGET = tiny_target("llama", num_hidden_layers=5)
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms_of_features_and_llama3": {
        "fc_norm": True,
        "rope": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "yarn": {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "linear": {"rope": {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 512}},
    "other_heads": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "intermediate_size": 40},
}


@dataclass
class Pair:
    draft: Eagle3Draft
    packed: Packed
    case: SpecForgeCase
    theirs: SpecForgeStep


def packed_documents() -> Packed:
    g = torch.Generator().manual_seed(1)
    documents = []
    for begin, end in ((7, 20), (3, 23)):
        mask = [begin <= i < end for i in range(S)]  # its normaliser leaves a document's last token out
        documents.append(Document(torch.randint(0, 256, (S,), generator=g).tolist(), mask, "d"))
    return pack(documents, [torch.arange(S)] * B, all_rows=False)


def case_of(draft: Eagle3Draft, packed: Packed) -> SpecForgeCase:
    seen = TARGET.capture(
        packed.id_T, packed.position_T, packed.cu, hidden=True, aux=draft.config.aux_layers, kv_layers=()
    )
    hidden_TE = seen.hidden_TE
    assert hidden_TE is not None
    mask_T = torch.zeros(B * S, dtype=torch.int64)
    mask_T[1:] = (packed.label_T[:-1] != -100).long()
    batch = {"input_ids": packed.id_T, "loss_mask": mask_T, "hidden_state": seen.aux_TA, "target": hidden_TE}
    batch = {name: value.view(B, S, *value.shape[1:]) for name, value in batch.items()}
    weights = draft.state_dict() | {"embed_tokens.weight": TARGET.embedding_VE}
    return SpecForgeCase(specforge_json(draft.config), weights, batch | {"head": TARGET.head_VE}, K)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    packed = packed_documents()
    drafts = {name: tiny_eagle3(TARGET, draft_vocab_size=N, **changes) for name, changes in DRAFTS.items()}
    g = torch.Generator().manual_seed(4)
    for draft in drafts.values():
        draft.choose_vocabulary(torch.randperm(256, generator=g)[:N])
    cases = {name: case_of(draft, packed) for name, draft in drafts.items()}
    steps = specforge_steps(tmp_path_factory.mktemp("specforge"), cases)
    return {name: Pair(drafts[name], packed, cases[name], steps[name]) for name in DRAFTS}


@pytest.fixture(params=list(DRAFTS))
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    found = pairs[request.param]
    found.draft.zero_grad()
    return found


def test_hidden_rows_and_logits_of_every_step_are_specforges(pair: Pair) -> None:
    draft, packed, batch = pair.draft, pair.packed, pair.case.batch
    rows = torch.arange(B * S)
    aux_TA = batch["hidden_state"].flatten(0, 1)
    with torch.no_grad():
        for k, out in enumerate(forward_ttt(draft, aux_TA, packed.id_T, packed.position_T, packed.cu, rows, K)):
            assert int(out.valid_N.sum()) == B * (S - 1 - k)
            theirs = draft.norm(pair.theirs.hidden_KBSE[k].flatten(0, 1))
            torch.testing.assert_close(out.normed_NE[out.valid_N], theirs[out.valid_N], atol=1e-5, rtol=1e-5)
            logits = draft.draft_logits(out.normed_NE)[out.valid_N]
            their_logits = pair.theirs.logits_KBSN[k].flatten(0, 1)[out.valid_N]
            torch.testing.assert_close(logits, their_logits, atol=1e-5, rtol=1e-5)


def test_the_compatible_loss_its_gradients_and_its_counts_are_specforges(pair: Pair) -> None:
    sections = {
        "target": {"path": "x"},
        "data": {"train": "x"},
        "draft": {"arch": "eagle3"},
        "objective": {"chunk": 7},
        "ttt": {"steps": K, "compat": "specforge-0.2.0"},
    }
    method = Eagle3Method(validate(TrainSettings, sections), TARGET, pair.draft)
    out = method(pair.packed, 1)
    loss = out.loss / method.denominator(pair.packed)
    torch.testing.assert_close(loss.detach(), pair.theirs.loss, atol=1e-5, rtol=1e-5)
    assert out.hits_K.tolist() == pair.theirs.correct_K.long().tolist()
    assert out.rows_K.tolist() == pair.theirs.rows_K.long().tolist()
    loss.backward()
    trained = dict(pair.draft.named_parameters())
    assert trained.keys() == pair.theirs.grads.keys()
    for name, weight in trained.items():
        torch.testing.assert_close(
            weight.grad, pair.theirs.grads[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_our_own_loss_is_another_one(pair: Pair) -> None:
    sections = {"target": {"path": "x"}, "data": {"train": "x"}, "draft": {"arch": "eagle3"}, "ttt": {"steps": K}}
    method = Eagle3Method(validate(TrainSettings, sections), TARGET, pair.draft)
    loss = method(pair.packed, 1).loss / method.denominator(pair.packed)
    assert abs(float(loss.detach()) - float(pair.theirs.loss)) > 0.1, "the mask is shifted, the mean is over its rows"


def test_specforges_loss_is_what_the_notes_say(pair: Pair) -> None:
    batch, t2d_V = pair.case.batch, pair.draft.t2d
    teacher_BSV = pad(batch["target"], (0, 0, -1, 1)) @ batch["head"].t()  # it shifts ids and targets, not the mask
    p_BSN = teacher_BSV[..., t2d_V].softmax(-1)
    counts_BS = batch["loss_mask"] * t2d_V[teacher_BSV.argmax(-1)]
    for k in range(K):
        shifted_p, shifted_rows = pad(p_BSN, (0, 0, -k, k)), pad(counts_BS, (-k, k))
        cross_BS = -(shifted_p * pair.theirs.logits_KBSN[k].log_softmax(-1)).sum(-1)
        want = (cross_BS * shifted_rows).sum() / (B * S)
        torch.testing.assert_close(pair.theirs.ploss_K[k], want, atol=1e-6, rtol=1e-5)


def test_its_exporter_misses_no_key_of_ours() -> None:
    from specforge.export.to_sglang import _serving_state

    draft = tiny_eagle3(TARGET, draft_vocab_size=N)
    assert _serving_state(draft.state_dict(), {}).keys() == draft.state_dict().keys()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 8}, "eagle3.window=8"),
        ({"norm_output": True}, "eagle3.norm_output=True"),
        (
            {"rope": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "attention_factor": 2}},
            "attention_factor",
        ),
    ],
)
def test_what_its_draft_does_not_have_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        specforge_json(tiny_eagle3(TARGET, **changes).config)
