"""Chat templates of the shapes that well-known models have, and byte tokenizers with their special tokens."""

from transformers import PreTrainedTokenizerFast

from lightning_memfit.data.tokenization import byte_tokenizer

# Llama 3: a header before each turn, the day in the first; texts are trimmed.
LLAMA3 = (
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %b %Y') "
    "+ '<|eot_id|>' }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] "
    "+ '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Qwen3: the last answer gets a thought, if only an empty one, those before it none; so does a prompt without thinking.
QWEN3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% set parts = message['content'].split('</think>') %}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n' }}"
    "{% if parts | length > 1 %}{{ parts[0].split('<think>')[-1].strip('\n') }}{% endif %}"
    "{{ '\n</think>\n\n' }}{% endif %}{{ parts[-1].lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
# Gemma 3: the assistant is the model, and what the system says stands before the first question.
GEMMA3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
    "+ (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Mistral: no header of an answer; what the system says stands before the last question, whichever that is.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% set asked = rest | selectattr('role', 'equalto', 'user') | list %}{% for message in rest %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + (first if message == asked[-1] else '') + message['content'] "
    "+ '[/INST]' }}{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"llama3": LLAMA3, "qwen3": QWEN3, "gemma3": GEMMA3, "mistral": MISTRAL}
_SPECIAL = {
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "gemma3": ["<start_of_turn>", "<end_of_turn>"],
    "mistral": ["[INST]", "[/INST]"],
}


def chat_tokenizer(kind: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes with the special tokens of a model, and its template or another one."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|bos|>", "additional_special_tokens": _SPECIAL[kind]})
    tokenizer.chat_template = TEMPLATES[kind] if template is None else template
    return tokenizer
