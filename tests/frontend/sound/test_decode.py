"""Audio of every served format becomes mono samples at 16 kHz; whatever else comes is refused with its name, and before
it takes memory."""

from __future__ import annotations

import sys
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.frontend.sound.decode import decode_audio
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.spec.models.audio_config import SAMPLE_RATE
from tokenloom.tests.frontend.server.media.audio.sound_files import (
    FORMATS,
    chunk,
    compressed,
    form,
    pcm_wav,
    riff,
    stored,
    tone,
    with_num_samples,
)
from tokenloom.tests.support.today import some

MAX_S = 60.0
RATES = [1000, 8000, 11_025, 12_000, 17_011, 22_050, 24_000, 32_000, 44_099, 44_100, 48_000, 96_000, 192_000]
EDGE = 2500  # outputs at either end, which zeros beyond it blur
SECOND = pcm_wav((tone(1, 16_000) * 32_767).astype(int), 16_000, 2)


def decoded(data: bytes, max_seconds: float = MAX_S, max_samples: int = 0) -> Any:
    return np.concatenate(list(decode_audio(memoryview(data), max_seconds, max_samples)))


def refusal(data: bytes, max_seconds: float = MAX_S, max_samples: int = 0) -> str:
    with pytest.raises(RequestError) as caught:
        decoded(data, max_seconds, max_samples)
    return str(caught.value)


def amplitude_db(samples: Any, hertz: float) -> float:
    """Return how far a signal is from a sine of amplitude 0.5, of any phase, in dB of its power."""
    times = 2 * np.pi * hertz * np.arange(len(samples)) / SAMPLE_RATE
    waves = np.stack([np.sin(times), np.cos(times)], 1)
    weights = np.linalg.lstsq(waves, samples.astype(np.float64), rcond=None)[0]
    assert abs(np.hypot(*weights) - 0.5) < 0.02
    return float(10 * np.log10(np.mean((samples - waves @ weights) ** 2) / 0.125))


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("name", ["WAV", *FORMATS])
def test_a_tone_is_heard_in_every_format_and_at_every_rate(name: str, rate: int) -> None:
    if name == "Ogg Opus" and rate == 44_100:
        rate = 24_000  # Opus does not know it
    samples = tone(2.0, rate)
    found = decoded(stored(samples, rate, "WAV", "PCM_16") if name == "WAV" else compressed(samples, rate, name))
    assert found.dtype == np.float32 and abs(len(found) - 32_000) <= (0 if name in ("WAV", "FLAC") else 2000)
    assert amplitude_db(found[4000:28_000], 440) < (-70 if name in ("WAV", "FLAC") else -20)


