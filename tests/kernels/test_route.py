"""`route` chooses and weights experts as a loop over tokens and experts does."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tokenloom.kernels.contract import Routing
from tokenloom.kernels.reference import route


def route_one(scores: list[float], routing: Routing) -> dict[int, float]:
    """Return the weights of the chosen experts of one token, by plain arithmetic."""
    if routing.score == "softmax":
        total = sum(math.exp(score) for score in scores)
        values = [math.exp(score) / total for score in scores]
    else:
        values = [1 / (1 + math.exp(-score)) for score in scores] if routing.score == "sigmoid" else list(scores)
    bias = [0.0] * len(scores) if routing.choice_bias is None else routing.choice_bias.tolist()
    choice = [value + extra for value, extra in zip(values, bias, strict=True)]
    size = len(scores) // routing.num_groups
    groups = [sorted(choice[start : start + size], reverse=True) for start in range(0, len(scores), size)]
    worth = [group[0] if routing.group_score == "max" else sum(group[:2]) for group in groups]
    is_open = [sorted(worth, reverse=True).index(each) < routing.top_groups for each in worth]
    candidates = [expert for expert in range(len(scores)) if routing.num_groups == 1 or is_open[expert // size]]
    chosen = sorted(candidates, key=lambda expert: -choice[expert])[: routing.top_k]
    weights = {expert: values[expert] for expert in chosen}
    if routing.score == "softmax_of_chosen":
        total = sum(math.exp(weight) for weight in weights.values())
        weights = {expert: math.exp(weight) / total for expert, weight in weights.items()}
    if routing.is_normalized:
        total = sum(weights.values())
        weights = {expert: weight / total for expert, weight in weights.items()}
    factors = [1.0] * len(scores) if routing.expert_scales is None else routing.expert_scales.tolist()
    return {expert: weight * routing.scale * factors[expert] for expert, weight in weights.items()}


KINDS = list(itertools.product(("softmax", "sigmoid", "softmax_of_chosen"), (False, True), ("max", "top2")))


@pytest.mark.parametrize(("score", "has_bias", "group_score"), KINDS)
def test_weights_and_experts_are_those_of_a_loop(score: str, has_bias: bool, group_score: str) -> None:
    draw = random.Random(f"{score} {has_bias} {group_score}")
    for num_groups, top_groups, top_k, is_normalized in itertools.product((1, 2, 4), (1, 2), (1, 4), (False, True)):
        if top_groups > num_groups:
            continue
        routing = Routing(
            top_k,
            score,  # type: ignore[arg-type]  # parametrized
            torch.tensor([draw.gauss(0, 0.5) for _ in range(16)]) if has_bias else None,
            num_groups,
            top_groups,
            group_score,  # type: ignore[arg-type]
            is_normalized,
            scale=draw.uniform(0.5, 3),
            expert_scales=torch.tensor([draw.uniform(0.5, 2) for _ in range(16)]) if has_bias else None,
        )
        scores = torch.tensor([[draw.gauss(0, 2) for _ in range(16)] for _ in range(20)])
        weights, experts = route(scores, routing)
        assert experts.shape == weights.shape == (20, top_k)
        for token, row in enumerate(scores.tolist()):
            expected = route_one(row, routing)
            actual = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
            assert actual.keys() == expected.keys()
            assert actual == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_equal_scores_go_to_lower_ids() -> None:
    _, experts = route(torch.zeros(3, 8), Routing(3))
    assert experts.tolist() == [[0, 1, 2]] * 3
