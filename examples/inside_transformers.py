"""Keep `model.generate`, and let outpace decode: same arguments, same text, fewer passes of the model."""

import outpace

loaded = outpace.load(draft="none")
model, tokenizer = loaded.target, loaded.tokenizer
inputs = tokenizer("one two three one two three one", return_tensors="pt").to(model.device)
stats = outpace.Stats()
ids = model.generate(
    **inputs,
    custom_generate=outpace.generate,
    draft="lookup",
    do_sample=False,
    max_new_tokens=32,
    stats=stats,
)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
print(f"{stats.new_tokens} tokens in {stats.target_passes} passes")
