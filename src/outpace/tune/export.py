"""The chosen candidate as settings of Transformers and vLLM, as near as they come to it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from outpace.bench.runs import AUTO
from outpace.tune.candidate import LOOKUP, NONE

MAX_NGRAM = 3  # tokens that prompt lookup matches at most
NO_POLICY = "it has no policy based on measured times"
NONE_PAYS = f"{NO_POLICY}, and no fixed num_draft_tokens was found to pay"


@dataclass(frozen=True)
class Models:
    """The target, and the settings of target and draft.

    Attributes:
        target: Name of the target on the hub.
        dtype: Precision of both.
        device: Device of both.
        has_encoder: Whether the target has an encoder.
        other_tokenizer: Whether the draft has another tokenizer than the target.
        revision: Revision of the target.
    """

    target: str
    dtype: str
    device: str = "cpu"
    has_encoder: bool = False
    other_tokenizer: bool = False
    revision: str | None = None


def transformers(models: Models, draft: str, num_draft_tokens: str, rule: str, fixed: int | None) -> str:
    """Return code that loads the model and calls its ``generate``.

    Args:
        models: The models.
        draft: Name of the draft.
        num_draft_tokens: Number of draft tokens, or "auto".
        rule: Name of the verification rule.
        fixed: Number of draft tokens without a policy; None if none pays.
    """
    loaded = f"model = {_loaded(models, models.target, models.revision)}"
    if draft == NONE:
        return f"{loaded}\nmodel.generate(**inputs)  # nothing more"
    arguments = "num_draft_tokens="
    arguments += "outpace.Goodput()" if num_draft_tokens == AUTO else num_draft_tokens
    arguments += "" if rule == "token" else f', rule="{rule}"'
    note = f", though {NO_POLICY}" if num_draft_tokens == AUTO else ""
    comment = f"# or with its own assisted generation{note}:"
    if fixed is None:
        comment = f"# not with its own assisted generation: {NONE_PAYS}"
    if draft == LOOKUP:
        own = f"prompt_lookup_num_tokens={fixed}, max_matching_ngram_size={MAX_NGRAM}"
        lines = [loaded, _call("outpace.LookupDrafter()", arguments), comment]
        return "\n".join([*lines, f"model.generate(**inputs, {own})"] if fixed is not None else lines)
    if draft.startswith("ngram:"):
        table = f"outpace.NGramDrafter.load({json.dumps(draft.removeprefix('ngram:'))})"
        comment = "# Transformers' own assisted generation has no n-gram tables"
        return f"{loaded}\n{_call(table, arguments)}\n{comment}"
    lines = [loaded, f"small = {_loaded(models, draft)}"]
    drafter, tokenizers = "small", ""
    if models.other_tokenizer:
        lines.append(f"draft_tokenizer = AutoTokenizer.from_pretrained({_name_arguments(draft)})")
        drafter = "outpace.TextDrafter(small, draft_tokenizer, tokenizer)"
        tokenizers = ", tokenizer=tokenizer, assistant_tokenizer=draft_tokenizer"
    lines += [_call(drafter, arguments), comment]
    if fixed is None:
        return "\n".join(lines)
    lines += [
        f"small.generation_config.num_assistant_tokens = {fixed}",
        'small.generation_config.num_assistant_tokens_schedule = "constant"',
        "small.generation_config.assistant_confidence_threshold = 0.0",
        f"model.generate(**inputs, assistant_model=small{tokenizers})",
    ]
    return "\n".join(lines)


def _loaded(models: Models, name: str, revision: str | None = None) -> str:
    kind = "AutoModelForSeq2SeqLM" if models.has_encoder else "AutoModelForCausalLM"
    to_device = "" if models.device == "cpu" else f'.to("{models.device}")'
    version = "" if revision is None else f", revision={json.dumps(revision)}"
    return f'{kind}.from_pretrained({_name_arguments(name)}, dtype="{models.dtype}"{version}){to_device}'


def _name_arguments(name: str) -> str:
    """Return a model's name as arguments; a GGUF file has its folder and its file name."""
    if not name.endswith(".gguf"):
        return json.dumps(name)
    path = Path(name)
    return f"{json.dumps(str(path.parent))}, gguf_file={json.dumps(path.name)}"


def _call(drafter: str, arguments: str) -> str:
    return f"model.generate(**inputs, custom_generate=outpace.generate, draft={drafter}, {arguments})"


def vllm(models: Models, draft: str, num_draft_tokens: str, fixed: int | None) -> str:
    """Return a command that serves the model with vLLM.

    Args:
        models: The models.
        draft: Name of the draft.
        num_draft_tokens: Number of draft tokens, or "auto".
        fixed: Number of draft tokens without a policy; None if none pays.
    """
    if models.has_encoder:
        return "# vLLM does not speculate with encoder-decoder models"
    command = f"vllm serve {shlex.quote(models.target)} --dtype {models.dtype}"
    command += "" if models.revision is None else f" --revision {shlex.quote(models.revision)}"
    if draft == NONE:
        return f"{command}  # nothing more"
    if draft.startswith("ngram:"):
        return f"{command}  # vLLM has no n-gram tables; its method ngram is prompt lookup"
    if models.other_tokenizer:
        return f"{command}  # vLLM needs a draft with the target's tokenizer"
    if fixed is None:
        return f"{command}  # nothing more: {NONE_PAYS}"
    settings: dict[str, str | int] = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": fixed,
    }
    if draft == LOOKUP:
        settings = {"method": "ngram", "num_speculative_tokens": fixed}
        settings |= {"prompt_lookup_max": MAX_NGRAM, "prompt_lookup_min": 1}
    command += f" --speculative-config {shlex.quote(json.dumps(settings))}"
    return command + (f"  # {NO_POLICY}" if num_draft_tokens == AUTO else "")
