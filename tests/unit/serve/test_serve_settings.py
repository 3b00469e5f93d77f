"""Settings of the server and of a request: what is read, and every refusal in one line."""

import re
from typing import Any

import pytest

from longdraft.errors import UserError
from longdraft.options import parse_options
from longdraft.schema import validate
from longdraft.serve.launch import ServeOptions
from longdraft.serve.settings import (
    ENVIRONMENT,
    RequestSettings,
    ServeSettings,
    read_environment,
    request_settings,
    write_environment,
)


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
        ({"longdraft": {"mode": ["off"]}}, r"custom_params\.longdraft\.mode=\['off'\]"),
    ],
)
def test_bad_requests_are_refused_by_the_fields_full_name(params: Any, pattern: str) -> None:
    assert re.search(pattern, refused(request_settings, params))
