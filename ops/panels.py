"""The panels of a serving dashboard: one list, from which Grafana's file, its picture and the page of metrics are made.

In the expressions ``$model`` stands for the chosen ``model_name`` and ``$__rate_interval`` for the window of a rate, as in Grafana.
"""

from dataclasses import dataclass

from longdraft.serve.metrics import SERIES

WINDOW = "$__rate_interval"
MODEL = 'model_name=~"$model"'
DRAFTS, COST, TROUBLE, SERVER = "What drafts gain", "What it costs", "What goes wrong", "Requests and memory (SGLang)"

# Series of SGLang's that panels and alerts read, by name on /metrics as text.
SGLANG: dict[str, str] = {
    "sglang:num_running_reqs": "requests that are decoded",
    "sglang:num_queue_reqs": "requests that wait",
    "sglang:token_usage": "share of the cache's slots in use",
    "sglang:time_to_first_token_seconds_bucket": "histogram of the seconds to a request's first token",
    "sglang:inter_token_latency_seconds_bucket": "histogram of the seconds from one token to the next",
}
EXPORTED: frozenset[str] = frozenset({series.exported for series in SERIES} | set(SGLANG))


def theirs(name: str, *matchers: str) -> str:
    """One of SGLang's series, by either of its names: scrapers that ask for OpenMetrics get an underscore for the colon."""
    both = f'__name__=~"{name.replace(":", "[:_]")}"'
    return f"{{{', '.join((both, *matchers))}}}"


@dataclass(frozen=True)
class Query:
    """One expression and the legend of its lines, in Grafana's ``{{label}}``."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Lines over time.

    Attributes:
        section: the row that it stands in.
        title: what is shown.
        unit: Grafana's name of the unit; ``none`` for plain numbers.
        read: how to read it.
        queries: its lines.
        least, most: ends of its axis, where it has ends.
    """

    section: str
    title: str
    unit: str
    read: str
    queries: tuple[Query, ...]
    least: float | None = 0.0
    most: float | None = None


def rate(name: str, by: str, *matchers: str) -> str:
    """Growth a second of one of our series, summed by labels."""
    return f"sum by ({by}) (rate(longdraft_{name}_total{{{', '.join((MODEL, *matchers))}}}[{WINDOW}]))"


def share(part: str, whole: str, by: str, *matchers: str) -> str:
    """Quotient of two rates by the same labels."""
    return f"{rate(part, by, *matchers)} / {rate(whole, by, *matchers)}"


def quantiles(name: str, *wanted: float) -> tuple[Query, ...]:
    """Quantiles of one of SGLang's histograms over all requests."""
    buckets = f"sum by (le) (rate({theirs(f'sglang:{name}_bucket', MODEL)}[{WINDOW}]))"
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in wanted)


def _ours(section: str, title: str, unit: str, read: str, expr: str, legend: str = "{{mode}}", **more: float) -> Panel:
    return Panel(section, title, unit, read, (Query(expr, legend),), **more)


DRAFTED = 'mode!="off"'
GAINED, ROUNDS, PROPOSED = (rate(name, "mode", DRAFTED) for name in ("tokens", "rounds", "drafted_tokens"))
KEPT = f"({GAINED} - {ROUNDS}) / {PROPOSED}"

PANELS: tuple[Panel, ...] = (
    _ours(
        DRAFTS,
        "τ by mode (tokens a round)",
        "none",
        "Bonus token in; without it τ is one less. Mode off is 1. In mode exact a round is a cycle of several verifications.",
        share("tokens", "rounds", "mode"),
        least=1.0,
    ),
    _ours(
        DRAFTS,
        "τ by context (modes that draft)",
        "none",
        "Where it falls with the context, the draft was trained on shorter ones.",
        share("tokens", "rounds", "context", DRAFTED),
        "{{context}}",
        least=1.0,
    ),
    _ours(
        DRAFTS,
        "Drafted tokens that were kept",
        "percentunit",
        "Near 1 answers repeat themselves, or longer drafts pay; near 0 the draft is useless for this text.",
        KEPT,
        most=1.0,
    ),
    _ours(
        DRAFTS,
        "Mode exact: confirmed share",
        "percentunit",
        "Of the tokens gained on views. Below one half they miss what matters: more --view-tokens, or mode full.",
        share("confirmed_tokens", "proposed_tokens", "context", 'mode="exact"'),
        "{{context}}",
        most=1.0,
    ),
    _ours(COST, "Tokens a second by mode", "none", "Generated tokens of all requests.", rate("tokens", "mode")),
    _ours(
        COST,
        "Verifications a second",
        "none",
        "Partial ones read views, full ones whole caches.",
        rate("verifications", "mode, kind") + " > 0",
        "{{mode}}, {{kind}}",
    ),
    _ours(
        COST,
        "Keys and values read a second",
        "binBps",
        "What verifications read, beside the weights.",
        rate("cache_read_bytes", "mode, kind") + " > 0",
        "{{mode}}, {{kind}}",
    ),
    _ours(
        COST,
        "Keys and values read a token",
        "bytes",
        "A mode with views should lie well under full at the same context.",
        share("cache_read_bytes", "tokens", "mode"),
    ),
    _ours(
        TROUBLE,
        "Refreshes a round",
        "none",
        "Modes partial and sparse. Each reads a whole cache: near 1 nothing is saved.",
        share("refreshes", "rounds", "mode", 'mode=~"partial|sparse"'),
    ),
    _ours(
        TROUBLE,
        "Mode exact: fallbacks a round",
        "none",
        "Requests of whose tokens few were confirmed go over to their whole cache for a while.",
        share("fallbacks", "rounds", "context", 'mode="exact"'),
        "{{context}}",
    ),
    _ours(
        TROUBLE,
        "Rounds a second whose drafter failed",
        "none",
        "Any is a fault: the server's log says which.",
        rate("draft_failures", "mode"),
    ),
    Panel(
        SERVER,
        "Requests",
        "none",
        "Those that wait take cache or places that running ones hold.",
        (
            Query(f"sum({theirs('sglang:num_running_reqs', MODEL)})", "running"),
            Query(f"sum({theirs('sglang:num_queue_reqs', MODEL)})", "waiting"),
        ),
    ),
    Panel(
        SERVER,
        "Cache slots in use",
        "percentunit",
        "Near 1 requests are held back or retracted.",
        (Query(f"max({theirs('sglang:token_usage', MODEL)})", "used"),),
        most=1.0,
    ),
    Panel(
        SERVER,
        "Time to the first token",
        "s",
        "Prefill and waiting.",
        quantiles("time_to_first_token_seconds", 0.5, 0.99),
    ),
    Panel(
        SERVER,
        "Time from one token to the next",
        "s",
        "A round returns several tokens; SGLang spreads its time over them.",
        quantiles("inter_token_latency_seconds", 0.5, 0.99),
    ),
)


def sections() -> dict[str, list[Panel]]:
    """Panels by section, both in order."""
    grouped: dict[str, list[Panel]] = {}
    for panel in PANELS:
        grouped.setdefault(panel.section, []).append(panel)
    return grouped
