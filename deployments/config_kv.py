"""The part of the config that is about KV blocks: who holds which, and how they move."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from deployments.config_section import Section

LoadFailurePolicy = Literal["recompute", "fail"]


class RegistryConfig(Section):
    """Where workers say which blocks they hold."""

    urls: list[str] = Field(
        default_factory=list,
        description="One redis:// (rediss:// for TLS) URL per shard; of a Redis Cluster, some of its nodes. "
        "Empty: start an embedded one (local stack only).",
    )
    cluster: bool = Field(
        default=False, description="Whether the URLs are nodes of one Redis Cluster, which places the keys itself."
    )
    username: str | None = Field(
        default=None, min_length=1, description="User (ACL) of every shard. A URL that names one goes before it."
    )
    password_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the password of every shard; its last line break is left out.",
    )
    password_env: str | None = Field(
        default=None, min_length=1, description="Environment variable with that password, on gateways and workers."
    )
    ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="Certificates (PEM) that vouch for rediss:// servers. null: the system's.",
    )
    certificate_file: str | None = Field(
        default=None, min_length=1, description="Our certificate (PEM), for servers that ask for one; with key_file."
    )
    key_file: str | None = Field(default=None, min_length=1, description="Key (PEM) of certificate_file.")
    check_hostname: bool = Field(
        default=True, description="Whether the certificate of a server must name the host of its URL."
    )
    embedded_shards: int = Field(default=2, ge=1, le=16, description="Shards of the embedded registry.")
    namespace: str = Field(default="kvferry", pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="Prefix of every key.")
    lease_s: float = Field(default=3.0, gt=0, description="A worker that does not renew for so long is gone.")
    timeout_s: float = Field(
        default=0.5, gt=0, description="Longest wait for one answer of a shard, connecting included."
    )
    entry_ttl_s: float = Field(
        default=4 * 3600.0,
        gt=0,
        description="What a worker said of a block is forgotten after so long; it says it again in half of it.",
    )

    @model_validator(mode="after")
    def _urls_are_redis(self) -> Self:
        for url in self.urls:
            if not url.startswith(("redis://", "rediss://", "unix://")):
                shown = _without_password(url)
                raise ValueError(f'"{shown}" is not a Redis URL; write for example "redis://10.0.0.5:6379/0"')
        return self

    @model_validator(mode="after")
    def _access_is_one_way(self) -> Self:
        if self.password_file is not None and self.password_env is not None:
            raise ValueError("password_file and password_env are two places for one password; give one")
        if self.cluster and not self.urls:
            raise ValueError("cluster needs urls: some nodes of the Redis Cluster")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file go together")
        if self.entry_ttl_s < 4 * self.lease_s:
            raise ValueError("entry_ttl_s must be at least four times lease_s")
        return self


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", url)


class ReuseConfig(Section):
    """When a worker fetches a prefix that another one holds, instead of computing it."""

    enabled: bool = Field(default=True, description="Whether prefixes move between workers at all.")
    min_tokens: int = Field(
        default=64, ge=1, description="A fetch must save the computing of more prompt tokens than this."
    )
    assumed_prefill_tokens_s: float = Field(
        default=2000.0, gt=0, description="Prompt tokens per second that a worker computes, until it has measured it."
    )
    assumed_transfer_gb_s: float = Field(
        default=1.0, gt=0, description="GB (1e9 bytes) per second that a worker reads, until it has measured it."
    )
    overhead_ms: float = Field(
        default=10.0, ge=0, description="What a fetch costs whatever its size: the calls around the read."
    )
    margin: float = Field(
        default=0.25, ge=0, description="A fetch must be cheaper than computing by this share of its own cost."
    )
    max_lends: int = Field(
        default=16, ge=0, description="Prefixes that one worker lends at a time; it refuses more. 0: it lends none."
    )


class HandoffConfig(Section):
    """How KV blocks move from worker to worker."""

    lease_s: float = Field(
        default=30.0, gt=0, description="Prefill keeps a request's blocks so long for a silent reader."
    )
    read_deadline_s: float = Field(default=10.0, gt=0, description="A read of blocks that takes longer has failed.")
    on_load_failure: LoadFailurePolicy = Field(
        default="recompute",
        description="What decode does when blocks did not arrive whole. recompute: keep what is good up to the first "
        "bad block and compute the rest. fail: end the request with an error that may be retried.",
    )
    digest: bool = Field(
        default=False,
        description="Whether owner and reader compare a digest (xxh3) of every block; finds bytes that changed on "
        "their way, costs a pass over them on each side.",
    )
    same_host: bool = Field(
        default=True,
        description="Whether workers of one machine read each other's host memory by a plain copy, which is faster for "
        "small reads; all others, and accelerators, through the network library.",
    )
    max_peers: int = Field(
        default=1024,
        ge=1,
        description="Workers whose memory one worker keeps connected; those that were not read for longest make room.",
    )

    @model_validator(mode="after")
    def _read_ends_inside_the_lease(self) -> Self:
        if self.read_deadline_s >= self.lease_s:
            raise ValueError("read_deadline_s must be less than lease_s")
        return self
