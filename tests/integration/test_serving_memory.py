"""A device that runs out of memory behind a verification: requests of that batch at most end, the server and its slots stay (S3)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import SPECULATIVE, STRICT, HttpError, ServerProcess, counters, tokens
from test_serving_views import LOSSY, VIEW, long_prompt, mode

SLOTS = 40000
LONG = {"max_new_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module", params=["exact", "full"])
def short_of_memory(
    request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that keeps views, and one that does not; both with the overlap schedule."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(tiny_draft)]
    views = f', {LOSSY}, "rounds": 2, "confirm_floor": 0.0, {VIEW}' if request.param == "exact" else ""
    given = {**STRICT, "LONGDRAFT_SETTINGS": f'{{"mode": "{request.param}"{views}}}'}
    log = tmp_path_factory.mktemp(request.param) / "log"
    server = ServerProcess(tiny_target, arguments, log, given, SLOTS, overlap=True)
    server.command[1:3] = [str(Path(__file__).with_name("faulty_launch.py"))]
    with server:
        yield server


def both(server: ServerProcess, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Any]:
    """Answers or errors of requests that run together."""

    def one(i: int) -> Any:
        try:
            return server.generate(prompts[i], params[i])
        except HttpError as error:
            return error

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, range(len(prompts))))


def test_a_batch_without_memory_ends_and_the_server_goes_on(
    plain: ServerProcess, short_of_memory: ServerProcess
) -> None:
    """The requests that run with the doomed one may end too; the next ones are answered rightly, from clean prefixes."""
    prompts = [long_prompt(n, n) for n in (150, 230, 310)]
    doomed = {"max_new_tokens": 35, "ignore_eos": True}
    answers = both(short_of_memory, prompts, [LONG, doomed, LONG])
    assert isinstance(answers[1], HttpError) and answers[1].status == 500
    assert "longdraft could not verify" in answers[1].text
    for answer in (answers[0], answers[2]):
        assert not isinstance(answer, HttpError) or answer.status == 500
    assert short_of_memory.idle_slots() == SLOTS
    for prompt in prompts:
        assert tokens(short_of_memory.generate(prompt, LONG)) == tokens(plain.generate(prompt, LONG))
    assert short_of_memory.idle_slots() == SLOTS and short_of_memory.alive


def test_one_that_wants_logprobs_ends_alike(short_of_memory: ServerProcess) -> None:
    body = {
        "input_ids": long_prompt(90, 4), "sampling_params": {"temperature": 0, "max_new_tokens": 35, "ignore_eos": True},
        "return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 9],
    }  # fmt: skip
    with pytest.raises(HttpError) as error:
        short_of_memory.post("/generate", body)
    assert error.value.status == 500 and "longdraft could not verify" in error.value.text
    assert short_of_memory.idle_slots() == SLOTS and short_of_memory.alive


def test_memory_that_is_short_at_times_costs_speed_only(plain: ServerProcess, short_of_memory: ServerProcess) -> None:
    prompts = [long_prompt(n, 3 * n) for n in (40, 200, 420)]
    got = both(short_of_memory, prompts, [LONG] * 3)
    assert [tokens(a) for a in got] == [tokens(plain.generate(p, LONG)) for p in prompts]
    if counters(got[0])["mode"] == "exact":
        partial = short_of_memory.generate(long_prompt(300, 8), mode("partial", max_new_tokens=60))
        assert len(tokens(partial)) == 60
        assert "a cycle failed" in short_of_memory.log.read_text()
    assert short_of_memory.idle_slots() == SLOTS and short_of_memory.alive
