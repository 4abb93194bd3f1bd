"""Generate for several prompts at once, each with its own sampling parameters and seed."""

import outpace

decoder = outpace.load()
prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
params = [
    outpace.SamplingParams(temperature=0),  # greedy
    outpace.SamplingParams(temperature=1.0, top_p=0.9),
    outpace.SamplingParams(temperature=0.3, top_k=20),
]
for prompt, out in zip(
    prompts, decoder.generate(prompts, params, seed=[1, 2, 3], max_new_tokens=32), strict=True
):
    print(f"{prompt!r} -> {out.text!r} ({out.finish_reason})")
