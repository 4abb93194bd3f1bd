"""Use verification in a loop of your own: draft tokens and logits in, accepted length and next token out."""

import torch

import outpace

B, g, V = 2, 4, 32_000
draft_logits = torch.randn(B, g, V)
target_logits = torch.randn(B, g + 1, V)
draft_tokens = torch.multinomial(draft_logits.softmax(-1).flatten(0, 1), 1).view(B, g)

verdict = outpace.verify(draft_tokens, draft_logits, target_logits, seed=[7, 8], position=128)
for b in range(B):
    accepted = draft_tokens[b, : int(verdict.accepted[b])].tolist()
    print(f"sequence {b}: accepted {accepted}, then {int(verdict.next_token[b])}")
