"""python -m longdraft.bench.training_files WORK SHAPE DEVICE COPIES LENGTH:ROWS ...: the training measurement's dummy files.

A target, draft weights and feature files in the formats that SpecForge 0.2.0 reads.

Both sides read these files, so both train the same draft on the same rows. Random features say nothing of quality. The dummy
head's rows outside the draft vocabulary are small, so that the target's choice is nearly always a token that the draft has, as
with a real vocabulary map: otherwise three rows of four would be dropped by both sides.

Legend: S rows of a document, E hidden size, V target vocabulary, N draft vocabulary.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from longdraft.train.specforge_seam.feature_files import FeatureSample, write_feature_file, write_vocabulary_file

ANSWER = 1024  # supervised tokens at the end of a long document
Side = Literal["ours", "specforge"]
Rows = Literal["answers", "all"]


@dataclass(frozen=True)
class Shape:
    """Sizes of target and draft; the draft's layer has the target's."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    answer: int

    @property
    def target_config(self) -> dict[str, Any]:
        """As a Llama-3.1 folder has it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }

    @property
    def draft_config(self) -> dict[str, Any]:
        """SpecForge's draft JSON."""
        return self.target_config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": self.draft_vocab,
            "target_hidden_size": self.hidden,
        }

    def draft_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Trained weights by their published names; norms have one dimension."""
        e, m, q, kv = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "fc.weight", (e, 3 * e)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            yield f"midlayer.{name}.weight", (e,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"midlayer.self_attn.{name}_proj.weight", (rows, 2 * e)
        yield "midlayer.self_attn.o_proj.weight", (e, q)
        for name in ("gate", "up"):
            yield f"midlayer.mlp.{name}_proj.weight", (m, e)
        yield "midlayer.mlp.down_proj.weight", (e, m)
        yield "norm.weight", (e,)
        yield "lm_head.weight", (self.draft_vocab, e)


SHAPES = {
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, 32000, ANSWER),
    "tiny": Shape(64, 96, 4, 4, 2, 16, 288, 64, 24),
}


@dataclass(frozen=True)
class Job:
    """One trial: one side, one length, one process.

    ``online`` runs the frozen target inside the step (ours alone). ``attention``, ``compact`` and ``sharding`` are
    SpecForge's settings of these names; ``compat`` is our objective that reproduces SpecForge's loss, ``recompute`` says whether
    ours computes projections and MLP again in the backward pass.
    """

    side: Side
    length: int
    rows: Rows
    shape: str = "llama-8b"
    device: str = "cuda"
    online: bool = False
    compat: bool = False
    recompute: bool = True
    attention: str = "flex_attention"
    compact: bool = True
    sharding: str = "SHARD_GRAD_OP"
    warmup: int = 3
    steps: int = 5
    ttt: int = 7

    @property
    def name(self) -> str:
        """Key of the trial in files and in the record's figures."""
        words: list[str] = [self.side, self.rows]
        if self.side == "specforge":
            words += [] if self.attention == "flex_attention" else [self.attention]
            words += [] if self.compact else ["fullteacher"]
            words += [] if self.sharding == "SHARD_GRAD_OP" else ["ddp"]
        words += [
            word
            for word, said in (("online", self.online), ("compat", self.compat), ("keep", not self.recompute))
            if said
        ]
        size = f"{self.length // 1024}k" if self.length >= 1024 else str(self.length)
        return "_".join([*words, size])

    def json(self) -> str:
        return json.dumps(asdict(self))


def feature_folder(work: Path, length: int, rows: str) -> Path:
    """Where one job's feature file lies, under as many names as steps are wanted."""
    return work / "features" / f"{length}-{rows}"


