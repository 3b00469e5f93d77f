"""Serving settings: the server's defaults, handed to the scheduler processes in one environment variable, and a request's own."""

import json
import os
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from longdraft.draft_models.sparse_recipe import PROTECTED, SparseRecipe
from longdraft.errors import UserError, shown
from longdraft.schema import Settings, nearest, validate
from longdraft.serve.tree_shape import AUTO, CHAIN, HELP, parse_tree
from longdraft.serve.views.budget import Budget
from longdraft.serve.views.selectors import make_selector
from longdraft.serve.views.token_set import SparseBudget

ENVIRONMENT = "LONGDRAFT_SETTINGS"
REQUEST_KEY = "longdraft"

Mode = Literal["off", "full", "exact", "partial", "sparse"]
VIEWED: frozenset[str] = frozenset({"exact", "partial", "sparse"})  # modes that verify on a view of the cache
LOSSY: frozenset[str] = frozenset({"partial", "sparse"})  # those that return what a view verified
LONGEST_REFRESH = 1024  # tokens that mode sparse can compute anew at once: so many ids are kept


class ServeSettings(Settings):
    """How the worker serves; every field can be set by ``longdraft serve`` or in the environment's JSON."""

    mode: Mode = Field(
        "full",
        description="default mode of a request: off proposes nothing; full verifies every token on the whole cache; exact verifies "
        "on a view of it and returns what a full verification confirmed (identical output); partial returns what the view "
        "verified (approximate output); sparse returns what a few tokens of it verified, chosen anew every round (approximate output)",
    )
    view_selector: str = Field(
        "mass",
        description="modes exact and partial: what chooses the blocks of a view: mass, quest, specpv, snapkv, streaming "
        "(worst, for tests); or dustin, which chooses single tokens behind every draft, as mode sparse does",
    )
    view_lists: Literal["shared", "layers"] = Field(
        "shared",
        description="one list of blocks for all layers, or one for each, by its own queries and keys (all of them are read then; rounds "
        "in which another request of the batch reads its whole cache take the last layer's list for all)",
    )
    view_tokens: int = Field(4096, ge=64, description="cached tokens of a view, sinks and recent ones in")
    view_sinks: int = Field(32, ge=0, description="leading tokens among them")
    view_recent: int = Field(128, ge=16, description="most recent tokens among them")
    view_mass: float | None = Field(
        None, gt=0, lt=1, description="take no more blocks than hold this share of the attention; None: as many as fit"
    )
    view_every: int = Field(
        1, ge=1, description="full verifications of a request from one choice of its view to the next"
    )
    view_reduction: Literal["mean", "max", "last"] = Field(
        "mean", description="how the query rows that choose a view are put together (selectors with bounds)"
    )
    allow_lossy: bool = Field(
        False, description="let the server and its requests take modes partial and sparse, whose output is approximate"
    )
    sparse_tokens: int = Field(
        512,
        ge=32,
        description="mode sparse: cached tokens of a set, 4 leading and 16 recent ones in; a request may ask for fewer",
    )
    sparse_lookahead: int | None = Field(
        None,
        ge=0,
        description="mode sparse: tokens among them that the draft's lookahead chooses, the target's history the others; None: "
        "as the recipe says, or half",
    )
    sparse_recipe: str | None = Field(
        None, description="mode sparse: file of `longdraft calibrate` that says whose attention chooses"
    )
    pending: int = Field(
        20,
        ge=2,
        le=120,
        description="tokens at most that a request gains on its view from one full verification to the next",
    )
    rounds: int | None = Field(
        None,
        ge=0,
        description="mode exact: partial rounds of every cycle; None chooses them by what is confirmed and what they cost",
    )
    confirm_floor: float = Field(
        0.25,
        ge=0,
        le=1,
        description="mode exact: a request of whose tokens a smaller share is confirmed verifies on the whole cache for a while",
    )
    max_cycle_ms: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="mode exact: longest cycle, as far as partial rounds can be left out",
    )
    refresh_every: int | None = Field(
        None,
        ge=1,
        description="modes partial and sparse: tokens from one full verification to the next at most; None: as many as may be "
        "pending, in mode sparse no full verification",
    )
    refresh_margin: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="modes partial and sparse: verify fully after a token whose logit was less than this ahead of the next best",
    )
    refresh_missed_mass: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="modes partial and sparse: verify fully after a round whose newest token puts more than this share of its "
        "attention outside its view, such as 0.1 (every round then reads the keys of two layers whole; a share that even a new view misses makes every "
        "other round a full one)",
    )
    self_draft: bool = Field(
        False,
        description="the target drafts for itself on the view, one token a partial round: needs no draft, and mode exact or sparse",
    )
    draft_context: int = Field(
        4096,
        ge=64,
        description="cached tokens that the draft reads at most: sinks and the most recent (EAGLE-3: the draft's own window where it has one; a language model: in a chain)",
    )
    draft_sinks: int = Field(32, ge=0, description="leading tokens among them")
    draft_head_tokens: int | None = Field(
        None,
        ge=1,
        description="LongSpec drafts without a ranked head: propose only so many most frequent tokens, so that a draft step "
        "reads only their rows of the target's head; None: the whole head",
    )
    draft_head_counts: str | None = Field(
        None, description="file of `longdraft counts` that says which are the most frequent"
    )
    tree: str = Field(
        CHAIN,
        description=f"what is drafted: {HELP} (a tree's depth takes the place of the steps)",
    )
    tree_costs: str | None = Field(
        None,
        description="file of what a round costs in each shape among which tree=auto chooses; None measures it at start, and logs it",
    )
    lookup_min_match: int = Field(2, ge=1, description="shortest suffix match that the lookup drafter continues")
    attention: Literal["auto", "fa3", "flashinfer", "triton", "torch"] = Field(
        "auto",
        description="backend of the prefix part of verification; auto takes the first of these that is "
        "there (over a float8 cache fa3 only where SGLang decodes with it)",
    )
    simulate_accept_length: float | None = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="benchmarks only: force this mean accept length (bonus in); the text is wrong",
    )
    simulate_confirmed_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="benchmarks only, beside simulate_accept_length: chance of each token of a partial round to be confirmed; the "
        "text is wrong",
    )
    check_ranks: bool = Field(
        False,
        description="debugging, of several ranks: compare what each would verify and return in every round, and end the server where they "
        "differ; every round then waits for the device",
    )
    step_times: str | None = Field(
        None, description="file to which one line of phase times is added every decode step; None measures nothing"
    )

    @model_validator(mode="after")
    def _head_has_counts(self) -> "ServeSettings":
        if (self.draft_head_tokens is None) != (self.draft_head_counts is None):
            raise ValueError(
                f"draft_head_tokens={self.draft_head_tokens} with draft_head_counts={self.draft_head_counts!r}: set both, or neither"
            )
        return self

    @model_validator(mode="after")
    def _something_recent_is_read(self) -> "ServeSettings":
        if self.draft_sinks >= self.draft_context:
            raise ValueError(
                f"draft_sinks={self.draft_sinks} with draft_context={self.draft_context} leaves the draft no recent token to read: "
                "give fewer sinks than context"
            )
        return self

    @model_validator(mode="after")
    def _costs_have_a_choice(self) -> "ServeSettings":
        if self.tree_costs is not None and self.tree.partition(":")[0] != AUTO:
            raise ValueError(
                f"tree_costs={shown(self.tree_costs)} with tree={shown(self.tree)}, which leaves nothing to choose: leave it out, or "
                "set tree to auto or auto:TREE"
            )
        return self

    @model_validator(mode="after")
    def _approximate_output_is_allowed(self) -> "ServeSettings":
        if self.mode in LOSSY and not self.allow_lossy:
            raise ValueError(f"mode={self.mode!r} gives approximate output: set allow_lossy too, or take mode exact")
        return self

    @model_validator(mode="after")
    def _views_fit(self) -> "ServeSettings":
        if self.mode in VIEWED:
            try:
                selector = make_selector(self.view_selector, self.view_reduction)
                selector.check(self.budget())
                if self.refresh_missed_mass is not None:
                    selector.check_missed_mass(self.refresh_missed_mass)
            except UserError as error:
                raise ValueError(str(error)) from None
            if self.tree != CHAIN:
                raise ValueError(
                    f"tree={shown(self.tree)} with mode={self.mode!r}, which drafts chains: leave the tree out"
                )
        if self.self_draft and self.mode not in ("exact", "sparse"):
            raise ValueError(
                f"self_draft with mode={self.mode!r}: set mode to exact or sparse, or leave self_draft out"
            )
        return self

    @model_validator(mode="after")
    def _sparse_fits(self) -> "ServeSettings":
        most = self.sparse_tokens - PROTECTED
        if self.sparse_lookahead is not None and self.sparse_lookahead > most:
            raise ValueError(
                f"sparse_lookahead={self.sparse_lookahead} with sparse_tokens={self.sparse_tokens}, of which {PROTECTED} are sinks and "
                f"recent ones: write {most} or less"
            )
        if self.sparse and self.refresh_every is not None and self.refresh_every > LONGEST_REFRESH:
            raise ValueError(
                f"refresh_every={self.refresh_every}: mode sparse computes up to {LONGEST_REFRESH} tokens anew, write that or less"
            )
        if self.view_selector == "dustin" and self.view_lists == "layers":
            raise ValueError(
                "view_lists='layers' with view_selector='dustin', which has one set for all layers: take shared"
            )
        return self

    def budget(self) -> Budget:
        """What a view may hold.

        Raises:
            UserError: more sinks and recent tokens than tokens.
        """
        return Budget(self.view_tokens, self.view_sinks, self.view_recent, mass=self.view_mass)

    def recipe(self) -> SparseRecipe | None:
        """What a calibration has found, if there is one.

        Raises:
            UserError: a file that is none.
        """
        return None if self.sparse_recipe is None else SparseRecipe.load(self.sparse_recipe)

    def set_budget(self) -> SparseBudget:
        """What a sparse set may hold: divided as :attr:`sparse_lookahead`, the recipe or, without either, halves say.

        Raises:
            UserError: a recipe that is none.
        """
        whole = SparseBudget(self.sparse_tokens, lookahead=0)
        assert whole.sinks + whole.window == PROTECTED
        if self.sparse_lookahead is not None:
            return replace(whole, lookahead=self.sparse_lookahead)
        recipe = self.recipe()
        share = 0.5 if recipe is None else recipe.lookahead / (recipe.budget - PROTECTED)
        return replace(whole, lookahead=round(share * whole.most_lookahead))

    def view_width(self, chain: int) -> int:
        """Cached tokens at most that a partial verification reads: a view, and what is gained until the next one is chosen.

        Args:
            chain: tokens at most that a round gains.
        """
        widest = max(self.view_tokens, self.sparse_tokens) if self.sparse else self.view_tokens
        return widest + (self.view_every + 1) * (self.pending + chain)

    @property
    def sets(self) -> bool:
        """Whether some requests have sets of tokens chosen for them in every round."""
        return self.sparse or (self.viewed and make_selector(self.view_selector).by_round)

    @property
    def sparse(self) -> bool:
        """Whether requests may be verified on sparse sets."""
        return self.viewed and self.allow_lossy

    @property
    def viewed(self) -> bool:
        """Whether the server keeps views, so that its requests may ask for the modes that need them."""
        return self.mode in VIEWED

    @field_validator("view_selector")
    @classmethod
    def _selector_is_known(cls, value: str) -> str:
        try:
            make_selector(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("tree", mode="before")
    @classmethod
    def _one_width_is_a_shape(cls, value: Any) -> Any:
        """YAML reads a beam of one width as a number."""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise ValueError(f"this is no shape: write {HELP}")
        return value

    @field_validator("tree")
    @classmethod
    def _tree_is_a_shape(cls, value: str) -> str:
        try:
            parse_tree(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("mode", mode="before")
    @classmethod
    def off_is_a_word(cls, value: Any) -> Any:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value


class RequestSettings(Settings):
    """What a request may set under ``custom_params.longdraft``."""

    mode: Mode | None = Field(
        None,
        description="off or full; on a server that keeps views also exact and, where it allows lossy modes, partial and sparse; None "
        "takes the server's",
    )
    budget: int | None = Field(
        None,
        ge=32,
        strict=True,
        description="mode sparse: cached tokens of a set, at most the server's; None takes the server's",
    )
    refresh: int | None = Field(
        None,
        ge=1,
        strict=True,
        description="modes partial and sparse: tokens from one full verification to the next at most; None takes the server's",
    )


def write_environment(settings: ServeSettings) -> None:
    """Hand settings to the processes that SGLang starts."""
    os.environ[ENVIRONMENT] = settings.model_dump_json(exclude_defaults=True)


def read_environment() -> ServeSettings:
    """Settings of this process.

    Raises:
        UserError: the variable holds no JSON object, or an unknown or unfit field.
    """
    text = os.environ.get(ENVIRONMENT, "{}")
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise UserError(
            f'environment variable {ENVIRONMENT}={text!r} is not a JSON object: write one, such as {{"mode": "off"}}'
        )
    return validate(ServeSettings, data)


def request_settings(custom_params: Any) -> RequestSettings:
    """Settings of one request.

    Raises:
        UserError: ``custom_params`` or its ``longdraft`` entry has the wrong type, an unknown key or an unknown value.
    """
    if custom_params is None:
        return RequestSettings()
    if not isinstance(custom_params, dict):
        raise UserError(f"custom_params must be an object, got {type(custom_params).__name__} {custom_params!r}")
    entry = custom_params.get(REQUEST_KEY)
    if entry is None:
        return RequestSettings()
    if not isinstance(entry, dict):
        raise UserError(f"custom_params.{REQUEST_KEY} must be an object, got {type(entry).__name__} {entry!r}")
    for key in entry:
        if key not in RequestSettings.model_fields:
            raise UserError(
                f"custom_params.{REQUEST_KEY}.{key} is unknown{nearest(str(key), list(RequestSettings.model_fields))}"
            )
    try:
        return validate(RequestSettings, entry)
    except UserError as error:
        raise UserError(f"custom_params.{REQUEST_KEY}.{error}") from None
