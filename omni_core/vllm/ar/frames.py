"""What a talker's step is beside the backbone: the frame before it embedded, and its own frame drawn and kept.

Both are fixed sequences of kernels over the tensors of ``Rows``, which a platform that can records for each batch size
and replays as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from omni_core.ar.contract import TalkerModel
from omni_core.ar.sampling import SampleCodes, sample_codes
from omni_core.vllm.ar.slots import Rows

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""See ``Platform.capture``."""

_WARPS = ("temperature", "top_k", "top_p")

Recorded = tuple[Callable[[], None], torch.Tensor]


@dataclass
class FrameInputs:
    """What drawing a frame reads beside ``Rows``, one row for each request of the batch.

    Attributes:
        logits: [n, vocabulary], of the first code.
        hidden: [n, hidden], the backbone's last hidden state.
        slots: int64 [n].
        positions: int64 [n], where the frame will be an input.
        num_sampled: int32 [n], 0 where the frame is dropped, since the prompt goes on.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    num_sampled: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def head(self, count: int) -> FrameInputs:
        """The first ``count`` rows, as views."""
        return FrameInputs(*(tensor[:count] for tensor in self.tensors()))


class FrameSteps:
    """Embeds and draws frames for a batch; ``capture`` makes graphs, without which both run as they are.

    Args:
        model: the family's.
        rows: what is kept of the requests.
        embeds: [tokens, hidden], where the backbone's inputs lie; ``embed`` writes the first rows.
        sample: the platform's own way to draw, if it has one.
    """

    def __init__(self, model: TalkerModel, rows: Rows, embeds: torch.Tensor, sample: SampleCodes | None = None) -> None:
        self.model, self.rows, self.embeds = model, rows, embeds
        self._sample = sample or _sample
        self._device = embeds.device
        self._true = torch.ones((), dtype=torch.bool, device=embeds.device)
        self._groups = torch.arange(model.num_code_groups, device=embeds.device)[:, None]
        self._inputs: FrameInputs | None = None
        self._graphs: dict[int, tuple[Recorded, Recorded]] = {}
        self._recordings: Callable[[], None] = lambda: None
        rows.on_move = self._record_again

    # The frame before

    def embed(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Put the inputs of requests that decode, one position each, into the first rows of ``embeds``."""
        count = len(slots)
        size = self._size(count)
        if size is None or self._inputs is None:
            self.embeds[:count] = self.embed_frames(slots, positions)
            return
        self._put(size, count, slots=slots, positions=positions)
        self._graphs[size][0][0]()

    def embed_frames(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inputs at positions behind the prompt, [n, hidden]; int64 [n] both."""
        rows = self.rows.slot_rows[slots]
        frames = self._frames(rows, positions)
        text = self.rows.text[rows, frames.clamp(max=self.rows.max_frames - 1)].long()
        text = torch.where(frames < self.rows.text_length[rows], text, self.model.pad_text_id)
        embedded = self.model.embed_frames(self.rows.codes[rows, frames].long())
        return embedded + self.model.embed_text(text)

    def _frames(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The number of the frame at each position; what is none of a request's becomes the last, which is not kept."""
        frames = positions - self.rows.prompt_length[rows]
        return torch.where((frames >= 0) & (frames < self.rows.max_frames), frames, self.rows.max_frames)

    # The frame that is drawn

    def draw(self, inputs: FrameInputs) -> torch.Tensor:
        """Draw a frame for each request, and keep it: codes int64 [n, code groups], the caller's own."""
        count = len(inputs.slots)
        size = self._size(count)
        if size is None or self._inputs is None:
            return self._draw(inputs)
        self._put(size, count, **dict(zip((f.name for f in fields(inputs)), inputs.tensors(), strict=True)))
        replay, codes = self._graphs[size][1]
        replay()
        return codes[:count].clone()

    def _draw(self, inputs: FrameInputs) -> torch.Tensor:
        kept, groups = self.rows, self.model.num_code_groups
        rows = kept.slot_rows[inputs.slots]
        frames = self._frames(rows, inputs.positions)
        integers, reals = kept.integers[rows].t().contiguous(), kept.reals[rows].t().contiguous()
        settings = dict(zip(kept.INTEGERS + kept.REALS, (*integers, *reals), strict=True))
        counters = frames * groups + self._groups  # [groups, n]

        def choose(
            logits: torch.Tensor, group: int, table: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            temperature, top_k, top_p = (settings[f"{'' if group else 'token_'}{name}"] for name in _WARPS)
            return self._sample(logits, temperature, top_k, top_p, settings["seed"], counters[group], table)

        logits = self._penalise(inputs.logits, kept.seen[rows], settings["penalty"])
        early = (frames < settings["min_frames"])[:, None] & (self._vocabulary(logits) == self.model.end_code)
        first, _ = choose(logits.masked_fill(early, float("-inf")), 0)
        codes = self.model.predict_codes(inputs.hidden, first, choose)
        keeping = inputs.num_sampled > 0
        kept.codes.index_put_((rows, torch.where(keeping, frames, kept.max_frames)), codes.to(torch.int16))
        kept.seen.index_put_((torch.where(keeping, rows, kept.nobody), first), self._true)
        return codes

    def _vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.arange(logits.shape[1], device=logits.device)

    @staticmethod
    def _penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        """Make what each request has drawn before less likely, as transformers does, by the request's own penalty."""
        scores, penalty = logits.float(), penalty[:, None]
        return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)

    # Graphs

    def capture(self, record: Capture, sizes: Sequence[int], vocabulary: int, logits_dtype: torch.dtype) -> None:
        """Record both steps for each of ``sizes`` with the platform's ``record``; a batch uses the smallest that
        holds it."""
        largest, device = max(sizes), self._device
        self._inputs = FrameInputs(
            logits=torch.zeros(largest, vocabulary, dtype=logits_dtype, device=device),
            hidden=torch.zeros(largest, self.embeds.shape[1], dtype=self.embeds.dtype, device=device),
            slots=torch.full((largest,), self.rows.num_slots, dtype=torch.int64, device=device),
            positions=torch.zeros(largest, dtype=torch.int64, device=device),
            num_sampled=torch.zeros(largest, dtype=torch.int32, device=device),
        )

        def all_sizes() -> None:
            assert self._inputs is not None
            for size in sorted(sizes, reverse=True):
                head = self._inputs.head(size)
                self._graphs[size] = record(partial(self._embed_into, head)), record(partial(self._draw, head))

        self._recordings = all_sizes
        all_sizes()

    def _embed_into(self, inputs: FrameInputs) -> torch.Tensor:
        into = self.embeds[: len(inputs.slots)]
        return into.copy_(self.embed_frames(inputs.slots, inputs.positions))

    def _record_again(self) -> None:
        """The tensors of ``Rows`` have moved, which happens when very many requests wait to be read."""
        self._graphs.clear()
        self._recordings()

    def _size(self, count: int) -> int | None:
        return min((size for size in self._graphs if size >= count), default=None)

    def _put(self, size: int, count: int, **values: torch.Tensor) -> None:
        """Fill the inputs of the graphs; slots behind the batch are nobody's."""
        assert self._inputs is not None
        for name, value in values.items():
            getattr(self._inputs, name)[:count].copy_(value)
        if count < size:
            self._inputs.slots[count:size].fill_(self.rows.num_slots)


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    codes = sample_codes(logits, temperature, top_k, top_p, seeds, counters)
    return codes, None if table is None else F.embedding(codes, table)
