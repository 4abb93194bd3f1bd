"""Drafter that samples from the n-gram counts of a text.

It runs no model. Leviathan section 4.1 measures bigrams as drafts of negligible cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.checks.arguments import integer, kind
from outpace.draft.base import Draft, Drafter, DraftSampler, DraftTensors, GraphDraft, GraphState, State
from outpace.draft.graph_sampler import GraphSampler

Ints = npt.NDArray[np.int64]
Order = tuple[Ints, Ints]
"""Distinct k-grams of a text as sorted numbers, and their counts.

The number of a k-gram is i·V + t. t is its last token. i is the index of its first k-1 tokens among the
sorted (k-1)-grams. So all k-grams with the same context are adjacent.
"""


class NGramDrafter(Drafter):
    """Drafter that samples from the counts after the longest context seen in the fitted text.

    A context has up to n - 1 tokens. If it was never seen, one token fewer is used. The last resort is the
    frequency of single tokens.

    Args:
        orders: The 1- to n-grams of the fitted text.
        vocab_size: Vocabulary size V of the target.
    """

    def __init__(self, orders: Sequence[Order], vocab_size: int) -> None:
        self.orders, self.vocab_size = tuple(orders), vocab_size

    @property
    def n(self) -> int:
        """Length of the longest n-grams."""
        return len(self.orders)

    @classmethod
    def fit(cls, token_ids: Any, n: int = 3, vocab_size: int | None = None) -> NGramDrafter:
        """Count the 1- to n-grams of token ids.

        Args:
            token_ids: Token ids of one text or of several. No n-gram crosses the border of a text.
            n: Length of the longest n-grams.
            vocab_size: Vocabulary size V of the target. By default one more than the largest id.

        Raises:
            TypeError: ``token_ids`` are not token ids.
            ValueError: There are no token ids, or one is outside the vocabulary.
        """
        integer("n", n, "an int >= 1", lambda n: n >= 1)
        texts = _texts(token_ids)
        ids = np.concatenate(texts) if texts else np.zeros(0, dtype=np.int64)
        if not len(ids):
            raise ValueError("token_ids: got none; there is nothing to count")
        V = int(ids.max()) + 1 if vocab_size is None else vocab_size
        integer("vocab_size", V, "an int >= 1", lambda V: V >= 1)
        if ids.min() < 0 or ids.max() >= V:
            raise ValueError(
                f"token_ids: got {ids.min()}..{ids.max()}; with vocab_size {V} they must be in 0..{V - 1}"
            )
        place_in_text = np.concatenate([np.arange(len(text)) for text in texts])
        orders: list[Order] = []
        context = np.zeros(len(ids), dtype=np.int64)  # for each token, the index of the k-1 tokens before it
        for k in range(1, n + 1):
            whole = place_in_text >= k - 1
            keys, inverse, counts = np.unique(
                (context * V + ids)[whole], return_inverse=True, return_counts=True
            )
            orders.append((keys, counts))
            ends = np.flatnonzero(whole)
            followed = ends[:-1] if len(ends) and ends[-1] == len(ids) - 1 else ends
            context = np.zeros(len(ids), dtype=np.int64)
            context[followed + 1] = inverse[: len(followed)]
        return cls(orders, V)

    @classmethod
    def fit_files(
        cls, paths: Iterable[str | Path], tokenizer: Any, n: int = 3, vocab_size: int | None = None
    ) -> NGramDrafter:
        """Count the n-grams of text files, each a text of its own.

        Args:
            paths: The files, in UTF-8.
            tokenizer: Tokenizer of the target.
            n: Length of the longest n-grams.
            vocab_size: Vocabulary size V of the target. By default that of the tokenizer.
        """
        from tqdm.auto import tqdm

        files = tqdm(list(paths), desc="counting n-grams", unit="file", disable=None)
        read = (Path(path).read_text(encoding="utf-8") for path in files)
        texts = [tokenizer(text, add_special_tokens=False).input_ids for text in read]
        return cls.fit(texts, n, len(tokenizer) if vocab_size is None else vocab_size)

    def counts(self, context: Sequence[int]) -> tuple[Ints, Ints]:
        """Return the tokens seen after the longest known ending of the context, and their counts."""
        for k in range(min(self.n - 1, len(context)), -1, -1):
            index = self._index_of(context[len(context) - k :])
            if index is None:
                continue
            keys, counts = self.orders[k]
            first, last = np.searchsorted(keys, (index * self.vocab_size, (index + 1) * self.vocab_size))
            if first < last:
                return keys[first:last] - index * self.vocab_size, counts[first:last]
        raise AssertionError("the empty context was seen")

    def _index_of(self, context: Sequence[int]) -> int | None:
        """Return the index of these tokens among the n-grams of their length, or None if never seen."""
        index = 0
        for (keys, _), token in zip(self.orders, context, strict=False):
            if token >= self.vocab_size:
                return None
            key = index * self.vocab_size + token
            index = int(np.searchsorted(keys, key))
            if index == len(keys) or keys[index] != key:
                return None
        return index

    def propose(self, state: State, g: int) -> Draft:
        sampler = DraftSampler(state, g)
        contexts = [list(text[len(text) - min(len(text), self.n - 1) :]) for text in state.tokens]
        for _ in range(g):
            logits = torch.full((len(contexts), self.vocab_size), -torch.inf)
            for row, context in zip(logits, contexts, strict=True):
                tokens, counts = self.counts(context)
                row[torch.from_numpy(tokens)] = torch.from_numpy(counts).float().log()
            drafted = sampler.sample_next(logits.to(state.device)).tolist()
            for context, token in zip(contexts, drafted, strict=True):
                context.append(token)
                del context[: len(context) - (self.n - 1)]
        return sampler.draft()

    def in_graph(self) -> GraphDraft | None:
        """See ``Drafter.in_graph``; a derived class may draft otherwise, so it runs on the host."""
        return NGramGraphDraft(self) if type(self) is NGramDrafter else None

    def save(self, path: str | Path) -> None:
        """Write the counts to a safetensors file."""
        from safetensors.numpy import save_file

        arrays = {}
        for k, (keys, counts) in enumerate(self.orders, 1):
            arrays[f"keys.{k}"], arrays[f"counts.{k}"] = keys, counts
        header = {"outpace": json.dumps({"kind": "ngram", "n": self.n, "vocab_size": self.vocab_size})}
        save_file(arrays, path, header)

    @classmethod
    def load(cls, path: str | Path) -> NGramDrafter:
        """Read a file that ``save`` wrote.

        Raises:
            ValueError: The file holds no n-gram drafter.
        """
        with _opened(path) as (file, n, vocab_size):
            orders = [(file.get_tensor(f"keys.{k}"), file.get_tensor(f"counts.{k}")) for k in range(1, n + 1)]
        contexts = 1  # of the k-grams: the (k-1)-grams
        for keys, counts in orders:
            if len(keys) and not (
                keys[0] >= 0 and keys[-1] < contexts * vocab_size and (keys[1:] > keys[:-1]).all()
            ):
                raise ValueError(f"path: {path} holds no n-gram drafter (its n-grams are out of order)")
            if (counts < 1).any():
                raise ValueError(f"path: {path} holds no n-gram drafter (it counts less than 1)")
            contexts = len(keys)
        return cls(orders, vocab_size)

    @staticmethod
    def check_file(path: str | Path) -> None:
        """Raise ValueError for a damaged, truncated or foreign file, as ``load`` does.

        The counts are not read.

        Raises:
            ValueError: The file holds no n-gram drafter.
        """
        with _opened(path):
            pass


@dataclass(frozen=True)
class NGrams:
    """All n-grams of a text on a device, the shortest first, with links between contexts.

    The *number* of a k-gram is that of ``Order`` plus ``bases[k - 1]``. So numbers are sorted over all k, and
    the k-grams with the same context are adjacent. A *node* is a context: node 0 is the empty one, and node
    i + 1 is n-gram i.

    Attributes:
        numbers: Number of each n-gram, int64 ``[N]``.
        log_counts: Logarithm of each count, float32 ``[N]``.
        bases: Smallest possible number of the k-grams, for each k, int64 ``[n]``.
        firsts: Index of the first k-gram, for each k, int64 ``[n]``.
        followers: For each node, the first n-gram that continues it, and the end of these, int64 ``[.., 2]``.
            Nodes of n tokens have none, and are left out.
        after: For each n-gram, the node of its longest suffix that has a continuation, int64 ``[N]``.
        offsets: 0, 1, ..., as many as the most continuations of a node.
        vocab_size: Vocabulary size V.
    """

    numbers: Tensor
    log_counts: Tensor
    bases: Tensor
    firsts: Tensor
    followers: Tensor
    after: Tensor
    offsets: Tensor
    vocab_size: int

    @classmethod
    @torch.inference_mode(False)
    def on(cls, device: torch.device, orders: Sequence[Order], vocab_size: int) -> NGrams:
        """Copy counts to a device."""
        V, sizes = vocab_size, [len(keys) for keys, _ in orders]
        contexts = [1, *sizes[:-1]]  # of the k-grams: the (k-1)-grams
        bases = np.cumsum([0, *(V * count for count in contexts[:-1])])
        firsts = np.cumsum([0, *sizes])
        followers, after = [np.array([[0, sizes[0]]])], list[Ints]()
        suffix = np.zeros(1, dtype=np.int64)  # of each (k-1)-gram: the index of its last k-2 tokens
        for k, (keys, _) in enumerate(orders, 1):
            node = np.zeros_like(keys)
            if k > 1:
                found = np.searchsorted(orders[k - 2][0], suffix[keys // V] * V + keys % V)
                suffix = np.minimum(found, sizes[k - 2] - 1)
                node = after[-1][suffix]
            else:
                suffix = node
            if k < len(orders):
                span = firsts[k] + np.searchsorted(orders[k][0], np.arange(sizes[k - 1] + 1) * V)
                followers.append(np.stack((span[:-1], span[1:]), axis=1))
                own = firsts[k - 1] + 1 + np.arange(sizes[k - 1])
                node = np.where(span[:-1] < span[1:], own, node)
            after.append(node)
        spans = np.concatenate(followers)
        numbers = np.concatenate([base + keys for base, (keys, _) in zip(bases, orders, strict=True)])
        counts = np.concatenate([counts for _, counts in orders])
        return cls(
            torch.from_numpy(numbers).to(device),
            torch.from_numpy(counts).to(device).float().log(),
            torch.from_numpy(bases).to(device),
            torch.from_numpy(firsts[:-1]).to(device),
            torch.from_numpy(spans).to(device),
            torch.from_numpy(np.concatenate(after)).to(device),
            torch.arange(int((spans[:, 1] - spans[:, 0]).max()), device=device),
            V,
        )

    def node(self, context: Tensor, lengths: Tensor) -> Tensor:
        """Return the node of the longest suffix of each context that has a continuation, ``[B]``.

        Args:
            context: The last n - 1 tokens of each sequence ``[B, n - 1]``.
            lengths: Number of tokens of each sequence ``[B]``. A context begins with undefined tokens if it
                is longer.
        """
        n, V = len(self.bases), self.vocab_size
        # Suffixes of n - 1, n - 2, ... tokens: their indices among the k-grams after k tokens of each
        seen = lengths[:, None] >= torch.arange(n - 1, 0, -1, device=context.device)
        index, node = torch.zeros_like(context), torch.zeros_like(lengths)
        for k in range(n - 1):
            token = context[:, k:]
            number = self.bases[k] + index * V + token
            at = torch.searchsorted(self.numbers, number).clamp(max=len(self.numbers) - 1)
            seen = seen & (self.numbers[at] == number) & (token < V)
            # The last suffix is complete, and longer than the ones before
            node = torch.where(seen[:, -1], self.after[at[:, -1]], node)
            index, seen = (at - self.firsts[k])[:, :-1], seen[:, :-1]
        return node

    def logits(self, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logarithms of the counts after each node.

        Returns:
            The logarithms ``[B, V]``, the n-grams that continue each node ``[B, most]``, and their last
            tokens. Padding has token V.
        """
        V = self.vocab_size
        first, end = self.followers[node].unsqueeze(-1).unbind(1)
        ngrams = first + self.offsets
        inside, ngrams = ngrams < end, ngrams.clamp(max=len(self.numbers) - 1)
        tokens = (self.numbers[ngrams] % V).where(inside, V)  # column V is for nothing
        logits = torch.full((len(node), V + 1), -torch.inf, device=node.device)
        return logits.scatter_(1, tokens, self.log_counts[ngrams])[:, :V], ngrams, tokens


