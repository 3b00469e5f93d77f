"""python faulty_launch.py [SGLang arguments]: the server with a drafter that raises now and then, verifications that fail, and no
memory left behind some of them.

The scheduler process imports this file again, so the patches below are in force there.
"""

import sys
from typing import Any

import torch

from longdraft.serve import device_step, device_verify, view_step
from longdraft.serve.drafters import longspec
from longdraft.serve.sampling import target_choice as choices

calls = {"propose": 0, "choice": 0, "gain": 0}
process, choose = choices.process_logits, device_verify.choose_running


def sometimes_raising(propose: Any) -> Any:
    def planted(self: Any, requests: Any, pick: Any) -> Any:
        calls["propose"] += 1
        if calls["propose"] % 3 == 0:
            raise RuntimeError("planted: the drafter fails")
        return propose(self, requests, pick)

    return planted


def fail_at_times(reqs: Any, drafted: bool) -> None:
    calls["choice"] += 1
    if calls["choice"] % 7 == 0 and drafted:
        raise RuntimeError("planted: a drafted verification fails")
    if any(r.sampling_params.max_new_tokens == 31 and len(r.output_ids) >= 5 for r in reqs):
        raise RuntimeError("planted: every verification of this request fails")
    if any(r.sampling_params.max_new_tokens == 33 for r in reqs):
        raise RuntimeError("planted: not even the first token of this request can be chosen")


def once_raising(logits: Any, reqs: Any, drafts: Any, tree: Any = None) -> Any:
    fail_at_times(reqs, any(drafts))
    return process(logits, reqs, drafts, tree)


def running_raising(logits: Any, reqs: Any, params: Any, position: Any, kept: bool = True) -> Any:
    """Rounds on the device, whose greedy choices need no processed logits."""
    fail_at_times(reqs, position.shape[1] > 1)
    return choose(logits, reqs, params, position, kept)


def at_times_without_memory(gain: Any) -> Any:
    def planted(self: Any, roster: Any, last: Any) -> Any:
        calls["gain"] += last.id_BK.shape[1] > 0  # without drafts it is the last resort
        if calls["gain"] % 5 == 2 and last.id_BK.shape[1]:
            raise torch.OutOfMemoryError("planted: no memory behind a verification of drafts")
        return gain(self, roster, last)

    return planted


def without_memory(returned: Any) -> Any:
    def planted(self: Any, batch: Any, *given: Any) -> Any:
        if any(r.sampling_params.max_new_tokens == 35 and len(r.output_ids) >= 5 for r in batch.reqs):
            raise torch.OutOfMemoryError("planted: whatever is tried for this batch finds no memory")
        return returned(self, batch, *given)

    return planted


view_step.ViewStep._gain = at_times_without_memory(view_step.ViewStep._gain)  # type: ignore[method-assign]
device_step.DeviceStep._returned = without_memory(device_step.DeviceStep._returned)  # type: ignore[method-assign]
for name in ("propose", "propose_running"):
    setattr(longspec.LongSpecDrafter, name, sometimes_raising(getattr(longspec.LongSpecDrafter, name)))
choices.process_logits, device_verify.choose_running = once_raising, running_raising

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
