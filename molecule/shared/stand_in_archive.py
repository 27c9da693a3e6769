#!/usr/bin/env python3
"""Makes a signed apt repository of stand-in packages on this machine: real packages of the real names, with labelled stand-ins inside.

Input, a JSON object on standard input:
{root, packages: [{name, version, depends, conflicts, postinst, postrm, conffiles: [path], files: {path: text}}]};
a package may also be {file: a package that is there already}. Flat, or with `suite` and `component` laid out below dists/. Prints the key's SHA-256.
Needs dpkg-deb and gpg. The key is made once and kept; `rotate` as first argument makes another.
"""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LABEL = "STAND-IN for tests of specrig; not NVIDIA's package"


def deb(root: Path, package: dict[str, Any]) -> dict[str | None, Any]:
    """Build one package, or take the one that is there; its paragraph of the index."""
    if package.get("file"):
        shutil.copy(package["file"], root)
        file = Path(package["file"]).name
        data = (root / file).read_bytes()
        said = subprocess.run(["dpkg-deb", "--field", root / file], check=True, capture_output=True, text=True).stdout
        return {
            None: said.rstrip(),
            "Filename": f"./{file}",
            "Size": len(data),
            "SHA256": hashlib.sha256(data).hexdigest(),
        }
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        control: dict[str | None, Any] = {
            "Package": package["name"],
            "Version": package["version"],
            "Architecture": "amd64",
            "Maintainer": "nobody <nobody@localhost>",
            "Description": LABEL,
        }
        control.update(
            {field: package[field.lower()] for field in ("Depends", "Conflicts") if package.get(field.lower())}
        )
        (tree / "DEBIAN").mkdir()
        text = "".join(f"{key}: {value}\n" for key, value in control.items())
        (tree / "DEBIAN/control").write_text(text)
        for script in ("postinst", "postrm"):
            if package.get(script):
                (tree / "DEBIAN" / script).write_text(package[script])
                (tree / "DEBIAN" / script).chmod(0o755)
        for name, content in package.get("files", {}).items():
            path = tree / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
            path.chmod(0o755 if "/bin/" in name or "/sbin/" in name else 0o644)
        if package.get("conffiles"):
            (tree / "DEBIAN/conffiles").write_text("".join(f"{name}\n" for name in package["conffiles"]))
        file = f"{package['name']}_{package['version']}_amd64.deb"
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "--build", tree, root / file], check=True, stdout=subprocess.DEVNULL
        )
    data = (root / file).read_bytes()
    return {**control, "Filename": f"./{file}", "Size": len(data), "SHA256": hashlib.sha256(data).hexdigest()}


def main() -> None:
    """Packages, index, Release, signature, key."""
    wanted = json.load(sys.stdin)
    root = Path(wanted["root"])
    root.mkdir(parents=True, exist_ok=True)
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # made twice, a package has the same bytes
    os.environ["GNUPGHOME"] = str(root.with_name(f"{root.name}-gnupg"))
    home = Path(os.environ["GNUPGHOME"])
    if "rotate" in sys.argv[1:]:
        subprocess.run(["rm", "-rf", home], check=True)
    if not home.exists():
        home.mkdir(mode=0o700)
        options = ["--batch", "--pinentry-mode", "loopback", "--passphrase", ""]
        subprocess.run(
            ["gpg", *options, "--quick-generate-key", LABEL, "ed25519", "sign", "0"], check=True, capture_output=True
        )
    rows = [deb(root, package) for package in wanted["packages"]]
    index = "\n".join(
        "".join(f"{key}: {value}\n" if key else f"{value}\n" for key, value in row.items()) for row in rows
    ).encode()
    suite, component = wanted.get("suite"), wanted.get("component")
    top = root / "dists" / suite if suite else root
    below = f"{component}/binary-amd64/" if suite else ""
    (top / below).mkdir(parents=True, exist_ok=True)
    sums = []
    for name, data in ((f"{below}Packages", index), (f"{below}Packages.gz", gzip.compress(index))):
        (top / name).write_bytes(data)
        sums.append((hashlib.sha256(data).hexdigest(), len(data), name))
    date = subprocess.run(["date", "--utc", "--rfc-email"], check=True, capture_output=True, text=True).stdout
    more = f"Suite: {suite}\nCodename: {suite}\nComponents: {component}\nArchitectures: amd64\n" if suite else ""
    release = f"Origin: stand-in\n{more}Date: {date}SHA256:\n" + "".join(
        f" {digest} {size} {name}\n" for digest, size, name in sums
    )
    (top / "Release").write_text(release)
    subprocess.run(["gpg", "--batch", "--yes", "--clearsign", "-o", top / "InRelease", top / "Release"], check=True)
    key = subprocess.run(["gpg", "--armor", "--export"], check=True, capture_output=True).stdout
    (root / "key.asc").write_bytes(key)
    print(hashlib.sha256(key).hexdigest())


main()
