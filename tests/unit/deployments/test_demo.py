"""The demo's prompts and the table of what they cost."""

from rich.console import Console

from deployments.demo import Measured, demo_prompts, measurements_table
from deployments.demo_document import document
from kvferry import Choice, Completion, Provenance, Timings, Usage


def measured(*, transfer_s: float = 0.01, total_s: float = 2.0) -> Measured:
    completion = Completion(
        choices=(Choice(text="x", token_ids=(1,) * 11, finish_reason="stop", stop=None),),
        usage=Usage(prompt_tokens=2001, completion_tokens=11, cached_tokens=32),
        provenance=Provenance(
            prefill_worker="p",
            decode_worker="d",
            prefill_computed_tokens=1969,
            decode_computed_tokens=17,
            blocks_moved=62,
            bytes_moved=50_000_000,
            transfer_s=transfer_s,
            exposed_s=0.0015,
        ),
        timings=Timings(first_token_s=1.0, total_s=2.0),
        request_id="r",
    )
    return Measured(title="document", completion=completion, first_text_s=1.0, total_s=total_s)


def test_rates_are_tokens_after_the_first_and_bytes_per_transfer_time() -> None:
    assert measured().tokens_per_s == 10.0
    assert measured().transfer_gb_s == 5.0


def test_rates_of_nothing_are_zero() -> None:
    assert measured(total_s=1.0).tokens_per_s == 0.0
    assert measured(transfer_s=0.0).transfer_gb_s == 0.0


def test_the_table_shows_every_quantity() -> None:
    console = Console(width=120, record=True, file=None, quiet=True)
    with console.capture() as capture:
        Console.print(console, measurements_table([measured()]))
    console.quiet = False
    console.print(measurements_table([measured()]))

    text = console.export_text() + capture.get()
    for expected in ("2,001", "1,969", "17", "32", "11", "1,000 ms", "10.0", "62", "50.0 MB", "5.00 GB/s", "1.5 ms"):
        assert expected in text


def test_both_document_questions_share_the_document_and_it_is_the_same_every_time() -> None:
    _, first, second = demo_prompts()

    assert first.content != second.content
    assert first.content.startswith(document(38))
    assert second.content.startswith(document(38))


def test_no_ferry_in_the_log_leaves_for_the_port_it_is_in() -> None:
    for line in document(200).splitlines():
        if line.startswith("Crossing"):
            origin, target = line.split(" left ")[1].split(" with ")[0].split(" for ")
            assert origin != target
