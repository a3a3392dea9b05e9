"""CpuTable: an embedding in the blocks of a GGUF file, of which embed_blocks.c unpacks a row at each look-up."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass

import torch

from ..stored_rows import StoredRows
from . import library as c


@dataclass(frozen=True, eq=False)
class CpuTable:
    """An embedding's rows, `in_features` elements each, of `out_features` token ids. The last of them may have no row:
    they stand for zeros.

    The blocks are a copy. In the mapped file, the system could drop a page of rows and read it from the disk again in
    the middle of a step, and a file that is cut in place would end the process. A copy has no more bytes than these
    pages, and lets the file be closed.
    """

    struct: Structure  # c.StoredTable
    owner: object  # keeps the memory alive
    in_features: int
    out_features: int
    nbytes: int


def copy_table(library: c.KernelLibrary, rows: StoredRows) -> CpuTable:
    """Copy rows of one format of blocks. Rows of zeros are the last ones."""
    num_ids, num_columns = rows.shape
    addresses = rows.addresses[rows.addresses != 0].contiguous()
    kind = int(rows.kinds[0])
    blocks = torch.empty((len(addresses), library.block_row_bytes(kind, num_columns)), dtype=torch.uint8)
    library.copy_block_rows(addresses.data_ptr(), *blocks.shape, blocks.data_ptr(), torch.get_num_threads())
    struct = c.StoredTable(blocks.data_ptr(), *blocks.shape, num_columns, kind)
    return CpuTable(struct, blocks, num_columns, num_ids, blocks.nbytes)
