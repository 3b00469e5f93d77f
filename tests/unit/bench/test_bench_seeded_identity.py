"""What the comparison of seeded answers asks its servers, and which answers it fails, with stand-ins for the servers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from longdraft.bench import record
from longdraft.bench import seeded_identity as bench
from longdraft.errors import UserError

COUNT, NEW = 5, 6
Answer = Callable[[str, int, int], list[int]]  # shape or plain, prompt's first token, seed


def honest(name: str, first: int, seed: int) -> list[int]:
    return [first + 100 * seed + n for n in range(NEW)]


def wrong_tree(name: str, first: int, seed: int) -> list[int]:
    tokens = honest(name, first, seed)
    return [*tokens[:4], -1, *tokens[5:]] if name.startswith("4,") and first == 3 else tokens


def short_chain(name: str, first: int, seed: int) -> list[int]:
    return honest(name, first, seed)[: NEW - 1 if name == "chain5" and first == 2 else NEW]


def short_everywhere(name: str, first: int, seed: int) -> list[int]:
    return honest(name, first, seed)[:-1]


def unsampled(name: str, first: int, seed: int) -> list[int]:
    return honest(name, first, 0)


class Bench:
    """The benchmark with stand-in servers: what they were started with and asked, and the record."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, draft: str = "longspec") -> None:
        self.folder, self.started, self.asked = folder, list[Any](), list[Any]()
        self.answer: Answer = honest
        self.kept = 3
        (folder / "draft").mkdir()
        config = {"longdraft": {"draft": draft, "format_version": 1}}
        (folder / "draft" / "config.json").write_text(json.dumps(config))
        lines = [json.dumps({"input_ids": [first, 9, 9]}) for first in range(COUNT + 1)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(bench, "Server", self.start)
        monkeypatch.setattr(bench, "generate", self.generate)
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: None)

    def start(self, name: str, words: list[str], log: Path, own: dict[str, str]) -> Any:
        self.started.append(SimpleNamespace(name=name, words=words, log=log, environment=own))
        return self

    def __enter__(self) -> Any:
        return self.started[-1]

    def __exit__(self, *_: object) -> None: ...

    def generate(
        self, server: Any, ids: list[list[int]], new_tokens: int, sampling: list[dict[str, Any]]
    ) -> tuple[float, list[dict[str, Any]]]:
        self.asked.append((server.name, ids, new_tokens, sampling))
        info = {"longdraft": [{"accepted": 0 if server.name == "plain" else self.kept, "target_verifications": 2}]}
        return 1.0, [
            {"output_ids": self.answer(server.name, prompt[0], own["sampling_seed"]), "meta_info": info}
            for prompt, own in zip(ids, sampling, strict=True)
        ]

    def run(self, *more: str) -> tuple[int, dict[str, Any]]:
        words = [
            "--target",
            "t",
            "--draft",
            str(self.folder / "draft"),
            "--prompts",
            str(self.folder / "prompts.jsonl"),
        ]
        words += ["--batch", "2", "--count", str(COUNT), "--new-tokens", str(NEW)]
        status = bench.main([*words, "--record", str(self.folder / "out.json"), *more])
        return status, json.loads((self.folder / "out.json").read_text())


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def failed(wrote: dict[str, Any]) -> list[str]:
    return [name for name, passed in wrote["checks"].items() if not passed]


def test_equal_answers_pass_and_give_tau(faked: Bench) -> None:
    status, wrote = faked.run()
    assert (status, failed(wrote)) == (0, [])
    assert wrote["figures"] == {
        "prompts": COUNT,
        "other_seeds_differ": COUNT,
        "chain5_mismatches": 0,
        "chain5_tau": 2.5,
        "beam_4_16_16_16_16_mismatches": 0,
        "beam_4_16_16_16_16_tau": 2.5,
    }


def test_every_prompt_has_one_seed_for_all_shapes_and_another_for_the_control(faked: Bench) -> None:
    faked.run()
    seeds = dict[str, list[int]]()
    for name, ids, new_tokens, sampling in faked.asked:
        assert new_tokens == NEW and len(ids) <= 2
        assert all((own["temperature"], own["top_p"]) == (0.8, 0.95) for own in sampling)
        seeds.setdefault(name, []).extend(own["sampling_seed"] for own in sampling)
    assert seeds.pop("plain") == list(range(2 * COUNT))
    assert seeds == {"chain5": list(range(COUNT)), "4,16,16,16,16": list(range(COUNT))}


@pytest.mark.parametrize("on_card", [False, True])
def test_all_servers_are_ours_in_float32_and_the_first_drafts_nothing(
    faked: Bench, monkeypatch: pytest.MonkeyPatch, on_card: bool
) -> None:
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: on_card)
    monkeypatch.setattr(record, "device_name", lambda: "a card")
    faked.run()
    modes = []
    for server in faked.started:
        options = dict(zip(server.words, server.words[1:], strict=False))
        assert options["-m"] == "longdraft.cli" and options["--dtype"] == "float32"
        assert options.get("--attention-backend") == ("triton" if on_card else None)
        assert server.environment["SGLANG_PLUGINS"] == "longdraft"
        assert server.environment.get("TRITON_F32_DEFAULT") == ("tf32x3" if on_card else None)
        modes.append((options["--mode"], options.get("--steps"), options.get("--tree")))
    assert modes == [("off", "5", None), ("full", "5", None), ("full", None, "4,16,16,16,16")]
    assert len({server.log for server in faked.started}) == 3


def test_an_eagle3_draft_grows_ranked_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked = Bench(tmp_path, monkeypatch, draft="eagle3")
    _, wrote = faked.run()
    assert wrote["settings"]["shapes"] == ["chain5", "eagle2:5,8,60"]
    assert [server.name for server in faked.started] == ["plain", "chain5", "eagle2:5,8,60"]


@pytest.mark.parametrize(
    ("answer", "fails", "row", "differences"),
    [
        (wrong_tree, ["beam_4_16_16_16_16_equal"], 1, [{"prompt": 3, "at": 4}]),
        (short_chain, ["chain5_equal"], 0, [{"prompt": 2, "at": NEW - 1}]),
        (short_everywhere, ["answers_are_whole"], 0, []),
        (unsampled, ["most_answers_differ_with_other_seeds"], 0, []),
    ],
)
def test_what_fails_is_named_with_its_place(
    faked: Bench, answer: Answer, fails: list[str], row: int, differences: list[dict[str, int]]
) -> None:
    faked.answer = answer
    status, wrote = faked.run()
    assert (status, failed(wrote)) == (1, fails)
    assert wrote["rows"][row]["differences"] == differences
    assert wrote["figures"]["chain5_mismatches"] == len(wrote["rows"][0]["differences"])


def test_answers_without_any_draft_kept_show_nothing(faked: Bench) -> None:
    faked.kept = 0
    status, wrote = faked.run()
    assert (status, failed(wrote)) == (1, ["chain5_drafts_kept", "beam_4_16_16_16_16_drafts_kept"])


def test_too_few_prompts_are_refused_before_a_server_starts(faked: Bench) -> None:
    with pytest.raises(UserError, match=f"has {COUNT + 1} prompts, --count is 9"):
        faked.run("--count", "9")
    assert not faked.started
