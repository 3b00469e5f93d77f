"""Settings of the machines that a training runs on, and of where it is reported."""

from typing import Annotated, Literal

from pydantic import Field

from longdraft.schema import OnOff, Settings


class EngineSettings(Settings):
    name: Literal["torch", "deepspeed"] = Field(
        "torch", description="torch: every rank holds the whole draft; deepspeed: ZeRO"
    )
    config: str | None = Field(None, description="DeepSpeed's own file, such as recipes/deepspeed/zero2.yaml")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the draft's forward pass; masters are float32"
    )
    sequence: bool = Field(
        False,
        description="LongSpec on several ranks: they divide every sample by rows, instead of having samples of their own; for documents "
        "that one GPU cannot hold (schedule.micro_batch is then of all ranks together)",
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="of one device, for MFU; None: known for B200, H200, H100 and A100, in bfloat16"
    )


class PlanSettings(Settings):
    """What ``--plan`` assumes of machines that are not here; a run itself ignores it."""

    ranks: int | None = Field(None, ge=1, description="GPUs of the run; None: those of this launch")
    gpu_gib: float | None = Field(None, gt=0, description="memory of one, in GiB; a plan beyond it is refused")


class TrackingSettings(Settings):
    wandb: Annotated[Literal["off", "auto", "online", "offline"], OnOff] = Field(
        "off", description="auto is offline without a key"
    )
    project: str = Field("longdraft", description="W&B project")
