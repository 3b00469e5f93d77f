"""python -m longdraft.bench.gpu_full_speed --systems eagle3,eagle3-window,longdraft --out record.json

Time of a scheduler step in modes ``full``, ``exact`` and ``partial`` on one GPU: a Llama-8B shape with random weights and forced acceptance, beside SGLang's
EAGLE-3 on FlashAttention-3 (without and with a draft window) and plain decoding. Forced acceptance proves time only. ``longdraft-lm`` drafts
with a language model of Llama-3.2-1B's shape, ``longdraft-lm-whole`` with the same one over all of its cache.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server, generate, rounds
from longdraft.bench.step_times import read_lines, write_lines
from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.draft_models.target import TargetSpec
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.errors import UserError
from longdraft.serve.settings import LOSSY, VIEWED

STEPS = 5
LM_STEPS = 4
ACCEPT = 4.0
WINDOW = 4096
CASES = {"b1_c32k": (1, 32_000), "b16_c32k": (16, 32_000), "b1_c125k": (1, 125_000)}
MORE_CASES = {"b1_c8k": (1, 8_000), "b16_c8k": (16, 8_000)}  # what a mode whose time should not grow is compared with
VIEW = 4096  # tokens of a view, chosen anew behind every full verification
SETS, LOOKAHEAD = 512, 192  # tokens of a sparse set, and those of them that the draft chooses by a recipe
RECIPE_LAYER, RECIPE_HEADS = 17, [1, 10, 19, 28]  # as many as a calibration takes; the dearest: keys of their own
FIRST = 6  # steps of a batch, one of which has waited for its requests; what comes before is of earlier ones
BEHIND = 2  # steps that the host is ahead of the device: so many after that one are short
CONFIRMED = 0.95  # chance of a token of a partial round to be confirmed
HEAD = 32_000  # rows of every draft's head
CONTEXT = 130_000
NEW_TOKENS = 384
WARM_TOKENS = 256
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 140000,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 257,
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def write_models(folder: Path) -> dict[str, Path]:
    """Folders of the target, SGLang's EAGLE-3 draft and the language model that drafts (all for ``--load-format dummy``), of our drafts
    with random weights, the file of token counts that says which rows of the head a LongSpec draft reads, and sparse recipes.
    """
    from transformers import LlamaConfig

    from longdraft.train.tiny_random import byte_tokenizer

    target, eagle, lm = folder / "target", folder / "eagle3", folder / "longdraft-lm"
    changes = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": HEAD}
    for path, config in ((target, LLAMA_8B), (eagle, LLAMA_8B | changes), (lm, LLAMA_1B)):
        path.mkdir(parents=True, exist_ok=True)
        byte_tokenizer().save_pretrained(path)
        (path / "config.json").write_text(json.dumps(config, indent=1))
    spec = TargetSpec.from_config(LlamaConfig(**LLAMA_8B))
    with torch.device("cuda"):
        longspec = LongSpecDraft(LongSpecConfig(spec)).to(torch.bfloat16)
        own_eagle = Eagle3Draft(Eagle3Config(spec, Eagle3Settings(draft_vocab_size=HEAD))).to(torch.bfloat16)
    own_eagle.choose_vocabulary(torch.arange(HEAD))
    counts = TokenCounts(torch.ones(spec.vocab_size, dtype=torch.int64), torch.arange(spec.vocab_size))
    counts.save(folder / "counts.safetensors", {})
    found = {"target": target, "eagle3": eagle, "counts": folder / "counts.safetensors"}
    found |= {"longdraft-lm": lm, "longdraft-lm-whole": lm}
    for name, draft in (("longdraft", longspec), ("longdraft-eagle3", own_eagle)):
        found[name] = folder / name
        save_draft(draft, found[name], "llama-8b-shape")
    for name, layer in (("longdraft", spec.num_layers - 1), ("longdraft-eagle3", 0)):
        found[f"{name}-recipe"] = path = folder / f"{name}-recipe.json"
        sparse_recipe(layer).save(path)
    return found


def sparse_recipe(draft_layer: int) -> SparseRecipe:
    """Heads of one layer of the target and one of a draft's, such as a calibration finds; without one all heads are scored."""
    target, draft = (LayerHeads(layer=n, heads=RECIPE_HEADS) for n in (RECIPE_LAYER, draft_layer))
    return SparseRecipe(target=target, draft=[draft], lookahead=LOOKAHEAD, budget=SETS)


