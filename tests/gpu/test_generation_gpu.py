"""Generation on a GPU: graph-captured steps over flash attention say what one plain pass says; tokens a second are printed."""

import time

import pytest
import torch
from tiny import tiny_target

from longdraft.train.generation.decoding import Row, decode_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def asked(lengths: list[int], vocabulary: int) -> list[Row]:
    g = torch.Generator().manual_seed(0)
    return [Row(torch.randint(0, vocabulary, (n,), generator=g).tolist(), []) for n in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_are_the_targets_choices(family: str, dtype: torch.dtype) -> None:
    """In 16 bit a choice may differ from the plain pass's only where the two logits lie within rounding."""
    model = tiny_target(family).model.to("cuda", dtype)
    rows = asked([9, 30, 9, 17, 41, 200, 1], 256)
    decode_rows(model, rows, 70, [], lambda logits, *_: logits.argmax(-1), lambda _: False)
    for row in rows:
        assert len(row.answer) == 70
        ids = torch.tensor([[*row.prompt, *row.answer]], device="cuda")
        logits = model(ids).logits[0, len(row.prompt) - 1 : -1].float()
        gap = logits.max(-1).values - logits.gather(1, ids[0, len(row.prompt) :, None])[:, 0]
        assert float(gap.max()) <= (1e-3 if dtype == torch.float32 else 0.05 * float(logits.abs().max()))


def test_rows_leave_and_the_others_go_on() -> None:
    model = tiny_target("llama").model.to("cuda", torch.bfloat16)
    rows = asked([20] * 40, 256)
    whole = asked([20] * 40, 256)
    decode_rows(model, whole, 100, [], lambda logits, *_: logits.argmax(-1), lambda _: False)
    early = {tuple(row.answer[:32]) for row in whole[:25]}
    decode_rows(model, rows, 100, [], lambda logits, *_: logits.argmax(-1), lambda answer: tuple(answer[:32]) in early)
    assert [len(row.answer) for row in rows[:25]] == [32] * 25
    same = sum(a.answer == b.answer for a, b in zip(rows[25:], whole[25:], strict=True))
    assert same >= 10  # another batch size rounds differently, and a random model's near ties flip


@pytest.mark.parametrize(("count", "prompt", "new"), [(2048, 128, 192), (400, 2048, 128)])
def test_tokens_a_second(count: int, prompt: int, new: int) -> None:
    model = tiny_target("llama", max_position_embeddings=8192, **SMOLLM2).model.to("cuda", torch.bfloat16)
    rows = asked([prompt] * count, 49152)
    torch.cuda.synchronize()
    began = time.monotonic()
    decode_rows(model, rows, new, [], lambda logits, *_: logits.argmax(-1), lambda _: False)
    seconds = time.monotonic() - began
    print(f"{count} x {prompt} + {new}: {seconds:.2f} s, {count * new / seconds:,.0f} new tokens/s")
    assert all(len(row.answer) == new for row in rows)
