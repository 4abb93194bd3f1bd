"""Write a drafter that proposes the last token again.

Whatever a drafter proposes, the output distribution is the target's.
"""

import outpace
from outpace import Draft, Drafter
from outpace.draft.base import State


class RepeatDrafter(Drafter):
    """Propose the last token again."""

    def propose(self, state: State, g: int) -> Draft:
        """Return g copies of the last token of each sequence, chosen rather than sampled."""
        return Draft.chosen([[ids[-1]] * g for ids in state.tokens])


target = outpace.load(draft="none")
decoder = outpace.Decoder(target.target, RepeatDrafter(), target.tokenizer, num_draft_tokens=2)
out = decoder.generate("ha ha ha ha", max_new_tokens=32, temperature=0)
print(out.text)
print(f"{out.stats.accepted_tokens} of {out.stats.draft_tokens} draft tokens were accepted")
