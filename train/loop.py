"""The training loop: one global step at a time, resumable at every step.

Legend: T packed tokens of a micro-batch.
"""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from longdraft.draft_models.config import TrainingFacts
from longdraft.errors import UserError
from longdraft.train.checkpoints import (
    RNG,
    Checkpoints,
    Progress,
    SaveFailed,
    check_room,
    check_trajectory,
    lock_folder,
)
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Corpus, Documents
from longdraft.train.engine import Engine, Group, StopSignal, build_engine
from longdraft.train.evaluation import cut_prompts, evaluate
from longdraft.train.features.reader import FeatureCorpus, open_corpus
from longdraft.train.flops import micro_batch_flops, peak_tflops
from longdraft.train.memory_use import peak_memory_gib
from longdraft.train.metering import Meter
from longdraft.train.methods.build import build_method
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.provenance import write_run_file
from longdraft.train.samples import Packed, SampleStream, resumed_cursor
from longdraft.train.sequence import check_sequence, share_of
from longdraft.train.target import FrozenTarget, load_target, load_tokenizer
from longdraft.train.tracking import Tracker
from longdraft.train.views import served_view

# Of a checkpoint: float32 masters and moments (AdamW has two, Muon one), and a 16-bit draft at least.
BYTES_A_PARAMETER = {"adamw": 14, "muon": 10}
Window = Future[tuple[list[Packed], int]]


class Diverged(RuntimeError):
    """A loss or gradient that is not finite; the message names the step, the samples and the last good checkpoint."""


class DataFailed(Exception):
    """A record that cannot be used, met in the middle of a run."""

    def __init__(self, reason: UserError) -> None:
        self.reason = reason


