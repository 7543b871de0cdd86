"""A client that is killed in the middle costs nothing: both workers are back at baseline, seen in the metrics."""

import subprocess
import sys
import time

import httpx
import pytest

from deployments.local_stack import LocalStack
from tests.e2e.system import Metrics, wait_for_baseline

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.nixl, pytest.mark.timeout(600)]

GRPC_CLIENT = """
import sys
from kvferry import Client

with Client(sys.argv[1]) as client:
    with client.stream("Tell me about ferries. " * int(sys.argv[2]), max_tokens=1000, temperature=1) as chunks:
        print("streaming", flush=True)
        for chunk in chunks:
            pass
"""

HTTP_CLIENT = """
import sys
import httpx

body = {
    "messages": [{"role": "user", "content": "Tell me about ferries. " * int(sys.argv[2])}],
    "max_tokens": 1000,
    "stream": sys.argv[3] == "stream",
}
print("streaming", flush=True)
with httpx.stream("POST", sys.argv[1] + "/v1/chat/completions", json=body, timeout=600) as answer:
    for line in answer.iter_lines():
        pass
"""


def kill_in_the_middle(stack: LocalStack, code: str, *arguments: str) -> float:
    client = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert client.stdout is not None
    client.stdout.readline()
    time.sleep(0.5)
    assert client.poll() is None
    assert Metrics(stack.http_url).total("kvferry_requests_in_flight") >= 1
    client.kill()
    client.wait()
    return wait_for_baseline(stack, 2.0)


# Few words: killed while decoding. Many: killed while the prompt is computed.
@pytest.mark.parametrize("repeats", [20, 500])
def test_a_killed_grpc_client_leaves_the_workers_at_baseline(disaggregated: LocalStack, repeats: int) -> None:
    kill_in_the_middle(disaggregated, GRPC_CLIENT, disaggregated.grpc_address, str(repeats))


@pytest.mark.parametrize("mode", ["stream", "whole"])
@pytest.mark.parametrize("repeats", [20, 500])
def test_a_killed_http_client_leaves_the_workers_at_baseline(
    disaggregated: LocalStack, repeats: int, mode: str
) -> None:
    kill_in_the_middle(disaggregated, HTTP_CLIENT, disaggregated.http_url, str(repeats), mode)


def test_the_next_request_works(disaggregated: LocalStack) -> None:
    kill_in_the_middle(disaggregated, GRPC_CLIENT, disaggregated.grpc_address, "20")
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}

    answer = httpx.post(f"{disaggregated.http_url}/v1/chat/completions", json=body, timeout=60)

    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 4
