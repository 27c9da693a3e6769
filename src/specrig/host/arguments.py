"""Asks an image's own argument parser about a command line, before anything that runs is stopped for it.

The image is run without a network, without cards and without its server: only Python, which builds the engine's parser and parses;
where the engine is no Python, the engine itself with an option that ends it after parsing.
A first start is its own check; what has been proven, or asked before, is not asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from specrig.host import images, proven, retire, switch, units
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import Progress
from specrig.host.redact import redact

TIMEOUT_S = 600
TAIL = 12
# How the snippets end: 0 accepted, 2 refused (argparse's own), NO_ANSWER the parser could not be built here.
REFUSED, NO_ANSWER = 2, 3

# argv[1] is the entry point as JSON, what follows are the engine's arguments. Homes of `make_arg_parser`, newest first.
VLLM = """
import importlib, json, os, sys, traceback
entry, words = json.loads(sys.argv[1]), sys.argv[2:]
def no_answer():
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(3)
try:
    for name in ("common", "launchers", "openai"):
        try:
            module = importlib.import_module("vllm.entrypoints.%s.cli_args" % name)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not ("vllm.entrypoints.%s.cli_args" % name).startswith(error.name):
                raise
    try:
        # Without a card some versions cannot make the default device; the parser does not need it.
        importlib.import_module("vllm.config").DeviceConfig.__post_init__ = lambda self, *rest: None
    except Exception:
        pass
    flexible = module.FlexibleArgumentParser
    if entry[-1] in ("serve", "run"):
        main = flexible(description="vLLM CLI")
        commands = main.add_subparsers(required=False, dest="subparser")
        module.make_arg_parser(commands.add_parser(entry[-1]))
        words = entry[-1:] + words
    else:
        main = module.make_arg_parser(flexible())
except BaseException:
    no_answer()
sys.argv = ["vllm"] + words
try:
    args = main.parse_args()
    if hasattr(module, "validate_parsed_serve_args"):
        module.validate_parsed_serve_args(args)
except SystemExit as end:
    sys.stderr.flush()
    os._exit(2 if end.code else 0)
except Exception as error:
    print("%s: %s" % (type(error).__name__, error), file=sys.stderr, flush=True)
    os._exit(2)
# Some versions drop a key that they do not know, in silence.
spec = getattr(args, "speculative_config", None)
try:
    spec = json.loads(spec) if isinstance(spec, str) else spec
    known = set(importlib.import_module("vllm.config").SpeculativeConfig.__dataclass_fields__)
except Exception:
    known = set()
unknown = sorted(set(spec) - known) if isinstance(spec, dict) and known else []
if unknown:
    print("--speculative-config: this version does not know " + ", ".join(unknown), file=sys.stderr)
sys.stderr.flush()
os._exit(2 if unknown else 0)
"""
SGLANG = """
import argparse, os, sys, traceback
try:
    from sglang.srt.server_args import ServerArgs
    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
except BaseException:
    traceback.print_exc()
    os._exit(3)
