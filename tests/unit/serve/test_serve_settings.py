"""Settings of the server and of a request: what is read, and every refusal in one line."""

import re
from pathlib import Path
from typing import Any

import pytest

from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.errors import UserError
from longdraft.options import parse_options
from longdraft.schema import validate
from longdraft.serve.build_drafter import reach
from longdraft.serve.launch import ServeOptions
from longdraft.serve.settings import (
    ENVIRONMENT,
    RequestSettings,
    ServeSettings,
    read_environment,
    request_settings,
    write_environment,
)
from longdraft.serve.views.token_set import SparseBudget


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(UserError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_without_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert read_environment() == ServeSettings()


def test_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "")  # monkeypatch takes the variable back afterwards
    sent = ServeSettings(mode="off", draft_context=128, draft_sinks=4, attention="torch", simulate_accept_length=2.5)
    write_environment(sent)
    assert read_environment() == sent


def test_a_beam_of_one_width_is_a_number_in_yaml() -> None:
    options, _ = parse_options(ServeOptions, ["--tree", "8"], "longdraft serve")
    assert options.tree == "8"


def test_a_draft_head_and_its_counts_belong_together() -> None:
    assert "draft_head_tokens=5 with draft_head_counts=None: set both" in refused(
        lambda: validate(ServeSettings, {"draft_head_tokens": 5})
    )
    assert validate(ServeSettings, {"draft_head_tokens": 5, "draft_head_counts": "x"}).draft_head_tokens == 5


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"off"'])
def test_a_variable_that_is_no_object(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    message = refused(read_environment)
    assert f"{ENVIRONMENT}={text!r} is not a JSON object" in message
    assert "write one, such as" in message


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('{"mod": "off"}', r"unknown key 'mod' \(did you mean 'mode'\?\)"),
        ('{"mode": "fast"}', r"mode='fast': .*'off'.*'full'"),
        ('{"draft_context": 10}', r"draft_context=10: .*64"),
        ('{"draft_sinks": -1}', r"draft_sinks=-1"),
        (
            '{"draft_sinks": 64, "draft_context": 64}',
            r"draft_sinks=64 with draft_context=64 .* no recent token .*: give fewer sinks",
        ),
        ('{"lookup_min_match": 0}', r"lookup_min_match=0"),
        ('{"simulate_accept_length": 0.5}', r"simulate_accept_length=0\.5"),
        ('{"simulate_accept_length": Infinity}', r"simulate_accept_length=inf: .*finite"),
        ('{"mode": "sparse"}', r"mode='sparse' gives approximate output: set allow_lossy too, or take mode exact"),
        ('{"mode": "partial"}', r"mode='partial' gives approximate output: set allow_lossy too, or take mode exact"),
        (
            '{"sparse_lookahead": 500}',
            r"sparse_lookahead=500 with sparse_tokens=512, of which 20 are sinks and recent ones: write 492 or less",
        ),
        ('{"sparse_tokens": 16}', r"sparse_tokens=16"),
        (
            '{"mode": "sparse", "allow_lossy": true, "refresh_every": 1025}',
            r"refresh_every=1025: mode sparse computes up to 1024 tokens anew, write that or less",
        ),
        ('{"mode": "exact", "allow_lossy": true, "refresh_every": 1025}', r"refresh_every=1025: mode sparse computes"),
        (
            '{"mode": "exact", "view_selector": "dustin", "view_lists": "layers"}',
            r"view_lists='layers' with view_selector='dustin', .* take shared",
        ),
        (
            '{"mode": "partial", "allow_lossy": true, "self_draft": true}',
            r"self_draft with mode='partial': set mode to exact or sparse",
        ),
        ('{"tree": false}', r"tree=False: this is no shape: write chain, "),
        ('{"tree": [4, 4]}', r"tree=\[4, 4\]: this is no shape: write chain, "),
    ],
)
def test_unknown_and_unfit_fields_are_named(text: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, text)
    assert re.search(pattern, refused(read_environment))


