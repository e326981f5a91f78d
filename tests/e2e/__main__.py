"""`python tests/e2e COMMAND`: see cli.py."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from e2e.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
