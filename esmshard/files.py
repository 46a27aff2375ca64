"""Files: their sha256, and where esmshard keeps what it can make again. No torch."""

import hashlib
import os
from pathlib import Path


def sha256(path: Path) -> str:
    """Of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """The same, remembered in the user's cache by path, size and time of change.

    A model of 60 GB is then read once, and not by each process that opens it. A file that was changed and given its old
    time again is not noticed; whoever must notice that calls `sha256`.
    """
    stat = path.stat()
    name = f"{path.resolve()}/{stat.st_size}/{stat.st_mtime_ns}"
    known = cache_directory() / "hashes" / hashlib.sha256(name.encode()).hexdigest()[:32]
    try:
        text = known.read_text(encoding="ascii")
        if len(text) == 64:
            return text
    except OSError:
        pass
    digest = sha256(path)
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        scratch = known.with_name(f"{known.name}.{os.getpid()}")
        scratch.write_text(digest, encoding="ascii")
        scratch.replace(known)
    except OSError:  # a cache that cannot be written to costs time only
        pass
    return digest


def cache_directory() -> Path:
    """Where stores, hashes and the like are kept between runs."""
    if "ESMSHARD_CACHE" in os.environ:
        return Path(os.environ["ESMSHARD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "esmshard"
