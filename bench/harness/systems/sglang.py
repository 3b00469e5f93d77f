"""SGLang's own systems: plain decoding, EAGLE-3 and n-grams."""

from longdraft.bench.harness.systems.base import Launch, System
from longdraft.bench.lengths import tokens_word


class Stock(System):
    """SGLang without our plugin."""

    gpu_only = True

    def missing(self) -> str | None:
        return f"SGLang's {self.kind} needs a GPU" if self.gpu_only and self.place.on_cpu else None

    def words(self) -> list[str]:
        """SGLang's arguments beyond those of all systems."""
        return []

    def launch(self) -> Launch:
        forced = {} if self.forced is None or not self.words() else {"SGLANG_SIMULATE_ACC_LEN": str(self.forced)}
        words = (*self.place.server_words(), *self.words(), *self.asked.arguments)
        return Launch(words, self.place.environment(stock=True) | forced)


class Plain(Stock):
    """No speculation."""

    kind = "plain"
    gpu_only = False


class Eagle3(Stock):
    """A chain of EAGLE-3's; with a window its draft reads the last tokens alone."""

    kind = "eagle3"

    def own_label(self) -> str:
        return "eagle3" if self.asked.window is None else f"eagle3 window {tokens_word(self.asked.window)}"

    def words(self) -> list[str]:
        steps = self.asked.steps
        found = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(steps)]
        found += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1)]
        if self.place.shape and self.asked.draft in (None, "eagle3"):
            found += ["--speculative-draft-model-path", str(self.place.shapes["eagle3"])]
            found += ["--speculative-draft-load-format", "dummy"]
        else:
            found += ["--speculative-draft-model-path", str(self.place.draft(self.asked.draft or "eagle3"))]
        if self.asked.window is not None:
            found += ["--speculative-draft-window-size", str(self.asked.window)]
        return found


class Ngram(Stock):
    """Continuations of the request's own n-grams, as a tree."""

    kind = "ngram"

    def words(self) -> list[str]:
        given = {"steps"} & self.asked.model_fields_set
        more = ["--speculative-num-draft-tokens", str(self.asked.steps + 1)] if given else []
        return ["--speculative-algorithm", "NGRAM", *more]
