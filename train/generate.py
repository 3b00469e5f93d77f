"""longdraft generate --target.path TARGET --prompts.sources prompts.jsonl --out data/own

Training data from the target's own answers: a draft is served on what its target says, not on what people wrote. Writes
``OUT/generated.jsonl``, which ``data.train`` takes as it is, and ``OUT/provenance.json``. The same command continues where a
stopped one was.
"""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from longdraft.draft_models.repetition import repeated_share, unlooped
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.train.config import as_list
from longdraft.train.documents import FROM, MASK, TOKENS
from longdraft.train.generation.backends import Answer, Backend, open_backend, resolve_backend, stop_tokens
from longdraft.train.generation.decoding import LOOK
from longdraft.train.generation.output import Output
from longdraft.train.generation.prompts import Prompt, PromptStream
from longdraft.train.generation.settings import GenerateSettings
from longdraft.train.provenance import origin
from longdraft.train.target import load_config, load_tokenizer, weights_fingerprint
from longdraft.train.tracking import redact

Say = Callable[[str], None]


class Generation:
    """One run of the command: prompts in, batches of records out."""

    def __init__(self, settings: GenerateSettings, command: list[str], say: Say) -> None:
        self.settings, self.say = settings, say
        self.name, self.device = resolve_backend(settings)
        self.tokenizer = load_tokenizer(settings.target)
        spec = TargetSpec.from_config(load_config(settings.target))
        self.stop_ids = stop_tokens(settings, self.tokenizer)
        # One less than the target has: SGLang ends a request there.
        room = spec.max_position - settings.sampling.max_new_tokens - 1
        if room < 1:
            raise UserError(
                f"sampling.max_new_tokens={settings.sampling.max_new_tokens} leaves no room for a prompt in the target's "
                f"{spec.max_position} positions: lower it"
            )
        self.stream = PromptStream(settings.prompts, self.tokenizer, room, settings.sampling.seed, spec.vocab_size)
        prints = dict(
            zip(as_list(settings.prompts.sources), (s.fingerprint for s in self.stream.corpus.sources), strict=True)
        )
        facts = {
            **origin(command),
            "target": {
                "name": redact(settings.target.path),
                "shapes": spec.hash,
                "weights": weights_fingerprint(settings.target.path),
            },
            "backend": {"name": self.name, "device": str(self.device), "stop_tokens": self.stop_ids},
            "prompts": redact(prints),
            "settings": redact(settings.model_dump(mode="json")),
        }
        self.output = Output(Path(settings.out), redact(settings.identity(self.name, prints)), facts)

    def run(self) -> None:
        """Answer what is left. An interruption loses the batch in flight."""
        counts, settings = self.output.counts, self.settings
        try:
            if counts.prompts:
                self.say(f"continues behind {counts.prompts} prompts")
            self.stream.skipped |= counts.skipped
            prompts = self.stream.prompts(counts.record, counts.cut)
            backend: Backend | None = None
            try:
                while (wanted := self._wanted()) > 0:
                    if batch := list(islice(prompts, wanted)):
                        backend = backend or open_backend(settings, self.name, self.device, self.stop_ids)
                        self._batch(backend, batch)
                    if len(batch) < wanted:
                        counts.record, counts.cut = len(self.stream.corpus), 0
                        break
            finally:
                if backend is not None:
                    backend.close()
            counts.finished, counts.skipped = True, self.stream.skipped
            self.output.say()
            self.say(
                f"{settings.out} is complete: {counts.answers} answers of {counts.new_tokens:,} tokens, skipped {counts.skipped}"
            )
            if not counts.answers:
                raise UserError(f"prompts.sources gave no answer to keep ({counts.skipped}): see prompts.lengths")
        finally:
            self.output.close()

    def _wanted(self) -> int:
        limit, taken = self.settings.prompts.limit, self.output.counts.prompts
        return self.settings.backend.batch if limit is None else min(self.settings.backend.batch, limit - taken)

    def _batch(self, backend: Backend, prompts: list[Prompt]) -> None:
        began, counts = time.monotonic(), self.output.counts
        answers = backend.generate(prompts)
        seconds = time.monotonic() - began
        rows = []
        for prompt, answer in zip(prompts, answers, strict=True):
            counts.prompts += 1
            counts.prompt_tokens += len(prompt.ids)
            counts.new_tokens += len(answer.ids)
            limit = self.settings.drop_repeats
            answer = self._trim(answer)
            if not answer.ids or (limit is not None and repeated_share(answer.ids) > limit):
                counts.repetitive += 1
                continue
            counts.answers += 1
            counts.stopped += answer.finish == "stop"
            rows.append(self._record(prompt, answer))
        counts.record, counts.cut = prompts[-1].record, prompts[-1].cut + 1
        counts.skipped, counts.seconds = self.stream.skipped, counts.seconds + seconds
        self.output.save(rows)
        new = sum(len(answer.ids) for answer in answers)
        self.say(
            f"{counts.prompts} prompts ({counts.record + 1} of {len(self.stream.corpus)} records), {counts.answers} answers "
            f"kept, {new / max(seconds, 1e-9):,.0f} new tokens/s"
        )

    def _trim(self, answer: Answer) -> Answer:
        limit = self.settings.trim_repeats
        end = len(answer.ids) if limit is None else unlooped(answer.ids, limit, LOOK)
        return answer if end == len(answer.ids) else Answer(answer.ids[:end], "trimmed")

    def _record(self, prompt: Prompt, answer: Answer) -> dict[str, Any]:
        begin, new = len(prompt.ids), len(answer.ids)
        how: dict[str, Any] = {FROM: begin}
        if self.settings.supervision == MASK:
            how = {MASK: [0] * begin + [1] * new}
        name = prompt.name.replace("\\", "/").rsplit("/", 1)[-1]  # no folders of this machine
        row = {TOKENS: prompt.ids + answer.ids, **how, "finish": answer.finish, "source": f"{name}#{prompt.cut}"}
        return row | ({"answer": self.tokenizer.decode(answer.ids)} if self.settings.text else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    from longdraft.options import parse_all

    words = list(sys.argv[1:] if argv is None else argv)
    settings = parse_all(GenerateSettings, words, "longdraft generate")
    Generation(settings, ["longdraft", "generate", *words], lambda text: print(text, file=sys.stderr)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
