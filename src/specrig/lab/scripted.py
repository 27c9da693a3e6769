"""A script that runs to its end in a throw-away container, with its progress told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specrig.lab import images
from specrig.lab.errors import LabError
from specrig.lab.hosts import LABEL
from specrig.lab.progress import Progress


@contextlib.contextmanager
def ran(
    client: Any, base: str, script: Path, arguments: Sequence[str], volumes: dict[str, Any], what: str, say: Progress
) -> Iterator[Any]:
    """The container in which `script` has ended well; removed afterwards. Its lines that begin with "== " are phases.

    Raises LabError LAB_ENGINE_IMAGE, with the last lines.
    """
    container = client.containers.create(
        base,
        command=["sh", "/tmp/build.sh", *arguments],  # noqa: S108 - inside the container
        labels={LABEL: "", "specrig.build": "1"},
        volumes=volumes,
    )
    try:
        with images.context({"build.sh": script.read_bytes()}) as packed:
            container.put_archive("/tmp", packed)  # noqa: S108
        container.start()
        tail: list[str] = []
        for raw in container.logs(stream=True, follow=True):
            for line in raw.decode(errors="replace").splitlines():
                tail = [*tail[-14:], line]
                if line.startswith("== "):
                    say.phase(line[3:])
                elif line.strip():
                    say.detail(line.strip()[:110])
        if container.wait()["StatusCode"] != 0:
            raise LabError("LAB_ENGINE_IMAGE", f"{what} did not build:\n    " + "\n    ".join(tail), "see above")
        yield container
    finally:
        container.remove(force=True)
