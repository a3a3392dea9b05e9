"""The two ends of a decoder, token ids to vectors and vectors to scores, shared by ranks along the vocabulary."""

from __future__ import annotations

from torch import Tensor

from ...kernels.ops import Ops, PackedLinear
from ..parallel import ParallelGroup
from ..weights import Checkpoint, Piece


def load_vocab_shard(
    checkpoint: Checkpoint, group: ParallelGroup, name: str, vocab_size: int, hidden_size: int
) -> Tensor:
    """This rank's rows of a [vocab_size, hidden_size] matrix; the padding of the vocabulary is zeros."""
    return checkpoint.load(Piece(f"{name}.weight", (vocab_size, hidden_size), 0, group.share_vocab(vocab_size)))


class VocabParallelEmbedding:
    """token ids [T] → vectors [T, hidden_size]: each rank looks up its own ids, the sum is everyone's."""

    def __init__(self, ops: Ops, group: ParallelGroup, table: Tensor | PackedLinear) -> None:
        self._ops = ops
        self._group = group
        self.table = table  # [this rank's ids, hidden_size]; packed if it is the weight of the head, too
        num_ids = table.shape[0] if isinstance(table, Tensor) else table.out_features
        self._first_id = group.rank * num_ids

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._group.all_reduce(self._ops.embedding(token_ids, self.table, self._first_id))


class LMHead:
    """Hidden states [n, hidden_size] → scores of all tokens on rank 0."""

    def __init__(self, ops: Ops, group: ParallelGroup, packed: PackedLinear, vocab_size: int) -> None:
        self._ops = ops
        self._group = group
        self._packed = packed
        self._vocab_size = vocab_size

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, vocab_size] float32 on rank 0, [0, vocab_size] on the others, which must call too."""
        shard = self._ops.logits(hidden, self._packed)
        scores = self._group.gather(shard)
        if scores is None:
            return shard.new_empty((0, self._vocab_size))
        return scores[:, : self._vocab_size]
