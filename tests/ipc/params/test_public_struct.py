"""Errors of a call of a parameter struct say what to write; other ways to make one stay as they are."""

from __future__ import annotations

import msgspec
import pytest

from tokenloom import BeamSearchParams, LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: SamplingParams(temprature=0),
            r"SamplingParams\(\) has no field 'temprature': did you mean temperature\?",
        ),
        (lambda: SamplingParams(0.5), r"SamplingParams\(0\.5\) does not name a field: write NAME=0\.5"),
        (lambda: SamplingParams(zzz=1), r"SamplingParams\(\) has no field 'zzz'$"),
        (lambda: PoolingParams(dimension=1), "did you mean dimensions"),
        (lambda: StructuredOutputsParams(jsn="{}"), "did you mean json"),
        (lambda: BeamSearchParams(beam_with=1), "did you mean beam_width"),
        (lambda: LoRARequest("a", lora_pth="/x"), "did you mean lora_path"),
        (lambda: PoolingParams(dim=1), r"PoolingParams\(\) has no field 'dim': did you mean dimensions\?"),
        (lambda: LoRARequest(lora="a"), r"did you mean lora_name or lora_int_id or lora_path\?"),
        (lambda: StructuredOutputsParams(schema="{}"), r"has no field 'schema'; it has json, json_object, regex, "),
        (lambda: LoRARequest(), r"LoRARequest\(\) misses lora_name: give it$"),
    ],
)
def test_an_unknown_field_is_named_with_similar_ones(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(TypeError, match=message):
        call()


def test_other_ways_to_make_one_are_unchanged() -> None:
    params = SamplingParams(temperature=0.5, top_k=3)
    assert msgspec.structs.replace(params, top_k=4).top_k == 4
    assert msgspec.convert({"temperature": 0.5, "top_k": 3}, SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert LoRARequest("a", 1, "/x").lora_path == "/x"
