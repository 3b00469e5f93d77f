"""What the device has to know of the requests of a batch, sent there once for as long as the same ones run.

Legend: B requests, N tokens of a run, S stop tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch

from longdraft.kernels.transfer import to_device
from longdraft.serve.emission import stop_tokens
from longdraft.serve.sampling.penalties import penalised
from longdraft.serve.sampling.rows import RowParams

NO_TOKEN = -1


@dataclass(frozen=True)
class Roster:
    """What stays the same of a batch as long as the same requests run.

    Attributes:
        reqs: the requests.
        rids: their ids.
        modes: their modes.
        hosted: whether one of them needs its text on the host.
        end_B: tokens that each may have, prompt in.
        drafts_B: whether it drafts.
        sparse_B: whether its mode is ``sparse``.
        stop_BS: tokens that end it, filled up with -1.
        params: how it chooses.
    """

    reqs: list[Any]
    rids: tuple[str, ...]
    modes: list[str]
    hosted: bool
    end_B: torch.Tensor
    drafts_B: torch.Tensor
    sparse_B: torch.Tensor
    stop_BS: torch.Tensor
    params: RowParams

    @staticmethod
    def build(reqs: list[Any], modes: list[str], device: torch.device, vocab: int) -> "Roster":
        """Read the requests and send what the device needs of them there.

        Of the tokens that end a request only those of the vocabulary: others need not fit a tensor, and there is no end of them.
        """
        stops = [sorted(t for t in stop_tokens(r) if 0 <= t < vocab) for r in reqs]
        most = max(1, *map(len, stops))
        return Roster(
            list(reqs),
            tuple(r.rid for r in reqs),
            modes,
            any(needs_text(r) for r in reqs),
            to_device(
                [len(r.origin_input_ids) + int(r.sampling_params.max_new_tokens) for r in reqs], torch.int64, device
            ),
            to_device([mode != "off" for mode in modes], torch.bool, device),
            to_device([mode == "sparse" for mode in modes], torch.bool, device),
            to_device([s + [NO_TOKEN] * (most - len(s)) for s in stops], torch.int64, device).view(len(reqs), most),
            RowParams.build(reqs, [1] * len(reqs), device),
        )

    def returned(self, run_BN: torch.Tensor, kept_B: torch.Tensor) -> torch.Tensor:
        """How much of each run is returned, int64 ``[B]``: up to the first token that ends the request (:mod:`emission`).

        Args:
            run_BN: kept drafts and the target's choice behind them, and any tokens behind that.
            kept_B: kept drafts of each.
        """
        offset_N = torch.arange(run_BN.shape[1], device=run_BN.device)
        ends_BN = (run_BN[:, :, None] == self.stop_BS[:, None]).any(-1)
        return torch.minimum(kept_B, offset_N.where(ends_BN, run_BN.shape[1]).amin(1)) + 1

    @property
    def drafting(self) -> bool:
        """Whether one of them drafts."""
        return any(mode != "off" for mode in self.modes)

    def of(self, reqs: list[Any]) -> bool:
        """Whether these are the requests."""
        return len(reqs) == len(self.reqs) and all(a is b for a, b in zip(reqs, self.reqs, strict=True))


def needs_text(req: Any) -> bool:
    """Whether the request's next token, or where it ends, depends on what it has written."""
    params = req.sampling_params
    return bool(req.grammar is not None or penalised(req) or params.stop_strs or params.stop_regex_strs)
