"""The target's tokenizer as the gateway uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.protos.sampling import InvalidField
from outrider.verifier.detokenize import Detokenizer, decoder_of


class TokenizerEncoder:
    """Text and chats to token ids, through a tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """See PromptEncoder."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def render(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """See PromptEncoder."""
        if self._tokenizer.chat_template is None:
            raise InvalidField(
                "prompt", "chat", "send text or token ids: this target has no chat template"
            )
        text: str = self._tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=True,
            tokenize=False,
        )
        # The template has written the special tokens already.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """See PromptEncoder."""
        return Detokenizer(decoder_of(self._tokenizer), prompt_ids)