def launch_command(
    system: str, models: dict[str, Path], context: int, times: Path | None = None, ranks: int = 1
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of one system. Behind ours ``-exact``, ``-partial`` and ``-sparse`` mean these modes, ``-sets`` behind
    one of the first two that single tokens make up its views (Dustin's selector), ``-recipe`` behind the last that its sets are chosen by
    :func:`sparse_recipe`, then ``-sync`` that there is no overlap and ``-eager`` that there are no CUDA graphs either.

    Args:
        system: its name.
        models: of :func:`write_models`.
        context: longest request.
        times: where our server writes its steps' phase times.
        ranks: GPUs among which it is divided (tensor parallel).
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(models["target"])]
    command += ["--load-format", "dummy", *(["--tp-size", str(ranks)] if ranks > 1 else [])]
    command += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--context-length", str(context)]
    command += ["--mem-fraction-static", "0.85", "--skip-server-warmup", "--chunked-prefill-size", "16384"]
    command += ["--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16", "--attention-backend", "fa3"]
    if system.startswith("eagle3"):
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(models["eagle3"])]
        command += ["--speculative-num-steps", str(STEPS)]
        command += ["--speculative-draft-load-format", "dummy", "--speculative-eagle-topk", "1"]
        command += ["--speculative-num-draft-tokens", str(STEPS + 1)]
        if system == "eagle3-window":
            command += ["--speculative-draft-window-size", str(WINDOW)]
        return command, {"SGLANG_SIMULATE_ACC_LEN": str(int(ACCEPT)), "SGLANG_PLUGINS": "none"}
    if system.startswith("longdraft"):
        behind = system.removesuffix("-eager").removesuffix("-sync")
        name = behind.removesuffix("-sets").removesuffix("-recipe")
        mode = next((m for m in VIEWED if name.endswith(f"-{m}")), None)
        draft = name if mode is None else name.removesuffix(f"-{mode}")
        command += ["--speculative-algorithm", "LONGDRAFT", "--speculative-draft-model-path", str(models[draft])]
        command += ["--speculative-num-steps", str(LM_STEPS if draft.startswith("longdraft-lm") else STEPS)]
        if system.endswith(("-sync", "-eager")):
            command += ["--disable-overlap-schedule"]
        if system.endswith("-eager"):
            command += ["--disable-cuda-graph"]
        own = {"draft_head_tokens": HEAD, "draft_head_counts": str(models["counts"])} if draft == "longdraft" else {}
        own |= {"draft_context": context} if draft == "longdraft-lm-whole" else {}
        views = {} if mode is None else {"mode": mode, "view_tokens": VIEW, "simulate_confirmed_share": CONFIRMED}
        views |= {"view_selector": "dustin"} if behind.endswith("-sets") else {}
        views |= {"sparse_recipe": str(models[f"{draft}-recipe"])} if behind.endswith("-recipe") else {}
        views |= {"allow_lossy": True} if mode in LOSSY else {}
        settings = json.dumps(own | views | ({} if times is None else {"step_times": str(times)}))
        forced = {"SGLANG_SIMULATE_ACC_LEN": str(int(ACCEPT))}
        return command, forced | {"SGLANG_PLUGINS": "longdraft", "LONGDRAFT_SETTINGS": settings}
    return command, {"SGLANG_PLUGINS": "none"}


def check_systems(systems: Sequence[str], models: dict[str, Path]) -> None:
    """Before the first server starts.

    Raises:
        UserError: one is no system.
    """
    for system in systems:
        try:
            launch_command(system, models, CONTEXT)
            known = system in ("plain", "eagle3", "eagle3-window") or system.startswith("longdraft")
        except KeyError:
            known = False
        if not known:
            drafts = ", ".join(name for name in models if name.startswith("longdraft"))
            raise UserError(
                f"--systems {system!r} is none: give plain, eagle3, eagle3-window, or a draft of {drafts}, with -exact, -partial or -sparse"
            )


