"""Verification: p, q and draft tokens in; the accepted length and the next token out.

It is pure: no models, no caches.
"""

from outpace.verification.block import Block as Block
from outpace.verification.block import SampledTokens as SampledTokens
from outpace.verification.block import Verdict as Verdict
from outpace.verification.entry import sample as sample
from outpace.verification.entry import verify as verify
from outpace.verification.entry import verify_block as verify_block
from outpace.verification.rules import Rule as Rule
from outpace.verification.rules import sigmoid as sigmoid
