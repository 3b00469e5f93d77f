"""The benchmark of prefix attention: its cases and checks, without a card."""

import argparse
import itertools

import pytest
import torch
from interpreter import run_interpreted

from longdraft.bench import prefix_attention as bench
from longdraft.kernels.prefix_attention import BACKENDS


def test_shapes_are_read_and_their_bytes_are_the_floors() -> None:
    shapes = [bench.Shape.parse(x) for x in bench.SHAPES]
    assert [s.bytes_read(torch.bfloat16) for s in shapes] == [2_147_483_648, 134_217_728, 512_000_000]
    assert shapes[0].bytes_read(bench.FLOAT8) == 1 << 30
    assert str(shapes[0]) == "b16_c32768_r6"
    with pytest.raises(argparse.ArgumentTypeError, match="'16x32768': write requests x tokens x rows"):
        bench.Shape.parse("16x32768")


@pytest.mark.parametrize(("dtype", "page_size"), [(torch.bfloat16, 1), (bench.FLOAT8, 16)])
def test_requests_own_their_pages_and_the_check_sees_errors(dtype: torch.dtype, page_size: int) -> None:
    shape = bench.Shape(3, 40, 2)
    layers = bench.make_layers(shape, dtype, page_size, "cpu", least=2 * shape.bytes_read(dtype))
    assert len(layers.caches) == 2 and not torch.equal(*(k.float() for k, _ in layers.caches))
    slots = [set(layers.plan.slots(b, 40).tolist()) for b in range(3)]
    assert [len(s) for s in slots] == [40] * 3
    assert not any(a & b for a, b in itertools.combinations(slots, 2))
    seen = list[tuple[torch.Tensor, torch.Tensor]]()

    def attend(*given: object, **more: object) -> None:
        seen.append(BACKENDS["torch"].attend(*given, **more))

    bench.attend_all(layers, attend)
    (out, lse), other = seen
    assert bench.differences((out, lse), (out, lse)) == (0.0, 0.0)
    assert min(bench.differences((out, lse), other)) > 0.01
    assert bench.differences((out, lse / 0.6931), (out, lse))[1] > 0.1, "a base-2 log-sum-exp"
    assert bench.differences((out * 1.01, lse), (out, lse))[0] > 5e-3


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["prefix_attention"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main() == 2
    assert "measured on a GPU, and there is none" in capsys.readouterr().err


def test_sglangs_own_verification_is_called_rightly() -> None:
    run_interpreted("sglang_verify_cases.py")
