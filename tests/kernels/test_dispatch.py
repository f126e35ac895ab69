from __future__ import annotations

import pytest
import torch

from outrider.kernels.dispatch import sampler_for
from outrider.kernels.draft_sampling import draft_and_pack
from outrider.kernels.rejection import verify_rejection
from tests.kernels.batches import chained, keys, many_keys, repeated


def test_the_torch_sampler_serves_the_cpu_and_says_so() -> None:
    sampler = sampler_for(torch.device("cpu"))
    assert sampler.name == "torch"
    assert sampler_for("cuda:0").name == "torch"
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    packed = sampler.draft_and_pack(logits, repeated(1.0, 2), many_keys(2))
    assert torch.equal(
        packed.token_ids, draft_and_pack(logits, repeated(1.0, 2), many_keys(2)).token_ids
    )
    rows = logits.repeat_interleave(2, dim=0)
    decided = sampler.verify(rows, chained([packed]), repeated(1.0, 2), many_keys(2), 30)
    same = verify_rejection(rows, chained([packed]), repeated(1.0, 2), many_keys(2), 30)
    assert torch.equal(decided.next_token_ids, same.next_token_ids)


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="device: 'meta' is not usable"):
        sampler_for("meta")


@pytest.mark.parametrize("method", ["block", "coupled", "argmax"])
def test_a_method_that_is_not_served_is_refused_by_name(method: str) -> None:
    with pytest.raises(ValueError, match=f"method: '{method}' is not served"):
        sampler_for("cpu", method)


def test_a4_two_seeds_sample_where_greedy_would_repeat() -> None:
    """At temperature 1.5 the outputs of two seeds differ; control: at 0 they do not."""
    sampler = sampler_for("cpu")
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0))
    drawn = {
        (temperature, seed): sampler.draft_and_pack(
            logits, repeated(temperature, 40), keys([seed] * 40)
        ).token_ids.tolist()
        for temperature in (0.0, 1.5)
        for seed in (1, 2)
    }
    assert drawn[1.5, 1] != drawn[1.5, 2]
    assert drawn[0.0, 1] == drawn[0.0, 2]
