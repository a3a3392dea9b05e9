"""Sampling of the commands: what is given, then the model's defaults, then a first impression."""

from __future__ import annotations

import argparse

import pytest

from tokenloom import SamplingParams
from tokenloom.frontend.cli.attach import add_engine_choice, add_sampling, open_engine, sampling_params
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.params.sampling_defaults import FIRST_IMPRESSION


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampling(parser, 7)
    add_engine_choice(parser, takes_word=True)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "words, defaults, expected",
    [
        ((), {}, SamplingParams(max_tokens=7, **FIRST_IMPRESSION)),
        ((), {"max_tokens": 5}, SamplingParams(max_tokens=5, **FIRST_IMPRESSION)),
        ((), {"temperature": 0.6, "top_k": 20}, SamplingParams(max_tokens=7, temperature=0.6, top_k=20)),
        (("--top-p", "0.5"), {"temperature": 0.6}, SamplingParams(max_tokens=7, temperature=0.6, top_p=0.5)),
        (("--temperature", "0"), {}, SamplingParams(**{"max_tokens": 7, **FIRST_IMPRESSION, "temperature": 0.0})),
        (("--max-tokens", "3"), {"max_tokens": 5, "top_p": 0.5}, SamplingParams(max_tokens=3, top_p=0.5)),
    ],
)
def test_given_parameters_precede_the_models_and_these_a_first_impression(
    words: tuple[str, ...], defaults: dict[str, float], expected: SamplingParams
) -> None:
    assert sampling_params(parse(*words), defaults, 7) == expected


@pytest.mark.parametrize(
    "words", [("http://a:1", "--model", "m"), ("m", "--address", "ipc:///a"), ("--model", "m", "--address", "ipc:///a")]
)
def test_two_names_of_an_engine_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="name two engines"):
        open_engine(parse(*words))
