"""HeadConfig: a draft head, a model of one layer that guesses tokens from hidden states of the engine's model.

At position p a head takes states of the token there and the embedding of the token at p + 1, and guesses that at p + 2.
For later drafts its own output stands in for the states of tokens that the model has not computed yet.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class HeadNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a head's tensors, without ".weight". Empty: the head has no such tensor."""

    layer: str  # prefix of the layer's tensors, with the dot
    projection: str  # makes one state of the states that the model gives, or of state and embedding
    embedding_norm: str
    state_norm: str
    norm: str
    embedding: str = ""  # the model's own is used
    head: str = ""  # likewise
    token_map: str = ""  # for each of the head's tokens, how much larger its id is in the model's vocabulary


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a head, beside that of its layer. "eagle3": arXiv 2503.01840; "mtp": a layer for multi-token
    prediction of the model's own checkpoint (arXiv 2412.19437, section 2.2)."""

    kind: Literal["eagle3", "mtp"]
    depths: list[int]  # of the states that it reads, see AuxStates; empty: the states behind the model's final norm
    state_size: int  # elements of each of these states
    vocab_size: int  # tokens that it can guess
    is_residual_normed: bool = False  # its layer adds to the normalized state, not to the state itself
    is_state_first: bool = False  # "mtp": in the input of the projection
    continues_normed: bool = False  # "mtp": its next state is that behind its final norm
    names: HeadNames

    @property
    def num_inputs(self) -> int:
        """Elements of the model's states of a token."""
        return self.state_size * max(len(self.depths), 1)