parser.parse_args(sys.argv[2:])
"""
# Parses everything, then shows its help and ends; with 1, and not 2, where it refuses.
HELP = {"llama_cpp": "--help"}
# Aphrodite keeps vLLM's layout under its own name.
SNIPPETS = {"vllm": VLLM, "sglang": SGLANG, "aphrodite": VLLM.replace("vllm.", "aphrodite.")}


def fingerprint(service: Mapping[str, Any], image_id: str) -> str:
    """Names a command line of an image."""
    what = [
        image_id,
        service["engine"],
        service["entrypoint"],
        service["argv"],
        sorted((service.get("env") or {}).items()),
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _asked_before(service: Mapping[str, Any], home: proven.Home, others: bool) -> bool:
    """Whether there is nothing to ask: nothing runs that could be lost, or these very words are known to be right.

    `others`: services that are planned no more run, and are stopped before this one starts.
    """
    known = home.get("proven")
    if known is None and not others:
        return True
    old = (known or {}).get("service") or {}
    if all(old.get(field) == service.get(field) for field in ("image", "entrypoint", "argv", "env")):
        return True
    found = images.found(str(service["image"]))
    try:
        asked = json.loads((home.path / "asked.json").read_text())
        return found is not None and asked["fingerprint"] == fingerprint(service, str(found[1].get("Id")))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def arguments(text: str, progress: Progress, check: bool = False) -> dict[str, Any]:
    """Ask about every service of the job {"services": […entries of the plan], "retry": bool}. Returns {changed, told, warnings}.

    Raises HostError ARGUMENTS_REFUSED, ARGUMENTS_JOB; UPGRADE_HELD for a plan that was taken back, unless it is to be tried again.
    """
    try:
        job = json.loads(text)
        services = [dict(service) for service in job["services"]]
        others = bool(retire.unplanned([str(service["name"]) for service in services]))
        todo = [(s, home) for s in services if not _asked_before(s, home := proven.Home(str(s["name"])), others)]
    except (ValueError, KeyError, TypeError) as error:
        raise HostError("ARGUMENTS_JOB", f"cannot read the job: {error!r}", "./rig up", COULD_NOT_RUN) from error
    undone = [switch.Service(s) for s in services if proven.Home(str(s["name"])).setback()]
    again = [service for service in undone if switch.held(service, bool(job.get("retry")))]
    if check or not (todo or again):
        return {"changed": bool(todo or again), "told": [], "warnings": []}
    told, warnings = [], []
    for service in again:  # forgotten now: if this run is interrupted, the next one goes on
        service.home.remember_setback(None)
        told.append(f"{service.name}: what was taken back is tried again")
    for entry, home in todo:
        name, image = entry["name"], str(entry["image"])
        snippet = SNIPPETS.get(str(entry["engine"]))
        if snippet is None and str(entry["engine"]) not in HELP:
            told.append(f"{name}: not asked, {entry['engine']} has no parser that can be asked without starting it")
        else:
            progress.update("asking the image's own parser", message=str(name))
            trouble = ask(entry, snippet)
            if trouble:
                warnings.append(f"{name}: {image} could not be asked about its arguments: {trouble}")
            else:
                told.append(f"{name}: {image} takes its arguments")
        _, found = images.found(image) or ("", {})
        record = {"fingerprint": fingerprint(entry, str(found.get("Id"))), "at": round(time.time())}
        proven.write(home.path / "asked.json", json.dumps(record).encode())
    return {"changed": True, "told": told, "warnings": warnings}


def ask(service: Mapping[str, Any], snippet: str | None) -> str:
    """ "" when the image takes the arguments, else why it could not be asked. Raises HostError ARGUMENTS_REFUSED."""
    variables = {**(service.get("env") or {}), "HOME": "/tmp"}  # noqa: S108 - in the container
    container = f"specrig-arguments-{service['name']}-{os.getpid()}"
    command = [
        "docker",
        "run",
        "--rm",
        "--name",
        container,
        "--init",
        "--network",
        "none",
        "--pull",
        "never",
        "--log-driver",
        "none",
    ]
    command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "65534:65534"]
    command += ["--read-only", "--tmpfs", "/tmp:exec"]  # noqa: S108
    command += [word for name, value in sorted(variables.items()) for word in ("--env", f"{name}={value}")]
    command += ["--env", "CUDA_VISIBLE_DEVICES="]
    runs, _ = images.found(str(service["image"])) or (str(service["image"]), {})
    refused = REFUSED
    if snippet is None:
        first, *rest = map(str, service["entrypoint"])
        command += ["--entrypoint", first, runs, *rest]
        command += [*map(str, service["argv"]), HELP[str(service["engine"])]]
        refused = 1
    else:
        command += ["--entrypoint", "python3", runs, "-c", snippet, json.dumps(service["entrypoint"])]
        command += map(str, service["argv"])
    try:
        done = units.run(*command, timeout=TIMEOUT_S)
    except HostError:  # no answer in time: what ended is `docker run`, not the container
        units.run("docker", "rm", "--force", container, timeout=60)
        raise
    said = [redact(line) for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
    last = said[-1][:400] if said else "it says nothing"
    if done.returncode == 0:
        return ""
    if done.returncode == refused:
        raise HostError(
            "ARGUMENTS_REFUSED",
            f"{service['name']}: the parser of {service['image']} refuses the command line: {last}",
            "correct version, image or extra_args; nothing was changed, what ran goes on running",
            lines=said[-TAIL:],
        )
    return f"exit status {done.returncode}: {last}"
