"""The manifest of a folder: the length and checksum of each file in it, written last.

What lies on a disk is used only if it is what was written: after a power cut, on a disk that was
full, or where something has changed a byte, a file may still be there and be read without an error.
A manifest vouches for itself, too. It is a JSON file that may carry other facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from harness.core.records import plain, read_json, write_json
from harness.core.records.checksums import OWN, is_changed, vouched
from harness.core.records.disk import sync
from harness.core.records.manifests import problem_of

PIECE = 2**20  # bytes that are read at once: as many as stay in the processor's cache


def checksum(file: Path) -> str:
    """XXH3: hashing keeps up with reading."""
    digest = xxhash.xxh3_64()
    piece = memoryview(bytearray(PIECE))
    with file.open("rb", buffering=0) as content:
        while count := content.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def write_manifest(manifest: Path, facts: Mapping[str, object]) -> None:
    """Vouch for a folder: all of it is on disk before the manifest, with these facts, is."""
    folder = manifest.parent
    paths = [path for path in sorted(folder.rglob("*")) if path != manifest]
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(lambda: [*map(sync, paths)])  # meanwhile they are read
        files = {
            str(path.relative_to(folder)): (path.stat().st_size, checksum(path))
            for path in paths
            if path.is_file()
        }
        synced.result()  # raises what the disk refused
    write_json(manifest, vouched(plain({**facts, "files": files})))


def damage(manifest: Path, contents: bool = True) -> str | None:
    """What is wrong with the folder of a manifest; None if it is as it was written.

    contents: False compares lengths only, where another process has just compared the contents.
    """
    content = read_json(manifest)
    if content is None:
        return f"{manifest.name} is missing or cannot be read"
    if OWN not in content:
        return f"{manifest.name} has no checksum"
    if is_changed(content):
        return f"{manifest.name} has changed since it was written"
    if problem := problem_of(manifest.name, content):
        return f"{manifest.name} of another version: {problem}"
    for name, (length, written) in content["files"].items():
        file = manifest.parent / name
        try:
            if file.stat().st_size != length:
                return f"{name} has {file.stat().st_size} bytes instead of {length}"
            if contents and checksum(file) != written:
                return f"{name} has changed since it was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None
