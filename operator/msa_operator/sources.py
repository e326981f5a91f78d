"""Checks, before anything starts, that a run's data can be read and its checkpoints be kept."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msa_workloads.sources import TEXT_SUFFIXES, key_filter

from msa_operator.api.job import LongContextJob
from msa_operator.api.problems import JobError, Problem, closest

S3_SECONDS = 5
"""Connect and read timeout; a wrong endpoint should be a message within seconds."""

S3_PAGES = 10
"""Pages of a listing searched for one matching object, 1,000 keys each."""


def check_sources(job: LongContextJob, *, local: bool) -> None:
    """Raise :class:`JobError` for data that is missing or unreadable, and checkpoint buckets.

    With ``local=False`` files are not looked for: they are the cluster's, not this machine's.
    """
    problems = list(_data(job.spec.data.source, local))
    if job.spec.checkpoint.uri is not None:
        problems += _checkpoint(job.spec.checkpoint.uri, local)
    if problems:
        raise JobError(problems)


def _data(source: str, local: bool) -> Iterator[Problem]:
    if source.startswith("file://") and local:
        yield from _files(source, "spec.data.source")
    elif source.startswith("s3://"):
        yield from _objects(source, "spec.data.source")


def _files(source: str, field: str) -> Iterator[Problem]:
    path = unquote(source.removeprefix("file://"))
    pattern = os.path.join(path, "**") if os.path.isdir(path) else path
    found = [p for p in glob.iglob(pattern, recursive=True) if os.path.isfile(p)]
    usable = [p for p in found if p.endswith(TEXT_SUFFIXES)]
    if not found:
        parent = Path(path.split("*")[0]).parent
        near = ""
        if parent.is_dir() and "*" not in path:
            name = closest(Path(path).name, (p.name for p in parent.iterdir()))
            near = f"file://{parent / name}" if name else ""
        yield Problem(field, f"no file matches {source}", "files that exist", near)
    elif not usable:
        yield Problem(
            field, f"{source} matches {os.path.basename(found[0])} and nothing readable",
            ".txt (one document a file) and .jsonl (one a line)",
        )  # fmt: skip
    else:
        closed = [p for p in usable if not os.access(p, os.R_OK)]
        if closed:
            yield Problem(
                field, f"{closed[0]} cannot be read: permission denied", "readable files"
            )
        elif not any(os.path.getsize(p) for p in usable):
            yield Problem(field, f"{source} matches empty files only", "files that hold text")


def _objects(source: str, field: str) -> Iterator[Problem]:
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, pattern = source.removeprefix("s3://").partition("/")
    prefix, matches = key_filter(pattern)
    try:
        pages = (
            _s3()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=bucket, Prefix=prefix, PaginationConfig={"MaxItems": S3_PAGES * 1000})
        )
        keys = 0
        for page in pages:
            for item in page.get("Contents", ()):
                keys += 1
                key = item["Key"]
                if matches(key) and key.endswith(TEXT_SUFFIXES) and item["Size"]:
                    return
    except (BotoCoreError, ClientError) as error:
        yield Problem(field, f"{source}: {_reason(error, bucket)}", "a bucket that can be listed")
        return
    if keys >= S3_PAGES * 1000:
        return  # a match may lie further on; the run itself lists everything
    yield Problem(
        field, f"{source} matches no .txt or .jsonl object with content ({keys} keys looked at)",
        "objects that exist",
    )  # fmt: skip


def _checkpoint(uri: str, local: bool) -> Iterator[Problem]:
    field = "spec.checkpoint.uri"
    if uri.startswith("s3://"):
        from botocore.exceptions import BotoCoreError, ClientError

        bucket = uri.removeprefix("s3://").partition("/")[0]
        try:
            _s3().head_bucket(Bucket=bucket)
        except (BotoCoreError, ClientError) as error:
            yield Problem(field, f"{uri}: {_reason(error, bucket)}", "a bucket that exists")
    elif local:
        path = Path(unquote(uri.removeprefix("file://")))
        parent = next(p for p in (path, *path.parents) if p.exists())
        if not parent.is_dir():
            yield Problem(field, f"{parent} is a file", "a folder, or one that can be made")
        elif not os.access(parent, os.W_OK):
            yield Problem(field, f"{parent} cannot be written", "a folder that can be written")


def _s3() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.Session().client(
        "s3",
        config=Config(
            connect_timeout=S3_SECONDS, read_timeout=S3_SECONDS,
            retries={"mode": "standard", "total_max_attempts": 2},
        ),
    )  # fmt: skip


def _reason(error: Exception, bucket: str) -> str:
    response = getattr(error, "response", None)
    if response is None:
        text = " ".join(str(error).split())
        if type(error).__name__ == "NoCredentialsError":
            return "no AWS credentials found (environment, profile or instance role)"
        return text
    code = response.get("Error", {}).get("Code", "")
    known = {
        "NoSuchBucket": f"bucket {bucket} does not exist",
        "404": f"bucket {bucket} does not exist",
        "AccessDenied": f"access to bucket {bucket} is denied",
        "403": f"access to bucket {bucket} is denied",
        "InvalidAccessKeyId": "the AWS access key is not valid",
        "SignatureDoesNotMatch": "the AWS secret key is not valid",
        "ExpiredToken": "the AWS session token has expired",
        "PermanentRedirect": f"bucket {bucket} is in another region; set AWS_REGION",
    }
    return known.get(code, " ".join(str(error).split()))
