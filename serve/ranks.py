"""Several processes that serve as one (tensor parallel), each with a share of every layer's heads: what they add up, what they put
together, and whose word counts.

**Whose word counts.** SGLang gathers the target's logits, so all ranks choose from the same numbers, and what is chosen by scores that
were summed over the ranks is chosen from the same numbers too. Still rank 0 is asked: a kernel tuned otherwise on another card would
draft another token there, and a verification whose ranks read different tokens is of no text at all. So every verification is told
what it reads, and every step what it returns, in one message each (:meth:`Ranks.first`), from device to device.

**Nobody waits for ever.** What fails on one rank alone would leave the others in a collective that it never comes to. So a rank that
makes good a failure waits for the others to have the same one first (:meth:`Ranks.failed`), and ends the server if they have not.

Legend: X any shape.
"""

import logging
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=60)


class RanksDiffer(BaseException):
    """Ranks have come to do different things. No handler that makes good a failure may take it: the server ends."""


class Ranks:
    """One process alone, for which there is nothing to do; :class:`ServerRanks` of several.

    Attributes:
        rank, size: this one's number, from 0, and how many there are.
    """

    rank, size = 0, 1

    def total(self, x_X: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, on all of them the same bits; may be written over the input."""
        return x_X

    def joined(self, x_X: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors, all of one shape, side by side along a dimension."""
        return x_X

    def first(self, what: str, *given: torch.Tensor, apart: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """Rank 0's values, whole numbers or truths, in new tensors of the same shapes and dtypes; one message, no waiting.

        Args:
            what: they are, for messages.
            given: this rank's, which should be the same.
            apart: this rank's, which need not be; they go along.

        Raises:
            RanksDiffer: this rank's are others, where that is looked at (setting ``check_ranks``).
        """
        return *given, *apart

    def word(self, value: Any) -> Any:
        """Rank 0's value of anything that can be pickled, on the host; waits for it."""
        return value

    def failed(self, message: str, *args: Any) -> None:
        """Log the exception that is being handled; return when all ranks have come to the same place.

        Raises:
            RanksDiffer: some have not.
        """
        logger.exception(message, *args)


ALONE = Ranks()


class ServerRanks(Ranks):
    """The ranks of a server, over the groups of one of SGLang's coordinators and one of our own, on the host.

    Collectives are torch's own, which CUDA graphs can hold; SGLang's faster sum wants to be told of every capture.
    """

    def __init__(self, device_group: Any, members: Sequence[int], checks: bool, patience: timedelta = PATIENCE) -> None:
        """Called by all ranks at once.

        Args:
            device_group: torch's group, of tensors on the device.
            members: its ranks, as the world numbers them.
            checks: whether every message of :meth:`first` is compared with what this rank would have said; waits for the device.
            patience: for another rank.
        """
        self.group, self.members, self.checks, self.patience = device_group, list(members), checks, patience
        self.rank, self.size = dist.get_rank(device_group), len(self.members)
        self.host = dist.new_group(self.members, backend="gloo", timeout=patience)
        self.messages = 0

    def total(self, x_X: torch.Tensor) -> torch.Tensor:
        x_X = x_X.contiguous()
        dist.all_reduce(x_X, group=self.group)
        return x_X

    def joined(self, x_X: torch.Tensor, dim: int = -1) -> torch.Tensor:
        x_X = x_X.contiguous()
        parts = x_X.new_empty(self.size * len(x_X), *x_X.shape[1:])
        dist.all_gather_into_tensor(parts, x_X, group=self.group)
        at = dim % x_X.dim()
        return parts.view(self.size, *x_X.shape).movedim(0, at).flatten(at, at + 1)

    def first(self, what: str, *given: torch.Tensor, apart: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        every = [*given, *apart]
        message_N = torch.cat([x.reshape(-1).long() for x in every])
        if self.checks:
            self._compare(what, message_N[: sum(x.numel() for x in given)])
        dist.broadcast(message_N, src=self.members[0], group=self.group)
        parts = message_N.split([x.numel() for x in every])
        return tuple(part.view(x.shape).to(x.dtype) for part, x in zip(parts, every, strict=True))

    def word(self, value: Any) -> Any:
        told = [value]
        dist.broadcast_object_list(told, src=self.members[0], group=self.host)
        return told[0]

    def failed(self, message: str, *args: Any) -> None:
        super().failed(message, *args)
        try:
            dist.monitored_barrier(self.host, timeout=self.patience, wait_all_ranks=True)
        except RuntimeError as error:
            raise RanksDiffer(f"rank {self.rank} failed where others did not ({message}): {error}") from None

    def _compare(self, what: str, message_N: torch.Tensor) -> None:
        """Raise where ranks have come to different messages, or would say different things."""
        self.messages += 1
        said = zlib.crc32(message_N.cpu().numpy().tobytes())
        own_F = torch.tensor([self.messages, zlib.crc32(what.encode()), len(message_N), said])
        facts_N = own_F.new_empty(self.size * len(own_F))
        try:
            dist.all_gather_into_tensor(facts_N, own_F, group=self.host)
        except RuntimeError as error:
            raise RanksDiffer(f"rank {self.rank} is alone at message {self.messages} ({what}): {error}") from None
        facts = facts_N.view(self.size, -1).tolist()
        for rank, other in enumerate(facts):
            if other != facts[0]:
                raise RanksDiffer(
                    f"rank {rank} has other {what} than rank 0 at message {self.messages}: {other}, {facts[0]}"
                )


def server_ranks(checks: bool) -> Ranks:
    """Those of this server, once SGLang has made its groups. Heads are divided among its attention group."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    return ALONE if group.world_size == 1 else ServerRanks(group.device_group, group.ranks, checks)
