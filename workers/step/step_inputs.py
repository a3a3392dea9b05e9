"""The arrays of one step: the inputs of its rows, the prompt tokens to score, and the tokens that are expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...kernels.contract import AuxStates
from ..machine.arrays import I32, I64
from .step_layout import MediaInputs


class GroupInputs(NamedTuple):
    """Where the step's tokens are in the cache of one KV group."""

    slots: I64  # [T] block_id * block_size + offset; −1: do not write
    block_tables: I32  # [n, blocks of the longest row]; 0 past a row's last block, and for freed blocks
    num_freed: I64 | None = None  # [n] freed blocks, with which each table begins; None: the group frees none
    see_until: I32 | None = None  # [T] last index that a token of an encoder sees; None: its own


class StateInputs(NamedTuple):
    """The step's tokens in segments, and the blocks of states that each reads and writes; see StateMetadata."""

    segment_starts: I32  # [G + 1]
    reads: I32  # [G]; -1: zeros
    writes: I32  # [G]; -1: do not write


class StepInputs(NamedTuple):
    """The arrays of one step: n rows in compute order (rows with one token first), T tokens."""

    rows: I32  # [n]
    token_ids: I32  # [T]; −1 − row stands for the last sampled token of the row, which only the device knows
    positions: I64  # [T] index of each token in its row
    query_starts: I32  # [n + 1] tokens of row r are [query_starts[r], query_starts[r + 1])
    seq_lens: I32  # [n] context of each row, this step's tokens included
    groups: Sequence[GroupInputs]  # by KV group with keys and values
    num_decode_rows: int  # rows with exactly one token
    sampled_rows: I32  # [s] rows whose last known token is computed here, in the order of the message; with n drafts
    # a row is here 1 + n times in succession
    sampled_positions: I64  # [s] position of the token that each samples
    sampled_tokens: I64  # [s] index into the T tokens of the one before it
    token_slots: I32 | None = None  # [T] slot of each token's adapter; None: all 0
    token_types: I32 | None = None  # [T] for an encoder; None: all 0
    media: MediaInputs | None = None  # None: all tokens have the embeddings and positions of text
    drafts: I32 | None = None  # [s] the draft of each sample; NO_DRAFT: none; None: no row has any
    has_drafts: I32 | None = None  # [n] not 0 for a known token with drafts; None: no row has any
    states: StateInputs | None = None  # None: no layer keeps a state
    aux: AuxStates | None = None  # states of the residual stream that are kept; None: none
    needs_states: bool = False  # hidden states of the step are read, so that it cannot run as a graph
    head_states: Tensor | None = None  # [T, hidden_size] of the model, for a draft head that computes the step
    decoder: StepInputs | None = None  # the part that passes through the layers, if rows begin with clips; None: all


@dataclass(frozen=True)
class PromptSpan:
    """Prompt tokens of one row that this step scores, each with the hidden state of the token before it."""

    row: int
    num_top: int  # most likely tokens to return beside each
    first_token: int  # index into the T tokens of the token before the first
    first_position: int  # of the first token, in the prompt
    token_ids: I32  # [m]


@dataclass(frozen=True)
class ExpectedTokens:
    """Places, in the rows, of tokens that the device samples and the host has not received."""

    rows: I32  # [n]
    positions: I64  # [n]
    admissions: I64  # [n] how often the row had been admitted: a later request may own it by then
