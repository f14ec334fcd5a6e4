"""Text to the ids of a talker's prompt: Qwen2's byte-level BPE and the three chat templates of the reference.

Only the templates' own markers become control tokens. What users write is tokenized without any added token, so that a
``<|im_end|>`` or ``<tts_pad>`` in it is spelled like any other text. The reference would obey it. The pieces of a
template are tokenized apart, which gives what tokenizing the whole gives, save where a text begins with line breaks:
those would join the template's own and shift what follows, and are dropped.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

from omni_core.errors import CheckpointError, RequestError
from omni_plugin_qwen3_tts.prompt import REFERENCE_TAIL_TOKENS, ROLE_TOKENS, TAIL_TOKENS

START, END = "<|im_start|>", "<|im_end|>"
_LEADING_BREAKS = re.compile(r"\A\s*[\r\n]+")


class TextTokenizer:
    """The tokenizer of a checkpoint.

    Args:
        folder: has ``vocab.json`` and ``merges.txt``, or ``tokenizer.json``.

    Raises:
        CheckpointError: the files cannot be read, or the chat markup has other tokens than prompts are made for.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._marked = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises whatever it runs into
            raise CheckpointError(f"{folder}: its text tokenizer cannot be read: {error}") from error
        backend = self._marked.backend_tokenizer
        self._plain = Tokenizer(backend.model)
        self._plain.normalizer, self._plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        pieces = {
            f"{START}assistant\\n": (self._assistant, ROLE_TOKENS),
            f"{END}\\n{START}assistant\\n": (self._tail, TAIL_TOKENS),
            f"{END}\\n": (self._reference_tail, REFERENCE_TAIL_TOKENS),
        }
        for piece, (ids, count) in pieces.items():
            if len(ids) != count:
                raise CheckpointError(f"{folder}: its tokenizer makes {len(ids)} tokens of {piece}, not {count}")

    def text(self, text: str) -> list[int]:
        """What is to be spoken, in its template: ``ROLE_TOKENS``, the text, ``TAIL_TOKENS``.

        Raises:
            RequestError: nothing is left of the text.
        """
        return [*self._assistant, *self._spoken(text, "input"), *self._tail]

    def reference(self, text: str) -> list[int]:
        """What a reference says, in its template; raises what ``text`` raises."""
        return [*self._assistant, *self._spoken(text, "ref_text"), *self._reference_tail]

    def instruction(self, text: str) -> list[int]:
        """An instruction in its template."""
        return [*self._user, *self._encode(text), *self._reference_tail]

    def _spoken(self, text: str, param: str) -> list[int]:
        if not text.strip() or not (ids := self._encode(text)):
            raise RequestError(f"{param} must not be blank", param)
        return ids

    def _encode(self, text: str) -> list[int]:
        """The text alone, in which nothing is markup."""
        return list(self._plain.encode(_LEADING_BREAKS.sub("", text), add_special_tokens=False).ids)

    def _markup(self, text: str) -> list[int]:
        return list(self._marked.encode(text, add_special_tokens=False))

    @cached_property
    def _assistant(self) -> list[int]:
        return self._markup(f"{START}assistant\n")

    @cached_property
    def _user(self) -> list[int]:
        return self._markup(f"{START}user\n")

    @cached_property
    def _tail(self) -> list[int]:
        return self._markup(f"{END}\n{START}assistant\n")

    @cached_property
    def _reference_tail(self) -> list[int]:
        return self._markup(f"{END}\n")
