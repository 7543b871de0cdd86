"""The Serve application: one deployment per pool of workers, and the gateway as its ingress.

Worker and Gateway are named by import path, so neither torch nor grpc is imported by what only deploys them: the
command line and Serve's controller. The config crosses as plain data.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.config import AppConfig, PoolConfig

WORKER_PATH = "deployments.worker.worker.Worker"
GATEWAY_PATH = "deployments.gateway.gateway.Gateway"
APP_NAME = "kvferry"
GATEWAY_NAME = "gateway"

# The data path is ours: Serve's handles carry a few control calls.
_MAX_CONTROL_CALLS = 64
_SHUTDOWN_MARGIN_S = 5.0


def build(config: AppConfig, *, worker: str = WORKER_PATH, gateway: str = GATEWAY_PATH) -> Application:
    """Describe the deployments of `config`.

    Args:
        config: The whole deployment.
        worker: Import path of the class behind every pool; called with (config as a dict, pool name).
        gateway: Import path of the ingress class; called with (config as a dict, one handle per pool).
    """
    data = config.model_dump(mode="json")
    pools = [
        serve.deployment(
            name=pool.name,
            num_replicas=pool.replicas,
            ray_actor_options=_actor_options(pool),
            **_life_of_a_replica(config),
        )(worker).bind(data, pool.name)
        for pool in config.pools
    ]
    ingress = serve.deployment(
        name=GATEWAY_NAME,
        num_replicas=1,
        ray_actor_options={"num_cpus": config.gateway.num_cpus},
        **_life_of_a_replica(config),
    )(gateway)
    return ingress.bind(data, *pools)


def _actor_options(pool: PoolConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.resources:
        options["resources"] = dict(pool.resources)
    return options


def _life_of_a_replica(config: AppConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": _MAX_CONTROL_CALLS,
        # Serve sees none of our streams and stops a replica at once; the replica drains in its __del__.
        "graceful_shutdown_timeout_s": config.gateway.drain_s + _SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 5.0,
        # A long prefill chunk on a busy CPU holds the interpreter for a while.
        "health_check_timeout_s": 30.0,
    }
