import json

import numpy as np
import pytest
import torch

from lightning_memfit.data import SpeechData, speech
from lightning_memfit.data.speech import read_sound
from lightning_memfit.data.tokenization import byte_tokenizer
from tests.helpers.framing import framed

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("scipy")


def tone(seconds, rate=16_000, pitch=440):
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)


def record(folder, *seconds, rate=16_000):
    lines = []
    for number, length in enumerate(seconds):
        soundfile.write(folder / f"{number}.wav", tone(length, rate), rate)
        lines.append(json.dumps({"file_name": f"{number}.wav", "text": f"tone {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return str(folder)


def made(folder, **options):
    options = {"seconds": 1, "mel_bins": 16, "target_length": 10, "batch_size": 2, "num_workers": 0, **options}
    data = SpeechData(folder, "bytes", val_fraction=0.3, **options)
    data.setup("fit")
    return data


def test_recordings_become_batches(tmp_path):
    data = made(record(tmp_path, *[0.5] * 6))
    batch, example = next(iter(data.train_dataloader())), data.example_batch(258)
    assert {name: (t.shape, t.dtype) for name, t in batch.items()} == {
        name: (t.shape, t.dtype) for name, t in example.items()
    }
    assert len(data._train) + len(data._val) == 6
    for sample, recording in zip(data._train, data._train.recordings, strict=False):
        labels = sample["labels"]
        assert byte_tokenizer().decode(labels[labels >= 0]) == f"{recording.text}<|endoftext|>"


def test_features_are_whispers(tmp_path):
    from transformers import WhisperFeatureExtractor

    data = made(record(tmp_path, *[0.5] * 3))
    sound = read_sound(str(tmp_path / data._train.recordings[0].file))
    expected = WhisperFeatureExtractor(16, chunk_length=1)(sound, sampling_rate=16_000, return_tensors="pt")
    torch.testing.assert_close(data._train[0]["input_features"], expected["input_features"][0])


def test_other_rates_and_channels_are_brought_to_one(tmp_path):
    soundfile.write(tmp_path / "two.wav", np.stack([tone(0.5, 44_100)] * 2, axis=1), 44_100)
    sound, expected = read_sound(str(tmp_path / "two.wav")), tone(0.5)
    assert sound.dtype == np.float32
    assert len(sound) == len(expected)
    assert np.abs(sound - expected)[100:-100].max() < 1e-3


def test_long_recordings_are_left_out_and_long_transcripts_cut(tmp_path):
    data = made(record(tmp_path, 0.5, 0.5, 1.5, 0.5), target_length=4)
    assert len(data._train) + len(data._val) == 3
    labels = data._train[0]["labels"]
    assert byte_tokenizer().decode(labels) == "ton<|endoftext|>"


@pytest.mark.parametrize("change", ["no list", "gone", "no sound", "all too long"])
def test_what_can_not_be_heard_is_refused(tmp_path, change):
    folder = record(tmp_path, 0.5, 0.5, 0.5)
    if change == "no list":
        (tmp_path / "metadata.jsonl").unlink()
    elif change == "gone":
        (tmp_path / "1.wav").unlink()
    elif change == "no sound":
        (tmp_path / "1.wav").write_text("words")
    else:
        record(tmp_path, 2.5, 2.5)
    words = {"no list": "and a `metadata.jsonl`", "all too long": "all 2 recordings are longer than 1 s"}
    with pytest.raises(ValueError, match=words.get(change, r"the recording '.*1\.wav' can't be read")):
        made(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seconds": 0}, "`seconds=0`"), ({"task": "sing"}, "`task='sing'`"), ({"target_length": 1}, "`target_length=1`")],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SpeechData("recordings", "bytes", **options)


class MarkingTokenizer(type(byte_tokenizer())):
    """Whisper's marks before a transcript, on bytes."""

    language = task = None

    def set_prefix_tokens(self, language=None, task=None):
        if language not in ("german", "english"):
            raise ValueError(f"Unsupported language: {language}.")
        self.language, self.task = language, task
        framed(self, f"<|startoftranscript|> <|{language}|> <|{task}|> $A <|endoftext|>")


def marking(num_tokens=258):
    plain = byte_tokenizer()
    tokenizer = MarkingTokenizer(
        tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token, pad_token="<|pad|>"
    )
    names = ["startoftranscript", "german", "english", "transcribe", "translate"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    tokenizer.add_tokens([f"<|{number}|>" for number in range(num_tokens - len(tokenizer))])
    return framed(tokenizer, "<|startoftranscript|> $A <|endoftext|>")


def transcript(folder, tokenizer, **options):
    data = SpeechData(folder, "bytes", val_fraction=0.3, target_length=12, seconds=1, mel_bins=16, **options)
    data._tokenizer = tokenizer
    data.setup("fit")
    labels = data._train[0]["labels"]
    return tokenizer.decode(labels[labels >= 0])[:-1]


def test_a_transcript_begins_as_the_model_reads_it_in_use(tmp_path, monkeypatch):
    folder = record(tmp_path, 0.5, 0.5, 0.5)
    said = "<|{}|><|{}|>tone {}"
    assert transcript(folder, marking())[:-1].startswith("tone"), "English alone has neither language nor task"
    assert transcript(folder, marking(), language="german").startswith(said.format("german", "transcribe", ""))
    assert transcript(folder, marking(), language="english", task="translate").startswith("<|english|><|translate|>")
    own = marking()
    own.set_prefix_tokens(language="german", task="translate")
    assert transcript(folder, own).startswith("<|german|><|translate|>")
    with pytest.raises(ValueError, match="`task='transcribe'` has no `language`.*a model of English alone"):
        transcript(folder, marking(), task="transcribe")
    monkeypatch.setattr(speech, "_MANY_LANGUAGES", 300)
    for options in ({}, {"task": "transcribe"}):
        with pytest.raises(
            ValueError, match="`language` is not set, but the tokenizer is for a model of many languages"
        ):
            transcript(folder, marking(300), **options)
    with pytest.raises(ValueError, match="`language='klingon'` is none of the tokenizer's"):
        transcript(folder, marking(300), language="klingon")


def test_the_same_recordings_at_another_place_are_the_same(tmp_path):
    digests = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        digests.append(made(record(tmp_path / name, *[0.5] * 4))._train.content_digest())
    assert digests[0] == digests[1]


def test_a_language_needs_a_tokenizer_that_marks_it(tmp_path):
    with pytest.raises(ValueError, match="`language='german'`: the tokenizer has no marks"):
        made(record(tmp_path, 0.5, 0.5), language="german")
