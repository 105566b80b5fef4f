"""The settings of ``infer ray``, ``[ray]``."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator


class RaySettings(BaseModel, extra="forbid"):
    name: str = Field("infer", pattern=r"^[A-Za-z0-9_.-]+$", description="the application's name in Ray Serve")
    address: str | None = Field(
        None, description="the cluster that infer ray deploy sends to, as ray.init takes it; none: RAY_ADDRESS's"
    )
    replicas: int = Field(1, ge=1, description="engines; with max_replicas, the least number of them")
    max_replicas: int | None = Field(
        None, ge=1, description="scale by load up to so many engines; none: there are always as many as replicas says"
    )
    target_requests: float = Field(
        16.0, gt=0, description="requests, running and waiting, that an engine has when there are as many as needed"
    )
    upscale_delay_s: float = Field(15.0, ge=0, description="seconds of more load before there are more engines")
    downscale_delay_s: float = Field(300.0, ge=0, description="seconds of less load before there are fewer")
    cpus: float = Field(1.0, ge=0, description="CPUs that each engine takes of its node, and its threads without a GPU")
    gpus: float = Field(0.0, ge=0, description="GPUs that each engine takes of its node")
    max_per_node: int | None = Field(None, ge=1, le=100, description="the most engines on a node; none: as many as fit")
    ingresses: int = Field(1, ge=1, description="ingresses, on a node each, which all listen on server.port")
    balance: float = Field(
        1.25, ge=1, description="times the mean load that an engine may have to get a request for what its cache holds"
    )
    slack: int = Field(4, ge=1, description="requests that it may have beyond the least loaded one in any case")
    known_blocks: int = Field(
        1 << 20, ge=1024, description="beginnings of prompts that an ingress remembers, about 130 bytes each"
    )

    @model_validator(mode="after")
    def _upward(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas = {self.max_replicas} is below replicas = {self.replicas}")
        return self
