"""What a sharded target lends its draft lies on the run's device, wherever the model was made."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny import tiny_target

from longdraft.train.engines.group import Group
from longdraft.train.sharded_target import ShardedTarget


class LibraryOfOneRank:
    """DeepSpeed's part of it: nothing is spread, and what is to be run goes to the device."""

    class zero:  # noqa: N801
        class GatheredParameters:
            def __init__(self, weights: list[Any], enabled: bool) -> None:
                assert not enabled

            def __enter__(self) -> None:
                pass

            def __exit__(self, *error: object) -> None:
                pass

    def initialize(self, model: Any, **given: Any) -> tuple[Any]:
        return (model.to("meta"),)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_lie_on_the_runs_device(tied: bool) -> None:
    model = tiny_target("llama", tie_word_embeddings=tied).model
    before = model.get_input_embeddings().weight.detach().clone()
    group = cast(Group, SimpleNamespace(device=torch.device("meta")))
    target = ShardedTarget(model, "tiny", 300, False, group, LibraryOfOneRank())
    assert target.embedding_VE.device == target.head_VE.device == target.device == torch.device("meta")
    assert target.embedding_VE.shape == target.head_VE.shape == before.shape


def test_a_copy_outlives_the_weight_even_on_the_same_device() -> None:
    model = tiny_target("llama").model
    group = cast(Group, SimpleNamespace(device=torch.device("cpu")))
    target = ShardedTarget(model, "tiny", 300, False, group, LibraryOfOneRank())
    weight = target.embedding_VE
    assert weight.device.type == "cpu"
    assert torch.equal(weight, tiny_target("llama").embedding_VE)
    assert model.get_input_embeddings().weight.device.type == "meta"  # what it ran from is gone
