"""The result of an audit, and its text for people."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.auditing.pearson import CERTAINTY, LOOKS, SUSPICIOUS

NO_DIFFERENCE, DIFFERENCE, UNKNOWN = "no difference found", "difference found", "could not tell"


@dataclass(frozen=True)
class Greedy:
    """Greedy decoding of one prompt."""

    tokens: int  # compared
    differs_at: int | None  # index of the first different token
    draft_tokens: int  # of the whole output
    ties: int = 0  # different tokens whose two logits are equal up to rounding; either token is correct

    @property
    def passed(self) -> bool:
        """True if all tokens are the target's own."""
        return self.differs_at is None


@dataclass(frozen=True)
class Joint:
    """Samples of one prompt.

    Attributes:
        samples: Sequences that were sampled.
        outcomes: Sequences that are possible.
        impossible: Sampled sequences with tokens that the logit bias ruled out.
        p_value: The p-value of this prompt by itself.
        detectable: Misplacement on this prompt alone that the audit finds with 99 % certainty.
        draft_tokens: Draft tokens of all samples.
        accepted_tokens: Draft tokens that were accepted.
    """

    samples: int
    outcomes: int
    impossible: int
    p_value: float
    detectable: float
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class Report:
    """Result of an audit.

    Attributes:
        greedy: The greedy check of each prompt; empty if that check was skipped.
        joint: The sampling check of each prompt; empty if that check was skipped.
        tokens: Tokens of a sample.
        different: Whether the sampling check found a difference.
        p_value: The p-value of the last look at all prompts together, corrected for their number. None
            without a sampling check.
        alarm: Probability that the audit reports a difference for a correct decoder.
        detectable: Misplacement on every prompt that the audit finds with 99 % certainty. None without a
            sampling check.
        rounding: Misplacement on any prompt that the audit attributes to rounding.
        draft_length_policy: Draft-length policy of the checks, as text.
        forced: Whether the audit replaced a policy that depends on measured time.
        seconds: Seconds of all checks.
    """

    greedy: list[Greedy]
    joint: list[Joint]
    tokens: int
    different: bool
    p_value: float | None
    alarm: float
    detectable: float | None
    rounding: float
    draft_length_policy: str
    forced: bool
    seconds: float

    @property
    def sampling(self) -> str:
        """Verdict of the sampling check alone."""
        if self.different:
            return DIFFERENCE
        drafted = any(one.draft_tokens for one in self.joint)
        return NO_DIFFERENCE if drafted and not self.suspicious and not self.blind else UNKNOWN

    @property
    def suspicious(self) -> bool:
        """True if the p-value is small, but not small enough for a difference."""
        return not self.different and self.p_value is not None and self.p_value < SUSPICIOUS

    @property
    def blind(self) -> bool:
        """True if there are too few samples to find any difference."""
        return self.detectable is None or self.detectable >= 1

    @property
    def verdict(self) -> str:
        """One of "no difference found", "difference found" and "could not tell"."""
        if not all(one.passed for one in self.greedy) or self.different:
            return DIFFERENCE
        if self.joint:
            return self.sampling
        return NO_DIFFERENCE if self.tested else UNKNOWN

    @property
    def passed(self) -> bool:
        """True if no difference was found."""
        return self.verdict == NO_DIFFERENCE

    @property
    def tested(self) -> bool:
        """True if any draft token was proposed; without one there is nothing to test."""
        return self.draft_tokens > 0 or any(one.draft_tokens for one in self.greedy)

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of the sampling check."""
        return sum(one.draft_tokens for one in self.joint)

    @property
    def accepted_tokens(self) -> int:
        """Accepted draft tokens of the sampling check."""
        return sum(one.accepted_tokens for one in self.joint)

    def __str__(self) -> str:
        """Return the verdict in words, then the figures."""
        lines = [f"{self.verdict.capitalize()}."]
        if self.verdict == DIFFERENCE:
            lines = ["DIFFERENCE FOUND: the output is not what the target gives without speculation."]
        elif not self.tested:
            lines = ["Could not tell: no draft token was proposed on these prompts, so nothing was tested."]
        if self.greedy:
            lines.append(self._greedy_line())
        if self.joint:
            lines += self._sampling_lines()
        return "\n".join(lines)

    def _greedy_line(self) -> str:
        passed, compared = sum(one.passed for one in self.greedy), sum(one.tokens for one in self.greedy)
        ties = sum(one.ties for one in self.greedy)
        at_ties = f", {ties} of them at ties that rounding decides" if ties else ""
        return (
            f"Greedy: {passed} of {len(self.greedy)} prompts gave the target's own tokens "
            f"({compared} compared{at_ties})."
        )

    def _sampling_lines(self) -> list[str]:
        assert self.p_value is not None
        samples = sum(one.samples for one in self.joint)
        impossible = sum(one.impossible for one in self.joint)
        corrected = f", corrected for {len(self.joint)} prompts" if len(self.joint) > 1 else ""
        lines = [
            f"Sampling: {self.sampling} in {samples:,} samples of {self.tokens} tokens; "
            f"p-value {self.p_value:.2g}{corrected}."
        ]
        if impossible:
            lines.append(f"{impossible:,} samples have tokens that the logit bias ruled out.")
        elif self.p_value < SUSPICIOUS:
            chance = len(LOOKS) * self.p_value  # at one of the looks
            odds = f"at most 1 of {1 / chance:,.0f}" if chance > 1e-12 else "fewer than 1 of 10^12"
            lines.append(f"A correct decoder gives a p-value this small in {odds} audits.")
        if self.suspicious:
            lines.append("That is suspicious, but no proof: run the audit again with more samples.")
        undrafted = [i for i, one in enumerate(self.joint) if not one.draft_tokens]
        if self.tested and undrafted and not self.different:
            which = "any prompt" if len(undrafted) == len(self.joint) else f"prompt {undrafted[0] + 1}"
            lines.append(f"No draft token was proposed in the samples of {which}: give prompts that repeat.")
        if self.blind and not self.different:
            lines.append("There are too few samples to find any difference: give more.")
        if self.sampling == NO_DIFFERENCE:
            every = " on every prompt" if len(self.joint) > 1 else ""
            lines.append(
                f"A misplacement of {self.detectable:.1%} or more of these sequences' probability{every} "
                f"would have been found with {CERTAINTY:.0%} certainty."
            )
            lines.append(
                f"A correct decoder is found different in at most 1 of {1 / self.alarm:,.0f} audits."
            )
        if self.rounding:
            lines.append(f"Up to {self.rounding:.1%} is attributed to rounding in 16 bits.")
        replaced = ", set by the audit" if self.forced else ""
        lines.append(
            f"Draft tokens: {self.accepted_tokens:,} accepted, "
            f"{self.draft_tokens - self.accepted_tokens:,} rejected "
            f"(policy {self.draft_length_policy}{replaced})."
        )
        if self.draft_tokens and not self.accepted_tokens:
            lines.append("None was accepted, so acceptance was not tested: give prompts that repeat.")
        elif self.draft_tokens and self.accepted_tokens == self.draft_tokens:
            lines.append("None was rejected, so rejection was not tested: give other prompts.")
        return lines
