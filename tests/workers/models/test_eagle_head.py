"""Logits and states of an EAGLE-3 head equal those of plain torch, in each form of its files and from any start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenloom.ipc.spec.config.speculation import DraftSpec
from tokenloom.ipc.spec.config.weight_files import file_by_tensor
from tokenloom.ipc.spec.drafts.eagle_file import read_eagle_head
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.contract import CacheGroup
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.kernels.select import Ops, select_ops
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.eagle_heads import plain_pass, random_head, write_head
from tokenloom.tests.workers.paged_run import CPU, load, make_metadata
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load_head import DraftHead, load_head
from tokenloom.workers.step.model_step import StepContext

HIDDEN, VOCAB_SIZE, BLOCK_SIZE = 64, 271, 8
FORMS = {  # form of the file, tokens guessed, whether the residual is normalized, own embedding
    "specforge, some tokens": ("specforge", 60, False, False),
    "speculators, all tokens": ("speculators", VOCAB_SIZE, True, True),
}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("ops", [None, ReferenceOps()], ids=["kernels", "torch"])
def test_a_head_equals_plain_torch(form: str, ops: Ops | None, tmp_path: Path) -> None:
    """Also behind the trained length, and with blocks before its start, whose keys are not read."""
    target = tiny_checkpoint(tmp_path / "m", "gemma2", seed=1, num_hidden_layers=6)
    kind, num_guessed, is_normed, has_embedding = FORMS[form]
    tensors = random_head(HIDDEN, VOCAB_SIZE, num_guessed, 3, has_embedding)
    path = write_head(tmp_path / "h", tensors, VOCAB_SIZE, [1, 3, 4], kind, norm_before_residual=is_normed)
    config = load_model_config(target)
    layer, head = read_eagle_head(path, file_by_tensor(path), config)
    assert head.depths == [1, 3, 4]
    model = load(target, ops=ops)
    chosen = ops or select_ops(CPU, torch.float32)
    draft = DraftSpec(folder=str(path), model=layer, head=head, weights="")
    ours = load_head(draft, head, model, 512, torch.float32, CPU, chosen, ParallelGroup())
    table = tensors["embed_tokens.weight"] if has_embedding else embedding_of(model, VOCAB_SIZE)

    generator = torch.Generator().manual_seed(5)
    aux = torch.randn(45, 3 * HIDDEN, generator=generator)
    token_ids = torch.randint(VOCAB_SIZE, (45,), generator=generator)
    start = 2 * BLOCK_SIZE
    states = aux @ tensors["fc.weight"].T
    expected = plain_pass(tensors, states, table[token_ids], is_residual_normed=is_normed, first=start)
    found = run(ours, aux, token_ids, start)
    scale = expected[1].abs().max().item()
    torch.testing.assert_close(found[0], expected[0], atol=1e-5 * expected[0].abs().max().item(), rtol=0)
    guessed = torch.arange(num_guessed) + tensors.get("d2t", torch.tensor(0))
    torch.testing.assert_close(found[1][:, guessed], expected[1], atol=1e-5 * scale, rtol=0)
    assert (found[1] > -torch.inf).sum() == 45 * num_guessed


@torch.inference_mode()
def embedding_of(model: object, vocab_size: int) -> Tensor:
    return model.embed(torch.arange(vocab_size)).clone()  # type: ignore[attr-defined,no-any-return]


@torch.inference_mode()
def run(head: DraftHead, aux: Tensor, token_ids: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Compute tokens at positions from `start` on, in chunks. The row's table begins with the block of its start."""
    (spec,) = head.kv_cache_specs(BLOCK_SIZE, torch.float32)
    cache = torch.full(spec.shape(10), 1000.0)
    blocks, parts = [7, 3, 9, 1, 4, 2], []
    for first, count in ((0, 20), (20, 1), (21, 1), (22, 23)):
        metadata = make_metadata([(first, count, blocks)], BLOCK_SIZE)
        metadata.positions.add_(start)
        states = head.fuse(aux[first : first + count])
        context = StepContext([CacheGroup(cache, metadata)], head_states=states)
        own, logits = head.forward_logits(token_ids[first : first + count], torch.arange(count), context)
        parts.append((own.clone(), logits.clone()))
    own, logits = (torch.cat(each) for each in zip(*parts, strict=True))
    return own, logits
