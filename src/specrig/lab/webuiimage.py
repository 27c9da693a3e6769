"""Open WebUI as an image: the package of the index with its own slim requirements, where the official image has it."""

from __future__ import annotations

from typing import Any

from specrig.lab import enginesimage, images

VERSION = "0.12.4"
REPOSITORY = "webui"
LOCK = images.RECIPES / "webui.lock"
SCRIPT = images.RECIPES / "webui.sh"
_SITE = "/opt/webui/lib/python3.11/site-packages"
# As the official image's Dockerfile has them; the frontend lies in the package.
_CHANGES = [
    "ENV PATH=/opt/webui/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    f"ENV FRONTEND_BUILD_DIR={_SITE}/open_webui/frontend",
    "ENV USE_SLIM_DOCKER=true DOCKER=true ENV=prod PORT=8080",
    "WORKDIR /app/backend",
    'CMD ["bash", "start.sh"]',
    "LABEL specrig.image=1",
]


def ensure(client: Any) -> str:
    """Return the image as lab hosts name it (`specrig-lab-hub:5000/webui:0.12.4`), built and pushed where it lacks."""
    wheels = enginesimage.read_lock(LOCK.read_text())
    parts: list[bytes | str] = [
        images.base_tag("debian-12"),
        *(w.sha256 for w in wheels),
        SCRIPT.read_bytes(),
        *_CHANGES,
    ]
    tag = f"{images.PREFIX}{REPOSITORY}:{VERSION}-{images.digest(parts)}"

    def make() -> None:
        if not images.present(client, tag):
            enginesimage.install(client, tag, wheels, SCRIPT, _CHANGES, "Open WebUI image")

    return enginesimage.offered(client, REPOSITORY, VERSION, tag, make)
