"""The engine that ``engine.name`` asks for; see ``train/engines``."""

from longdraft.train.config import TrainSettings
from longdraft.train.engines.base import Engine
from longdraft.train.engines.group import Group, StopSignal
from longdraft.train.engines.torch_engine import TorchEngine
from longdraft.train.methods.base import Method

__all__ = ["Engine", "Group", "StopSignal", "TorchEngine", "build_engine"]


def build_engine(method: Method, settings: TrainSettings, group: Group) -> Engine:
    """Build it around a method, whose draft has its first weights.

    Raises:
        UserError: a DeepSpeed file that does not fit the run's settings.
    """
    if settings.engine.name == "torch":
        return TorchEngine(method, settings.optim, group)
    from longdraft.train.engines.zero_engine import ZeroEngine  # DeepSpeed takes seconds to import

    return ZeroEngine(method, settings, group)
