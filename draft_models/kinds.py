"""The drafts that checkpoints hold: settings, config and module of each, by the name in ``longdraft.draft``."""

from dataclasses import dataclass

from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.target import TargetSpec

AnyDraft = LongSpecDraft | Eagle3Draft
AnyConfig = LongSpecConfig | Eagle3Config


@dataclass(frozen=True)
class Kind:
    """One architecture; the three classes belong together, so no more is said of their types here."""

    settings: type[LongSpecSettings] | type[Eagle3Settings]
    config: type[AnyConfig]
    draft: type[AnyDraft]

    def configure(self, target: TargetSpec, settings: LongSpecSettings | Eagle3Settings) -> AnyConfig:
        return self.config(target, settings)  # type: ignore[arg-type]

    def build(self, config: AnyConfig) -> AnyDraft:
        return self.draft(config)  # type: ignore[arg-type]


KINDS = {
    LongSpecConfig.kind: Kind(LongSpecSettings, LongSpecConfig, LongSpecDraft),
    Eagle3Config.kind: Kind(Eagle3Settings, Eagle3Config, Eagle3Draft),
}
