"""Command lines of the kernel benchmarks teach, and say what is wrong before anything runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"
SCRIPTS = (
    "fp8_error", "hf_llama", "lists", "measure", "memory_tiled", "report", "sanitize", "tune",
    "turns",
)  # fmt: skip

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:  # fmt: skip
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def call(script: str, *args: str) -> tuple[int, str]:
        """Exit code and what was printed of a command line that ends in its parser."""
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *args])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(script).main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out + captured.err

    yield call
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]  # names such as "cases" belong to whoever runs the script


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_a_script_does_and_what_its_options_are(
    script: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = importlib.import_module("arguments")
    made, make = [], arguments.parser
    monkeypatch.setattr(arguments, "parser", lambda doc: made.append(make(doc)) or made[-1])
    code, said = run(script, "--help")
    assert code == 0 and importlib.import_module(script).__doc__.strip() in said
    assert [action.dest for action in made[0]._actions if not action.help] == []


def test_all_scripts_are_tested() -> None:
    mains = {path.stem for path in FOLDER.glob("*.py") if "\ndef main(" in path.read_text()}
    assert mains == set(SCRIPTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "line", ["measure", "hf_llama", "turns forward triton fa4", "tune measure", "sanitize"]
)
def test_a_gpu_that_is_not_there_is_a_sentence(line: str, run: Run) -> None:
    code, said = run(*line.split())
    assert code == 2 and said.endswith("needs an NVIDIA GPU, and PyTorch sees none here\n")


WRONG = {
    "measure --patterns causal,nope": "no 'nope'; choose from causal, window1k",
    "measure --peers nope": "no 'nope'; choose from auto, triton",
    "measure --sequences abc": "--sequences: found 'abc', must be an integer of at least 1",
    "measure --sequences 512,0": "found '0', must be",
    "measure --dtypes float8": "choose from bfloat16, float16",
    "hf_llama --implementations msa:nope": "no 'msa:nope'; choose from msa:auto",
    "hf_llama --steps 5": "the first 5 are not timed",
    "turns forward sdpa": "invalid choice: 'sdpa'",
    "turns backward triton --patterns nope": "no 'nope'; choose from causal",
    "tune compile x": "found 'x', must be an integer",
    "lists --count 0": "found '0', must be an integer of at least 1",
    "memory_tiled --length -3": "found '-3', must be",
    "report": "the following arguments are required: record",
    "report nothing.json": "nothing.json is not a record: FileNotFoundError",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_named_with_what_is_right(line: str, run: Run) -> None:
    code, said = run(*line.split())
    assert code == 2 and WRONG[line] in said


def test_a_record_of_another_script_is_refused(tmp_path: Path, run: Run) -> None:
    (other := tmp_path / "other.json").write_text(json.dumps({"rows": [{"build_ms": 1.0}]}))
    code, said = run("report", str(other))
    assert code == 2 and "has no row of measure.py" in said
