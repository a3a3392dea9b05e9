"""The training of a draft head: its loss falls, its files are the public form, and the drafts that it counts as right
are those of a reader that knows the form alone and drafts token by token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tokenloom.scripts.train import draft_answers, train_draft  # noqa: E402
from tokenloom.scripts.train.draft_windows import Text, pack  # noqa: E402

VOCAB, LENGTH, DEPTHS = 96, 80, [2, 4, 5]  # tokens, tokens of a window, of 8 layers


class Reader:
    """An EAGLE-3 head by its files, for one text at a time."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tensors = load_file(folder / "model.safetensors")
        self.model, self.embed = model, model.model.embed_tokens

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def normed(self, rows: Tensor, name: str) -> Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return rows * scale * self.weight(name)

    def states(self, ids: list[int]) -> Tensor:
        found = self.model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        depths = self.config["eagle_aux_hidden_state_layer_ids"]
        return torch.cat([found[each][0] for each in depths], -1) @ self.weight("fc").T

    def layer(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Return the states behind the layer, of rows at positions 0, 1, …"""
        size = self.config["head_dim"]
        inputs = [self.normed(embedded, "midlayer.input_layernorm"), self.normed(states, "midlayer.hidden_norm")]
        q, k, v = (
            (torch.cat(inputs, -1) @ self.weight(f"midlayer.self_attn.{each}_proj").T).unflatten(-1, (-1, size))
            for each in "qkv"
        )
        angles = torch.arange(len(states))[:, None] * 10000.0 ** -(torch.arange(size // 2) * 2 / size)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.view_as_real(torch.complex(*each.chunk(2, -1)) * turns).transpose(-1, -2).flatten(-2)
            for each in (q, k)
        )
        rows = []
        for head in range(q.shape[1]):
            own = head * k.shape[1] // q.shape[1]
            scores = (q[:, head] @ k[:, own].T / math.sqrt(size)).masked_fill(
                ~torch.ones(len(q), len(q), dtype=torch.bool).tril(), -math.inf
            )
            rows.append(scores.softmax(-1) @ v[:, own])
        states = states + torch.cat(rows, -1) @ self.weight("midlayer.self_attn.o_proj").T
        inner = self.normed(states, "midlayer.post_attention_layernorm")
        gate, up, down = (self.weight(f"midlayer.mlp.{each}_proj") for each in ("gate", "up", "down"))
        return states + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T

    def num_right(self, ids: list[int], states: Tensor, known: int, most: int) -> int:
        """Return how many drafts behind `ids[:known]` are right, up to the first wrong one, `most` or the text's end.
        states: of all tokens; the model has not computed the last known one yet."""
        states = states[: known - 1]
        for count in range(min(most, len(ids) - known)):
            behind = self.layer(states, self.embed(torch.tensor(ids[1 : known + count])))[-1:]
            index = int((self.normed(behind, "norm") @ self.weight("lm_head").T).argmax())
            if index + int(self.tensors["d2t"][index]) != ids[known + count]:
                return count
            states = torch.cat((states, behind))
        return min(most, len(ids) - known)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random model whose tokens often repeat; its folder has no tokenizer, as kept answers need none."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    llama = LlamaForCausalLM(config).eval()
    llama.folder = tmp_path_factory.mktemp("model")
    llama.save_pretrained(llama.folder)
    return llama


def answered(model: Any, rng: Random, count: int, *, is_greedy: bool) -> list[Text]:
    prompts = [[rng.randrange(VOCAB) for _ in range(4)] for _ in range(count)]
    with torch.inference_mode():
        rows = model.generate(
            torch.tensor(prompts), do_sample=not is_greedy, max_new_tokens=30, eos_token_id=None, pad_token_id=0
        )
    return [Text(prompt, row.tolist()[4:], is_greedy) for prompt, row in zip(prompts, rows, strict=True)]


def test_a_head_learns_and_its_files_draft_as_the_training_counted(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = Random(0)
    kinds = (answered(model, rng, 32, is_greedy=is_greedy) for is_greedy in (True, False))
    texts = [text for pair in zip(*kinds, strict=True) for text in pair]  # a window has one of each
    draft_answers.save(tmp_path / "answers.json", texts)
    numbers = {"minutes": 9, "max-steps": 160, "threads": 1, "steps": 2, "windows": 4, "rate": 1e-2, "draft-vocab": 64}
    options = [f"--{name}={value}" for name, value in numbers.items()]
    folders = [f"--output={tmp_path / 'head'}", f"--data={tmp_path}", f"--length={LENGTH}", "--dtype=float32"]
    before, after = train_draft.run([str(model.folder), *folders, *options])
    printed = capsys.readouterr().out
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] - 0.05, printed
    assert after.places == before.places and before.right[0] > 0, printed

    reader = Reader(tmp_path / "head", model)
    shapes = {name: list(each.shape) for name, each in reader.tensors.items()}
    layer = {"self_attn.q_proj": [32, 64], "self_attn.k_proj": [16, 64], "self_attn.v_proj": [16, 64]}
    layer |= {
        "self_attn.o_proj": [32, 32],
        "mlp.gate_proj": [48, 32],
        "mlp.up_proj": [48, 32],
        "mlp.down_proj": [32, 48],
    }
    layer |= {name: [32] for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    wanted = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    wanted |= {"fc.weight": [32, 96], "norm.weight": [32], "lm_head.weight": [64, 32], "d2t": [64], "t2d": [VOCAB]}
    assert shapes == wanted
    drafted = torch.arange(64) + reader.tensors["d2t"]
    assert drafted.tolist() == reader.tensors["t2d"].nonzero().squeeze(1).tolist()
    assert reader.config["architectures"] == ["LlamaForCausalLMEagle3"] and reader.config["draft_vocab_size"] == 64
    assert reader.config["eagle_aux_hidden_state_layer_ids"] == DEPTHS
    assert reader.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [depth - 1 for depth in DEPTHS]

    windows = pack(texts, LENGTH)
    num_held_out = max(len(windows.ids) // train_draft.HELD_OUT, 1)
    held_out = {
        tuple(ids[own == number].tolist())
        for ids, own in zip(windows.ids[-num_held_out:], windows.texts[-num_held_out:], strict=True)
        for number in range(int(own.max()) + 1)
    }
    counts = [0] * train_draft.NUM_DRAFTS
    for text in texts:
        ids = text.prompt + text.answer
        if tuple(ids) not in held_out or not text.is_greedy:
            continue
        states = reader.states(ids)
        for known in range(len(text.prompt) + 1, len(ids)):
            for index in range(reader.num_right(ids, states, known, train_draft.NUM_DRAFTS)):
                counts[index] += 1
    assert counts == after.right and counts[0] > 0
