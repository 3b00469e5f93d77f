"""longdraft demo: train the shipped draft a little further on the CPU, serve with and without both shipped drafts, compare.

Writes ``report.json`` and ``report.png`` into its folder (``demo``). All servers are real SGLang servers. While one is measured the
others are stopped by signal: one server at a time has the machine, and all keep their prefix cache, so pairs can alternate.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field

from longdraft.bench import demo_modes, demo_report
from longdraft.bench.demo_modes import ask_modes, mode_line, mode_rows
from longdraft.bench.demo_record import NAMES, Answers, best_draft, make_record
from longdraft.bench.demo_text import Prompt, prompts
from longdraft.bench.demo_training import train
from longdraft.bench.server import Generation, Server
from longdraft.errors import UserError
from longdraft.schema import Settings

SHIPPED = "smollm2-135m"
# Drafted tokens a verification. Measured on one core with drafts of which none is kept, a drafted token costs 0.11 plain steps at
# 4,300 tokens of context and 0.21 at 44 with LongSpec and the target's whole head, 0.07 and 0.15 with EAGLE-3 and its small one, the
# row of the verification included. Where 65 % of the drafts are kept (τ 2.5 with chains of 4), 3 and 4 gain the most.
STEPS = {"longspec": 3, "eagle3": 4}
PLAIN = "plain"
CACHE_TOKENS = "20000"  # of each of the three servers: all prompts and answers once


class DemoSettings(Settings):
    """Train the shipped draft a little further on the CPU, serve with and without both shipped drafts, write a report."""

    folder: str = Field("demo", description="where everything goes")
    longspec: str | None = Field(None, description="LongSpec draft folder to train and serve; none: the shipped one")
    eagle3: str | None = Field(None, description="EAGLE-3 draft folder to serve; none: the shipped one")
    training: bool = Field(True, description="false leaves the training out")
    steps: int | None = Field(None, ge=1, description="drafted tokens a verification; none: what is fastest on a CPU")
    new_tokens: int = Field(64, ge=8, description="tokens to generate for a prompt")
    pairs: int = Field(5, ge=1, description="alternated pairs of the speed comparison")

    def drafts(self) -> dict[str, Path]:
        """Folders by kind.

        Raises:
            UserError: a shipped draft that is not there.
        """
        from longdraft.models import shipped_draft

        given = {kind: getattr(self, kind) for kind in NAMES}
        return {kind: Path(path) if path else shipped_draft(SHIPPED, kind) for kind, path in given.items()}

    def chain(self, kind: str) -> int:
        """Drafted tokens a verification."""
        return self.steps or STEPS[kind]


def run(settings: DemoSettings, overrides: Sequence[str]) -> dict[str, Any]:
    """The whole demo; returns the report's record.

    Raises:
        UserError: the model cannot be fetched, the training failed, or a server did not start.
    """
    from rich.console import Console

    from longdraft.models import demo_model_folder

    console, began, folder = Console(), time.monotonic(), Path(settings.folder)

    def stage(text: str) -> None:
        console.rule(f"{text}  [{time.monotonic() - began:.0f} s]", align="left")

    drafts, training = settings.drafts(), {}
    stage("the model")
    model = demo_model_folder(say=console.print)
    console.print(f"{model}", highlight=False)
    if settings.training:
        stage("a short training that continues from the shipped LongSpec draft")
        training = train(folder, model, drafts["longspec"], overrides)
        console.print(demo_report.training_line(training), highlight=False)
    stage("three servers: SGLang, and SGLang with longdraft and each shipped draft")
    answers, best, pairs = compare(settings, folder, model, drafts, console)
    stage("one server more: the modes on a longer prompt")
    modes = compare_modes(settings, folder, model, drafts, best)
    console.print(mode_line(modes, NAMES[best]), highlight=False)
    stage("the result")
    plain_settings = settings.model_dump(include={"new_tokens", "pairs"})
    steps = {kind: settings.chain(kind) for kind in drafts}
    record = make_record(plain_settings, steps, answers, best, pairs, training, modes)
    record["seconds"] = round(time.monotonic() - began)
    demo_report.write(record, folder)
    demo_report.show(record, console)
    console.print(f"{folder / 'report.json'}, {folder / 'report.png'}", highlight=False)
    return record


class Servers:
    """Several servers of which one at a time runs."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self.servers = servers

    def only(self, name: str) -> Server:
        """That server, all others held still."""
        for other, server in self.servers.items():
            if other != name:
                server.pause()
        self.servers[name].resume()
        return self.servers[name]


