"""A prompt on the command line has the tokens that the system would give it."""

from pathlib import Path

import pytest

from deployments.cli.kv_questions import encode
from deployments.config import AppConfig, parse_config
from messages.errors import InvalidRequest
from tests.contract.scripted_router import ONCE, UPON, make_tokenizer


@pytest.fixture
def target(tmp_path: Path) -> AppConfig:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return parse_config({"version": 1, "models": [{"source": str(tmp_path)}]})


def test_a_text_is_a_prompt_as_it_is(target: AppConfig) -> None:
    assert encode(target, "once upon", is_chat=False) == [ONCE, UPON]


def test_a_message_of_a_chat_is_rendered(target: AppConfig) -> None:
    folder = Path(target.model.source)
    (folder / "chat_template.jinja").write_text("upon {% for m in messages %}{{ m.content }}{% endfor %}")

    assert encode(target, "once upon", is_chat=True) == [UPON, ONCE, UPON]


def test_an_empty_prompt_is_refused(target: AppConfig) -> None:
    with pytest.raises(InvalidRequest):
        encode(target, "", is_chat=False)
