"""longdraft: long-context speculative decoding, from training a draft to serving it in SGLang."""

__version__ = "0.1.0"
