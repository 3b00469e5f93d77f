"""Floating-point operations of a training step from its shapes, and the device's peak: together, the share that is used (MFU).

A multiplication and its addition are two operations. Only products of matrices count, and causal attention counts the half that
is not masked; what is computed again in the backward pass does not count, as usual for MFU.

Legend, for one micro-batch: T tokens, n supervised rows, L_d length of document d, E hidden size, I inner size, H and K query and
key/value heads of size D, W = H D, C = K D, V scored vocabulary, S layers of the target, k steps of the training-time test.
"""

from itertools import pairwise

import torch

from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.target import TargetSpec
from longdraft.train.config import TrainSettings
from longdraft.train.samples import Packed

# Dense bfloat16 peaks in TFLOP/s as their makers state them; the first name that a device's name contains holds.
PEAK_TFLOPS = {"B200": 2250.0, "H200": 989.0, "GH200": 989.0, "H100": 989.0, "A100": 312.0}


def peak_tflops(settings: TrainSettings, device: torch.device) -> float | None:
    """``engine.peak_tflops``, or the device's own; None for one that is not in the table, as a CPU."""
    if settings.engine.peak_tflops is not None or device.type != "cuda":
        return settings.engine.peak_tflops
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def micro_batch_flops(spec: TargetSpec, settings: TrainSettings, batch: Packed) -> float:
    """Operations of one micro-batch: the target's forward pass (none with stored features) and the draft's three passes' worth.

    target      T S (4 E (W + C) + 6 E I) + 2 S W sum(L_d^2)
    LongSpec    3 (T (4 E (W + X) + 4 E C + 6 E I) + 2 X sum(L_d^2) + 4 W T w), w the window, X of the cross-attention as W; head 4 n E V, as much again from a
                teacher (2 n E V); a view counts as the whole context
    EAGLE-3     3 (T (6 E^2 + 8 E C) + n k (6 E W + 6 E I) + 2 W k sum(n_d L_d)); head 6 n k E V of the draft's vocabulary, its
                teacher 2 n k E V, and the target's choices 2 n E V of its own
    """
    lengths = [b - a for a, b in pairwise(batch.cu)]
    squares, tokens, rows = float(sum(n * n for n in lengths)), len(batch.id_T), batch.supervised
    e, inner, v = spec.hidden_size, spec.intermediate_size, spec.vocab_size
    w, c = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    mlp, target = 6 * e * inner, 0.0
    if batch.capture is None:
        target = tokens * spec.num_layers * (4 * e * (w + c) + mlp) + 2.0 * spec.num_layers * w * squares
    if settings.draft.arch == "eagle3":
        steps, scored = settings.ttt.steps, settings.eagle3.draft_vocab_size or v
        attended = squares * rows / max(tokens, 1)  # supervised rows are taken as spread evenly
        draft = tokens * (6 * e * e + 8 * e * c) + rows * steps * (6 * e * w + mlp) + 2.0 * w * steps * attended
        return target + 3.0 * draft + 8.0 * rows * steps * e * scored + 2.0 * rows * e * v
    v = settings.draft.head_tokens or v
    window = min(settings.draft.window, max(lengths, default=0))
    own = LongSpecConfig(spec, settings.draft.architecture)
    x = own.cross_heads * spec.head_dim
    draft = tokens * (4 * e * (w + x) + 4 * e * c + mlp + 4 * w * window) + 2.0 * x * squares
    head = 4.0 if settings.objective.name == "ce" else 6.0
    return target + 3.0 * draft + head * rows * e * v