@pytest.mark.parametrize("kind", ["PCM_16", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("num_channels", [2, 8, 16])
def test_a_voice_in_one_of_many_channels_is_heard_whichever_it_is(num_channels: int, kind: str) -> None:
    """vllm-project/vllm#47693 and altic-dev/FluidVoice#623."""
    voice = tone(1, 48_000)
    for channel in (0, num_channels - 1):
        samples = np.zeros((len(voice), num_channels))
        samples[:, channel] = voice
        found = decoded(stored(samples, 48_000, "WAV", kind)) * num_channels
        assert len(found) == 16_000 and amplitude_db(found[2000:-2000], 440) < -45


def band_limited(rate: int, seconds: float) -> tuple[Any, Any]:
    """Return noise below 0.8 of both Nyquist frequencies at `rate`, and the same signal at SAMPLE_RATE: by a Fourier
    series, of which both are exact samples."""
    num_inputs, num_outputs = round(rate * seconds), round(SAMPLE_RATE * seconds)
    num_waves = int(0.4 * min(num_inputs, num_outputs))
    rng = np.random.default_rng(rate)
    series = np.zeros(max(num_inputs, num_outputs) // 2 + 1, np.complex128)
    series[1:num_waves] = rng.standard_normal(num_waves - 1) + 1j * rng.standard_normal(num_waves - 1)
    series /= num_waves
    at = lambda count: np.fft.irfft(series[: count // 2 + 1], count) * count / 16  # noqa: E731
    return at(num_inputs).astype(np.float32), at(num_outputs)


@pytest.mark.parametrize("rate", some(RATES, 5))
def test_noise_at_any_rate_is_that_of_its_fourier_series(rate: int) -> None:
    samples, expected = band_limited(rate, 2.0)
    found = decoded(stored(samples, rate, "WAV", "FLOAT"))
    assert found.dtype == np.float32 and len(found) == len(expected)
    error = found[EDGE:-EDGE] - expected[EDGE:-EDGE]
    snr_db = 10 * np.log10(np.mean(expected[EDGE:-EDGE] ** 2) / np.mean(error**2))
    assert snr_db > (110 if rate % 1000 == 0 else 80)  # libsoxr interpolates weights if the ratio is of large numbers


@pytest.mark.parametrize("rate", [22_050, 44_100, 48_000, 192_000])
def test_frequencies_above_half_of_the_rate_are_suppressed(rate: int) -> None:
    for hertz in (8250, min(10_000, 0.49 * rate)):
        found = decoded(stored(tone(1.0, rate, hertz), rate, "WAV", "FLOAT"))
        assert np.abs(found[EDGE:-EDGE]).max() < 1e-5


@pytest.mark.parametrize("length", [1, 2, 3, 10, 1001, 600_000])
@pytest.mark.parametrize("rate", [8000, 44_100, 48_000])
def test_blocks_do_not_matter_and_lengths_are_rounded_up(rate: int, length: int) -> None:
    samples = np.random.default_rng(length).uniform(-1, 1, length).astype(np.float32)
    found = decoded(stored(samples, rate, "WAV", "FLOAT"), max_seconds=100)
    assert len(found) == -(-length * SAMPLE_RATE // rate)
    whole = soxr.resample(samples, rate, SAMPLE_RATE)[: len(found)]
    np.testing.assert_allclose(found[: len(whole)], whole, atol=2e-6)


def test_tags_before_the_content_are_skipped() -> None:
    tags = b"ID3\4\0\0\0\0\1\x05" + bytes(133)
    for name in ("MP3", "FLAC"):
        assert len(decoded(tags + compressed(tone(1, 16_000), 16_000, name))) >= 16_000


def test_silence_and_one_sample_are_audio() -> None:
    assert not decoded(pcm_wav(np.zeros(48_000, int), 48_000, 2)).any()
    assert decoded(pcm_wav(np.array([2**14]), 16_000, 2)).tolist() == [0.5]
    assert len(decoded(pcm_wav(np.array([1]), 48_000, 2))) == 1


def test_audio_without_samples_is_refused() -> None:
    assert "has no samples" in refusal(pcm_wav(np.zeros(0, int), 16_000, 2))


@pytest.mark.parametrize(
    ("value", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "inf"), (1e30, "1e+30"), (1e300, "inf")]
)
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_that_are_no_numbers_are_refused(value: float, shown: str, channels: int) -> None:
    samples = np.zeros((4000, channels))
    samples[3000, 0] = value
    kind = "DOUBLE" if value == 1e300 else "FLOAT"
    assert f"has a sample of {'5e+29' if channels == 2 and value == 1e30 else shown}" in refusal(
        stored(samples, 16_000, "WAV", kind)
    )


def test_floats_beyond_full_scale_are_audio() -> None:
    assert decoded(stored(np.array([3e4, -2.0]), 16_000, "WAV", "FLOAT")).tolist() == [3e4, -2.0]


OTHERS = {
    b"RIFF\x10\0\0\0AVI LIST": "an AVI video",
    b"\0\0\0\x18ftypisom\0\0\2\0": "a video container (MP4 or another of ISO)",
    b"\0\0\0\x18ftypmp42\0\0\0\0": "a video container (MP4 or",
    b"\0\0\0\x1cftypM4A \0\0\0\0": "M4A",
    b"\0\0\0\x14ftypqt  \0\0\0\0": "a QuickTime video",
    b"\x1a\x45\xdf\xa3\x9fB\x86\x81": "a video container (Matroska or WebM)",
    b"FLV\1\5\0\0\0\x09": "a Flash video",
    b"\0\0\1\xba\x44\0\4\0": "an MPEG video",
    b"\x47\x40\0\x10" + bytes(184) + b"\x47": "a video container (MPEG transport stream)",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "ASF (WMA or WMV)",
    b"OggS\0\2" + bytes(20) + b"\1\x2a\x80theora": "an Ogg video (Theora)",
    b"OggS\0\2" + bytes(20) + b"\1\x50Speex   1.2": "Ogg Speex",
    b"OggS\0\2" + bytes(20) + b"\1\x33\x7fFLAC\1\0": "Ogg FLAC",
    b"OggS": "Ogg without audio",
    b"RF64\xff\xff\xff\xffWAVE": "RF64",
    b"RIFX\0\0\0\x10WAVE": "big-endian WAV",
    b"RIFF\0\0\0\x10WEBPVP8 ": "WebP, an image",
    b"FORM\0\0\1\0AIFF": "AIFF",
    b".snd\0\0\0\x18": "Sun AU",
    b"#!AMR\n": "AMR",
    b"MThd\0\0\0\6": "MIDI",
    b"\xff\xf1\x50\x80": "AAC",
    b"\xff\xf9\x50\x80": "AAC",
    b"\xff\xfd\xa0\0": "MPEG audio of layer 2",
    b"\x89PNG\r\n\x1a\n": "PNG, an image",
    b"\xff\xd8\xff\xe0": "JPEG, an image",
    b"PK\3\4\x14\0": "a ZIP archive",
    b"<!DOCTYPE html>": "HTML",
}


@pytest.mark.parametrize("head", OTHERS)
def test_other_formats_are_refused_by_name(head: bytes) -> None:
    message = refusal(head + bytes(400 if len(head) < 188 else 0))
    assert message.startswith(f"the audio clip is {OTHERS[head]}") or OTHERS[head] in message, message
    assert message.endswith("send WAV, FLAC, Ogg (Vorbis or Opus) or MP3")


@pytest.mark.parametrize(
    "data", [b"", b"RI", b"hello", bytes(100), b"\xff\xff\xff\xff", b"\x47", b"ID3", b"RIFF\0\0\0\0"]
)
def test_bytes_of_no_format_are_refused(data: bytes) -> None:
    assert "send WAV, FLAC" in refusal(data)


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_cut_off_or_damaged_gives_a_refusal_or_what_is_there(name: str) -> None:
    whole = compressed(tone(3.0, 16_000), 16_000, name)
    rng = np.random.default_rng(5)
    for length in rng.integers(4, len(whole), 20):
        bounded_or_refused(whole[:length])
    for _ in range(20):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole) // 20, len(whole), 8):
            damaged[place] ^= 0x55
        bounded_or_refused(bytes(damaged))


def bounded_or_refused(data: bytes) -> None:
    try:
        found = decoded(data, max_seconds=5.0)
    except RequestError as error:
        assert "send" in str(error) or "save" in str(error)
    else:
        assert len(found) <= 5 * SAMPLE_RATE + 1 and np.isfinite(found).all()


def test_a_flac_file_that_is_cut_off_is_no_shorter_clip() -> None:
    whole = compressed(tone(3.0, 16_000), 16_000, "FLAC")
    assert "is damaged or cut off" in refusal(whole[: len(whole) // 2])
    assert "is damaged or cut off" in refusal(with_num_samples(whole, 50_000))
    assert "does not say how long it is" in refusal(with_num_samples(whole, 0))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (riff(form(channels=0), chunk(b"data", bytes(8))), "is damaged or cut off (Channel count is zero.)"),
        (
            riff(form(channels=65, frame_bytes=130), chunk(b"data", bytes(260))),
            "has 65 channels: send one with 1 to 64",
        ),
        (riff(form(channels=65_535, frame_bytes=65_534), chunk(b"data", bytes(8))), "(Too many channels specified.)"),
        (riff(form(rate=0), chunk(b"data", bytes(8))), "is damaged or cut off"),
        (riff(form(rate=999), chunk(b"data", bytes(8))), "a rate of 999 Hz: send one of 1000 to 192000"),
        (riff(form(rate=2**32 - 1), chunk(b"data", bytes(8))), "is damaged or cut off"),
        (riff(form(), chunk(b"data", bytes(8), 0), size=0), "has no samples"),
    ],
)
def test_numbers_that_no_sound_has_are_refused(data: bytes, complaint: str) -> None:
    assert complaint in refusal(data)


@pytest.fixture(scope="module")
def two_hours() -> bytes:
    """Silence, which FLAC compresses 600 times."""
    return compressed(np.zeros(7200 * 16_000, np.int16), 16_000, "FLAC")


def test_hours_of_audio_are_refused_by_their_header(two_hours: bytes) -> None:
    tracemalloc.start()
    begun = time.process_time()
    message = refusal(two_hours, max_seconds=600)
    seconds, (_, peak) = time.process_time() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "lasts 7200.0 s, at most 600 s are read: send a shorter one, or raise --max-audio-s" in message
    assert peak < 2 * len(two_hours) + (1 << 20) and seconds < 1


def test_a_header_that_says_less_than_there_is_cannot_make_it_longer(two_hours: bytes) -> None:
    assert len(decoded(with_num_samples(two_hours, 16_000), max_seconds=2)) == 16_000


def test_hours_of_audio_are_decoded_block_by_block(two_hours: bytes) -> None:
    tracemalloc.start()
    num_samples = sum(len(block) for block in decode_audio(memoryview(two_hours), 7200.0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_samples == 7200 * SAMPLE_RATE
    assert peak < 16 << 20


def test_the_limit_of_the_model_is_checked_before_anything_is_decoded() -> None:
    message = refusal(SECOND, max_samples=8000)
    assert message == (
        "the audio clip lasts 1.00 s or longer, the model takes at most 0.5 s: send a shorter one, or cut it"
    )
    assert len(decoded(SECOND, max_samples=16_000)) == 16_000


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_without_its_packages_the_error_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert "tokenloom[audio], which is not installed: pip install 'tokenloom[audio]'" in refusal(
        pcm_wav(np.zeros(48_000, int), 48_000, 2)
    )


def test_faults_of_an_mp3_file_are_not_written_to_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(compressed(tone(3.0, 16_000), 16_000, "MP3"))
    data[2000:2600] = bytes(600)
    bounded_or_refused(bytes(data))
    bounded_or_refused(bytes(data[:3000]))
    assert capfd.readouterr().err == ""


@settings(max_examples=30, deadline=None)
@given(
    data=st.binary(max_size=300),
    name=st.sampled_from([b"", b"RIFF\0\0\0\0WAVE", b"fLaC", b"OggS", b"ID3", b"\xff\xfb"]),
)
def test_any_bytes_are_audio_or_refused(data: bytes, name: bytes) -> None:
    bounded_or_refused(name + data)
