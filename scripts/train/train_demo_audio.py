"""Train the demo audio model: a small Whisper that transcribes the speech of demo_speech.py, with and without times.

A clip has some utterances of one voice with noise. A linear layer that names the symbols by the encoder's rows (CTC,
Graves et al. 2006), and is thrown away at the end, trains the encoder several times faster than the words alone: at
first alone, with short clips, then beside the decoder. The result is in Hugging Face form, in bfloat16, with a clip of
a voice that was never trained with; it takes less than 3 MB. In the end the word error rate of such voices is printed.
Speech and training are kept in `--state`: the same command goes on from there. Needs espeak-ng (demo_speech.py).

    apt-get install espeak-ng
    python scripts/train/train_demo_audio.py --output demo/audio

This file knows nothing of serving. tests/scripts/train/test_demo_audio.py measures the model on clips of its own.
"""

from __future__ import annotations

import tempfile
import wave
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tokenloom.scripts.train.demo_speech import (
    SAMPLE_RATE,
    SYMBOLS,
    UNSEEN_VOICES,
    VOICES,
    Clip,
    Utterance,
    draw_clip,
    draw_speaker,
    draw_symbols,
    speak,
)
from tokenloom.scripts.train.demo_training import NO_LOSS, HelpedTraining, parse_options
from tokenloom.scripts.train.train_demo_model import move_files

END, START, LANGUAGE, BEFORE, NO_TIMES = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|startofprev|>", "<|notimestamps|>"),
)
TASKS = ("<|transcribe|>", "<|translate|>")
SPECIAL_TOKENS = (END, START, LANGUAGE, *reversed(TASKS), "<|startoflm|>", BEFORE, "<|nospeech|>", NO_TIMES)
WINDOW_S, SHORT_S = 4, 2  # of clips; in the first steps
ROWS_PER_S, TIMES_PER_S, FRAMES_PER_S = 50, 50, 100
MEL_BINS = 40
HIDDEN = 128
MAX_POSITIONS = 96
BATCH = 32
SPEAKERS, UTTERANCES = 1500, 8  # for training; of each speaker
MOST_SYMBOLS = 4  # of an utterance
ENCODER_STEPS = 1400  # first steps, which train the encoder with the helper alone
MASKED_BINS = 4  # of some clips, at most, so that no band is needed
NUM_MEASURED, MAX_ANSWER = 300, 48
CLIP_SEED = "a clip that ships, 10"


def record(rng: Random, count: int, voices: tuple[str, ...]) -> list[list[Utterance]]:
    """Return utterances of so many speakers."""
    found = []
    for _ in range(count):
        speaker = draw_speaker(rng, voices)
        texts = [(draw_symbols(rng, MOST_SYMBOLS), rng.choice((" ", ", "))) for _ in range(UTTERANCES)]
        found.append([speak(speaker, *each) for each in texts])
    return found


def recorded(file: Path, seed: int) -> list[list[Utterance]]:
    """Return the utterances for training, from `file` if they are there."""
    if not file.exists():
        speakers = record(Random(seed), SPEAKERS, VOICES)
        spoken = [each for one in speakers for each in one]
        symbols, ends = [each.symbols for each in spoken], np.cumsum([len(each.samples) for each in spoken])
        with file.with_suffix(".new").open("wb") as stream:
            np.savez(stream, symbols=symbols, ends=ends, samples=np.concatenate([each.samples for each in spoken]))
        file.with_suffix(".new").replace(file)
    with np.load(file) as stored:
        symbols, parts = stored["symbols"].tolist(), np.split(stored["samples"], stored["ends"][:-1])
    spoken = [Utterance(*each) for each in zip(symbols, parts, strict=True)]
    return [spoken[start : start + UTTERANCES] for start in range(0, len(spoken), UTTERANCES)]


