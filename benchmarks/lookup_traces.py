"""Texts of real prompts, with what prompt lookup would have proposed at each position and what was correct.

    python benchmarks/lookup_traces.py --model FOLDER --data spec_bench.jsonl \\
        --out benchmarks/results/lookup_traces.json

FOLDER is a causal model with a chat template, and the data are JSON lines with `category` and `prompt`, as
for `real_text.py`. The texts are decoded without speculation, greedily and at temperature 1. A draft token of
prompt lookup is accepted if it is the next token of the text. So `policy.py` can decode the same texts again
with any policy and any cost of a step, without a model. The file has numbers only, no texts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from real_text import LONGEST_PROMPT, TEMPERATURES
from report import arguments, machine, write
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace.draft.lookup import NGramIndex

MAX_DRAFT_TOKENS = 16
MIN_NGRAM, MAX_NGRAM = 1, 3  # the defaults of LookupDrafter


def proposals(prompt: Sequence[int], new: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return how many tokens prompt lookup proposes after each new token, and how many are correct."""
    index, proposed, correct = NGramIndex(MIN_NGRAM, MAX_NGRAM), list[int](), list[int]()
    for t in range(1, len(new)):
        text = [*prompt, *new[:t]]
        index.extend(text)
        draft = index.proposal(text, MAX_DRAFT_TOKENS)
        matches = [token == expected for token, expected in zip(draft, new[t:], strict=False)]
        proposed.append(len(draft))
        correct.append([*matches, False].index(False))
    return proposed, correct


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id of the model")
    parser.add_argument("--data", required=True, help="JSON lines with category and prompt")
    parser.add_argument("--each", type=int, default=10, help="prompts of each category (default 10)")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each text (default 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="texts at a time (default 8)")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model).float().eval()
    decoder = outpace.Decoder(model, None, tokenizer)
    by_category: dict[str, list[list[int]]] = defaultdict(list)
    with open(options.data, encoding="utf-8") as data:
        for row in map(json.loads, data):
            chat = [{"role": "user", "content": row["prompt"]}]
            encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
            if len(by_category[row["category"]]) < options.each:
                by_category[row["category"]].append(list(encoded["input_ids"][-LONGEST_PROMPT:]))
    named = [(name, prompt) for name, prompts in by_category.items() for prompt in prompts]
    named.sort(key=lambda pair: len(pair[1]))  # similar lengths in a batch
    texts: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        outs = decoder.generate(
            [prompt for _, prompt in named],
            temperature=temperature,
            max_new_tokens=options.new,
            ignore_eos=True,
            seed=0,
            batch_size=options.batch_size,
        )
        for (category, prompt), out in zip(named, outs, strict=True):
            proposed, correct = proposals(prompt, out.token_ids)
            texts.append(
                {
                    "category": category,
                    "temperature": temperature,
                    "prompt_tokens": len(prompt),
                    "proposed": " ".join(map(str, proposed)),
                    "correct": " ".join(map(str, correct)),
                }
            )
        print(f"temperature {temperature:g}: {len(outs)} texts", flush=True)
    write({"command": "python " + " ".join(sys.argv), "machine": machine(), "texts": texts}, options.out)


if __name__ == "__main__":
    main()
