"""Sources list and read what is there, and say clearly what is not."""

from __future__ import annotations

import glob
import hashlib
import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msa_workloads import sources
from msa_workloads.corpus import build_index
from msa_workloads.sources import DataError, content_hash, key_filter, open_source
from msa_workloads.tokens import ByteTokenizer


def test_the_standard_library_is_there_and_has_a_stable_hash() -> None:
    source = open_source("python-stdlib://")
    entries = source.entries()
    names = [entry.name for entry in entries]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)
    assert b"class JSONDecoder" in b"".join(source.stream(entries[names.index("json/decoder.py")]))
    assert content_hash(source, entries) == content_hash(open_source("python-stdlib://"), entries)


def test_the_content_hash_covers_names_and_bytes(tmp_path: Path) -> None:
    def digest() -> str:
        source = open_source(f"file://{tmp_path}/*.txt")
        return content_hash(source, source.entries())["sha256"]

    (tmp_path / "a.txt").write_text("one")
    first = digest()
    assert first == hashlib.sha256(b"a.txt\x003\x00\x00one").hexdigest()
    (tmp_path / "a.txt").write_text("two")
    second = digest()
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert len({first, second, digest()}) == 3


def test_json_lines_are_documents_of_their_own(tmp_path: Path) -> None:
    lines = [{"text": "alpha"}, {"text": ""}, {"text": "grüße", "other": 1}]
    text = "\n\n".join(json.dumps(line) for line in lines)
    (tmp_path / "x.jsonl").write_text(text)
    source = open_source(f"file://{tmp_path}/*.jsonl")
    index = build_index(source, ByteTokenizer(), "text")
    assert index.text_bytes.tolist() == [5, 7]
    assert index.tokens.tolist() == [7, 9]
    said = r"x.jsonl:1: no field 'body' \(data.textField\); it has text"
    with pytest.raises(DataError, match=said):
        build_index(source, ByteTokenizer(), "body")
    for line, said in (
        ("{not json}", "not JSON"),
        ('["alpha"]', r"a mapping with field 'text' is needed, found \['alpha'\]"),
        ('{"text": 3}', "field 'text' holds no text: 3"),
    ):
        (tmp_path / "x.jsonl").write_text('{"text": "alpha"}\n' + line)
        with pytest.raises(DataError, match=f"x.jsonl:2: {said}"):
            build_index(source, ByteTokenizer(), "text")


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("/data/*.txt", "has no scheme"),
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("file://relative/*.txt", "must be absolute"),
        ("file:///nowhere/at/all/*.txt", "no file matches"),
        ("python-stdlib://3.9", "takes no path"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_bad_address_says_what_would_work(address: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        open_source(address).entries()


def test_other_file_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"only .txt .* and .jsonl"):
        open_source(f"file://{tmp_path}/*")


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    source = open_source(f"file://{tmp_path}/*.txt")
    (entry,) = source.entries()
    (tmp_path / "a.txt").write_text("012")
    with pytest.raises(DataError, match="changed while it was in use"):
        source.read(entry, 0, 10)


def test_s3_lists_globs_and_reads_ranges(s3: Any) -> None:
    for name, body in (
        ("b/1.txt", b"hello"),
        ("b/2.jsonl", b'{"text": "x"}\n'),
        ("c/3.txt", b"n"),
    ):
        s3.put_object(Bucket="corpus", Key=name, Body=body)
    source = open_source("s3://corpus/b/*")
    entries = source.entries()
    assert [entry.name for entry in entries] == ["b/1.txt", "b/2.jsonl"]
    assert source.read(entries[0], 1, 4) == b"ell"
    assert source.read(entries[0], 2, 2) == b""
    assert len(open_source("s3://corpus/").entries()) == 3
    assert [e.name for e in open_source("s3://corpus/**/*.txt").entries()] == [
        "b/1.txt",
        "c/3.txt",
    ]
    assert [e.name for e in open_source("s3://corpus/?/[12].*").entries()] == [
        e.name for e in entries
    ]
    index = build_index(source, ByteTokenizer(), "text")
    assert index.content["method"] == "names, sizes and entity tags"
    assert index.tokens.tolist() == [7, 3]


KEYS = ("a.txt", "b1.txt", "b/1.txt", "b/2.jsonl", "b/c/3.txt", "b/c/d/4.txt", "x[1].txt")


@pytest.mark.parametrize(
    "pattern",
    [
        "*", "*.txt", "b/*", "b/*.txt", "b/**/*.txt", "**/*.txt", "**", "?.txt", "[ab]*.txt",
        "[!ab]*.txt", "b/?/*", "b*1.txt", "b/[!1].*", "*/*/*", "b/**", "x[[]1].txt", "b[/]1.txt",
    ],
)  # fmt: skip
def test_a_glob_over_keys_means_what_it_means_on_disk(tmp_path: Path, pattern: str) -> None:
    for key in KEYS:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text("x")
    prefix, matches = key_filter(pattern)
    on_disk = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    found = {key for key in KEYS if key.startswith(prefix) and matches(key)}
    assert found == {name for name in on_disk if (tmp_path / name).is_file()}


def test_s3_notices_an_object_that_changed(s3: Any) -> None:
    s3.put_object(Bucket="corpus", Key="a.txt", Body=b"hello")
    source = open_source("s3://corpus/*.txt")
    (entry,) = source.entries()
    s3.put_object(Bucket="corpus", Key="a.txt", Body=b"other")
    with pytest.raises(DataError, match="changed while the run was reading it"):
        source.read(entry, 0, 5)


def test_s3_says_what_is_missing(s3: Any) -> None:
    with pytest.raises(DataError, match="no object matches"):
        open_source("s3://corpus/*.txt").entries()
    s3.put_object(Bucket="corpus", Key="deep/a.txt", Body=b"hello")
    with pytest.raises(DataError, match="no object matches"):
        open_source("s3://corpus/*.txt").entries()
    with pytest.raises(DataError, match="cannot be listed"):
        open_source("s3://no-such-bucket/x").entries()


BODY = bytes(range(256)) * 40


class Flaky(http.server.BaseHTTPRequestHandler):
    """Serves one object, and breaks every body after 3000 bytes."""

    protocol_version = "HTTP/1.1"
    requests: list[str]

    def do_GET(self) -> None:
        first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
        type(self).requests.append(self.headers["Range"])
        body = BODY[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"v"')
        self.end_headers()
        self.wfile.write(body[:3000])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_s3_continues_a_broken_body_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    Flaky.requests = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    entry = sources.Entry("a.txt", len(BODY), "v")
    source = open_source("s3://corpus/a.txt")
    assert b"".join(source.stream(entry)) == BODY
    assert Flaky.requests[1] == f"bytes=3000-{len(BODY) - 1}"
    monkeypatch.setattr(sources, "BODY_RETRIES", 2)
    with pytest.raises(DataError, match="gave up at byte 9000"):
        b"".join(source.stream(entry))
    server.shutdown()
    server.server_close()
