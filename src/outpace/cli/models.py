"""The flags that name a target and its drafter, and the decoder that is made from them."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli import checks
from outpace.cli.options import (
    Config,
    DefaultRule,
    Device,
    DraftName,
    Dtype,
    Lenience,
    NumDraftTokens,
    Revision,
    Target,
    TrustRemoteCode,
)
from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.decoder import Decoder
    from outpace.policy import DraftLengthPolicy


@dataclass(frozen=True)
class ModelFlags:
    """Flags that name a target and its drafter, and set how they decode."""

    config: Config = None
    target: Target = None
    draft: DraftName = "lookup"
    rule: DefaultRule = None
    lenience: Lenience = 1.0
    num_draft_tokens: NumDraftTokens = None
    device: Device = None
    dtype: Dtype = None
    trust_remote_code: TrustRemoteCode = False
    revision: Revision = None

    def check(self) -> None:
        """Refuse values that do not fit together, before PyTorch is imported."""
        check_models(self.target, self.draft, self.rule, self.lenience, self.num_draft_tokens)


def with_model_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of ``ModelFlags``, in place of its first parameter."""
    flags = inspect.signature(ModelFlags, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    parameters = [*flags.values(), *[*signature.parameters.values()][1:]]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        models = ModelFlags(**{name: values.pop(name) for name in flags})
        command(models, **values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def check_models(
    target: str | None,
    drafts: str | Sequence[str],
    rule: str | None = "token",
    lenience: float = 1.0,
    num_draft_tokens: str | None = None,
) -> None:
    """Refuse names and settings that do not fit together, before PyTorch is imported."""
    from outpace.draft.names import check_draft_exists
    from outpace.models.hub import check_name

    if lenience < 1 and rule not in (None, "token"):
        raise ValueError(f"--lenience: got {lenience:g} with --rule {rule}; only rule token has lenience")
    if drafts == "none" and num_draft_tokens not in (None, "0", "auto"):
        raise ValueError("--num-draft-tokens: nothing is drafted with --draft none")
    if drafts == "none" and lenience < 1:
        raise ValueError("--lenience: nothing is drafted with --draft none")
    for one in [drafts] if isinstance(drafts, str) else drafts:
        check_draft_exists(one)
    if target is not None:
        check_name(target)


def open_decoder(models: ModelFlags) -> Decoder:
    """Load the models that the flags name, and return their decoder.

    Wrong values are refused before a model is loaded.
    """
    models.check()
    from outpace.loading import load

    refuse_speech(models.target, trust_remote_code=models.trust_remote_code, revision=models.revision)
    decoder = load(
        models.target,
        models.draft,
        device=models.device,
        dtype=models.dtype,
        rule=models.rule,
        lenience=models.lenience,
        num_draft_tokens=parse_policy(models.num_draft_tokens),
        tell=note,
        trust_remote_code=models.trust_remote_code,
        revision=models.revision,
    )
    # All objects so far live until the process ends, so the garbage collector need not scan them.
    gc.freeze()
    gc.enable()
    return decoder


def refuse_speech(target: str | None, *, trust_remote_code: bool, revision: str | None) -> None:
    """Refuse a target whose input is speech, before its weights are read.

    The error names the commands for such a model.
    """
    if target is None or Path(target).expanduser().is_file():
        return
    from transformers import PretrainedConfig

    from outpace.models.hub import check_model

    check_model(target, trust_remote_code=trust_remote_code, revision=revision)
    folder = Path(target).expanduser()
    config, _ = PretrainedConfig.get_config_dict(folder if folder.is_dir() else target, revision=revision)
    if config.get("model_type") == "whisper":
        raise ValueError(
            f"{target}: its input is speech; use `outpace transcribe`, or `outpace eval asr` to measure it"
        )


def parse_policy(text: str | None) -> DraftLengthPolicy | None:
    """Return the draft-length policy that a flag names; None for the default and "auto"."""
    if text in (None, "auto"):
        return None
    from outpace.policy import Fixed, Heuristic

    checks.num_draft_tokens(text)
    if text.isdecimal():
        return Fixed(int(text))
    start = int(text.partition(":")[2] or 5)
    return Heuristic(start, max(20, start))
