"""The command line that ``longdraft serve`` hands to SGLang, and the environment of its processes."""

import json
import os

import pytest

from longdraft.serve.launch import (
    CPU_DEFAULTS,
    CPU_SWITCHES,
    ServeOptions,
    prepare_environment,
    rank_environment,
    ranks_of,
    sglang_arguments,
)
from longdraft.serve.settings import ENVIRONMENT, ServeSettings, read_environment


def value_of(args: list[str], name: str) -> str:
    """What an argument parser takes: the last one wins."""
    return args[len(args) - 1 - args[::-1].index(name) + 1]


def test_a_gpu_gets_the_users_arguments_and_ours_alone() -> None:
    args = sglang_arguments(ServeOptions(draft="d", steps=5), ["--model-path", "m"], on_cpu=False)
    assert args == [
        "--model-path", "m", "--speculative-algorithm", "LONGDRAFT", "--speculative-num-steps", "5",
        "--speculative-draft-model-path", "d",
    ]  # fmt: skip


def test_without_a_draft_none_is_named() -> None:
    assert "--speculative-draft-model-path" not in sglang_arguments(ServeOptions(), [], on_cpu=False)


def test_a_cpu_gets_what_it_needs() -> None:
    args = sglang_arguments(ServeOptions(), ["--model-path", "m"], on_cpu=True)
    assert all(value_of(args, name) == value for name, value in CPU_DEFAULTS.items())
    assert all(args.count(switch) == 1 for switch in CPU_SWITCHES)


@pytest.mark.parametrize("given", [["--dtype", "bfloat16"], ["--dtype=bfloat16"]])
def test_the_user_wins_over_cpu_defaults_in_either_spelling(given: list[str]) -> None:
    args = sglang_arguments(ServeOptions(), [*given, "--sleep-on-idle"], on_cpu=True)
    assert args[: len(given)] == given
    assert args.count("--dtype") == given.count("--dtype")
    assert args.count("--sleep-on-idle") == 1


@pytest.mark.parametrize("on_cpu", [True, False])
def test_processes_inherit_our_settings(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENVIRONMENT, "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "x")  # taken back afterwards
        monkeypatch.delenv(name)
    prepare_environment(ServeOptions(mode="off", draft="d", steps=2, draft_context=100), on_cpu)
    assert read_environment() == ServeSettings(mode="off", draft_context=100)
    assert json.loads(os.environ[ENVIRONMENT]) == {"mode": "off", "draft_context": 100}
    assert os.environ["SGLANG_PLUGINS"] == "longdraft"
    assert ("SGLANG_USE_CPU_ENGINE" in os.environ) is on_cpu


def test_the_users_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "{}")
    monkeypatch.setenv("SGLANG_PLUGINS", "longdraft,other")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    prepare_environment(ServeOptions(), on_cpu=True)
    assert os.environ["SGLANG_PLUGINS"] == "longdraft,other"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_ranks_of_a_cpu_have_cores_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, want in (
        (["--tp-size", "2"], 2),
        (["--model-path", "m", "--tp=4"], 4),
        (["--tensor-parallel-size", "3", "--tp-size-of-another", "9"], 3),
        (["--model-path", "m"], 1),
        (["--tp", "two"], 1),
    ):
        assert ranks_of(given) == want
    assert rank_environment(2, 8)["SGLANG_CPU_OMP_THREADS_BIND"] == "0-3|4-7"
    assert rank_environment(3, 2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|0", "fewer cores than ranks are shared"
    for name in ("SGLANG_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", ENVIRONMENT):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    prepare_environment(ServeOptions(), True, 2)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert os.environ["TORCHDYNAMO_DISABLE"] == "x", "what the user sets is kept"


@pytest.mark.parametrize(("tree", "steps"), [("chain", "5"), ("4,16,16", "3"), ("eagle2:6,4,20", "6")])
def test_a_trees_depth_takes_the_place_of_the_steps(tree: str, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "{}")
    options = ServeOptions(draft="d", steps=5, tree=tree)
    assert value_of(sglang_arguments(options, [], on_cpu=False), "--speculative-num-steps") == steps
    prepare_environment(options, on_cpu=False)
    assert read_environment().tree == tree
