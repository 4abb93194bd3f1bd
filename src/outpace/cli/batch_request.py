"""Requests of a batch: the lines of ``outpace generate --input``, plain or of the OpenAI batch format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from outpace.checks.arguments import boolean, integer, kind
from outpace.checks.errors import RANGES, suggestion
from outpace.checks.text import check_text
from outpace.cli.generate import encode, system_messages
from outpace.engine.text import chat_ids
from outpace.sampling import SamplingParams

if TYPE_CHECKING:
    from outpace.decoder import Decoder
    from outpace.engine.sequence import SequenceState

Id = str | int
LENGTHS = "max_new_tokens", "max_tokens", "max_completion_tokens"  # names of the same value
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "allowed_token_ids",
)  # fmt: skip
COMMON = (*SAMPLING, "stop", "seed", "logprobs")
PLAIN = ("id", "prompt", "messages", *LENGTHS[:2], *COMMON)
OPENAI = "custom_id", "method", "url", "body"  # a line with one of them has the OpenAI batch format
NO_EFFECT = "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"
ONLY_VALUES: dict[str, Any] = {  # of fields that ask for what this command does not do
    "n": 1, "best_of": 1, "stream": False, "echo": False, "suffix": "", "tools": [], "modalities": ["text"],
    "response_format": {"type": "text"},
}  # fmt: skip


class Form(Enum):
    """Form of a request and its result; the values are the URLs of the OpenAI batch format."""

    PLAIN = None
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"

    @property
    def is_openai(self) -> bool:
        """True for a form of the OpenAI batch format."""
        return self is not Form.PLAIN


class LineError(ValueError):
    """Error for a line that is no valid request.

    Args:
        reason: What is wrong.
        id: Id of the request.
        is_openai: Whether the line has the OpenAI batch format.
    """

    def __init__(self, reason: str, id: Id, is_openai: bool) -> None:
        super().__init__(reason)
        self.id, self.is_openai = id, is_openai


@dataclass(frozen=True)
class Defaults:
    """Values of flags, for requests that do not set their own.

    Attributes:
        sampling: Sampling parameters. None: those of the model's generation config.
        options: Keyword arguments of ``Decoder.requests``.
        system: System message of conversations that have none.
        raw: Whether plain prompts are used without the chat template.
    """

    sampling: SamplingParams | None
    options: Mapping[str, Any]
    system: str | None = None
    raw: bool = False


@dataclass(frozen=True)
class Request:
    """A request of a line.

    Attributes:
        id: Its id, which its result has, too.
        form: Form of its result.
        prompt: Text or token ids; None if there are messages.
        messages: The conversation; None if there is a prompt.
        options: Its own keyword arguments of ``Decoder.requests``.
        sampling: Its own fields of ``SamplingParams``.
    """

    id: Id
    form: Form
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    options: Mapping[str, Any]
    sampling: Mapping[str, Any]

    def sequence(self, decoder: Decoder, defaults: Defaults) -> SequenceState:
        """Return the request in the form that a scheduler takes.

        Raises:
            ValueError: A value does not suit the model, such as a prompt that is too long.
        """
        sampling = defaults.sampling
        if self.sampling:
            sampling = replace(sampling or SamplingParams(), **self.sampling)
        ids = self._token_ids(decoder, defaults)
        (sequence,) = decoder.requests(ids, sampling, **{**defaults.options, **self.options})
        return sequence

    def _token_ids(self, decoder: Decoder, defaults: Defaults) -> list[int]:
        """Return the token ids of the prompt, or of the messages."""
        system = system_messages(defaults.system)
        if self.messages is not None:
            has_own = self.messages[0].get("role") in ("system", "developer")
            return decoder.encode(
                chat_ids(decoder.tokenizer, self.messages if has_own else [*system, *self.messages])
            )
        if not isinstance(self.prompt, str):
            return decoder.encode(self.prompt or [])
        raw = self.prompt if defaults.raw or self.form is Form.COMPLETION else None
        return encode(decoder, [*system, {"role": "user", "content": self.prompt}], raw)


def read(line: bytes, number: int) -> Request:
    """Return the request of a line.

    Args:
        line: The line.
        number: Its number in the file, from 1.

    Raises:
        LineError: The line is no valid request.
    """
    id: Id = f"line-{number}"
    is_openai = b'"custom_id"' in line
    try:
        value = parsed(line, number)
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict):
            raise TypeError(f"request: got {kind(value)[:80]}; it must be a string or an object")
        is_openai = any(name in value for name in OPENAI)
        id = own_id(value, "custom_id" if is_openai else "id", number)
        return openai_request(id, value) if is_openai else plain_request(id, value)
    except (TypeError, ValueError) as error:
        raise LineError(str(error), id, is_openai) from error


def parsed(line: bytes, number: int) -> Any:
    """Return the JSON value of a line."""
    try:
        return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        raise ValueError(f"not JSON that can be read ({error})") from None


def own_id(value: Mapping[str, Any], name: str, number: int) -> Id:
    """Return the id of a request, which its line number replaces if it has none."""
    default = f"line-{number}"
    id: Id | None = value.get(name)
    if id is None:
        return default
    if type(id) is not str and (type(id) is not int or name == "custom_id"):
        fits = "a string" if name == "custom_id" else "a string or an int"
        raise TypeError(f"{name}: got {kind(id)[:80]}; it must be {fits}")
    if isinstance(id, str):
        check_text(name, id)
        if re.fullmatch(r"line-\d+", id) and id != default:
            raise ValueError(f"{name}: got {id!r}; this is the id of a line without one")
    return id


def plain_request(id: Id, value: Mapping[str, Any]) -> Request:
    """Return the request of a plain line."""
    fields = {name: one for name, one in value.items() if one is not None}
    check_names(fields, PLAIN, "no such field")
    if "prompt" in fields and "messages" in fields:
        raise ValueError("prompt: got it together with messages; give one of them")
    if "prompt" not in fields and "messages" not in fields:
        raise ValueError("prompt: missing; a request has a prompt or messages")
    return request(id, Form.PLAIN, fields)


def openai_request(id: Id, value: Mapping[str, Any]) -> Request:
    """Return the request of a line of the OpenAI batch format."""
    check_names(value, OPENAI, "no such field")
    if value.get("method", "POST") != "POST":
        raise ValueError(f'method: got {value["method"]!r}; it must be "POST"')
    url, body = value.get("url"), value.get("body")
    urls = [form.value for form in Form if form.value is not None]
    if url not in urls:
        raise ValueError(f"url: got {url!r}; it must be {' or '.join(urls)}")
    if not isinstance(body, dict):
        raise TypeError(f"body: got {kind(body)[:80]}; it must be an object")
    fields = {name: one for name, one in body.items() if one is not None and name not in NO_EFFECT}
    for name, only in ONLY_VALUES.items():
        if (got := fields.pop(name, only)) != only:
            raise ValueError(f"{name}: got {f'{got!r}'[:80]}; it must be {only!r}")
    form = Form(url)
    if form is Form.CHAT:
        check_names(fields, ("messages", "top_logprobs", *LENGTHS[1:], *COMMON), "not supported")
        fields["logprobs"] = chat_logprobs(fields)
    else:
        check_names(fields, ("prompt", LENGTHS[1], *COMMON), "not supported")
    prompt = "messages" if form is Form.CHAT else "prompt"
    if prompt not in fields:
        raise ValueError(f"{prompt}: missing; a request to {url} has {prompt}")
    return request(id, form, fields)


def chat_logprobs(fields: dict[str, Any]) -> bool | int:
    """Return the value of ``logprobs=`` for the two fields of chat completions, and remove the second."""
    requested, top = fields.get("logprobs", False), fields.pop("top_logprobs", None)
    boolean("logprobs", requested)
    if top is None:
        return bool(requested)
    if not requested:
        raise ValueError(f"top_logprobs: got {top!r} without logprobs; set logprobs to true")
    integer("top_logprobs", top, "an int >= 0", lambda k: k >= 0)
    return int(top)


def check_names(fields: Mapping[str, Any], known: Sequence[str], reason: str) -> None:
    """Raise for the first field that is not known."""
    for name in fields:
        if name not in known:
            raise ValueError(f"{name}: {reason}{suggestion(name, known)}")


def request(id: Id, form: Form, fields: Mapping[str, Any]) -> Request:
    """Return a request, after its values were checked as far as they do not depend on the model."""
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if messages is not None:
        messages = checked_messages(messages)
    elif not isinstance(prompt, str) and not is_token_ids(prompt):
        raise TypeError(f"prompt: got {kind(prompt)[:80]}; it must be a string or token ids")
    elif isinstance(prompt, str) and not prompt.strip():
        raise ValueError("prompt: it is empty; a model needs something to go on from")
    sampling = {name: fields[name] for name in SAMPLING if name in fields}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = checked_bias(sampling["logit_bias"])
    SamplingParams(**sampling)
    return Request(id, form, prompt, messages, checked_options(fields), sampling)


def checked_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of ``Decoder.requests`` that a request sets."""
    options: dict[str, Any] = {}
    lengths = [name for name in LENGTHS if name in fields]
    if len(lengths) > 1:
        raise ValueError(f"{lengths[1]}: got it together with {lengths[0]}; give one of them")
    for name in lengths:
        integer(name, fields[name], "an int >= 1", lambda m: m >= 1)
        options["max_new_tokens"] = fields[name]
    if "stop" in fields:
        stop = fields["stop"]
        stops = stop if isinstance(stop, list) else [stop]
        if not all(isinstance(one, str) and one for one in stops):
            raise ValueError(f"stop: got {stop!r}; it must be a non-empty string, or a list of them")
        options["stop"] = stops
    if "seed" in fields:
        integer("seed", fields["seed"], *RANGES["seed"])
        options["seed"] = fields["seed"]
    if "logprobs" in fields:
        if not isinstance(fields["logprobs"], bool):
            integer("logprobs", fields["logprobs"], "True, False, or an int >= 0", lambda k: k >= 0)
        options["logprobs"] = fields["logprobs"]
    return options


def checked_bias(bias: Any) -> dict[int, float]:
    """Return the values of ``logit_bias``, whose keys are strings in JSON."""
    if not isinstance(bias, dict):
        raise TypeError(f"logit_bias: got {kind(bias)[:80]}; it must map token ids to numbers")
    wrong = [token for token in bias if not re.fullmatch(r"\d{1,18}", token)]
    if wrong:
        raise ValueError(f"logit_bias: got {kind(wrong[0])[:80]}; it must be keyed by token ids >= 0")
    return {int(token): one for token, one in bias.items()}


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages with the parts of a content joined to one string."""
    if not (isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)):
        raise TypeError(f"messages: got {kind(messages)[:80]}; it must be a list of messages")
    return [{**one, **joined_content(one, i)} for i, one in enumerate(messages)]


def joined_content(message: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return the content of a message as one string, if it is a list of parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return {}
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(f"messages[{index}]: got a part {f'{part!r}'[:80]}; only text is supported")
    return {"content": "".join(part["text"] for part in parts)}


def is_token_ids(prompt: Any) -> bool:
    """Return whether a prompt is a list of token ids."""
    return isinstance(prompt, list) and bool(prompt) and {type(one) for one in prompt} == {int}
