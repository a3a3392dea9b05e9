"""Train the demo vision model: a small LLaVA that describes the pictures of demo_pictures.py and answers questions.

Tower (SigLIP), projector and language model (Llama) begin with random weights. A chat has one or two turns, the caption
or a question, about one picture. A linear layer that names the caption from the mean of the image's embeddings, and is
thrown away at the end, trains the tower several times faster than the words alone: at first alone, then beside them.
The result is in Hugging Face form, in bfloat16, and takes less than 3 MB. Training can be interrupted: the same command
goes on from the last saved step.

    python scripts/train/train_demo_vision.py --output demo/vision

This file knows nothing of serving. tests/scripts/train/test_demo_vision.py measures the model on pictures of its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GenerationConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from tokenloom.scripts.train.demo_pictures import CAPTION_QUESTIONS, Picture, draw_picture
from tokenloom.scripts.train.demo_training import NO_LOSS, HelpedTraining, parse_options
from tokenloom.scripts.train.train_demo_model import move_files

BOS, EOS, END, PAD, IMAGE = "<|bos|>", "<|eos|>", "<|end|>", "<|pad|>", "<image>"
SPECIAL_TOKENS = [BOS, EOS, END, PAD, "<|system|>", "<|user|>", "<|assistant|>", IMAGE]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
VOCAB_SIZE = 448
PIXELS, PATCH = 48, 8
NUM_PATCHES = (PIXELS // PATCH) ** 2
MAX_POSITIONS = 1024
BATCH = 32
TURNS = (1, 1, 1, 2)  # of the chats of a batch
TOWER_STEPS = 2200  # first steps, which train the tower and the projector with the helper alone
NUM_PICTURES = 12_000


class Sample(NamedTuple):
    """Pixels of a picture, [3, PIXELS, PIXELS] uint8, and its texts."""

    pixels: Tensor
    caption: str
    questions: list[tuple[str, str]]


def prepare(image: Image.Image) -> Tensor:
    """Return the pixels that the processor of the checkpoint makes of a square image, before their normalization."""
    small = image.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


def normalize(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1


def draw_samples(number: int, seed: int) -> list[Sample]:
    rng = Random(seed)
    pictures: Iterator[Picture] = (draw_picture(rng) for _ in range(number))
    return [Sample(prepare(each.image), each.caption, each.questions) for each in pictures]


def train_tokenizer(samples: list[Sample]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the texts: any text can be encoded, the words of the captions are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for each in samples for pair in each.questions for text in pair]
    tokenizer.train_from_iterator([*CAPTION_QUESTIONS, *(each.caption for each in samples), *texts], trainer)
    bos_id = tokenizer.token_to_id(BOS)
    add_bos = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), add_bos])
    # transformers leaves the constructor untyped.
    wrapped: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        additional_special_tokens=[END, "<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    return wrapped


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": PIXELS,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=NUM_PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config = cast(Any, GenerationConfig)(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.convert_tokens_to_ids(token) for token in (EOS, END)],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


class Chats:
    """Draws batches of chats about the samples. A step's batch depends on the seed and the step alone."""

    def __init__(self, samples: list[Sample], tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self.captions = sorted({each.caption for each in samples})
        self._index = {caption: index for index, caption in enumerate(self.captions)}
        texts = {text for each in samples for pair in each.questions for text in pair}
        texts |= {*CAPTION_QUESTIONS, *self.captions}
        self._ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
        encode = tokenizer.encode
        self._head = encode(f"{BOS}<|user|>\n{IMAGE * NUM_PATCHES}\n", add_special_tokens=False)
        self._next = encode("\n<|user|>\n", add_special_tokens=False)
        self._answer = encode(f"{END}\n<|assistant|>\n", add_special_tokens=False)
        self._end = encode(END, add_special_tokens=False)
        self._pad_id = cast(int, tokenizer.pad_token_id)

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return pixels, token ids and labels, padded at the right, and the numbers of the captions."""
        rng = Random(f"{self._seed}/{step}")
        chosen = [rng.choice(self._samples) for _ in range(BATCH)]
        num_turns = rng.choice(TURNS)
        rows = [self._chat(each, num_turns, rng) for each in chosen]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.full((BATCH, length), self._pad_id)
        labels = torch.full((BATCH, length), NO_LOSS)
        for index, (row, answers) in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            labels[index, : len(row)] = torch.tensor(answers)
        pixels = normalize(torch.stack([each.pixels for each in chosen]))
        return pixels, ids, labels, torch.tensor([self._index[each.caption] for each in chosen])

    def _chat(self, sample: Sample, num_turns: int, rng: Random) -> tuple[list[int], list[int]]:
        ids, labels = list(self._head), [NO_LOSS] * len(self._head)
        captions = [(rng.choice(CAPTION_QUESTIONS), sample.caption)] * 2
        for turn, (question, answer) in enumerate(rng.sample([*captions, *sample.questions], num_turns)):
            asked = (self._next if turn else []) + self._ids[question] + self._answer
            answered = self._ids[answer] + self._end
            ids += asked + answered
            labels += [NO_LOSS] * len(asked) + answered
        return ids, labels


class Training(HelpedTraining):
    """The training of the tower, the projector and the language model."""

    def __init__(self, model: LlavaForConditionalGeneration, chats: Chats) -> None:
        super().__init__(model, torch.nn.Linear(128, len(chats.captions)))
        self._model, self._chats = model, chats

    def losses(self) -> tuple[Tensor, Tensor]:
        pixels, ids, labels, captions = self._chats.batch(self.step_number)
        images = self._encode(pixels)
        helper_loss = torch.nn.functional.cross_entropy(self._helper(images.mean(dim=1)), captions)
        loss = torch.zeros(())
        if self.step_number >= TOWER_STEPS:
            loss = self._answer_loss(images, ids, labels)
        return loss, helper_loss

    def _encode(self, pixels: Tensor) -> Tensor:
        """Return the images' embeddings, [BATCH, NUM_PATCHES, hidden size of the language model]."""
        found = self._model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        return torch.stack(list(found)).view(BATCH, NUM_PATCHES, -1)

    def _answer_loss(self, images: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        embeds = self._model.get_input_embeddings()(ids)
        start = int((ids[0] == self._model.config.image_token_index).nonzero()[0])
        embeds = torch.cat([embeds[:, :start], images, embeds[:, start + NUM_PATCHES :]], dim=1)
        hidden = self._model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, :-1]
        is_learned = labels[:, 1:] != NO_LOSS
        logits = self._model.lm_head(hidden[is_learned])
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:][is_learned])


def save(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Save both and the settings of the image processor, file by file from a folder beside `output`."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
        tokenizer.save_pretrained(folder)
        size = {"height": PIXELS, "width": PIXELS}
        preprocessor = {
            "image_processor_type": "CLIPImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": PIXELS},
            "do_center_crop": True,
            "crop_size": size,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_convert_rgb": True,
            "resample": 3,
        }
        processor = {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "patch_size": PATCH,
            "num_additional_image_tokens": 0,
            "vision_feature_select_strategy": "full",
        }
        for name, value in (("preprocessor_config.json", preprocessor), ("processor_config.json", processor)):
            (Path(folder) / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        move_files(Path(folder), output)


def main() -> None:
    description = "Train the demo vision model from generated pictures."
    arguments = parse_options(description, "vision", "file", 3600, f"{BATCH} chats")
    samples = draw_samples(NUM_PICTURES, arguments.seed)
    tokenizer = train_tokenizer(samples)
    model = build_model(tokenizer)
    Training(model, Chats(samples, tokenizer, arguments.seed)).run(arguments.state, arguments.steps)
    save(model, tokenizer, arguments.output)
    arguments.state.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