class Run:
    """Everything that one training run holds."""

    def __init__(self, settings: TrainSettings, group: Group, command: list[str]) -> None:
        self.settings, self.group = settings, group
        self._lock = lock_folder(settings.folder) if group.rank == 0 else None
        self.checkpoints = Checkpoints(settings.folder, settings.schedule.keep)
        found = self.checkpoints.latest()
        if found is not None and settings.run.resume == "never":
            raise UserError(
                f"run folder {str(settings.folder)!r} holds {found.name}: use another run.name, or run.resume=auto"
            )
        state, self.progress = Checkpoints.read(found) if found else ({}, Progress(cursors=[0] * group.world))
        if found:
            check_trajectory(self.progress.trajectory, settings.trajectory(), settings.run.name)
        self.progress.trajectory = settings.trajectory()
        tokenizer = load_tokenizer(settings.target)
        self.corpus = open_corpus(settings, tokenizer)
        self.data = {"train": self.corpus.fingerprints()}
        self.target = load_run_target(settings, group)
        if settings.engine.sequence:
            check_sequence(settings, self.target.packed)
        limit = position_limit(settings, self.target.spec.max_position, self.corpus)
        self.method, said = build_method(
            settings, self.target, self.corpus, tokenizer, limit, group, resumed=found is not None
        )
        self.draft_parameters = sum(p.numel() for p in self.method.draft.parameters() if p.requires_grad)
        if group.rank == 0:
            check_room(settings.folder, self.draft_parameters * BYTES_A_PARAMETER[settings.optim.name])
        self.engine: Engine = build_engine(self.method, settings, group)
        if found:
            torch.set_rng_state(state.pop(RNG))
            self.engine.load_state(state)
        self.divided = settings.engine.sequence and group.world > 1  # all ranks on one sample
        rank, world = (0, 1) if self.divided else (group.rank, group.world)
        self.stream = SampleStream(self.corpus, settings, limit, rank, world)
        self.cursor = resumed_cursor(self.progress.cursors, rank, world)
        if self.divided:
            assert isinstance(self.method, LongSpecMethod)
            self.method.divided = lambda sample: share_of(sample, group.rank, group.world, group.whole)
        self.prompts = self._prompts(tokenizer)
        self.saved_step = self.progress.step if found else -1
        self.tracker = Tracker(settings, self.progress.step, group.rank == 0)
        self._announce(command, found)
        if said:
            self.tracker.say(said)

    def _prompts(self, tokenizer: Any) -> list[list[int]]:
        s = self.settings
        if s.data.eval is None or s.evaluation.prompts == 0:
            return []
        corpus = Corpus(s.data.eval, s.data, tokenizer, self.target.spec.vocab_size)
        self.data["eval"] = corpus.fingerprints()
        prompts = cut_prompts(corpus, s.evaluation, self.target.spec.max_position)
        if not prompts:
            raise UserError(
                f"data.eval gives no prompt: its documents are shorter than evaluation.lengths={s.evaluation.lengths} or than "
                f"16 tokens, or with evaluation.new_tokens={s.evaluation.new_tokens} pass the target's "
                f"{self.target.spec.max_position} positions"
            )
        return prompts

    def _announce(self, command: list[str], found: Path | None) -> None:
        parameters = self.draft_parameters
        facts = {
            "ranks": self.group.world,
            "device": torch.cuda.get_device_name() if self.group.device.type == "cuda" else "cpu",
            "documents": len(self.corpus),
            "draft_parameters": parameters,
            "target_hash": self.target.spec.hash,
            "data": self.data,
        }
        if self.group.rank == 0:
            self.tracker.record(write_run_file(self.settings, command, facts, self.progress.step))
        where = f"resumes from {found.name}" if found else "starts"
        self.tracker.say(
            f"run {self.settings.run.name} {where}: {len(self.corpus)} documents, {parameters:,} draft parameters, "
            f"{self.group.world} x {facts['device']}, folder {self.settings.folder}"
        )

    def train(self) -> Path | None:
        """Train to the last step, or to a signal or the time limit.

        Returns:
            The newest checkpoint.

        Raises:
            Diverged: a loss or gradient that is not finite.
            SaveFailed: a checkpoint that could not be written, as on a full disk.
        """
        stop, began, total = StopSignal(), time.monotonic(), self.settings.schedule.max_steps
        peak = peak_tflops(self.settings, self.group.device)
        meter = Meter(self.progress, None if peak is None else peak * 1e12 * self.group.world)
        try:
            with ThreadPoolExecutor(1) as pool:
                ahead = pool.submit(self.stream.window, self.cursor)
                while self.progress.step < total:
                    if reason := self._agreed_stop(stop, began):
                        self.tracker.say(f"{reason}: saving and stopping at step {self.progress.step}")
                        break
                    try:
                        ahead = self._step(ahead, pool, meter)
                    except DataFailed as error:
                        self._save()  # what is trained so far stays
                        raise error.reason from None
                    self._after_step(meter)
            self._save()
            if self.progress.step >= total:
                self._evaluate()
        finally:
            stop.restore()
            self.tracker.close()
            if self._lock is not None:
                self._lock.close()
        return self.checkpoints.latest()

    def _agreed_stop(self, stop: StopSignal, began: float) -> str | None:
        """Why to stop, the same on all ranks: one rank's signal or clock stops them all at one step."""
        limit = self.settings.schedule.max_seconds
        late = limit is not None and time.monotonic() - began >= limit
        signals, clocks = self.group.totals(stop.name is not None, late)
        return "signal received" if signals else "time is up" if clocks else None

    def _step(self, ahead: Window, pool: ThreadPoolExecutor, meter: Meter) -> Window:
        """One global step; returns the next step's data, which loads meanwhile."""
        s, step = self.settings, self.progress.step + 1
        meter.start()
        micros, after, failure = self._data(ahead)
        meter.got_data()
        counted = [] if self.divided and self.group.rank else micros  # what all ranks have counts once
        failed, supervised, tokens, divisor, flops = self.group.totals(
            failure is not None,
            sum(m.supervised for m in counted),
            sum(len(m.id_T) for m in counted),
            sum(self.method.denominator(m) for m in counted),
            sum(micro_batch_flops(self.target.spec, s, m) for m in counted),
        )
        if failed:  # all ranks stop together, the one that met the record says why
            raise DataFailed(
                failure or UserError("another rank could not read a record of data.train: see its message")
            )
        self.cursor = after
        following = pool.submit(self.stream.window, self.cursor)
        losses, depths = [], self.method.depths
        counts_2K = torch.zeros(2, depths, dtype=torch.int64, device=self.group.device)
        for micro in micros:
            out = self.engine.loss(micro.to(self.group.device), step)
            # Over all supervised tokens of the step, so no split into ranks or micro-batches changes a token's weight.
            self.engine.backward(out.loss / divisor)
            losses.append(out.loss.detach())
            counts_2K += torch.stack([out.hits_K, out.rows_K])
        rate = s.optim.rate(step, s.schedule.max_steps)
        norm = self.engine.step(rate)
        loss, *counts = self.group.totals(float(torch.stack(losses).sum()), *counts_2K.flatten().tolist())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(self._diagnosis(step, micros, losses, loss / max(supervised, 1), norm))
        self._count(step, micros, int(tokens), int(supervised))
        memory = peak_memory_gib(self.group.device)
        newest = {"lr": rate, "grad_norm": norm, "memory_gib": memory, **self.method.figures(step)}
        meter.finish(loss, counts[:depths], counts[depths:], supervised, tokens, flops, **newest)
        return following

    @staticmethod
    def _data(ahead: Window) -> tuple[list[Packed], int, UserError | None]:
        """A step's data, or why there is none: records are rendered as they come, so a bad one may come late."""
        try:
            return *ahead.result(), None
        except UserError as error:
            return [], -1, error

    def _count(self, step: int, micros: list[Packed], tokens: int, supervised: int) -> None:
        p = self.progress
        p.step, p.tokens, p.supervised = step, p.tokens + tokens, p.supervised + supervised
        p.max_length = max(p.max_length, *(b - a for m in micros for a, b in pairwise(m.cu)))
        p.max_position = max(p.max_position, *(int(m.position_T.max()) + 1 for m in micros))

    def _diagnosis(self, step: int, micros: list[Packed], losses: list[torch.Tensor], loss: float, norm: float) -> str:
        bad = [m for m, value in zip(micros, losses, strict=True) if not math.isfinite(float(value))]
        every = self.group.gather_names([name for m in bad for name in m.names])
        names = every or self.group.gather_names([name for m in micros for name in m.names])
        last = self.checkpoints.latest()
        return (
            f"step {step}: loss is {loss:.6g} a token, gradient norm {norm}, samples {', '.join(names)}; "
            f"the last good checkpoint is {last or 'none'}: lower optim.lr or look at the samples"
        )

    def _after_step(self, meter: Meter) -> None:
        s, step = self.settings.schedule, self.progress.step
        if step % s.log_every == 0 or step in (1, s.max_steps):
            self.tracker.step(meter.row())
        if step % s.save_every == 0:
            self._save()
        if s.eval_every and step % s.eval_every == 0 and step < s.max_steps:
            self._evaluate()

    def _save(self) -> None:
        p = self.progress
        p.cursors = [self.cursor] if self.divided else self.group.gather(self.cursor)
        p.max_length, p.max_position = (max(self.group.gather(n)) for n in (p.max_length, p.max_position))
        if p.step == self.saved_step or p.step == 0:
            return
        weights, state = self.engine.weights(), self.engine.state()
        damaged = [name for name, w in weights.items() if not bool(torch.isfinite(w).all())]
        if bad := sorted(set(self.group.gather_names(damaged))):
            raise Diverged(
                f"step {p.step}: weights {', '.join(bad)} are not finite and are not saved; the last good checkpoint is "
                f"{self.checkpoints.latest() or 'none'}: lower optim.lr"
            )
        failure: SaveFailed | None = None
        if self.group.rank == 0:
            try:
                path = self.checkpoints.save(self.method.draft, weights, state, p, self.target.name, self._facts())
                self.tracker.say(f"saved {path}")
            except SaveFailed as error:
                failure = error
        if self.group.totals(failure is not None)[0]:  # all ranks stop together, rank 0 says why
            raise failure or SaveFailed("rank 0 could not write the checkpoint")
        self.saved_step = p.step

    def _facts(self) -> TrainingFacts:
        p = self.progress
        facts = TrainingFacts(steps=p.step, tokens=p.tokens, max_length=p.max_length, max_position=p.max_position)
        return self.method.facts(facts)

    def _evaluate(self) -> None:
        if not self.prompts:
            return
        s, g = self.settings, self.group
        # A sharded target runs on all ranks at once: each goes through all prompts, and none adds up.
        alone = s.target.shard
        with self.engine.whole() as draft:
            results = evaluate(
                self.target,
                draft,
                self.prompts,
                s.evaluation.new_tokens,
                s.eval_steps,
                (lambda *figures: list(figures)) if alone else g.totals,
                0 if alone else g.rank,
                1 if alone else g.world,
                served_view(s),
            )
        buckets = {name: result.figures() for name, result in results.items()}
        read = {"context": s.evaluation.context, "view": s.evaluation.view} if s.evaluation.context else {}
        self.tracker.evaluation({"step": self.progress.step, "draft_steps": s.eval_steps, **read, "buckets": buckets})


