"""Starting JAX as every process of ours wants it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def prepare_jax() -> None:
    """Start JAX with one thread, and with compiled programs kept across runs.

    A second thread of XLA's gains little on small networks and takes a core from the workers: measured with two
    workers on two cores, 5 to 20 % of all steps. XLA reads NPROC once, when it starts.
    """
    nproc = os.environ.get("NPROC")
    if "jax" not in sys.modules:
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_cpu_multi_thread_eigen" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its cache loader takes notes at every start
        os.environ.setdefault("NPROC", "1")
    import jax

    jax.devices()
    if nproc is None:
        os.environ.pop("NPROC", None)
    settings: Any = jax.config
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "regatta" / "xla"
    if settings.jax_compilation_cache_dir is None:
        settings.update("jax_compilation_cache_dir", str(cache))
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        settings.update("jax_persistent_cache_min_entry_size_bytes", -1)
