"""The runner on tiny models: packed and chunked steps give what eager attention gives."""

import threading
from typing import Any

import pytest
import torch

from messages.requests import SamplingParams
from tests.unit.engine.tiny_models import Driver, eager_logits, make_model, random_tokens

KINDS = ["llama", "llama-mqa", "mistral", "qwen3", "gemma2", "gemma3"]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_chunks_give_the_logits_of_eager_attention(kind: str) -> None:
    loaded = make_model(kind)
    driver = Driver(loaded)
    a, b, c = random_tokens(40, 1), random_tokens(9, 2), random_tokens(1, 3)

    first = driver.logits(driver.row(2, c, 0), driver.row(0, a[:17], 0, None), driver.row(1, b[:8], 0))
    second = driver.logits(driver.row(1, b[8:], 8), driver.row(0, a[17:39], 17))
    third = driver.logits(driver.row(0, a[39:], 39))

    ours = torch.cat([first, second, third])
    reference_a, reference_b = eager_logits(loaded, a), eager_logits(loaded, b)
    expected = torch.stack(
        [eager_logits(loaded, c)[0], reference_b[7], reference_b[8], reference_a[38], reference_a[39]]
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_equals_generate(kind: str) -> None:
    loaded = make_model(kind)
    driver = Driver(loaded)
    prompt = random_tokens(13)
    sequence: list[Any] = list(prompt)

    sequence += driver.run(driver.row(0, prompt, 0))
    while len(sequence) < 13 + 24:
        sequence += driver.run(driver.row(0, sequence[-1:], len(sequence) - 1))

    reference = eager_logits(loaded, sequence[:-1]).argmax(-1).tolist()
    assert sequence[13:] == reference[12:]


def test_a_row_without_sampling_yields_none_and_still_writes_its_kv() -> None:
    loaded = make_model()
    driver = Driver(loaded)
    prompt = random_tokens(10)

    nothing = driver.run(driver.row(0, prompt[:6], 0, None))
    tokens = driver.run(driver.row(1, prompt[:1], 0, None), driver.row(0, prompt[6:], 6))

    assert nothing == [None]
    assert tokens == [None, int(eager_logits(loaded, prompt)[-1].argmax())]


def test_sampled_tokens_do_not_depend_on_batch_mates() -> None:
    loaded = make_model()
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.95, seed=17)
    prompts = [random_tokens(5 + number, number) for number in range(4)]
    together, alone = Driver(loaded), Driver(loaded)

    batched = together.run(*(together.row(i, prompt, 0, params) for i, prompt in enumerate(prompts)))

    assert batched == [alone.run(alone.row(i, prompt, 0, params))[0] for i, prompt in enumerate(prompts)]


def test_two_runners_of_one_model_work_at_the_same_time() -> None:
    loaded = make_model()
    prompts = [random_tokens(20, 1), random_tokens(20, 2)]
    results: list[torch.Tensor] = [torch.empty(0)] * 2

    def work(number: int) -> None:
        driver = Driver(loaded)
        for _ in range(5):
            results[number] = driver.logits(driver.row(0, prompts[number], 0))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number in range(2):
        torch.testing.assert_close(results[number][0], eager_logits(loaded, prompts[number])[-1], rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_close_to_eager() -> None:
    loaded = make_model("llama", torch.bfloat16)
    driver = Driver(loaded)
    prompt = random_tokens(20)

    driver.run(driver.row(0, prompt[:19], 0, None))
    ours = driver.logits(driver.row(0, prompt[19:], 19))[0].float()

    expected = eager_logits(loaded, prompt)[-1].float()
    assert (ours - expected).square().mean().sqrt() < 0.1 * expected.std()


def test_statistics_are_given_per_layer() -> None:
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    driver = Driver(make_model(), statistics=lambda layer, q, k, out: seen.append((layer, q.shape, k.shape, out.shape)))

    driver.run(driver.row(0, random_tokens(6), 0))

    assert seen == [(layer, (4, 6, 16), (2, 6, 16), (6, 4, 16)) for layer in range(3)]
    assert driver.runner.num_attention_calls == 3
