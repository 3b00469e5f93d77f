"""An EAGLE-3 draft's JSON as SpecForge reads it, and its JSON as ours."""

from typing import Any

from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.eagle3_config import Eagle3Config
from longdraft.errors import UserError

# Its YaRN has no defaults: a missing key is None in its arithmetic. These are what the missing ones mean.
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def specforge_json(config: Eagle3Config) -> dict[str, Any]:
    """The draft's JSON for ``model.draft_model_config`` of SpecForge's trainer.

    Raises:
        UserError: a draft that its ``LlamaForCausalLMEagle3`` is not.
    """
    s = config.settings
    for name, wrong in (("window", s.window is not None), ("norm_output", s.norm_output)):
        if wrong:
            raise UserError(
                f"eagle3.{name}={getattr(s, name)}: SpecForge's EAGLE-3 draft has none, leave it out or train without it"
            )
    out = config.to_json("", TrainingFacts(), {})
    for key in ("longdraft", "rope_scaling", "rope_theta"):  # the older names would replace what is completed below
        del out[key]
    rope = dict(out["rope_parameters"])
    if rope["rope_type"] == "yarn":
        if rope.get("attention_factor") is not None:
            raise UserError("eagle3.rope.attention_factor: SpecForge derives it from the factor, leave it out")
        rope = {**YARN, **rope}
    return {**out, "rope_parameters": rope}
