"""longdraft demo: train a draft on the CPU, serve with and without it, compare.

Writes ``report.json`` and ``report.png`` into its folder (``demo``). Both servers are real SGLang servers. While one is measured the
other is stopped by signal: one server at a time has the machine, and both keep their prefix cache, so pairs can alternate.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import Field

from longdraft.bench import demo_report
from longdraft.bench.demo_text import Prompt, prompts, write_training_text
from longdraft.bench.provenance import device_name, git_commit, versions
from longdraft.bench.server import Generation, Server
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.errors import UserError
from longdraft.schema import Settings
from longdraft.train.recipe_files import find_config

RECIPE, CHATS = "recipes/demo_smollm2.yaml", "recipes/demo/chats.jsonl"
TAU_EXPECTED, LONG = 1.3, 4000


class DemoSettings(Settings):
    """Train a draft on the CPU, serve with and without it, write a report."""

    folder: str = Field("demo", description="where everything goes")
    draft: str | None = Field(None, description="serve this draft folder instead of training one")
    steps: int = Field(2, ge=1, description="drafted tokens a verification")
    new_tokens: int = Field(64, ge=8, description="tokens to generate for a prompt")
    pairs: int = Field(5, ge=1, description="alternated pairs of the speed comparison")


@dataclass
class Both:
    """A prompt's answers without and with the draft; ``texts`` are the chat endpoint's for a chat."""

    prompt: Prompt
    ids: list[int]
    plain: Generation
    drafted: Generation
    texts: tuple[str, str] | None

    @property
    def identical(self) -> bool:
        same_chat = self.texts is None or self.texts[0] == self.texts[1]
        return same_chat and self.plain.tokens == self.drafted.tokens


def run(settings: DemoSettings, overrides: Sequence[str]) -> dict[str, Any]:
    """The whole demo; returns the report's record.

    Raises:
        UserError: the model cannot be fetched, the training failed, or a server did not start.
    """
    from rich.console import Console

    from longdraft.models import demo_model_folder

    console, began = Console(), time.monotonic()
    folder = Path(settings.folder)

    def stage(text: str) -> None:
        console.rule(f"{text}  [{time.monotonic() - began:.0f} s]", align="left")

    stage("the model")
    model = demo_model_folder(say=console.print)
    console.print(f"{model}", highlight=False)
    if settings.draft is None:
        stage("training a LongSpec draft")
        draft, training = train(folder, model, overrides)
    else:
        draft, training = Path(settings.draft), {}
    stage("the servers: SGLang, and SGLang with longdraft")
    answers, ratios = compare(settings, folder, model, draft, console)
    stage("the result")
    record = make_record(settings, answers, ratios, training)
    record["seconds"] = round(time.monotonic() - began)
    demo_report.write(record, folder)
    demo_report.show(record, console)
    console.print(f"{folder / 'report.json'}, {folder / 'report.png'}", highlight=False)
    return record


def train(folder: Path, model: Path, overrides: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """Run ``longdraft train`` with the demo's recipe, its progress on this terminal; returns the draft and its facts."""
    text, runs = folder / "train.jsonl", folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    write_training_text(text)
    sources = json.dumps([str(find_config(CHATS)), str(text)])
    arguments = ["--config", RECIPE, f"target.path={model}", f"data.train={sources}", f"run.output_dir={runs}"]
    arguments += [f"target.dtype={fastest_dtype()}"]
    command = [sys.executable, "-m", "longdraft.cli", "train", *arguments, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)}
    began = time.monotonic()
    if status := subprocess.run(command, env=environment).returncode:
        raise UserError(f"the demo's training ended with exit status {status}: see the lines above")
    drafts = sorted(runs.glob("*/checkpoints/step-*/draft"))
    if not drafts:
        raise UserError(f"the demo's training left no checkpoint in {runs}: see the lines above")
    facts: dict[str, Any] = json.loads((drafts[-1] / "config.json").read_text())["longdraft"]["training"]
    return drafts[-1], {**facts, "seconds": round(time.monotonic() - began)}


