"""Continue a text, or answer in a chat, with a model that `memfit export` has written; all of it is transformers.

memfit export --ckpt_path runs/.../last.ckpt --folder exported
python examples/generate.py exported "Once upon a time"
"""

from __future__ import annotations

import argparse

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

parser = argparse.ArgumentParser(description="Continue a text, or answer it if the model was trained on chats.")
parser.add_argument("folder", help="what `memfit export` wrote, or a name on the hub")
parser.add_argument("prompt")
parser.add_argument("--max_new_tokens", type=int, default=100, help="default: %(default)s")
parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
arguments = parser.parse_args()

answers = AutoConfig.from_pretrained(arguments.folder).is_encoder_decoder
kind = AutoModelForSeq2SeqLM if answers else AutoModelForCausalLM
model, tokenizer = kind.from_pretrained(arguments.folder), AutoTokenizer.from_pretrained(arguments.folder)
if tokenizer.chat_template is None:
    inputs = tokenizer(arguments.prompt, return_tensors="pt")
else:
    turns = [{"role": "user", "content": arguments.prompt}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
sampling = {"do_sample": True, "temperature": arguments.temperature, "top_k": 50}
if arguments.temperature == 0:
    sampling = {"do_sample": False}
(output,) = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, **sampling)
shown_from = 0 if answers or tokenizer.chat_template is None else inputs["input_ids"].shape[1]
print(tokenizer.decode(output[shown_from:], skip_special_tokens=True))