def load_run_target(settings: TrainSettings, group: Group) -> FrozenTarget:
    """The whole target on every rank, or a share of it (``target.shard``)."""
    if not settings.target.shard:
        return load_target(settings.target, group.device)
    from longdraft.train.sharded_target import load_sharded  # imports DeepSpeed

    return load_sharded(settings.target, group)


def position_limit(settings: TrainSettings, target_limit: int, corpus: Documents | None = None) -> int:
    """Exclusive limit of trained positions; those of a feature store are held to the target's limit too.

    Raises:
        UserError: documents or offsets beyond what the target's rotary embedding covers.
    """
    limit = settings.positions.max_position or target_limit
    for name, value in (("positions.max_position", limit), ("data.max_length", settings.data.max_length)):
        if value > target_limit:
            raise UserError(f"{name}={value} is beyond the target's {target_limit} positions: lower it")
    if isinstance(corpus, FeatureCorpus) and corpus.positions > target_limit:
        raise UserError(
            f"data.features={str(corpus.folder)!r} holds positions up to {corpus.positions - 1}, the target has "
            f"{target_limit}: capture with a lower positions.max_position"
        )
    return limit


def train(settings: TrainSettings, command: list[str]) -> Path | None:
    """Run a training from settings; under torchrun this is one of its ranks.

    Returns:
        The newest checkpoint's folder; its ``draft`` is what serving takes.

    Raises:
        UserError: settings, files or a target that do not fit.
        Diverged: a loss or gradient that is not finite.
        SaveFailed: a checkpoint that could not be written.
    """
    group = Group(settings.engine)
    try:
        return Run(settings, group, command).train()
    finally:
        group.close()
