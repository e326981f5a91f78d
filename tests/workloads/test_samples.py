"""Sample k is a pure function of source, seed and k; every token is read once per epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_workloads.corpus import WHOLE_BYTES, Corpus, Index, build_index, split
from msa_workloads.data import IGNORE, Loader, Prefetcher, Stream
from msa_workloads.permutation import permute, shuffled
from msa_workloads.sources import DataError, Entry, open_source
from msa_workloads.tokens import BOS, EOS, PAD, ByteTokenizer, HubTokenizer


class Memory:
    """A source of texts in memory: hypothesis makes thousands."""

    address = "memory://"

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = {f"{n:04}.txt": text for n, text in enumerate(texts)}

    def entries(self) -> tuple[Entry, ...]:
        return tuple(Entry(name, len(text)) for name, text in self.texts.items())

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        return self.texts[entry.name][start:stop]

    def stream(self, entry: Entry):
        yield self.texts[entry.name]


def corpus_of(texts: list[bytes]) -> Corpus:
    source, tokenizer = Memory(texts), ByteTokenizer()
    return Corpus(source, tokenizer, "text", build_index(source, tokenizer, "text"))


def stream_of(texts: list[bytes], length: int, packing: bool = True, seed: int = 0) -> Stream:
    corpus = corpus_of(texts)
    documents = np.arange(len(corpus.index))
    return Stream(corpus, documents, length=length, packing=packing, seed=seed)


TEXTS = st.lists(st.binary(min_size=1, max_size=70), min_size=1, max_size=12)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=60)
def test_the_permutation_is_a_bijection(n: int, seed: int) -> None:
    assert sorted(permute(k, n, seed) for k in range(n)) == list(range(n))


def test_permutations_of_other_seeds_differ_and_mix() -> None:
    a = [permute(k, 1000, 1) for k in range(1000)]
    b = [permute(k, 1000, 2) for k in range(1000)]
    assert a != b
    # A shuffle leaves about one element in place; neighbours are a third of the range apart.
    assert sum(k == v for k, v in enumerate(a)) < 12
    assert 250 < np.mean(np.abs(np.diff(a))) < 420
    with pytest.raises(IndexError):
        permute(5, 5, 0)


def test_order_of_documents_depends_on_their_keys_only() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 50, dtype=np.uint64)
    order = keys[shuffled(keys, 7)]
    again = np.random.default_rng(1).permutation(keys)
    assert (again[shuffled(again, 7)] == order).all()


@given(TEXTS, st.integers(1, 50), st.integers(0, 5), st.booleans())
@settings(deadline=None, max_examples=150)
def test_an_epoch_reads_every_token_once(
    texts: list[bytes], length: int, seed: int, packing: bool
) -> None:
    stream = stream_of(texts, length, packing, seed)
    seen, predicted, padding = [], [], 0
    for k in range(stream.sequences):
        sample = stream.sample(k)
        real = sample.tokens != PAD
        seen += sample.tokens[real].tolist()
        predicted += sample.labels[sample.labels != IGNORE].tolist()
        padding += int((~real).sum())
        assert (sample.labels[~real] == IGNORE).all()
    expected = [t for text in texts for t in (BOS, *text, EOS)]
    assert sorted(seen) == sorted(expected)
    # Each token of a document but its first is predicted, exactly once.
    assert sorted(predicted) == sorted(t for t in expected if t != BOS)
    if packing:
        assert padding < length


@given(TEXTS, st.integers(2, 50), st.integers(0, 5), st.booleans())
@settings(deadline=None, max_examples=150)
def test_labels_positions_and_documents_agree(
    texts: list[bytes], length: int, seed: int, packing: bool
) -> None:
    stream = stream_of(texts, length, packing, seed)
    for k in range(2 * stream.sequences):
        s = stream.sample(k)
        starts = np.flatnonzero(np.diff(s.documents, prepend=-1))
        assert (s.positions[starts] == 0).all()
        assert (np.diff(s.positions)[np.diff(s.documents) == 0] == 1).all()
        assert set(np.diff(s.documents)) <= {0, 1}
        for t in range(length - 1):
            if s.labels[t] != IGNORE:
                assert s.labels[t] == s.tokens[t + 1]
                assert s.documents[t] == s.documents[t + 1]
        assert (s.labels[s.tokens == EOS] == IGNORE).all()
        # A document begins with its start token, unless it was cut by the sequence before.
        if not packing and len(starts) > 0 and s.tokens[0] == BOS:
            assert s.tokens[starts[1:]].tolist() in ([], [PAD])


def test_a_sample_is_a_pure_function_of_its_number() -> None:
    texts = [bytes([n]) * (10 + n) for n in range(30)]
    first = stream_of(texts, 16, seed=3)
    ahead = [first.sample(k) for k in range(60)]
    behind = [stream_of(texts, 16, seed=3).sample(k) for k in reversed(range(60))][::-1]
    for a, b in zip(ahead, behind, strict=True):
        assert a.digest == b.digest
        for field in ("tokens", "labels", "positions", "documents"):
            assert (getattr(a, field) == getattr(b, field)).all()
    other = [stream_of(texts, 16, seed=4).sample(k).digest for k in range(60)]
    assert other != [sample.digest for sample in ahead]


def test_epochs_are_shuffled_differently() -> None:
    stream = stream_of([bytes([65 + n]) * 40 for n in range(20)], 40)
    epochs = [
        [stream.sample(e * stream.sequences + k).tokens.tobytes() for k in range(stream.sequences)]
        for e in range(2)
    ]
    assert epochs[0] != epochs[1]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(1, 3),
                       st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 4),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_ranks_and_resumes_neither_repeat_nor_skip(
    attempts: list[tuple[int, int, int, int]], width: int
) -> None:
    """Each attempt has its own ranks, micro-batch and accumulation and starts where one ended."""
    stream = stream_of([bytes([n]) * (3 + n) for n in range(9)], width * 4)
    read: list[int] = []
    first = 0
    for ranks, micro, accumulation, steps in attempts:
        for _ in range(steps):
            step = []
            for rank in range(ranks):
                loader = Loader(stream, rank, ranks, micro, accumulation)
                step += loader.step(first).samples
            first += loader.per_step
            read += sorted(step)
    assert read == list(range(first))


def test_the_prefetcher_reads_what_the_loader_would() -> None:
    stream = stream_of([bytes([n]) * 50 for n in range(9)], 16)
    loader = Loader(stream, 1, 2, 1, 2)
    with Prefetcher(loader, 8) as steps:
        ahead = [steps.next() for _ in range(3)]
    plain = [loader.step(8 + n * loader.per_step) for n in range(3)]
    assert [a.samples for a in ahead] == [p.samples for p in plain]
    assert [a.digest for a in ahead] == [p.digest for p in plain]


def test_a_large_document_is_read_by_range() -> None:
    text = np.random.default_rng(0).integers(0, 256, WHOLE_BYTES + 1000, dtype=np.uint8).tobytes()
    corpus = corpus_of([text])
    total = len(text) + 2
    whole = ByteTokenizer().encode(text)
    for start, stop in ((0, 5), (0, 1), (3, 9), (total - 5, total), (total - 1, total),
                        (total - 2, total - 1), (1_000_000, 1_000_100)):  # fmt: skip
        assert (corpus.tokens(0, start, stop) == whole[start:stop]).all()
    assert not corpus._cache


@given(st.integers(2, 200), st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=40)
def test_the_split_is_by_whole_documents_and_leaves_both_sides_some(n: int, f: float) -> None:
    corpus = corpus_of([b"x"] * n)
    train, held = split(corpus.index, f)
    assert sorted([*train, *held]) == list(range(n))
    assert len(train) >= 1
    assert len(held) >= (1 if f > 0 else 0)


def test_the_split_does_not_move_a_document_when_others_come() -> None:
    def names(index: Index, documents: np.ndarray) -> set[str]:
        return {index.entries[index.entry[d]].name for d in documents}

    few, many = corpus_of([b"x"] * 100).index, corpus_of([b"x"] * 150).index
    held_few, held_many = (names(i, split(i, 0.2)[1]) for i in (few, many))
    assert held_few == {n for n in held_many if n < "0100.txt"}


def test_one_document_is_trained_on() -> None:
    train, held = split(corpus_of([b"hello"]).index, 0.5)
    assert train.tolist() == [0]
    assert held.tolist() == []


def test_empty_documents_are_left_out_and_only_empty_ones_refused() -> None:
    assert len(corpus_of([b"", b"a"]).index) == 1
    with pytest.raises(DataError, match="every document is empty"):
        corpus_of([b""])


def test_a_hub_tokenizer_packs_like_bytes_do(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Trained
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Trained(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    corpus = [f"line {n} of the quick brown fox" for n in range(50)]
    trained.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "</s>"])
    )
    saved = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="</s>").save_pretrained(saved)
    folder = tmp_path / "text"
    folder.mkdir()
    for n, line in enumerate(corpus):
        (folder / f"{n}.txt").write_text(line)
    source, tokenizer = open_source(f"file://{folder}/*.txt"), HubTokenizer(str(saved))
    index = build_index(source, tokenizer, "text")
    stream = Stream(
        Corpus(source, tokenizer, "text", index), np.arange(len(index)),
        length=32, packing=True, seed=0,
    )  # fmt: skip
    labels = [int((stream.sample(k).labels != IGNORE).sum()) for k in range(stream.sequences)]
    assert sum(labels) == index.tokens.sum() - len(index)
    with pytest.raises(DataError, match="cannot be loaded"):
        HubTokenizer(str(tmp_path / "none"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_folder_with_a_model_and_no_tokenizer_is_refused(tmp_path: Path, family: str) -> None:
    """transformers makes one that knows no word for some: a run would learn from empty documents,
    at a loss of 0."""
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"makes no tokens of text|cannot be loaded|no end-of-seq"):
        HubTokenizer(str(tmp_path))
