"""Sampling by shared noise: ``argmax(log p + G(seed, position, token))`` with counter-based Gumbel noise.

The noise is that of SGLang's seeded sampler (a 32-bit murmur hash of seed, position and token id), so plain seeded decoding
and every draft and verification draw the same, but for one hash in 2^32: see :func:`_noise`.
Legend: N rows, V vocabulary.
"""

import torch

MASK = 0xFFFFFFFF


def _mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = (k * 0xCC9E2D51) & MASK
    k = ((k << 15) | (k >> 17)) & MASK
    h = h ^ ((k * 0x1B873593) & MASK)
    h = ((h << 13) | (h >> 19)) & MASK
    return (h * 5 + 0xE6546B64) & MASK


def murmur_hash(seed_N: torch.Tensor, position_N: torch.Tensor, id_V: torch.Tensor) -> torch.Tensor:
    """32-bit hashes ``[N, V]`` of token ids, as int64; seeds are int64 read as 64 unsigned bits, positions 32 bits."""
    h_N1 = torch.zeros_like(seed_N)[:, None]
    for part_N in (seed_N & MASK, (seed_N >> 32) & MASK, position_N & MASK):
        h_N1 = _mix(h_N1, part_N[:, None])
    h_NV = _mix(h_N1, id_V.long()) ^ 16
    h_NV = h_NV ^ (h_NV >> 16)
    h_NV = (h_NV * 0x85EBCA6B) & MASK
    h_NV = h_NV ^ (h_NV >> 13)
    h_NV = (h_NV * 0xC2B2AE35) & MASK
    return h_NV ^ (h_NV >> 16)


def _noise(hash_NV: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of hashes, float64.

    The largest hash takes the noise of the one below it. The seeded sampler makes infinite noise of it, so that once in
    2^32 / V draws (30,000 at a vocabulary of 128K) it returns that token whatever its probability, zero included.
    """
    uniform_NV = hash_NV.to(torch.float64).div_(MASK).clamp_(max=(MASK - 1) / MASK)
    # log(0) is clamped so that a hash of zero gives a finite, very small noise; this is what the seeded sampler does.
    negative_log_NV = uniform_NV.log_().clamp_(min=torch.finfo(torch.float64).min).neg_()
    return negative_log_NV.log_().neg_()


def torch_gumbel_noise(seed_N: torch.Tensor, position_N: torch.Tensor, id_V: torch.Tensor) -> torch.Tensor:
    """The torch twin of :func:`gumbel_noise`."""
    return _noise(murmur_hash(seed_N, position_N.long(), id_V))


def gumbel_noise(seed_N: torch.Tensor, position_N: torch.Tensor, id_V: torch.Tensor) -> torch.Tensor:
    """The noise of tokens where rows choose, float64 ``[N, V]``.

    Args:
        seed_N: int64 seeds.
        position_N: int64 position of the row's input token.
        id_V: int64 token ids.
    """
    if seed_N.is_cuda:
        from sglang.srt.layers.utils.hash import murmur_hash32

        return _noise(murmur_hash32(seed_N.to(torch.uint64), position_N, id_V))
    return torch_gumbel_noise(seed_N, position_N, id_V)


def torch_gumbel_argmax(logprob_NV: torch.Tensor, seed_N: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """The torch twin of :func:`gumbel_argmax`."""
    id_V = torch.arange(logprob_NV.shape[1], device=logprob_NV.device)
    return torch_gumbel_noise(seed_N, position_N, id_V).add_(logprob_NV).argmax(1)


def gumbel_argmax(logprob_NV: torch.Tensor, seed_N: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """One token a row from ``softmax(logprob)``, a pure function of the distribution, the seed and the position.

    Args:
        logprob_NV: log-probabilities up to a constant a row; -inf excludes a token.
        seed_N: int64 seeds.
        position_N: int64 position of the row's input token.

    Returns:
        int64 token ids ``[N]``.
    """
    id_V = torch.arange(logprob_NV.shape[1], device=logprob_NV.device)
    return gumbel_noise(seed_N, position_N, id_V).add_(logprob_NV).argmax(1)
