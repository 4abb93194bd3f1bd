"""Sampling parameters, the adjustment of logits to them, and counter-based noise."""

from outpace.sampling.adjustment import Errors as Errors
from outpace.sampling.adjustment import Prefix as Prefix
from outpace.sampling.adjustment import adjust as adjust
from outpace.sampling.adjustment import process as process
from outpace.sampling.adjustment import warp as warp
from outpace.sampling.params import Processor as Processor
from outpace.sampling.params import SamplingParams as SamplingParams
from outpace.sampling.params import from_generation_config as from_generation_config
from outpace.sampling.params import per_row as per_row
