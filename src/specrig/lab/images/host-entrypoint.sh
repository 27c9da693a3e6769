#!/bin/sh
# Gives systemd the /sys and /proc of a machine of its own, then becomes it.
set -eu
# The engine below may run cgroup v1 and mount it here, or v2 read-only: systemd and the nested Docker get a fresh v2 tree.
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 /sys/fs/cgroup
# Only the machine's own root cgroup has no cgroup.type: without a private namespace, move into a group of our own first.
if [ ! -e /sys/fs/cgroup/cgroup.type ] && [ -z "${SPECRIG_NESTED:-}" ]; then
    mkdir -p "/sys/fs/cgroup/specrig-$(hostname)"
    echo $$ > "/sys/fs/cgroup/specrig-$(hostname)/cgroup.procs"
    SPECRIG_NESTED=1 exec unshare --cgroup "$0" "$@"
fi
unset SPECRIG_NESTED
# Read-only unless the container is privileged; then it is no mount of its own.
! mountpoint -q /proc/sys || mount -o remount,rw /proc/sys
mount --make-rshared /
[ -e /etc/ssh/ssh_host_ed25519_key ] || ssh-keygen -q -t ed25519 -N '' -C '' -f /etc/ssh/ssh_host_ed25519_key
exec /sbin/init "$@"
