"""The benchmarks of tree attention and of LongSpec's latency figure: their cases, bytes and checks, without a card."""

import argparse
from collections.abc import Callable

import pytest
import torch

from longdraft.bench import longspec_latency, tree_attention
from longdraft.bench.prefix_attention import differences
from longdraft.kernels.tree_bits import unpack_bits


def test_shapes_are_read_and_their_bytes_are_the_floors() -> None:
    shapes = [tree_attention.Shape.parse(x) for x in tree_attention.SHAPES]
    assert [str(s) for s in shapes] == ["b16_t69", "b1_t69", "b16_t6", "b16_t128"]
    moved = shapes[0].bytes_moved()
    assert {name: round(x / 1e6, 1) for name, x in moved.items()} == {"tree": 22.8, "merge": 27.6, "onto": 32.0}
    assert moved["tree"] + moved["merge"] > 1.5 * moved["onto"]
    with pytest.raises(argparse.ArgumentTypeError, match="'16': write requests x new tokens"):
        tree_attention.Shape.parse("16")


def test_every_layer_is_another_and_the_kernels_are_those_of_one_verification() -> None:
    shape = tree_attention.Shape(2, 70)
    layers, plan, bits_TW = tree_attention.make_batch(shape, "cpu", least=2 * shape.bytes_moved()["tree"])
    assert len(layers) == 2 and not torch.equal(layers[0].q_THD, layers[1].q_THD)
    mask = unpack_bits(bits_TW.view(2, 70, 2), 70)
    assert mask[:, :, 0].all() and mask.diagonal(dim1=1, dim2=2).all() and not mask.triu(1).any()
    found = {name: attend(layers[0]) for name, attend in tree_attention.kernels(plan, bits_TW).items()}
    twins = {name: attend(layers[0]) for name, attend in tree_attention.kernels(plan, bits_TW, twin=True).items()}
    for name in ("tree", "merge", "onto"):
        assert differences(found[name], twins[name]) == (0.0, 0.0)
    assert min(differences(found["tree"], found["onto"])) > 0.01
    seen = list[tree_attention.Layer]()

    def attend(layer: tree_attention.Layer) -> tree_attention.Part:
        seen.append(layer)
        return layer.prefix

    tree_attention.all_layers(attend, layers)
    assert seen == layers


def test_the_beam_tree_has_the_papers_nodes() -> None:
    parents = longspec_latency.beam_parents(longspec_latency.WIDTHS)[0]
    assert len(parents) == 69 and parents[0] == -1 and (parents[1:5] == 0).all()
    edges = [0, 1, 5, 21, 37, 53, 69]
    for before, first, last in zip(edges, edges[1:], edges[2:], strict=False):
        assert ((parents[first:last] >= before) & (parents[first:last] < first)).all()


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, longspec_latency.CLOSE)], ids=str
)
def test_all_ways_compute_one_attention(dtype: torch.dtype, allowed: float) -> None:
    case = longspec_latency.Verification.build(600, 2, [4, 16, 3], "cpu", dtype)
    assert case.visible_TN.shape == (24, 624) and case.visible_TN[:, :600].all()
    errors = longspec_latency.errors(case, longspec_latency.ways(case, ["torch"]))
    assert set(errors) == {"dense", "grouped", "sdpa", "hybrid_torch"}
    assert max(errors.values()) < allowed, errors


def test_the_check_sees_another_mask() -> None:
    case = longspec_latency.Verification.build(40, 1, [4, 4], "cpu", torch.float32)
    case.visible_TN[:, 40:] = True
    errors = longspec_latency.errors(case, longspec_latency.ways(case, ["torch"]))
    assert min(errors[name] for name in longspec_latency.DENSE) > 10 * longspec_latency.CLOSE


@pytest.mark.parametrize("main", [tree_attention.main, longspec_latency.main])
def test_without_a_card_they_say_so(
    main: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 2
    assert "on a GPU, and there is none" in capsys.readouterr().err
