"""The Serve application that a config describes, without starting Ray."""

import subprocess
import sys
from typing import Any

from ray.serve._private.build_app import build_app

from deployments.app import GATEWAY_NAME, build
from deployments.config import AppConfig, load_config, parse_config


def deployments_of(config: AppConfig) -> dict[str, Any]:
    built = build_app(build(config), name="app", make_deployment_handle=lambda deployment, app: deployment.name)
    return {deployment.name: deployment for deployment in built.deployments}


def test_each_pool_is_a_deployment_and_the_gateway_depends_on_all() -> None:
    config = load_config(None, {"pools.1.replicas": 3, "pools.0.resources": {"fast": 1.0}, "pools.0.num_gpus": 0.5})

    deployments = deployments_of(config)

    assert set(deployments) == {"prefill", "decode", GATEWAY_NAME}
    assert deployments["decode"].num_replicas == 3
    assert deployments["prefill"].ray_actor_options["resources"] == {"fast": 1.0}
    assert deployments["prefill"].ray_actor_options["num_gpus"] == 0.5
    assert deployments[GATEWAY_NAME].init_args[1:] == ("prefill", "decode")


def test_workers_get_the_whole_config_as_plain_data_and_their_pool() -> None:
    config = load_config(None)

    data, pool = deployments_of(config)["decode"].init_args

    assert parse_config(data) == config
    assert pool == "decode"


def test_serve_waits_longer_for_a_replica_than_it_drains() -> None:
    config = load_config(None, {"gateway.drain_s": 33.0})

    assert all(each._deployment_config.graceful_shutdown_timeout_s > 33.0 for each in deployments_of(config).values())


def test_describing_the_application_does_not_import_torch() -> None:
    code = (
        "import sys; from deployments.app import build; from deployments.config import demo_config; "
        "build(demo_config()); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