class NGramGraphDraft(GraphDraft):
    """Drafting from n-gram counts inside a graph.

    Args:
        drafter: The counts, which are copied to the device on first use.
    """

    def __init__(self, drafter: NGramDrafter) -> None:
        self._drafter = drafter
        self._ngrams: NGrams | None = None

    def propose(self, state: GraphState, g: int) -> DraftTensors:
        return self._sampled(state, g).draft()

    def launch_once(self, state: GraphState, g: int) -> DraftTensors | None:
        return None if g == 0 else self._sampled(state, 1).repeated(g)

    def _sampled(self, state: GraphState, g: int) -> GraphSampler:
        """Return a sampler with g tokens."""
        n, device = self._drafter.n, state.lengths.device
        if self._ngrams is None:
            self._ngrams = NGrams.on(device, self._drafter.orders, self._drafter.vocab_size)
        sampler = GraphSampler(state)
        at = state.lengths[:, None] + torch.arange(1 - n, 0, device=device)
        node = self._ngrams.node(state.token_ids.gather(1, at.clamp(min=0)), state.lengths)
        for _ in range(g):
            logits, ngrams, tokens = self._ngrams.logits(node)
            token = sampler.sample_next(logits[:, None])
            # Where no token was sampled, the draft has ended, and any node will do
            node = self._ngrams.after[(ngrams * (tokens == token[:, None])).amax(1)]
        return sampler


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Any, int, int]]:
    """Open a saved n-gram model, and yield the file, n, and the vocabulary size."""
    from safetensors import SafetensorError, safe_open

    def refusal(why: object) -> ValueError:
        return ValueError(f"path: {path} holds no n-gram drafter ({why})")

    try:
        opened = safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise refusal(error) from error
    with opened as file:
        try:
            header = json.loads((file.metadata() or {})["outpace"])
            kind_name, n, vocab_size = header["kind"], header["n"], header["vocab_size"]
        except (KeyError, ValueError, TypeError):
            raise refusal("it has no header of outpace") from None
        if kind_name != "ngram":
            raise refusal(f"it is of kind {kind_name}")
        if not (isinstance(n, int) and isinstance(vocab_size, int) and n >= 1 and vocab_size >= 1):
            raise refusal(f"n {n}, vocab_size {vocab_size}")
        tensors = set(file.keys())
        for k in range(1, n + 1):
            if not {f"keys.{k}", f"counts.{k}"} <= tensors:
                raise refusal(f"it lacks the {k}-grams")
            keys, counts = file.get_slice(f"keys.{k}"), file.get_slice(f"counts.{k}")
            shape = keys.get_shape()
            if (
                {keys.get_dtype(), counts.get_dtype()} != {"I64"}
                or shape != counts.get_shape()
                or len(shape) != 1
            ):
                raise refusal(f"its {k}-grams have shapes {shape} and {counts.get_shape()}")
            if k == 1 and shape == [0]:
                raise refusal("it is empty")
        yield file, n, vocab_size


def _texts(token_ids: Any) -> list[Ints]:
    """Return one text or several as a list of arrays."""
    if isinstance(token_ids, Tensor):
        token_ids = token_ids.cpu().numpy()
    if len(token_ids) and isinstance(token_ids[0], Sequence | np.ndarray | Tensor):
        return [text for part in token_ids for text in _texts(part)]
    array = np.asarray(token_ids)
    if len(array) and (array.ndim != 1 or not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"token_ids: got {kind(token_ids)[:80]}; it must be token ids, or lists of them")
    return [array.astype(np.int64)]
