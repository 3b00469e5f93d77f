"""Shared noise: the hash against an independent one, and the choice as a pure function of seed and position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.kernels.gumbel import MASK, gumbel_argmax, gumbel_noise, murmur_hash, torch_gumbel_argmax


def rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (32 - bits)) & MASK


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32-bit of whole words, seed 0, from its published description."""
    h = 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & MASK
        h = rotate(h ^ rotate(k, 15) * 0x1B873593 & MASK, 13) * 5 + 0xE6546B64 & MASK
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & MASK
    h = (h ^ h >> 13) * 0xC2B2AE35 & MASK
    return h ^ h >> 16


def key(seed: int, position: int, token: int) -> bytes:
    return b"".join(
        (seed % (1 << 64)).to_bytes(8, "little") if i == 0 else x.to_bytes(4, "little")
        for i, x in enumerate((seed, position, token))
    )


def token_with_hash(seed: int, position: int, wanted: int) -> int:
    """The token id whose hash is ``wanted`` there: every step of the hash can be undone."""
    h = 0
    for i in range(0, 12, 4):
        k = int.from_bytes(key(seed, position, 0)[i : i + 4], "little") * 0xCC9E2D51 & MASK
        h = rotate(h ^ rotate(k, 15) * 0x1B873593 & MASK, 13) * 5 + 0xE6546B64 & MASK
    g = wanted ^ wanted >> 16
    g = g * pow(0xC2B2AE35, -1, 1 << 32) & MASK
    g ^= g >> 13 ^ g >> 26
    g = g * pow(0x85EBCA6B, -1, 1 << 32) & MASK
    g = g ^ g >> 16 ^ 16
    k = rotate((g - 0xE6546B64) * pow(5, -1, 1 << 32) & MASK, 19) ^ h
    k = rotate(k * pow(0x1B873593, -1, 1 << 32) & MASK, 17)
    return k * pow(0xCC9E2D51, -1, 1 << 32) & MASK


def place_of_hash(wanted: int, vocab: int) -> tuple[int, int]:
    """A position and a token below ``vocab`` with that hash under seed 7."""
    for position in range(1 << 20):
        token = token_with_hash(7, position, wanted)
        if token < vocab:
            assert murmur3(key(7, position, token)) == wanted
            return position, token
    raise AssertionError("no such place")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), position=st.integers(0, MASK))
def test_the_hash_is_murmur3_of_seed_position_and_token(seed: int, position: int) -> None:
    got = murmur_hash(torch.tensor([seed]), torch.tensor([position]), torch.arange(5))[0].tolist()
    assert got == [murmur3(key(seed, position, token)) for token in range(5)]


def test_the_independent_hash_knows_published_values() -> None:
    assert murmur3(b"test") == 0xBA6BD213
    assert murmur3(b"\xff\xff\xff\xff") == 0x76293B50
    assert murmur3(b"\x00\x00\x00\x00") == 0x2362F9DE


def test_hashes_are_uniform() -> None:
    """Mean and lag correlation of 200,000 values, each within five standard errors."""
    n, vocab = 200, 1000
    uniform = murmur_hash(torch.full((n,), 3), torch.arange(n), torch.arange(vocab)).double().flatten() / MASK
    error = (n * vocab) ** -0.5
    assert abs(float(uniform.mean()) - 0.5) < 5 * error * 12**-0.5
    centred = (uniform - 0.5) * 12**0.5
    for lag in (1, vocab):  # neighbouring tokens, neighbouring positions
        assert abs(float((centred[lag:] * centred[:-lag]).mean())) < 5 * error


def test_the_choice_depends_on_its_own_row_alone() -> None:
    """Batch, order and the other rows' seeds change nothing."""
    g = torch.Generator().manual_seed(0)
    logprob = torch.randn(40, 50, generator=g).log_softmax(-1)
    seed, position = torch.randint(0, 1 << 60, (40,), generator=g), torch.randint(0, 9999, (40,), generator=g)
    together = gumbel_argmax(logprob, seed, position)
    alone = torch.cat([gumbel_argmax(logprob[i : i + 1], seed[i : i + 1], position[i : i + 1]) for i in range(40)])
    order = torch.randperm(40, generator=g)
    assert torch.equal(together, alone)
    assert torch.equal(together[order], gumbel_argmax(logprob[order], seed[order], position[order]))


def test_seed_and_position_each_change_the_noise() -> None:
    flat, n = torch.zeros(300, 1000), 300
    base = gumbel_argmax(flat, torch.full((n,), 5), torch.arange(n))
    for seed, shift in ((6, 0), (5, 1), (5 + (1 << 32), 0)):  # the upper half of a seed counts too
        other = gumbel_argmax(flat, torch.full((n,), seed), torch.arange(n) + shift)
        assert int((base == other).sum()) < 10
    shifted = gumbel_argmax(flat, torch.full((n,), 5), torch.arange(n) + 1)
    assert torch.equal(shifted[:-1], base[1:])


def test_a_constant_added_to_a_row_changes_nothing() -> None:
    logprob = torch.randn(20, 30, generator=torch.Generator().manual_seed(2)).double()
    seed, position = torch.full((20,), 11), torch.arange(20)
    assert torch.equal(gumbel_argmax(logprob, seed, position), gumbel_argmax(logprob + 3.0, seed, position))


@pytest.mark.parametrize("wanted", [0, MASK], ids=["smallest hash", "largest hash"])
def test_an_excluded_token_is_never_chosen_even_at_the_ends_of_the_hash(wanted: int) -> None:
    """A uniform of exactly 1 is infinite noise, and -inf + inf is NaN, which argmax takes: one token in 30,000."""
    vocab = 1 << 17
    position, token = place_of_hash(wanted, vocab)
    logprob = torch.full((1, vocab), -50.0)
    logprob[0, token], logprob[0, 5] = float("-inf"), 0.0
    assert token != 5
    assert torch_gumbel_argmax(logprob, torch.tensor([7]), torch.tensor([position])).tolist() == [5]


def test_the_largest_hash_is_finite_noise() -> None:
    """A token of probability e^-50 does not win against a certain one; with the finite noise of 22 nats it cannot."""
    position, token = place_of_hash(MASK, 1 << 17)
    logprob = torch.full((1, 1 << 17), -50.0)
    logprob[0, 5] = 0.0
    assert torch_gumbel_argmax(logprob, torch.tensor([7]), torch.tensor([position])).tolist() == [5]
    logprob[0, token] = -1.0
    assert torch_gumbel_argmax(logprob, torch.tensor([7]), torch.tensor([position])).tolist() == [token]


def test_noise_belongs_to_a_token_whatever_is_asked_beside_it() -> None:
    """A ranked head asks for its own ids only; the choice is the argmax of log-probability and noise."""
    seed, position = torch.tensor([5, -9]), torch.tensor([3, 1 << 20])
    whole = gumbel_noise(seed, position, torch.arange(1000))
    some = torch.tensor([999, 0, 17])
    assert torch.equal(gumbel_noise(seed, position, some), whole[:, some])
    logprob = torch.randn(2, 1000, generator=torch.Generator().manual_seed(4)).double()
    assert torch.equal((logprob + whole).argmax(1), gumbel_argmax(logprob, seed, position))
