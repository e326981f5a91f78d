"""What threads of a rank share, and what a run that goes on takes from its checkpoint."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msa_kernels.pattern import Window
from msa_workloads import corpus
from msa_workloads.context import exchange
from msa_workloads.context.attention import ContextPlan, Options, context_attention
from msa_workloads.context.home import Home
from msa_workloads.context.layout import contiguous
from msa_workloads.context.split import Split
from msa_workloads.corpus import Corpus, build_index, differing
from msa_workloads.runspec import RunSpec
from msa_workloads.sources import open_source
from msa_workloads.tokens import ByteTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from forked_ranks import on_forks

THREADS = 4


@pytest.fixture
def at_once() -> Any:
    """Call a function in several threads that start together and change often; its results."""

    def call(function: Callable[[], Any]) -> list[Any]:
        start, found, errors = threading.Barrier(THREADS), [], []

        def run() -> None:
            start.wait()
            try:
                found.append(function())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(THREADS)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        if errors:
            raise errors[0]
        return found

    return call


def test_threads_that_split_batches_share_one_plan_of_equal_documents(at_once: Any):
    home = Home("balanced 4", 256, 2, None, 4, ((Window(5), 1),))
    split = Split(
        home=home, rank=0, heads=1, patterns=(Window(5),), group=None, heads_group=None,
        options=Options(), device=torch.device("cpu"),
    )  # fmt: skip
    for cut in range(1, 10):
        plans = at_once(lambda cut=cut: split.plan((cut, 256 - cut)))
        assert len(set(map(id, plans))) == 1


def test_rows_of_equal_plans_are_one_call_whichever_objects_hold_them():
    """Otherwise a rank that made its plans twice would start more exchanges than its peers."""
    q = k = v = torch.randn(3, 16, 2, 8)
    plans = [ContextPlan(contiguous(16, 1), (9, 7), 0) for _ in range(3)]
    plans[2] = ContextPlan(contiguous(16, 1), (16,), 0)
    exchange.reset()
    out = context_attention(q, k, v, plans, None, pattern=Window(4))
    assert exchange.moved()["needed"].calls == 2
    alone = context_attention(q[1:2], k[1:2], v[1:2], plans[1], None, pattern=Window(4))
    assert isinstance(out, torch.Tensor) and isinstance(alone, torch.Tensor)
    torch.testing.assert_close(out[1:2], alone)


class Borrowed(ByteTokenizer):
    """Refuses a second thread, as tokenizers in Rust do, and counts by encoding only."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def encode(self, text: bytes) -> np.ndarray:
        assert self._busy.acquire(blocking=False), "Already borrowed"
        try:
            return np.array([int(token) for token in super().encode(text)], dtype=np.int32)
        finally:
            self._busy.release()

    def count(self, text_bytes: int) -> int | None:
        del text_bytes
        return None


def test_threads_read_documents_of_one_corpus(
    at_once: Any, text_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus, "CACHE_TOKENS", 500)
    source, tokenizer = open_source(f"file://{text_folder}/*.txt"), Borrowed()
    index = build_index(source, tokenizer, "text")
    read = Corpus(source, tokenizer, "text", index)
    wanted = [ByteTokenizer().encode(read.text(n)).tolist() for n in range(len(index))]

    def all_documents() -> list[list[int]]:
        return [read.tokens(n, 0, int(index.tokens[n])).tolist() for n in range(len(index))]

    for _ in range(5):
        assert at_once(all_documents) == [wanted] * THREADS


def test_machines_that_hold_other_files_are_noticed_before_anything_is_read(
    text_folder: Path, tmp_path: Path
):
    """The index is rank 0's; others would read other text under the same names, or none."""
    other = tmp_path / "other"
    shutil.copytree(text_folder, other)
    index = build_index(open_source(f"file://{text_folder}/*.txt"), ByteTokenizer(), "text")
    there = open_source(f"file://{other}/*.txt")
    assert differing(there, index) is None
    (other / "more.txt").write_text("of no concern")
    assert differing(open_source(f"file://{other}/*.txt"), index) is None
    (other / "d07.txt").write_text("shorter")
    assert differing(there, index) == "d07.txt"
    (other / "d03.txt").unlink()
    assert differing(open_source(f"file://{other}/*.txt"), index) == "d03.txt"


def go_on(specs: list[str]) -> list[list[dict[str, Any]]]:
    """Runs one after the other, and what the optimizer works with at the end of each."""
    from msa_workloads import train
    from msa_workloads.progress import Silent

    built, optimizers = train.build_optimizer, []

    def build(*arguments: Any) -> torch.optim.AdamW:
        made = built(*arguments)
        optimizers.append(made)
        return made

    train.build_optimizer = build
    for spec in specs:
        train.run(RunSpec.from_json(spec), Silent())
    return [
        [{name: group[name] for name in ("weight_decay", "betas")} for group in made.param_groups]
        for made in optimizers
    ]


def test_decay_and_betas_of_a_run_that_goes_on_are_those_it_asks_for(
    make_spec: Callable[..., RunSpec],
):
    first = make_spec(training={"max_steps": 1, "evaluate_sequences": 0})
    changed = replace(first.training, max_steps=2, weight_decay=0.3, beta1=0.8)
    second = replace(first, training=changed)
    before, after = on_forks(go_on, 1, [first.to_json(), second.to_json()])[0]
    assert [group["weight_decay"] for group in before] == [0.1, 0.0]
    assert [group["weight_decay"] for group in after] == [0.3, 0.0]
    assert {group["betas"] for group in after} == {(0.8, 0.95)}