def measure(server: Server, batch: int, context: int, starts: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Decoding of a batch whose prompts are cached: tokens/s of the batch, ms a scheduler step, tokens of a request a step.

    ``starts`` is called right before the answers whose steps are counted.

    Where every request draws its own accept length, the batch shrinks before its slowest request has ended: then
    :func:`steady` says what the full batch does.
    """
    draw = random.Random(0)
    ids = [[draw.randrange(1000, 120_000) for _ in range(context)] for _ in range(batch)]
    prefill_s, _ = generate(server, ids, 2)
    generate(server, ids, WARM_TOKENS)  # time enough for a planner to have tried what it chooses among
    generate(server, ids, 8)
    short_s, short = generate(server, ids, 8)
    starts()
    long_s, long = generate(server, ids, 8 + NEW_TOKENS)
    seconds, steps = long_s - short_s, max(rounds(long)) - max(rounds(short))
    each = [NEW_TOKENS / (a - b) for a, b in zip(rounds(long), rounds(short), strict=True)]
    return {
        "tok_s": batch * NEW_TOKENS / seconds,
        "ms_step": 1000 * seconds / steps,
        "tokens_a_step": sum(each) / batch,
        "prefill_s": prefill_s,
    }


def steady(lines: list[dict[str, Any]], batch: int, tokens_a_step: float) -> dict[str, float]:
    """Tokens/s while all requests run: their tokens a step over the mean time from step to step, by the steps' own lines.

    Steps of earlier answers may be written late, so those up to the one that has waited for the requests are left out, and those in
    which SGLang's overlap begins.
    """
    times = [
        line["wall_ms"] + line["gap_ms"] for line in lines if line["batch"] == batch and line["gap_ms"] is not None
    ]
    if len(times) <= FIRST + BEHIND:
        return {}
    waited = max(range(FIRST), key=times.__getitem__)
    mean = statistics.fmean(times[waited + 1 + BEHIND :])
    return {"steady_ms_step": mean, "steady_tok_s": 1000 * batch * tokens_a_step / mean}


def mark(marks: list[int], path: Path | None) -> None:
    """Note how many steps a file has so far."""
    marks.append(len(read_lines(path)) if path and path.exists() else 0)


def record(path: Path, figures: dict[str, float], checks: dict[str, bool], ranks: int = 1) -> None:
    """Write what is known so far."""
    settings: dict[str, Any] = {
        "shape": "Llama-8B, random weights, bf16",
        "steps": STEPS,
        "steps_of_the_language_model": LM_STEPS,
        "accept_length": ACCEPT,
        "new_tokens": NEW_TOKENS,
        "eagle3_window": WINDOW,
        "draft_head_rows": HEAD,
        "view_tokens": VIEW,
        "confirmed_share": CONFIRMED,
        "ranks": ranks,
    }
    write_record(make_record("full_mode_speed", settings, figures, checks), path)


def main(argv: list[str] | None = None) -> int:
    """Measure the systems one after the other on the same prompts and write one record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", default="longdraft,eagle3,eagle3-window,plain")
    parser.add_argument("--models", type=Path, default=Path("/tmp/longdraft-models"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/longdraft-logs"))
    parser.add_argument("--step-times", type=Path, help="folder for our servers' phase times, for bench.step_times")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *MORE_CASES], default=list(CASES))
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs that share a server")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    cases = CASES | MORE_CASES
    models = write_models(args.models)
    figures: dict[str, float] = {}
    checks: dict[str, bool] = {}
    if args.out.is_file():  # systems measured by an earlier call on the same machine stay in the record
        before = json.loads(args.out.read_text())
        figures, checks = before["figures"], before["checks"]
    check_systems(args.systems.split(","), models)
    for system in args.systems.split(","):
        times = args.step_times and args.step_times / f"{system}.jsonl"
        command, environment = launch_command(system, models, CONTEXT, times, args.tp_size)
        log = args.logs / f"{system}.log"
        try:
            with Server(system, command, log, environment) as server:
                for case, (batch, context) in ((name, cases[name]) for name in args.cases):
                    marks = list[int]()
                    found = measure(server, batch, context, partial(mark, marks, times))
                    if times and times.exists():
                        lines = read_lines(times)[marks[0] :]
                        write_lines(times.with_name(f"{system}_{case}.jsonl"), lines)
                        found |= steady(lines, batch, found["tokens_a_step"])
                    for key, value in found.items():
                        figures[f"{system.replace('-', '_')}_{key}_{case}"] = round(value, 3)
                    print(
                        system,
                        case,
                        {k: v for k, v in figures.items() if system.replace("-", "_") in k and case in k},
                        flush=True,
                    )
                checks[f"{system.replace('-', '_')}_ran"] = True
                record(
                    args.out, figures, checks, args.tp_size
                )  # before the server stops, which can outlast the machine
        except Exception as error:
            print(f"{system} failed: {error}", flush=True)
            checks[f"{system.replace('-', '_')}_ran"] = False
            shutil.copy(log, args.out.with_name(f"{system}.log"))
            record(args.out, figures, checks, args.tp_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
