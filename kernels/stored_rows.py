"""StoredRows: a matrix whose rows lie in memory as a GGUF file stores them, for kernels that pack them from there.

The memory is a mapped file. Reads nothing itself; knows no names and no shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from torch import Tensor

GROUP = 32  # number of inputs that share a scale, unless a row has one
BLOCK = 256  # number of inputs that share the numbers that their lines' scales are multiples of
BLOCK_KINDS = (  # formats of blocks that can be packed; the first three are floats
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)

NUM_FLOAT_KINDS = 3


class Multiples(IntEnum):
    """The whole numbers that scales and mins are multiples of a block's by: MultiplesKind in kernels.h."""

    NONE = 0
    OF_LINES = 1
    OF_HALVES = 2
    PAIRS_OF_HALVES = 3


@dataclass(frozen=True)
class CodeForm:
    """The codes that rows become. Those of less than 8 bits are as they are stored; of 8 bits, codes that are not
    stored so are rounded to them."""

    num_bits: int
    has_zeros: bool = False  # half of the codes' range stands for 0
    has_mins: bool = False
    multiples: Multiples = Multiples.NONE
    levels: tuple[int, ...] | None = None  # the int8 values of the 16 codes
    is_by_row: bool = False  # elements are rounded to bfloat16 and get one scale for each row; of 8 bits only


INT8 = CodeForm(8)
INT8_BY_ROW = CodeForm(8, is_by_row=True)


@dataclass(frozen=True, eq=False)
class StoredRows:
    """A matrix [out, in] in blocks of 32 or 256 inputs. Rows may have different formats, which become different forms.

    Row o begins at addresses[o], in memory that `owner` keeps mapped.
    """

    addresses: Tensor  # [out] int64; 0: a row of zeros, if the form is by row
    kinds: Tensor  # [out] uint8: an index of BLOCK_KINDS for each row; floats only if the form is by row
    forms: Tensor  # [out] uint8: an index of `known_forms` for each row
    known_forms: tuple[CodeForm, ...]  # a form by row is the only one
    is_exact: bool  # whether the codes of each form stand for the floats that are stored
    num_inputs: int
    owner: object
    read_floats: Callable[[], Tensor]  # reads the matrix [out, in] by plain torch

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.addresses), self.num_inputs

    def joint_forms(self, rows: Tensor) -> Tensor:
        """Return the form that each list of rows takes together: an index of `known_forms`, or their number for INT8 if
        the rows have different ones. rows: [n, size] int64 → [n] int64"""
        forms = self.forms[rows].long()
        least = forms.amin(1)
        return least.where(least == forms.amax(1), len(self.known_forms))

    def keeps_floats(self, rows: Tensor) -> bool:
        """Whether the form that each list of rows takes together stands for the floats that are stored. rows: [n, size]
        int64."""
        return self.is_exact and bool((self.joint_forms(rows) < len(self.known_forms)).all())

    def select_outputs(self, outputs: Tensor) -> StoredRows:
        """Return the matrix with only the given outputs, in the given order. outputs: [n] int64."""
        return replace(
            self,
            addresses=self.addresses[outputs],
            kinds=self.kinds[outputs],
            forms=self.forms[outputs],
            read_floats=lambda: self.read_floats()[outputs],
        )
