"""An S3 server on this machine: moto's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def s3_server(*, secret: str) -> Iterator[Any]:
    """Set the variables that lead to a server with an empty bucket "videos", and yield boto's client of it."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("flask")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    import boto3

    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            s3fs.S3FileSystem.clear_instance_cache()  # that of another test module has another address
            client = boto3.client("s3")
            client.create_bucket(Bucket="videos")
            yield client
    finally:
        server.stop()
