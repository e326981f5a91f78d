"""The test cluster by hand."""

from .build import build_all


def main() -> int:
    for name, path in build_all().items():
        print(f"{name:24} {path}")
    return 0
