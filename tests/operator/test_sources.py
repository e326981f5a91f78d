"""Data and checkpoint places are checked before anything starts; buckets on a real S3 server."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from msa_operator.api import JobError, parse_job
from msa_operator.sources import check_sources
from operator_jobs import job


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    running.start()
    yield f"http://127.0.0.1:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client: Any = boto3.client("s3")
    client.create_bucket(Bucket="corpus")
    yield client
    for item in client.list_objects_v2(Bucket="corpus").get("Contents", ()):
        client.delete_object(Bucket="corpus", Key=item["Key"])
    client.delete_bucket(Bucket="corpus")


def found(changes: dict[str, Any], *, local: bool = True) -> list[tuple[str, str, str]]:
    try:
        check_sources(parse_job(job(changes)), local=local)
    except JobError as error:
        return [(p.path, p.found, p.nearest) for p in error.problems]
    return []


def data(source: str, *, local: bool = True) -> list[tuple[str, str, str]]:
    return found({"spec.data.source": source}, local=local)


def test_the_standard_library_needs_no_check():
    assert data("python-stdlib://") == []


def test_files(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b c.jsonl").write_text("{}")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "x.bin").write_text("x")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.txt").write_text("text")
    for name in ("a.txt", "*.txt", "b%20c.jsonl", "**/*.txt", "deep"):
        assert data(f"file://{tmp_path}/{name}") == [], name
    ((path, what, nearest),) = data(f"file://{tmp_path}/aa.txt")
    assert path == "spec.data.source" and "no file matches" in what
    assert nearest == f"file://{tmp_path}/a.txt"
    assert "no file matches" in data(f"file://{tmp_path}/nothing/*.txt")[0][1]
    assert "nothing readable" in data(f"file://{tmp_path}/x.bin")[0][1]
    assert "empty files" in data(f"file://{tmp_path}/empty.txt")[0][1]
    assert data(f"file://{tmp_path}/none.txt", local=False) == [], "a cluster's files are its own"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission(tmp_path: Path):
    closed = tmp_path / "a.txt"
    closed.write_text("text")
    closed.chmod(0)
    assert "permission denied" in data(f"file://{closed}")[0][1]


def test_checkpoint_folders(tmp_path: Path):
    assert found({"spec.checkpoint.uri": f"file://{tmp_path}/new/deep"}) == []
    (tmp_path / "file").write_text("")
    ((path, what, _),) = found({"spec.checkpoint.uri": f"file://{tmp_path}/file/x"})
    assert path == "spec.checkpoint.uri" and "is a file" in what


def test_buckets(bucket: Any):
    bucket.put_object(Bucket="corpus", Key="books/a.jsonl", Body=b"{}")
    bucket.put_object(Bucket="corpus", Key="books/empty.txt", Body=b"")
    bucket.put_object(Bucket="corpus", Key="books/a.bin", Body=b"x")
    for good in ("books/*.jsonl", "books/", "books/a.jsonl", "b*/*"):
        assert data(f"s3://corpus/{good}") == [], good
    # As for the run's reader, one star does not cross a slash.
    bucket.put_object(Bucket="corpus", Key="shelf/row/a.txt", Body=b"text")
    assert "matches no .txt" in data("s3://corpus/shelf/*.txt")[0][1]
    assert data("s3://corpus/shelf/**/*.txt") == []
    ((path, what, _),) = data("s3://corpus/books/*.txt")
    assert path == "spec.data.source" and "no .txt or .jsonl object with content" in what
    assert "does not exist" in data("s3://other-bucket/x/*.txt")[0][1]
    assert found({"spec.checkpoint.uri": "s3://corpus/run"}) == []
    ((path, what, _),) = found({"spec.checkpoint.uri": "s3://other-bucket/run"})
    assert path == "spec.checkpoint.uri" and "does not exist" in what


def test_data_and_checkpoints_are_reported_together(bucket: Any):
    both = found(
        {"spec.data.source": "s3://no-bucket/x", "spec.checkpoint.uri": "s3://none-too/y"}
    )
    assert [path for path, _, _ in both] == ["spec.data.source", "spec.checkpoint.uri"]


def test_no_credentials_and_no_server(
    bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "Could not connect" in data("s3://corpus/books/*.txt")[0][1]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert "no AWS credentials" in data("s3://corpus/books/*.txt")[0][1]
