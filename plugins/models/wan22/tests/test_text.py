"""Text as diffusers' WanPipeline treats it: cleaned, tokenised, padded with zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

TEXTS = ["a cat", "", "  caf&eacute; &amp;amp; Ünïcödé\n\n in   the\train ", "schÃ¶n \u3000\x1c\x85 x", "long " * 40]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_cleaning_is_the_references(text):
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    from omni_plugin_wan22.text import clean

    assert clean(text) == prompt_clean(text)


@pytest.mark.parametrize("text", TEXTS, ids=repr)
@pytest.mark.parametrize("length", [1, 16, 64])
def test_embeddings_are_the_references(model, reference, text, length):
    expected = reference.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=length)[0]
    with torch.inference_mode():
        ours = model.text.encode(["something else", text], length)[1:]
    assert ours.shape == expected.shape == (1, length, 32)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(ours == 0, expected == 0)
