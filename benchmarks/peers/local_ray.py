"""Ray for one script: its ports closed to others, silent, and gone at the end. To be imported before Ray is."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it reports nothing to anyone

import ray


@contextmanager
def started(**options: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            **options,
        )
        try:
            yield
        finally:
            ray.shutdown()
