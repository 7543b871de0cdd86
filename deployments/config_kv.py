"""The part of the config that is about KV blocks: who holds which, and how they move."""

from typing import Self

from pydantic import Field, model_validator

from deployments.config_section import Section


class RegistryConfig(Section):
    """Where workers say which blocks they hold."""

    urls: list[str] = Field(
        default_factory=list, description="One redis:// URL per shard. Empty: start an embedded one (local stack only)."
    )
    embedded_shards: int = Field(default=2, ge=1, le=16, description="Shards of the embedded registry.")
    namespace: str = Field(default="kvferry", pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="Prefix of every key.")
    lease_s: float = Field(default=3.0, gt=0, description="A worker that does not renew for so long is gone.")

    @model_validator(mode="after")
    def _urls_are_redis(self) -> Self:
        for url in self.urls:
            if not url.startswith(("redis://", "rediss://", "unix://")):
                raise ValueError(f'"{url}" is not a Redis URL; write for example "redis://10.0.0.5:6379/0"')
        return self


class HandoffConfig(Section):
    """Time limits of a hand-off of KV blocks."""

    lease_s: float = Field(
        default=30.0, gt=0, description="Prefill keeps a request's blocks so long for a silent reader."
    )
    read_deadline_s: float = Field(default=10.0, gt=0, description="A read of blocks that takes longer has failed.")

    @model_validator(mode="after")
    def _read_ends_inside_the_lease(self) -> Self:
        if self.read_deadline_s >= self.lease_s:
            raise ValueError("read_deadline_s must be less than lease_s")
        return self
