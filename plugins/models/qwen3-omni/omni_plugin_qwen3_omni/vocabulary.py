"""A text tokenizer with the files, the special tokens and the bytes of Qwen3-Omni's, and few words. No network.

Every text has tokens: words that are not known are spelled in bytes. The words of the chat markup are one token each,
as the talker needs: ``<|im_start|>assistant\\n`` is three.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>",
    "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
]  # fmt: skip
"""Qwen3-Omni's added tokens in order of their numbers, 151643 to 151675."""

ORDINARY = range(14, 26)
"""Positions in ``SPECIAL`` of tokens that stay in decoded text."""

NAMED = {
    "image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
}  # fmt: skip
"""Attributes of the tokenizer that the processor reads."""

WORDS = ["assistant", "user", "system", "Ġthe", "Ġin", "ing", "Ġand", "Ġof"]
"""Each is one token; ``Ġ`` is a space."""

GENUINE = {"user": 872, "system": 8948, "assistant": 77091}
GENUINE_SIZE = 151643
"""Numbers in Qwen's vocabulary, and how many tokens come before the special ones."""


def token_id(token: str, *, genuine: bool) -> int:
    """The number of a special token or a word in the vocabulary that ``write_tokenizer`` writes."""
    if token in SPECIAL:
        return (GENUINE_SIZE if genuine else len(_vocabulary(genuine=False))) + SPECIAL.index(token)
    return GENUINE[token] if genuine else _vocabulary(genuine=False)[token]


def size(*, genuine: bool) -> int:
    """Rows of a text embedding for that vocabulary: 152064 in released checkpoints, else as few as there can be."""
    return 152064 if genuine else -(-(token_id(SPECIAL[-1], genuine=False) + 1) // 64) * 64


def write_tokenizer(folder: Path, *, genuine: bool, chat_template: str) -> None:
    """Write ``vocab.json``, ``merges.txt`` and ``tokenizer_config.json``.

    Args:
        folder: where to.
        genuine: with the numbers of Qwen's tokens, for which 150 thousand that no text contains are made up; otherwise
            numbered without gaps.
        chat_template: what the configuration says it is.
    """
    first = token_id(SPECIAL[0], genuine=genuine)
    added = {
        str(first + index): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": index not in ORDINARY,
        }
        for index, token in enumerate(SPECIAL)
    }  # fmt: skip
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [token for i, token in enumerate(SPECIAL) if i and i not in ORDINARY],
        **NAMED,
        "bos_token": None,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": NAMED,
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3OmniMoeProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    merges = "".join(f"{left} {right}\n" for left, right in _merges())
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(_vocabulary(genuine=genuine), ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _merges() -> list[tuple[str, str]]:
    """Words grow from their first letter; two words that begin alike share what they begin with."""
    return list(dict.fromkeys((word[:end], word[end]) for word in WORDS for end in range(1, len(word))))


def _vocabulary(*, genuine: bool) -> dict[str, int]:
    tokens = [*bytes_to_unicode().values(), *("".join(pair) for pair in _merges())]
    if not genuine:
        return {token: number for number, token in enumerate(tokens)}
    vocabulary = dict(GENUINE)
    free = iter(sorted(set(range(GENUINE_SIZE)) - set(GENUINE.values())))
    for token in tokens:
        if token not in vocabulary:
            vocabulary[token] = next(free)
    for number in free:
        vocabulary[f"ĠĠ{number}"] = number
    return dict(sorted(vocabulary.items(), key=lambda item: item[1]))
