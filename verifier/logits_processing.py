"""Penalties, bias and masks on rows of logits, each row with the history that it has.

Row j of a request is judged as plain decoding would judge it after the first j drafts. The
repetition penalty looks at prompt and output, as transformers does; the frequency and presence
penalties look at the output alone, as the OpenAI interface does.

Axes: J rows of one request, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.protos.sampling import SamplingParameters


class LogitsProcessor:
    """The processing of one request, with counts of its committed tokens."""

    def __init__(
        self,
        parameters: SamplingParameters,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        columns: int,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self.columns = columns
        self._penalises_output = bool(
            parameters.frequency_penalty != 0 or parameters.presence_penalty != 0
        )
        self._seen = torch.zeros(columns, dtype=torch.bool, device=device)
        self._counts = torch.zeros(columns, dtype=torch.float32, device=device)
        self._seen[torch.tensor(prompt_ids, dtype=torch.long, device=device)] = True
        self.commit(output_ids)
        self._bias: tuple[Tensor, Tensor] | None = None
        if parameters.logit_bias:
            ids, values = zip(*parameters.logit_bias, strict=True)
            self._bias = (
                torch.tensor(ids, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
        self._forbidden: Tensor | None = None
        if parameters.allowed_token_ids is not None:
            self._forbidden = torch.ones(columns, dtype=torch.bool, device=device)
            self._forbidden[torch.tensor(parameters.allowed_token_ids, device=device)] = False

    @staticmethod
    def needed(parameters: SamplingParameters) -> bool:
        """Whether the parameters change any logit."""
        return (
            parameters.repetition_penalty != 1
            or parameters.frequency_penalty != 0
            or parameters.presence_penalty != 0
            or bool(parameters.logit_bias)
            or parameters.allowed_token_ids is not None
        )

    def commit(self, token_ids: Sequence[int]) -> None:
        """Counts tokens that became part of the output."""
        for token in token_ids:
            self._seen[token] = True
            self._counts[token] += 1

    def apply(self, rows: Tensor, draft_ids: Sequence[int]) -> None:
        """Changes rows in place.

        Args:
            rows: float32 [J, V], of the last committed token and of each draft.
            draft_ids: the J - 1 drafts.
        """
        parameters = self._parameters
        if parameters.repetition_penalty != 1:
            seen = self._seen.repeat(len(rows), 1)
            for number, token in enumerate(draft_ids):
                seen[number + 1 :, token] = True
            penalty = parameters.repetition_penalty
            punished = torch.where(rows < 0, rows * penalty, rows / penalty)
            rows.copy_(torch.where(seen, punished, rows))
        if self._penalises_output:
            counts = self._counts.repeat(len(rows), 1)
            for number, token in enumerate(draft_ids):
                counts[number + 1 :, token] += 1
            rows -= parameters.frequency_penalty * counts
            rows -= parameters.presence_penalty * (counts > 0)
        if self._bias is not None:
            rows.index_add_(1, self._bias[0], self._bias[1].expand(len(rows), -1))
        if self._forbidden is not None:
            rows.masked_fill_(self._forbidden, float("-inf"))
