"""What the tests of the workload share: small specs, real ranks, a real S3 server."""

from __future__ import annotations

import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msa_workloads.runspec import (
    AttentionSpec,
    CheckpointSpec,
    DataSpec,
    MeshSpec,
    ModelSpec,
    RecoverySpec,
    RunSpec,
    SequenceSpec,
    TrainingSpec,
)

# pytest imports test files by path and adds none by itself.
sys.path.insert(0, str(Path(__file__).parent))

from forked_ranks import errors, forked, results
from ray_head import ray_head  # noqa: F401

DEADLINE = 1200.0
"""Seconds after which a polled condition has failed; generous, for a loaded machine."""


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Forty documents of plain text whose next bytes can be learned."""
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(40):
        lines = [f"document {n} line {m}: the quick brown fox\n" for m in range(3 + n % 7)]
        (folder / f"d{n:02}.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def make_spec(tmp_path: Path, text_folder: Path) -> Callable[..., RunSpec]:
    """A tiny run; keywords replace fields of parts, as ``training={"max_steps": 3}``."""

    def make(output: str = "out", **parts: Any) -> RunSpec:
        spec = RunSpec(
            name="tiny",
            model=ModelSpec(
                config={
                    "model_type": "llama",
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 4096,
                }
            ),
            data=DataSpec(source=f"file://{text_folder}/*.txt", holdout_fraction=0.1),
            sequence=SequenceSpec(length=96, micro_batch=2),
            attention=AttentionSpec(pattern={"type": "SinkWindow", "window": 32, "sinks": 4}),
            training=TrainingSpec(
                max_steps=6,
                learning_rate=3e-3,
                warmup_steps=2,
                precision="fp32",
                evaluate_sequences=3,
            ),
            checkpoint=CheckpointSpec(uri=str(tmp_path / output / "ckpt"), every_steps=2, keep=2),
            output=str(tmp_path / output),
            mesh=MeshSpec(),
            recovery=RecoverySpec(),
            threads=1,
        )
        for name, fields in parts.items():
            part = getattr(spec, name)
            value = replace(part, **fields) if is_dataclass(part) else fields
            spec = replace(spec, **{name: value})
        return spec

    return make


@pytest.fixture
def poll() -> Callable[[Callable[[], Any], str], Any]:
    """Wait until ``condition()`` is true and return its value; fail with ``what`` at the end."""

    def wait(condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + DEADLINE
        pause = threading.Event()
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what}"
            pause.wait(0.05)
        return value

    return wait


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Call a function of the test's own module on real ranks, one process each.

    The processes have torchrun's environment. With ``check=False`` the exit codes and stderr are
    returned instead of the results.
    """
    from torch.distributed import TCPStore

    def call(function: Callable[..., Any], ranks: int, *, check: bool = True, **arguments: Any):
        folder = tmp_path / f"ranks-{time.monotonic_ns()}"
        folder.mkdir()
        # Hosted here on a port that the system picks, so that no other process can take it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        codes = forked(
            function, ranks, folder, (), arguments, ends_others=False,
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
        said = errors(folder, ranks)
        if not check:
            return list(zip(codes, said, strict=True))
        assert codes == [0] * ranks, "\n".join(said)
        return results(folder, ranks)

    return call


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a moto server on loopback, which the code under test uses as well."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    # Its state belongs to this process, not to the server object.
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="corpus")
    yield client
    server.stop()
