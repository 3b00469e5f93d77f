"""Our modes: ``full``, ``exact``, ``partial``, ``sparse``, ``off``; views by the rules of others; and the target as its own draft."""

from typing import Any, ClassVar

from longdraft.bench.harness.systems.base import Launch, System
from longdraft.bench.lengths import tokens_word
from longdraft.serve.settings import LOSSY

VIEW, SET = 4096, 512  # tokens where a file gives no budget
FEW = 256  # tokens of a view below which it has fewer sinks and recent ones than usual


class Ours(System):
    """A server with our worker. Requests name their mode, so that a server may serve several systems."""

    mode: ClassVar[str] = "full"

    @property
    def budget(self) -> int | None:
        """Cached tokens of a view or a set."""
        return None

    def own_label(self) -> str:
        return self.kind if self.budget is None else f"{self.kind} {tokens_word(self.budget)}"

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | ({} if self.budget is None else {"budget": self.budget})

    @property
    def draft_word(self) -> str | None:
        """As files name drafts; None where the target drafts."""
        return self.asked.draft or "longspec"

    def draft_words(self) -> list[str]:
        """SGLang's arguments that name the draft."""
        folder = None if self.draft_word is None else self.place.draft(self.draft_word)
        own = [] if folder is None else ["--speculative-draft-model-path", str(folder)]
        return ["--speculative-num-steps", str(self.asked.steps), *own]

    def own_settings(self) -> dict[str, Any]:
        """Of the server, beyond those of every system of ours."""
        return {}

    def forced_settings(self) -> dict[str, Any]:
        """By which acceptance is forced."""
        force = self.place.force
        if force is None or self.mode == "off":
            return {}
        share = self.asked.confirmed_share or force.confirmed_share
        return {"simulate_confirmed_share": share} if self.mode == "exact" else {}

    def launch(self) -> Launch:
        settings: dict[str, Any] = {"mode": self.mode, **self.own_settings(), **self.forced_settings()}
        settings |= {"allow_lossy": True} if self.mode in LOSSY else {}
        settings |= self.place.shape_settings(self.draft_word, self.mode)
        if self.place.step_times:
            settings["step_times"] = str(self.place.settings.logs / f"{self.file_name}.steps.jsonl")
        words = (
            *self.place.server_words(),
            "--speculative-algorithm",
            "LONGDRAFT",
            *self.draft_words(),
            *self.asked.arguments,
        )
        forced = {} if self.forced is None else {"SGLANG_SIMULATE_ACC_LEN": str(self.forced)}
        return Launch(words, self.place.environment(stock=False) | forced, settings | self.asked.settings)

    def request(self) -> dict[str, Any]:
        refresh = {} if self.asked.refresh is None else {"refresh": self.asked.refresh}
        return {"custom_params": {"longdraft": {"mode": self.mode, **self.own_request(), **refresh}}}

    def own_request(self) -> dict[str, Any]:
        """What its requests ask beside the mode."""
        return {}


class Off(Ours):
    """Plain decoding by our worker."""

    kind, mode = "plain", "off"

    def own_label(self) -> str:
        return "plain (mode off)"


class Full(Ours):
    """Every token verified on the whole cache."""

    kind = "full"


class Viewed(Ours):
    """Verification on a view."""

    selector: ClassVar[str | None] = None  # None: the file's

    @property
    def budget(self) -> int:
        return self.asked.budget or VIEW

    def own_settings(self) -> dict[str, Any]:
        fewer = {"view_sinks": 16, "view_recent": 32} if self.budget < FEW else {}
        return {"view_selector": self.selector or self.asked.selector, "view_tokens": self.budget, **fewer}


class Exact(Viewed):
    """What a full verification confirmed of several rounds on a view."""

    kind = mode = "exact"


class Partial(Viewed):
    """What a view verified, with a full verification every 20 tokens or so (SpecPV)."""

    kind = mode = "partial"


class Streaming(Partial):
    """The last tokens and sinks (StreamingLLM)."""

    kind = selector = "streaming"


class SnapKV(Partial):
    """What the last prompt rows attended to (SnapKV)."""

    kind = selector = "snapkv"


class Quest(Partial):
    """Blocks by the bounds of their keys (Quest)."""

    kind = selector = "quest"


class SelfDrafting(Viewed):
    """MagicDec's: the target drafts one token after the other on a StreamingLLM view, and a full verification confirms them."""

    kind, mode, selector = "self", "exact", "streaming"

    @property
    def draft_word(self) -> None:
        return None

    def own_settings(self) -> dict[str, Any]:
        fixed = {"self_draft": True, "rounds": self.asked.steps, "confirm_floor": 0.0}
        return super().own_settings() | fixed


class Sparse(Ours):
    """A few tokens for all layers, chosen anew in every round (Dustin)."""

    kind = mode = "sparse"

    @property
    def budget(self) -> int:
        return self.asked.budget or SET

    def own_settings(self) -> dict[str, Any]:
        return {"sparse_tokens": self.budget}

    def own_request(self) -> dict[str, Any]:
        return {"budget": self.budget}
