"""`SpeechData`: recordings with their transcripts, for models of speech such as Whisper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memfit.data.batched import BatchedText, digest_of
from lightning_memfit.data.sources import check_texts, load_documents, split_by_content
from lightning_memfit.extras import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RATE = 16_000
"""Samples per second that Whisper hears."""
_FRAMES_PER_S = 100
_MANY_LANGUAGES = 51_865
"""Tokens from which on a model is one of many languages (`is_multilingual` of openai/whisper, `whisper/model.py`)."""
_NOT_PREDICTED = -100


class Recording(NamedTuple):
    """A file, by its name in the folder, and what is said in it."""

    file: str
    text: str


class TranscribedSpeech(Dataset[dict[str, torch.Tensor]]):
    """Recordings as log-mel spectrograms of one length, with their transcripts in tokens.

    Items are `input_features`, `(mel_bins, frames)` float32 with 100 frames per second, and `labels`,
    `(target_length,)` int64: the tokens after `<|startoftranscript|>`, which models put before them, ending with the
    end of sequence, and -100.

    Args:
        folder: Where the recordings are.
        recordings: The recordings.
        tokenizer: From `load_tokenizer`.
        seconds: Length to which recordings are padded.
        mel_bins: Bins of the spectrogram.
        target_length: Tokens of a transcript; longer ones are cut.
    """

    def __init__(
        self,
        folder: Path,
        recordings: Sequence[Recording],
        tokenizer: PreTrainedTokenizerBase,
        seconds: int,
        mel_bins: int,
        target_length: int,
    ) -> None:
        from transformers import WhisperFeatureExtractor

        self.folder = folder
        self.recordings = recordings
        self.tokenizer = tokenizer
        self.target_length = target_length
        self.extract = WhisperFeatureExtractor(feature_size=mel_bins, sampling_rate=_RATE, chunk_length=seconds)

    def content_digest(self) -> str:
        """Return a digest of some of the recordings, wherever their folder is."""
        return digest_of(len(self), lambda place: repr(self.recordings[place]).encode())

    def __len__(self) -> int:
        return len(self.recordings)

    @override
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        recording = self.recordings[index]
        features = self.extract(read_sound(str(self.folder / recording.file)), sampling_rate=_RATE, return_tensors="np")
        return {
            "input_features": torch.from_numpy(features["input_features"][0]),
            "labels": self._labels(recording.text),
        }

    def _labels(self, text: str) -> torch.Tensor:
        end = self.tokenizer.eos_token_id
        start = self.tokenizer.get_vocab().get("<|startoftranscript|>")
        ids = [token for token in self.tokenizer(text, verbose=False)["input_ids"] if token not in (start, end)]
        ids = [*ids[: self.target_length - 1], end]
        labels = torch.full((self.target_length,), _NOT_PREDICTED)
        labels[: len(ids)] = torch.tensor(ids)
        return labels


def read_sound(file: str) -> np.ndarray:
    """Read a sound file as one channel of 16,000 samples per second.

    Returns:
        `(samples,)` float32 from -1 to 1.

    Raises:
        ValueError: If it can't be read.
    """
    import soundfile
    from scipy.signal import resample_poly

    try:
        samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"`dataset`: the recording {file!r} can't be read: {reason}.") from error
    mono = samples.mean(axis=1)
    return mono if rate == _RATE else np.asarray(resample_poly(mono, _RATE, rate), np.float32)


class SpeechData(BatchedText):
    """Recordings and their transcripts, for `Seq2SeqLM` with a model of speech.

    A folder has sound files and a `metadata.jsonl` with `{"file_name": ..., "text": ...}` on each line, as `datasets`
    has it. Recordings longer than the model hears are left out, as it isn't known which words are in their beginning;
    the first line of a run says how many.

    Args:
        dataset: The folder.
        tokenizer: A local folder or a hub name, or `bytes`.
        language: Language that is spoken, such as `german`, which models of many languages read before a transcript.
            Null: the tokenizer's own setting, or a model of one language (`whisper-small.en`).
        task: `transcribe` or `translate` (into English), for the same models. Null: the tokenizer's own setting, or
            `transcribe`.
        file_column: Column with the file, relative to the folder.
        text_column: Column with the transcript.
        seconds: Length of what the model hears; shorter recordings are padded.
        mel_bins: Bins of the spectrogram: 80, or 128 for the large-v3 models of Whisper.
        target_length: Tokens of a transcript; longer ones are cut, shorter ones padded.
        batch_size: Recordings in a micro-batch of one device.
        global_batch_size: Recordings in an optimizer step, accumulation and all devices included. Null: not checked.
        val_fraction: Share of the recordings kept for validation, chosen by their transcripts.
        num_workers: Loader processes, which read the files.
        seed: Seed for the order of the training recordings.

    Raises:
        ModuleNotFoundError: When data are read, if soundfile or scipy isn't installed.
        ValueError: If a number is out of range, data or tokenizer can't be read, or `language` is missing or is none of
            the tokenizer's.
    """

    def __init__(
        self,
        dataset: str,
        tokenizer: str,
        language: str | None = None,
        task: str | None = None,
        file_column: str = "file_name",
        text_column: str = "text",
        seconds: int = 30,
        mel_bins: int = 80,
        target_length: int = 128,
        batch_size: int = 8,
        global_batch_size: int | None = None,
        val_fraction: float = 0.05,
        num_workers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, batch_size, global_batch_size, val_fraction, num_workers, seed)
        for argument, value, low in (
            ("seconds", seconds, 1),
            ("mel_bins", mel_bins, 1),
            ("target_length", target_length, 2),
        ):
            if value < low:
                raise ValueError(f"`{argument}={value}` must be at least {low}.")
        if task not in (None, "transcribe", "translate"):
            raise ValueError(f"`task={task!r}` is unknown. Choose from: transcribe, translate.")
        self.dataset = dataset
        self.seconds = seconds
        self.mel_bins = mel_bins
        self.target_length = target_length
        self.save_hyperparameters()

    @override
    def make_samples(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """List the recordings, and split them."""
        tokenizer, folder = self._prepared_tokenizer(), Path(self.dataset).expanduser()
        sides = split_by_content(self.load_recordings(), lambda one: one.text, self.val_fraction)
        train, val = (
            TranscribedSpeech(folder, side, tokenizer, self.seconds, self.mel_bins, self.target_length)
            for side in sides
        )
        return train, val

    def _prepared_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which puts before a transcript what the model reads there in use.

        A model of many languages reads its language and task; one of English alone has seen neither.
        """
        tokenizer: Any = self.tokenizer
        asked = {name: self.hparams[name] for name in ("language", "task") if self.hparams[name] is not None}
        if not hasattr(tokenizer, "set_prefix_tokens"):
            for name, value in asked.items():
                raise ValueError(f"`{name}={value!r}`: the tokenizer has no marks for languages. Leave it out.")
            return tokenizer  # type: ignore[no-any-return]
        language = asked.get("language", tokenizer.language)
        if language is None and len(tokenizer) < _MANY_LANGUAGES and "task" in asked:
            raise ValueError(
                f"`task={asked['task']!r}` has no `language`, and the tokenizer is for a model of English alone, which "
                "reads neither. Set `data.task` to null."
            )
        if language is None and len(tokenizer) >= _MANY_LANGUAGES:
            raise ValueError(
                "`language` is not set, but the tokenizer is for a model of many languages, which reads the language "
                "before a transcript. Set `data.language`, for example to `german`."
            )
        if language is not None:
            try:
                tokenizer.set_prefix_tokens(language=language, task=asked.get("task", tokenizer.task or "transcribe"))
            except ValueError as error:
                raise ValueError(f"`language={language!r}` is none of the tokenizer's: {error}") from error
        return tokenizer  # type: ignore[no-any-return]

    def load_recordings(self) -> list[Recording]:
        """Return the recordings that aren't too long.

        Raises:
            ValueError: If there are none, a file is missing or can't be read, or a transcript is no text.
        """
        for package in ("soundfile", "scipy"):
            require(package, "SpeechData")
        import soundfile

        folder = Path(self.dataset).expanduser()
        listed = folder / "metadata.jsonl"
        if not listed.is_file():
            raise ValueError(f"`dataset={self.dataset!r}` must be a folder with sound files and a `metadata.jsonl`.")
        rows = load_documents(str(listed), None, "train", None)
        columns = [self.hparams["file_column"], self.hparams["text_column"]]
        for argument, column in zip(("file_column", "text_column"), columns, strict=True):
            check_texts(rows, column, argument, str(listed))
        kept, too_long = [], 0
        for name, text in zip(*(list(rows[column]) for column in columns), strict=True):
            try:
                is_short = soundfile.info(str(folder / name)).duration <= self.seconds
            except (OSError, RuntimeError) as error:
                raise ValueError(f"`dataset`: the recording {str(folder / name)!r} can't be read: {error}.") from error
            too_long += not is_short
            kept += [Recording(name, text)] if is_short else []
        if not kept:
            raise ValueError(f"`dataset={self.dataset!r}`: all {too_long} recordings are longer than {self.seconds} s.")
        left_out = f", {too_long:,} longer than {self.seconds} s left out" if too_long else ""
        rank_zero_info(f"SpeechData: {len(kept):,} recordings{left_out}")
        return kept

    def example_batch(self, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
        """Return a training batch of the right shapes without reading data or tokenizer; see `PackedText`.

        Args:
            vocab_size: Number of token ids that the model takes; None if it is not known.

        Returns:
            `input_features`, `(batch_size, mel_bins, frames)` float32, and `labels`, `(batch_size, target_length)`
            int64.
        """
        labels = self._example_tokens(self.target_length, vocab_size)
        labels[0, -1] = _NOT_PREDICTED
        frames = self.seconds * _FRAMES_PER_S
        return {"input_features": torch.zeros(self.batch_size, self.mel_bins, frames), "labels": labels}
