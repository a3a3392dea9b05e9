"""Arguments: the arguments of a module's call, with the places of the hidden states and of the angles (the cosines and
sines of rotary embeddings) among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Angles: TypeAlias = tuple[Tensor, Tensor]  # cosines and sines [1, T, n] of T tokens; both halves of n are equal
Place: TypeAlias = int | str  # an argument's index, or its name if it is passed by name


@dataclass(frozen=True, eq=False)
class Arguments:
    """Arguments of a call. Other calls of the module have hidden states and angles at the same places."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    hidden_at: Place
    angles_at: Place | None  # None: no argument is a pair of cosines and sines

    @classmethod
    def of(cls, args: tuple[Any, ...], options: dict[str, Any]) -> Arguments | None:
        """Find the places and return the arguments; None if no argument can be hidden states [1, T, n]."""
        places: list[tuple[Place, Any]] = [*enumerate(args), *options.items()]
        hidden_at = next((place for place, each in places if _is_packed(each)), None)
        angles_at = next((place for place, each in places if _are_angles(each)), None)
        return None if hidden_at is None else cls(args, options, hidden_at, angles_at)

    def found(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, Angles | None]:
        """Return the hidden states and the angles of another call; the angles are None if `angles_at` is."""
        angles = None if self.angles_at is None else _at(args, options, self.angles_at)
        return _at(args, options, self.hidden_at), angles

    def drawn(self, scale: float, position: int) -> Arguments:
        """Return similar arguments: random hidden states of this scale, and random cosines and sines, all in float32 on
        the host; tensors of integers, such as positions, with values of `position` or more; others as they are."""
        places = {place: self._drawn(place, each, scale, position) for place, each in enumerate(self.args)}
        options = {name: self._drawn(name, each, scale, position) for name, each in self.options.items()}
        return Arguments(tuple(places.values()), options, self.hidden_at, self.angles_at)

    def _drawn(self, place: Place, given: Any, scale: float, position: int) -> Any:
        if place == self.hidden_at:
            return scale * torch.randn(given.shape)
        if place == self.angles_at:
            halves = [torch.randn(*each.shape[:-1], each.shape[-1] // 2) for each in given]
            return tuple(torch.cat([half, half], dim=-1) for half in halves)
        if isinstance(given, Tensor) and not given.is_floating_point():
            return given.cpu() * 7919 + position
        return given


@contextlib.contextmanager
def recorded_arguments(model: nn.Module) -> Iterator[dict[nn.Module, Arguments]]:
    """Yield a dict that, while `model` runs in this context, gets the last arguments of each of its modules that has
    children and is given hidden states."""
    recorded: dict[nn.Module, Arguments] = {}

    def note(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        arguments = Arguments.of(args, options)
        if arguments is not None:
            recorded[module] = arguments

    hook: Callable[..., None] = note
    hooks = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if next(module.children(), None) is not None
    ]
    try:
        yield recorded
    finally:
        for each in hooks:
            each.remove()


def _at(args: tuple[Any, ...], options: dict[str, Any], place: Place) -> Any:
    return args[place] if isinstance(place, int) else options[place]


def _is_packed(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3 and given.shape[0] == 1


def _are_angles(given: Any) -> bool:
    if not isinstance(given, tuple) or len(given) != 2 or not all(map(_is_packed, given)):
        return False
    if given[0].shape != given[1].shape or given[0].shape[-1] % 2:
        return False
    return all(torch.equal(*each.chunk(2, dim=-1)) for each in given)