def compare(
    settings: DemoSettings, folder: Path, model: Path, drafts: dict[str, Path], console: Any
) -> tuple[list[Answers], str, list[tuple[float, float]]]:
    """Every prompt on all servers, then the longest one again in alternated pairs of tokens a second, with the better draft."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    all_servers = Servers(make_servers(settings, folder, model, drafts))
    with ExitStack() as running:
        for name, server in all_servers.servers.items():
            running.enter_context(server)
            server.pause()
            console.print(f"{'SGLang' if name == PLAIN else f'SGLang with {NAMES[name]}'} is up", highlight=False)
        answers = []
        for asked in prompts():
            answers.append(ask_all(all_servers, asked, asked.ids(tokenizer), settings.new_tokens))
            same = "same tokens" if answers[-1].identical else "TOKENS DIFFER"
            console.print(f"{asked.name}: {same}", highlight=False)
        best = best_draft(answers)
        longest = max(answers, key=lambda a: len(a.ids))
        return answers, best, alternate(all_servers, best, longest.ids, settings, console)


def make_servers(
    settings: DemoSettings, folder: Path, model: Path, drafts: dict[str, Path], more: Sequence[str] = ()
) -> dict[str, Server]:
    """The servers, alike in everything but the speculation; the plugin gives all the same prefill on a CPU.

    Args:
        settings: of the demo.
        folder: for their logs.
        model: the target.
        drafts: folders by kind.
        more: arguments of the servers with drafts.
    """
    from longdraft.serve.launch import CPU_DEFAULTS, CPU_ENVIRONMENT, CPU_SWITCHES

    environment = {**CPU_ENVIRONMENT, "SGLANG_PLUGINS": "longdraft", "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)
    defaults = {**CPU_DEFAULTS, "--max-total-tokens": CACHE_TOKENS}
    shared = ["--model-path", str(model), *(word for pair in defaults.items() for word in pair), *CPU_SWITCHES]
    commands = {PLAIN: [sys.executable, "-m", "sglang.launch_server", *shared]}
    for kind, draft in drafts.items():
        ours = ["--draft", str(draft), "--steps", str(settings.chain(kind)), *more]
        commands[kind] = [sys.executable, "-m", "longdraft.cli", "serve", *shared, *ours]
    return {name: Server(name, command, folder / f"{name}.log", environment) for name, command in commands.items()}


def compare_modes(
    settings: DemoSettings, folder: Path, model: Path, drafts: dict[str, Path], best: str
) -> dict[str, Any]:
    """All modes on one long prompt, with the better draft."""
    from transformers import AutoTokenizer

    ids = demo_modes.prompt().ids(AutoTokenizer.from_pretrained(model))
    views = ["--mode", "exact", "--allow-lossy", "--view-tokens", str(demo_modes.VIEW)]
    server = make_servers(settings, folder, model, {best: drafts[best]}, views)[best]
    with server:
        return mode_rows(ask_modes(server, ids, settings.new_tokens), best)


def ask_all(servers: Servers, prompt: Prompt, ids: list[int], new_tokens: int) -> Answers:
    """A prompt's answers on all servers and, for a chat, the chat endpoint's texts."""
    found: dict[str, Generation] = {}
    texts = []
    for name in servers.servers:
        server = servers.only(name)
        if prompt.chat:
            texts.append(server.chat(prompt.messages, new_tokens))
        found[name] = server.generate(ids, new_tokens)
    return Answers(prompt, ids, found.pop(PLAIN), found, texts)


def alternate(
    servers: Servers, best: str, ids: list[int], settings: DemoSettings, console: Any
) -> list[tuple[float, float]]:
    """Tokens a second without and with a draft, in pairs, the first of a pair taking turns; the prompt is in both prefix caches."""
    console.print(f"speed at {len(ids):,} tokens: SGLang -> SGLang with {NAMES[best]}", highlight=False)
    pairs = []
    for turn in range(settings.pairs):
        order = (PLAIN, best) if turn % 2 == 0 else (best, PLAIN)
        speed = {name: servers.only(name).generate(ids, settings.new_tokens).tokens_per_s for name in order}
        pairs.append((speed[PLAIN], speed[best]))
        console.print(f"pair {turn + 1}: {pairs[-1][0]:.1f} -> {pairs[-1][1]:.1f} tokens/s", highlight=False)
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 1 if tokens differ or nothing was drafted. Slow or unlucky is said in the report, and is no failure."""
    from longdraft.options import parse_options

    settings, rest = parse_options(DemoSettings, sys.argv[1:] if argv is None else argv, "longdraft demo")
    if unknown := [word for word in rest if "=" not in word or word.startswith("-")]:
        raise UserError(
            f"unknown argument {unknown[0]!r}: longdraft demo --help lists the options; a.b=value goes to the training"
        )
    record = run(settings, rest)
    return 0 if all(record["checks"][name] for name in ("identical", "drafted", "exact and full: identical")) else 1


if __name__ == "__main__":
    sys.exit(main())
