"""The charts with a real helm: lint, render, install; and the manifest for plain kubectl."""

from __future__ import annotations

import os
import re
from pathlib import Path

from msa_operator import chart

from .build import tool
from .paths import REPOSITORY, cache
from .process import run

CRDS = REPOSITORY / "charts" / "flash-msa-crds"
OPERATOR = REPOSITORY / "charts" / "flash-msa-operator"
NAMESPACE = chart.NAMESPACE
INSTALL = REPOSITORY / chart.MANIFEST


def helm(*arguments: str, kubeconfig: Path | None = None, timeout_s: float = 120) -> str:
    """The output of helm; RuntimeError with its words. Nothing of the user's helm is read."""
    home = os.environ | {
        # No cluster but the given one, and no repositories or plugins of whoever runs this.
        "KUBECONFIG": str(kubeconfig or os.devnull),
        **{f"HELM_{kind}_HOME": str(cache() / "helm") for kind in ("CONFIG", "CACHE", "DATA")},
    }
    return run([str(tool("helm")), *arguments], env=home, timeout_s=timeout_s)


def template(folder: Path, *arguments: str, release: str = "", namespace: str = NAMESPACE) -> str:
    """What the chart in that folder renders to."""
    name = release or folder.name
    return helm("template", name, str(folder), f"--namespace={namespace}", *arguments)


def install_manifest() -> str:
    """The file for plain kubectl: the operator's part is rendered, without helm's own marks."""
    text = template(OPERATOR)
    kept = re.sub(r"(?m)^ +(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n", "", text)
    return chart.manifest(re.sub(r"(?m)^# Source: .*\n", "", kept).removeprefix("---\n"))


def write_install_manifest() -> Path:
    INSTALL.write_text(install_manifest())
    return INSTALL
