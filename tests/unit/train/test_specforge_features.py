"""SpecForge's feature files: ours through its own reader, store, normaliser and collator, and its own through our reader."""

import gzip
import io
from pathlib import Path

import pytest
import torch

from longdraft.errors import UserError
from longdraft.train.specforge_seam.feature_files import (
    FeatureSample,
    feature_files,
    read_feature_file,
    write_feature_file,
    write_vocabulary_file,
)
from longdraft.train.vocabulary import VocabularyMap

S, E, K, D = 11, 8, 2, 4


def sample(seed: int = 0, count: int = S, dtype: torch.dtype = torch.bfloat16) -> FeatureSample:
    g = torch.Generator().manual_seed(seed)
    shapes = {"aux": (3 * E,), "hidden": (E,), "k": (K, D), "v": (K, D)}
    tensors = {name: torch.randn(count, *shape, generator=g).to(dtype) for name, shape in shapes.items()}
    tensors["position"] = torch.arange(count) + 7
    return FeatureSample(torch.randint(0, 99, (count,), generator=g), torch.rand(count, generator=g) < 0.5, tensors)


def assert_same(a: FeatureSample, b: FeatureSample) -> None:
    assert torch.equal(a.id_S, b.id_S)
    assert torch.equal(a.supervised_S, b.supervised_S)
    assert a.tensors.keys() == b.tensors.keys()
    for name, value in a.tensors.items():
        assert value.dtype == b.tensors[name].dtype
        assert torch.equal(value, b.tensors[name]), name


@pytest.mark.parametrize("name", ["a.ckpt", "deep/a.ckpt.gz"])
def test_a_sample_survives_the_file(name: str, tmp_path: Path) -> None:
    write_feature_file(sample(), tmp_path / name)
    assert_same(read_feature_file(tmp_path / name), sample())
    assert feature_files(tmp_path) == [tmp_path / name], "no work file is left"


def test_specforges_reader_store_and_collator_take_our_files(tmp_path: Path) -> None:
    from specforge.algorithms.eagle3 import data
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    ours = [sample(seed, count) for seed, count in ((0, 11), (1, 7))]
    for i, (one, suffix) in enumerate(zip(ours, (".ckpt", ".ckpt.gz"), strict=True)):
        write_feature_file(one, tmp_path / f"{i}{suffix}")
    reader = data.build_offline_reader(str(tmp_path), run_id="r", ttt_length=3, max_len=9)
    reader.validate_files = True
    refs = reader.read()
    assert [ref.num_tokens for ref in refs] == [11, 7]
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=refs,
        batch_size=2,
        collate_fn=data.build_server_collator(),
        per_sample_transform=data.build_offline_normalizer(7),
    )
    (batch,) = list(loader)
    assert batch.metadata["target_repr"] == "hidden_state"
    for row, one in enumerate(ours):
        assert torch.equal(batch.tensors["input_ids"][row], one.id_S[:7])
        assert torch.equal(batch.tensors["hidden_state"][row], one.tensors["aux"][:7])
        assert torch.equal(batch.tensors["target"][row], one.tensors["hidden"][:7])
        assert batch.tensors["loss_mask"][row, :6].tolist() == one.supervised_S[:6].long().tolist()
        assert batch.tensors["loss_mask"][row, 6] == 0, "its normaliser leaves the last row out"


@pytest.mark.parametrize("packed", [False, True])
def test_our_reader_takes_what_its_capture_writes(packed: bool, tmp_path: Path) -> None:
    raw = {
        "input_ids": torch.arange(S, dtype=torch.int32),
        "loss_mask": (torch.arange(S) > 4).to(torch.int64),
        "hidden_state": torch.randn(1, S, E),
        "aux_hidden_state": torch.randn(1, S, 3 * E),
    }
    path = tmp_path / ("data_0.ckpt.gz" if packed else "data_0.ckpt")
    if packed:
        buffer = io.BytesIO()
        torch.save(raw, buffer)
        with gzip.open(path, "wb") as file:
            file.write(buffer.getvalue())
    else:
        torch.save(raw, path)
    read = read_feature_file(path)
    assert read.tensors.keys() == {"hidden", "aux"}
    assert torch.equal(read.tensors["aux"], raw["aux_hidden_state"][0])
    assert read.id_S.dtype == torch.int64
    assert read.supervised_S.tolist() == [i > 4 for i in range(S)]


def test_only_a_views_own_rows_are_written(tmp_path: Path) -> None:
    large = torch.zeros(1000, E)
    write_feature_file(
        FeatureSample(torch.zeros(2).long(), torch.ones(2).bool(), {"hidden": large[:2]}), tmp_path / "a.ckpt"
    )
    assert (tmp_path / "a.ckpt").stat().st_size < large.numel()


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nothing", "cannot be read as tensors"),
        (
            {"input_ids": torch.zeros(3), "loss_mask": torch.zeros(3), "hidden_state": Evil()},
            "cannot be read as tensors",
        ),
        ([1, 2], "holds a list"),
        ({"input_ids": torch.zeros(3)}, "no tensor 'loss_mask'"),
        ({"input_ids": torch.zeros(3), "loss_mask": torch.zeros(3)}, "none of hidden_state"),
        (
            {"input_ids": torch.zeros(3), "loss_mask": torch.zeros(3), "hidden_state": torch.zeros(1, 4, 2)},
            "hidden_state has 4 rows, input_ids has 3",
        ),
    ],
)
def test_what_is_no_feature_file_is_one_line_and_runs_nothing(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match=message) as error:
        read_feature_file(path)
    assert "\n" not in str(error.value)
    assert "run" not in capsys.readouterr().out.split()


def test_an_empty_folder_and_another_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\.ckpt or \.ckpt\.gz"):
        feature_files(tmp_path)
    with pytest.raises(UserError, match=r"name it with \.ckpt"):
        write_feature_file(sample(), tmp_path / "a.pt")


def test_specforge_loads_our_vocabulary_and_counts_our_files_alike(tmp_path: Path) -> None:
    from specforge.training import vocab_mapping as mapping

    from longdraft.train.vocabulary import TokenCount

    counted = TokenCount(99)
    for i in range(3):
        write_feature_file(sample(i), tmp_path / "features" / f"{i}.ckpt")
        counted.add(sample(i).id_S, sample(i).supervised_S)
    theirs = mapping.count_effective_feature_tokens(str(tmp_path / "features"), target_vocab_size=99)
    assert {i: c for i, c in enumerate(counted.count_V.tolist()) if c} == dict(theirs)
    vocabulary = VocabularyMap.of(counted.top(5), 99)
    write_vocabulary_file(vocabulary.d2t_N, vocabulary.t2d_V, tmp_path / "map.pt")
    loaded = torch.load(tmp_path / "map.pt", weights_only=True)  # as its drafts' load_vocab_mapping does
    assert torch.equal(loaded["d2t"], vocabulary.d2t_N)
    assert torch.equal(loaded["t2d"], vocabulary.t2d_V)
