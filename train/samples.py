"""Samples from documents: truncation that keeps the answer, packing, and an endless seeded order that can be resumed.

Legend: L tokens of a document, T packed tokens of a sample or a micro-batch.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from longdraft.errors import UserError
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.kernels.view_attention import View
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Document, Documents
from longdraft.train.features.reader import FeatureCorpus, join
from longdraft.train.positions import anchor_offset_positions, draw, seeded
from longdraft.train.target import Capture
from longdraft.train.views import draw_view


@dataclass(frozen=True)
class Packed:
    """A micro-batch: documents one behind the other.

    ``id_T``, ``position_T`` and ``label_T`` are int64; a label is the next token of the same document, or -100. Document i
    is tokens ``cu[i] .. cu[i + 1]`` (``positions`` may jump inside it, so they say nothing of boundaries). ``views`` is one
    a document, None for one that is read whole; empty means that all are. ``capture`` is what the target gave for these
    rows when they were stored; None: the target has to run.
    """

    id_T: torch.Tensor
    position_T: torch.Tensor
    label_T: torch.Tensor
    cu: list[int]
    names: list[str]
    views: list[View | None] = field(default_factory=list)
    capture: Capture | None = None

    @property
    def supervised(self) -> int:
        return int((self.label_T != IGNORED).sum())

    def to(self, device: torch.device) -> "Packed":
        def move(x: torch.Tensor) -> torch.Tensor:
            return x.to(device, non_blocking=True)

        capture = None if self.capture is None else self.capture.to(device)
        return Packed(
            move(self.id_T), move(self.position_T), move(self.label_T), self.cu, self.names, self.views, capture
        )


class Drawn(NamedTuple):
    """A document as one epoch shows it: cut, at positions (int64 ``[L]``), under a view, with its features if stored."""

    document: Document
    position_L: torch.Tensor
    view: View | None
    capture: Capture | None


def truncate(document: Document, limit: int, how: str, *key: int | str) -> Document:
    """Shorten a document to ``limit`` tokens.

    Args:
        how: ``right`` and ``left`` drop that end, ``crop`` keeps a stretch that ``key`` decides, ``middle`` keeps the head
            and the answer: of a conversation the last answer whole if it leaves a quarter for the prompt, whose middle goes;
            of a plain text both halves' ends.
        key: of the draw.

    Returns:
        The document; the first token behind a gap is not supervised, since nothing before it leads there.
    """
    ids, mask, n = document.ids, document.supervised, len(document.ids)
    if n <= limit:
        return document
    if how != "middle":
        begin = {"right": 0, "left": n - limit}.get(how, -1)
        begin = draw(0, n - limit, "crop", *key) if begin < 0 else begin
        return Document(ids[begin : begin + limit], mask[begin : begin + limit], document.name)
    start = answer_start(mask)
    if start == 0:  # a text, or an answer without a prompt: two ends of equal length
        head = limit // 2
        tail_begin = n - (limit - head)
    else:
        answer = min(n - start, limit - min(start, limit // 4))
        prompt = limit - answer
        head = (prompt + 1) // 2
        tail_begin = start - prompt // 2
    keep = [*range(head), *range(tail_begin, tail_begin + limit - head)]
    mask = [mask[i] and not (at == head and i != at) for at, i in enumerate(keep)]
    return Document([ids[i] for i in keep], mask, document.name)


def answer_start(supervised: list[bool]) -> int:
    """Where the last run of supervised tokens begins; the length if there is none."""
    n = len(supervised)
    end = next((i + 1 for i in reversed(range(n)) if supervised[i]), 0)
    return next((i + 1 for i in reversed(range(end)) if not supervised[i]), 0) if end else n


def pack(documents: list[Document], positions: list[torch.Tensor], all_rows: bool) -> Packed:
    """Lay documents one behind the other; row t is labelled with token t + 1 of its own document.

    Args:
        documents, positions: tokens and their int64 positions.
        all_rows: supervise prompts too.
    """
    cu, ids, labels = [0], [], []
    for document in documents:
        wanted = zip(document.ids[1:], document.supervised[1:], strict=True)
        labels += [token if kept or all_rows else IGNORED for token, kept in wanted] + [IGNORED]
        ids += document.ids
        cu.append(len(ids))
    return Packed(torch.tensor(ids), torch.cat(positions), torch.tensor(labels), cu, [d.name for d in documents])


class SampleStream:
    """One rank's samples: an endless order in which every document comes once an epoch, over all ranks.

    A cursor counts the documents that this rank has drawn, so a run resumes at any step from that one number. Without
    packing or skipped documents, global step s holds the same documents for every split of its batch over ranks and
    accumulation.

    Raises:
        UserError: no document that is long enough and supervised.
    """

    def __init__(
        self, corpus: Documents, settings: TrainSettings, max_position: int, rank: int = 0, world: int = 1
    ) -> None:
        self.corpus, self.settings = corpus, settings
        self.max_position = max_position
        self.rank, self.world = rank, world
        self._order: tuple[int, list[int]] | None = None

    def window(self, cursor: int) -> tuple[list[Packed], int]:
        """The micro-batches of one global step and the cursor behind them; the same for the same cursor."""
        schedule = self.settings.schedule
        micros = []
        for _ in range(schedule.accumulate):
            drawn: list[Drawn] = []
            for _ in range(schedule.micro_batch):
                sample, cursor = self._sample(cursor)
                drawn += sample
            all_rows = self.settings.objective.rows == "all"
            packed = pack([d.document for d in drawn], [d.position_L for d in drawn], all_rows)
            micros.append(replace(packed, views=[d.view for d in drawn], capture=join([d.capture for d in drawn])))
        return micros, cursor

    def _sample(self, cursor: int) -> tuple[list[Drawn], int]:
        first, cursor = self._next(cursor)
        sample, room = [first], self.settings.data.max_length - len(first.document.ids)
        if self.settings.data.packing:
            while True:
                more, after = self._next(cursor)
                if len(more.document.ids) > room:
                    break  # it opens the next sample: the cursor stays before it
                sample.append(more)
                room, cursor = room - len(more.document.ids), after
        return sample, cursor

    def _next(self, cursor: int) -> tuple[Drawn, int]:
        """The first usable document at or behind the cursor, and the cursor behind it."""
        for tried in range(len(self.corpus) + 1):
            epoch, at = divmod((cursor + tried) * self.world + self.rank, len(self.corpus))
            if (drawn := self.drawn(epoch, self._permutation(epoch)[at])) is not None:
                return drawn, cursor + tried + 1
        raise UserError(
            f"data.train has no document of data.min_length={self.settings.data.min_length} tokens or more with anything to "
            "predict: lower it, or check the conversations' roles"
        )

    def drawn(self, epoch: int, index: int) -> Drawn | None:
        """A document as an epoch shows it; None if it is too short or nothing of it is supervised."""
        data, capture = self.settings.data, None
        key = (self.settings.run.seed, epoch, index)
        if isinstance(self.corpus, FeatureCorpus):  # cut and placed when it was stored
            if (stored := self.corpus.stored(epoch, index)) is None:
                return None
            document, position_L, capture = stored
        else:
            document = truncate(self.corpus[index], data.max_length, data.truncation, *key)
            position_L = self.positions(len(document.ids), *key)
        rows = self.settings.objective.rows
        if len(document.ids) < data.min_length or not (rows == "all" or any(document.supervised[1:])):
            return None
        return Drawn(document, position_L, draw_view(self.settings.views, *key), capture)

    def positions(self, length: int, *key: int) -> torch.Tensor:
        """Positions of a document: offset, or plain where the share of offsets says so."""
        p = self.settings.positions
        share = float(torch.rand((), generator=seeded("share", *key)))
        limit = self.max_position if share < p.offset_share else 0
        anchors = draw(0, p.anchors, "anchors", *key) if p.random_anchors else p.anchors
        return anchor_offset_positions(length, anchors, limit, *key)

    def _permutation(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            count = len(self.corpus)
            order = torch.randperm(count, generator=seeded("order", self.settings.run.seed, epoch)).tolist()
            self._order = (epoch, order if self.settings.data.shuffle else list(range(count)))
        return self._order[1]


def resumed_cursor(saved: list[int], rank: int, world: int) -> int:
    """A rank's cursor after a resume: its own, or with another number of ranks an even share of what was drawn."""
    return saved[rank] if len(saved) == world else -(-sum(saved) // world)