@pytest.mark.parametrize(
    "params", [None, {}, {"other": 1}, {"longdraft": None}, {"longdraft": {}}, {"longdraft": {"mode": None}}]
)
def test_a_request_that_asks_for_nothing_takes_the_servers_mode(params: Any) -> None:
    assert request_settings(params) == RequestSettings(mode=None)


@pytest.mark.parametrize("mode", ["off", "full"])
def test_a_request_chooses_its_mode(mode: str) -> None:
    assert request_settings({"longdraft": {"mode": mode}, "__req__": object()}).mode == mode


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ("off", r"custom_params must be an object, got str 'off'"),
        ([1], r"custom_params must be an object, got list"),
        ({"longdraft": "off"}, r"custom_params\.longdraft must be an object, got str 'off'"),
        ({"longdraft": {"mod": "off"}}, r"custom_params\.longdraft\.mod is unknown \(did you mean 'mode'\?\)"),
        ({"longdraft": {"zzz": 1}}, r"custom_params\.longdraft\.zzz is unknown$"),
        ({"longdraft": {3: 1}}, r"custom_params\.longdraft\.3 is unknown"),
        ({"longdraft": {"mode": "fast"}}, r"custom_params\.longdraft\.mode='fast': .*'off'.*'full'"),
        ({"longdraft": {"budget": 31}}, r"custom_params\.longdraft\.budget=31: .*32"),
        ({"longdraft": {"budget": "64"}}, r"custom_params\.longdraft\.budget='64': .*integer"),
        ({"longdraft": {"budget": 64.0}}, r"custom_params\.longdraft\.budget=64\.0: .*integer"),
        ({"longdraft": {"refresh": 0}}, r"custom_params\.longdraft\.refresh=0"),
        ({"longdraft": {"refresh": True}}, r"custom_params\.longdraft\.refresh=True: .*integer"),
        ({"longdraft": {"mode": ["off"]}}, r"custom_params\.longdraft\.mode=\['off'\]"),
    ],
)
def test_bad_requests_are_refused_by_the_fields_full_name(params: Any, pattern: str) -> None:
    assert re.search(pattern, refused(request_settings, params))


def test_a_sets_tokens_are_divided_as_said_as_calibrated_or_in_halves(tmp_path: Path) -> None:
    target, draft = LayerHeads(layer=3, heads=[0]), LayerHeads(layer=1, heads=[2])
    SparseRecipe(target=target, draft=[draft], lookahead=123, budget=512).save(path := tmp_path / "recipe.json")
    cases = {None: ({}, 246), "recipe": ({"sparse_recipe": str(path)}, 123), "said": ({"sparse_lookahead": 7}, 7)}
    for given, lookahead in cases.values():
        assert ServeSettings(**given).set_budget() == SparseBudget(512, 4, 16, lookahead)
    other = ServeSettings(sparse_recipe=str(path), sparse_tokens=266, sparse_lookahead=None)
    assert other.set_budget() == SparseBudget(266, 4, 16, round(123 / 492 * 246))
    assert ServeSettings(sparse_recipe=str(path), sparse_lookahead=9).set_budget().lookahead == 9


def test_sets_are_kept_where_some_mode_wants_them() -> None:
    assert not ServeSettings().sets and not ServeSettings(allow_lossy=True).sets
    assert not ServeSettings(mode="exact").sets and not ServeSettings(mode="exact").sparse
    assert ServeSettings(mode="exact", view_selector="dustin").sets
    assert not ServeSettings(mode="exact", view_selector="dustin").sparse
    assert ServeSettings(mode="exact", allow_lossy=True).sets and ServeSettings(mode="exact", allow_lossy=True).sparse


def test_a_draft_reads_no_more_than_a_context_has() -> None:
    for most, plain, viewed in ((300, 300, 300), (100_000, 4096, 50_000 + 2 * 25)):
        assert reach(ServeSettings(), 4, most) == (plain, 0)
        of_sets = ServeSettings(mode="sparse", allow_lossy=True, sparse_tokens=50_000)
        assert reach(of_sets, 4, most) == (viewed, of_sets.pending)
