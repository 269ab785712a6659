"""`ChatTemplate`: tokens of a conversation, and which of them are the model's answers.

transformers finds the answers of a template that marks them (`{% generation %}`). In any other one an answer begins
behind the prompt that the template writes for it, and ends with the special token that follows its text. Either way is
tried on a known conversation first.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_memfit.data.tokenization import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]

CHATML = "chatml"
# Turns end with the tokenizer's own end of sequence, where generation stops with any tokenizer. Tools are written as
# Qwen writes them.
_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ eos_token + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ANSWERING = "assistant"
_MARKED = re.compile(r"{%-?\s*generation\s*-?%}")
_PROBE = [
    {"role": "user", "content": "How many legs has a beetle?"},
    {"role": "assistant", "content": "It walks on six of them."},
    {"role": "user", "content": "And a crab?"},
    {"role": "assistant", "content": "    Ten, two   with pincers.  "},
]
_OWN_TEMPLATE = (
    "Give `chat_template` a file with a template that has {% generation %} around its answers, or "
    "`chat_template: chatml`."
)


class Conversation(NamedTuple):
    """A conversation in tokens."""

    ids: np.ndarray
    """`(tokens,)` int64."""
    is_answer: np.ndarray
    """`(tokens,)` booleans: what the model is to write, the end of its turn included."""


class ChatTemplate:
    """A tokenizer's chat template, or another one for it.

    Args:
        tokenizer: From `load_tokenizer`.
        template: `chatml`, a file with a Jinja template, or None for the tokenizer's own.
        options: Further variables of the template, such as `date_string: 26 Jul 2024` of Llama 3.

    Raises:
        ValueError: If there is no template, or its answers can't be told from what is around them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = "the tokenizer's chat template" if template is None else f"`chat_template={template!r}`"
        self.options = dict(options or {})
        self.source = read_template(tokenizer, template)
        self.marks_answers = _MARKED.search(self.source) is not None
        if not tokenizer.is_fast:
            raise ValueError(
                f"`tokenizer`: {type(tokenizer).__name__} doesn't say which characters its tokens stand for, so that "
                "answers can't be found. Use a fast tokenizer (a folder with `tokenizer.json`)."
            )
        self.tokenizer = _with_spaces_in_offsets(tokenizer)
        # Any special token may end a turn.
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = sorted({*special, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)
        self._end_of_turn = f"({'|'.join(map(re.escape, self._special))})"
        self.end_of_answer = int(tokenizer.eos_token_id)
        """Id of the token with which the model learns to end an answer."""
        self._prove()

    @property
    def fingerprint(self) -> str:
        """Everything that tokens and answers depend on, the same in every process."""
        return json.dumps([self.source, self.options, tokenizer_fingerprint(self.tokenizer)], sort_keys=True)

    def encode(self, messages: Messages, tools: Sequence[Any] | None = None) -> Conversation:
        """Return a conversation's tokens, and which of them are answers.

        Args:
            messages: With `role` and `content`, both text. Answers are of the role `assistant`; those with `weight: 0`
                are not learned. With `tool_calls` the content may be missing.
            tools: Descriptions of tools for the template, as JSON schemas.
        """
        messages = _checked(messages)
        if not self.marks_answers and messages[0]["role"] == _ANSWERING:
            raise ValueError("the conversation begins with an answer, before which the model sees nothing")
        names = _names_of_tools(messages, tools)
        text = self._render(messages, tools=tools) if names or not self.marks_answers else ""
        for name in names:
            if name not in text:
                raise ValueError(f"{self.name} doesn't write the tool {name!r}. Use a template that writes tools")
        found = self._by_marks(messages, tools) if self.marks_answers else self._by_prefixes(messages, tools, text)
        answers = [message for message in messages if message["role"] == _ANSWERING]
        runs = _runs(found.is_answer)
        if len(runs) != len(answers):
            raise ValueError(f"{self.name} shows {len(runs)} of {len(answers)} answers of the conversation as such")
        for (start, end), message in zip(runs, answers, strict=True):
            found.is_answer[start:end] = message.get("weight", 1) == 1
        return found

    # --- answers that the template marks, and answers by what stands before them --------------------------------------

    def _by_marks(self, messages: Messages, tools: Sequence[Any] | None) -> Conversation:
        encoded: Any = self._apply(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        return Conversation(np.array(encoded["input_ids"], np.int64), np.array(encoded["assistant_masks"], bool))

    def _by_prefixes(self, messages: Messages, tools: Sequence[Any] | None, text: str) -> Conversation:
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(encoded["input_ids"], np.int64)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        is_answer = np.zeros(len(ids), bool)
        for start, end in self._answers(messages, tools, text):
            # The first word's token may take in spaces with which the prompt ends; that of the end of turn, spaces
            # behind it (`rstrip`).
            first = len(text[:start].rstrip())
            inside = np.flatnonzero((first <= starts) & (start < ends) & (starts < end) & (starts < ends))
            if len(inside):
                is_answer[inside[0] : inside[-1] + 1] = True
        return Conversation(ids, is_answer)

    def _answers(self, messages: Messages, tools: Sequence[Any] | None, text: str) -> list[tuple[int, int]]:
        """Return start and end of every answer in the rendered text."""
        places = [place for place, message in enumerate(messages) if message["role"] == _ANSWERING]
        prompts = [self._render(messages[:place], tools=tools, add_generation_prompt=True) for place in places]
        moved = next((number for number, one in enumerate(prompts, 1) if not text.startswith(one)), None)
        if moved is not None:
            raise ValueError(
                f"{self.name} writes what stands before answer {moved} otherwise once the conversation goes on"
            )
        bounds = [*map(len, prompts), len(text)]
        spans = []
        for number, place in enumerate(places):
            start, message = bounds[number], messages[place]
            if message.get("tool_calls"):
                # Some templates write calls between special tokens of their own.
                turn = self._render(messages[: place + 1], tools=tools)
                ends = list(re.finditer(self._end_of_turn, text[start : len(turn)])) if text.startswith(turn) else []
                if not ends:
                    raise ValueError(f"answer {number + 1} calls tools, and {self.name} doesn't show where that ends")
                spans.append((start, start + ends[-1].end()))
                continue
            said = re.compile(rf"{re.escape(message['content'].strip())}\s*{self._end_of_turn}")
            found = said.search(text, start, bounds[number + 1])
            if found is None:
                raise ValueError(
                    f"answer {number + 1} isn't followed by a special token of the tokenizer, by which the model would "
                    f"learn to end it, or {self.name} changes its words"
                )
            spans.append((start, found.end()))
        return spans

    # --- both -------------------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """Refuse a template whose answers aren't found in a conversation where they are known."""
        try:
            ids, is_answer = self.encode(_PROBE)
        except ValueError as error:
            raise ValueError(f"{self.name} doesn't show which tokens are answers: {error}. {_OWN_TEMPLATE}") from error
        runs = _runs(is_answer)
        learned = [_squeezed(str(self.tokenizer.decode(ids[start:end]))) for start, end in runs]
        context = _squeezed(str(self.tokenizer.decode(ids[~is_answer])))
        questions, answers = ([_squeezed(message["content"]) for message in _PROBE[side::2]] for side in (0, 1))
        are_whole = all(answer in text for text, answer in zip(learned, answers, strict=True))
        are_alone = not any(question in text for text in learned for question in questions)
        # Without marks, a template that doesn't begin the turn itself would leave its header among what is learned.
        # Only before the last answer may templates write more (a thought that is empty).
        is_clean = self.marks_answers or learned[0].startswith(answers[0])
        if not (are_whole and are_alone and is_clean and all(question in context for question in questions)):
            raise ValueError(
                f"{self.name} takes other tokens than its answers' for answers: {learned}. {_OWN_TEMPLATE}"
            )
        special = {self.tokenizer.convert_tokens_to_ids(token) for token in self._special}
        ends = [token for token in ids[slice(*runs[-1])].tolist() if token in special]
        self.end_of_answer = ends[-1] if ends else self.end_of_answer

    def _render(self, messages: Messages, **arguments: Any) -> str:
        return str(self._apply(messages, tokenize=False, **arguments))

    def _apply(self, messages: Messages, **arguments: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.source,
                **arguments,
                **self.options,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"{self.name} refuses the conversation: {' '.join(str(error).split())}") from error


def read_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    """Return the text of a template: `chatml`, that of a file, or for None the tokenizer's own."""
    if template == CHATML:
        return _CHATML
    if template is not None:
        file = Path(template).expanduser()
        if not file.is_file():
            raise ValueError(f"`chat_template={template!r}` is neither {CHATML!r} nor a file.")
        return file.read_text(encoding="utf-8-sig")  # a byte order mark would be written before every conversation
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ValueError(
            "The tokenizer has no chat template, as those of base models often do. Give `chat_template: chatml`, or a "
            "file with a template."
        ) from error


def _with_spaces_in_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose offsets cover spaces, too: the same one, or a copy if it trims them (`trim_offsets`).

    Trimmed, a token of spaces stands for no character, and can't be found in an answer. Ids are the same.
    """
    from tokenizers import Tokenizer, models

    bare = Tokenizer(models.BPE())
    bare.post_processor = tokenizer.backend_tokenizer.post_processor
    untrimmed = bare.to_str().replace('"trim_offsets":true', '"trim_offsets":false')
    if untrimmed == bare.to_str():
        return tokenizer
    whole = copy.deepcopy(tokenizer)
    whole.backend_tokenizer.post_processor = Tokenizer.from_str(untrimmed).post_processor
    return whole


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Return messages with text as their content, and the arguments of tool calls as objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"expected a list of messages, got {type(messages).__name__} {str(messages)[:40]!r}")
    checked = []
    for number, message in enumerate(messages, 1):
        message = dict(message) if isinstance(message, Mapping) else {}
        calls = [dict(call) if isinstance(call, Mapping) else call for call in message.get("tool_calls") or ()]
        if calls:
            message |= {
                "content": message.get("content") or "",
                "tool_calls": [_with_arguments(call) for call in calls],
            }
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str):
                found = "nothing" if value is None else type(value).__name__
                raise ValueError(f"message {number} has {found} as {key!r}, where text is wanted")
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"message {number} has `weight` {message['weight']!r}, where 0 or 1 is wanted")
        checked.append(message)
    return checked


def _with_arguments(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object, as templates expect it; OpenAI's format has text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}


def _names_of_tools(messages: Messages, tools: Sequence[Any] | None) -> set[str]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    functions = [one.get("function", one) for one in (*calls, *(tools or ())) if isinstance(one, Mapping)]
    return {str(function["name"]) for function in functions if "name" in function}


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of every unbroken run of true values."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _squeezed(text: str) -> str:
    """A text without its spaces, which tokenizers write otherwise than they were."""
    return "".join(text.split())