def draw_clips(rng: Random, speakers: list[list[Utterance]], count: int, length_s: float) -> list[Clip]:
    clips = []
    for _ in range(count):
        one = rng.choice(speakers)
        chosen = rng.sample(one, rng.choice((0, 1, 2, 2, 3, 3, 4, 4, 5, 5)) if length_s == WINDOW_S else 3)
        clips.append(draw_clip(rng, chosen, length_s))
    return clips


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return byte-level BPE in which a blank and a symbol are one token, with Whisper's special tokens and times."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{symbol}" for symbol in SYMBOLS)]
    numbered = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=numbered, merges=[("Ġ", symbol) for symbol in SYMBOLS]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    times = [f"<|{number / TIMES_PER_S:.2f}|>" for number in range(WINDOW_S * TIMES_PER_S + 1)]
    tokenizer.add_tokens([AddedToken(each, special=False) for each in times])
    around = [(name, tokenizer.token_to_id(name)) for name in (START, NO_TIMES, END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} {NO_TIMES} $A {END}", special_tokens=around
    )
    # transformers leaves the constructor untyped.
    wrapped: PreTrainedTokenizerFast = cast(Any, PreTrainedTokenizerFast)(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    return wrapped


def build_model(tokenizer: PreTrainedTokenizerFast) -> WhisperForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    shared = {
        "bos_token_id": ids[END],
        "eos_token_id": ids[END],
        "pad_token_id": ids[END],
        "decoder_start_token_id": ids[START],
    }
    config = cast(Any, WhisperConfig)(
        vocab_size=len(tokenizer),
        num_mel_bins=MEL_BINS,
        d_model=HIDDEN,
        encoder_layers=4,
        encoder_attention_heads=4,
        encoder_ffn_dim=3 * HIDDEN,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=3 * HIDDEN,
        max_source_positions=WINDOW_S * ROWS_PER_S,
        max_target_positions=MAX_POSITIONS,
        dropout=0.0,
        begin_suppress_tokens=None,
        **shared,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = cast(Any, GenerationConfig)(
        **shared,
        is_multilingual=True,
        no_timestamps_token_id=ids[NO_TIMES],
        lang_to_id={LANGUAGE: ids[LANGUAGE]},
        task_to_id={name.strip("<|>"): ids[name] for name in TASKS},
    )
    return model


def extractor(length_s: int) -> WhisperFeatureExtractor:
    return cast(Any, WhisperFeatureExtractor)(feature_size=MEL_BINS, chunk_length=length_s)


class Batch(NamedTuple):
    """Frames [BATCH, MEL_BINS, n], the row that they begin at, symbols by number, and the decoder's ids and labels."""

    frames: Tensor
    first_row: int
    symbols: list[list[int]]
    ids: Tensor
    labels: Tensor


class Transcripts:
    """Draws batches of clips with their texts. A step's batch depends on the seed and the step alone."""

    def __init__(self, speakers: list[list[Utterance]], tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._speakers, self._seed = speakers, seed
        self._ids = tokenizer.get_vocab()
        self._extractors = {length_s: extractor(length_s) for length_s in (WINDOW_S, SHORT_S)}

    def batch(self, step: int) -> Batch:
        rng = Random(f"{self._seed}/{step}")
        length_s = SHORT_S if step < ENCODER_STEPS else WINDOW_S
        clips = draw_clips(rng, self._speakers, BATCH, length_s)
        frames = frames_of(self._extractors[length_s], clips)
        for each in frames:
            count = rng.randint(0, MASKED_BINS)
            first = rng.randint(0, MEL_BINS - count)
            each[first : first + count] = each.mean()
        rows = [self._row(rng, each) for each in clips]
        length = max(len(ids) for ids, _ in rows)
        ids, labels = torch.full((BATCH, length), self._ids[END]), torch.full((BATCH, length), NO_LOSS)
        for index, (row, wanted) in enumerate(rows):
            ids[index, : len(row)], labels[index, : len(row)] = torch.tensor(row), torch.tensor(wanted)
        symbols = [[1 + SYMBOLS.index(each) for one in clip.segments for each in one.symbols] for clip in clips]
        return Batch(frames, rng.randint(0, (WINDOW_S - length_s) * ROWS_PER_S), symbols, ids, labels)

    def _row(self, rng: Random, clip: Clip) -> tuple[list[int], list[int]]:
        """Return the decoder's ids, and the labels of the tokens behind them."""
        prompt, ids = [self._ids[START]], self._ids
        if rng.random() < 0.1:
            prompt = [ids[BEFORE], *(ids[f"Ġ{each}"] for each in draw_symbols(rng, 12)), *prompt]
        has_times = rng.random() < 0.3
        known = [ids[LANGUAGE], ids[TASKS[rng.random() < 0.1]], *([] if has_times else [ids[NO_TIMES]])]
        text = list[int]()
        for segment in clip.segments:
            symbols = [ids[f"Ġ{each}"] for each in segment.symbols]
            times = [ids[f"<|{round(each * TIMES_PER_S) / TIMES_PER_S:.2f}|>"] for each in segment[:2]]
            text += [times[0], *symbols, times[1]] if has_times else symbols
        if has_times and not text:
            text = [ids["<|0.00|>"]]
        row = [*prompt, *known, *text, ids[END]]
        labels = [*[NO_LOSS] * (len(prompt) - 1), known[0], *[NO_LOSS] * (len(known) - 1), *text, ids[END]]
        return row[:-1], labels


def frames_of(extract: Any, clips: list[Clip]) -> Tensor:
    features = extract([each.samples for each in clips], sampling_rate=SAMPLE_RATE, return_tensors="pt")
    return cast(Tensor, features.input_features)


def encode(model: WhisperForConditionalGeneration, frames: Tensor, first_row: int = 0) -> Tensor:
    """Return the encoder's rows [n, rows, HIDDEN] of frames that may be a part of the window, from `first_row` on."""
    encoder = cast(Any, model.model.encoder)
    hidden = torch.nn.functional.gelu(encoder.conv1(frames))
    hidden = torch.nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    hidden = hidden + encoder.embed_positions.weight[first_row : first_row + hidden.shape[1]]
    for layer in encoder.layers:
        found = layer(hidden, None)
        hidden = found[0] if isinstance(found, tuple) else found
    return cast(Tensor, encoder.layer_norm(hidden))


class Training(HelpedTraining):
    """The training of the encoder and the decoder."""

    def __init__(self, model: WhisperForConditionalGeneration, transcripts: Transcripts) -> None:
        super().__init__(model, torch.nn.Linear(HIDDEN, 1 + len(SYMBOLS)))  # 0: no symbol
        self._model, self._transcripts = model, transcripts

    def losses(self) -> tuple[Tensor, Tensor]:
        batch, loss = self._transcripts.batch(self.step_number), torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            rows = encode(self._model, batch.frames, batch.first_row)
            named = self._helper(rows)
            if self.step_number >= ENCODER_STEPS:
                hidden = self._model.model.decoder(batch.ids, encoder_hidden_states=rows).last_hidden_state
                logits = self._model.proj_out(hidden).float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        return loss, self._helper_loss(named.float(), batch.symbols)

    def _helper_loss(self, named: Tensor, symbols: list[list[int]]) -> Tensor:
        targets = torch.tensor([each for one in symbols for each in one])
        lengths = torch.tensor([len(one) for one in symbols])
        probabilities = named.log_softmax(-1).transpose(0, 1)
        num_rows = torch.full((BATCH,), named.shape[1])
        total = torch.nn.functional.ctc_loss(
            probabilities, targets, num_rows, lengths, reduction="sum", zero_infinity=True
        )
        return total / len(targets)


@torch.inference_mode()
def transcribe(
    model: WhisperForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, clips: list[Clip]
) -> list[str]:
    """Return the transcripts by greedy decoding, without times."""
    prompt = [tokenizer.convert_tokens_to_ids(name) for name in (START, LANGUAGE, TASKS[0], NO_TIMES)]
    rows = encode(model, frames_of(extractor(WINDOW_S), clips).to(model.dtype))
    ids = torch.tensor([prompt] * len(clips))
    for _ in range(MAX_ANSWER):
        hidden = model.model.decoder(ids, encoder_hidden_states=rows, use_cache=False).last_hidden_state[:, -1:]
        ids = torch.cat([ids, model.proj_out(hidden).argmax(-1)], dim=1)
    end_id = cast(int, tokenizer.eos_token_id)
    answers = [row[: row.index(end_id)] if end_id in row else row for row in ids[:, len(prompt) :].tolist()]
    return [tokenizer.decode(row).strip() for row in answers]


def word_errors(right: list[str], found: list[str]) -> int:
    """Return the words to replace, insert or delete in `found` (Levenshtein)."""
    costs = list(range(len(found) + 1))
    for row, word in enumerate(right, 1):
        before, costs[0] = costs[0], row
        for column, other in enumerate(found, 1):
            before, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, before + (word != other)),
            )
    return costs[-1]


def word_error_rate(right: list[str], found: list[str]) -> float:
    pairs = [(one.split(), other.split()) for one, other in zip(right, found, strict=True)]
    return sum(word_errors(*each) for each in pairs) / sum(len(one) for one, _ in pairs)


def measure(model: WhisperForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, clips: list[Clip]) -> float:
    """Return the word error rate of the clips."""
    found = [
        text
        for start in range(0, len(clips), BATCH)
        for text in transcribe(model, tokenizer, clips[start : start + BATCH])
    ]
    return word_error_rate([each.text for each in clips], found)


def write_clip(file: Path, clip: Clip) -> None:
    with wave.open(str(file), "wb") as sound:
        sound.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        sound.writeframes((clip.samples * 32767).astype("<i2").tobytes())


def shipped_clip() -> Clip:
    """Return two utterances of an unseen voice with little noise."""
    rng = Random(CLIP_SEED)
    speaker = draw_speaker(rng, UNSEEN_VOICES)
    return draw_clip(rng, [speak(speaker, "TOKEN"), speak(speaker, "2026")], 3.5)


def save(model: WhisperForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Save both, the settings of the feature extractor and a clip, file by file from a folder beside `output`."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
        tokenizer.save_pretrained(folder)
        extractor(WINDOW_S).save_pretrained(folder)
        write_clip(Path(folder) / "clip.wav", shipped_clip())
        move_files(Path(folder), output)


def main() -> None:
    description = "Train the demo audio model from generated speech."
    arguments = parse_options(description, "audio", "folder", 6500, f"{BATCH} clips")
    arguments.state.mkdir(parents=True, exist_ok=True)
    speakers = recorded(arguments.state / "speech.npz", arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    training = Training(model, Transcripts(speakers, tokenizer, arguments.seed))
    training.run(arguments.state / "training.pt", arguments.steps)
    save(model, tokenizer, arguments.output)
    rng = Random("unseen")
    for name, voices in (("seen", VOICES), ("unseen", UNSEEN_VOICES)):
        clips = draw_clips(rng, record(rng, NUM_MEASURED // 3, voices), NUM_MEASURED, WINDOW_S)
        print(f"word error rate of {NUM_MEASURED} new clips of {name} voices: {measure(model, tokenizer, clips):.3f}")


if __name__ == "__main__":
    main()
