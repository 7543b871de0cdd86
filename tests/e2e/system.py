"""Helpers around a whole running system: free ports, configs, the metrics page."""

import re
import time
import urllib.request

from deployments.config import AppConfig, GatewayConfig, ModelConfig, PoolConfig
from deployments.local_stack import LocalStack
from deployments.preflight import free_ports


def make_config(*pools: PoolConfig, **model: object) -> AppConfig:
    grpc_port, http_port = free_ports(2)
    return AppConfig(
        version=1,
        models=[ModelConfig(**({"source": "demo", "dtype": "float32", "kv_memory_bytes": 768 * 2**20} | model))],
        pools=list(pools),
        gateway=GatewayConfig(grpc_port=grpc_port, http_port=http_port, drain_s=2.0),
    )


class Metrics:
    """The numbers of one /metrics page."""

    def __init__(self, http_url: str) -> None:
        with urllib.request.urlopen(f"{http_url}/metrics", timeout=5) as page:
            self.text = page.read().decode()

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that have these labels."""
        total = 0.0
        for line in self.text.splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if (
                match
                and match[1] == name
                and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items())
            ):
                total += float(match[3])
        return total

    def is_at_baseline(self) -> bool:
        """Every worker: nothing referenced, nothing lost, nothing under way."""
        blocks = {s: self.total("kvferry_kv_blocks", state=s) for s in ("total", "free", "cached", "referenced")}
        busy = sum(self.total(f"kvferry_worker_{name}") for name in ("running", "waiting", "handoffs"))
        return (
            blocks["total"] > 0
            and blocks["referenced"] == 0
            and blocks["free"] + blocks["cached"] == blocks["total"]
            and busy == 0
            and self.total("kvferry_requests_in_flight") == 0
        )


def wait_for_baseline(stack: LocalStack, timeout_s: float) -> float:
    """Seconds until every worker is at baseline."""
    started_s = time.monotonic()
    while not Metrics(stack.http_url).is_at_baseline():
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, Metrics(stack.http_url).text
        time.sleep(0.05)
    return time.monotonic() - started_s
