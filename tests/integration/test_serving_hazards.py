"""What must not take a server down or bend an answer: failures, NaN drafts, tight memory, the context limit, aborts, refusals."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from server_process import SPECULATIVE, STRICT, HttpError, ServerProcess, counters, refused, tokens
from tiny_draft import known_prompts

KNOWN = [p.tolist() for p in known_prompts()]
LONG = {"max_new_tokens": 60, "ignore_eos": True}


def copy_draft(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def faulty(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose drafter and verification raise now and then."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(tiny_draft)]
    server = ServerProcess(tiny_target, arguments, tmp_path_factory.mktemp("faulty") / "log", STRICT, overlap=True)
    server.command[1:3] = [str(Path(__file__).with_name("faulty_launch.py"))]
    with server:
        yield server


def test_a_failing_drafter_costs_speed_only(plain: ServerProcess, faulty: ServerProcess) -> None:
    want = [tokens(plain.generate(p, LONG)) for p in KNOWN[:4]]
    got = [faulty.generate(p, LONG) for p in KNOWN[:4]]
    assert [tokens(a) for a in got] == want
    assert sum(counters(a)["draft_failures"] for a in got) > 0
    assert sum(counters(a)["accepted"] for a in got) > 0, "drafting goes on after a failure"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda p: tokens(faulty.generate(p, LONG)), KNOWN[:4])) == want
    assert faulty.alive


def test_a_request_that_cannot_be_verified_fails_alone(plain: ServerProcess, faulty: ServerProcess) -> None:
    doomed = {"max_new_tokens": 31, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(faulty.generate, p, LONG) for p in KNOWN[4:6]]
        with pytest.raises(HttpError) as error:
            faulty.generate(KNOWN[6], doomed)
        assert "longdraft could not verify" in error.value.text
        assert [tokens(f.result()) for f in others] == [tokens(plain.generate(p, LONG)) for p in KNOWN[4:6]]
    assert faulty.idle_slots() == 40000 and faulty.alive


def test_a_request_whose_first_token_cannot_be_chosen_fails_alone(plain: ServerProcess, faulty: ServerProcess) -> None:
    doomed = {"max_new_tokens": 33, "ignore_eos": True}
    together = [KNOWN[7], KNOWN[8], KNOWN[9]]
    sampling = [{"temperature": 0, **p} for p in (LONG, doomed, LONG)]
    with pytest.raises(HttpError) as error:
        faulty.post("/generate", {"input_ids": together, "sampling_params": sampling})
    assert "longdraft could not verify" in error.value.text
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(faulty.generate, p, LONG) for p in (KNOWN[7], KNOWN[9])]
        with pytest.raises(HttpError):
            faulty.generate(KNOWN[8], doomed)
        assert [tokens(f.result()) for f in others] == [tokens(plain.generate(p, LONG)) for p in (KNOWN[7], KNOWN[9])]
    assert faulty.idle_slots() == 40000 and faulty.alive


@pytest.fixture(scope="module")
def poisoned(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A draft with NaN weights, little memory and a short context; started cold."""
    folder = copy_draft(tiny_draft, tmp_path_factory.mktemp("poisoned") / "draft")
    weights = load_file(folder / "model.safetensors")
    weights["mlp.down_proj.weight"][:] = float("nan")
    weights["self_attn.k_proj.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    arguments = [
        *SPECULATIVE,
        "--speculative-draft-model-path",
        str(folder),
        "--context-length",
        "256",
    ]
    arguments += ["--schedule-conservativeness", "0.05"]  # admits more than fits, so that requests are retracted
    log = tmp_path_factory.mktemp("poisoned") / "log"
    with ServerProcess(tiny_target, arguments, log, STRICT, 900, overlap=True, cold=True) as server:
        yield server


def test_a_draft_of_nans_leaves_every_answer_right(plain: ServerProcess, poisoned: ServerProcess) -> None:
    for prompt in KNOWN[:3]:
        got = poisoned.generate(prompt, LONG)
        assert tokens(got) == tokens(plain.generate(prompt, LONG))
        assert counters(got)["drafted"] > 0
    seeded = {**LONG, "temperature": 0.8, "sampling_seed": 3}
    undrafted = poisoned.generate(KNOWN[0], {**seeded, "custom_params": {"longdraft": {"mode": "off"}}})
    assert tokens(poisoned.generate(KNOWN[0], seeded)) == tokens(undrafted)
    assert poisoned.alive and "not finite" in poisoned.log.read_text()


