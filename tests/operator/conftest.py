"""Lets the tests here share operator_jobs: pytest imports by path and adds none by itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
