"""Context buckets: every figure that depends on the length of the context is given by these."""

BUCKETS = ((2048, "<2K"), (8192, "2K-8K"), (32768, "8K-32K"), (1 << 62, ">32K"))
BUCKET_NAMES = tuple(name for _, name in BUCKETS)
TOTAL = "all"


def bucket_of(length: int) -> str:
    """Name of the context bucket of so many tokens."""
    return next(name for limit, name in BUCKETS if length < limit)
