"""The server against transformers, weight updates, sessions and both ways to start it."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server_process import CPU_ARGUMENTS, ServerProcess, counters, tokens
from tiny import tiny_model
from tiny_draft import known_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from longdraft.draft_models.reference_decode import greedy_decode
from longdraft.kernels.gumbel import torch_gumbel_argmax
from longdraft.models import demo_model_folder

KNOWN = [p.tolist() for p in known_prompts()]
OFF = {"custom_params": {"longdraft": {"mode": "off"}}}


def seeded_decode(model: torch.nn.Module, ids: list[int], new_tokens: int, temperature: float, seed: int) -> list[int]:
    """Plain decoding with shared noise, by recomputing everything at every step."""
    out = list(ids)
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([out])).logits[0, -1]
        logprob = torch.log_softmax(logits.double() / temperature, -1)[None]
        position = torch.tensor([len(out) - 1])
        out.append(int(torch_gumbel_argmax(logprob, torch.tensor([seed]), position)))
    return out[len(ids) :]


@pytest.mark.parametrize("seed", [0, 11, -5, 2**62])
def test_seeded_sampling_is_transformers_with_the_same_noise(
    drafted: ServerProcess, tiny_target: Path, seed: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    params = {"temperature": 0.7, "sampling_seed": seed, "max_new_tokens": 24, "ignore_eos": True}
    want = seeded_decode(model, KNOWN[0], 24, 0.7, seed)
    assert tokens(drafted.generate(KNOWN[0], {**params, **OFF})) == want
    assert tokens(drafted.generate(KNOWN[0], params)) == want


def test_updated_weights_are_served_and_forgotten_state_is_rebuilt(
    drafted: ServerProcess, tiny_target: Path, tmp_path: Path
) -> None:
    other = tiny_model("llama", tmp_path / "other", seed=5)
    params = {"max_new_tokens": 40, "ignore_eos": True}
    try:
        reply = drafted.post("/update_weights_from_disk", {"model_path": str(other)})
        assert reply["success"], reply
        model = AutoModelForCausalLM.from_pretrained(other).eval()
        assert tokens(drafted.generate(KNOWN[0], params)) == greedy_decode(model, KNOWN[0], 40)
    finally:
        reply = drafted.post("/update_weights_from_disk", {"model_path": str(tiny_target)})
        assert reply["success"], reply
    model = AutoModelForCausalLM.from_pretrained(tiny_target).eval()
    got = drafted.generate(KNOWN[0], params)
    assert tokens(got) == greedy_decode(model, KNOWN[0], 40)
    assert counters(got)["accepted"] > 0


def test_a_session_goes_on_where_it_was(plain: ServerProcess, drafted: ServerProcess) -> None:
    answers = []
    for server in (plain, drafted):
        session = server.post("/open_session", {"capacity_of_str_len": 4000})
        said: list[list[int]] = []
        rid = None
        for turn in range(3):
            answer = server.generate(
                KNOWN[turn],
                {"max_new_tokens": 12, "ignore_eos": True},
                session_params={"id": session, "rid": rid},
            )
            rid = answer["meta_info"]["id"]
            said.append(tokens(answer))
        server.open("/close_session", {"session_id": session}).read()
        answers.append(said)
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The real model under SGLang's own command, no draft given: the lookup drafter."""
    arguments = ["--speculative-algorithm", "LONGDRAFT", "--speculative-num-steps", "4"]
    server = ServerProcess(demo_model_folder(), arguments, tmp_path_factory.mktemp("smollm2") / "log", cold=True)
    server.command[:3] = [str(Path(sys.executable).with_name("sglang")), "serve"]
    with server:
        yield server


def test_a_real_model_gains_from_lookup_and_says_the_same(smollm2: ServerProcess) -> None:
    folder = demo_model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = Path(random.__file__).read_text()
    chat = [{"role": "user", "content": "Name three colours."}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompts = [tokenizer(source).input_ids[:700], tokenizer(rendered, add_special_tokens=False).input_ids]
    accepted = 0
    for ids in prompts:
        got = smollm2.generate(ids, {"max_new_tokens": 40, "ignore_eos": True})
        assert tokens(got) == greedy_decode(model, ids, 40)
        accepted += counters(got)["accepted"]
    assert accepted > 0
    answer = smollm2.post("/v1/chat/completions", {"model": "m", "messages": chat, "max_tokens": 24, "temperature": 0})[
        "choices"
    ][0]["message"]["content"]
    stops = {tokenizer.eos_token_id}
    want = greedy_decode(model, prompts[1], 24)
    cut = next((i for i, t in enumerate(want) if t in stops), 24)
    assert answer == tokenizer.decode(want[:cut], skip_special_tokens=True)


def test_a_json_schema_on_a_real_tokenizer(smollm2: ServerProcess) -> None:
    schema = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}'
    params = {"max_new_tokens": 60, "json_schema": schema}
    ids = AutoTokenizer.from_pretrained(demo_model_folder())("A person as JSON: ").input_ids
    got, undrafted = smollm2.generate(ids, params), smollm2.generate(ids, {**params, **OFF})
    assert tokens(got) == tokens(undrafted)
    assert counters(got)["mode"] == "full" and got["text"].startswith("{")


def test_longdraft_serve_is_the_same_server(
    plain: ServerProcess, tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    arguments = ["--draft", str(tiny_draft), "--steps", "3", "--mode", "off"]
    server = ServerProcess(tiny_target, arguments, tmp_path / "log", cold=True)
    server.command[1:3] = ["-m", "longdraft.cli", "serve"]
    server.command[:] = [w for w in server.command if w not in CPU_ARGUMENTS]  # it knows what a CPU needs
    params = {"max_new_tokens": 30, "ignore_eos": True}
    with server:
        want = tokens(plain.generate(KNOWN[0], params))
        quiet = server.generate(KNOWN[0], params)
        loud = server.generate(KNOWN[0], {**params, "custom_params": {"longdraft": {"mode": "full"}}})
    assert tokens(quiet) == tokens(loud) == want
    assert counters(quiet)["mode"] == "off" and counters(quiet)["drafted"] == 0
    assert counters(loud)["mode"] == "full" and counters(loud)["accepted"] > 0