def fastest_dtype() -> str:
    """The training target's: bfloat16 halves its time where the processor multiplies it, and is slow elsewhere."""
    import torch

    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def compare(
    settings: DemoSettings, folder: Path, model: Path, draft: Path, console: Any
) -> tuple[list[Both], list[tuple[float, float]]]:
    """Every prompt on both servers, then the longest one again in alternated pairs of tokens a second."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    plain, drafted = servers(settings, folder, model, draft)
    answers = []
    with plain:
        console.print("SGLang is up")
        plain.pause()
        with drafted:
            console.print("SGLang with longdraft is up")
            for prompt in prompts():
                drafted.pause()
                plain.resume()
                ids = prompt.ids(tokenizer)
                a, text_a = ask(plain, prompt, ids, settings.new_tokens)
                plain.pause()
                drafted.resume()
                b, text_b = ask(drafted, prompt, ids, settings.new_tokens)
                texts = (text_a, text_b) if text_a is not None and text_b is not None else None
                answers.append(Both(prompt, ids, a, b, texts))
                console.print(
                    f"{prompt.name}: {'same tokens' if answers[-1].identical else 'TOKENS DIFFER'}", highlight=False
                )
            longest = max(answers, key=lambda both: len(both.ids))
            return answers, alternate(plain, drafted, longest.ids, settings, console)


def servers(settings: DemoSettings, folder: Path, model: Path, draft: Path) -> tuple[Server, Server]:
    """The two servers, alike in everything but the speculation; the plugin gives both the same prefill on a CPU."""
    from longdraft.serve.launch import CPU_DEFAULTS, CPU_ENVIRONMENT, CPU_SWITCHES

    environment = {**CPU_ENVIRONMENT, "SGLANG_PLUGINS": "longdraft", "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)
    shared = ["--model-path", str(model), *(word for pair in CPU_DEFAULTS.items() for word in pair), *CPU_SWITCHES]
    plain = [sys.executable, "-m", "sglang.launch_server", *shared]
    ours = [
        sys.executable,
        "-m",
        "longdraft.cli",
        "serve",
        *shared,
        "--draft",
        str(draft),
        "--steps",
        str(settings.steps),
    ]
    return (
        Server("plain", plain, folder / "plain.log", environment),
        Server("longdraft", ours, folder / "longdraft.log", environment),
    )


def ask(server: Server, prompt: Prompt, ids: list[int], new_tokens: int) -> tuple[Generation, str | None]:
    """A prompt's answer and, for a chat, the chat endpoint's text."""
    text = server.chat(prompt.messages, new_tokens) if prompt.chat else None
    return server.generate(ids, new_tokens), text


def alternate(
    plain: Server, drafted: Server, ids: list[int], settings: DemoSettings, console: Any
) -> list[tuple[float, float]]:
    """Tokens a second of both servers, in pairs, the first of a pair taking turns; the prompt is in both prefix caches."""
    pairs = []
    for turn in range(settings.pairs):
        speed = {}
        for server, other in ((plain, drafted), (drafted, plain))[:: 1 if turn % 2 == 0 else -1]:
            other.pause()
            server.resume()
            speed[server.name] = server.generate(ids, settings.new_tokens).tokens_per_s
        pairs.append((speed[plain.name], speed[drafted.name]))
        console.print(f"pair {turn + 1}: {pairs[-1][0]:.1f} -> {pairs[-1][1]:.1f} tokens/s", highlight=False)
    return pairs


def prompt_row(both: Both) -> dict[str, Any]:
    """One prompt's row of the report."""
    repeated = repeated_share(both.plain.tokens)
    counters = both.drafted.counters
    return {
        "name": both.prompt.name,
        "endpoint": "/v1/chat/completions and /generate" if both.prompt.chat else "/generate",
        "context_tokens": len(both.ids),
        "new_tokens": len(both.plain.tokens),
        "identical": both.identical,
        "verifications": counters.get("target_verifications", 0),
        "drafted": counters.get("drafted", 0),
        "accepted": counters.get("accepted", 0),
        "tau": counters.get("tau", 0.0),
        "tau_without_bonus": counters.get("tau_without_bonus", 0.0),
        "plain_tok_s": round(both.plain.tokens_per_s, 2),
        "longdraft_tok_s": round(both.drafted.tokens_per_s, 2),
        "repeated_4grams": round(repeated, 3),
        "repetitive": repeated > ALLOWED,
        "text": both.plain.text,
    }


def pooled_tau(rows: Sequence[dict[str, Any]]) -> float:
    """Accepted drafts a verification over several prompts, bonus token out."""
    verifications = sum(row["verifications"] for row in rows)
    return sum(row["accepted"] for row in rows) / verifications if verifications else 0.0


def make_record(
    settings: DemoSettings, answers: Sequence[Both], pairs: Sequence[tuple[float, float]], training: dict[str, Any]
) -> dict[str, Any]:
    """The report: the project's form of a record, and the demo's figures by prompt."""
    rows = [prompt_row(both) for both in answers]
    context = max(row["context_tokens"] for row in rows)
    ratios = [ours / plain if plain else 0.0 for plain, ours in pairs]
    kept = pooled_tau(rows)
    calm = [row for row in rows if not row["repetitive"]]
    identical, drafted = all(row["identical"] for row in rows), sum(row["drafted"] for row in rows)
    median = round(statistics.median(ratios), 3)
    return {
        "name": "demo",
        "command": "make demo",
        "commit": git_commit(),
        "date": date.today().isoformat(),
        "device": device_name(),
        "versions": versions(),
        "settings": {"model": "SmolLM2-135M-Instruct", **settings.model_dump(exclude={"folder", "draft"})},
        "training": training,
        "identical": identical,
        "drafted": drafted,
        "accepted": sum(row["accepted"] for row in rows),
        "tau": round(1 + kept, 3),
        "tau_without_bonus": round(kept, 3),
        "tau_not_repetitive": round(1 + pooled_tau(calm), 3),
        "speed": {
            "context_tokens": context,
            "pairs_plain_longdraft_tok_s": [[round(a, 2), round(b, 2)] for a, b in pairs],
            "ratios": [round(r, 3) for r in ratios],
            "median_ratio": median,
        },
        "figures": {
            "tau": round(1 + kept, 3),
            "plain_tok_s": round(statistics.median(a for a, _ in pairs), 2),
            "longdraft_tok_s": round(statistics.median(b for _, b in pairs), 2),
            "ratio": median,
        },
        "checks": {
            "identical": identical,
            "drafted": drafted > 0,
            f"tau at least {TAU_EXPECTED}": 1 + kept >= TAU_EXPECTED,
            f"faster at {LONG} tokens or more": context >= LONG and median > 1,
        },
        "prompts": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 1 if tokens differ or nothing was drafted. Slow or unlucky is said in the report, and is no failure."""
    from longdraft.options import parse_options

    settings, rest = parse_options(DemoSettings, sys.argv[1:] if argv is None else argv, "longdraft demo")
    if unknown := [word for word in rest if "=" not in word or word.startswith("-")]:
        raise UserError(
            f"unknown argument {unknown[0]!r}: longdraft demo --help lists the options; a.b=value goes to the training"
        )
    record = run(settings, rest)
    return 0 if record["checks"]["identical"] and record["checks"]["drafted"] else 1


if __name__ == "__main__":
    sys.exit(main())
