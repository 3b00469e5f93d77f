"""A 16-bit draft beside a float32 one of the same weights, at SmolLM2-135M's shapes: ``from half_precision import ...``."""

import torch
from tiny import tiny_target

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.train.config import DataSettings, ObjectiveSettings, TargetSettings, TrainSettings
from longdraft.train.engine import Group, TorchEngine
from longdraft.train.engine_settings import EngineSettings
from longdraft.train.first_weights import build_draft
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.objective import longspec_loss
from longdraft.train.positions import lag_of_step
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
Gradients = dict[str, torch.Tensor]


def wide_target(device: str = "cpu") -> FrozenTarget:
    """One random layer of SmolLM2's shapes, in float32: what the recipe's target is to its draft."""
    target = tiny_target("llama", num_hidden_layers=1, **SMOLLM2)
    target.model.to(device)
    return target


def pair(target: FrozenTarget, window: int = 512) -> tuple[LongSpecDraft, LongSpecDraft]:
    """Drafts as a run builds them, bfloat16 and float32, of the same (16-bit) weights."""
    half, full = (
        build_draft(
            TrainSettings(
                target=TargetSettings(path="none"),
                data=DataSettings(train="none"),
                draft={"window": window},
                engine=EngineSettings(dtype=dtype),
            ),
            target,
        )
        for dtype in ("bfloat16", "float32")
    )
    full.load_state_dict(half.state_dict())
    return half, full


def documents(lengths: list[int], vocabulary: int, every: int = 1, seed: int = 0) -> Packed:
    """Random tokens; every n-th row is supervised, so that a wide vocabulary costs a CPU seconds."""
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    ids = torch.randint(0, vocabulary, (cu[-1],), generator=torch.Generator().manual_seed(seed))
    label = torch.where(torch.arange(cu[-1]) % every == every - 1, ids.roll(-1), IGNORED)
    label[[end - 1 for end in cu[1:]]] = IGNORED
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Packed(ids, positions, label, cu, [str(i) for i in range(len(lengths))])


def loss_and_gradients(
    draft: LongSpecDraft, target: FrozenTarget, batch: Packed, lag: int, objective: str
) -> tuple[float, Gradients]:
    """Loss a supervised token and the float32 gradients that the optimizer would see."""
    loss = longspec_loss(draft, target, batch.to(target.device), lag, ObjectiveSettings(name=objective)).loss
    loss = loss / batch.supervised
    draft.zero_grad(set_to_none=True)
    loss.backward()
    grads = {name: p.grad.float() for name, p in draft.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def check_gradients(half: tuple[float, Gradients], full: tuple[float, Gradients]) -> None:
    """Bfloat16 rounds each figure by up to 0.4 percent: the same direction and size, and every weight's finite."""
    assert abs(half[0] - full[0]) < 0.01 * full[0]
    assert half[1].keys() == full[1].keys()
    for name, want in full[1].items():
        got = half[1][name]
        assert bool(torch.isfinite(got).all()), name
        cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0)
        assert float(cosine) > 0.99, (name, float(cosine))
        assert abs(float(got.norm() / want.norm()) - 1) < 0.03, (name, float(got.norm()), float(want.norm()))


def short_run(draft: LongSpecDraft, target: FrozenTarget, batches: list[Packed], steps: int, lr: float) -> list[float]:
    """Train as the loop does, with warm-up, over the batches in turn; the loss a token of every step."""
    settings = TrainSettings(target=TargetSettings(path="none"), data=DataSettings(train="none"))
    method = LongSpecMethod(settings, target, draft)
    engine = TorchEngine(method, settings.optim, Group(EngineSettings(device=target.device.type)))
    losses = []
    for step in range(1, steps + 1):
        batch = batches[step % len(batches)]
        lag = lag_of_step(step, 1, 2, 0)
        out = longspec_loss(draft, target, batch.to(target.device), lag, ObjectiveSettings(name="kl", rows="all"))
        engine.backward(out.loss / batch.supervised)
        norm = engine.step(lr * min(step / 5, 1))
        assert norm < float("inf"), f"step {step}, documents {batch.cu}: gradient norm {norm}"
        losses.append(float(out.loss.detach()) / batch.supervised)
    return losses
