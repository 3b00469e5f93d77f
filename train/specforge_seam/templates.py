"""SpecForge's named chat templates: ``data.template=specforge:qwen`` renders and masks with the installed package's own parser.

A name stands for a system prompt and for the marks between which its answers lie; the text itself is rendered by the target's
own chat template, as SpecForge does it. A name of another family than the target's finds no answer, which is an error here.
"""

from collections.abc import Callable
from typing import Any

from longdraft.errors import UserError
from longdraft.schema import nearest

PREFIX = "specforge:"
UNCUT = 1 << 24  # its parser always truncates; ours does so later, keeping the answer
Messages = list[dict[str, str]]


def template_renderer(setting: str, tokenizer: Any) -> Callable[[Messages, str], tuple[list[int], list[bool]]]:
    """``render(messages, where) -> (ids, supervised)`` of a template's name with the prefix.

    Raises:
        UserError: SpecForge is not installed, or has no such template. The renderer raises it for a conversation whose
            answers it cannot find, naming ``where``.
    """
    try:
        from specforge.data.preprocessing import preprocess_conversations
        from specforge.data.template import TEMPLATE_REGISTRY
    except ImportError as error:
        raise UserError(
            f"data.template={setting!r} needs specforge ({error}): install specforge==0.2.0, or use auto"
        ) from None
    name, known = setting.removeprefix(PREFIX), TEMPLATE_REGISTRY.get_all_template_names()
    if name not in known:
        raise UserError(
            f"data.template={setting!r}: SpecForge has no such template{nearest(name, known)}, it has {', '.join(known)}"
        )
    template = TEMPLATE_REGISTRY.get(name)

    def render(messages: Messages, where: str) -> tuple[list[int], list[bool]]:
        try:
            done = preprocess_conversations(tokenizer, [messages], template, max_length=UNCUT)
        except Exception as error:  # chat templates raise their own
            raise UserError(f"{where}: data.template={setting!r} refuses the conversation ({error})") from None
        ids, mask = done["input_ids"][0][0], done["loss_mask"][0][0]
        if not bool(mask.any()) and any(m["role"] == "assistant" for m in messages):
            raise UserError(
                f"{where}: data.template={setting!r} finds no answer in the text that the target's chat template renders: "
                "use the template of the target's family, or auto"
            )
        return ids.tolist(), (mask != 0).tolist()

    return render
