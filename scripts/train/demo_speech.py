"""Speaks the demo audio model's clips: digits and capital letters in English, by many voices of espeak-ng.

    speakers = [draw_speaker(rng, VOICES) for _ in range(9)]
    clip = draw_clip(rng, [speak(speaker, symbols) ...], 5.0)
    clip.samples, clip.text, clip.segments

A voice is one of espeak-ng's variants, with any accent, pitch and speed. Needs the program espeak-ng, of which version
1.51 made the demo: `apt-get install espeak-ng`, `brew install espeak-ng`, or https://github.com/espeak-ng/espeak-ng.
"""

from __future__ import annotations

import subprocess
from random import Random
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = NDArray[np.float32]

SAMPLE_RATE = 16_000
SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029", "en-gb-x-gbclan", "en-gb-x-rp", "en-gb-x-gbcwmd", "en-us-nyc")
VOICES = (
    *("Alex", "Alicia", "Andy", "AnxiousAndy", "Denis", "Diogo", "Henrique", "Hugo", "Jacky", "Lee", "Marco", "Mario"),
    *("Mike", "Nguyen", "RicishayMax", "RicishayMax2", "RicishayMax3", "Storm", "Tweaky", "adam", "anika", "antonio"),
    *("announcer", "aunty", "benjamin", "caleb", "david", "ed", "edward", "edward2", "f1", "f2", "f4", "f5", "grandma"),
    *("grandpa", "gustave", "iven", "iven2", "iven3", "iven4", "john", "kaukovalta", "klatt", "klatt2", "klatt3"),
    *("m1", "m2", "m3", "m4", "m5", "m7", "m8", "marcelo", "michel", "miguel", "norbert", "pablo", "paul", "pedro"),
    *("quincy", "rob", "robert", "sandro", "shelby", "travis", "zac"),
)
UNSEEN_VOICES = (  # never trained with, nor are others of their families
    *("Andrea", "Annie", "Gene", "Gene2", "Michael", "belinda", "boris", "f3", "linda", "m6", "max", "steph", "victor"),
)
WORDS = {"A": "[['eI]]", "I": "[['aI]]"}  # phonemes, because espeak-ng takes these letters for words
SPEAK_TIMEOUT_S = 20
WAV_HEADER_BYTES = 44  # of espeak-ng's output, of 22,050 Hz
RATES = (320, 441)  # 16,000 to 22,050
SILENT = 0.01  # of the largest sample, below which both ends are cut off
PAUSES_S = (0.08, 0.6)  # between utterances
NOISE_DB = (10.0, 40.0)  # that speech is louder than noise


class Speaker(NamedTuple):
    """A voice with espeak-ng's accent, pitch (0 to 99) and speed (words a minute)."""

    voice: str
    accent: str
    pitch: int
    speed: int


class Utterance(NamedTuple):
    """Symbols and their samples, which begin and end with speech."""

    symbols: str
    samples: NDArray[np.int16]


class Segment(NamedTuple):
    """The place of an utterance in a clip."""

    start_s: float
    end_s: float
    symbols: str


class Clip(NamedTuple):
    """Samples at SAMPLE_RATE with a full scale of ±1, and the utterances that they contain."""

    samples: Samples
    segments: list[Segment]

    @property
    def text(self) -> str:
        """The symbols, with a blank between each two."""
        return spaced("".join(each.symbols for each in self.segments))


def spaced(symbols: str) -> str:
    return " ".join(symbols)


def draw_speaker(rng: Random, voices: tuple[str, ...]) -> Speaker:
    return Speaker(rng.choice(voices), rng.choice(ACCENTS), rng.randint(25, 75), rng.randint(90, 150))


def draw_symbols(rng: Random, most: int) -> str:
    return "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(1, most)))


def speak(speaker: Speaker, symbols: str, separator: str = " ") -> Utterance:
    """Run espeak-ng; OSError if it is not installed. A comma in the separator makes pauses."""
    text = separator.join(WORDS.get(each, each) for each in symbols)
    voice = ["-v", f"{speaker.accent}+{speaker.voice}", "-p", str(speaker.pitch), "-s", str(speaker.speed)]
    output = subprocess.run(
        ["espeak-ng", *voice, "--stdout", text], capture_output=True, check=True, timeout=SPEAK_TIMEOUT_S
    ).stdout
    samples = resampled(np.frombuffer(output[WAV_HEADER_BYTES:], "<i2").astype(np.float32))
    loud = np.flatnonzero(np.abs(samples) > SILENT * np.abs(samples).max())
    return Utterance(symbols, samples[loud[0] : loud[-1] + 1].clip(-32768, 32767).astype(np.int16))


def resampled(samples: Samples) -> Samples:
    """Return samples of 22,050 Hz at SAMPLE_RATE, by their spectrum: both ends must be silent."""
    up, down = RATES
    periods = len(samples) // down + 2
    spectrum = np.fft.rfft(samples, periods * down)[: periods * up // 2 + 1]
    return (np.fft.irfft(spectrum, periods * up) * (up / down)).astype(np.float32)


def draw_clip(rng: Random, utterances: list[Utterance], length_s: float) -> Clip:
    """Put utterances of one speaker into a clip of `length_s`, as many as fit, with pauses, some loudness and noise."""
    room = round(length_s * SAMPLE_RATE)
    chosen, pauses = list[Utterance](), list[int]()
    for each in utterances:
        pause = round(rng.uniform(*PAUSES_S) * SAMPLE_RATE) if chosen else 0
        if pause + len(each.samples) > room:
            continue
        room -= pause + len(each.samples)
        chosen.append(each)
        pauses.append(pause)
    samples = np.zeros(round(length_s * SAMPLE_RATE), np.float32)
    start, segments = rng.randint(0, room), list[Segment]()
    for each, pause in zip(chosen, pauses, strict=True):
        start += pause
        stop = start + len(each.samples)
        samples[start:stop] = each.samples / 32768
        segments.append(Segment(start / SAMPLE_RATE, stop / SAMPLE_RATE, each.symbols))
        start = stop
    samples *= rng.uniform(0.05, 0.9) / (np.abs(samples).max() or 1.0)
    spoken = samples[samples != 0]
    loudness = float(np.square(spoken).mean()) ** 0.5 if len(spoken) else 0.1
    noise = loudness * 10 ** (-rng.uniform(*NOISE_DB) / 20) * draw_noise(rng, len(samples))
    return Clip((samples + noise).clip(-1, 1).astype(np.float32), segments)


def draw_noise(rng: Random, count: int) -> NDArray[np.float32]:
    """Return noise of power 1 between white and brown."""
    stream = np.random.default_rng(rng.getrandbits(64))
    spectrum = np.fft.rfft(stream.standard_normal(count).astype(np.float32))
    spectrum *= np.maximum(np.arange(len(spectrum)), 20.0) ** -rng.uniform(0.0, 1.0)
    noise = np.fft.irfft(spectrum, count)
    return (noise / noise.std()).astype(np.float32)
