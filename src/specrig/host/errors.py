"""The one way a verb fails: a stable code, the cause with its figures, and the next thing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FELL_SHORT = 1
COULD_NOT_RUN = 2

# Every code a verb can end with, and what it means. A code is never renamed or given another meaning.
CODES = {
    "APT_SOURCE": "apt cannot work with the package source; all sources are as they were before",
    "APT_SOURCE_JOB": "the job cannot be read",
    "APT_SOURCE_KEY": "the signing key cannot be fetched, or is another one; nothing was changed",
    "ARCHIVE_DAMAGED": "an image's file is not what was written",
    "ARCHIVE_DISK": "no space for an image's file",
    "ARCHIVE_FAILED": "an image could not be written to a file, or loaded from it",
    "ARGUMENTS_JOB": "the job names no services of a plan",
    "ARGUMENTS_REFUSED": "the image's own parser refuses the command line; nothing was changed",
    "BUNDLE_BROKEN": "the bundle cannot be read, or holds no model",
    "BUNDLE_DEST": "the bundle cannot be written there",
    "BUNDLE_DISK": "no space for the bundle",
    "BUNDLE_NOTHING": "none of the models asked for is published on this host",
    "CHOOSE_BACK": "the service that was switched to did not come up, and the one before did not come back",
    "CHOOSE_UNKNOWN": "no service of this name is on the host",
    "CUDA_BYTES": "bytes that went to a card came back different",
    "CUDA_CALL": "the driver refused a call",
    "CUDA_CARDS": "CUDA sees other cards than expected",
    "CUDA_CONTAINER": "the check could not be made within the container",
    "CUDA_HANG": "the driver does not come back from a call",
    "CUDA_LIBRARY": "libcuda.so.1 is not here",
    "DIAGNOSIS_FILE": "the file about a failed service cannot be written",
    "DOCKER_DATA_ROOT": "Docker's data would no longer be found; nothing was changed",
    "DOCKER_RESTART": "Docker does not start with its daemon.json",
    "DOCKER_SERVICE": "a service did not stop before, or did not come back after, a restart of Docker",
    "DOCKER_UNREACHABLE": "Docker's API socket does not answer",
    "DRIVER_APT": "apt could not install the driver; what it had done was undone",
    "DRIVER_BUILD": "the driver's module does not build for a kernel; what was installed for it was taken out again",
    "DRIVER_DOWNLOAD": "a package that the archive lists cannot be fetched; nothing was changed",
    "DRIVER_FOREIGN": "a driver that apt does not know is on the machine; nothing was changed",
    "DRIVER_HELD": "a package that is not the driver's is on hold and would change; nothing was changed",
    "DRIVER_HOLD": "a package of the driver could not be put on hold",
    "DRIVER_JOB": "the job cannot be read",
    "DRIVER_LISTS": "apt cannot read one of its sources, or does not believe its signature; nothing was changed",
    "DRIVER_LOCKED": "another program holds apt's or dpkg's lock; nothing was changed",
    "DRIVER_NOT_LOADED": "the machine was rebooted and does not run the installed driver",
    "DRIVER_NOT_READY": "a reboot would not come up with the driver",
    "DRIVER_NO_CANDIDATE": "the archive has no such driver; nothing was changed",
    "FANS_CURVE": "a fan curve that does not cool, or a job without one; the fans are on automatic",
    "FANS_DRIVER": "the driver's management library does not answer, or is too old",
    "FANS_LOST": "a card with a fan curve no longer answers; its fans are on automatic",
    "FANS_NONE": "a card that is to have a fan curve has no fan that software may set; nothing was changed",
    "FANS_REFUSED": "a card does not let its fans be set, or does not keep what was set; they are on automatic",
    "FANS_STUCK": "a card's fans could not be given back to its own control",
    "GATEWAY_DOWN": "the gateway's relay does not answer",
    "GATEWAY_NO_RIG": "no such rig behind this gateway",
    "GATEWAY_SOCKET": "the relay was not started by its systemd socket",
    "DRIVER_REMOVES": "apt would remove packages that are not the driver's; nothing was changed",
    "DRIVER_SECURE_BOOT": "Secure Boot would refuse the module, and nobody has agreed to enrol its key; nothing was changed",
    "GC_NO_PLAN": "no applied plan on this host, so nobody knows what is used",
    "HOST_INTERNAL": "a defect of specrig-host; the trace is in the job's log",
    "HOST_SYSTEMD": "systemd does not answer",
    "HOST_TOOL": "a program of the host is missing or does not answer",
    "HOST_USAGE": "the command line is wrong",
    "JOB_BUSY": "a job of this id runs with other arguments",
    "JOB_DIR": "the jobs' directory cannot be written",
    "JOB_ID": "not a job's id",
    "JOB_LOST": "the job's process ended without a result: killed, or the host was restarted",
    "JOB_START": "systemd did not start the job",
    "PAD_CONFIG": "config.json is missing or has no vocab_size",
    "PAD_DEST": "the destination exists or cannot be made",
    "PAD_DTYPE": "a tensor has a type that this version does not know",
    "PAD_FORMAT": "not safetensors, or a broken file",
    "PAD_TENSOR": "the embedding or the output layer is missing, quantised or of another width",
    "PAD_WIDTH": "a vocabulary can only be widened",
    "PREFLIGHT_INPUT": "what is wanted of the machine cannot be read",
    "PROOF_FAILED": "a service that is active does not complete a prompt",
    "PROOF_SHORT": "fewer drafted tokens are accepted than the service is declared to need",
    "PULL_BROKEN": "the transfer broke off, several times",
    "PULL_DENIED": "the registry refuses the image to this host",
    "PULL_DISK": "no space for the image",
    "PULL_FAILED": "Docker could not pull, for a reason of its own",
    "PULL_JOB": "what is known of the image cannot be read",
    "PULL_NOT_FOUND": "no such image, tag or digest in the registry",
    "PULL_REFERENCE": "the image has no tag or digest that stays the same",
    "PULL_STALLED": "Docker was silent for too long, several times",
    "PULL_UNREACHABLE": "the registry cannot be reached",
    "READY_GONE": "the container or the main process ended before it was ready",
    "READY_KEY": "the API key cannot be read, or the engine refuses it",
    "READY_MODEL": "the engine serves other names",
    "READY_TIMEOUT": "not ready in time",
    "RETIRE_FAILED": "a service that the plan has no more does not stop",
    "RETIRE_JOB": "the job names no services of a plan",
    "ROLLBACK_FAILED": "the previous one does not start; what ran before runs again, where the cause does not say that it does not either",
    "ROLLBACK_MODELS": "models of the previous one are not on this host any more",
    "ROLLBACK_NOTHING": "nothing was proven before",
    "ROLLBACK_WHICH": "several services have a record; name one",
    "SHARE_ALLOW": "not a network",
    "SHARE_LISTEN": "the address cannot be listened on",
    "STAGE_BUSY": "another stager is at work",
    "STAGE_CHECKSUM": "bytes that are not the locked ones; thrown away",
    "STAGE_DENIED": "the hub refuses a file",
    "STAGE_DISK": "no space for the models",
    "STAGE_DOWNLOAD": "several attempts in a row brought nothing",
    "STAGE_MANIFEST": "the job is not safe to carry out",
    "STAGE_NOT_FOUND": "a locked file is no longer upstream",
    "STAGE_NO_ARIA2": "aria2c is not installed",
    "STAGE_OFFLINE": "no hub is to be asked, and no sibling or bundle has the model",
    "STAGE_PATH": "the models' directory cannot be written, or a link is in the way",
    "STAGE_TOKEN": "the hub token cannot be read or is not one",
    "START_BAD_UNIT": "systemd cannot read the unit",
    "START_FAILED": "the unit failed; its last lines are in the error",
    "START_LOOP": "the unit failed again after a restart",
    "START_NO_UNIT": "no such unit",
    "START_REFUSED": "systemctl refused",
    "START_TIMEOUT": "not active in time",
    "STORE_DAMAGED": "published files are not what was staged: bits fell over, or somebody wrote to them",
    "STORE_EMPTY": "no published model: nothing was verified",
    "SWITCH_JOB": "the job is not a service of a plan",
    "TUNING_JOB": "the job cannot be read",
    "TUNING_NO_CARD": "a card that is to be tuned is not there",
    "TUNING_NO_DRIVER": "the driver does not answer, so there is nothing to set a limit on",
    "TUNING_PERSISTENCE": "persistence mode is off, and a limit would be lost with the last program",
    "TUNING_RANGE": "a power limit that the card itself does not take; no card was touched",
    "TUNING_REFUSED": "a limit was set and did not hold",
    "UPGRADE_HELD": "this plan was tried and taken back before; nothing was changed, and the host is not at its plan",
    "UPGRADE_STUCK": "neither the new one nor the proven one starts",
    "UPGRADE_UNDONE": "the new one failed; the proven one runs again",
}


class HostError(Exception):
    """A verb fell short (`status` 1) or could not run (`status` 2)."""

    def __init__(self, code: str, cause: str, fix: str, status: int = FELL_SHORT, lines: Sequence[str] = ()) -> None:
        super().__init__(f"{code}: {cause}")
        self.code = code
        self.cause = cause
        self.fix = fix
        self.status = status
        self.lines = list(lines)

    def as_json(self) -> dict[str, Any]:
        """`{code, cause, fix}`, as every verb prints it under `error`; with `lines` where a log says more."""
        base: dict[str, Any] = {"code": self.code, "cause": self.cause, "fix": self.fix}
        return {**base, "lines": self.lines} if self.lines else base
