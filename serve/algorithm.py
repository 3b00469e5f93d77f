"""``LONGDRAFT`` as SGLang's speculative algorithm: its answers to SGLang's questions and what it makes of the arguments."""

import logging
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from longdraft.serve.checks import check_server_args, exit_on_user_error
from longdraft.serve.settings import ServeSettings, read_environment
from longdraft.serve.tree_shape import parse_tree

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 4
DEFAULT_RUNNING_REQUESTS = 48


class LongDraftAlgorithm(CustomSpecAlgo):
    """Answers ``is_standalone`` alone: the target keeps no hidden states and its radix keys stay what they are."""

    def is_standalone(self) -> bool:
        return True

    def create_future_map(
        self, device: Any, req_to_token_pool: Any, needs_cpu_seq_lens: bool = True, **kwargs: Any
    ) -> Any:
        from longdraft.serve.relay import LengthRelay

        return LengthRelay(device, self, req_to_token_pool, needs_cpu_seq_lens, **kwargs)

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Set what speculation decides. Not SGLang's EAGLE handler, which forces its own shapes."""
        settings = read_environment()
        shape = parse_tree(settings.tree)
        steps = shape.depth if shape else server_args.speculative_num_steps or DEFAULT_STEPS
        server_args.speculative_num_steps = steps
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = shape.places if shape else stride(settings, steps)
        reason = without_overlap(server_args, settings)
        if reason and not server_args.disable_overlap_schedule:
            logger.warning("longdraft: the overlap schedule is off, %s", reason)
            server_args.disable_overlap_schedule = True
        graphs = server_args.cuda_graph_config
        graphs.prefill.backend = Backend.DISABLED
        # FlashInfer plans on the host and torch reads lengths there: neither can be captured.
        hosted = settings.attention in ("flashinfer", "torch")
        capturable = server_args.device == "cuda" and not hosted
        if capturable and graphs.decode.backend != Backend.DISABLED:
            graphs.decode.backend = Backend.FULL
        else:
            server_args.disable_cuda_graph = True
            graphs.decode.backend = Backend.DISABLED
        server_args.enable_mixed_chunk = False
        if (
            server_args.tp_size > 1
        ):  # SGLang may leave a layer's sum over ranks to the next layer, and a draft looks in between
            server_args.enforce_disable_flashinfer_allreduce_fusion = True
            server_args.flashinfer_allreduce_fusion_backend = None
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_RUNNING_REQUESTS


def stride(settings: ServeSettings, steps: int) -> int:
    """Most tokens that a step of chains returns: beside views also what may be pending, which a full verification runs over."""
    chain = 1 if settings.self_draft else steps + 1
    return chain + settings.pending if settings.viewed else chain


def without_overlap(server_args: Any, settings: ServeSettings) -> str | None:
    """Why rounds have to wait for the host; None where they need not (:mod:`longdraft.serve.device_step`)."""
    if server_args.speculative_draft_model_path is None and not settings.self_draft:
        return "the lookup drafter reads the requests' tokens on the host"
    if server_args.device == "cuda" and settings.attention in ("flashinfer", "torch"):
        return f"attention={settings.attention!r} reads lengths on the host"
    if server_args.enable_forward_pass_metrics:
        return "--enable-forward-pass-metrics reads lengths on the host"
    return None


def validate_server_args(server_args: Any) -> None:
    """Refuse what cannot be served, in one line, before anything is loaded."""
    exit_on_user_error(lambda: check_server_args(server_args))
