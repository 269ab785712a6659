"""`Seq2SeqLM`: any Hugging Face encoder-decoder language model as a LightningModule."""

from lightning_memfit.models.causal_lm import CausalLM


class Seq2SeqLM(CausalLM):
    """Fine-tune a pretrained encoder-decoder language model, or train the same architecture from random weights.

    Batches are dictionaries with `input_ids` and `attention_mask`, `(batch, source_length)`, and `labels`,
    `(batch, target_length)` integers; labels of -100 are not predicted. The model makes the decoder's input from the
    labels. Predictions are the most likely tokens of the target, given the ones before. Arguments and logged values are
    those of `CausalLM`.
    """

    encoder_decoder = True
