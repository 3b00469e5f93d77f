"""The draft's vocabulary: counts, ties, coverage, and the map that SpecForge makes of the same counts."""

from collections import Counter

import pytest
import torch

from longdraft.errors import UserError
from longdraft.train.documents import Document
from longdraft.train.tiny_random import byte_tokenizer
from longdraft.train.vocabulary import TokenCount, VocabularyMap, count_tokens

V = 300
TEXTS = [
    "The court finds that the two contracts differ in one clause.",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    "zebra quiz jukebox: 0123456789",
]


def specforge_map(documents: list[Document], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the installed package makes of documents: its way of counting them, then its own function."""
    from specforge.data import preprocessing

    counter: Counter[int] = Counter()
    for document in documents:
        kept = torch.tensor(document.ids)[torch.tensor(document.supervised)]
        ids, counts = kept.unique(return_counts=True)
        counter.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
    d2t, t2d = preprocessing.process_token_dict_to_mappings(counter, size, V)
    return d2t, t2d


def random_documents(seed: int, highest: int) -> list[Document]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(6):
        length = int(torch.randint(5, 60, (), generator=g))
        ids = torch.randint(0, highest, (length,), generator=g).tolist()
        kept = (torch.rand(length, generator=g) < 0.6).tolist()
        out.append(Document(ids, kept, str(i)))
    return out


@pytest.mark.parametrize("size", [1, 17, 64, 250])
@pytest.mark.parametrize("seed", range(3))
def test_the_map_of_random_counts_is_specforges(seed: int, size: int) -> None:
    documents = random_documents(
        seed, highest=V
    )  # few documents, so ties decide at every size; 250 needs unseen tokens
    ours = VocabularyMap.of(count_tokens(documents, V).top(size), V)
    d2t, t2d = specforge_map(documents, size)
    assert torch.equal(ours.d2t_N, d2t)
    assert torch.equal(ours.t2d_V, t2d)
    assert (ours.d2t_N.dtype, ours.t2d_V.dtype) == (torch.int64, torch.bool)


def test_the_map_of_text_is_specforges() -> None:
    documents = []
    for text in TEXTS:
        ids = byte_tokenizer()(text).input_ids
        documents.append(Document(ids, [i >= 10 for i in range(len(ids))], text[:5]))
    ours = VocabularyMap.of(count_tokens(documents, V).top(20), V)
    d2t, t2d = specforge_map(documents, 20)
    assert torch.equal(ours.d2t_N, d2t)
    assert torch.equal(ours.t2d_V, t2d)


def test_only_what_is_predicted_counts_unless_all_rows_do() -> None:
    documents = [Document([5, 5, 5, 7], [False, False, False, True], "a")]
    assert count_tokens(documents, V).count_V.nonzero().flatten().tolist() == [7]
    assert count_tokens(documents, V, all_rows=True).count_V[[5, 7]].tolist() == [3, 1]


def test_an_empty_document_counts_for_nothing() -> None:
    documents = [Document([], [], "empty"), Document([9], [True], "a")]
    assert count_tokens(documents, V).count_V.nonzero().flatten().tolist() == [9]
    assert count_tokens(documents, V, all_rows=True).documents == 2


def test_an_equal_count_goes_to_the_earlier_document_then_to_the_smaller_id() -> None:
    counted = TokenCount(V)
    counted.add(torch.tensor([90, 80]))
    counted.add(torch.tensor([10, 20]))
    assert counted.top(1).tolist() == [80]
    assert counted.top(3).tolist() == [10, 80, 90]
    assert counted.top(6).tolist() == [0, 1, 10, 20, 80, 90], "unseen tokens fill up from id 0"


def test_coverage_is_the_share_of_counted_tokens() -> None:
    counted = TokenCount(V)
    assert counted.coverage(torch.tensor([1])) == 0
    counted.add(torch.tensor([1, 1, 1, 2]))
    assert counted.coverage(torch.tensor([1])) == 0.75
    assert counted.coverage(counted.top(2)) == 1


def test_the_map_leads_back_to_the_ids() -> None:
    ids = torch.tensor([3, 4, 99, 298])
    assert torch.equal(VocabularyMap.of(ids, V).id_N, ids)


def test_what_must_be_in_is_in_and_more_than_there_are_is_refused() -> None:
    counted = TokenCount(V)
    counted.add(torch.tensor([1, 1, 2, 400]))  # 400 is no token of the target's
    assert counted.top(2, always=[299, 555]).tolist() == [1, 299]
    with pytest.raises(UserError, match="301 tokens, the target's has 300"):
        counted.top(V + 1)


def test_a_large_vocabulary_is_counted_in_no_time() -> None:
    counted = TokenCount(128_000)
    counted.add(torch.arange(100_000) % 128_000)
    assert len(counted.top(32_000)) == 32_000  # the package's own takes minutes at this size
