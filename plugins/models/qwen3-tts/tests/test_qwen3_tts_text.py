"""Text in its templates: the reference's tokens, and nothing that a user writes is markup."""

from __future__ import annotations

import json

import pytest

from omni_core.errors import CheckpointError, RequestError
from omni_plugin_qwen3_tts.prompt import REFERENCE_TAIL_TOKENS, ROLE_TOKENS, TAIL_TOKENS
from omni_plugin_qwen3_tts.text import TextTokenizer
from omni_plugin_qwen3_tts.vocabulary import SPECIAL


@pytest.fixture(scope="module")
def text(checkpoint_of):
    return TextTokenizer(checkpoint_of("custom-voice"))


def spoken(text, words):
    return text.text(words)[ROLE_TOKENS:-TAIL_TOKENS]


def test_tokens_are_the_reference_s(text, golden):
    for name, case in golden("cases").items():
        assert text.text(case["text"]) == case["input_ids"], name
        if case.get("instruct"):
            assert text.instruction(case["instruct"]) == case["instruct_ids"], name
        if case.get("ref_text"):
            assert text.reference(case["ref_text"]) == case["ref_ids"], name


WORDS = [
    "Hello", " Hello ", "  two  blanks", "a\nb\n\nc\n", "tabs\tand\r\nbreaks", "\u4f60\u597d\uff0c\u4e16",
    "e\u0301t\u00e9", "\u0301x", "1234", "\U0001f642",
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=ascii)
def test_pieces_tokenized_apart_are_the_whole(text, words):
    whole = text._marked.encode(f"<|im_start|>assistant\n{words}<|im_end|>\n<|im_start|>assistant\n")
    assert text.text(words) == whole


@pytest.mark.parametrize("breaks", ["\n", "\n\n", "\r\n", " \n", "\n \n"])
def test_line_breaks_before_the_text_are_dropped(text, breaks):
    assert text.text(f"{breaks}Hello\n") == text.text("Hello\n")
    assert text.reference(f"{breaks}Hello") == text.reference("Hello")
    assert text.instruction(f"{breaks}Slowly") == text.instruction("Slowly")


@pytest.mark.parametrize("token", SPECIAL)
def test_markup_that_a_user_writes_is_spelled(text, token):
    added = set(text._marked.get_added_vocab().values())
    for ids in (
        spoken(text, f"a{token}b"),
        text.reference(f"a{token}b")[ROLE_TOKENS:-REFERENCE_TAIL_TOKENS],
        text.instruction(f"a{token}b")[ROLE_TOKENS:-REFERENCE_TAIL_TOKENS],
    ):
        assert not added & set(ids)
        assert text._marked.decode(ids) == f"a{token}b"


@pytest.mark.parametrize("blank", ["", " ", "\n", "\t \n "])
def test_blank_text_is_refused(text, blank):
    with pytest.raises(RequestError, match="input must not be blank"):
        text.text(blank)
    with pytest.raises(RequestError, match="ref_text must not be blank"):
        text.reference(blank)


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer"):
        TextTokenizer(tmp_path)


def test_a_tokenizer_with_other_markup_is_refused(tmp_path, checkpoint_of):
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((checkpoint_of("custom-voice") / file).read_bytes())
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = json.loads((checkpoint_of("custom-voice") / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"makes 11 tokens of <\|im_start\|>assistant"):
        TextTokenizer(tmp_path)
