# A throw-away rig: Debian with systemd, SSH and a sudo user, as a real rig is before its first converge.
ARG BASE
FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
# Man pages and the like are left out: nobody reads them here, and unpacking them is a good part of the build.
RUN printf 'path-exclude=/usr/share/%s/*\n' man doc locale info > /etc/dpkg/dpkg.cfg.d/lab \
 && echo force-unsafe-io >> /etc/dpkg/dpkg.cfg.d/lab \
 && apt-get update \
 && apt-get install -y --no-install-recommends \
      ca-certificates curl dbus iproute2 kmod openssh-server pciutils procps python3 sudo systemd systemd-sysv \
 && apt-get clean && rm -rf /var/lib/apt/lists/* /var/log/*.log /etc/ssh/ssh_host_* /etc/dpkg/dpkg.cfg.d/lab \
# Empty lists with today's date would pass for fresh ones, and Ansible's cache_valid_time would skip the refresh.
 && touch -d @0 /var/lib/apt/lists
# A proxy with a certificate authority of its own stands before many home and company networks.
COPY controller-ca.crt /usr/local/share/ca-certificates/controller.crt
RUN update-ca-certificates 2>/dev/null \
 && useradd --create-home --shell /bin/bash rig \
 && echo 'rig ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/rig && chmod 0440 /etc/sudoers.d/rig \
 && : > /etc/machine-id \
# What touches the kernel or the devices of the machine below stays off; a rig of metal has it, a container must not.
 && systemctl mask console-getty.service getty.target systemd-udevd.service systemd-udev-trigger.service \
      systemd-modules-load.service systemd-sysctl.service systemd-remount-fs.service systemd-firstboot.service \
      sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount \
      dev-hugepages.mount dev-mqueue.mount \
      apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer dpkg-db-backup.timer \
 && systemctl enable ssh.service && systemctl set-default multi-user.target
COPY host-entrypoint.sh /usr/local/sbin/host-entrypoint
# systemd's own word for a clean shutdown.
STOPSIGNAL SIGRTMIN+3
ENV container=docker
ENTRYPOINT ["/usr/local/sbin/host-entrypoint"]
