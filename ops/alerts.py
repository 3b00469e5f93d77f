"""python -m longdraft.ops.alerts ops/alerts.yaml

Writes Prometheus' alert rules for servers with --enable-metrics.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from longdraft.ops.panels import theirs
from longdraft.ops.written import write_made

WINDOW = "10m"
BY = "model_name, mode"


@dataclass(frozen=True)
class Alert:
    """One rule.

    Attributes:
        name: of the alert.
        expr: what it fires on; its value is in the message.
        minutes: how long that must hold.
        severity: ``warning`` to look at in working hours, ``critical`` to look at now.
        summary: what is wrong, in Prometheus' templates.
        remedy: what to do.
    """

    name: str
    expr: str
    minutes: int
    severity: str
    summary: str
    remedy: str


def rate(name: str, matcher: str = "", by: str = BY, window: str = WINDOW) -> str:
    """Growth a second of one of our series."""
    return f"sum by ({by}) (rate(longdraft_{name}_total{f'{{{matcher}}}' if matcher else ''}[{window}]))"


DRAFTED = 'mode!="off"'
BUSY = f"{rate('rounds', DRAFTED)} > 1"  # too few rounds say nothing
TAU = f"{rate('tokens', DRAFTED)} / {rate('rounds', DRAFTED)}"
USUAL = f"{rate('tokens', DRAFTED, window='1d')} / {rate('rounds', DRAFTED, window='1d')}"
KEPT = f"({rate('tokens', DRAFTED)} - {rate('rounds', DRAFTED)}) / {rate('drafted_tokens', DRAFTED)}"
CONFIRMED = f"{rate('confirmed_tokens')} / {rate('proposed_tokens')}"
RUNNING, WAITING, USED = (theirs(f"sglang:{name}") for name in ("num_running_reqs", "num_queue_reqs", "token_usage"))
WHERE = "{{ $labels.model_name }}, mode {{ $labels.mode }}"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "LongdraftDraftUseless",
        f"({TAU} < 1.2) and {BUSY}",
        15,
        "warning",
        WHERE + ": τ is {{ $value | humanize }}, drafts gain next to nothing",
        "Speculation costs more than it brings: train a draft on this target's answers to such prompts, or serve with mode off.",
    ),
    Alert(
        "LongdraftAnswersLoop",
        f"({KEPT} > 0.9) and {BUSY}",
        10,
        "warning",
        WHERE + ": {{ $value | humanizePercentage }} of drafted tokens are kept, as where answers repeat themselves",
        "Read some answers. If they loop: limit their length, sample or penalise repetition. If they are fine: take more --steps.",
    ),
    Alert(
        "LongdraftTauAboveUsual",
        f"({TAU} > 1.3 * ({USUAL})) and {BUSY}",
        10,
        "warning",
        WHERE + ": τ of {{ $value | humanize }} is far above the last day's",
        "Read some answers: a new kind of requests copies from its prompts, or answers loop.",
    ),
    Alert(
        "LongdraftViewsMiss",
        f"({CONFIRMED} < 0.5) and {rate('proposed_tokens')} > 1",
        15,
        "warning",
        WHERE + ": only {{ $value | humanizePercentage }} of what views gained is confirmed",
        "Views miss what matters: raise --view-tokens, try --view-selector mass, or serve with mode full.",
    ),
    Alert(
        "LongdraftFallsBack",
        f"({rate('fallbacks')} / {rate('rounds')} > 0.05) and {BUSY}",
        15,
        "warning",
        WHERE + ": in {{ $value | humanizePercentage }} of rounds a request goes over to its whole cache",
        "As LongdraftViewsMiss; such requests decode as in mode full for a while.",
    ),
    Alert(
        "LongdraftRefreshesTooOften",
        f"({rate('refreshes')} / {rate('rounds')} > 0.5) and {BUSY}",
        15,
        "warning",
        WHERE + ": {{ $value | humanize }} refreshes a round, so that nearly every round reads a whole cache",
        "Raise --refresh-missed-mass, lower --refresh-margin, or raise --refresh-every; else mode full is as fast and exact.",
    ),
    Alert(
        "LongdraftDrafterFails",
        f"{rate('draft_failures')} > 0",
        5,
        "critical",
        WHERE + ": the drafter fails in {{ $value | humanize }} rounds a second",
        "Answers stay right but come slower. The server's log holds the error.",
    ),
    Alert(
        "LongdraftSilent",
        f"sum by (model_name) ({RUNNING}) > 0 unless on (model_name) {rate('rounds', by='model_name')} > 0",
        15,
        "warning",
        "{{ $labels.model_name }}: requests run and no round is counted",
        "The server was started without longdraft, or could not write its metrics (a full disk): see its log.",
    ),
    Alert(
        "LongdraftCacheFull",
        f"max by (model_name) ({USED}) > 0.95 and sum by (model_name) ({WAITING}) > 0",
        15,
        "warning",
        "{{ $labels.model_name }}: {{ $value | humanizePercentage }} of the cache's slots are taken while requests wait",
        "Fewer requests at once, shorter contexts, a float8 cache, or a larger --mem-fraction-static.",
    ),
)  # fmt: skip


def text() -> str:
    """The rules as Prometheus reads them."""
    rules: list[dict[str, Any]] = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.remedy},
        }
        for alert in ALERTS
    ]
    groups = {"groups": [{"name": "longdraft", "rules": rules}]}
    return yaml.safe_dump(groups, sort_keys=False, allow_unicode=True, width=120)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file that is named on the command line."""
    return write_made(argv, "longdraft.ops.alerts", __doc__, Path("ops/alerts.yaml"), text)


if __name__ == "__main__":
    sys.exit(main())
