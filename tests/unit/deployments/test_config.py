"""AppConfig: what it accepts, what it refuses, and that each refusal is one line that names the field."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import (
    DEMO_MODEL_NAME,
    AppConfig,
    PoolConfig,
    cache_dir,
    default_model_name,
    demo_config,
    fault_rules,
    faults,
    load_config,
    parse_config,
)
from deployments.sizes import parse_size
from messages.errors import ConfigError

MINIMAL: dict[str, Any] = {"version": 1, "models": [{"source": "demo"}]}


def written(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "app.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_demo_has_a_prefill_and_a_decode_worker_and_two_embedded_shards() -> None:
    config = demo_config(grpc_port=1234, http_port=1235)

    assert [(pool.role, pool.replicas) for pool in config.pools] == [("prefill", 1), ("decode", 1)]
    assert (config.registry.urls, config.registry.embedded_shards) == ([], 2)
    assert (config.gateway.grpc_port, config.gateway.http_port) == (1234, 1235)


@pytest.mark.parametrize("mode", ["python", "json"])
def test_a_config_survives_its_own_dump(mode: str) -> None:
    config = demo_config()

    assert parse_config(config.model_dump(mode=mode)) == config


def test_a_small_file_gets_every_default(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, MINIMAL))

    assert config.model.name == DEMO_MODEL_NAME
    assert [pool.name for pool in config.pools] == ["prefill", "decode"]
    assert config.local_prefill_max_tokens == config.model.block_size == 32


def test_without_a_file_the_demo_is_the_base_of_the_overrides() -> None:
    config = load_config(None, {"gateway.grpc_port": 9001, "models.0.dtype": "float32", "pools.1.num_threads": 3})

    assert config.gateway.grpc_port == 9001
    assert config.model.dtype == "float32"
    assert config.pools[1].num_threads == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**MINIMAL, "version": 2}, "version: Input should be 1, got 2"),
        ({"models": [{"source": "demo"}]}, "version: is missing"),
        ({**MINIMAL, "models": []}, "models: exactly one model is accepted for now, got 0"),
        ({**MINIMAL, "gateway": {"grp_port": 1}}, 'gateway.grp_port: no such field; did you mean "grpc_port"?'),
        ({**MINIMAL, "gateway": {"grpc_port": 8000}}, "gateway: grpc_port and http_port are both 8000"),
        ({**MINIMAL, "gateway": {"grpc_port": "9000"}}, "gateway.grpc_port: Input should be a valid integer"),
        ({**MINIMAL, "pools": [{"name": "a", "role": "both"}]}, "pools.0.role: Input should be 'prefill'"),
        ({**MINIMAL, "pools": [{"name": "a", "role": "prefill"}]}, "pools: none decodes"),
        ({**MINIMAL, "pools": [{"name": "a", "role": "decode"}]}, "pools: none takes short prefills"),
        (
            {**MINIMAL, "pools": [{"name": "a", "role": "unified", "requests": "short"}]},
            "pools: none takes long prefills",
        ),
        ({**MINIMAL, "pools": [{"name": "a", "role": "unified"}] * 2}, "pools: two pools have the same name"),
        ({**MINIMAL, "models": [{"source": "demo", "kv_memory_bytes": "lots"}]}, '"lots" is not a size'),
        ({**MINIMAL, "models": [{"source": "demo", "prefill_chunk_tokens": 999}]}, "must not be larger than"),
        ({**MINIMAL, "registry": {"urls": ["http://x"]}}, '"http://x" is not a Redis URL'),
        ({**MINIMAL, "handoff": {"lease_s": 5}}, "read_deadline_s must be less than lease_s"),
        ({**MINIMAL, "transport": "pigeon"}, "transport: Input should be 'nixl'"),
        ("just text", "expected fields such as"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, data))

    assert message in str(caught.value)
    assert "app.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_faults_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(and 1 more\)"):
        load_config(written(tmp_path, {**MINIMAL, "foo": 1, "bar": 2}))


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*nope\.yaml: No such file"):
        load_config(tmp_path / "nope.yaml")


@pytest.mark.parametrize("field", ["models.7.dtype", "models.x", "gateway.grpc_port.low"])
def test_an_override_without_a_place_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="the config has no such place"):
        load_config(None, {field: 1})


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        demo_config().gateway.grpc_port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("77", 77), ("3k", 3000), (12, 12), (None, None)],
)
def test_sizes_are_read_in_both_bases(text: object, expected: object) -> None:
    assert parse_size(text) == expected


@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_written_in_bytes_reads_as_itself(size: int) -> None:
    assert parse_size(f"{size}B") == size


def test_an_unknown_pool_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(ConfigError, match="there are prefill, decode"):
        demo_config().pool("x")


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (PoolConfig(name="a", role="decode", num_threads=5), 5),
        (PoolConfig(name="a", role="decode", cpu_affinity=[1, 2, 3]), 3),
        (PoolConfig(name="a", role="decode"), 4),
    ],
)
def test_threads_come_from_the_setting_then_the_affinity_then_half_of_the_cores(
    pool: PoolConfig, expected: int
) -> None:
    assert pool.threads(8) == expected
    assert PoolConfig(name="a", role="decode").threads(1) == 1


def test_unified_has_both_roles() -> None:
    pool = PoolConfig(name="a", role="unified")

    assert pool.has_role("prefill")
    assert pool.has_role("decode")
    assert not PoolConfig(name="a", role="decode").has_role("prefill")


def test_models_are_named_after_their_source(tmp_path: Path) -> None:
    assert default_model_name("demo") == DEMO_MODEL_NAME
    assert default_model_name("org/model") == "org/model"
    assert default_model_name(str(tmp_path / "tiny")) == "tiny"


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    moved = cache_dir()
    monkeypatch.delenv("KVFERRY_CACHE_DIR")

    assert moved == tmp_path
    assert cache_dir() == Path.home() / ".cache" / "kvferry"


def test_every_field_is_described() -> None:
    schema = AppConfig.model_json_schema()

    undescribed = [
        f"{name}.{field}"
        for name, section in {"AppConfig": schema, **schema["$defs"]}.items()
        for field, content in section["properties"].items()
        if not content.get("description")
    ]

    assert undescribed == []


def test_kv_memory_is_bytes_on_a_cpu_and_a_share_on_a_gpu_unless_it_is_given() -> None:
    unset, share, given = (
        load_config(None, {f"models.0.{name}": value for name, value in fields.items()}).model
        for fields in ({}, {"kv_memory_share": 0.25}, {"kv_memory_bytes": "2KiB", "kv_memory_share": 0.25})
    )

    assert (unset.kv_bytes(on_gpu=False), unset.kv_bytes(on_gpu=True), unset.kv_share()) == (2**30, None, 0.9)
    assert (share.kv_bytes(on_gpu=False), share.kv_bytes(on_gpu=True), share.kv_share()) == (None, None, 0.25)
    assert (given.kv_bytes(on_gpu=False), given.kv_bytes(on_gpu=True)) == (2048, 2048)


def test_faults_come_from_the_environment_and_unknown_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_FAULTS", "engine.preempt_once,handoff.close:drop@decode")
    assert [str(rule) for rule in fault_rules()] == ["engine.preempt_once:preempt", "handoff.close:drop@decode"]
    assert faults("decode").has("handoff.close")
    assert not faults("prefill").has("handoff.close")

    monkeypatch.delenv("KVFERRY_FAULTS")
    assert not faults().is_set

    monkeypatch.setenv("KVFERRY_FAULTS", "engine.typo")
    with pytest.raises(ConfigError, match=r"KVFERRY_FAULTS: .*engine\.typo"):
        faults()
