"""Command line of the host program.

Every verb prints one JSON object as its last line; exit 0 ok, 1 fell short, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import specrig
from specrig.host import (
    apt_source,
    arguments,
    bundle,
    cache,
    choose,
    cuda,
    diagnosis,
    docker_daemon,
    driver,
    fans,
    firewall,
    gateway,
    images,
    job,
    keep,
    machine,
    manifest,
    pad,
    preflight,
    pull,
    ready,
    retire,
    service,
    share,
    stage,
    start,
    status,
    switch,
    tuning,
    upstreams,
)
from specrig.host.errors import COULD_NOT_RUN, FELL_SHORT, HostError
from specrig.host.progress import Progress


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise HostError("HOST_USAGE", message, f"{self.prog} --help", COULD_NOT_RUN)


def parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    root = _Parser(prog="specrig-host", description=__doc__)
    root.add_argument("--version", action="version", version=specrig.__version__)
    verbs = root.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("stage", help="bring models to this host: fetch, verify, publish")
    one.add_argument("job", help="stage job as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say what is missing")
    one = verbs.add_parser("pad", help="widen a draft model's vocabulary")
    one.add_argument("source", type=Path)
    one.add_argument("dest", type=Path)
    one.add_argument("--vocab-size", type=int, required=True)
    one = verbs.add_parser("ready", help="wait until an engine has completed one token, or a web interface is up")
    one.add_argument("--url", required=True)
    one.add_argument("--model", help="the served name; without it, wait for /health only")
    one.add_argument("--key-file", type=Path)
    one.add_argument("--timeout", type=float, default=1800)
    one.add_argument("--container", help="give up when this container has ended")
    one.add_argument("--main-pid", type=int, help="give up when this process has ended ($MAINPID)")
    one = verbs.add_parser("pull", help="bring an image to this host")
    one.add_argument("image")
    one.add_argument("--job", help="what is known of it, {layers, archive}, as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say whether it is missing")
    one = verbs.add_parser("images", help="our images and their archives, and who uses them")
    one.add_argument("--prune", action="store_true", help="those that nothing uses")
    one.add_argument("--archives", action="store_true", help="with --prune: their files too")
    one.add_argument("--apply", action="store_true", help="with --prune: remove them")
    one = verbs.add_parser("start", help="start a unit and follow it")
    one.add_argument("unit")
    one.add_argument("--restart", action="store_true")
    one.add_argument(
        "--after", action="append", default=[], metavar="FILE", help="restart if it runs since before FILE"
    )
    one.add_argument("--enable", action="store_true", help="also at boot")
    one.add_argument("--timeout", type=float, default=1800)
    one.add_argument("--check", action="store_true", help="only say whether it would start")
    one = verbs.add_parser("arguments", help="ask the images' own parsers about the services' command lines")
    one.add_argument("job", help="{services: entries of the plan} as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say whether something is to be asked")
    one = verbs.add_parser("switch", help="let a service run with the files that are there, prove it, or go back")
    one.add_argument("job", help="{service: its entry in the plan} as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say whether something would be done")
    one = verbs.add_parser("retire", help="stop and remove services that are planned no more")
    one.add_argument("job", help="{services: names of those that stay} as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say which")
    one = verbs.add_parser("rollback", help="go back to what was proven before")
    one.add_argument("service", nargs="?", help="default: the only one")
    one.add_argument("--check", action="store_true", help="only say what it would go back to")
    _service(verbs)
    _store(verbs)
    one = verbs.add_parser("status", help="units, containers, health, models, applied plan")
    one.add_argument("--root", type=Path, help="the models' directory (default: the applied plan's)")
    one = verbs.add_parser("preflight", help="look at this machine; changes nothing", description=preflight.__doc__)
    one.add_argument("wanted", nargs="?", help="what is wanted of it, as a JSON file, or - for standard input")
    one = verbs.add_parser("driver", help="install or remove the distribution's NVIDIA driver")
    one.add_argument("job", help="the job as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say what would be done")
    one = verbs.add_parser("gpu-tuning", help="power limits and sleep, as planned", description=tuning.__doc__)
    one.add_argument("job", help="the job as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say what would be done")
    one.add_argument("--again", action="store_true", help="set also what cannot be read back (clocks)")
    one.add_argument("--wait", type=float, default=0.0, help="seconds for the driver to come up")
    one.add_argument(
        "--measure", type=float, metavar="S", help="instead: watts saved under the load of now, S seconds each way"
    )
    one = verbs.add_parser(
        "fan-curve", help="keep fans at their curve: a unit's main process", description=fans.__doc__
    )
    one.add_argument("job", nargs="?", help="the job of gpu-tuning as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only look: which fans, and may they be set")
    one.add_argument("--automatic", action="store_true", help="give back what such a process took")
    verbs.add_parser("cdi-check", help="is the list of cards for containers that of the running driver")
    one = verbs.add_parser("cuda-check", help="does CUDA work, here or in a container", description=cuda.__doc__)
    cuda.add_arguments(one)
    one.add_argument("--container", help="check within this running container; its image needs python3")
    verbs.add_parser("relay", help="what stands between Caddy and the rigs; systemd hands it its socket")
    verbs.add_parser("gateway", help="the rigs behind this gateway, as its relay sees them")
    for name, text in (("drain", "send a rig no new requests"), ("undrain", "send it requests again")):
        one = verbs.add_parser(name, help=f"{text} through this gateway")
        one.add_argument("rig")
        one.add_argument("--wait", type=float, default=0.0, help="seconds to wait until no request runs there")
        one.add_argument("--check", action="store_true", help="only say whether it would change anything")
    one = verbs.add_parser("docker-restart", help="restart Docker with our services drained before and ready after")
    one.add_argument("--written", action="store_true", help="daemon.json was replaced just now: go back if need be")
    one.add_argument("--backup", type=Path, help="the daemon.json of before")
    one.add_argument("--leave-stopped", action="store_true", help="do not start the services again")
    one = verbs.add_parser("docker-root", help="whether Docker's data may be looked for in DIRECTORY; changes nothing")
    one.add_argument("directory")
    one.add_argument("--leave", action="store_true", help="what is in the present place stays behind")
    one.add_argument("--check", action="store_true", help="the same")
    one = verbs.add_parser("apt-source", help="one package source with its key, and no older one of the same address")
    one.add_argument("job", help="the job as a JSON file, or - for standard input")
    one.add_argument("--check", action="store_true", help="only say what would be done")
    jobs = verbs.add_parser("job", help="run a verb detached").add_subparsers(dest="action", required=True)
    one = jobs.add_parser("run", help="quick check, then start or attach")
    one.add_argument("--id", required=True)
    one.add_argument("--check", action="store_true", help="the quick check only")
    one.add_argument("argv", nargs=argparse.REMAINDER, help="-- VERB ARGS…")
    one = jobs.add_parser("poll", help="progress, or the result")
    one.add_argument("--id", required=True)
    one.add_argument("--wait", type=float, default=0.0, help="seconds to wait for the result")
    one = jobs.add_parser("exec", help=argparse.SUPPRESS)
    one.add_argument("--id", required=True)
    return root


def _document(name: str | None, stdin: str | None) -> str:
    """Text of a file, of standard input for -, empty for none."""
    if name == "-":
        return sys.stdin.read() if stdin is None else stdin
    try:
        return Path(name).read_text() if name else ""
    except OSError as error:
        raise HostError("HOST_USAGE", str(error), "name a JSON file, or -", COULD_NOT_RUN) from error


def _store(verbs: Any) -> None:
    """The verbs that keep and share what is published."""

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = verbs.add_parser(name, help=text)
        one.add_argument("--root", type=Path, default=Path("/srv/models"), help="the models' directory")
        return one

    verb("models", "what is published, what is used, what is free")
    verb("verify", "read every published file again and compare checksums")
    one = verb("scrub", "the same, slowly; leaves its report in /var/lib/specrig/scrub.json")
    one.add_argument("--limit", type=int, default=50_000_000, help="bytes per second")
    one = verb("gc", "what no applied plan and no unit uses; --apply removes it")
    one.add_argument("--apply", action="store_true")
    one.add_argument("--keep", type=int, default=0, help="unused revisions to keep, the newest of each repository")
    one = verb("bundle", "write published models to one file, for hosts without a network")
    one.add_argument("dest", type=Path)
    one.add_argument("models", nargs="*", metavar="ORG/NAME[@REVISION]")
    one = verb("import", "stage all models of a bundle, by its own manifests")
    one.add_argument("bundle", type=Path)
    one.add_argument("--check", action="store_true")
    one = verb("serve", "share published models with other rigs, read only")
    one.add_argument("--listen", required=True, help="address:port")
    one.add_argument("--allow", action="append", default=[], help="network that may ask (default: private networks)")


def _pair(text: str) -> tuple[str, int]:
    """`0=21000`: a card and MiB."""
    name, _, mib = text.rpartition("=")
    return name, int(mib)


def _service(verbs: Any) -> None:
    """What units call: the service itself, what it leaves behind, and what is chosen among alternates."""
    one = verbs.add_parser("run-service", help="be a service's main process")
    one.add_argument("--name", required=True)
    one.add_argument("--url", required=True)
    one.add_argument("--model", required=True, help="the served name")
    one.add_argument("--key-file", type=Path)
    one.add_argument("--health-path", default="/health")
    one.add_argument("--completion-path", default="/v1/completions")
    one.add_argument("--metrics-path", default="")
    one.add_argument("--progress", action="append", default=[], metavar="SAMPLE", help="moves while the engine works")
    one.add_argument("--plan-key", default="", help="what times of earlier starts are comparable by")
    one.add_argument("--start-timeout", type=float, default=900)
    one.add_argument("--stop-timeout", type=int, default=60)
    one.add_argument(
        "--vram", type=_pair, action="append", default=[], metavar="CARD=MIB", help="free before the start"
    )
    one.add_argument("--probe", type=float, nargs=3, default=(60, 60, 3), metavar=("INTERVAL", "TIMEOUT", "FAILURES"))
    one.add_argument(
        "--patience", type=float, default=0, help="of a probe, for an engine that shows no progress; seconds"
    )
    one.add_argument("--restarts", type=int, default=5, help="in a row, before it gives up")
    one.add_argument(
        "--refused",
        action="append",
        default=[],
        metavar="WORDS",
        help="a line of the engine that begins so is its last",
    )
    one.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARGS…")
    one = verbs.add_parser("diagnose", help="leave a file that says why a service failed")
    one.add_argument("name")
    one = verbs.add_parser("prune-cache", help="remove compile caches that neither the service nor a way back uses")
    one.add_argument("directory", type=Path, help="the cache in use")
    one = verbs.add_parser("choose", help="start a service instead of those that share its cards")
    one.add_argument("name")
    one.add_argument("--timeout", type=float, default=1800)
    one.add_argument("--check", action="store_true", help="only say whether something would change")


def _settings(args: argparse.Namespace) -> service.Settings:
    interval, timeout, failures = args.probe
    return service.Settings(
        name=args.name,
        container=f"specrig-{args.name}",
        url=args.url,
        model=args.model,
        command=args.command[1:] if args.command[:1] == ["--"] else args.command,
        key_file=args.key_file,
        health_path=args.health_path,
        completion_path=args.completion_path,
        metrics_path=args.metrics_path,
        progress=tuple(args.progress),
        plan_key=args.plan_key,
        start_timeout=args.start_timeout,
        stop_timeout=args.stop_timeout,
        vram=dict(args.vram),
        probe_interval=interval,
        probe_timeout=timeout,
        probe_failures=int(failures),
        patience=args.patience,
        restarts=args.restarts,
        refused_words=tuple(args.refused),
    )


def _keep(args: argparse.Namespace, progress: Progress) -> dict[str, Any] | None:
    """Carry out a verb of `_store`; None when it is another one."""
    root = args.root
    if args.verb == "models":
        return keep.listing(root)
    if args.verb == "verify":
        return keep.verify(root, progress)
    if args.verb == "scrub":
        return keep.verify(root, progress, max(args.limit, 1), keep.REPORT)
    if args.verb == "gc":
        return keep.gc(root, progress, args.apply, max(args.keep, 0))
    if args.verb == "bundle":
        return bundle.write(root, args.dest.resolve(), args.models, progress)
    if args.verb == "import":
        return stage.stage(bundle.job_of(args.bundle.resolve(), root), progress, args.check)
    if args.verb == "serve":
        share.serve(root, args.listen, args.allow)
    return None


def _load(name: str, stdin: str | None) -> manifest.Job:
    try:
        if name == "-" and stdin is None:
            stdin = sys.stdin.read()
        text = stdin if name == "-" else Path(name).read_text()
        return manifest.parse_job(json.loads(text or ""))
    except (OSError, ValueError) as error:
        raise HostError(
            "STAGE_MANIFEST",
            f"cannot read the job: {error}",
            "pass a JSON file, or - and standard input",
            COULD_NOT_RUN,
        ) from error


def _change_units(args: argparse.Namespace, progress: Progress, stdin: str | None) -> dict[str, Any]:
    """The verbs after which other units may be there than before."""
    if args.verb == "switch":
        one, planned = switch.job(_document(args.job, stdin))
        return switch.switch(one, progress, args.check, planned)
    if args.verb == "rollback":
        return switch.rollback(args.service, progress, args.check)
    return retire.retire(_document(args.job, stdin), progress, args.check)


def run_verb(args: argparse.Namespace, progress: Progress, stdin: str | None = None) -> dict[str, Any]:
    """Carry one verb out (all but `job`); `stdin` stands in for standard input."""
    if args.verb == "stage":
        return stage.stage(_load(args.job, stdin), progress, args.check)
    if args.verb == "pad":
        return pad.pad_vocab(args.source, args.dest, args.vocab_size, progress)
    if args.verb == "ready":
        return ready.ready(args.url, args.model, args.timeout, args.key_file, args.container, args.main_pid, progress)
    if args.verb == "pull":
        return pull.pull(args.image, progress, args.check, *pull.job(_document(args.job, stdin)))
    if args.verb == "images":
        return images.images(args.prune, args.apply, args.archives)
    if args.verb == "start":
        return start.start(args.unit, progress, args.restart, args.timeout, args.check, args.enable, args.after)
    if args.verb == "arguments":
        return arguments.arguments(_document(args.job, stdin), progress, args.check)
    if args.verb in ("switch", "rollback", "retire"):
        try:
            return _change_units(args, progress, stdin)
        finally:
            if not args.check:
                firewall.follow()
    if args.verb == "choose":
        return choose.choose(args.name, progress, args.timeout, args.check)
    if args.verb == "diagnose":
        return diagnosis.diagnose(args.name)
    if args.verb == "prune-cache":
        return cache.prune(args.directory)
    if args.verb == "driver":
        return driver.driver(_document(args.job, stdin), progress, args.check)
    if args.verb == "docker-restart":
        return docker_daemon.restart(progress, args.written, args.backup, args.leave_stopped)
    if args.verb == "docker-root":
        return docker_daemon.data_root(args.directory, args.leave)
    if args.verb == "apt-source":
        return apt_source.apply(_document(args.job, stdin), progress, args.check)
    if args.verb == "preflight":
        return preflight.preflight(_document(args.wanted, stdin))
    if args.verb == "gpu-tuning":
        text = _document(args.job, stdin)
        if args.measure:
            return tuning.measure(text, args.measure)
        return tuning.tuning(text, args.check, args.again, args.wait)
    if args.verb == "fan-curve" and args.automatic:
        given = fans.give_back(machine.Machine(), args.check)
        return {"changed": bool(given), "given_back": given}
    if args.verb == "fan-curve":
        text = _document(args.job, stdin)
        return fans.check(text) if args.check else fans.follow(text)
    if args.verb == "cdi-check":
        return preflight.cdi_check()
    if args.verb == "cuda-check":
        try:
            return cuda.in_container(args) if args.container else cuda.cuda_check(args)
        except cuda.CudaError as error:
            raise HostError(status=error.status, **error.error) from None
    if args.verb == "status":
        return status.status(args.root)
    if args.verb == "relay":
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        gateway.serve(gateway.inherited(), upstreams.Fleet(), gateway.Keys(), stop)
        return {"changed": False}
    if args.verb == "gateway":
        return gateway.status()
    if args.verb in ("drain", "undrain"):
        return gateway.drain(args.rig, args.verb == "drain", args.wait, args.check)
    return _keep(args, progress) or {"changed": False}


def _job(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    if args.action == "poll":
        answer = job.poll(args.id, args.wait)
        return int(answer.get("rc", 0)), answer
    if args.action == "exec":
        files, argv, stdin = job.take(args.id)
        with job.locked(files.path("lock")):
            code, document = guarded(parser().parse_args(argv), files.path("json"), stdin)
            job.finish(files, code, document)
        return code, document
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    wanted = parser().parse_args(argv)
    if wanted.verb == "job":
        raise HostError("HOST_USAGE", "a job cannot run a job", "job run --id ID -- VERB ARGS…", COULD_NOT_RUN)
    stdin = sys.stdin.read() if getattr(wanted, "job", "") == "-" else ""
    if wanted.verb in (
        "status",
        "models",
        "images",
        "gateway",
    ):  # quick, and changes nothing: there is nothing to detach
        code, document = guarded(wanted)
        return code, {"job": args.id, "state": "done", "rc": code, "changed": False, "result": document}
    checkable = hasattr(wanted, "check")
    if checkable:
        quick = argparse.Namespace(**{**vars(wanted), "check": True})
        found = run_verb(quick, Progress(quiet=True), stdin)
        if args.check or wanted.check or not found["changed"]:
            return 0, {
                "job": args.id,
                "state": "done",
                "rc": 0,
                "changed": found["changed"],
                "result": {"ok": True, **found},
            }
    elif args.check:
        document = {"ok": True, "changed": False, "checked": False}
        return 0, {"job": args.id, "state": "done", "rc": 0, "changed": False, "result": document}
    answer = job.run(args.id, argv, stdin)
    return int(answer.get("rc", 0)), answer


def failure(error: HostError) -> dict[str, Any]:
    """The document of a verb that did not succeed."""
    return {"ok": False, "changed": False, "error": error.as_json()}


def guarded(
    args: argparse.Namespace, progress_file: Path | None = None, stdin: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Run the verb and turn every end into (exit status, document)."""
    try:
        if args.verb == "job":
            code, document = _job(args)
            return code, {"ok": code == 0, **document}
        with Progress(
            progress_file,
            quiet=args.verb
            in ("ready", "status", "preflight", "models", "serve", "cuda-check", "cdi-check", "fan-curve"),
        ) as progress:
            document = {"ok": True, **run_verb(args, progress, stdin)}
            return 0 if document["ok"] else FELL_SHORT, document
    except HostError as error:
        return error.status, failure(error)
    except Exception as error:
        traceback.print_exc()
        cause = f"{type(error).__name__}: {error}"
        return COULD_NOT_RUN, failure(
            HostError("HOST_INTERNAL", cause, "report it with the trace above", COULD_NOT_RUN)
        )


def main(argv: list[str] | None = None) -> int:
    """Entry point of the zipapp."""
    os.umask(0o022)  # a person's or sudo's may be narrower, and what we publish is read by others
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # A stopped job unwinds like ctrl-C: partial files stay where they are resumed from, children end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(COULD_NOT_RUN))
    try:
        args = parser().parse_args(argv)
    except HostError as error:
        code, document = error.status, failure(error)
    else:
        if args.verb == "run-service":
            return service.run(_settings(args))
        code, document = guarded(args)
    print(json.dumps(document, sort_keys=True), flush=True)
    return code