@pytest.mark.parametrize(("prompt", "new"), [(200, 55), (246, 9), (248, 7), (249, 6), (60, 195)])
def test_rows_near_the_context_limit(plain: ServerProcess, poisoned: ServerProcess, prompt: int, new: int) -> None:
    ids = random.Random(prompt).choices(range(256), k=prompt)
    params = {"max_new_tokens": new, "ignore_eos": True}
    got, want = tokens(poisoned.generate(ids, params)), tokens(plain.generate(ids, params))
    assert len(got) == 254 - prompt, "SGLang itself ends a request two tokens before a context of 256"
    assert got == want[: len(got)]


def test_retraction_changes_nothing(plain: ServerProcess, poisoned: ServerProcess) -> None:
    prompts = [random.Random(i).choices(range(256), k=50) for i in range(8)]
    params = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    each = [{**params, "frequency_penalty": 0.2 * (i % 2)} for i in range(8)]
    want = [tokens(plain.generate(p, e)) for p, e in zip(prompts, each, strict=True)]
    got = poisoned.post(
        "/generate", {"input_ids": prompts, "sampling_params": each}
    )  # at once, however busy the machine
    assert [tokens(a) for a in got] == want
    assert sum(a["meta_info"]["num_retractions"] for a in got) > 0, "memory was meant to run short"
    assert poisoned.idle_slots() == 900


def test_two_hundred_requests_with_random_aborts_lose_no_slot(drafted: ServerProcess) -> None:
    start = drafted.idle_slots()
    draw = random.Random(7)
    plans = [(draw.randrange(12), draw.randrange(1, 400), draw.random(), draw.randrange(1, 60)) for _ in range(200)]

    def run(plan: tuple[int, int, float, int]) -> int:
        known, length, fate, new = plan
        ids = (KNOWN[known] + random.Random(length).choices(range(256), k=length))[:length]
        params = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.5 * (known % 2)}
        rid = f"r-{known}-{length}-{new}-{fate}"
        got = 0
        for chunk in drafted.stream(ids, params, rid=rid):
            got = len(tokens(chunk))
            if fate < 0.25:
                return got  # the client hangs up in mid-stream
            if fate < 0.4:
                drafted.open("/abort_request", {"rid": rid}).read()
        return got

    with ThreadPoolExecutor(12) as pool:
        counts = list(pool.map(run, plans))
    assert len(counts) == 200 and sum(c > 0 for c in counts) > 150
    assert drafted.idle_slots() == start == 40000
    assert drafted.alive and "leak" not in drafted.log.read_text()


def test_a_cache_flush_between_requests(plain: ServerProcess, drafted: ServerProcess) -> None:
    want = tokens(plain.generate(KNOWN[0], LONG))
    assert tokens(drafted.generate(KNOWN[0], LONG)) == want
    with drafted.open("/flush_cache", {}) as reply:
        assert reply.status == 200
    again = drafted.generate(KNOWN[0], LONG)
    assert tokens(again) == want and again["meta_info"]["cached_tokens"] == 0


def test_drafts_that_do_not_fit_end_the_start_in_one_line(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    truncated = copy_draft(tiny_draft, tmp_path / "truncated")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[: len(data) // 2])
    wrong = copy_draft(tiny_draft, tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    missing, damaged, unlike = (
        refused(tiny_target, tmp_path / "log", "--speculative-draft-model-path", str(folder))
        for folder in (tmp_path, truncated, wrong)
    )
    assert "config.json" in missing and "give a folder" in missing
    assert "model.safetensors is damaged" in damaged and "copy or export" in damaged
    assert "hidden_size=128, the target has 64" in unlike and "trained for this target" in unlike


def test_flags_that_cannot_be_served_end_the_start_in_one_line(tiny_target: Path, tmp_path: Path) -> None:
    pages = refused(tiny_target, tmp_path / "log", "--page-size", "32")
    sessions = refused(tiny_target, tmp_path / "log", "--enable-streaming-session")
    assert "--page-size 32" in pages and "use 1 or 16" in pages
    assert "--enable-streaming-session" in sessions
