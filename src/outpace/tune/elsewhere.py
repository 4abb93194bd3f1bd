"""The same way of writing inside Transformers, and in vLLM, as near as they come."""

from __future__ import annotations

import json
import shlex

from outpace.bench.runs import AUTO
from outpace.tune.way import LOOKUP, NONE

LONGEST = 3  # tokens that a lookup matches at most
NO_POLICY = "it has no policy that goes by the clock"


def transformers(draft: str, length: str, rule: str, near: int) -> str:
    """Calls of `model.generate`; `near` is a number for what is not a fixed length."""
    if draft == NONE:
        return "model.generate(**inputs)  # nothing more"
    loading, own, theirs = "", f'"{LOOKUP}"', ""
    if draft == LOOKUP:
        theirs = f"prompt_lookup_num_tokens={near}, max_matching_ngram_size={LONGEST}"
    elif draft.startswith("ngram:"):
        own = f"outpace.NGramDrafter.load({json.dumps(draft.removeprefix('ngram:'))})"
    else:
        loading, own = f"small = AutoModelForCausalLM.from_pretrained({json.dumps(draft)})\n", "small"
        theirs = f"assistant_model=small, num_assistant_tokens={near}, "
        theirs += 'num_assistant_tokens_schedule="constant"'
    given = f"draft={own}" + ("" if length == AUTO else f", length={length}")
    given += "" if rule == "token" else f', rule="{rule}"'
    text = f"{loading}model.generate(**inputs, custom_generate=outpace.generate, {given})\n"
    if not theirs:
        return text + "# Transformers' own assisted generation has no n-gram tables"
    why = f", though {NO_POLICY}" if length == AUTO else ""
    return text + f"# or by its own assisted generation{why}:\nmodel.generate(**inputs, {theirs})"


def vllm(target: str, draft: str, length: str, dtype: str, near: int) -> str:
    """A command that serves it."""
    command = f"vllm serve {shlex.quote(target)} --dtype {dtype}"
    if draft == NONE:
        return f"{command}  # nothing more"
    if draft.startswith("ngram:"):
        return f"{command}  # it has no n-gram tables; its ngram copies from the context, as lookup does"
    settings: dict[str, str | int] = {"method": "draft_model", "model": draft, "num_speculative_tokens": near}
    if draft == LOOKUP:
        settings = {"method": "ngram", "num_speculative_tokens": near}
        settings |= {"prompt_lookup_max": LONGEST, "prompt_lookup_min": 1}
    command += f" --speculative-config {shlex.quote(json.dumps(settings))}"
    return command + (f"  # {NO_POLICY}" if length == AUTO else "")
