"""Command lines of the benchmarks beside it: help that says what a script does, lists that are
checked before anything runs, and a GPU that is asked for before it is used."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A docstring as it is written, and the default of every option."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=_Formatter)


def names(allowed: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes some of ``allowed``, with commas between."""
    known = tuple(allowed)

    def read(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; choose from {', '.join(known)}")
        return found

    return read


def number(text: str) -> int:
    """The type of an option that takes an integer above 0."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, must be an integer of at least 1")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """The type of an option that takes such integers, with commas between."""
    return tuple(number(part.strip()) for part in text.split(","))


def needs_gpu(parser: argparse.ArgumentParser) -> None:
    """End with exit code 2 where PyTorch sees no NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, and PyTorch sees none here")
