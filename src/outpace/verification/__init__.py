"""Verification of draft tokens: how many are accepted, and which token follows them.

The inputs are draft tokens and the logits of draft and target. No models and no KV caches are involved.
"""

from outpace.verification.block import Block as Block
from outpace.verification.block import SampledTokens as SampledTokens
from outpace.verification.block import Verdict as Verdict
from outpace.verification.entry import edit_rows as edit_rows
from outpace.verification.entry import sample as sample
from outpace.verification.entry import sample_rows as sample_rows
from outpace.verification.entry import start_kernels as start_kernels
from outpace.verification.entry import verify as verify
from outpace.verification.entry import verify_block as verify_block
from outpace.verification.entry import verify_rows as verify_rows
from outpace.verification.rules import Rule as Rule
from outpace.verification.rules import sigmoid as sigmoid
