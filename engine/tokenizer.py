"""Text to tokens: a model's own tokenizer and chat template, loaded once."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from engine.checkpoints import gguf_file
from engine.detokenizer import IncrementalDetokenizer, TokenBytes
from messages.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)


class Tokenizer:
    """Encodes prompts and makes detokenizers; safe to use from several threads."""

    def __init__(self, wrapped: Any, *, eos_ids: frozenset[int]) -> None:
        self._wrapped = wrapped
        self._backend = wrapped.backend_tokenizer
        self.eos_ids = eos_ids
        """Ids that end generation."""
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        """One more than the highest id, added tokens among them."""
        special = (token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special)
        self._token_bytes = TokenBytes(self._backend, frozenset(special))
        self._data_of: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of the checkpoint at `path`, a folder or a GGUF file.

        A `tokenizer.json` goes before what a GGUF file says, because that does not hold every rule of splitting.

        Raises:
            ConfigError: There is no tokenizer that can be used.
        """
        gguf = gguf_file(Path(path))
        folder = Path(path) if gguf is None else gguf.parent
        if not folder.is_dir():
            raise ConfigError(f"no model folder at {folder}", path=str(folder))
        options = {} if gguf is None or (folder / "tokenizer.json").is_file() else {"gguf_file": gguf.name}
        if options:
            log.warning("tokenizer.guessed gguf=%s: put the model's tokenizer.json beside it to be exact", gguf)
        try:
            wrapped = AutoTokenizer.from_pretrained(str(folder), **options)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"cannot load the tokenizer in {folder}: {error}", path=str(folder)) from error
        if not getattr(wrapped, "is_fast", False):
            raise ConfigError(f"the tokenizer in {folder} has no fast form (tokenizer.json)", path=str(folder))
        return cls(wrapped, eos_ids=_eos_ids(folder, wrapped.eos_token_id))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation becomes a prompt."""
        return bool(self._wrapped.chat_template)

    def encode(self, text: str) -> list[int]:
        """Encode a prompt, with BOS where the model wants one and never two.

        Raises:
            InvalidRequest: The text is not valid Unicode (a lone surrogate).
        """
        token_ids: list[int] = self._backend.encode(_checked(text, "prompt"), add_special_tokens=True).ids
        bos = self._wrapped.bos_token_id
        while bos is not None and token_ids[:2] == [bos, bos]:
            token_ids = token_ids[1:]
        return token_ids

    def encode_inside(self, text: str, param: str) -> list[int]:
        """Encode text that stands inside another one, so without BOS or any other token around it.

        Raises:
            InvalidRequest: The text is not valid Unicode; the context names `param`.
        """
        token_ids: list[int] = self._backend.encode(_checked(text, param), add_special_tokens=False).ids
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds inside a text; a control token's name; empty for an id that no token has."""
        data = self._data_of.get(token_id)
        if data is None:
            # Behind another token, here itself, because only the start of a text strips a space.
            data = self._data_of[token_id] = self._token_bytes.of(token_id, token_id)
        return data

    def render_chat(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode a conversation so that the assistant's answer comes next.

        Control tokens are those of the template; one that is spelled out in `content` is ordinary text.

        Args:
            turns: Each with role (system, user, assistant, tool) and content; the template may use further keys.

        Raises:
            InvalidRequest: The model has no chat template, or its template refuses the conversation.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; send a plain prompt instead", param="messages")
        conversation = [dict(turn) | {"content": _checked(turn["content"], "messages")} for turn in turns]
        try:
            token_ids = self._wrapped.apply_chat_template(
                conversation,
                add_generation_prompt=True,
                sanitize_control_tokens=True,
                return_dict=False,
            )
        except (jinja2.TemplateError, ValueError, TypeError, IndexError) as error:
            message = f"messages: the model's chat template refuses them: {error}"
            raise InvalidRequest(message, param="messages") from error
        return [int(token_id) for token_id in token_ids]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the whole text of `token_ids`, without control tokens; equal to what a detokenizer gives in parts."""
        detokenizer = self.make_detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def make_detokenizer(self, after: int | None = None) -> IncrementalDetokenizer:
        """Return a detokenizer for one text, or for what continues a text whose last token is `after`."""
        return IncrementalDetokenizer(self._token_bytes, after)


def _checked(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param}: not valid Unicode text (a lone surrogate)", param=param) from error
    return text


def _eos_ids(folder: Path, fallback: int | None) -> frozenset[int]:
    """End tokens of generation_config.json, else of config.json, else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        found = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if isinstance(found, int):
            return frozenset({found})
        if isinstance(found, list) and found:
            return frozenset(int(token_id) for token_id in found)
    return frozenset() if fallback is None else frozenset({fallback})


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", path=str(path)) from error
    return loaded if isinstance(loaded, dict) else {}
