"""The step of a server: by what it drafts, and by whether its drafter can do without the host."""

from collections.abc import Sequence
from typing import Any

from longdraft.serve.decode_step import DecodeStep
from longdraft.serve.device_step import DeviceStep
from longdraft.serve.device_tree_step import DeviceTreeStep
from longdraft.serve.drafters.base import Drafter
from longdraft.serve.shape_choice import ShapeChoice
from longdraft.serve.tree_shape import TreeShape
from longdraft.serve.tree_step import TreeStep
from longdraft.serve.view_step import ViewStep


def make_step(
    shapes: Sequence[TreeShape], target_worker: Any, drafter: Drafter, *rest: Any, viewed: bool = False
) -> DecodeStep:
    """The step of a server that drafts in one of these shapes, in chains alone where there are none.

    Args:
        shapes: of the drafts.
        target_worker, drafter, rest: as of :class:`DecodeStep`.
        viewed: whether requests may be verified on views; such a server drafts chains on the device.
    """
    if viewed:
        return ViewStep(target_worker, drafter, *rest)
    if not shapes:
        return (DeviceStep if drafter.on_device else DecodeStep)(target_worker, drafter, *rest)
    step = (DeviceTreeStep if drafter.on_device else TreeStep)(target_worker, drafter, *rest)
    step.choice = ShapeChoice(shapes)
    return step
