"""The page that a gateway shows: what workers report, and what it sees of the registry itself."""

from prometheus_client import CollectorRegistry, generate_latest

from telemetry.metrics import RegistryMetrics, WorkerCollector, WorkerCounter, WorkerSample


class Workers:
    """Two workers, one of which was refused twice."""

    def samples(self) -> list[WorkerSample]:
        refused = {
            WorkerCounter.HANDSHAKES_LAYOUT.value: 2.0,
            WorkerCounter.HANDSHAKES_STALE.value: 1.0,
            WorkerCounter.LENDS.value: 7.0,
        }
        return [
            WorkerSample(worker_id="d-0", pool="decode", role="decode", counters=refused),
            WorkerSample(worker_id="p-0", pool="prefill", role="prefill"),
        ]


def page_of_workers() -> CollectorRegistry:
    page = CollectorRegistry()
    page.register(WorkerCollector(Workers()))
    return page


def test_failures_of_handshakes_are_shown_by_reason() -> None:
    page = page_of_workers()

    def shown(worker: str, role: str, reason: str) -> float | None:
        labels = {"worker": worker, "pool": role, "role": role, "reason": reason}
        return page.get_sample_value("kvferry_handshake_failures_total", labels)

    assert shown("d-0", "decode", "layout") == 2.0
    assert shown("d-0", "decode", "stale") == 1.0
    assert shown("d-0", "decode", "unreachable") == 0.0
    assert shown("p-0", "prefill", "layout") == 0.0


def test_every_counter_of_a_worker_is_on_the_page_under_its_name() -> None:
    text = generate_latest(page_of_workers()).decode()

    missing = [counter for counter in WorkerCounter if f"kvferry_{counter.partition('/')[0]}{{" not in text]
    assert missing == []
    assert 'kvferry_lends_total{pool="decode",role="decode",worker="d-0"} 7.0' in text


def test_a_gateway_and_its_workers_name_nothing_alike() -> None:
    """Two families of one name make the whole page fail."""
    page = page_of_workers()

    RegistryMetrics().register(page)

    names = [family.name for family in page.collect()]
    assert len(names) == len(set(names))
