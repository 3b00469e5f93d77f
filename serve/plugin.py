"""SGLang's entry point: registers ``LONGDRAFT``, the request checks and, on a CPU, what SGLang lacks there.

Importing this module needs no GPU and nothing of SGLang; :func:`register` is called by SGLang in every process.
"""

import sys
import traceback

SGLANG_VERSION = "0.5.14"


def register() -> None:
    """Register with SGLang. SGLang only logs a plugin that fails and goes on without it; this one ends the process."""
    try:
        _register()
    except Exception as error:
        traceback.print_exc()
        print(f"error: the longdraft plugin could not be loaded: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _register() -> None:
    import sglang

    if sglang.__version__ != SGLANG_VERSION:
        raise RuntimeError(
            f"sglang {sglang.__version__} is installed, longdraft works with {SGLANG_VERSION}: pip install sglang=={SGLANG_VERSION}"
        )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from longdraft.serve.algorithm import LongDraftAlgorithm, validate_server_args
    from longdraft.serve.hooks import install_hooks

    def factory(server_args: object) -> type:
        from longdraft.serve.worker import LongDraftWorker

        return LongDraftWorker

    SpeculativeAlgorithm.register(
        "LONGDRAFT", supports_overlap=True, validate_server_args=validate_server_args, spec_class=LongDraftAlgorithm
    )(factory)
    install_hooks()
