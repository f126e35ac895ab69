from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from outrider.protos.sampling import InvalidField, SamplingParameters


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParameters(),
        SamplingParameters(temperature=0),
        SamplingParameters(temperature=1e-4, top_k=2**31 - 1, top_p=1e-6, min_p=1),
        SamplingParameters(repetition_penalty=1.3, frequency_penalty=-2, presence_penalty=2),
        SamplingParameters(logit_bias=((0, -100.0), (60, 5)), allowed_token_ids=(0, 60)),
    ],
)
def test_usable_parameters_pass(parameters: SamplingParameters) -> None:
    parameters.validate()
    parameters.validate(vocab_size=61)


UNUSABLE = [
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -1.0),
    ("temperature", 1e-50),  # 0 in float32: it would turn sampling into argmax
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.1),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("frequency_penalty", math.inf),
    ("presence_penalty", -math.inf),
    ("logit_bias", ((61, 1.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((1, math.nan),)),
    ("logit_bias", ((1, 1e31),)),
    ("logit_bias", ((1, 1.0), (1, 2.0))),
    ("logit_bias", ((1,),)),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (61,)),
    ("allowed_token_ids", (1, 1)),
]


@pytest.mark.parametrize(("field", "value"), UNUSABLE)
def test_an_unusable_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        SamplingParameters(**{field: value}).validate(vocab_size=61)
    assert caught.value.field.startswith(field)
    assert "is not usable; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_reads_as_promised_and_survives_a_pickle() -> None:
    error = InvalidField("temperature", math.nan, "give a finite number >= 0")
    assert str(error) == "temperature: nan is not usable; give a finite number >= 0"
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.field == "temperature"


def test_greedy_is_temperature_zero_only() -> None:
    assert SamplingParameters(temperature=0).greedy
    assert not SamplingParameters(temperature=1e-4).greedy
