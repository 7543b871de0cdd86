"""Ray Serve shells around the engine: config, gateway, router, worker, CLI. The only package that imports ray."""
