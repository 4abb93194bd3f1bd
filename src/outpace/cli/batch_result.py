"""Results of a batch: the lines of ``outpace generate --output``, plain or of the OpenAI batch format."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checks.text import REPLACEMENT_CHARACTER
from outpace.cli.batch_request import Form, Id, Request
from outpace.decoder import Decoder
from outpace.engine.sequence import Output, SequenceState


def result(request: Request, sequence: SequenceState, output: Output, decoder: Decoder) -> dict[str, Any]:
    """Return the result of a request that has ended.

    Args:
        request: The request.
        sequence: Its sequence.
        output: Its output.
        decoder: The decoder.
    """
    if request.form is Form.PLAIN:
        return plain_result(request.id, sequence, output)
    is_chat = request.form is Form.CHAT
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": name_of(decoder.target),
        "choices": [(chat_choice if is_chat else completion_choice)(output, decoder.tokenizer)],
        "usage": usage(sequence, output),
    }
    response = {"status_code": 200, "request_id": uuid.uuid4().hex, "body": body}
    return openai_result(request.id, response=response)


def failure(id: Id, is_openai: bool, error: Exception) -> dict[str, Any]:
    """Return the result of a request that has failed.

    Args:
        id: Id of the request.
        is_openai: Whether it has the OpenAI batch format.
        error: Its error.
    """
    if not is_openai:
        return {"id": id, "error": str(error)}
    code = "invalid_request" if isinstance(error, ValueError | TypeError) else "server_error"
    return openai_result(id, error={"code": code, "message": str(error)})


def name_of(model: Any) -> str:
    """Return the hub id of a model, or the name of its folder or file."""
    name = str(getattr(model, "name_or_path", ""))
    return Path(name).name if Path(name).exists() else name


def openai_result(id: Id, response: Any = None, error: Any = None) -> dict[str, Any]:
    """Return a result of the OpenAI batch format."""
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": id, "response": response, "error": error}


def plain_result(id: Id, sequence: SequenceState, output: Output) -> dict[str, Any]:
    """Return the result of a plain line."""
    found: dict[str, Any] = {
        "id": id,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": usage(sequence, output),
    }
    if output.logprobs is not None:
        found["logprobs"] = output.logprobs
    if output.top_logprobs is not None:
        found["top_logprobs"] = [possible(top) for top in output.top_logprobs]
    return found


def usage(sequence: SequenceState, output: Output) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    prompt = sequence.prompt_length if sequence.source is None else len(sequence.source)
    new = len(output.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def possible(top: Mapping[int, float]) -> dict[int, float]:
    """Return the tokens that can be sampled, since JSON has no infinity."""
    return {token: logprob for token, logprob in top.items() if math.isfinite(logprob)}


def chat_choice(output: Output, tokenizer: Any) -> dict[str, Any]:
    """Return the choice of a chat completion."""
    logprobs = None
    if output.logprobs is not None:
        tops = output.top_logprobs or [{}] * len(output.logprobs)
        logprobs = {
            "content": [
                token_logprob(token, logprob, tokenizer)
                | {"top_logprobs": [token_logprob(*one, tokenizer) for one in possible(top).items()]}
                for token, logprob, top in zip(output.token_ids, output.logprobs, tops, strict=True)
            ],
            "refusal": None,
        }
    return {
        "index": 0,
        "message": {"role": "assistant", "content": output.text},
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
    }


def token_logprob(token: int, logprob: float, tokenizer: Any) -> dict[str, Any]:
    """Return a token with its log-probability, as in a chat completion."""
    text = str(tokenizer.decode([token]))
    is_complete = REPLACEMENT_CHARACTER not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_complete else None}


def completion_choice(output: Output, tokenizer: Any) -> dict[str, Any]:
    """Return the choice of a completion."""
    logprobs = None
    if output.logprobs is not None:
        tops = output.top_logprobs
        tokens = [str(tokenizer.decode([token])) for token in output.token_ids]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": output.logprobs,
            "top_logprobs": None if tops is None else [by_text(top, tokenizer) for top in tops],
            "text_offset": [sum(map(len, tokens[:i])) for i in range(len(tokens))],
        }
    return {"index": 0, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}


def by_text(top: Mapping[int, float], tokenizer: Any) -> dict[str, float]:
    """Return the log-probabilities of tokens by their texts, the largest for each text."""
    found: dict[str, float] = {}
    for token, logprob in possible(top).items():
        found.setdefault(str(tokenizer.decode([token])), logprob)
    return found
