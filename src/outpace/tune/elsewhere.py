"""The chosen setup in Transformers and in vLLM, as near as they come to it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from outpace.bench.runs import AUTO
from outpace.tune.way import LOOKUP, NONE

LONGEST = 3  # tokens that prompt lookup matches at most
NO_POLICY = "it has no policy that goes by the clock"
NONE_PAYS = f"{NO_POLICY}, and no fixed length was found to pay"


@dataclass(frozen=True)
class Models:
    """The models of a pair.

    Attributes:
        target: Name of the target on the hub.
        dtype: Precision of both.
        device: Device of both.
        encoder: Whether the target has an encoder.
        other: Whether the draft has another tokenizer than the target.
        revision: Revision of the target.
    """

    target: str
    dtype: str
    device: str = "cpu"
    encoder: bool = False
    other: bool = False
    revision: str | None = None


def transformers(models: Models, draft: str, length: str, rule: str, near: int | None) -> str:
    """Return code that loads the model and calls its ``generate``.

    Args:
        models: The models.
        draft: Name of the draft.
        length: Number of draft tokens, or "auto".
        rule: Name of the verification rule.
        near: Fixed number of draft tokens in place of "auto"; None if none pays.
    """
    loaded = f"model = {_loaded(models, models.target, models.revision)}"
    if draft == NONE:
        return f"{loaded}\nmodel.generate(**inputs)  # nothing more"
    given = "num_draft_tokens=" + ("outpace.Goodput()" if length == AUTO else length)
    given += "" if rule == "token" else f', rule="{rule}"'
    why = f", though {NO_POLICY}" if length == AUTO else ""
    own = f"# or by its own assisted generation{why}:"
    if near is None:
        own = f"# not by its own assisted generation: {NONE_PAYS}"
    if draft == LOOKUP:
        theirs = f"prompt_lookup_num_tokens={near}, max_matching_ngram_size={LONGEST}"
        lines = [loaded, _call("outpace.LookupDrafter(min_ngram=1)", given), own]
        return "\n".join([*lines, f"model.generate(**inputs, {theirs})"] if near is not None else lines)
    if draft.startswith("ngram:"):
        table = f"outpace.NGramDrafter.load({json.dumps(draft.removeprefix('ngram:'))})"
        return (
            f"{loaded}\n{_call(table, given)}\n# Transformers' own assisted generation has no n-gram tables"
        )
    lines = [loaded, f"small = {_loaded(models, draft)}"]
    drafter, tokenizers = "small", ""
    if models.other:
        lines.append(f"theirs = AutoTokenizer.from_pretrained({_where(draft)})")
        drafter = "outpace.TextDrafter(small, theirs, tokenizer)"
        tokenizers = ", tokenizer=tokenizer, assistant_tokenizer=theirs"
    lines += [_call(drafter, given), own]
    if near is None:
        return "\n".join(lines)
    lines += [
        f"small.generation_config.num_assistant_tokens = {near}",
        'small.generation_config.num_assistant_tokens_schedule = "constant"',
        "small.generation_config.assistant_confidence_threshold = 0.0",
        f"model.generate(**inputs, assistant_model=small{tokenizers})",
    ]
    return "\n".join(lines)


def _loaded(models: Models, name: str, revision: str | None = None) -> str:
    kind = "AutoModelForSeq2SeqLM" if models.encoder else "AutoModelForCausalLM"
    there = "" if models.device == "cpu" else f'.to("{models.device}")'
    version = "" if revision is None else f", revision={json.dumps(revision)}"
    return f'{kind}.from_pretrained({_where(name)}, dtype="{models.dtype}"{version}){there}'


def _where(name: str) -> str:
    """Return a model's name as arguments; a GGUF file is named by its folder and its file name."""
    if not name.endswith(".gguf"):
        return json.dumps(name)
    path = Path(name)
    return f"{json.dumps(str(path.parent))}, gguf_file={json.dumps(path.name)}"


def _call(drafter: str, given: str) -> str:
    return f"model.generate(**inputs, custom_generate=outpace.generate, draft={drafter}, {given})"


def vllm(models: Models, draft: str, length: str, near: int | None) -> str:
    """Return a command that serves the model with vLLM.

    Args:
        models: The models.
        draft: Name of the draft.
        length: Number of draft tokens, or "auto".
        near: Fixed number of draft tokens in place of "auto"; None if none pays.
    """
    if models.encoder:
        return "# it does not speculate with encoder-decoder models"
    command = f"vllm serve {shlex.quote(models.target)} --dtype {models.dtype}"
    command += "" if models.revision is None else f" --revision {shlex.quote(models.revision)}"
    if draft == NONE:
        return f"{command}  # nothing more"
    if draft.startswith("ngram:"):
        return f"{command}  # it has no n-gram tables; its ngram copies from the context, as lookup does"
    if models.other:
        return f"{command}  # its drafts have the target's tokenizer, which this one has not"
    if near is None:
        return f"{command}  # nothing more: {NONE_PAYS}"
    settings: dict[str, str | int] = {"method": "draft_model", "model": draft, "num_speculative_tokens": near}
    if draft == LOOKUP:
        settings = {"method": "ngram", "num_speculative_tokens": near}
        settings |= {"prompt_lookup_max": LONGEST, "prompt_lookup_min": 1}
    command += f" --speculative-config {shlex.quote(json.dumps(settings))}"
    return command + (f"  # {NO_POLICY}" if length == AUTO else "")
