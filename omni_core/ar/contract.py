"""What a family supplies of a talker: an autoregressive network whose every step is a frame of several codes.

    prompt rows --> [ backbone ] --> first code --> [ code predictor ] --> the other codes of the frame
                        ^                                                        |
                        +------- embedding of the frame + embedding of a text id +

The class that vLLM loads is the family's, built from vLLM's layers like any model of vLLM's own, and has the methods
below. ``omni_core.vllm.ar`` does the rest: slots, embeddings of each step, sampling, codes out, text in, preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class ChooseCodes(Protocol):
    """Draws the codes of one group, as each request asked for."""

    def __call__(
        self, logits: torch.Tensor, group: int, table: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes and what they are to the next group.

        Args:
            logits: float [n, candidates].
            group: 1 or above.
            table: [candidates, width].

        Returns:
            int64 [n], and of ``table`` the rows of these, [n, width].
        """


class TalkerModel(Protocol):
    """The methods of a talker, beside those of every vLLM model.

    Attributes:
        num_code_groups: codes of a frame, the first included.
        end_code: the first code that ends a request; its frame has no sound.
        pad_text_id: the text id added to frames beyond the text's end.
        last_hidden: [n, hidden], the rows that were last sampled from; ``TalkerMixin`` keeps it.
    """

    num_code_groups: int
    end_code: int
    pad_text_id: int
    last_hidden: torch.Tensor

    def embed_prompt(self, prompt: Mapping[str, Any]) -> torch.Tensor:
        """The rows of a prompt, [n, hidden] in the model's dtype; the same for the same prompt."""

    def embed_frames(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [n, code groups] to [n, hidden]: what a frame is to the backbone."""

    def embed_text(self, text_ids: torch.Tensor) -> torch.Tensor:
        """int64 [n] to [n, hidden]."""

    def predict_codes(self, hidden: torch.Tensor, first: torch.Tensor, choose: ChooseCodes) -> torch.Tensor:
        """The codes of a frame, int64 [n, code groups], of which ``first`` is the first group.

        Args:
            hidden: [n, hidden], the backbone's last hidden state.
            first: int64 [n].
            choose: draws the codes of one group.
        """