def vocabulary(shape: Shape) -> torch.Tensor:
    """``[N]`` ascending target ids of the draft's vocabulary: every so-manieth, since a frequency map is spread out too."""
    return torch.arange(shape.draft_vocab) * (shape.vocab // shape.draft_vocab)


def write_models(work: Path, shape: Shape, device: str) -> None:
    """Target folder (embedding and head only), draft JSON, vocabulary map and first weights of the draft."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*size: int, std: float = 0.02) -> torch.Tensor:
        return (torch.randn(*size, generator=draw, device=device) * std).to("cpu", torch.bfloat16)

    target = work / "target"
    target.mkdir(parents=True, exist_ok=True)
    id_N = vocabulary(shape)
    head_VE = normal(shape.vocab, shape.hidden, std=0.002)
    head_VE[id_N] *= 10
    weights = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden), "lm_head.weight": head_VE}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_text(json.dumps(shape.target_config))
    (work / "draft.json").write_text(json.dumps(shape.draft_config))
    t2d_V = torch.zeros(shape.vocab, dtype=torch.bool)
    t2d_V[id_N] = True
    mapping = {"t2d": t2d_V, "d2t": id_N - torch.arange(len(id_N))}
    write_vocabulary_file(mapping["d2t"], t2d_V, work / "vocabulary.pt")
    state = mapping | {
        name: torch.ones(size, dtype=torch.bfloat16) if len(size) == 1 else normal(*size)
        for name, size in shape.draft_shapes()
    }
    folder = work / "first_weights"
    folder.mkdir(exist_ok=True)
    torch.save({"draft_state_dict": state, "strategy": "eagle3"}, folder / "training_state.pt")


def write_features(work: Path, shape: Shape, length: int, rows: str, copies: int, device: str) -> None:
    """One offline EAGLE-3 feature file of SpecForge's, and links to it under other names: a step each."""
    draw = torch.Generator(device).manual_seed(length)

    def normal(width: int) -> torch.Tensor:
        out_SE = torch.empty(length, width, dtype=torch.bfloat16)
        for begin in range(0, length, 4096):
            count = min(4096, length - begin)
            out_SE[begin : begin + count] = torch.randn(count, width, generator=draw, device=device).to(out_SE.dtype)
        return out_SE

    folder = feature_folder(work, length, rows)
    folder.mkdir(parents=True, exist_ok=True)
    supervised_S = torch.ones(length, dtype=torch.bool)
    if rows == "answers":
        supervised_S[: -min(shape.answer, length // 2)] = False
    id_N = vocabulary(shape)
    pick_S = torch.randint(len(id_N), (length,), generator=torch.Generator().manual_seed(length))
    features = {"hidden": normal(shape.hidden), "aux": normal(3 * shape.hidden)}
    write_feature_file(FeatureSample(id_N[pick_S], supervised_S, features), folder / "sample-0000.ckpt")
    for copy in range(1, copies):
        link = folder / f"sample-{copy:04d}.ckpt"
        link.unlink(missing_ok=True)
        link.symlink_to("sample-0000.ckpt")


def job_arguments(doc: str | None, argv: list[str] | None) -> tuple[Path, Path, Job]:
    """``WORK EVENTS JOB`` of a side's command line."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("work", type=Path, help="folder of training_files")
    parser.add_argument("events", type=Path, help="file to write")
    parser.add_argument("job", type=json.loads, help="settings, a JSON object")
    args = parser.parse_args(argv)
    return args.work, args.events, Job(**args.job)


def main(argv: list[str] | None = None) -> int:
    """``python -m longdraft.bench.training_files WORK SHAPE DEVICE COPIES LENGTH:ROWS ...``: write what is not there yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("copies", type=int)
    parser.add_argument("lengths", nargs="*", metavar="LENGTH:ROWS")
    args = parser.parse_args(argv)
    work, shape, device, copies = args.work, SHAPES[args.shape], args.device, args.copies
    if not (work / "complete").exists():
        write_models(work, shape, device)
        (work / "complete").touch()
    for word in args.lengths:
        length, rows = word.split(":")
        if not (feature_folder(work, int(length), rows) / f"sample-{copies - 1:04d}.ckpt").exists():
            write_features(work, shape, int(length), rows, copies, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
