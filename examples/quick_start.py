"""Generate with the default model and prompt lookup, and print what speculation brought."""

import outpace

decoder = outpace.load()  # SmolLM2-135M-Instruct, fetched once
out = decoder.generate("The lighthouse", max_new_tokens=64, temperature=0.8, seed=7)
print(out.text)
print(f"{out.stats.tokens_per_pass:.2f} tokens per pass, {out.stats.tokens_per_second:.0f} tokens/s")
