"""Requests for tests of serving without a server: SGLang's own finish rules over a small alphabet."""

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.kernels.tree import Tree
from longdraft.serve.sampling.rows import RowParams


class PieceTokenizer:
    """Token i is piece i; a text encodes by longest match, so that a text can be written in more tokens than it encodes to."""

    def __init__(self, pieces: Sequence[str], eos: int = -1, more_stops: set[int] | None = None) -> None:
        self.pieces = list(pieces)
        self.eos_token_id = eos
        self.additional_stop_token_ids = more_stops

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self.pieces if text.startswith(p)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids


class BareRequest(Req):
    """SGLang's request with what its finish rules read, and nothing of a scheduler."""

    def __init__(
        self, params: SamplingParams, tokenizer: Any, prompt: Sequence[int] = (0,), eos: set[int] | None = None
    ):
        params.normalize(tokenizer)
        self.rid = "r"
        self.sampling_params = params
        self.tokenizer = tokenizer
        self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q")
        self.eos_token_ids = eos
        self.vocab_size = 1 << 20
        self.finished_reason = None
        self.finished_len = None
        self.to_finish = None
        self.grammar = None
        self.decoded_text = ""
        self.customized_info = None

    def gain(self, tokens: Sequence[int]) -> None:
        """What SGLang does with a step's tokens."""
        self.output_ids.extend(tokens)
        self.update_finish_state(len(tokens))


def plain_request(output: Sequence[int] = (), rid: str = "r", tokenizer: Any = None, **params: Any) -> SimpleNamespace:
    """A request as sampling reads it."""
    return SimpleNamespace(
        rid=rid,
        sampling_params=SamplingParams(**params),
        output_ids=array("q", output),
        origin_input_ids=array("q", [0]),
        tokenizer=tokenizer or PieceTokenizer("abcdefgh", eos=7),
        grammar=None,
        customized_info=None,
    )


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
]  # what the draft loop runs differently: greedy, noisy, filtered


def row_params(
    ids: Sequence[str],
    sampling: dict[str, Any],
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> RowParams:
    """One row a request, seeded by its id."""
    reqs = []
    for rid in ids:
        params = SamplingParams(**sampling, sampling_seed=ord(rid))
        params.normalize(None)
        reqs.append(SimpleNamespace(rid=rid, sampling_params=params))
    return RowParams.build(reqs, [1] * len(reqs), device)


def same_trees(a: Tree, b: Tree) -> bool:
    """Nodes, edges and bits; what places without a node hold says nothing."""
    if not torch.equal(a.parent_BT, b.parent_BT) or not torch.equal(a.bits_BTW, b.bits_BTW):
        return False
    pairs = ((a.token_BT, b.token_BT), (a.depth_BT, b.depth_BT))
    return all(torch.equal(x[a.valid_BT], y[b.valid_BT]) for x, y in pairs)
