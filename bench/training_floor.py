"""The least that a step of EAGLE-3 training can cost on an H200: its matrix products, and the optimizer's bytes.

A backward pass costs two products for each of the forward's, and 2.5 times the forward in attention; the features' own gradient
is not wanted. Legend: S rows of the document, n rows that run queries, MLP and head, K steps, E hidden, N draft vocabulary.
"""

from longdraft.bench.training_files import Job, Shape

FLOPS, BYTES = 989e12, 4.3e12  # dense bf16 a second; bytes a second as measured (design, section 5)
OPTIMIZER_BYTES = (
    34  # a weight: gradient read, master and two moments read and written in float32, the bf16 copy written
)


def queried_rows(job: Job, shape: Shape) -> int:
    """n: SpecForge runs every row whatever is supervised; ours runs the supervised ones."""
    if job.side == "specforge" or job.rows == "all":
        return job.length
    return min(shape.answer, job.length // 2)


def draft_weights(shape: Shape) -> int:
    """Trained weights."""
    total = 0
    for _, size in shape.draft_shapes():
        total += size[0] * (size[1] if len(size) > 1 else 1)
    return total


def step_flops(job: Job, shape: Shape) -> dict[str, float]:
    """Floating-point operations of one step by part."""
    e, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    s, k = job.length, job.ttt
    n = queried_rows(job, shape)
    pairs = n * (s - n) + n * n / 2
    parts = {
        "fc": 2 * 2 * 3 * e * e * s,
        "keys_values": 3 * 2 * 2 * e * 2 * kv * (s + (k - 1) * n),
        "queries_output": 3 * 2 * (2 * e * q + q * e) * n * k,
        "attention": 3.5 * 4 * q * pairs * k,
        "mlp": 3 * 2 * 3 * e * shape.intermediate * n * k,
        "head": 3 * 2 * e * shape.draft_vocab * n * k,
        "teacher": 2 * e * (shape.draft_vocab + shape.vocab) * n,
    }
    if job.online:
        layer = e * (2 * q + 2 * kv) + 3 * e * shape.intermediate
        parts["target"] = shape.layers * (2 * layer * s + 4 * q * s * s / 2)
    return {name: float(value) for name, value in parts.items()}


def floor_seconds(job: Job, shape: Shape) -> float:
    """Seconds of a step at the card's peak rates."""
    return sum(step_flops(job, shape).values()) / FLOPS + OPTIMIZER_BYTES * draft_weights(shape) / BYTES
